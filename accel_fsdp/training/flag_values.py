"""Refuses values of flags, and combinations of them, that would stop or train wrong, before anything is read."""

from typing import Any

from transformers import TrainingArguments

from accel_fsdp.checkpoints import Store
from accel_fsdp.config import EXPERT_FIELD, Engine
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.exporter import hub
from accel_fsdp.job import Job, Layout, Recipe, combinations, from_run, from_yaml
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training import mesh
from accel_fsdp.training.reporting import profiling


def check(model: Any, data: Any, training: TrainingArguments) -> None:
    for name, value in (("streaming_buffer", data.streaming_buffer), (EXPERT_FIELD, model.expert_parallel_size)):
        if value < 1:
            raise UsageError(f"--{name} {value}", why="the smallest value is 1", fix=f"--{name} 1")
    if training.use_liger_kernel and LaunchEnvironment.now().by_transformers:
        raise UsageError(
            "--use_liger_kernel with tensor or expert parallelism",
            why="its loss takes the whole head, of which each rank has a part",
            fix="leave it out",
        )
    if training.checkpoint_uri:
        Store(training.checkpoint_uri)  # raises if it can't be one
    if training.push_to_hub and LaunchEnvironment.now().rank == 0:
        hub.check_login(training.hub_token)
    _check_trackers(training.report_to)
    if training.profile_steps is not None:
        profiling.steps_of(training.profile_steps)
    _check_unsharded(model)
    _check_combination(model, training)


def _check_trackers(names: list[str]) -> None:
    """Refuses a name that Trainer doesn't know, which it says only once the model is loaded."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UsageError(
                f"--report_to {name} is no tracker of Trainer.{did_you_mean(name, INTEGRATION_TO_CALLBACK)}",
                why="Trainer would stop after loading the model",
                fix=f"none, or one of {', '.join(INTEGRATION_TO_CALLBACK)}",
            )


def _check_unsharded(model: Any) -> None:
    """Refuses adapters with more than LoRA's own matrices, which are tested only in one process and under DDP."""
    engine = from_run.engine_here()
    if model.lora_modules_to_save and engine not in (Engine.NONE, Engine.DDP):
        raise UserError(
            f"--lora_modules_to_save under {engine.label}",
            why="it hasn't been shown to train, save and resume there, and a run with it may hang",
            fix="leave it out, or distributed_type: MULTI_GPU, where the base fits on one GPU",
        )


def _check_combination(model: Any, training: TrainingArguments) -> None:
    enabled = {name for name in combinations.FLAGS if getattr(model, name, False)}
    launch = LaunchEnvironment.now()
    job = Job(
        mesh.layout_here() if launch.by_transformers else Layout(from_run.engine_here()),
        Recipe(model.method, precision=from_yaml.PRECISIONS.get(launch.mixed_precision, "no")),
        optimizer=str(getattr(training.optim, "value", training.optim)),
        recompute="engine" if launch.recomputes_units else "script" if training.gradient_checkpointing else "none",
        state_dict=launch.state_dict_type,
        flags=frozenset(enabled | ({"label_smoothing_factor"} if training.label_smoothing_factor else set())),
    )
    saves = str(getattr(training.save_strategy, "value", training.save_strategy)) != "no"
    for clash in combinations.clashes(job):
        if not clash.mended and (saves or clash.effect != "stops when it saves"):
            raise UserError(f"{clash.what} ({job.engine.label})", why=clash.why, fix=clash.fix)


TRL = {
    "activation_offloading": "--gradient_checkpointing true, or fsdp_offload_params: true in the YAML",
    "config": "write the arguments on the command line; the YAML of --config_file is Accelerate's",
    "dataset_kwargs": "leave it out: chat templates and end tokens are handled by the kind of the rows",
    "dataset_streaming": "--streaming true --max_steps N",
    "eval_packing": "leave it out: the evaluation split is packed as the training split is",
    "evaluation_strategy": "--eval_strategy",
    "group_by_length": "--train_sampling_strategy group_by_length",
    "load_in_8bit": "--load_in_4bit true (QLoRA); FSDP1 can't shard an 8-bit base",
    "lora_target_parameters": "--lora_target_modules: linear layers alone; experts that are not modules stay frozen",
    "lora_task_type": "leave it out: this script trains causal language models alone",
    "loss_type": "leave it out: the loss is TRL's nll, the mean over all tokens of all processes",
    "max_seq_length": "--max_length",
    "model_init_kwargs": "--dtype, --attn_implementation, --model_revision or --trust_remote_code",
    "packing_strategy": "--packing true: best-fit decreasing, no row is cut (TRL's bfd; wrapped has no counterpart)",
    "padding_free": "--packing true, which knows no padding; or --train_sampling_strategy group_by_length",
    "pad_to_multiple_of": "leave it out: rows are padded to the longest of a batch; --packing true saves that",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "router_aux_loss_coef": "router_aux_loss_coef and output_router_logits: true in the model's config.json",
    "shuffle_dataset": "leave it out: rows are shuffled, unless --train_sampling_strategy sequential",
    "torch_dtype": "--dtype",
    "use_bnb_nested_quant": "leave it out: only --bnb_4bit_quant_type and --bnb_4bit_quant_storage are supported",
    "use_liger": "--use_liger_kernel true",
    "warmup_ratio": "--warmup_steps with the share, such as 0.1",
}
"""Flags of TRL and of older Trainers, without dashes, and what to type here."""

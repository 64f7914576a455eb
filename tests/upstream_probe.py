"""One rank of the upstream tests: runs a group of experiments in one process group and prints what each rank saw.

`upstream_probe.py GROUP FOLDER`. Nothing of accel_fsdp stands between the libraries and the experiments but the CPU gap
(`cpu.enable`) and Accelerate's own launcher parser (`jobs`): plain Trainer and Accelerator, no adapters, no SftTrainer.
Rank 0 prints `PROBE {"name": ..., "ranks": [...]}` for each experiment; one that raised on a rank has {"error": ...}.
"""

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.checkpoint.api import CheckpointException
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accel_fsdp.launch import launcher
from accel_fsdp.ranks import cpu

COLLECTIVE_SECONDS = 60
LAYER = "LlamaDecoderLayer"
V1 = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": LAYER,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": False,
    "fsdp_cpu_ram_efficient_loading": False,
}
V2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": LAYER,
    "fsdp_cpu_ram_efficient_loading": False,
}
FULL = {"fsdp_state_dict_type": "FULL_STATE_DICT"}
ROWS = [{"input_ids": [5, 6, 7, 8 + i], "labels": [5, 6, 7, 8 + i]} for i in range(16)]


def rank() -> int:
    return int(os.environ["RANK"])


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    """Two layers, untied, head size 16 so that a RoPE frequency is 10 ** -0.5; the same weights on every rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options})).to(dtype)


def lora(model: Any = None, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model or llama(), LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **options}))


def launched(fsdp: Mapping[str, Any] | None, precision: str = "no", **top: Any) -> None:
    """This process as Accelerate's launcher would have started it for these settings; None: without any YAML."""
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))]:
        if name != "ACCELERATE_TORCH_DEVICE":
            del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if fsdp is None:
        return
    content = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "mixed_precision": precision}
    path = Path(sys.argv[2]) / f"launched-{rank()}.yaml"
    path.write_text(yaml.safe_dump({**content, "fsdp_config": dict(fsdp), **top}))
    os.environ.update(launcher.environment(launcher.launcher_args(path, Path(__file__), ())))


def prepared(model: Any, fsdp: Mapping[str, Any], precision: str = "no", **top: Any) -> tuple[Any, Any, Any]:
    """Accelerator, model and AdamW after `prepare`, without Trainer."""
    launched(fsdp, precision, **top)
    accelerator = Accelerator()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))


def step(model: Any, optimizer: Any = None) -> None:
    ids = torch.tensor([[5, 6, 7, 8 + rank()]])
    model(input_ids=ids, labels=ids).loss.backward()
    if optimizer is not None:
        optimizer.step()


def make_trainer(
    folder: Path, model: Any, settings: Mapping[str, Any] | None, precision: str = "no", **options: Any
) -> Trainer:
    """A Trainer for 2 steps; `options` are TrainingArguments, and `callbacks`."""
    launched(settings, precision)
    callbacks = options.pop("callbacks", None)
    fixed: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": False}
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    pins = {"dataloader_pin_memory": False}
    args = TrainingArguments(output_dir=str(folder), **{**fixed, **quiet, **pins, **options})
    return Trainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=callbacks)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def units(model: Any) -> list[str]:
    """The classes of the modules that are FSDP units."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [m.module for m in FullyShardedDataParallel.fsdp_modules(model)]
    units += [m for m in model.modules() if isinstance(m, FSDPModule)]
    return sorted(type(m).__name__.removeprefix("FSDP") for m in units)


def raised(action: Callable[..., Any], *given: Any, **options: Any) -> str:
    """The exception that an action ends in, as text; empty when it ends well. It must end so on all ranks alike."""
    try:
        action(*given, **options)
    except (Exception, CheckpointException) as error:  # the second is no Exception
        return f"{type(error).__name__}: {error}"
    return ""


def run(name: str, function: Callable[[Path], Any], folder: Path) -> None:
    """Runs one experiment on all ranks, with warnings recorded and not raised, and prints what they saw."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seen = function(folder)
        except (Exception, CheckpointException) as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
    ranks: list[Any] = [seen]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, seen)
    if rank() == 0:
        print("PROBE " + json.dumps({"name": name, "ranks": ranks}), flush=True)


def main() -> None:
    sys.modules["upstream_probe"] = sys.modules["__main__"]
    group, folder = sys.argv[1], Path(sys.argv[2])
    if group != "stock":
        cpu.enable()
        cpu.init_process_group(COLLECTIVE_SECONDS)
    module = __import__(f"upstream_{group}")
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and not name.startswith("_"):
            run(name, function, folder / name)
    cpu.finish(0)


if __name__ == "__main__":
    main()

"""Supervised fine-tuning in plain PyTorch: what Trainer and Accelerate do for `train/sft.py`, with nothing hidden.

torchrun --standalone --nproc-per-node 2 train/native.py \\
    --model_name_or_path MODEL --dataset_name DATA --output_dir runs/native

Reads top to bottom: flags, processes, data, model, sharding, one step, checkpoints, the full state, the whole job. It
runs on GPUs and, with gloo, on CPU processes; a checkpoint resumes on any number of them.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as states
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorForSeq2Seq, HfArgumentParser
from transformers.initialization import no_init_weights

from accel_fsdp import atomic_files, console, models
from accel_fsdp.checkpoints import completeness, file_names, open_checkpoint
from accel_fsdp.errors import UserError, guard
from accel_fsdp.exporter import exported_folder
from accel_fsdp.hardware import host
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import cpu
from accel_fsdp.training import patches
from accel_fsdp.training.data import DataArguments, load, tokenizing
from accel_fsdp.units import counted, gib_or_mib


# Flags: the names of train/sft.py, and what its YAML would say
@dataclass(frozen=True)
class Job:
    """Fine-tunes a causal language model with FSDP, in plain PyTorch."""

    model_name_or_path: str
    dataset_name: str
    output_dir: Path
    fsdp_version: Literal[1, 2] = 2
    strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"] = "full_shard"
    shard_ranks: int = 0  # hybrid: how many ranks share one copy of the model; 0: those of a machine
    wrap: Literal["transformer", "size"] = "transformer"  # a unit is a decoder layer, or has min_num_params weights
    min_num_params: int = 100_000_000
    mixed_precision: Literal["no", "bf16"] = "no"  # weights, sums of gradients and Adam's state stay in float32
    cpu_offload: bool = False  # shards live in host memory between their uses
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] = "BACKWARD_PRE"  # FSDP1; FSDP2 always does PRE
    lora_r: int = 0  # rank of an adapter on every linear layer; 0: full training
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: Literal["linear", "constant"] = "linear"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_length: int = 1024
    num_train_epochs: int = 3
    max_steps: int = 0  # 0: as many as the epochs have
    shuffle: bool = True
    seed: int = 42
    save_steps: int = 500
    resume: bool = False  # from the newest complete checkpoint in output_dir


# Processes: torchrun has set RANK, LOCAL_RANK and WORLD_SIZE
def start(job: Job) -> torch.device:
    """Joins the other ranks and returns this rank's device."""
    launch = LaunchEnvironment.now()
    if not launch.is_rank:
        raise UserError("not started by torchrun", why="it has no peers", fix="torchrun --nproc-per-node N ...")
    if job.fsdp_version == 2 and job.strategy == "no_shard":
        raise UserError("fully_shard with --strategy no_shard", why="it always shards", fix="--fsdp_version 1")
    device = torch.device("cpu") if cpu.is_needed() else torch.device("cuda", launch.local_rank)
    cpu.mend_fsdp1() if device.type == "cpu" else torch.cuda.set_device(device)
    dist.init_process_group(timeout=timedelta(minutes=30))  # NCCL for CUDA tensors, gloo for the CPU's
    torch.manual_seed(job.seed)
    return device


# Data: each rank gets different rows; together they are the global batch
def loader_of(job: Job, tokenizer: Any) -> DataLoader[Any]:
    """Batches of tokenized rows of the train split."""
    split = load.split(load.load(job.dataset_name), "train")
    rows, summary = tokenizing.tokenize(split, tokenizer, DataArguments(job.dataset_name, max_length=job.max_length))
    say(f"train: {summary}")
    sampler: Any = DistributedSampler(rows, shuffle=job.shuffle, seed=job.seed)
    collate = DataCollatorForSeq2Seq(tokenizer)  # pads labels with -100, so padding is never trained
    return DataLoader(rows, job.per_device_train_batch_size, sampler=sampler, collate_fn=collate)


def global_batches(loader: DataLoader[Any], job: Job, place: dict[str, int]) -> Iterator[list[dict[str, Tensor]]]:
    """Yields this rank's part of each global batch, epoch after epoch, from `place` on, and updates `place`."""
    rows = job.per_device_train_batch_size * dist.get_world_size()
    while True:
        loader.sampler.set_epoch(place["epoch"])  # another order in each epoch
        place["row"] -= place["row"] % rows  # after a change of the rows per step, some rows repeat and none is skipped
        batches = itertools.islice(loader, place["row"] // rows, None)
        while group := list(itertools.islice(batches, job.gradient_accumulation_steps)):
            for number, batch in enumerate(group):  # the sampler repeats rows at an epoch's end, which count once
                first, ranks = place["row"] + number * rows + dist.get_rank(), dist.get_world_size()
                batch["labels"][first + ranks * torch.arange(len(batch["labels"])) >= len(loader.dataset)] = -100
            place["row"] += len(group) * rows
            yield group
        place.update(epoch=place["epoch"] + 1, row=0)


# Model: rank 0 reads the weights, the others reserve memory for them without writing to it
def load_model(job: Job) -> Any:
    """Returns the whole model in float32 on the CPU; only rank 0 has its values."""
    config = models.read_config(job.model_name_or_path)
    kind = models.text_class(config)
    if dist.get_rank() == 0:
        model = kind.from_pretrained(job.model_name_or_path, dtype=torch.float32, trust_remote_code=False)
    else:
        with no_init_weights():
            model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.tie_weights()
    if job.lora_r == 0:
        return model
    patches.fix_adapters()  # PEFT doesn't find its tensors inside FSDP's wrappers by itself
    return get_peft_model(model, LoraConfig(r=job.lora_r, lora_alpha=2 * job.lora_r, target_modules="all-linear"))


# Sharding: a unit is gathered when it computes, and freed afterwards; all other weights belong to the root unit
def units_of(model: Any, job: Job) -> list[nn.Module]:
    """The modules that become units, inner modules before outer ones."""
    inside_out = list(reversed([*model.modules()][1:]))
    if job.wrap == "transformer":
        names = {layer.name for layer in models.wrap_classes(model)}
        return [module for module in inside_out if type(module).__name__ in names]
    tied = {model.get_input_embeddings().weight} & {model.get_output_embeddings().weight}  # can't be in two units
    units, unit_parts = [], set()
    for module in inside_out:
        left = {*module.parameters()} - unit_parts
        large = sum(parameter.numel() for parameter in left) >= job.min_num_params
        if large and not tied & left and not isinstance(module, nn.ModuleList):  # a list has no forward
            units.append(module)
            unit_parts |= left
    return units


def mesh_of(job: Job, device: torch.device) -> dist.DeviceMesh:
    """A mesh of all ranks in a row; for a hybrid strategy a table with a copy of the model in each row."""
    world, shards = dist.get_world_size(), job.shard_ranks or LaunchEnvironment.now().local_world_size
    if shards == 1 and job.fsdp_version == 1 and job.strategy.startswith("hybrid"):
        what, why = "FSDP1 with copies on one rank each", "the replicas would not exchange gradients"
        raise UserError(what, why=why, fix="--strategy no_shard")
    shape = (world // shards, shards) if job.strategy.startswith("hybrid") else (world,)
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model: Any, job: Job, device: torch.device) -> Any:
    """Wraps the model; every rank then holds its shard of rank 0's values."""
    units, mesh = units_of(model, job), mesh_of(job, device)
    low = torch.bfloat16 if job.mixed_precision == "bf16" else None
    offload = job.cpu_offload and device.type != "cpu"
    if job.fsdp_version == 1:
        strategy = "_HYBRID_SHARD_ZERO2" if job.strategy == "hybrid_shard_zero2" else job.strategy.upper()
        return fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda module: module in units),
            mixed_precision=fsdp.MixedPrecision(param_dtype=low, reduce_dtype=torch.float32) if low else None,
            cpu_offload=fsdp.CPUOffload(offload_params=offload),
            backward_prefetch=fsdp.BackwardPrefetch[job.backward_prefetch],
            device_id=device,
            sync_module_states=True,  # rank 0 sends its values
            use_orig_params=True,  # parameters keep their names; frozen and trained ones may share a unit
            device_mesh=mesh,
        )
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    for module in [*units, model]:
        fsdp.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=job.strategy in ("full_shard", "hybrid_shard"),
            mp_policy=fsdp.MixedPrecisionPolicy(low, torch.float32 if low else None),
            offload_policy=fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy(),
        )
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
    states.set_model_state_dict(model, weights, options=options)
    return model


# One step: the loss is the mean over all tokens of the global batch, on all ranks
def train_step(model: Any, batches: list[dict[str, Tensor]], job: Job, device: torch.device) -> float:
    """Computes the clipped gradients of a global batch and returns its mean loss per token.

    FSDP averages gradients over ranks, which is right only if all have equally many tokens: hence `world / tokens`. It
    does so after each micro-batch; `no_sync` would save that traffic, but keep the gradients unsharded.
    """
    tokens = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum().to(device)
    dist.all_reduce(tokens)
    total = torch.zeros((), device=device)
    for batch in batches:
        labels = batch.pop("labels")[:, 1:].to(device)
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * dist.get_world_size() / tokens).backward()
        total += loss.detach()
    dist.all_reduce(total)
    if job.fsdp_version == 1:
        norm = float(model.clip_grad_norm_(job.max_grad_norm))
    else:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm).full_tensor())
    mean = float(total / tokens)
    if not math.isfinite(mean + norm):  # on all ranks alike, and before the optimizer's step
        what = f"training diverged: the loss is {mean}, the gradient norm {norm}"
        raise UserError(what, why="every later step would be NaN too", fix="a lower --learning_rate, and --resume")
    return mean


# Checkpoints: every rank writes its shards, and any number of ranks can read them
@dataclass
class State(dcp.stateful.Stateful):
    """A run's state. It counts the place in the data in rows, so that any world size can resume it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    place: dict[str, int]

    def state_dict(self) -> dict[str, Any]:
        """Called by `dcp.save`, and by `dcp.load`, which reads into the returned tensors."""
        trained = states.StateDictOptions(ignore_frozen_params=True)
        model, optimizer = states.get_state_dict(self.model, self.optimizer, options=trained)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by `dcp.load` with the values that it has read."""
        read = {"model_state_dict": state_dict["model"], "optim_state_dict": state_dict["optimizer"]}
        states.set_state_dict(self.model, self.optimizer, **read, options=states.StateDictOptions(strict=False))
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.place.update(state_dict["place"])


def checkpoint_of(job: Job) -> Path | None:
    """Returns the newest complete checkpoint with --resume, else None."""
    complete = [path for path in file_names.checkpoints(job.output_dir) if completeness.is_whole_dcp(path)]
    if job.resume != bool(complete):
        what = f"{job.output_dir} holds {len(complete)} complete checkpoints"
        raise UserError(what, why="a run resumes one, or begins in a folder without any", fix="add or drop --resume")
    if complete and (refusal := open_checkpoint.refusal(complete[-1])):
        raise refusal
    return complete[-1] if complete else None


# The full state: gathered on the CPU of rank 0, which writes it and reopens it
def save_full(model: Any, job: Job, tokenizer: Any, expected: exported_folder.Expected) -> None:
    """Writes OUTPUT/final in the Hugging Face layout, complete or not at all. Call on all ranks."""
    full = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        with atomic_files.replaced_folder(job.output_dir / file_names.FINAL) as folder:
            unwrapped = model.module if job.fsdp_version == 1 else model
            unwrapped.save_pretrained(folder, state_dict=exported_folder.without_tied_copies(full, expected.ties))
            tokenizer.save_pretrained(folder)
            tensors = exported_folder.verify(folder, expected)
            say(f"saved and verified: {job.output_dir / 'final'} ({counted(tensors, 'tensor')})")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        console.say(line)


# The whole job
def main() -> None:
    started, job = time.perf_counter(), HfArgumentParser(Job).parse_args_into_dataclasses()[0]
    device, checkpoint = start(job), checkpoint_of(job)
    tokenizer = models.read_tokenizer(job.model_name_or_path)
    loader, model = loader_of(job, tokenizer), load_model(job)
    expected = exported_folder.expected_tensors(model, trained_as=None)
    model = shard(model, job, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=job.weight_decay)
    steps = job.max_steps or job.num_train_epochs * -(-len(loader) // job.gradient_accumulation_steps)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / steps if job.lr_scheduler_type == "linear" else 1.0)
    state = State(model, optimizer, scheduler, {"step": 0, "epoch": 0, "row": 0})
    if checkpoint:
        with patches.reading_as_data():  # torch unpickles parts of it, which would run code of whoever wrote it
            dcp.load({"job": state}, checkpoint_id=checkpoint)
    losses, groups = [], global_batches(loader, job, state.place)
    model.train()
    for step in range(state.place["step"] + 1, steps + 1):
        losses.append(train_step(model, next(groups), job, device))
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step} of {steps}: loss {losses[-1]:.4f}, learning rate {scheduler.get_last_lr()[0]:.2e}")
        scheduler.step()
        state.place["step"] = step
        if step % job.save_steps == 0 or step == steps:
            dcp.save({"job": state}, checkpoint_id=job.output_dir / f"{file_names.CHECKPOINT}{step}")
    save_full(model, job, tokenizer, expected)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host.peak_memory()
    say(f"{seconds:.1f} s in all; rank 0 had {gib_or_mib(peak)} of {device.type} memory at its peak")
    if dist.get_rank() == 0:
        measured = {"losses": losses, "seconds": seconds, "peak_bytes": peak}
        atomic_files.write_text(job.output_dir / "measured.json", json.dumps(measured))


if __name__ == "__main__":
    code = guard(main)
    cpu.finish(code)
    if code == 0:
        dist.destroy_process_group()
    sys.exit(code)

"""Before training: the ranks compare their settings and what they loaded, which cause no error where they differ."""

import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError
from accel_fsdp.launch import meeting
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training.reporting import lineage

OF_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model's config about its origin."""


def compare(*parts: meeting.Settings) -> None:
    """Raises a UserError, the same on all ranks, if their settings differ. Call on all ranks, before training."""
    if not dist.is_initialized():
        return
    machine = f"{LaunchEnvironment.now().machine_rank} ({socket.gethostname()})"
    of_ranks: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(of_ranks, (machine, {name: value for part in parts for name, value in part.items()}))
    except RuntimeError as error:  # gloo's or NCCL's own
        why, fix = "each rank needs all others from here on", "see what the other rank printed"
        raise UserError("another rank ended while it loaded the model or the data", why=why, fix=fix) from error
    if differs := meeting.difference(of_ranks):
        raise differs


def of_arguments(model: Any, data: Any, training: Any) -> meeting.Settings:
    """The settings of this rank: arguments, Accelerate's variables from the YAML, script, versions, environment."""
    arguments = {**asdict(model), **asdict(data), **training.to_dict()}
    return meeting.of_job(os.environ, arguments, Path(sys.argv[0]))


def of_checkpoint(checkpoint: str | None, apart: bool) -> meeting.Settings:
    """The checkpoint that this rank resumes, with a digest of its list of files unless it is each machine's own."""
    folder = Path(checkpoint or "none")
    files = (folder / name for name in (file_names.MARKER, file_names.TRAINER_STATE))
    file = None if apart else next((file for file in files if file.exists()), None)
    return {"checkpoint": folder.name, "checkpoint.content": meeting.digest_of(file) if file else "none"}


def of_data(settings: lineage.Settings, held_out: Any, tokenizer: Any) -> meeting.Settings:
    """The tokenizer, and the number and digest of the rows, if this rank has read them."""
    read = settings.get("data", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return {
        "rows": str(read["rows"]) if "rows" in read else None,
        "rows.content": read.get(lineage.CONTENT),
        "evaluation.content": lineage.digest(held_out) if held_out is not None and "rows" in read else None,
        "tokenizer": meeting.digest_of(content.encode()),
        "chat_template": meeting.digest_of(str(tokenizer.chat_template).encode()),
        "tokenizer.marks": f"{tokenizer.eos_token} {tokenizer.pad_token} {tokenizer.padding_side}",
    }


def of_model(model: nn.Module, receives_weights: bool) -> meeting.Settings:
    """The model's config, and a digest of a sample of each tensor, unless the tensors come from rank 0."""
    config: Any = model.config
    described = {f"model.{name}": str(value) for name, value in config.to_dict().items() if name not in OF_CONFIG}
    return {**described, "weights": None if receives_weights else _digest(model)}


def _digest(model: nn.Module) -> str:
    """A hash of each tensor's name, kind and the 512 elements at each end."""
    digest = xxhash.xxh3_64()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel() and not tensor.is_meta and not isinstance(tensor, DTensor):  # ZeRO-3's are empty
            flat = tensor.detach().reshape(-1)
            digest.update(torch.cat([flat[:512], flat[-512:]]).cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()

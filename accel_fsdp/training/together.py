"""Before training: the ranks compare their settings and what they loaded, which cause no error where they differ."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError
from accel_fsdp.launch import agreement
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training.reporting import lineage

if TYPE_CHECKING:
    from torch import nn

PATHS = frozenset({"model_name_or_path", "dataset_name", "chat_template_path", "resume_from_checkpoint"})
"""Arguments of which only the last part of the path is compared: machines may store the same thing elsewhere."""
OF_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model's config about its origin."""
SAMPLED, BLOCKS = 1024, 16
"""The number of elements that are compared of each tensor, in this many evenly spaced blocks, the last at its end."""


def compare(*parts: agreement.Settings) -> None:
    """Raises a UserError, the same on all ranks, if their settings differ. Call on all ranks, before training."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    launch, settings = LaunchEnvironment.now(), {group: values for part in parts for group, values in part.items()}
    digests = {group: agreement.digest_of_settings({group: values}) for group, values in settings.items()}
    seen = {pair for own in _gathered(digests) for pair in own.items()}
    if len(seen) > len({group for group, _ in seen}):
        agreement.compare(_gathered((agreement.Member(launch.rank, launch.machine_rank), settings)))


def _gathered(own: Any) -> list[Any]:
    """The values of all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(of_ranks, own)
    except RuntimeError as error:  # gloo's or NCCL's own
        why, fix = "each rank needs all others from here on", "see what the other rank printed"
        raise UserError("another rank ended while it loaded the model or the data", why=why, fix=fix) from error
    return of_ranks


def of_arguments(model: Any, data: Any, training: Any) -> agreement.Settings:
    """The settings of this rank: arguments, Accelerate's variables from the YAML, script, versions, environment."""
    values = {**asdict(model), **asdict(data), **training.to_dict()}
    compared = {name: value for name, value in values.items() if not agreement.is_own(name)}
    last_part = {name: lineage.last_part if name in PATHS else agreement.portable for name in compared}
    arguments = {name: last_part[name](value) if isinstance(value, str) else value for name, value in compared.items()}
    return {**agreement.of_job(os.environ, Path(sys.argv[0])), "arguments": agreement.flat(arguments)}


def of_checkpoint(checkpoint: str | None, apart: bool) -> agreement.Settings:
    """The checkpoint that this rank resumes: its name, and a digest of its list of files, or else of Trainer's log.

    `apart`: each machine has written a checkpoint of its own, with other files.
    """
    if checkpoint is None or apart:
        return {"checkpoint": {"folder": Path(checkpoint).name if checkpoint else ""}}
    paths = (Path(checkpoint) / name for name in (file_names.MARKER, file_names.TRAINER_STATE))
    content = next((agreement.digest_of(path) for path in paths if path.exists()), "")
    return {"checkpoint": {"folder": Path(checkpoint).name, "content": content}}


def of_data(settings: agreement.Settings, held_out: Any, tokenizer: Any) -> agreement.Settings:
    """The tokenizer, and the number and digest of the rows, if this rank has read them."""
    data_settings = settings.get("data", {})
    rows = {f"training: {name}": data_settings[name] for name in ("rows", lineage.CONTENT) if name in data_settings}
    if rows and held_out is not None:
        rows |= {"evaluation: rows": len(held_out), f"evaluation: {lineage.CONTENT}": lineage.digest(held_out)}
    return {"tokenizer": _tokenizer_settings(tokenizer), **({"data": rows} if rows else {})}


def _tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "vocabulary and rules": agreement.digest_of(content.encode()),
        "chat template": agreement.digest_of(str(tokenizer.chat_template).encode()),
        **{name: str(getattr(tokenizer, name)) for name in ("eos_token", "pad_token", "padding_side")},
    }


def of_model(model: "nn.Module", receives_weights: bool) -> agreement.Settings:
    """The model's config, and a digest of a sample of each tensor, unless the tensors come from rank 0."""
    config: Any = model.config
    described = {name: value for name, value in config.to_dict().items() if name not in OF_CONFIG}
    weights = {} if receives_weights else {"weights": dict(_tensors(model))}
    return {"model": agreement.flat(described), **weights}


def _tensors(model: "nn.Module") -> Iterator[tuple[str, str]]:
    import xxhash

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        yield name, f"{kind} {xxhash.xxh3_64_hexdigest(_sample(tensor.detach()))}"


def _sample(tensor: torch.Tensor) -> memoryview | bytes:
    """Some elements of a tensor; empty without memory (ZeRO-3, meta device), and for a DTensor."""
    if not tensor.numel() or tensor.is_meta or isinstance(tensor, DTensor):
        return b""
    flat = tensor.reshape(-1)
    if len(flat) > SAMPLED:
        length = SAMPLED // BLOCKS
        step, rest = divmod(len(flat) - length, BLOCKS - 1)
        flat = flat[rest:].as_strided((BLOCKS, length), (step, 1)).reshape(-1)
    return flat.cpu().view(torch.uint8).numpy().data

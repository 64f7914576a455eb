"""Before training: the ranks compare their settings and what they loaded, and end together if one fails.

Data or weights that differ between machines cause no error in training. A rank that fails while loading would leave the
others waiting in a collective; `hang_watch` only watches from the start of training on.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel_fsdp import console, errors
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import LET_RANK_ZERO_SPEAK_SECONDS, UserError, in_a_line
from accel_fsdp.launch import FAILED, Address, JsonStore, agreement, beats
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training.reporting import lineage

if TYPE_CHECKING:
    from torch import nn

PREFIX = "accel_fsdp/together"
_jobs = itertools.count()
"""A number for each job of this process: they may share a store."""
POLL_SECONDS, MEET_SECONDS = 1.0, 10.0
RANKS_PER_SECOND = 100
"""Limits how often ranks ask the store for a failure."""
PATHS = frozenset({"model_name_or_path", "dataset_name", "chat_template_path", "resume_from_checkpoint"})
"""Arguments of which only the last part of the path is compared: machines may store the same thing elsewhere."""
OF_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model's config about its origin."""
SAMPLED, BLOCKS = 1024, 16
"""The number of elements that are compared of each tensor, in this many evenly spaced blocks, the last at its end."""


class Peers:
    """The ranks of this job before training. Use it around the loading: `with together.Peers(seconds) as ranks`."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how much longer than the others a rank may take to load."""
        launch = LaunchEnvironment.now()
        self.seconds, self.local_rank = seconds, launch.local_rank
        self.own = agreement.Member(launch.rank, launch.machine_rank)
        self.several = dist.is_initialized() and dist.get_world_size() > 1
        self.machines = launch.machines
        self._prefix = f"{PREFIX}/{launch.restarts}/{next(_jobs)}"  # torchrun keeps the store when it restarts ranks
        self._over, self._fails_itself = threading.Event(), False

    def __enter__(self) -> "Peers":
        if self.several:
            self.store = beats.store_of_job(self._prefix)
            if self.machines > 1:  # on one machine the launcher ends the others
                threading.Thread(target=self._watch, args=(beats.store_of_job(self._prefix),), daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.compare("ready", {})  # wait for all: another rank may still fail
        elif self.several and self.machines > 1:
            self._fails_itself = isinstance(error, UserError)
            if not self._fails_itself:  # often a collective that lacks a failed rank: the watch knows which
                time.sleep(2 * self._poll_seconds)
            self._report(error)
        self._over.set()

    def compare(self, name: str, settings: agreement.Settings) -> None:
        """Raises a UserError if the settings of the ranks differ. Call on all of them."""
        if self.several:
            wait = "; --ddp_timeout SECONDS waits longer"
            agreement.compare(self.store, name, self.own, dist.get_world_size(), settings, self.seconds, wait)

    # When a rank fails

    @property
    def _poll_seconds(self) -> float:
        return max(POLL_SECONDS, dist.get_world_size() / RANKS_PER_SECOND)

    def _report(self, error: BaseException) -> None:
        """Reports to the other machines why this rank ends, and gives them time to read the report."""
        if isinstance(error, agreement.Differs):  # all ranks raise it
            return
        what = in_a_line(error)
        note = {"rank": self.own.number, "what": f"rank {self.own.number} on machine {self.own.place} failed: {what}"}
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("failed", "", json.dumps(note))
            heard = [f"heard/{machine}" for machine in range(self.machines) if machine != self.own.machine]
            self.store.wait(heard, timedelta(seconds=3 * self._poll_seconds))

    def _watch(self, store: Any) -> None:
        launchers = _launchers_store()
        while not self._over.wait(self._poll_seconds):
            try:
                what = self._failure(store, launchers)
            except RuntimeError:
                what = f"no answer from {LaunchEnvironment.now().main_address}, where the ranks meet"
            if what and self._fails_itself:
                return
            if what and not self._over.is_set():
                self._end(what)

    def _failure(self, store: Any, launchers: JsonStore | None) -> str:
        """The failure of another rank, as reported by it or its launcher; empty if no other rank failed."""
        if not store.check(["failed"]):
            return (launchers.get(FAILED) or "") if launchers is not None else ""
        note = json.loads(store.get("failed"))
        store.set(f"heard/{self.own.machine}", "")
        return "" if note["rank"] == self.own.number else str(note["what"])

    def _end(self, what: str) -> NoReturn:
        """Ends this process: its main thread may wait in a collective that never returns."""
        why, fix = "training can't begin without it", "fix the cause there, then start again"
        error = UserError(what, why=why, fix=fix)
        errors.report_to_launcher(error)
        if self.local_rank:
            time.sleep(LET_RANK_ZERO_SPEAK_SECONDS)
        else:
            console.say(str(error), lines=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


def _launchers_store() -> JsonStore | None:
    """The store in which `accel-fsdp launch` reports failed ranks: a killed rank can't report itself."""
    address, port = LaunchEnvironment.now().launchers_address
    with contextlib.suppress(RuntimeError):
        return Address(address, port, hosts=False).open(MEET_SECONDS) if address else None
    return None


# The compared settings


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

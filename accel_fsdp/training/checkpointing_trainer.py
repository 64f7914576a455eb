"""A Trainer whose checkpoints survive: whole or not at all, resumed with every part, saved when it is told to stop."""

import contextlib
import copy
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, set_seed
from transformers.trainer_pt_utils import safe_globals

from accel_fsdp import atomic_files, console, disks
from accel_fsdp.checkpoints import Origin, completeness, file_names, optimizer_names, summary, tensor_names
from accel_fsdp.config import ANY_FSDP, Engine, zero_name
from accel_fsdp.errors import Stopped, UserError
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import counting, inspect_model, state_bytes
from accel_fsdp.training import resuming
from accel_fsdp.training.lineage import History
from accel_fsdp.training.preemption import Stop
from accel_fsdp.units import gib_or_mib

RELIES_ON = (
    Internal(f"{TRAINER}.train", "self resume_from_checkpoint *"),
    Internal(f"{TRAINER}._run_epoch"),
    Internal(f"{TRAINER}._finalize_training", "self *"),
    Internal(f"{TRAINER}._get_output_dir", "self trial"),
    Internal(f"{TRAINER}._save_checkpoint", "self model trial"),
    Internal(f"{TRAINER}._init_training_state", "self max_steps *"),
    Internal(f"{TRAINER}._load_from_checkpoint", "self resume_from_checkpoint model"),
    Internal(f"{TRAINER}._load_best_model", "self"),
    Internal(f"{TRAINER}._load_optimizer_and_scheduler", "self checkpoint"),
    Internal(f"{TRAINER}._load_rng_state", "self checkpoint"),
    Internal("torch.distributed.checkpoint.state_dict:_init_optim_state", "optim"),
    Internal("torch.distributed.fsdp._common_utils:_get_param_to_fqns", "model dedup_shared_params"),
    Internal("accelerate.utils:FullyShardedDataParallelPlugin.set_state_dict_type", "self state_dict_type"),
)
SHOWN_SECONDS = 30
"""How long NFS may take to show another machine's new names, by its default acdirmin."""
FSDP1_LOG = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
WRITE_ERRORS = (OSError, RuntimeError, CheckpointException, SafetensorError)
GPU_STATES = ("cuda", "npu", "hpu", "mlu", "musa")
"""In a checkpoint's random states, those that Trainer keeps for one device or for all."""
GROUPING = ("group_by_length", "batch_rebalance")


class SurvivingTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` that loses nothing but the steps since its last complete checkpoint."""

    def __init__(self, *args: Any, history: History | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history = history or History({})
        self.stop = Stop()
        self.add_callback(self.stop)
        self.checkpoint_bytes, self.export_bytes = self._predicted_bytes()

    def _origin(self) -> Origin:
        args = self.args
        zero = getattr(self.accelerator.state, "deepspeed_plugin", None)
        engine = zero_name(zero.zero_stage) if zero is not None else Engine.DDP.value
        engine = ANY_FSDP if self.is_fsdp_enabled else engine
        rows = self.get_total_train_batch_size(args)
        return Origin(engine, args.world_size, rows, self.history.settings, self.history.before)

    @property
    def _on_tpu(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.XLA)

    # Training, and how it ends

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Trains, from the checkpoint where one is given.

        Raises:
            UserError: the checkpoint can't be resumed as this run is set up, the disk is too small, or a rank is gone.
            Stopped: SIGTERM, SIGUSR1 or Ctrl-C came, and there is a checkpoint to go on from.
        """
        if resume_from_checkpoint is not None and not self._on_tpu:  # its files are others again
            grouping = str(self.args.train_sampling_strategy) in GROUPING
            resuming.check(Path(resume_from_checkpoint), self._origin(), grouping, not self.args.ignore_data_skip)
        try:
            self._check_shared_disk(resume_from_checkpoint)
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except Stopped:
            self.stop.ignore()
            raise
        except BaseException as error:
            if self.args.local_process_index != 0:
                self.stop.give_in()
            if isinstance(error, RuntimeError) and _is_lost(error):
                self._refuse(f"another rank is gone: {_cause(error)}", error)
            raise
        finally:
            self.stop.release()

    def _run_epoch(self, **kwargs: Any) -> None:
        """Trainer takes one step too many when it resumes a run whose steps were all done (transformers 5.23)."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _finalize_training(self, *args: Any) -> Any:
        if self.stop.agreed:
            raise Stopped(
                f"{self.stop.agreed} after step {self.state.global_step}",
                why=f"saved: {self._folder()}",
                fix="the same command with --resume_from_checkpoint true",
            )
        with self._own_retention():
            return super()._finalize_training(*args)

    # Saving

    def _folder(self, trial: Any = None) -> Path:
        return Path(self._get_output_dir(trial)) / f"{file_names.CHECKPOINT}{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that counts only once every file of every rank is on disk."""
        folder = self._folder(trial)
        self._together(lambda: self._begin(folder))
        with self._abandoned_on_errors(folder), self._own_retention():
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        hashes = self._hashes(folder)
        self._together(lambda: self._seal(folder, hashes))

    @contextlib.contextmanager
    def _abandoned_on_errors(self, folder: Path) -> Iterator[None]:
        """Leaves no half-written checkpoint where the block fails to write it, and the complete one that it replaces.

        Raises:
            UserError: the disk is full, or what else kept a library from writing.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # which is a BaseException
            lost = _is_lost(error)
            full = "" if lost else disks.full(error, folder)
            if not (full or isinstance(error, (*WRITE_ERRORS, UserError))):
                raise
            if not lost and self.args.should_save:
                completeness.abandon(folder)
            if isinstance(error, UserError) and not full:
                raise
            self._refuse(f"cannot save {folder}: {full or _cause(error)}", error, "free some space" if full else "")

    def _begin(self, folder: Path) -> None:
        with self._abandoned_on_errors(folder):
            completeness.begin(folder)
        newest = completeness.choose(folder.parent).newest
        needed = completeness.size_bytes(newest) if newest else self.checkpoint_bytes
        try:
            self._check_room(needed, f"{folder.name} takes {gib_or_mib(needed)}")
        except UserError:
            completeness.abandon(folder)
            raise

    def _hashes(self, folder: Path) -> dict[str, str] | None:
        """Of all files, each taken by the rank that wrote it; None where a rank has files that no other one sees."""
        if self._on_tpu or self.args.save_on_each_node:
            return None
        failed: Exception | None = None
        try:
            found = completeness.own_hashes(folder, self.args.process_index, self.args.world_size)
        except (OSError, UserError) as error:
            found, failed = {}, error
        parts: list[tuple[dict[str, str], str]] = gather_object([(found, _cause(failed) if failed else "")])
        if why := next(filter(None, (why for _, why in parts)), ""):
            if self.args.should_save:
                completeness.abandon(folder)
            self._refuse(f"cannot save {folder}: {why}", failed or OSError(why))
        return {name: one for part, _ in parts for name, one in part.items()}

    def _seal(self, folder: Path, hashes: dict[str, str] | None) -> None:
        with self._abandoned_on_errors(folder):
            completeness.seal(folder, self._origin(), hashes)
        completeness.retire(folder.parent, self.args.save_total_limit, self.state.best_model_checkpoint)

    @contextlib.contextmanager
    def _own_retention(self) -> Iterator[None]:
        """Trainer counts half-written checkpoints as any other, and at the end deletes the last one for the best."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _together(self, act: Callable[[], None]) -> None:
        """Acts on the ranks that write; what one raises all raise, so that none waits for one that has left."""
        failed: list[tuple[str, str, str]] = []
        if self.args.should_save:
            try:
                act()
            except UserError as error:
                failed = [(error.what, error.why, error.fix)]
        everywhere = failed if self._on_tpu else gather_object(failed)
        if everywhere:
            what, why, fix = everywhere[0]
            raise UserError(what, why=why, fix=fix)

    def _refuse(self, what: str, error: BaseException, first: str = "") -> NoReturn:
        newest = completeness.choose(Path(self.args.output_dir)).newest
        raise UserError(
            what,
            why=f"training stops; {newest} is the newest complete checkpoint" if newest else "training stops",
            fix=f"{first or 'fix the cause'}, then {'--resume_from_checkpoint true' if newest else 'start again'}",
        ) from error

    # Disk

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        found = super()._init_training_state(max_steps, *args)
        self._together(self._check_whole_run)
        return found

    def _check_shared_disk(self, resume_from: str | None) -> None:
        """Shards lie together only where all ranks write to one folder; and all must go on from the same step.

        Raises:
            UserError: a rank of another machine sees another disk. On all ranks.
        """
        if self._on_tpu or not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".shared-", dir=folder, ignore_cleanup_errors=True) as probe:
            [first, *_] = gather_object([Path(probe).name])
            seen = gather_object([(_appears(folder / first), resume_from)])
            self.accelerator.wait_for_everyone()
        if all(there for there, _ in seen) and len({start for _, start in seen}) == 1:
            return
        raise UserError(
            f"{self.args.output_dir} is not the same folder on all machines",
            why="each would keep its own ranks' part of every checkpoint, and none would be complete",
            fix="--output_dir on a disk that all of them share",
        )

    def _check_whole_run(self) -> None:
        count = self._checkpoints_to_come()
        text = f"{count} checkpoints of about {gib_or_mib(self.checkpoint_bytes)} and the export take"
        needed = count * self.checkpoint_bytes + self.export_bytes
        self._check_room(needed, f"{text} {gib_or_mib(needed)}")

    def _check_room(self, needed_bytes: int, text: str) -> None:
        output = atomic_files.existing_part(Path(self.args.output_dir))
        free = shutil.disk_usage(output).free
        if needed_bytes > free:
            raise UserError(
                f"{text}, {gib_or_mib(free)} are free at {output}",
                why="the run would end at a full disk",
                fix="free some space, a lower --save_total_limit, fewer saves (--save_steps), or another --output_dir",
            )

    def _checkpoints_to_come(self) -> int:
        """How many more checkpoints will lie on the disk at once than do now."""
        left, epochs = self.state.max_steps - self.state.global_step, self.state.num_train_epochs
        per_epoch = self.state.max_steps / epochs if epochs <= self.state.max_steps else left  # unknown of a stream
        every = {"steps": self.state.save_steps, "epoch": per_epoch, "best": left}.get(
            str(self.args.save_strategy.value)
        )
        saves = math.ceil(left / max(every, 1)) if every else 0
        limit = self.args.save_total_limit
        there = sum(not completeness.flaw(path) for path in file_names.checkpoints(Path(self.args.output_dir)))
        return min(saves, max(limit + 1 - there, 1)) if limit and limit > 0 else saves

    def _predicted_bytes(self) -> tuple[int, int]:
        """Of a checkpoint and of the export, from the model before it is sharded.

        Mixed precision under FSDP and ZeRO has float32 masters of what is trained. FULL_STATE_DICT stores the weights
        a second time for Hugging Face. An adapter goes without its base.
        """
        mixed, fsdp, zero = self.accelerator.mixed_precision != "no", self.is_fsdp_enabled, self.is_deepspeed_enabled
        trained = {
            p: state_bytes.weight_bytes(p.element_size(), mixed, fsdp, zero)
            for p in self.model.parameters()
            if p.requires_grad
        }
        masters = sum(counting.numel(p) * each for p, each in trained.items())
        optimizer = self._optimizer_bytes(trained)
        adapter = hasattr(self.model, "peft_config")
        held = (counting.numel(p) * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        weights = masters + (0 if adapter else sum(held))
        if zero:
            stored = trained if adapter else self.model.parameters()
            forward = sum(counting.numel(p) * (state_bytes.LOW if mixed else p.element_size()) for p in stored)
            stage = int(self.accelerator.state.deepspeed_plugin.zero_stage)
            return state_bytes.checkpoint_bytes(masters, optimizer, zero_stage=stage, forward=forward), weights
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        full = plugin is not None and "FULL" in str(plugin.state_dict_type)
        return state_bytes.checkpoint_bytes(weights, optimizer, gathered=full), weights

    def _optimizer_bytes(self, trained: Mapping[torch.nn.Parameter, int]) -> int:
        """Of the state of parameters with the bytes of an element; ZeRO's partitions are no embedding's any more."""
        optim = str(self.args.optim.value)
        tables = set() if self.is_deepspeed_enabled else counting.embeddings(self.model)
        shapes = {p: counting.shape(p) for p in trained}
        return sum(state_bytes.optimizer_bytes(optim, shapes[p], each, p in tables) for p, each in trained.items())

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.model, "peft_config") and self.is_fsdp_enabled:
            trained = [tensor_names.clean_name(name) for name, p in self.model.named_parameters() if p.requires_grad]
            resuming.check_adapter(Path(resume_from_checkpoint), trained)
        with self._as_stored(resume_from_checkpoint), self._without_frozen():
            if self._is_filed_otherwise():
                self._load_filed(resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    def _load_best_model(self) -> None:
        checkpoint = self.state.best_model_checkpoint
        with self._as_stored(checkpoint), self._without_frozen():
            if self._is_filed_otherwise() and checkpoint is not None:
                self._load_filed(checkpoint)
            else:
                super()._load_best_model()

    def _is_filed_otherwise(self) -> bool:
        """Whether `save_pretrained` gives the weights other names or shapes in files than they have in the model.

        Such are the fused experts of a mixture, and models with images. Trainer takes from such a file what has the
        model's names, and goes on from the untrained rest with no more than a warning (transformers 5.23).
        """
        own_format = self.is_fsdp_enabled or self.is_deepspeed_enabled or self._on_tpu
        whole = not own_format and not hasattr(self.model, "peft_config")
        return whole and bool(getattr(self.model, "_weight_conversions", None))

    def _load_filed(self, checkpoint: str) -> None:
        """As transformers loads them from a model's folder; float32 holds exactly whatever is stored."""
        config = copy.deepcopy(self.model.config)
        loaded, found = type(self.model).from_pretrained(
            checkpoint, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        if found["missing_keys"]:
            raise KeyError(f"it lacks {min(found['missing_keys'])}")
        self.model.load_state_dict(loaded.state_dict())

    @contextlib.contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """Keeps FSDP1 from naming each frozen weight that an adapter's checkpoint rightly lacks, on every rank."""
        if not hasattr(self.model, "peft_config"):
            yield
            return
        FSDP1_LOG.addFilter(_is_no_absence)
        try:
            yield
        finally:
            FSDP1_LOG.removeFilter(_is_no_absence)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Creates FSDP1's optimizer state before loading into it.

        A fresh optimizer offers no state to fill, so `FSDP.optim_state_dict` asks the checkpoint for nothing and Adam
        restarts from zero, silently (accelerate 1.15). FSDP2's path creates it with this same function of torch.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        with self._as_trained(checkpoint if plugin is not None else None):
            if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:
                from torch.distributed.checkpoint.state_dict import _init_optim_state

                _init_optim_state(self.optimizer.optimizer)
            with self._as_stored(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if checkpoint is not None and isinstance(schedule, LambdaLR):
            self._take_rates(schedule)

    @contextlib.contextmanager
    def _as_trained(self, checkpoint: str | None) -> Iterator[None]:
        """Keeps torch from asking for states that a checkpoint rightly lacks: of parameters without a gradient so far.

        It creates a state for whatever asks for gradients, and wants each from the checkpoint (torch 2.13); such are
        the image encoder and experts that no row has reached. Whatever was not trained at all is missed as ever.
        """
        without = [] if checkpoint is None or self._on_tpu else self._without_state(Path(checkpoint))
        for one in without:
            one.requires_grad_(False)
        try:
            yield
        finally:
            for one in without:
                one.requires_grad_(True)

    def _without_state(self, checkpoint: Path) -> list[torch.nn.Parameter]:
        from torch.distributed.fsdp._common_utils import _get_param_to_fqns

        stored = broadcast_object_list([_names_in(checkpoint) if self.args.process_index == 0 else None])[0]
        if stored is None or not stored.with_state:
            return []
        named = _get_param_to_fqns(self.model, dedup_shared_params=False)
        names = {one: {tensor_names.clean_name(name) for name in names} for one, names in named.items()}
        return [
            one
            for one, own in names.items()
            if one.requires_grad and own & stored.trained and not own & stored.with_state
        ]

    def _take_rates(self, schedule: LambdaLR) -> None:
        """This run's rate for the next step: the stored one is zero where the schedule had come to its end."""
        rates = [
            base * rate(schedule.last_epoch) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates

    @contextlib.contextmanager
    def _as_stored(self, checkpoint: str | None) -> Iterator[None]:
        """Reads a checkpoint in the way it was stored, whatever the YAML says about the next; all failures are one."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        try:
            with contextlib.nullcontext() if plugin is None or checkpoint is None else _kind(plugin, Path(checkpoint)):
                yield
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise UserError(
                f"cannot resume from {checkpoint}: {_cause(error)}",
                why="the checkpoint is incomplete, or was written with other model, LoRA or state dict settings",
                fix="resume with the flags and the YAML of that run, or from an older checkpoint-N",
            ) from error

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """On another number of ranks, those without a state get one of their own; Trainer's would repeat step 0.

        The first rank's has another name where it was the only one, or is now.
        """
        rank, ranks = self.args.process_index, self.args.world_size
        if checkpoint is None or (Path(checkpoint) / file_names.rng_state(rank, ranks)).is_file():
            super()._load_rng_state(checkpoint)
            return
        other = Path(checkpoint) / file_names.rng_state(0, 1 if ranks > 1 else 2)
        if rank == 0 and other.is_file():
            with tempfile.TemporaryDirectory() as folder:
                _convert_rng(other, Path(folder) / file_names.rng_state(0, ranks), ranks)
                super()._load_rng_state(folder)
            return
        set_seed(self.args.seed + self.state.global_step * ranks + rank)
        console.say(f"rank {rank}: no random state in {checkpoint}; dropout differs from here on", style="yellow")


@contextlib.contextmanager
def _kind(plugin: Any, checkpoint: Path) -> Iterator[None]:
    """`plugin` with the state dict type of the checkpoint's files; its configs go along, or they stay the other's."""
    found = summary.facts_of(checkpoint)
    before = plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config
    if found.sharded or found.full:
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("SHARDED_STATE_DICT" if found.sharded else "FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config = before


def _names_in(checkpoint: Path) -> optimizer_names.OptimizerNames | None:
    """None where they can't be read here: torch then says what is wrong, or knows tensors that our reader doesn't."""
    try:
        return optimizer_names.read(checkpoint)
    except UserError:
        return None


def _is_no_absence(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Did not find param with FQN")


def _cause(error: BaseException) -> str:
    """What happened, in a line: of a sharded checkpoint on the first rank that failed; without gloo's advice."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return re.sub(r"^\[[^]]*\] ", "", inspect_model.first_line(error)).partition(" This is typically caused")[0]


def _convert_rng(source: Path, target: Path, ranks: int) -> None:
    """The first rank's random state in the form for that many ranks: of several, it holds those of all GPUs it saw."""
    with safe_globals():
        state = torch.load(source, weights_only=True)
    for name, found in state.items():
        if name in GPU_STATES and isinstance(found, list) != (ranks > 1):
            state[name] = [found] if ranks > 1 else found[0]
    torch.save(state, target)


def _appears(folder: Path) -> bool:
    """Whether this rank sees what rank 0 made; network disks may take a while to show it."""
    until = time.monotonic() + SHOWN_SECONDS
    while folder.name not in os.listdir(folder.parent):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed for want of a rank: NCCL and the store have their own error, gloo a RuntimeError."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)

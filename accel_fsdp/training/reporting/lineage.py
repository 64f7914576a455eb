"""The settings of a run, by name: stored in its checkpoints, compared when a run resumes one, and reported.

A checkpoint holds weights, moments and a place in the data. Learning rate, data set and seed come from the command line
again, and a changed value would go unnoticed: the card would then claim for all steps what is true only for the last
ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import console
from accel_fsdp.checkpoints import completeness, marker
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.units import counted

if TYPE_CHECKING:
    from datasets import Dataset

    from accel_fsdp.training.data import Packed

Settings = Mapping[str, Mapping[str, Any]]
"""Names and values, by the group that they belong to."""

ADAPTER = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "load_in_4bit", "dtype"),
    *("lora_modules_to_save", "use_rslora"),
)
DATA = (
    *("dataset_config", "dataset_train_split", "streaming", "columns", "dataset_text_field", "chat_template_path"),
    *("assistant_only_loss", "completion_only_loss", "max_length", "truncation_mode"),
)
ORDER = ("seed", "data_seed", "train_sampling_strategy", "dataloader_drop_last")
SCHEDULE = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "optim_args"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha"),
)
CONTENT = "content of the rows"
STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
ALWAYS_ALLOWED = frozenset({"length", "precision", "ranks"})
"""Groups whose changes are logged and recorded without permission: people train for longer, in another precision, or
the same steps on another number of ranks."""
HASHED_ROWS = 10_000


@dataclass(frozen=True)
class SettingChange:
    """One setting that differs from the checkpoint's."""

    group: str
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.name == CONTENT:
            return f"{CONTENT} (other tokens)"
        return f"{self.name} {_as_text(self.old)} → {_as_text(self.new)}"


@dataclass(frozen=True)
class History:
    """The settings of this run, and those of the earlier parts of the training, up to the resumed checkpoint."""

    settings: Settings
    before: Sequence[Mapping[str, Any]] = field(default_factory=list)
    changes: list[SettingChange] = field(default_factory=list)
    unknown: bool = False
    """The checkpoint holds no settings to compare with."""
    step: int = 0
    """The last step before this session."""

    def lines(self, checkpoint: str | None) -> list[str]:
        """Lines for the user: the resumed checkpoint, and the settings that change after it."""
        if checkpoint is None:
            return []
        lines = [f"resumed: {checkpoint}, after {counted(completeness.step_of(Path(checkpoint)), 'step')}"]
        if self.unknown:
            lines.append("that checkpoint has no record of its settings: data and schedule aren't compared")
        return [*lines, *(f"changed from here on: {change}" for change in self.changes)]

    def account(self, last_step: int) -> dict[str, Any]:
        """For `run.json`: the steps of this session, and the run's segments with their settings, oldest first."""
        ends = [*self.before, {"last_step": last_step, "settings": self.settings}]
        starts = [1, *(int(segment["last_step"]) + 1 for segment in self.before)]
        segments = [
            {"first_step": start, "last_step": segment["last_step"], "settings": segment["settings"]}
            for start, segment in zip(starts, ends, strict=True)
        ]
        return {"session": {"first_step": self.step + 1, "last_step": last_step}, "segments": segments}


def of_run(checkpoint: str | None, model: Any, data: Any, training: Any, rows: Any) -> History:
    """Compares this run's settings with those of its checkpoint; the first rank logs the changes."""
    hashed = training.local_process_index == 0 and not data.streaming  # one rank of a node reads all rows
    history = follow(
        Path(checkpoint) if checkpoint else None,
        settings(model, data, training, rows if hashed else None),
        accepts=training.resume_with_changes,
        skips_data=not training.ignore_data_skip,
    )
    if training.process_index == 0:
        for line in history.lines(checkpoint):
            console.say(line, style="cyan")
    return history


def settings(model: Any, data: Any, training: Any, rows: "Dataset | Packed | None") -> Settings:
    """The settings of a run, from its arguments. `rows` is the tokenised data set, None if unknown."""
    adapter = {name: getattr(model, name) for name in ADAPTER} if model.use_peft else {}
    packed_to = data.max_length if data.packing else None
    limit = (
        {"max_steps": training.max_steps}
        if training.max_steps > 0
        else {"num_train_epochs": float(training.num_train_epochs)}
    )
    groups = {
        "model": {
            "model_name_or_path": last_part(model.model_name_or_path),
            "model_revision": model.model_revision,
            "use_peft": model.use_peft,
            **adapter,
        },
        "data": {
            "dataset_name": last_part(data.dataset_name),
            **{name: getattr(data, name) for name in DATA},
            **({} if rows is None else {"rows": len(rows), CONTENT: digest(rows)}),
        },
        "order": {
            **{name: getattr(training, name) for name in ORDER},
            "packing": packed_to,
            "streaming_buffer": data.streaming_buffer if data.streaming else None,
        },
        "schedule": {
            "optim": str(getattr(training.optim, "value", training.optim)).removesuffix("_fused"),
            **{name: getattr(training, name) for name in SCHEDULE},
        },
        "length": limit,
        "precision": {"mixed_precision": LaunchEnvironment.now().mixed_precision},
        "ranks": {"ranks": LaunchEnvironment.now().world_size, **{name: getattr(training, name) for name in STEP}},
    }
    plain: Settings = json.loads(json.dumps(groups, default=lambda value: str(getattr(value, "value", value))))
    return plain


def last_part(name: str) -> str:
    """The last part of a path or hub id: the same model or data set may have another path later."""
    return Path(name).name


def digest(rows: "Dataset | Packed") -> str:
    """A hash of every token and label in the order of the rows, independent of their files."""
    import xxhash

    tokens: Any = getattr(rows, "tokens", rows)
    hashed = xxhash.xxh3_128()
    for batch in tokens.with_format("arrow").iter(HASHED_ROWS):
        for name in ("input_ids", "labels"):
            column = batch[name].combine_chunks()
            hashed.update(column.value_lengths().to_numpy(zero_copy_only=False).astype("int64").tobytes())
            hashed.update(column.flatten().to_numpy(zero_copy_only=False).astype("int32").tobytes())
    return hashed.hexdigest()


def follow(checkpoint: Path | None, here: Settings, *, accepts: bool, skips_data: bool = True) -> History:
    """Compares this run's settings with those of the checkpoint that it resumes.

    `accepts`: the user allows every change. Without `skips_data` the data restart, and their order may change.

    Raises:
        UserError: a setting differs that would change the rest of the training.
    """
    if checkpoint is None:
        return History(here)
    origin = marker.origin_of(checkpoint)
    if origin is None or not origin.settings:
        return History(here, unknown=True, step=completeness.step_of(checkpoint))
    differences = list(changes(origin.settings, here))
    free_groups = ALWAYS_ALLOWED if skips_data else ALWAYS_ALLOWED | {"order"}
    step = completeness.step_of(checkpoint)
    _check_length(checkpoint, here, step)
    refused = [change for change in differences if change.group not in free_groups]
    if refused and not accepts:
        raise UserError(
            f"this run's settings differ from those of the run that wrote {checkpoint}: {'; '.join(map(str, refused))}",
            why="the remaining steps would train with other settings than the first ones",
            fix="use the earlier settings; or --resume_with_changes true, which keeps both in run.json and the card",
        )
    ended = [{"last_step": step, "settings": origin.settings}] if differences else []
    return History(here, [*origin.before, *ended], differences, step=step)


def changes(old: Settings, new: Settings) -> Iterator[SettingChange]:
    """Yields the differences of the settings that both have.

    Data with the same content may come from anywhere; only the rank that has read them compares the content.
    """
    old_hash, new_hash = old.get("data", {}).get(CONTENT), new.get("data", {}).get(CONTENT)
    is_same = old_hash is not None and (old_hash == new_hash or (new_hash is None and not new["data"].get("streaming")))
    for group, values in new.items():
        before = old.get(group, {})
        if group == "data" and is_same:
            continue
        if group == "length" and before and before.keys() != values.keys():
            yield SettingChange(
                group, "length", *(" ".join(map(_as_text, next(iter(length.items())))) for length in (before, values))
            )
        for name, value in values.items():
            if name in before and before[name] != value:
                yield SettingChange(group, name, before[name], value)


def _check_length(checkpoint: Path, here: Settings, step: int) -> None:
    max_steps = here["length"].get("max_steps")
    if max_steps is not None and max_steps < step:
        raise UserError(
            f"--max_steps {max_steps}, but {checkpoint} was written after {counted(step, 'step')}",
            why="nothing would be trained, and the model would have more steps than requested",
            fix=f"--max_steps {step} or more; accel-fsdp export {checkpoint} OUT makes a model of it as it is",
        )


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

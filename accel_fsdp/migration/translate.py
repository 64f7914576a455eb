"""Translates the settings of one engine to those of another: the edits, and the change of each key.

Pure. The meanings are those of Accelerate 1.15, and the tests compare them with its parser and plugins. A key without
effect in the old file has none in the new one.
"""

from collections.abc import Mapping
from typing import Any

from accel_fsdp.config import MULTI_CPU, TARGETS, Engine, JobConfig, MigrationTarget, deepspeed_name
from accel_fsdp.errors import UsageError
from accel_fsdp.migration import deepspeed, fsdp
from accel_fsdp.migration.changes import Draft, Migration

SECTIONS = {Engine.FSDP1: "fsdp_config", Engine.FSDP2: "fsdp_config", Engine.DEEPSPEED: "deepspeed_config"}


def plan(job: JobConfig, target: MigrationTarget, layer_class: str = "") -> Migration:
    """Draws up the migration of a file to one of `TARGETS`.

    `layer_class` is the class to wrap where the new file needs one, as `fsdp_transformer_layer_cls_to_wrap` takes it.
    """
    draft = new_draft(job, "deepspeed_config" if target.startswith("zero") else "fsdp_config", layer_class)
    source = _name(draft)
    if source == TARGETS[target]:
        return Migration(source, TARGETS[target], note=f"is {source} already")
    _convert(draft, target)
    return draft.migration(source, TARGETS[target])


def new_draft(job: JobConfig, place: str, layer_class: str = "") -> Draft:
    """A draft whose new section is `place`."""
    _check(job)
    return Draft(job, SECTIONS.get(job.engine, ""), place, layer_class)


def _convert(draft: Draft, target: MigrationTarget) -> None:
    engine, number = draft.job.engine, int(target[-1])
    if target.startswith("zero"):
        steps = {Engine.DDP: deepspeed.ddp_to_zero, Engine.DEEPSPEED: deepspeed.restage}
        steps.get(engine, deepspeed.fsdp_to_zero)(draft, number)
    elif engine is Engine.DEEPSPEED:
        deepspeed.zero_to_fsdp(draft, number)
    elif engine is Engine.DDP:
        deepspeed.ddp_to_fsdp(draft, number)
    elif engine is Engine.FSDP1:
        fsdp.to_fsdp2(draft)
    else:
        fsdp.to_fsdp1(draft)


def _name(draft: Draft) -> str:
    engine = draft.job.engine
    if engine is Engine.DEEPSPEED and "deepspeed_config_file" not in draft.read:
        return deepspeed_name(deepspeed.zero_stage(draft))
    return engine.label


def _check(job: JobConfig) -> None:
    """Refuses a file without a counterpart, or without a meaning to keep."""
    kind = job.values.get("distributed_type")
    if job.engine in (Engine.NONE, Engine.TPU) or kind == MULTI_CPU:
        raise _refusal(f"distributed_type: {kind} can't be migrated", "only FSDP, DeepSpeed and DDP on GPUs can")
    if job.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise _refusal("this is not the config of a local machine", "SageMaker has other keys")
    for section in SECTIONS.values():
        content = job.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            raise _refusal(f"{section} is {content!r}, not a mapping of keys", "its settings are not read")
        for key in content or ():
            if not isinstance(key, str):
                raise _refusal(f"{section} has the key {key!r}, which is not text", "Accelerate stops at it")
    version: Any = job.fsdp("fsdp_version")
    if job.is_fsdp and str(version) not in ("1", "2"):
        raise _refusal(f"fsdp_version: {version} is neither 1 nor 2", "Accelerate stops at it")


def _refusal(what: str, why: str) -> UsageError:
    return UsageError(
        what, why=why, fix="accel-fsdp check FILE says what else is wrong; or make one: accel-fsdp config"
    )

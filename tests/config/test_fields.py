"""The field table against its judge: what Accelerate's launcher does with each key."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from accel_fsdp.config import BY_NAME, RETIRED, Engine, Field, Kind
from accel_fsdp.config.schema import DEEPSPEED_FIELDS, FSDP_FIELDS, MESH_FIELDS, TOP
from accel_fsdp.launch import launcher

SAMPLES: dict[Kind, Any] = {
    Kind.BOOL: True,
    Kind.INT: 7,
    Kind.TEXT: "sample",
    Kind.NAMES: "OneLayer,TwoLayer",
}
MINIMAL = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "mixed_precision": "no"}


OTHER_NAMES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
NAMED_ALIKE = ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model")


def variable_of(field: Field) -> str:
    """The variable by which the launcher hands a value to the ranks; empty if it goes to torchrun or nowhere."""
    names = {"fsdp_config": f"FSDP_{field.key.removeprefix('fsdp_')}", "parallelism_config": field.key}
    names["deepspeed_config"] = f"ACCELERATE_DEEPSPEED_{field.key}" if field.key in NAMED_ALIKE else ""
    return OTHER_NAMES.get(field.key) or names[field.section].upper()


def environment(folder: Path, **content: Any) -> dict[str, str]:
    """What the launcher would give the ranks for this content."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **content}))
    return launcher.environment(launcher.launcher_args(path, Path(__file__), ()))


def other_value(field: Field) -> Any:
    """A legal value that is not the default."""
    if field.kind is Kind.BOOL:
        return not field.default
    if field.kind is Kind.CHOICE:
        return next(choice for choice in field.choices if choice != str(field.default))
    return SAMPLES[field.kind]


def test_top_level_keys_are_accelerates_own() -> None:
    assert {field.key for field in TOP} == {field.name for field in dataclasses.fields(ClusterConfig)}


FOR_LAUNCHER = [field for field in FSDP_FIELDS if field.engines != {Engine.TPU}]
FOR_XLA = [field.key for field in FSDP_FIELDS if field.engines == {Engine.TPU}]


@pytest.mark.parametrize("field", FOR_LAUNCHER, ids=lambda field: field.key)
def test_an_fsdp_key_reaches_the_ranks_as_the_table_says(field: Field, tmp_path: Path) -> None:
    absent = environment(tmp_path, fsdp_config={"fsdp_version": 1})
    if field.default is None or field.key == "fsdp_auto_wrap_policy":  # the plugin's own default, NO_WRAP
        assert variable_of(field) not in absent
    elif field.key != "fsdp_version":
        assert absent[variable_of(field)].lower() == str(field.default).lower()
    value = other_value(field)
    settings = {"fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": False, field.key: value}
    assert environment(tmp_path, fsdp_config=settings)[variable_of(field)].lower() == str(value).lower()


@pytest.mark.pain("P05")
@pytest.mark.parametrize("key", [*RETIRED, "fsdp_limit_all_gathers", "fsdp_anything", *FOR_XLA])
def test_unknown_and_retired_fsdp_keys_change_nothing(key: str, tmp_path: Path) -> None:
    """AF103 and AF104: red when Accelerate starts to read or to refuse them. Then train/sft.py needn't read XLA's."""
    plain = environment(tmp_path, fsdp_config={"fsdp_version": 1})
    value = True if key in FOR_XLA else "BACKWARD_POST"
    assert environment(tmp_path, fsdp_config={"fsdp_version": 1, key: value}) == plain


@pytest.mark.parametrize("field", MESH_FIELDS, ids=lambda field: field.key)
def test_a_mesh_key_reaches_the_ranks(field: Field, tmp_path: Path) -> None:
    value = field.choices[-1] if field.choices else 4 if field.kind is Kind.INT else not field.default
    gates = {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2}  # their details travel with them only
    seen = environment(tmp_path, fsdp_config={"fsdp_version": 2}, parallelism_config={**gates, field.key: value})
    assert seen[variable_of(field)].lower() == str(value).lower()


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [("rdzv_backend", "c10d", "static"), ("same_network", True, False), ("enable_cpu_affinity", True, False)],
)
def test_keys_that_only_work_on_the_command_line(key: str, value: Any, kept: Any, tmp_path: Path) -> None:
    """AF107: red when the file's value wins."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "fsdp_config": {}, key: value}))
    assert getattr(launcher.launcher_args(path, Path(__file__), ()), key) == kept
    assert not BY_NAME["", key].engines


@pytest.mark.parametrize("field", DEEPSPEED_FIELDS, ids=lambda field: field.key)
def test_a_deepspeed_key_reaches_the_ranks_or_is_said_not_to(field: Field, tmp_path: Path) -> None:
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    path = tmp_path / "config.yaml"
    value = field.choices[-1] if field.choices else SAMPLES[field.kind]
    content = {**MINIMAL, "distributed_type": "DEEPSPEED", "deepspeed_config": {field.key: value}}
    path.write_text(yaml.safe_dump(content))
    args = launcher.launcher_args(path, Path(__file__), ())
    args.deepspeed_fields_from_accelerate_config = field.key
    _, seen = prepare_deepspeed_cmd_env(args)
    if variable_of(field):
        assert seen[variable_of(field)].lower() == str(value).lower()
    else:
        assert str(value) not in seen.values()
    assert Engine.DEEPSPEED in field.engines or not field.engines

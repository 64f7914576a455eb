"""accelerate_configs/schema.json in an editor: what the YAML language server underlines, completes and explains."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

if lacking := [name for name in ("npm", "node") if not shutil.which(name)]:
    pytest.skip(f"the language server needs {', '.join(lacking)}", allow_module_level=True)

import language_server
from language_server import Editor

PRESETS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
SCHEMA = f"# yaml-language-server: $schema={(ROOT / 'accelerate_configs' / 'schema.json').as_uri()}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("opened")


@pytest.fixture(scope="module")
def editor(folder: Path) -> Iterator[Editor]:
    with language_server.editor(folder) as opened:
        yield opened


def written(folder: Path, text: str) -> Path:
    """A file of its own, whose lines come after that of the schema."""
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(SCHEMA + text)
    return path


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_presets_are_faultless(path: Path, folder: Path, editor: Editor) -> None:
    assert editor.open(written(folder, path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_ofload_params: true\n", 4, "fsdp_ofload_params is not allowed"),
        ("distributed_type: FSDP\nmixed_precison: bf16\n", 3, "mixed_precison is not allowed"),
        ("distributed_type: FDSP\n", 2, 'Value is not accepted. Valid values: "NO", "MULTI_CPU"'),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: three\n", 4, "Valid values"),
        ("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: two\n", 4, 'Expected "integer"'),
        ("mixed_precision: bf16\n", 2, 'Missing property "distributed_type"'),
    ],
)
def test_a_mistake_is_underlined(text: str, line: int, told: str, folder: Path, editor: Editor) -> None:
    (underlined,) = editor.open(written(folder, text))
    assert underlined["range"]["start"]["line"] + 1 == line
    assert told in underlined["message"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mixed_precision: ", {"bf16", "fp16", "fp8"}),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_state_dict_type: ", {"SHARDED_STATE_DICT", "FULL_STATE_DICT"}),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: ", {"true", "false"}),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_", {"fsdp_version", "fsdp_transformer_layer_cls_to_wrap"}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  ", {"zero_stage", "offload_optimizer_device"}),
        (
            "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_d",
            {"parallelism_config_dp_shard_size"},
        ),
    ],
)
def test_keys_and_values_are_completed(typed: str, offered: set[str], folder: Path, editor: Editor) -> None:
    path = written(folder, typed)
    editor.open(path)
    completed = editor.at("completion", path, typed.count("\n") + 2, len(typed.rpartition("\n")[2]) + 1)["items"]
    assert offered <= {item["label"] for item in completed}


def test_a_key_is_explained_with_its_engines(folder: Path, editor: Editor) -> None:
    path = written(
        folder, "distributed_type: FSDP\nfsdp_config:\n  fsdp_use_orig_params: true\nmixed_precision: bf16\n"
    )
    editor.open(path)
    assert "Read by FSDP1" in editor.at("hover", path, 4, 5)["contents"]["value"]
    assert "Ampere and newer" in editor.at("hover", path, 5, 5)["contents"]["value"]

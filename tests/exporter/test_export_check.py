"""`--check` and the proof of an export: a broken report, code from elsewhere, numbers that are none."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import here
from runs import as_loops_save, export, refused
from safetensors.torch import load_file, save_file

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, and the checkpoint that it is of."""
    folder = tmp_path_factory.mktemp("made")
    export(as_loops_save(tiny_model, folder / "run"), folder / "out")
    return folder


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def text(before: str) -> str:
        content = json.loads(before)
        return json.dumps(change(content) or content)

    return text


DAMAGED = r"export\.json is damaged"
Change = Callable[[str], str] | None
CHANGED: dict[str, tuple[str, Change, str]] = {
    "cut": ("export.json", lambda text: text[: len(text) // 2], DAMAGED),
    "empty": ("export.json", lambda text: "", DAMAGED),
    "a list": ("export.json", lambda text: "[]", DAMAGED),
    "without tensors": ("export.json", rewritten(lambda report: {"source": "x", "kind": "y"}), DAMAGED),
    "odd shapes": ("export.json", rewritten(lambda report: report["tensors"][NAME].update(shape=["x"])), DAMAGED),
    "a hash that is none": (
        "export.json",
        rewritten(lambda report: report["hashes"].update({"model.safetensors": ""})),
        DAMAGED,
    ),
    "without hashes": ("export.json", rewritten(lambda report: report.update(hashes={})), DAMAGED),
    "without files": (
        "export.json",
        rewritten(lambda report: {key: report[key] for key in report if key != "hashes"}),
        DAMAGED,
    ),
    "an endless shape": (
        "export.json",
        rewritten(lambda report: report["tensors"][NAME].update(shape=[math.inf])),
        DAMAGED,
    ),
    "another number": (
        "config.json",
        lambda text: text.replace("10000.0", "10001.0"),
        "config.json was changed after the export",
    ),
    "no config": ("config.json", None, "config.json is missing"),
    "other weights": ("pytorch_model.bin", str, "pytorch_model.bin was not exported"),
    "code": ("inner/x.py", str, "inner/x.py was not exported"),
    "a card": ("README.md", str, ""),
    "the hub's own": (".gitattributes", str, ""),
}
"""A file of an export, what becomes of its text, and what the check says; nothing where it may change."""


@pytest.mark.parametrize("how", CHANGED)
def test_check_compares_all_files_with_the_report(how: str, exported: Path, tmp_path: Path) -> None:
    """Or a changed weight would pass as an export without report."""
    out, (name, change, message) = Path(shutil.copytree(exported / "out", tmp_path / "out")), CHANGED[how]
    path = out / name
    if change is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(change(path.read_text() if path.exists() else "new"))
    refused(message, out, check=True) if message else export(out, check=True)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"])
def test_weights_beside_the_export_are_named(suffix: str, exported: Path, tmp_path: Path) -> None:
    """from_pretrained prefers a model.safetensors without a tensor to the shards, and loads random numbers."""
    out = tmp_path / "out"
    export(exported / "run", out, max_shard_size="100KB")
    assert not (out / "model.safetensors").exists()
    save_file({}, out / f"model{suffix}", {"format": "pt"})
    refused(rf"model\{suffix}( was not exported|, which was not exported)", out, check=True)


@pytest.mark.parametrize("name", ["additional_chat_templates", "code", "chat_template.jinja", "inner/x"])
@pytest.mark.parametrize("target", ["{out}/../elsewhere", "gone", "{name}", "{out}/inner"])
def test_links_to_folders_and_to_nothing_are_named(name: str, target: str, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported / "out", out)
    (out / "inner").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jinja").write_text("x")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(target.format(out=out, name=Path(name).name))
    fault = "is a link to a folder|can't be read: (it is a link to gone, where there is nothing|Symlink loop)"
    refused(f"{out}/{name} ({fault})", out, check=True)


@pytest.mark.parametrize(
    ("value", "dtype", "format"),
    [(math.nan, "float32", "safetensors"), (math.inf, "bfloat16", "safetensors"), (-math.inf, "float16", "pth")],
)
def test_numbers_that_are_none_stop_an_export(
    value: float, dtype: str, format: str, exported: Path, tiny_model: Path, tmp_path: Path
) -> None:
    state = torch.load(exported / "run" / "model.pth")
    state[NAME][3, 5:8] = value
    state["model.norm.weight"][-1] = value
    as_loops_save(tiny_model, tmp_path / "run", state)
    out, options = tmp_path / "out", {"dtype": dtype, "format": format}
    refused(rf"4 numbers are NaN or infinite, in 2 of \d+ tensors: {NAME}", tmp_path / "run", out, **options)
    export(tmp_path / "run", out, allow_non_finite=True, **options)
    assert json.loads((out / "export.json").read_text())["non_finite"] == {NAME: 3, "model.norm.weight": 1}
    refused("4 numbers are NaN", out, check=True)
    export(out, check=True, allow_non_finite=True)


def test_a_model_of_nan_without_report(tiny_model: Path, tmp_path: Path) -> None:
    """As a script's own `save_pretrained` leaves it."""
    shutil.copytree(tiny_model, tmp_path / "final")
    state = {
        name: torch.full_like(tensor, math.nan) for name, tensor in load_file(tiny_model / "model.safetensors").items()
    }
    save_file(state, tmp_path / "final" / "model.safetensors", {"format": "pt"})
    finished = here("export", "--check", tmp_path / "final", "--verify", "bytes")
    assert finished.code == 1
    assert f"{sum(tensor.numel() for tensor in state.values()):,} numbers are NaN" in finished.output
    finished = here("export", "--check", tmp_path / "final", "--verify", "bytes", "--allow-non-finite")
    assert finished.code == 0
    assert "not finite: " in finished.output

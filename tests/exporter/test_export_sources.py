"""What an export is given: addresses, indexes, patterns, disks and terminals, and what it says of them."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import here
from peft import LoraConfig, get_peft_model
from runs import export, refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from accel_fsdp.checkpoints import discover
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.exporter import command

HEAD = "lm_head.weight"


@pytest.fixture
def sharded(tiny_model: Path, tmp_path: Path) -> Path:
    """The model in several files, under an index."""
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "src", max_shard_size="100KB")
    return tmp_path / "src"


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/run", "hf://me/model", "https://host/model"])
@pytest.mark.parametrize("place", ["out", "model"])
def test_addresses_are_no_folders_of_this_machine(
    place: str, address: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"src": tiny_model, "out": Path("out"), "model": None}
    given[place] = address if place == "model" else Path(address)
    with pytest.raises(UsageError, match=f"is {address}, which is not a folder"):
        command.run(command.ExportCommand(**given))
    assert not list(tmp_path.iterdir())


INDEX = "model.safetensors.index.json"


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of a JSON file of a folder."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def elsewhere(index: dict[str, Any]) -> None:
    listed = index["weight_map"]
    name = next(name for name, file in listed.items() if list(listed.values()).count(file) > 1)
    listed[name] = next(file for file in listed.values() if file != listed[name])


def linked(name: str, gone: str = "") -> Callable[[Path], None]:
    """A link to nothing in the place of a file, or of all those of a pattern."""

    def change(folder: Path) -> None:
        path = folder / name if name else other_shard(folder)
        for file in folder.glob(gone) if gone else [path]:
            file.unlink()
        path.symlink_to("gone")

    return change


def other_shard(folder: Path) -> Path:
    """A file of the index that doesn't hold the head."""
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return folder / next(file for file in listed.values() if file != listed[HEAD])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder: (folder / INDEX).write_text('{"weight_map"'), f"/{INDEX} is damaged or cut short: no JSON"),
        (
            edited(INDEX, lambda index: index["weight_map"].update(w="../w.safetensors")),
            f"/{INDEX} points to '../w.safetensors', outside of its folder",
        ),
        (linked(INDEX), f"/{INDEX} can't be read: it is a link to gone, where there is nothing"),
        (linked(""), ".safetensors can't be read: it is a link to gone, where there is nothing"),
        (linked("config.json"), "config.json can't be read: it is a link to gone, where there is nothing"),
        (
            linked("model.safetensors", "model*"),
            "/model.safetensors can't be read: it is a link to gone, where there is nothing",
        ),
        (
            edited("config.json", lambda config: config.update(transformers_weights="x")),
            "config.json names other files: transformers_weights",
        ),
    ],
)
def test_the_file_that_is_bad_is_named_with_its_fault(
    change: Callable[[Path], None], what: str, sharded: Path, tmp_path: Path
) -> None:
    """Not as a half-written checkpoint; by --check too."""
    change(sharded)
    check = command.ExportCommand(sharded, check=True, verify="bytes")
    for call in (lambda: export(sharded, tmp_path / "out"), lambda: command.run(check)):
        with pytest.raises(UserError) as refused:
            call()
        assert what in refused.value.what
        assert "half-written" not in refused.value.why
        assert refused.value.fix.startswith(("copy that file again", "don't trust this", "put a file there"))


def add_head(path: Path, head: torch.Tensor) -> None:
    save_file({**load_file(path), HEAD: head}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edited(INDEX, lambda index: index["weight_map"].update({"model.extra.weight": index["weight_map"][HEAD]})),
            r"index\.json lists model\.extra\.weight in \S+, which doesn't hold it\n",
        ),
        (
            edited(INDEX, elsewhere),
            r"index\.json lists \S+ in model-\S+, which doesn't hold it\n",
        ),
        (
            lambda folder: add_head(other_shard(folder), torch.zeros(3, 3)),
            rf"holds a {HEAD} that differs from the one in model-",
        ),
    ],
)
def test_an_index_and_its_files_agree(
    change: Callable[[Path], None], message: str, sharded: Path, tmp_path: Path
) -> None:
    change(sharded)
    refused(message, sharded, tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_of_two_models_in_one_folder_that_of_from_pretrained(sharded: Path, tiny_model: Path, tmp_path: Path) -> None:
    """One file and an index."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", sharded)
    theirs = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert not theirs[HEAD].any()
    assert torch.equal(export(sharded, tmp_path / "out")[HEAD], theirs[HEAD])


@pytest.mark.parametrize(
    ("where", "message"), [("src", "can't be read: Input/output"), ("out", "cannot write"), (None, "cannot write")]
)
def test_an_error_names_the_side_that_failed(
    where: str | None, message: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"src": tiny_model / "model.safetensors", "out": tmp_path / ".out.tmp" / "model.safetensors", None: None}

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", *([str(places[where])] if where else []))

    monkeypatch.setattr(command.open_checkpoint, "read", fails)
    refused(message, tiny_model, tmp_path / "out")


def test_lists_are_whole_without_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    """Names can be copied, and a file that is missing is listed once."""
    run = tmp_path / ("a_long_name_" * 12)
    folder = run / "checkpoint-1"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="100KB")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "complete.json").write_text(json.dumps({"complete": True, "files": sizes}))
    gone = sorted(folder.glob("*.safetensors"))[0]
    gone.unlink()
    finished = here("export", run, "--list")
    assert finished.code == 0
    line = next(line for line in finished.output.splitlines() if str(folder) in line)
    assert line.count(gone.name) == 1
    with pytest.raises(UserError) as caught:
        discover.find(run)
    assert caught.value.what.count(gone.name) == 1
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(UserError) as caught:
        discover.find(tmp_path)
    assert caught.value.fix == f"give {folder}"


@pytest.fixture
def crowd(tiny_model: Path, tmp_path: Path) -> Path:
    """A model, an average of it, an old file of torch's, and an adapter in one folder."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "crowd"))
    state = load_file(tiny_model / "model.safetensors")
    save_file({name: tensor * 0 + 9 for name, tensor in state.items()}, folder / "ema.safetensors")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(folder)
    return folder


def loose(folder: Path) -> None:
    """Without the model: a file of torch's beside the average."""
    torch.save(load_file(folder / "model.safetensors"), folder / "w.pth")
    (folder / "model.safetensors").unlink()


def beside_an_index(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "weights.safetensors")}
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", [None, loose, beside_an_index])
def test_a_file_that_is_named_is_the_one_that_is_read(
    around: Any, crowd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if around:
        around(crowd)
    tensors = export(crowd / "ema.safetensors", tmp_path / "out")
    assert tensors
    assert all((item == 9).all() for item in tensors.values())
    assert "ema.safetensors: safetensors" in capfd.readouterr().err.replace("\n", "")
    if around in (None, beside_an_index):
        name = "weights.safetensors" if around else "model.safetensors"
        assert not any((tensor == 9).all() for tensor in export(crowd / name, tmp_path / "model").values())


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_beside_a_model(crowd: Path, tiny_model: Path, tmp_path: Path) -> None:
    path = crowd / "adapter_model.safetensors"
    given: dict[str, Any] = {"model": str(tiny_model)}
    assert export(path, tmp_path / "file", **given).keys() == load_file(path).keys()
    assert HEAD in export(crowd / "model.safetensors", tmp_path / "whole", **given)
    refused("holds a model and an adapter", crowd, tmp_path / "folder", **given)
    export(path, tmp_path / "one", merge_adapter=True, **given)
    none = "--merge-adapter, and the checkpoint has no adapter"
    refused(none, crowd / "model.safetensors", tmp_path / "three", merge_adapter=True, **given)
    path.rename(crowd / "mine.safetensors")
    assert (
        export(crowd / "mine.safetensors", tmp_path / "mine", **given).keys()
        == load_file(tmp_path / "file" / path.name).keys()
    )


@pytest.mark.parametrize("name", ["ema.safetensors", "w.pth", "pytorch_model_fsdp.bin"])
def test_a_file_of_a_half_written_checkpoint(name: str, crowd: Path, tmp_path: Path) -> None:
    (crowd / "complete.json").write_text('{"complete": false}')
    state = load_file(crowd / "ema.safetensors")
    if name != "ema.safetensors":
        torch.save(state, crowd / name)
    refused("lacks its end", crowd / name, tmp_path / "out")


def test_a_file_that_is_no_model_is_not_another_one(crowd: Path, tmp_path: Path) -> None:
    path = (crowd / "ema.safetensors").rename(crowd / "optimizer.safetensors")
    refused("holds optimizer state", path, tmp_path / "out")

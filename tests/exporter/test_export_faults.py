"""`accel-fsdp export` of what is damaged or evil, on full disks, and killed: OUT is complete or as it was."""

import dataclasses
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from conftest import ROOT, files_of_at_most, peak_bytes
from evil import CALLS, Evil
from huggingface_hub import HfApi, RepoUrl
from runs import HEADS, INNER, SIZES, export, refused
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from transformers import LlamaConfig

from accel_fsdp import atomic_files
from accel_fsdp.checkpoints import (
    Origin,
    completeness,
    dcp,
    discover,
    file_names,
)
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe
from accel_fsdp.units import GIB

STRANGE, ODD = (
    json.dumps({"model_type": "llama", **SIZES, **HEADS, **odd})
    for odd in ({"hidden_size": "x"}, {"num_attention_heads": 0})
)


def flipped(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at if at >= 0 else len(content) + at] ^= 16
        path.write_bytes(content)

    return damage


def cut(left: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * left))


FILES = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
DAMAGES = [
    *((name, "missing", Path.unlink) for name in (*FILES, ".metadata")),
    *((name, f"cut to {left}", cut(left)) for name in (*FILES, ".metadata") for left in (0, 0.5, 0.999)),
    *((name, f"bit {at}", flipped(at)) for name in FILES for at in (900, 12_000, 20_000)),
    *((".metadata", f"bit {at}", flipped(at)) for at in (16, 30, 200)),
]


@pytest.mark.parametrize(("name", "kind", "damage"), DAMAGES, ids=lambda value: value if isinstance(value, str) else "")
def test_damage_is_named(
    name: str, kind: str, damage: Callable[[Path], None], run_folder: Path, tmp_path: Path
) -> None:
    completeness.seal(run_folder / "checkpoint-1", Origin("FSDP"))
    damage(run_folder / INNER / name)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    with pytest.raises(UserError) as caught:
        export(run_folder, out, force=True)
    assert name in caught.value.what
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_overlapping_chunks_are_found(run_folder: Path, tmp_path: Path) -> None:
    """Two chunks of one size at one place: the sizes add up, each file is whole, and a third of the tensor is lost."""
    path = run_folder / INNER / ".metadata"
    metadata = FileSystemReader(path.parent).read_metadata()
    name, entry = next((n, e) for n, e in metadata.state_dict_metadata.items() if n.endswith("embed_tokens.weight"))
    first, second = entry.chunks[0], next(c for c in entry.chunks[1:] if c.sizes == entry.chunks[0].sizes)
    old = next(i for i in metadata.storage_data if i.fqn == name and i.offset == second.offsets)
    metadata.storage_data[dataclasses.replace(old, offset=first.offsets)] = metadata.storage_data.pop(old)
    second.offsets = first.offsets
    path.write_bytes(pickle.dumps(metadata))
    refused(r"embed_tokens\.weight twice, others never", run_folder)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", [".metadata", "item", "file"])
def test_pickles_that_name_code_are_refused(call: str, where: str, run_folder: Path, tmp_path: Path) -> None:
    proof, evil = tmp_path / "proof", Evil(tmp_path / "proof", call)
    if call == "unlink":
        proof.write_text("")
    if where == ".metadata":
        metadata = FileSystemReader(run_folder / INNER).read_metadata()
        metadata.planner_data = evil
        (run_folder / INNER / ".metadata").write_bytes(pickle.dumps(metadata))
    elif where == "item":
        torch.save({"w": evil}, run_folder / INNER / "evil.distcp")
        metadata = FileSystemReader(run_folder / INNER).read_metadata()
        size = (run_folder / INNER / "evil.distcp").stat().st_size
        metadata.storage_data[next(iter(metadata.storage_data))] = _StorageInfo("evil.distcp", 0, size)
        (run_folder / INNER / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        shutil.rmtree(run_folder / "checkpoint-1")
        torch.save({"w": torch.ones(2), "x": evil}, run_folder / "model.pth")
    refused(r"which no checkpoint needs|is damaged", run_folder)
    assert proof.exists() == (call == "unlink")
    assert not (tmp_path / "out").exists()


def state(module: str, name: str, content: Any) -> bytes:
    """A name with a state, such as slots for a class."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + pickle.dumps(content, 2)[2:-1] + b"b."


ESCAPES = [
    state("pathlib", "PosixPath", (None, {"is_absolute": None})),
    state("torch.distributed.checkpoint.metadata", "Metadata", (None, {"state": 1})),
    state("torch", "float32", {"a": 1}),
    b"ctorch\nfloat32\n(V1\ntR.",
    b"\x80\x02\x82\x01.",
    b"\x80\x05\x97.",
]


def test_an_unpickler_cannot_be_led_around_its_list(tmp_path: Path) -> None:
    """Dotted names, names of this package, memo tricks, states for classes."""
    path = tmp_path / "x"
    pickles = [
        b"\x80\x04\x8c\x05torch\x8c\x0dserialization\x93.",
        b"\x80\x04\x8c\x18torch.distributed.checkpoint\x8c\x11metadata.os.system\x93.",
        b"cbuiltins\n__import__\n(Vos\ntR.",
        b"caccel_fsdp.archive\nos\n.",
        b"cpathlib\nPath.home\n.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aQe.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ]
    for content in (*pickles, *ESCAPES):
        with pytest.raises(UserError, match=r"which no checkpoint needs|in its pickle"):
            dcp.unpickled(content, path)


@pytest.mark.parametrize("trick", ["../../secret", "/etc/passwd", "link", "inner/../../../secret", "\0", "."])
def test_paths_stay_in_the_folder(trick: str, run_folder: Path, tmp_path: Path) -> None:
    inner = run_folder / INNER
    (run_folder / "secret").write_bytes((inner / "__0_0.distcp").read_bytes())
    (inner / "link").symlink_to(run_folder / "secret")
    metadata = FileSystemReader(inner).read_metadata()
    for index, place in metadata.storage_data.items():
        if place.relative_path == "__0_0.distcp":
            metadata.storage_data[index] = _StorageInfo(trick, place.offset, place.length)
    (inner / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(r"outside of its folder|can't be read", run_folder)


def command(*words: str | Path, verify: str = "bytes") -> subprocess.Popen[str]:
    """The export as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "accel_fsdp", "export", *map(str, words), "--verify", verify],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_disk_that_fills_up_at_any_point(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that may not grow beyond a limit fail as they do on a full disk; and the disk itself is asked before."""
    export(run_folder, tmp_path / "out")
    whole = (tmp_path / "out" / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "out")
    for tenth in (0, 3, 6, 9):
        with files_of_at_most(1 + whole * tenth // 10), pytest.raises(UserError, match="cannot write"):
            export(run_folder, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], tenth
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(r"the export needs .* MiB are free", run_folder)


@pytest.fixture(scope="module")
def whole_export(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, bytes]:
    """The seconds of an export that nothing ends, and the weights that it writes."""
    out, started = tmp_path_factory.mktemp("whole") / "out", time.monotonic()
    command(trained_run, out).communicate()
    return time.monotonic() - started, (out / "model.safetensors").read_bytes()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ended_at_any_moment(number: int, trained_run: Path, whole_export: tuple[float, bytes], tmp_path: Path) -> None:
    """Over an older export: it stays, or the new one is there; the next run cleans up."""
    out, moments = tmp_path / "out", random.Random(1)
    export(trained_run, out, dtype="bfloat16")
    old = (out / "model.safetensors").read_bytes()
    seconds, new = whole_export
    tries = ["bytes"] * 2 if number == signal.SIGKILL else ["bytes", "load"]
    for verify in tries:
        process = command(trained_run, out, "--force", verify=verify)
        time.sleep(seconds * moments.uniform(0.3, 1.0))
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        if out.exists():  # there is a moment between two renames
            assert (out / "model.safetensors").read_bytes() in (old, new)
        if number != signal.SIGKILL:
            codes = (0, -number, 128 + number)  # it had ended; Python itself was starting; it cleaned up
            assert process.returncode in codes
            assert "resource_tracker" not in output
            assert ("OUT is as it was" in output) == (process.returncode == 128 + number)
            assert [path.name for path in tmp_path.iterdir()] == ["out"]
    export(trained_run, out, force=True)
    assert (out / "model.safetensors").read_bytes() == new
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ended_between_two_renames(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run_folder, out, dtype="bfloat16")
    kept = (out / "model.safetensors").read_bytes()
    export(run_folder, out, force=True)
    assert (out / "model.safetensors").read_bytes() != kept
    kept = (out / "model.safetensors").read_bytes()
    out.rename(tmp_path / ".out.old")  # as a kill between them leaves it
    with pytest.raises(UserError, match="no such dtype"), atomic_files.replaced_folder(out):
        raise UserError("no such dtype", why="", fix="")
    assert (out / "model.safetensors").read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_two_exports_to_one_folder(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_files.replaced_folder(out) as folder:
        (folder / "mine").write_text("")
        refused("another process is writing", run_folder)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_what_is_there_is_not_replaced(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    refused("exists", run_folder, out)
    (out / "thesis.tex").write_text("")
    refused("not a folder of a model", run_folder, out, force=True)
    for place in (run_folder, run_folder / "checkpoint-1", run_folder / INNER):
        refused("holds the checkpoint", run_folder, place, force=True)


FOREIGN = (
    *("thesis/ch1.txt", "optimizer.pt", "checkpoint-1/model.safetensors", "train.py", "notes.md", "todo.txt"),
    *("eval_results.json", "dataset.bin", "other.safetensors", "other.pth"),
)


def test_force_replaces_models_alone(run_folder: Path, tmp_path: Path) -> None:
    """Other data beside a model stays; all that an export itself writes may go."""
    out = tmp_path / "out"
    export(run_folder, out)
    for name in ("vocab.bpe", "README.md", "additional_chat_templates/tool.jinja", "model.pth", *FOREIGN):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("")
    for entry in FOREIGN:
        assert f"{out} holds " in refused("holds", run_folder, out, force=True).what
        assert (out / entry).exists()
        (out / entry).unlink()
        if "/" in entry:
            (out / entry).parent.rmdir()
    export(run_folder, out, force=True)


def test_the_model_that_is_used_is_not_replaced(run_folder: Path, tmp_path: Path) -> None:
    """--model, the run's description, and the base of an adapter: the merge reads it while it is written."""
    given = Path(shutil.copytree(run_folder / "model", tmp_path / "models" / "given"))
    for out in (given, given / "inner"):
        refused("the model that the export uses", run_folder, out, force=True, model=str(given))
    for model in (None, str(given)):
        refused("the model that the export uses", run_folder, run_folder / "model", force=True, model=model)
    export(run_folder, run_folder / "exported")
    adapter = run_folder / "checkpoint-2"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(given)}))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    refused("the model that the export uses", run_folder, given, force=True, merge_adapter=True)
    assert [path.name for path in given.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"max_shard_size": size}, "is not a size") for size in ("-1GB", "abc", "0GB", "5", "nanGB", "1e400GB")),
        ({"dtype": "bf16"}, r"--dtype bf16 (?s:.*)float32, bfloat16, float16"),
    ],
)
def test_flags_are_checked_first(options: dict[str, Any], message: str, run_folder: Path, tmp_path: Path) -> None:
    refused(message, run_folder, tmp_path / "new" / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_not_mistaken_for_what_lies_in_it(run_folder: Path, tmp_path: Path) -> None:
    """What a killed export left, finished exports and the untrained model have weights, and numbers in their names."""
    newest = Path(shutil.copytree(run_folder / "checkpoint-1", run_folder / "checkpoint-2"))
    export(run_folder, run_folder / "exported-v5")
    left = Path(shutil.copytree(run_folder / "exported-v5", run_folder / ".out-7.tmp"))
    shutil.copy(run_folder / "exported-v5" / "model.safetensors", run_folder / "model")
    assert [finding.folder.name for finding in discover.listed(run_folder)] == ["checkpoint-1", newest.name]
    assert discover.find(run_folder / "exported-v5")[0].kind == "safetensors"
    with pytest.raises(UserError, match="lacks its end"):
        discover.find(left)
    (tmp_path / "demo" / "real").mkdir(parents=True)
    shutil.copytree(run_folder / "model", tmp_path / "demo" / "model")
    refused("holds no checkpoint", tmp_path / "demo")
    shutil.copytree(run_folder / "model", tmp_path / "demo" / "other")
    run_folder.rename(tmp_path / "demo" / "real" / "run")
    caught = refused("holds no checkpoint itself", tmp_path / "demo")
    assert str(tmp_path / "demo" / "real" / "run" / "checkpoint-2") in caught.fix
    shutil.rmtree(tmp_path / "demo" / "real")
    assert discover.find(tmp_path / "demo")[0].folder.name == "other"  # as final/, where there is no checkpoint


def test_weights_are_enough(run_folder: Path, tmp_path: Path) -> None:
    """Optimizers are deleted to save disk; weights that `complete.json` lists have to be there."""
    folder = run_folder / "checkpoint-1"
    (folder / "optimizer_0").mkdir()
    for name in ("optimizer_0/__0_0.distcp", "scheduler.pt", "rng_state_0.pth"):
        (folder / name).write_bytes(b"1")
    (folder / file_names.MARKER).write_text("{}")
    completeness.seal(folder, Origin("FSDP"))
    shutil.rmtree(folder / "optimizer_0")
    (folder / "scheduler.pt").unlink()
    export(run_folder, tmp_path / "out")
    (run_folder / INNER / "__1_0.distcp").write_bytes(b"1")
    refused(r"lacks pytorch_model_fsdp_0/__1_0\.distcp", run_folder, tmp_path / "other")


def test_local_state_dicts_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "pytorch_model_fsdp_rank0.bin").write_bytes(b"1")
    for src in (tmp_path / "run", folder, folder / "pytorch_model_fsdp_rank0.bin"):
        caught = refused("LOCAL_STATE_DICT", src, tmp_path / "out")
        assert "SHARDED_STATE_DICT" in caught.fix


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's peak memory there")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Memory holds the largest tensor, and a gigabyte at most of libraries and what is read ahead."""
    for vocabulary in (32_000, 128_000):
        folder = tmp_path / str(vocabulary)
        config = LlamaConfig(**{**SIZES, "vocab_size": vocabulary, "hidden_size": 252}, **HEADS, dtype="float32")
        sharded.make(folder, config, ranks=2)
        peak = peak_bytes("export", folder, folder / "out", "--verify", "bytes", "--no-sync")
        assert peak < 128_000 * 252 * 4 + GIB
        shutil.rmtree(folder)


def test_push_to_the_hub(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused once, the export stays; then all of it arrives. A name that the hub would refuse is refused first."""
    out, pushed = tmp_path / "out", dict[str, bytes]()

    def upload(_: HfApi, folder_path: Path, ignore_patterns: list[str], **__: Any) -> None:
        if refuse:
            raise OSError("no room")
        paths = [path for path in folder_path.iterdir() if not any(path.match(name) for name in ignore_patterns)]
        pushed.update({path.name: path.read_bytes() for path in paths})

    monkeypatch.setattr(HfApi, "create_repo", lambda _, name, **__: RepoUrl(f"https://huggingface.co/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    refuse = True
    with pytest.raises(UserError) as error:
        export(run_folder, out, push_to_hub="me/model")
    assert f"accel-fsdp export --check {out} --push-to-hub me/model" in error.value.fix
    refuse = False
    export(out, check=True, push_to_hub="me/model")
    assert pushed == {path.name: path.read_bytes() for path in out.iterdir()}
    for name in ("me/my model", "a/b/c", "-x"):
        refused("not the name of a repository", run_folder, tmp_path / "other", push_to_hub=name)


@pytest.mark.parametrize("config", ["{", '{"model_type": "no such"}', "{}", STRANGE, ODD, None])
def test_check_without_a_report(config: str | None, run_folder: Path, tmp_path: Path) -> None:
    """A config that can't be loaded, or none, is named."""
    out = tmp_path / "out"
    export(run_folder, out)
    (out / "export.json").unlink()
    export(out, out, check=True)
    (out / "config.json").write_text(config) if config else (out / "config.json").unlink()
    message = rf"error: from_pretrained doesn't load {out}: (?!error)(?!(?s:.*)--model)|holds no config\.json"
    with pytest.raises(UserError, match=message):
        transformers_probe.loads(out) if config else export(out, out, check=True)


def test_links_of_the_hubs_cache(run_folder: Path, tmp_path: Path) -> None:
    """`snapshots/REVISION/x` to `blobs/HASH` of one repository is followed; any other link out of the folder isn't."""
    export(run_folder, tmp_path / "plain")
    snapshot = tmp_path / "models--me--model" / "snapshots" / "1"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "plain").iterdir():
        shutil.move(path, snapshot.parent.parent / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    export(snapshot, snapshot, check=True)
    export(snapshot, tmp_path / "out")
    (snapshot / "export.json").unlink()
    export(snapshot, snapshot, check=True)
    shutil.move(snapshot.parent.parent / "blobs" / "model.safetensors", tmp_path)
    (snapshot.parent.parent / "blobs" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    refused(rf"{snapshot}/model.safetensors is a link to {tmp_path}/model.safetensors", snapshot, tmp_path / "other")

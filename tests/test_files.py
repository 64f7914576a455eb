"""Files that commands change: only the text changes, not what else a user sees of the file."""

import json
import os
import stat
import sys
import threading
from pathlib import Path

import pytest
from checking import V2
from conftest import accel_fsdp, run

from accel_fsdp import atomic_files, linter
from accel_fsdp.errors import UserError

BROKEN = V2.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_use_orig_params: true")
CHANGES = {"check": ["check", "--fix"], "migrate": ["migrate", "--to", "zero3", "--force"]}


def change(command: str, path: Path) -> None:
    words = CHANGES[command]
    assert accel_fsdp(words[0], path, *words[1:]).code == 0


@pytest.mark.parametrize("command", CHANGES)
def test_a_link_stays_one_and_its_target_changes(command: str, tmp_path: Path) -> None:
    target, link = tmp_path / "base.yaml", tmp_path / "link.yaml"
    target.write_text(BROKEN)
    link.symlink_to(target.name)
    change(command, link)
    assert link.is_symlink()
    assert target.read_text() != BROKEN


@pytest.mark.parametrize("command", CHANGES)
def test_permissions_stay(command: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(BROKEN)
    path.chmod(0o640)
    change(command, path)
    assert path.read_text() != BROKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("command", CHANGES)
def test_line_ends_stay(command: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_bytes(BROKEN.replace("\n", "\r\n").encode())
    change(command, path)
    text = path.read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n") > 5


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_stays_json(indent: int | None, tmp_path: Path) -> None:
    """Accelerate reads its config from JSON too, by the name of the file."""
    path = tmp_path / "config.json"
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_use_orig_params": True}
    content = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no", "fsdp_config": fsdp}
    path.write_text(json.dumps(content, indent=indent) + "\n")
    assert accel_fsdp("check", "--fix", path).code == 0
    del fsdp["fsdp_use_orig_params"]
    assert path.read_text() == json.dumps(content, indent=indent) + "\n"


def test_a_new_file_is_not_written_as_json(tmp_path: Path) -> None:
    refused = accel_fsdp("config", "--yes", "--model", "gpt2", "-o", tmp_path / "fsdp.json")
    assert refused.code == 2
    assert "fsdp.yaml" in refused.output
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"distributed_type: FSDP # \xe9\n")
    refused = accel_fsdp("check", "--fix", path)
    assert refused.code == 2
    assert "Traceback" not in refused.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(BROKEN)
    path.chmod(0o444)
    assert accel_fsdp("check", "--fix", path).code == 1
    assert path.read_text() == BROKEN


CATALOGUED = ("--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100")
WRITERS: dict[str, tuple[str, ...]] = {
    "config": ("config", "--yes", *CATALOGUED, "--force", "-o"),
    "plan": ("plan", *CATALOGUED, "--force", "--html"),
    "migrate": ("migrate", "accelerate_configs/fsdp2.yaml", "--to", "zero3", "--overwrite", "-o"),
}


def test_a_pipe_takes_the_text_and_needs_no_force(tmp_path: Path) -> None:
    pipe, texts = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    written = accel_fsdp("config", "--yes", *CATALOGUED, "-o", pipe)
    assert written.code == 0, written.output
    reader.join(10)
    assert "distributed_type: FSDP" in texts[0]
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("kind", "number", "problem"),
    [
        (stat.S_IFCHR, os.makedev(1, 3), ""),
        (stat.S_IFCHR, os.makedev(1, 5), ""),
        (stat.S_IFCHR, os.makedev(1, 7), "No space left on device"),
    ],
    ids=["null", "zero", "full"],
)
def test_a_device_stays_one(kind: int, number: int, problem: str, tmp_path: Path) -> None:
    """Of /dev/full and /dev/zero no end can be read."""
    device = tmp_path / "device"
    try:
        os.mknod(device, kind | 0o600, number)
        if kind == stat.S_IFCHR:
            os.close(os.open(device, os.O_WRONLY))
    except PermissionError:
        pytest.skip("only root makes devices, and not in every container")
    if problem:
        with pytest.raises(UserError, match=problem):
            atomic_files.write_text(device, "x")
    else:
        atomic_files.write_text(device, "x")
    assert stat.S_IFMT(device.stat().st_mode) == kind


@pytest.mark.parametrize("flag", ["--args", "--script"])
def test_what_never_ends_is_refused_beside_a_yaml_too(flag: str, tmp_path: Path) -> None:
    path, large = tmp_path / "fsdp.yaml", tmp_path / "large"
    path.write_text(V2)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for endless in (large, Path("/dev/zero")):
        refused = accel_fsdp("check", path, flag, endless)
        assert refused.code == 2
        assert f"{endless} is larger than 1.0 MiB" in refused.output


def test_arguments_may_come_from_a_pipe() -> None:
    """As a shell makes it of `--args <(command)`. They are read once, and waited for."""
    reader, writer = os.pipe()
    late = threading.Timer(0.2, lambda: (os.write(writer, b"python train.py --bf16\n"), os.close(writer)))
    late.start()
    given = linter.inputs.read_given(linter.LintOptions(args=Path(f"/dev/fd/{reader}")))
    os.close(reader)
    assert given.starter == "python"
    assert given.args == {"bf16": True}


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        *WRITERS.values(),
        ("init",),
        ("plan", "--gpus", "8xH100", "--model"),
        ("launch", "accelerate_configs/fsdp2.yaml"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:]),
)
def test_a_name_that_no_file_can_have(words: tuple[str, ...], tmp_path: Path) -> None:
    refused = accel_fsdp(*words, LONG)
    assert refused.code in (1, 2)
    assert "File name too long" in refused.output
    assert "Traceback" not in refused.output


def test_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".yaml")
    atomic_files.write_text(path, "x")
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "words",
    [
        ("config", "--yes", *CATALOGUED, "-o", "-"),
        ("config", "--help"),
        ("--version",),
        ("migrate", "accelerate_configs/fsdp2.yaml", "--to", "zero3", "--dry-run", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_a_stdout_that_takes_no_more(words: tuple[str, ...]) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    command = " ".join([sys.executable, "-m", "accel_fsdp", *words])
    refused = run(["bash", "-c", f"{command} > /dev/full"])
    assert refused.code == 1
    assert "error: cannot write to stdout: No space left on device\n" in refused.output
    assert "Traceback" not in refused.output
    assert "Exception ignored" not in refused.output


@pytest.mark.parametrize(
    ("output", "message"), [("", ". is a folder"), ("{folder}", "{folder} is a folder"), ("-", "")]
)
def test_an_output_that_is_no_file(output: str, message: str, tmp_path: Path) -> None:
    finished = accel_fsdp("config", "--yes", *CATALOGUED, "-o", output.format(folder=tmp_path))
    assert finished.code == (1 if message else 0)
    assert message.format(folder=tmp_path) in finished.output
    assert "--force" not in finished.output


def test_stdin_is_rewritten_nowhere_but_where_it_is_told(tmp_path: Path) -> None:
    source, out = tmp_path / "fsdp.yaml", tmp_path / "out.yaml"
    source.write_text(V2)
    command = f"{sys.executable} -m accel_fsdp"
    for words, code in (
        ("migrate - --to zero3", 2),
        ("config --yes --from -", 2),
        (f"migrate - --to fsdp1 --layer-class LlamaDecoderLayer --force -o {out}", 0),
    ):
        done = run(["bash", "-c", f"{command} {words} < {source}"])
        assert done.code == code, done.output
        assert "Traceback" not in done.output
    assert "fsdp_version: 1" in out.read_text()


def test_a_file_of_a_library_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "profile" / "trace.json"
    with atomic_files.new_file(target) as place:
        assert place.name == target.name
        place.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    with pytest.raises(UserError), atomic_files.new_file(target) as place:
        (place.with_name("missing") / "half").write_text("half")
    assert target.read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    with pytest.raises(UserError), atomic_files.new_file(target / "below" / "file"):
        pass

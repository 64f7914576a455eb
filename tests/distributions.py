"""The wheel and the sdist, checked: `make dist` builds them, and this program looks into them and uses them.

`python tests/distributions.py FOLDER` needs git, hatchling and uvx, and no library of this package.
"""

import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHIPPED = ("train/", "accelerate_configs/")
"""Folders that lie in `accel_fsdp/project/` of the wheel."""
ADDED = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
LEFT_OUT = (".ci/", ".github/", ".git", ".pre-commit", "action.yml", "AGENTS.md", "CONTRIBUTING.md")
"""What the sdist leaves out: what belongs to the repository, not to the package."""
COMMANDS = (
    "config --yes --model meta-llama/Llama-3.1-8B --gpus 8xH100-80GB -o fsdp.yaml",
    "check fsdp.yaml",
    "migrate fsdp.yaml --to fsdp1 --dry-run",
    "plan --model llama-3.1-8b --gpus 8xH100-80GB --seq-len 4096",
    "init .",
    "script slurm -o job.sh fsdp.yaml train/sft.py",
)
"""Of the README, in an empty folder: all work without torch."""


class Wrong(Exception):
    """A distribution isn't what it should be."""


def tracked() -> set[str]:
    """The files that git knows, by their paths from the clone's folder."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


def wheel_files(wheel: Path) -> dict[str, bytes]:
    """Contents by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_files(sdist: Path) -> dict[str, bytes]:
    """Contents by name, without the folder that holds all."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
        read = {member.name.partition("/")[2]: archive.extractfile(member) for member in members}
        return {name: file.read() for name, file in read.items() if file}


def check_wheel(wheel: Path) -> None:
    """Raises Wrong unless it holds the package, what `init` needs, and nothing else."""
    known = tracked()
    expected = {name: name for name in known if name.startswith("accel_fsdp/")}
    expected |= {f"accel_fsdp/project/{name}": name for name in known if name.startswith(SHIPPED)}
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    files = wheel_files(wheel)
    _compare(wheel, set(files), set(expected) | {f"{info}/{name}" for name in ADDED})
    _same(wheel, files, expected)


def check_sdist(sdist: Path) -> None:
    """Raises Wrong unless it holds what the wheel is made of, its tests and benchmarks, and no file but git's."""
    expected = {name: name for name in tracked() if not name.startswith(LEFT_OUT)}
    files = sdist_files(sdist)
    _compare(sdist, set(files), set(expected) | {"PKG-INFO", ".gitignore"})
    _same(sdist, files, expected)


def _compare(path: Path, found: set[str], expected: set[str]) -> None:
    lacking, more = sorted(expected - found), sorted(found - expected)
    if lacking or more:
        raise Wrong(f"{path.name} lacks {lacking} and holds {more}")


def _same(path: Path, files: dict[str, bytes], expected: dict[str, str]) -> None:
    other = [name for name, source in expected.items() if files[name] != (ROOT / source).read_bytes()]
    if other:
        raise Wrong(f"{path.name} was not built from these files: {other}")


def check_built_again(sdist: Path, wheel: Path) -> None:
    """Raises Wrong unless the sdist alone builds the same wheel."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
        subprocess.run(words, cwd=unpacked, check=True, capture_output=True)
        if wheel_files(Path(folder) / wheel.name) != wheel_files(wheel):
            raise Wrong(f"{sdist.name} builds another wheel than {wheel.name}")


def use(wheel: Path) -> Iterator[str]:
    """Runs the commands by uvx, in an empty folder; a line for each. Raises Wrong if one fails."""
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    program = ["uvx", "--quiet", "--python", sys.executable, "--constraints", ROOT / "constraints.txt"]
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            began = time.perf_counter()
            words = [*program, "--from", wheel.resolve(), "accel-fsdp", *shlex.split(command)]
            ran = subprocess.run(words, cwd=folder, env=mine, capture_output=True, text=True)
            if ran.returncode:
                raise Wrong(f"accel-fsdp {command}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
            yield f"uvx accel-fsdp {command}: {time.perf_counter() - began:.1f} s"


def main() -> None:
    """Checks a folder with one wheel and one sdist."""
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    try:
        check_wheel(wheel)
        check_sdist(sdist)
        check_built_again(sdist, wheel)
        for path, files in ((wheel, wheel_files(wheel)), (sdist, sdist_files(sdist))):
            print(f"{path}: {len(files)} files, {path.stat().st_size / 1e6:.1f} MB")
        for line in use(wheel):
            print(line)
    except Wrong as wrong:
        raise SystemExit(str(wrong)) from wrong


if __name__ == "__main__":
    main()

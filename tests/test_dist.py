"""The wheel and the sdist that `make dist` builds, and the check that `make dist` makes of them."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import distributions
import pytest
from conftest import ROOT, run

pytest.importorskip("hatchling")
if not (ROOT / ".git").exists() or not shutil.which("git"):
    pytest.skip("git says which files belong to the package", allow_module_level=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy of this clone in which another file lies."""
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in distributions.tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (clone / "token.txt").write_text("secret")
    words = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    subprocess.run(words, cwd=clone, check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_they_hold_what_belongs_to_them(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    distributions.check_wheel(wheel)
    distributions.check_sdist(sdist)
    distributions.check_built_again(sdist, wheel)


def test_a_file_too_many_or_too_few_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    more, fewer, other = (tmp_path / name / built[0].name for name in ("more", "fewer", "other"))
    for path in (more, fewer, other):
        path.parent.mkdir()
        shutil.copy(built[0], path)
    with zipfile.ZipFile(more, "a") as archive:
        archive.writestr("accel_fsdp/stray.py", "")
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(fewer, "w") as archive:
        for name in whole.namelist():
            if name != "accel_fsdp/py.typed":
                archive.writestr(name, whole.read(name))
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(other, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name) + b"#" * (name == "accel_fsdp/cli.py"))
    for path, told in ((more, "holds.*stray.py"), (fewer, "lacks.*py.typed"), (other, "not built.*cli.py")):
        with pytest.raises(distributions.Wrong, match=told):
            distributions.check_wheel(path)


def test_a_secret_in_the_sdist_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    path, secret = tmp_path / built[1].name, tmp_path / "token.txt"
    secret.write_text("secret")
    with tarfile.open(built[1]) as whole, tarfile.open(path, "w:gz") as archive:
        for member in whole:
            archive.addfile(member, whole.extractfile(member))
        archive.add(secret, f"{built[1].name.removesuffix('.tar.gz')}/token.txt")
    with pytest.raises(distributions.Wrong, match=r"holds \['token.txt'\]"):
        distributions.check_sdist(path)


def test_the_wheel_carries_scripts_and_yamls(built: tuple[Path, Path], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    installed = run([*pip, "install", "--no-deps", "--no-index", "--target", tmp_path / "site", built[0]])
    assert installed.code == 0, installed.output
    words = [sys.executable, "-P", "-m", "accel_fsdp", "init", tmp_path / "project", "--native"]
    finished = run(words, PYTHONPATH=str(tmp_path / "site"))
    assert finished.code == 0, finished.output
    for name in ("train/sft.py", "train/native.py", "accelerate_configs/fsdp2.yaml", "accelerate_configs/schema.json"):
        assert (tmp_path / "project" / name).read_text() == (ROOT / name).read_text()

"""What README and docs say exists: files, commands, flags."""

import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import reference_docs
import yaml
from conftest import ROOT, SFT, accel_fsdp, run
from hypothesis import given
from jsonschema import Draft7Validator
from test_config import answers

from accel_fsdp import cli
from accel_fsdp.training import ModelArguments, SftArguments
from accel_fsdp.training.data import DataArguments
from accel_fsdp.wizard import Answers, to_yaml

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
GUIDES = [ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
BASH_BLOCKS = re.findall(r"```bash\n(.*?)```", "\n".join([README, *PAGES.values()]), flags=re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BASH_BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.partition("#")[0].strip()
]


def test_the_map_of_the_rooms_names_what_exists() -> None:
    """It names every package, and every path that it names exists."""
    named = set(re.findall(r"`(\w+/[\w./]*)`", PAGES["architecture.md"]))
    package = ROOT / "accel_fsdp"
    assert {f"{path.parent.relative_to(package)}/" for path in package.glob("*/**/__init__.py")} <= named
    assert [path for path in named if not (package / path).exists() and not (ROOT / path).exists()] == []


def test_pages_are_short() -> None:
    """A person reads a page in five minutes, and all of them in an hour."""
    words = {name: len(text.split()) for name, text in {**PAGES, "README.md": README}.items()}
    assert [name for name, count in words.items() if count > 1600] == []
    assert sum(words.values()) <= 16_000


@pytest.mark.parametrize("command", sorted({words[1] for words in COMMANDS if words[0] == "accel-fsdp"}))
def test_flags_of_the_examples_exist(command: str) -> None:
    listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", accel_fsdp(command, "--help").output))
    own = [cli._split_script_args(words[1:])[0][1:] for words in COMMANDS if words[:2] == ["accel-fsdp", command]]
    flags = {word for words in own for word in words if word.startswith("-")}
    assert flags <= listed


def test_script_flags_of_the_pages_exist() -> None:
    known = {field.name for kind in (ModelArguments, DataArguments, SftArguments) for field in fields(kind)}
    text = "\n".join([README, *PAGES.values()])
    for flag in set(re.findall(r"--(\w+_\w+)", text)) - {"config_file", "machine_rank"}:
        assert flag in known, flag


def test_links_between_the_pages_lead_somewhere() -> None:
    for name, text in {**{f"../{path.name}": path.read_text() for path in ROOT.glob("*.md")}, **PAGES}.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / "docs" / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_files_that_a_contributor_is_sent_to_exist() -> None:
    named = re.findall(r"`((?:accel_fsdp|tests|docs|benchmarks)/[\w./-]*)`", "\n".join(map(Path.read_text, GUIDES)))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    assert set(re.findall(r"\]\((\w+\.md)\)", PAGES["index.md"])) == set(PAGES) - {"index.md"}


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", "\n".join([README, *map(Path.read_text, GUIDES)])):
        assert f"\n{target}:" in makefile, target


def test_script_help_lists_its_flags() -> None:
    finished = run([sys.executable, SFT, "--help"])
    assert finished.code == 0
    for flag in ("--model_name_or_path", "--dataset_name", "--use_peft", "--per_device_train_batch_size"):
        assert flag in finished.output


def test_generated_pages_are_up_to_date() -> None:
    old = {name for name, text in reference_docs.pages().items() if (ROOT / name).read_text() != text}
    assert not old, "run make docs"


SCHEMA = Draft7Validator(reference_docs.schema())


@given(wanted=answers())
def test_the_schema_accepts_what_the_wizard_writes(wanted: Answers) -> None:
    assert list(SCHEMA.iter_errors(yaml.safe_load(to_yaml.to_text(wanted)))) == []


@pytest.mark.parametrize(
    "text",
    [
        "num_processes: 2",
        "distributed_type: FSPD",
        "distributed_type: FSDP\nfdsp_config: {}",
        "distributed_type: FSDP\nfsdp_config: {fsdp_ofload_params: true}",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 6}",
        "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A]}",
        "distributed_type: FSDP\nmixed_precision: no",
    ],
)
def test_the_schema_refuses_what_accelerate_would_drop(text: str) -> None:
    Draft7Validator.check_schema(reference_docs.schema())
    assert not SCHEMA.is_valid(yaml.safe_load(text))

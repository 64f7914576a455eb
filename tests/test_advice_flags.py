"""Every flag that an error's `fix:` names is one that the command which prints it has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from accel_fsdp import cli

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMANDS = (
    "config",
    "plan",
    "check",
    "migrate",
    "launch",
    "script",
    "doctor",
    "export",
    "convert",
    "init",
    "checkpoints",
)
PROGRAM = re.compile(
    rf"accel-fsdp ({'|'.join(COMMANDS)})\b|\b(check) --"
    r"|(accelerate launch)\b|(torchrun)\b|(train/sft\.py)|(pip) install|(srun)\b"
)
"""What a fix names before a flag: the flag is that program's. `check --fix FILE` is the linter's own short form."""
PRINTED_BY = {
    " ".join(COMMANDS): "command_line",
    "config": "wizard/validation wizard/interview wizard/command",
    "config plan": "hardware/",
    "plan": "planner/ prediction/ job/",
    "checkpoints": "checkpoints/command",
    "convert": "conversion/",
    "check": "linter/",
    "migrate": "wizard/migration wizard/rewriting",
    "script": "launch/script/",
    "doctor": "launch/doctor/",
    "launch": "launch/",
    "rehearse": "rehearsal/ models/shrink/",
    "export": "exporter/ checkpoints/discover checkpoints/open_checkpoint "
    "checkpoints/safetensors_files checkpoints/rank_files cli",
    "train/sft.py": "training/ models/causal atomic_files",
    "": "config/ wizard/ models/",
}
"""Which commands print the errors of which rooms and modules; those of the last line name the program themselves."""


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The flags of each program, as its own parser has them."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    from accel_fsdp.training import arguments
    from accel_fsdp.training.data import DataArguments

    groups = [arguments.ModelArguments, DataArguments, arguments.SftArguments]
    parsers = {
        "accelerate launch": launch_command_parser(),
        "torchrun": get_args_parser(),
        "train/sft.py": arguments._Parser(groups, allow_abbrev=False),
    }
    flags_of = {
        name: {string for action in parser._actions for string in action.option_strings}
        for name, parser in parsers.items()
    }
    flags_of["train/sft.py"] |= flags_of["accelerate launch"]  # they stand on one command line
    return {name: {flag.replace("_", "-") for flag in flags} for name, flags in flags_of.items()} | {
        "pip": {"--upgrade"},
        "srun": {"--ntasks-per-node"},
    }


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_knows_the_flags_of_its_fixes(
    command: str, known: dict[str, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli._parse([command, "--help"])
    flags = set(FLAG.findall(capsys.readouterr().out))
    assert flags
    missing = [f"{place} {flag}" for program, flag, place in advised() if program == command and flag not in flags]
    assert missing == []


def test_each_command_that_is_named_exists() -> None:
    """In messages, pages and scripts; the few other words that follow the name are prose."""
    prose = {"is", "and", "watch", "mark"}
    places = [
        *(ROOT / "accel_fsdp").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "train/sft.py",
    ]
    named = {word for path in places for word in re.findall(r"accel-fsdp ([a-z]+)", path.read_text())}
    assert named - prose == set(cli.COMMANDS)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("program", ["train/sft.py", "accelerate launch", "torchrun", "pip", "srun"])
def test_other_programs_know_the_flags_of_the_fixes(program: str, known: dict[str, set[str]]) -> None:
    flags_advised = [(flag, place) for name, flag, place in advised() if name == program]
    assert [f"{place} {flag}" for flag, place in flags_advised if flag not in known[program]] == []


def test_no_fix_leaves_open_whose_flag_it_means() -> None:
    assert [f"{place} {flag}" for program, flag, place in advised() if not program] == []


def advised() -> Iterator[tuple[str, str, str]]:
    """Program, flag and place of every flag in a `fix=`."""
    for path in sorted((ROOT / "accel_fsdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                for program, flag in named(module_of(path), text_of(node.value)):
                    yield program, flag.replace("_", "-"), f"{path.name}:{node.value.lineno}"


def module_of(path: Path) -> str:
    return path.relative_to(ROOT / "accel_fsdp").with_suffix("").as_posix()


def named(module: str, text: str) -> Iterator[tuple[str, str]]:
    """The flags of one fix, each with the program that stands before it, else with those that print the module."""
    printers = next((names for names, modules in PRINTED_BY.items() if module.startswith(tuple(modules.split()))), "")
    for flag in FLAG.finditer(text):
        before = list(PROGRAM.finditer(text, 0, flag.start() + 2))
        programs = [next(filter(None, before[-1].groups()))] if before else re.split(r" (?!launch)", printers)
        yield from ((program, flag.group()) for program in programs)


def text_of(node: ast.expr) -> str:
    """The words of a string or f-string, in order; what is filled in is a blank."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)} {text_of(node.orelse)}"
    return " "

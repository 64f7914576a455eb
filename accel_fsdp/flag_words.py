"""Refuses invalid command-line words before tyro parses them.

tyro would use the word after a misspelt flag as its value, and then report FILE as unknown or missing. For a wrong
value it lists types and its attempts to parse them, and it ignores a flag with the value None.
"""

import itertools
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from accel_fsdp.errors import UsageError, did_you_mean

HELP = ("-h", "--help")


@dataclass(frozen=True)
class Flag:
    """A flag of a command: its name as typed, and the types of its value; only `bool` for a switch."""

    name: str
    types: tuple[Any, ...]

    @property
    def is_switch(self) -> bool:
        return self.types == (bool,)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind))


def arg(
    text: str, metavar: str = "", *, default: str = "", hint: str = "", alias: str = "", name: str | None = None
) -> Any:
    """The help of a flag or a positional word, for its annotation.

    `default` says what holds without the flag, if its value doesn't; `hint` is shown in place of "(default: ...)".
    """
    return tyro.conf.arg(
        name=name,
        metavar=metavar or None,
        help=text,
        help_behavior_hint=f"(default: {default})" if default else hint or None,
        aliases=[alias] if alias else None,
    )


def refuse_wrong(command: str, declared: type, words: Sequence[str]) -> list[str]:
    """Raises unless each flag among `words` is a field of `declared`, the class to be parsed, and has a valid value.

    Returns a note for each flag with several values, of which the last one counts, as in argparse.
    """
    flags, places = flags_of(declared), _places_of(declared)
    if set(words) & set(HELP) or any(word.startswith("--tyro-") for word in words):
        return []
    unknown: list[str] = []
    plain: list[str] = []
    values_of: dict[str, list[str]] = {}
    for name, value in _pairs(flags, words):
        if not is_flag(name):
            plain.append(name)
        elif (flag := flags.get(name)) is None:
            unknown.append(name)
        elif value is not None:
            _check(command, flag, value)
            values_of.setdefault(flag.name, []).append(value)
    if unknown:
        problems = " ".join(f"{name} is not a flag of {command}.{did_you_mean(name, flags)}" for name in unknown)
        raise UsageError(problems, why="nothing was done", fix=f"{command} --help shows the flags")
    if places is not None and len(plain) > places:
        extra = plain[places]
        hint = "--script" if extra.endswith(".py") and "--script" in flags else ""
        raise UsageError(
            f"{command} does not take the word {extra}",
            why="nothing was done",
            fix=f"{hint} {extra}" if hint else f"{command} --help shows what it takes",
        )
    repeated = {name: values for name, values in values_of.items() if len(set(values)) > 1}
    return [
        f"{name} is given {len(values)} times; the last one counts: {values[-1]}" for name, values in repeated.items()
    ]


def _places_of(declared: type) -> int | None:
    """The number of positional words that such a class takes; None for any number."""
    hints = [get_args(hint) for hint in get_type_hints(declared, include_extras=True).values()]
    kinds = [hint[0] for hint in hints if tyro.conf.Positional in hint]
    return None if any(get_origin(kind) is tuple for kind in kinds) else len(kinds)


def flags_of(declared: type) -> dict[str, Flag]:
    """The flags of such a class by each of their names, without positional arguments."""
    flags: dict[str, Flag] = {}
    for field, hint in get_type_hints(declared, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if tyro.conf.Positional in notes:
            continue
        argument = next((note for note in notes if hasattr(note, "aliases")), None)
        name = f"--{argument.name}" if argument and argument.name else flag_of(field)
        is_union = get_origin(kind) in (Union, types.UnionType)
        flag = Flag(name, get_args(kind) if is_union else (kind,))
        flags |= dict.fromkeys((name, *((argument and argument.aliases) or ())), flag)
    return flags


def _pairs(flags: dict[str, Flag], words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag among these words with its value, if it has one; other words unchanged."""
    remaining = list(words)
    while remaining and (word := remaining.pop(0)) != "--":
        if not is_flag(word):
            yield word, None
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        elif name not in flags and name[:2] in flags:  # -yo FILE, which tyro splits
            last = flags.get(f"-{name[-1]}")
            if last and not last.is_switch and remaining and not is_flag(remaining[0]):
                remaining.pop(0)
            continue
        flag = flags.get(name)
        if equals:
            yield name, value
        elif flag and not flag.is_switch and remaining and not is_flag(remaining[0]):
            yield name, remaining.pop(0)
        else:
            yield name if flag else word, None


def is_flag(word: str) -> bool:
    """Whether a word is a flag, and not a negative number or the - for stdin."""
    return word.startswith("-") and word.lstrip("-")[:1].isalpha()


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def field_name(word: str) -> str:
    """The name of the field that a flag is parsed into: max_steps for --max-steps."""
    return word.lstrip("-").replace("-", "_")


def _check(command: str, flag: Flag, value: str) -> None:
    """Refuses a value that isn't of the flag's types."""
    if flag.is_switch:
        raise UsageError(
            f"{flag.name} takes no value, but {value} was given",
            why=f"{flag.name} without a value turns it on",
            fix=f"{flag.name}, or nothing",
        )
    if value == "None" and type(None) in flag.types:
        raise UsageError(
            f"{flag.name} takes {_expected_value(flag)}, not None",
            why="None would count as a missing flag",
            fix=f"leave out {flag.name}",
        )
    problem = f"not {value}"
    if int in flag.types and not _parses(int, value):
        example = "a whole number"
    elif float in flag.types and not _parses(float, value):
        example = "a number such as 2.5"
    elif flag.choices and value not in flag.choices:
        problem, example = f"not {value}.{did_you_mean(value, flag.choices)}", "one of them"
    else:
        return
    raise UsageError(
        f"{flag.name} takes {_expected_value(flag)}, {problem}",
        why="nothing was done",
        fix=f"{flag.name} with {example}; {command} --help shows the flags",
    )


def _expected_value(flag: Flag) -> str:
    if flag.choices:
        return f"one of {', '.join(flag.choices)}"
    kinds = {int: "a whole number", float: "a number", Path: "a path"}
    return next((words for kind, words in kinds.items() if kind in flag.types), "a name")


def _parses(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


LISTS = frozenset({"lora_target_modules", "target_modules", "lora_modules_to_save", "modules_to_save"})
"""The flags that take several words; after another flag, a second word may be a script or a redirection."""


def parse_command_line(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and a bare `--name` (true), as HfArgumentParser understands them.

    The words of a list are joined by spaces.
    """
    args: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = list(itertools.takewhile(lambda word: not word.startswith("--"), words[position + 1 :]))
        field = field_name(name)
        args[field] = value if equals else " ".join(following[: None if field in LISTS else 1]) if following else True
    return args


def without_flags(words: Sequence[str], names: Collection[str]) -> tuple[tuple[str, ...], list[str]]:
    """The words without these flags and their values, and the names of those that were there."""
    remaining, dropped, skipping = [], [], False
    for word in words:
        if word.startswith("--"):
            name = field_name(word.partition("=")[0])
            skipping = name in names
            dropped += [name] if skipping else []
        if not skipping:
            remaining.append(word)
    return tuple(remaining), dropped


def with_defaults(words: Sequence[str], defaults: Sequence[str]) -> tuple[str, ...]:
    """The words, after those flags of `defaults` that they lack."""
    return (*without_flags(defaults, parse_command_line(words))[0], *words)

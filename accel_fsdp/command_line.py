"""Command lines: the flags that a dataclass declares, parsed by argparse, and the arguments of training scripts."""

import argparse
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from accel_fsdp.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Argument:
    """The help of a flag or a positional word, in its annotation.

    `default` says what holds without the flag, if its value doesn't; `hint` is shown in place of "(default: ...)".
    """

    help: str
    metavar: str = ""
    default: str = ""
    hint: str = ""
    alias: str = ""
    name: str = ""
    is_positional: bool = False

    @property
    def ending(self) -> str:
        return f"(default: {self.default})" if self.default else self.hint


def arg(text: str, metavar: str = "", **options: str) -> Any:
    return Argument(text, metavar, **options)  # type: ignore[arg-type]


def positional(text: str, metavar: str, hint: str = "") -> Any:
    """The annotation of a positional word."""
    return Argument(text, metavar, hint=hint, is_positional=True)


@dataclass(frozen=True)
class Flag:
    """One field of a command's class; `types` are those of its value, without None."""

    field: str
    argument: Argument
    types: tuple[Any, ...]
    default: Any

    @property
    def name(self) -> str:
        return f"--{self.argument.name}" if self.argument.name else flag_of(self.field)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.argument.alias, self.name)))

    @property
    def is_switch(self) -> bool:
        return self.types == (bool,)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(choice for kind in self.types if get_origin(kind) is Literal for choice in get_args(kind))

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        ending = self.argument.ending
        if not ending and self.default not in (None, False, "", MISSING, ()):
            ending = f"(default: {self.default})"
        options: dict[str, Any] = {"help": f"{self.argument.help} {ending}".strip().replace("%", "%%")}
        if self.is_switch:
            parser.add_argument(*self.names, dest=self.field, action="store_true", **options)
            return
        options |= {"type": self._converted, "metavar": self.argument.metavar or self._metavar}
        if not self.argument.is_positional:
            required = self.default is MISSING
            parser.add_argument(*self.names, dest=self.field, required=required, default=self.default, **options)
        elif get_origin(self.types[0]) is tuple:
            parser.add_argument(self.field, nargs="*", **options)
        else:
            parser.add_argument(
                self.field, nargs=None if self.default is MISSING else "?", default=self.default, **options
            )

    @property
    def _metavar(self) -> str:
        return f"{{{','.join(self.choices)}}}" if self.choices else getattr(self.types[0], "__name__", "value").upper()

    def _converted(self, text: str) -> Any:
        if self.choices and text not in self.choices:
            known = ", ".join(self.choices)
            raise argparse.ArgumentTypeError(f"{text} is not one of {known}.{did_you_mean(text, self.choices)}")
        kind = get_args(self.types[0])[0] if get_origin(self.types[0]) is tuple else self.types[0]
        try:
            return text if self.choices else kind(text)
        except ValueError:
            expected = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
            raise argparse.ArgumentTypeError(f"{text} is not {expected}") from None


def flags_of(declared: type) -> dict[str, Flag]:
    """The flags of a command's class by each of their names, without positional words."""
    return {name: flag for flag in _declared(declared) if not flag.argument.is_positional for name in flag.names}


def _declared(declared: type) -> Iterator[Flag]:
    hints = get_type_hints(declared, include_extras=True)
    for field in fields(declared):
        kind, argument = get_args(hints[field.name])[:2] if get_origin(hints[field.name]) is Annotated else (None, None)
        is_union = get_origin(kind) in (Union, types.UnionType)
        kinds = tuple(part for part in get_args(kind) if part is not type(None)) if is_union else (kind,)
        yield Flag(field.name, argument, kinds, field.default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str, fix: str = "") -> NoReturn:
        text = message.removeprefix("argument ")
        raise UsageError(text, why="nothing was done", fix=fix or f"{self.prog} --help shows what it takes")

    def print_help(self, file: Any = None) -> None:
        """Writes the help; argparse's own method ignores a full disk."""
        sys.stdout.write(self.format_help())


def parse(command: str, declared: type, words: Sequence[str], summary: str = "") -> Any:
    """The instance of a command's class that these words describe; dashes and underscores in flags are the same.

    Raises:
        UsageError: a word is not understood. SystemExit: help was asked for.
    """
    parser = _Parser(prog=command, description=summary, allow_abbrev=False)
    for flag in _declared(declared):
        flag.add_to(parser)
    try:
        values, unknown = parser.parse_known_intermixed_args(list(_dashed(words)))
    except argparse.ArgumentError as error:
        parser.error(str(error))
    if unknown := [text for text in unknown if text != "--"]:
        names = [text.partition("=")[0] for text in unknown if is_flag(text)]
        problems = [f"{name} is not a flag of {command}.{did_you_mean(name, flags_of(declared))}" for name in names]
        is_script = unknown[0].endswith(".py") and "--script" in flags_of(declared)
        text = " ".join(problems) or f"{command} does not take the word {unknown[0]}"
        parser.error(text, f"--script {unknown[0]}" if is_script else "")
    several = {name: tuple(value) for name, value in vars(values).items() if isinstance(value, list)}
    return declared(**{**vars(values), **several})


def _dashed(words: Sequence[str]) -> Iterator[str]:
    """The words, with dashes in the names of flags, up to `--`."""
    for position, text in enumerate(words):
        if text == "--":
            yield from words[position:]
            return
        name, equals, value = text.partition("=")
        yield name.replace("_", "-") + equals + value if name.startswith("--") else text


def is_flag(text: str) -> bool:
    """Whether a word is a flag, and not a negative number or the - for stdin."""
    return text.startswith("-") and text.lstrip("-")[:1].isalpha()


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def field_name(text: str) -> str:
    """The name of the field that a flag is parsed into: max_steps for --max-steps."""
    return text.lstrip("-").replace("-", "_")


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


NAME = re.compile(r"(--?[A-Za-z][\w.-]*|[A-Za-z_+][\w./@]*(?==))(=|\Z)")
"""The beginning of a word that names an argument: `--flag`, `--flag=value` or `name=value`."""


def values_by_name(words: Sequence[str]) -> dict[str, str]:
    """All values of a command line of any script, by the names that an argument parser or Hydra gives them."""
    values, name = dict[str, list[str]](), "arguments"
    for word in words:
        if begins := NAME.match(word):
            name, word = field_name(begins[1]), word[begins.end() :]
        values.setdefault(name, []).append(word)
    return {name: " ".join(filter(None, given)) or "given" for name, given in values.items()}


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

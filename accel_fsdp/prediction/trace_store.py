"""Shapes and tapes on disk: bundled for the models of the catalogue, cached for others. Pure; needs no torch to read.

A file holds each size and each tape once, since variants share most of them. An event is one number: three times the
index of its size in `sizes`, plus 0 for a release, 1 for a gradient, 2 for an allocation.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from accel_fsdp.atomic_files import write_text
from accel_fsdp.errors import UserError, require
from accel_fsdp.models import Divisible, catalogue
from accel_fsdp.prediction.memory import SHIPPED, Block, Event, ModelShape, Parameter, Size, Tape, Tapes, Variant

RECORDING = 7
"""Raised whenever recording a model again would give other tapes, so that older files are not used."""
FOLDER = "recorded"
TRACED_WITH = ("torch", "transformers", "peft")
TraceRecord: TypeAlias = tuple[ModelShape, dict[str, Tapes]]


def find(name: str) -> TraceRecord | None:
    """A catalogue model's bundled shape and tapes by variant; None if it isn't bundled or can't be recorded."""
    catalogue_name = catalogue.canonical(name)
    if catalogue_name is None or not shipped(catalogue_name):
        return None
    shape, tapes = _bundled(first_alike(catalogue_name))
    positions = catalogue.entries()[catalogue_name]["positions"]
    return replace(shape, name=catalogue_name, positions=positions), tapes


def shipped(name: str) -> tuple[str, ...]:
    """The variants that are bundled for a model of the catalogue."""
    methods = catalogue.entries()[name].get("methods")
    return tuple(variant for variant in SHIPPED if methods is None or Variant.of(variant).method in methods)


@cache
def _bundled(name: str) -> TraceRecord:
    text = files("accel_fsdp.prediction").joinpath(FOLDER).joinpath(file_name(name)).read_text(encoding="utf-8")
    facts = catalogue.entries()[name]["facts"]
    shape, tapes = from_text(text, Divisible.of({"tensor_plan": False, "expert_plan": False, **facts}))
    return replace(shape, stored_buffers=facts.get("persistent_buffers", 0)), tapes


def first_alike(name: str) -> str:
    """The first model of the catalogue with the same configuration; its file serves all of them."""
    entries = catalogue.entries()
    return next(other for other in entries if entries[other]["config"] == entries[name]["config"])


def file_name(name: str) -> str:
    return name.replace("/", "--") + ".json"


def key_of(config: Mapping[str, Any], variants: tuple[str, ...]) -> str:
    """A hash of the model's configuration, the variants, and the libraries' versions."""
    import hashlib
    from importlib.metadata import version

    require("tracing what a model allocates", *TRACED_WITH)
    libraries = {name: version(name).split("+")[0] for name in TRACED_WITH}
    content = json.dumps([RECORDING, libraries, variants, config], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """The folder with the records of models outside the catalogue."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "accel-fsdp"


def cached_or_recorded(
    config: Mapping[str, Any], variant: str, record: Callable[[], TraceRecord]
) -> tuple[ModelShape, Tapes]:
    """The shape and tapes of a config's model in one variant, from the cache, or recorded and cached now."""
    key = key_of(config, (variant,))
    path = cache_folder() / f"{key}.json"
    try:
        shape, tapes = from_text(path.read_text(encoding="utf-8"))
        return shape, tapes[variant]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass  # there is none, or it can't be read
    shape, tapes = record()
    with suppress(UserError):  # a cache that can't be written only costs time
        write_text(path, to_text(key, shape, tapes))
    return shape, tapes[variant]


def to_text(key: str, shape: ModelShape, tapes: Mapping[str, Tapes]) -> str:
    sizes: dict[Size, int] = {}
    places: dict[Tape, int] = {}
    lines: list[Any] = []

    def place(tape: Tape | None) -> int:
        if tape is None:
            return -1
        if tape not in places:
            alone = place(tape.alone)
            sides = [
                [3 * sizes.setdefault(event.size, len(sizes)) + event.sign + 1 for event in side]
                for side in (tape.forward, tape.backward, tape.first)
            ]
            places[tape] = len(lines)
            lines.append([*sides, sizes.setdefault(tape.output, len(sizes)), int(tape.keeps_input), alone])
        return places[tape]

    variants = {
        name: [
            [place(tape) for tape in tapes_of.blocks],
            [place(tape) for tape in tapes_of.masked],
            *(place(tape) for tape in (tapes_of.embedding, tapes_of.head)),
        ]
        for name, tapes_of in tapes.items()
    }
    content = {
        "key": key,
        "shape": asdict(shape),
        "sizes": [_without_zeros(size) for size in sizes],
        "tapes": lines,
        "variants": variants,
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _without_zeros(size: Size) -> list[float]:
    numbers = list(size)
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def from_text(text: str, division: Divisible | None = None) -> TraceRecord:
    """The shape and tapes of a file; `division` replaces the one in it, which bundled files lack."""
    content = json.loads(text)
    events = [Event(sign, Size(*size)) for size in content["sizes"] for sign in (-1, 0, 1)]
    tapes: list[Tape] = []
    for *sides, output, keeps, alone in content["tapes"]:
        forward, backward, first = (tuple(events[code] for code in side) for side in sides)
        one_row = None if alone < 0 else tapes[alone]
        tapes.append(Tape(forward, backward, events[3 * output].size, bool(keeps), one_row, first))
    by_variant = {
        name: Tapes(
            blocks=tuple(tapes[index] for index in blocks),
            masked=tuple(None if index < 0 else tapes[index] for index in masked),
            embedding=tapes[embedding],
            head=tapes[head],
        )
        for name, (blocks, masked, embedding, head) in content["variants"].items()
    }
    return _shape(content["shape"], division), by_variant


def _shape(content: dict[str, Any], division: Divisible | None) -> ModelShape:
    blocks = tuple(
        Block(block["name"], tuple(block["layers"]), _parameters(block["parameters"])) for block in content["blocks"]
    )
    outer = {"outer": _parameters(content["outer"]), "untraced": tuple(content.get("untraced", ()))}
    known = division or Divisible.of(content["division"])
    return ModelShape(**{**content, **outer, "blocks": blocks, "division": known})


def _parameters(content: list[dict[str, Any]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(**{**parameter, "shape": tuple(parameter["shape"])}) for parameter in content)

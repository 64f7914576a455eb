"""The shape and tapes of a model by name: bundled, else cached, else recorded now from its config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_fsdp import console
from accel_fsdp.job import Recipe
from accel_fsdp.models import catalogue, config_json
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import ModelShape, Tapes


class Recorded(dict[str, Tapes]):
    """The tapes of a model; a variant that isn't bundled is recorded on first access, and cached."""

    def __init__(self, name: str, config: Mapping[str, Any], kept: Mapping[str, Tapes]) -> None:
        super().__init__(kept)
        self.name, self.config = name, config

    def __missing__(self, variant: str) -> Tapes:
        self[variant] = _record(self.name, self.config, variant)[1]
        return self[variant]


def read_shape(name: str, recipe: Recipe) -> tuple[ModelShape, Recorded]:
    """The shape and tapes: bundled, else from the cache, else recorded from the model's config."""
    folder = Path(name)
    catalogue_name = None if folder.exists() else catalogue.canonical(name)
    if catalogue_name:
        config = catalogue.entries()[catalogue_name]["config"]
        if bundled := trace_store.find(catalogue_name):
            return bundled[0], Recorded(catalogue_name, config, bundled[1])
        name = catalogue_name
    elif folder.is_dir():
        config = config_json.settings_in(folder)
    else:
        from accel_fsdp.models import read_config

        config = read_config(name).to_dict()
    first = f"{'bf16' if recipe.precision != 'no' else 'fp32'}-full-sdpa"
    shape, tapes = _record(name, config, first)
    return shape, Recorded(name, config, {first: tapes})


def _record(name: str, config: Mapping[str, Any], variant: str) -> tuple[ModelShape, Tapes]:
    def anew() -> trace_store.TraceRecord:
        with console.waiting(f"Tracing {name} ({variant})"):
            from transformers import AutoConfig

            from accel_fsdp.models import read_config
            from accel_fsdp.prediction.tracing.fit import record_model

            in_catalogue = name in catalogue.entries() and not Path(name).exists()
            with config_json.explained_errors(name):
                whole = AutoConfig.for_model(**config) if in_catalogue else read_config(name)
                return record_model(name, whole, (variant,))

    shape, tapes = trace_store.cached_or_recorded(config, variant, anew)
    return replace(shape, name=name), tapes

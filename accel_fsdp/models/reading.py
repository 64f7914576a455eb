"""Reads a model's config and tokenizer from a hub id or a local folder."""

import os
from pathlib import Path
from typing import Any

from accel_fsdp.errors import LIBRARIES, NotInstalled, UserError, did_you_mean, first_line, is_installed, require
from accel_fsdp.models import catalogue, config_json, remote_code


def read_config(name: str, revision: str = "main", run_code: bool = False) -> Any:
    """Reads a model's config from a hub id or a local folder. Its own Python runs with `run_code` alone.

    Raises:
        UserError: there is none, it can't be read, or not without its own Python.
    """
    check_local_path(name, "model")
    if Path(name).is_dir():
        config_json.settings_in(Path(name))  # says what is wrong with the file
    _require_reading(name)
    from transformers import AutoConfig

    with config_json.explained_errors(name):
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=run_code)
        except OSError as error:
            raise UserError(
                f"cannot read the config of {name}: {first_line(error)}{catalogue.did_you_mean(name)}",
                why="the layer classes and sizes come from it",
                fix="check the name; for a gated model: hf auth login; offline: give the folder of a downloaded model",
            ) from error
        except ValueError as error:
            if remote_code.is_refusal(error):
                raise remote_code.refusal(name, "its config") from error
            raise
        if not run_code:
            remote_code.check_kernels(name, config)
        return config


def _require_reading(name: str) -> None:
    """Checks that the libraries that read models outside of the catalogue are installed.

    Raises:
        NotInstalled: one is missing. UserError: one is missing, and a bundled model has nearly that name.
    """
    purpose, libraries = f"reading the model {name}", ("transformers", "torch")
    not_installed = next((library for library in libraries if not is_installed(library)), "")
    if not_installed and not Path(name).exists() and (near := catalogue.near(name)):
        raise UserError(
            f"{name} is not a bundled model.{catalogue.did_you_mean(name)}",
            why=NotInstalled.of(not_installed, "reading another model").what,
            fix=f"give {near}; or, if {name} is another model: {NotInstalled.of(not_installed).fix}",
        )
    require(purpose, *libraries)


def read_tokenizer(name: str, revision: str = "main", run_code: bool = False) -> Any:
    """Reads a model's tokenizer from a hub id or a local folder. Its own Python runs with `run_code` alone.

    Raises:
        UserError: there is none, it can't be read, or not without its own Python.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=run_code)
    except BaseException as error:  # the Rust library's panics are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
            raise
        if remote_code.is_refusal(error):
            raise remote_code.refusal(name, "its tokenizer") from error
        raise UserError(
            f"cannot load a tokenizer from {name}: {first_line(error)}",
            why="the data can't be tokenised",
            fix="copy the tokenizer files of the base model into that folder",
        ) from error


def check_local_path(name: str, what: str, example: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> None:
    """Refuses a name that can only be a folder and doesn't exist; hub ids pass, and `example` is one."""
    path = Path(name)
    is_path = not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if not is_path or os.path.exists(name):  # unlike Path.exists it takes names of any length
        return
    try:
        siblings = os.listdir(path.parent)
    except OSError:
        siblings = []
    raise UserError(
        f"{what} {name} does not exist.{did_you_mean(path.name, siblings)}",
        why="nothing can be read from it",
        fix=f"give an existing path, or a hub id such as {example}",
    )

"""The Hugging Face hub: models are fetched for an export, and exports are uploaded.

After an interruption of an upload, the next try keeps the files already uploaded.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UsageError, UserError, first_line
from accel_fsdp.models import catalogue


def check_name(repository: str) -> None:
    """Refuses an invalid repository name before hours of work."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(
            f"--push-to-hub {repository} is not the name of a repository: {first_line(error)}",
            why="the hub would refuse the upload",
            fix="--push-to-hub NAME/MODEL",
        ) from error


def check_login(token: str | None) -> None:
    """Checks the login to the hub, before hours of work that end with an upload."""
    from huggingface_hub import HfApi

    with _explained(
        "--push_to_hub, and the hub can't be used",
        why="the upload would stop the run",
        fix="check the network and `hf auth login`; or leave it out, and push the export when it is done: "
        "accel-fsdp export --check OUTPUT_DIR/final --push-to-hub NAME/MODEL",
    ):
        HfApi().whoami(token)


@contextlib.contextmanager
def _explained(what: str, why: str, fix: str) -> Iterator[None]:
    """Reports what the hub's library and its HTTP library raise; for a file of an upload it raises RuntimeError."""
    from huggingface_hub import errors

    transport: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except (transport, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{what}: {first_line(error)}", why=why, fix=fix) from error


def push(folder: Path, repository: str, private: bool) -> str:
    """Makes the repository if need be, and uploads all files; returns its address.

    Raises:
        UserError: a file is a link out of the folder; or the hub refuses them or can't be reached. The folder stays.
    """
    from huggingface_hub import HfApi

    for path in (path for path in sorted(folder.rglob("*")) if not path.is_dir()):
        # the hub's library would follow any link, and wait for pipes
        untrusted_files.check(path, within=folder)
    with _explained(
        f"the hub doesn't take {repository}",
        why=f"the export is complete in {folder}, and nowhere else",
        fix="check the network and `hf auth login`, then push it again: "
        f"accel-fsdp export --check {folder} --push-to-hub {repository}",
    ):
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        hidden = [".*", "*/.*"]  # files that are not exported
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, ignore_patterns=hidden, commit_message="Model")
    return str(url)


def fetch(model: str, with_weights: bool, revision: str | None = None) -> Path:
    """The folder of a hub model in the cache: config and tokenizer, and the weights where they are needed.

    `revision`: the branch, tag or commit that was trained on, None for the hub's own default.
    """
    from huggingface_hub import snapshot_download

    needs = "the adapter is merged into it" if with_weights else "the export needs its config and tokenizer"
    with _explained(
        f"cannot get {model} at revision {revision}" if revision else f"cannot get {model}",
        why=f"it is the model that --model names, else adapter_config.json or the run's run.json; {needs}",
        fix=f"say where it is now: --model FOLDER.{catalogue.did_you_mean(model)}",
    ):
        if ".." in (revision or ""):  # it becomes part of a path in the cache
            raise ValueError("there is no branch, tag or commit of that name")
        patterns = ["*.json", "*.txt", "*.model", "*.jinja", *([file_names.ALL_SAFETENSORS] if with_weights else [])]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))

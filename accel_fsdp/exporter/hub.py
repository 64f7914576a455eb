"""Uploads an export to the Hugging Face hub; after an interruption, the next try keeps the files already uploaded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from accel_fsdp import untrusted_files
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.models import first_line

HIDDEN = [".*", "*/.*"]
"""Files that are not exported."""


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
        UsageError: the repository's name is invalid. UserError: a file is a link out of the folder; or the hub refuses
        them or can't be reached. The folder stays.
    """
    from huggingface_hub import HfApi

    check_name(repository)
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
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, ignore_patterns=HIDDEN, commit_message="Model")
    return str(url)

"""Uploads an export to the Hugging Face hub; what has been uploaded stays there when it is cut off and tried again."""

from pathlib import Path

from accel_fsdp.errors import UserError


def push(folder: Path, repository: str, private: bool) -> str:
    """Makes the repository if need be, and uploads all files; returns its address.

    Raises:
        UserError: the hub refuses it or can't be reached; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Model")
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise UserError(
            f"the hub doesn't take {repository}: {str(error).splitlines()[0]}",
            why=f"the export is complete in {folder}, and nowhere else",
            fix=f"hf auth login, then: accel-fsdp export --check {folder} --push-to-hub {repository}",
        ) from error
    return str(url)

"""Upload of an export to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

from qat_lora.errors import UserError, first_line

FAILURES = (HTTPError, HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError)


def check_repository(name: str) -> None:
    """Raise UserError unless a model repository of that name can be made: it must be new, and the user logged in."""
    api = HfApi()
    try:
        there = api.repo_exists(name)
        api.whoami()
    except FAILURES as error:
        raise UserError(
            f"--push-to-hub {name}: {first_line(error)}; log in with `hf auth login`, or leave the option out"
        ) from error
    if there:
        raise UserError(f"--push-to-hub {name} is there already; give another name")


def push(folder: Path, name: str) -> str:
    """Upload a folder to a new private model repository; returns its address."""
    api = HfApi()
    try:
        address = api.create_repo(name, private=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except FAILURES as error:
        again = f"hf upload {name} {folder}"
        raise UserError(f"{folder} is written, but was not uploaded ({first_line(error)}); run {again}") from error
    return str(address)

"""Finds an artifact of gates: a folder, or a repository of the hub."""

import os
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE

# What the hub raises where a repository cannot be had. Errors of httpx are no OSError, and only some of them
# does the hub turn into its own.
UNREACHABLE: tuple[type[Exception], ...] = (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    ConnectionError,
    TimeoutError,
    httpx.HTTPError,
    httpx.InvalidURL,
)


def fetch(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of an artifact: as it is, or fetched into the hub's cache.

    Args:
        path_or_hub_id: a folder, or the id of a hub repository, of which the two files are fetched and
            nothing else.
        revision: of the hub repository.

    Raises:
        ValueError: there is neither.
    """
    folder, hub_id = Path(path_or_hub_id), os.fspath(path_or_hub_id)
    if folder.is_dir():
        return folder
    files = [METADATA_FILE, WEIGHTS_FILE]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
    except UNREACHABLE as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"there are no gates at {hub_id!r}: it is no folder here (seen from {str(Path.cwd())!r}), and "
            f"as a hub repository it could not be fetched ({type(error).__name__}: {reason}). Pass the "
            "folder that train/distill.py wrote (`output` of its config)."
        ) from None

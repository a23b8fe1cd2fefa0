"""Finds an artifact of gates, a folder or a repository of the hub, and publishes gates to the hub.

A repository may be named with a revision behind an @ (`owner/name@v1`), which no id of the hub holds: so
every place that takes a folder or a hub id takes a revision.
"""

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE, read_metadata, save_gates
from retain.gates.base import GateSet
from retain.gates.card import CARD, card_text

# The HTTP client of huggingface_hub: httpx, or httpx2 from 2.4 on.
HTTP: Any = import_module(
    next(own.__module__ for own in HfHubHTTPError.__mro__ if own.__module__.startswith("httpx")).split(".")[0]
)
# What the hub raises where a repository cannot be had. Errors of its client are no OSError, and only some of
# them does the hub turn into its own.
UNREACHABLE: tuple[type[Exception], ...] = (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    OSError,
    HTTP.HTTPError,
    HTTP.InvalidURL,
)


def fetch(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of an artifact: as it is, or fetched into the hub's cache.

    Args:
        path_or_hub_id: a folder, or the id of a hub repository, of which the two files are fetched and
            nothing else; its revision may stand behind it (`owner/name@v1`).
        revision: of the hub repository: a branch, a tag or a commit; None: what the id says, else `main`.

    Raises:
        ValueError: there is neither.
    """
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    hub_id, stated = split_revision(os.fspath(path_or_hub_id))
    if stated is not None and revision is not None:
        raise ValueError(
            f"gates {os.fspath(path_or_hub_id)!r} name a revision, and revision={revision!r} another way: "
            "state one of the two."
        )
    try:
        return Path(
            snapshot_download(
                hub_id, revision=stated or revision, allow_patterns=[METADATA_FILE, WEIGHTS_FILE]
            )
        )
    except UNREACHABLE as error:
        raise ValueError(
            f"there are no gates at {os.fspath(path_or_hub_id)!r}: it is no folder here (seen from "
            f"{str(Path.cwd())!r}), and as a hub repository it could not be fetched ({reason_of(error)}). "
            f"{next_step(error)}"
        ) from None


def split_revision(hub_id: str) -> tuple[str, str | None]:
    """A hub id, and the revision behind its @, if there is one."""
    name, at, revision = hub_id.partition("@")
    return name, revision if at else None


def reason_of(error: BaseException) -> str:
    """Class and sentences of an error of the hub, in one line: "401 Client Error.", and what that means."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(". ")


def next_step(error: BaseException) -> str:
    """The next step after a repository of gates could not be had."""
    if isinstance(error, RevisionNotFoundError):
        return "The repository is there, and has no such branch, tag or commit: check the revision."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, RepositoryNotFoundError | GatedRepoError) or status in (401, 403):
        return (
            "It does not exist, or it is private or gated: check the name, and log in with `hf auth login` "
            "(or set HF_TOKEN) as someone who may read it."
        )
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled, HTTP.HTTPError)):
        return (
            "Without the hub, gates are read from its cache, if they were loaded before: connect (and see "
            f"that HF_HUB_OFFLINE is not set; it is {os.environ.get('HF_HUB_OFFLINE', 'not set')!r}), or "
            "pass a folder."
        )
    return "Pass the folder that train/distill.py wrote (`output` of its config)."


def _step_of_push(error: BaseException) -> str:
    """The next step after gates could not be pushed."""
    if isinstance(error, HFValidationError):
        return "Name a repository of yours, or of an organisation of yours, `owner/name`."
    if isinstance(error, (OfflineModeIsEnabled, HTTP.TransportError)):
        return "Connect, and see that HF_HUB_OFFLINE is not set."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status in (401, 403, 404):
        return (
            "That wants a token which may write to the repository: log in with `hf auth login` (or set "
            "HF_TOKEN, or pass token=), and name a repository of yours or of an organisation of yours."
        )
    return "Mend that, and push again."


def push_to_hub(
    gates: GateSet,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    license: str | None = None,
    message: str = "Upload retention gates",
    token: str | None = None,
) -> str:
    """Publish gates: `GateSet.push_to_hub`, which says what the arguments are."""
    fingerprint = gates.metadata.get("fingerprint")
    if not fingerprint:
        raise ValueError(
            "these gates do not say which model they belong to, so that nobody could check it: save them "
            "with retain.gates.artifact.save_gates(gates, folder, fingerprint=retain.hf.model.decoder."
            "fingerprint(model)), and push what retain.load_gates(folder) returns."
        )
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as made:
        folder = save_gates(
            gates,
            made,
            fingerprint=fingerprint,
            metadata={} if license is None else {"license": license},
        )
        try:
            full_id = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
            place = full_id if revision is None else f"{full_id}@{revision}"
            (folder / CARD).write_text(card_text(read_metadata(folder), place=place), encoding="utf-8")
            api.create_repo(full_id, private=private, exist_ok=True)
            if private and not api.repo_info(full_id).private:
                raise ValueError(
                    f"private=True, and the repository {full_id!r} is there and public: take another name, "
                    "or make it private first, in its settings on the hub."
                )
            if revision is not None:
                api.create_branch(full_id, branch=revision, exist_ok=True)
            done = api.create_commit(
                full_id,
                [CommitOperationAdd(name, folder / name) for name in (METADATA_FILE, WEIGHTS_FILE, CARD)],
                commit_message=message,
                revision=revision,
            )
        except UNREACHABLE as error:
            raise ValueError(
                f"the gates could not be pushed to {repo_id!r} ({reason_of(error)}). {_step_of_push(error)}"
            ) from error
    return f"{full_id}@{done.oid}"

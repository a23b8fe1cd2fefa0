"""Finds an artifact of gates: a folder, or a repository of the hub, which is fetched.

A repository may be named with a revision behind an @ (`owner/name@v1`), which no id of the hub holds: so
every place that takes a folder or a hub id takes a revision. `GateSet.push_to_hub` publishes.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE


def fetch(
    path_or_hub_id: str | os.PathLike[str],
    revision: str | None = None,
    *,
    files: Collection[str] = (METADATA_FILE, WEIGHTS_FILE),
    **how: Any,
) -> Path:
    """The folder of an artifact: as it is, or fetched into the hub's cache.

    Args:
        path_or_hub_id: a folder, or the id of a hub repository, whose revision may stand behind it
            (`owner/name@v1`).
        revision: of the hub repository: a branch, a tag or a commit; None: that of the id, else `main`.
        files: names or patterns of the files to fetch.
        **how: `token`, `cache_dir`, `force_download`, `local_files_only`, of `snapshot_download`.

    Raises:
        ValueError: there is neither.
    """
    named = os.fspath(path_or_hub_id)
    if os.path.isdir(named):
        return Path(named)
    hub_id, _, stated = named.partition("@")
    if stated and revision is not None:
        raise ValueError(
            f"gates {named!r} name a revision, and revision={revision!r} another way: state one."
        )
    try:
        return Path(snapshot_download(hub_id, revision=stated or revision, allow_patterns=[*files], **how))
    except Exception as error:  # of the hub, its HTTP client or the disk; it is the cause of what is raised
        reason = " ".join(line.strip() for line in str(error).splitlines()[:3]).rstrip(". ")
        raise ValueError(
            f"there are no gates at {named!r}: it is no folder here (from {str(Path.cwd())!r}), and from "
            f"the hub it could not be fetched ({type(error).__name__}: {reason}). It does not exist, is "
            "private or gated, or the hub was not reached (with HF_HUB_OFFLINE it is not asked): check the "
            "name and the revision, and log in with `hf auth login` (or set HF_TOKEN) as someone who may "
            "read it. Or pass the folder that training wrote (`output`)."
        ) from error

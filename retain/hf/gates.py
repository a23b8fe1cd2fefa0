"""Gates by folder or hub id, checked against the model that they are to be used on: `retain.load_gates`.

`retain.gates.store` reads an artifact and knows neither transformers nor the hub; this adds both.
"""

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from retain.gates import GateSet
from retain.gates.store import METADATA_FILE, WEIGHTS_FILE
from retain.gates.store import load_gates as read_gates
from retain.hf.model import fingerprint


def load_gates(
    path_or_hub_id: str | os.PathLike[str], model: nn.Module | None = None, *, revision: str | None = None
) -> GateSet:
    """Load trained gates in float32, onto the device of their model.

    Args:
        path_or_hub_id: the folder that `train/distill.py` wrote, or the id of a hub repository that holds it.
        model: the model on which they will be used; None skips the check that they were trained on it.
        revision: of the hub repository.

    Returns:
        the gates, with what the artifact says of itself in `metadata`.

    Raises:
        ValueError: nothing is there; an artifact is incomplete, corrupt or of a newer schema; or it was
            trained on another model.

    Example:
        >>> cache = retain.Cache(model, gates=retain.load_gates("runs/gates-seed0", model))  # doctest: +SKIP
    """
    folder = Path(path_or_hub_id)
    if not folder.is_dir():
        folder = _download(os.fspath(path_or_hub_id), revision)
    if model is None:
        return read_gates(folder)
    gates = read_gates(folder, fingerprint=lambda: fingerprint(model))
    return gates.to(next(model.parameters()).device)


def _download(hub_id: str, revision: str | None) -> Path:
    """Fetch the two files of an artifact, and nothing else, into the hub's cache."""
    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=[METADATA_FILE, WEIGHTS_FILE])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"there are no gates at {hub_id!r}: it is no folder here (seen from {str(Path.cwd())!r}), and "
            f"as a hub repository it could not be fetched ({type(error).__name__}: {reason}). Pass the "
            "folder that train/distill.py wrote (`output` of its config)."
        ) from None

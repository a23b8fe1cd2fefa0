"""Gates that ship with this package, found by the weights of the model.

A folder of `retain/models/gates` is an artifact of gates as `train/distill.py` writes it, its matrices in 16
bits; its name is that of a model of the catalogue. `make gates-smollm2` trains it.
"""

from functools import cache
from pathlib import Path

from retain.gates.artifact import METADATA_FILE, read_metadata

FOLDER = Path(__file__).parent / "gates"


def shipped() -> tuple[str, ...]:
    """Names of the models that gates ship for."""
    return tuple(name for name, _ in records())


def match_of(fingerprint: dict[str, str | int]) -> str | None:
    """Name of the gates that ship for a model of this fingerprint
    (`retain.hf.model.identity.fingerprint`); None: there are none."""
    return next((name for name, known in records() if known == fingerprint), None)


@cache
def records() -> tuple[tuple[str, dict[str, str | int]], ...]:
    """Names of the models that gates ship for, each with the fingerprint of its weights."""
    folders = sorted(path.parent for path in FOLDER.glob(f"*/{METADATA_FILE}"))
    return tuple((folder.name, read_metadata(folder)["fingerprint"]) for folder in folders)

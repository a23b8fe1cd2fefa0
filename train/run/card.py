"""Writes the training card, `README.md` of an artifact: a Hugging Face model card.

Every number is read from the run's files (`gates.json`, `log.jsonl`), and what a file does not hold is not in
the card; so a card can be made again at any time.
"""

from pathlib import Path

from retain.gates.artifact import read_metadata
from retain.gates.card import CARD, card_of
from retain.process.provenance import write_text
from retain.train.run.checkpoint import read_log


def write_card(folder: Path | str, *, command: str = "") -> Path:
    """Writes the card into the folder of a finished run, and returns its path. The `command` that started it
    is that of the artifact where none is given. ValueError: there is no artifact."""
    folder = Path(folder)
    card = card_of(read_metadata(folder), read_log(folder), command=command, place=str(folder))
    path = folder / CARD
    write_text(path, f"{card}\n")
    return path

"""Writes the training card, `README.md` of an artifact: a Hugging Face model card.

    python -m retain.train.run.card FOLDER

Every number is read from the run's own files (`gates.json`, `log.jsonl`), and what a file does not hold is
not in the card; so a card can be made again at any time.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from retain.gates.artifact import read_metadata
from retain.gates.card import CARD, card_of, overlap_of_heads
from retain.process.command import command
from retain.process.disk import write_new
from retain.train.run.checkpoint import read_log
from retain.train.run.curves import CURVES, HEADS, draw_all

TITLES = {
    CURVES: "loss, and overlap where there is one, against the step",
    HEADS: "held-out overlap of every head",
}


def write_card(folder: Path | str, *, command: str = "", say: Callable[[str], None] = print) -> Path:
    """Draws the pictures, writes the card into the folder of a finished run, and returns its path. The
    `command` that started it is the artifact's own where none is given; `say` is told if there are no
    pictures.

    Raises:
        ValueError: there is no artifact.
    """
    folder = Path(folder)
    metadata, records = read_metadata(folder), read_log(folder)
    pictures, reason = draw_all(folder, records, overlap_of_heads(metadata, records))
    if reason is not None:
        say(reason)
    titles = {name: TITLES[name] for name in pictures}
    card = card_of(metadata, records, command=command, pictures=titles, place=str(folder))
    path = folder / CARD
    os.replace(write_new(path, f"{card}\n".encode()), path)
    return path


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.train.run.card", description="Write the training card of an artifact again."
    )
    parser.add_argument("folder", type=Path, help="of a finished run, for instance runs/gates-seed0")
    print(write_card(parser.parse_args(arguments).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())

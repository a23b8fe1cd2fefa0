"""Stores trained gates with their matrices in 16 bits, half the bytes, as those that ship are stored.

python -m retain.gates.shrink runs/gates-smollm2-seed0 retain/models/gates/smollm2-135m
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from retain.gates.artifact import WEIGHTS_FILE, load_gates, read_metadata, save_gates
from retain.gates.card import CARD
from retain.process.command import command
from retain.process.provenance import write_text

__all__ = ["main", "shrink"]


def shrink(folder: Path, out: Path) -> int:
    """Write an artifact again, in half precision, with its card.

    Args:
        folder: of gates, as `train/distill.py` wrote them.
        out: another folder; the card says how to load what lies there by its name.

    Returns:
        bytes of the weights.

    Raises:
        ValueError: `folder` holds no gates, or is `out`.
    """
    if folder.resolve() == out.resolve():
        raise ValueError(f"{out} would be written over itself: pass another folder.")
    gates = load_gates(folder)
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no card ({CARD}): pass the folder that train/distill.py wrote.")
    card, before = (folder / CARD).read_text(encoding="utf-8"), gates.metadata["sha256"]
    save_gates(gates, out, fingerprint=gates.metadata["fingerprint"], half=True)
    card = card.replace(before, read_metadata(out)["sha256"])
    for name in (str(folder), str(folder.resolve())):
        card = card.replace(repr(name), repr(out.name))
    write_text(out / CARD, re.sub(r"!\[[^\]]*\]\(\w+\.png\)\n\n?", "", card))  # pictures are left behind
    return (out / WEIGHTS_FILE).stat().st_size


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes gates again, and says how large they are."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.gates.shrink", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of gates")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args(arguments)
    print(f"{given.out}: {shrink(given.folder, given.out) / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

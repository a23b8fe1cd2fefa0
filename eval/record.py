"""Shows what a command measured as a table of text, and writes it to a file with what made it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from retain.process.provenance import code_state, environment, now, write_json


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same columns under their titles, the first column to the left; numbers in four digits, None
    as "-"."""
    cells = [
        ["-" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in row.values()] for row in rows
    ]
    lines = [[*rows[0]], *cells]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    made = (" ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)]) for line in lines)
    return "\n".join(line.rstrip() for line in made)


def write_record(path: Path, rows: Sequence[Mapping[str, Any]], typed: Sequence[str], device: str) -> None:
    """Writes rows as JSON, with the command that was typed, and the machine and code that ran it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "command": shlex.join(typed),
            "date": now(),
            "rows": rows,
            "environment": environment(device, torch.get_num_threads()),
            "code": code_state(Path(__file__).parent),
        },
    )

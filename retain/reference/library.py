"""Reads the text of the running Python's standard library, split for training and evaluation."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval"]

EVAL_PERCENT = 12
SKIPPED_FOLDERS = {
    *("site-packages", "test", "tests", "idlelib", "lib2to3", "idle_test", "__pycache__", "turtledemo")
}


def split_of(name: str) -> Split:
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "eval" if bucket < EVAL_PERCENT else "train"


def sources(split: Split) -> list[tuple[str, str]]:
    """`(name, text)` of every standard-library module of a split, ordered by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and split_of(name.as_posix()) == split:
            found.append((name.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return found

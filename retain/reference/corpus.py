"""Reads real text for the reference model: the sources of the running Python's standard library.

One stream of token ids per split. Files, not passages, are split (by a hash of their name), so text of the
`eval` split was never read in training.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np

from retain.reference.tokenizer import load_tokenizer

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


@functools.cache
def stream(split: Split) -> np.ndarray:
    """All text of a split as one int64 array of token ids, files in a fixed shuffled order."""
    texts = [text for _, text in sources(split)]
    encoded = load_tokenizer().backend_tokenizer.encode_batch(texts)
    order = np.random.default_rng(0).permutation(len(texts))
    return np.concatenate([np.asarray(encoded[i].ids, dtype=np.int64) for i in order])

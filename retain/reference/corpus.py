"""Reads real text for the reference model: the sources of the running Python's standard library.

One stream of token ids per split, of source code or of prose (docstrings and the topics of `help()`). Files,
not passages, are split (by a hash of their name), so text of the `eval` split was never read in training.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import numpy as np

from retain.reference.tokenizer import load_tokenizer

Split = Literal["train", "eval"]

EVAL_PERCENT = 12
SKIPPED_FOLDERS = {
    *("site-packages", "test", "tests", "idlelib", "lib2to3", "idle_test", "__pycache__", "turtledemo")
}
# A docstring, or a paragraph of one, of fewer words is a heading or a name, and no prose.
PROSE_WORDS = 8


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
    return _encoded([text for _, text in sources(split)])


def _encoded(texts: Sequence[str]) -> np.ndarray:
    encoded = load_tokenizer().backend_tokenizer.encode_batch(texts)
    order = np.random.default_rng(0).permutation(len(texts))
    return np.concatenate([np.asarray(encoded[i].ids, dtype=np.int64) for i in order])


def docstrings(text: str) -> Iterator[str]:
    """Docstrings of a module's source text, of the module and its definitions.

    Text that this Python cannot parse has none: an installation may carry files of another version.
    """
    try:
        with warnings.catch_warnings():
            # Of odd escapes in other people's strings.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if found := ast.get_docstring(node):
            yield found


def prose_texts(split: Split) -> list[str]:
    """Docstrings of a split's modules, of `PROSE_WORDS` words or more, and its topics of `help()`."""
    found = [text for name, text in sorted(topics.items()) if split_of(f"topic {name}") == split]
    for _, text in sources(split):
        found += [own + "\n\n" for own in docstrings(text) if len(own.split()) >= PROSE_WORDS]
    return found


@functools.cache
def prose(split: Split) -> np.ndarray:
    """The prose of a split as one int64 array of token ids, texts in a fixed shuffled order."""
    return _encoded(prose_texts(split))

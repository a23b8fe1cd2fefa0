"""Real text for the reference model: the sources of the running Python's standard library.

In: nothing. Out: a stream of token ids per split, of source code or of prose (docstrings and the topics of
`help()`), and the pool of whole words that needles are made of. The
one decision taken here: files, not passages, are split (by a hash of their name), so text of the `eval` split
was never read in training.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from retain.reference.tokenizer import load_tokenizer

Split = Literal["train", "eval"]
EVAL_PERCENT = 12
_SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "idle_test",
    "__pycache__",
    "turtledemo",
}
NUM_WORDS = 512
# A docstring, or a paragraph of one, of fewer words is a heading or a name, and no prose.
PROSE_WORDS = 8


def _split_of(name: str) -> Split:
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "eval" if bucket < EVAL_PERCENT else "train"


def sources(split: Split) -> list[tuple[str, str]]:
    """`(name, text)` of every standard-library module of a split, ordered by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(name.parts) and _split_of(name.as_posix()) == split:
            found.append((name.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return found


@functools.cache
def stream(split: Split) -> np.ndarray:
    """All text of a split as one int64 array of token ids, files in a fixed shuffled order."""
    return _encoded([text for _, text in sources(split)])


def _encoded(texts: Sequence[str]) -> np.ndarray:
    """Texts as one array of token ids, in a fixed shuffled order."""
    tokenizer = load_tokenizer()
    encoded = tokenizer.backend_tokenizer.encode_batch(texts)
    order = np.random.default_rng(0).permutation(len(texts))
    return np.concatenate([np.asarray(encoded[i].ids, dtype=np.int64) for i in order])


def docstrings(text: str) -> Iterator[str]:
    """Docstrings of a module's source text, of the module and of all that it defines.

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
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield said


def prose_texts(split: Split) -> list[str]:
    """English of the standard library: the docstrings of a split's modules, and topics of `help()`.

    Docstrings go to the split that their file is in; topics are split by their names. Docstrings of fewer
    than `PROSE_WORDS` words are left out.
    """
    from pydoc_data.topics import topics

    found = [text for name, text in sorted(topics.items()) if _split_of(f"topic {name}") == split]
    for _, text in sources(split):
        found += [said + "\n\n" for said in docstrings(text) if len(said.split()) >= PROSE_WORDS]
    return found


@functools.cache
def prose(split: Split) -> np.ndarray:
    """The prose of a split as one int64 array of token ids, texts in a fixed shuffled order."""
    return _encoded(prose_texts(split))


@functools.cache
def words() -> np.ndarray:
    """Ids of the words that needles are made of: whole lower-case words of one token, ` name` with its space.

    They come from the tokenizer alone (its merges are ordered by frequency), so that every Python version
    draws the same pool. The most frequent words are left out (keywords), as are the words that statements and
    questions are phrased in.
    """
    from retain.reference.documents import PHRASING

    tokenizer = load_tokenizer()
    reserved = set(tokenizer(PHRASING, add_special_tokens=False)["input_ids"])
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    whole = [i for token, i in vocabulary if re.fullmatch("Ġ[a-z]{3,}", token) and i not in reserved]
    if len(whole) < NUM_WORDS:
        raise ValueError(
            f"the tokenizer holds {len(whole)} whole words, {NUM_WORDS} are needed: "
            "train it again with a larger vocabulary"
        )
    return np.asarray(whole[-NUM_WORDS:], dtype=np.int64)

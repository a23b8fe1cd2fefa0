"""Reads real text for the reference model: the sources of the running Python's standard library.

One stream of token ids per split, of source code or of prose (docstrings and the topics of `help()`), and the
pool of whole words of needles. Files, not passages, are split (by a hash of their name), so text of the
`eval` split was never read in training.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from retain.reference.library import Split, sources, split_of
from retain.reference.tokenizer import load_tokenizer

# A docstring, or a paragraph of one, of fewer words is a heading or a name, and no prose.
PROSE_WORDS = 8


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
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield found


def prose_texts(split: Split) -> list[str]:
    """English of the standard library: the docstrings of a split's modules, and topics of `help()`.

    Docstrings go to the split that their file is in; topics are split by their names. Docstrings of fewer
    than `PROSE_WORDS` words are left out.
    """
    from pydoc_data.topics import topics

    found = [text for name, text in sorted(topics.items()) if split_of(f"topic {name}") == split]
    for _, text in sources(split):
        found += [own + "\n\n" for own in docstrings(text) if len(own.split()) >= PROSE_WORDS]
    return found


@functools.cache
def prose(split: Split) -> np.ndarray:
    """The prose of a split as one int64 array of token ids, texts in a fixed shuffled order."""
    return _encoded(prose_texts(split))

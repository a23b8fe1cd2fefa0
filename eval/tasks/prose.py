"""Provides English that no training saw: paragraphs of docstrings of the running Python, as filler.

Paragraphs come from source files of the evaluation split and from compiled modules, whose docstrings stand in
no source file; a paragraph that shares a longer line with a source file of the training split is left out.
(`pydoc_data/topics.py`, the manual's text, belongs to the training split.) As in all reference suites,
another version of Python gives another text.
"""

import ast
import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import ModuleType

import numpy as np

from retain.reference.corpus import sources
from retain.reference.tokenizer import load_tokenizer

# Compiled modules of the standard library; one that an installation lacks adds nothing.
COMPILED = (
    *("builtins", "array", "atexit", "binascii", "cmath", "errno", "faulthandler", "fcntl", "gc", "grp"),
    *("itertools", "marshal", "math", "mmap", "posix", "pwd", "pyexpat", "resource", "select", "signal"),
    *("sys", "syslog", "termios", "time", "unicodedata", "zlib"),
    *("_abc", "_asyncio", "_bisect", "_bz2", "_codecs", "_collections", "_contextvars", "_csv", "_ctypes"),
    *("_datetime", "_decimal", "_elementtree", "_functools", "_hashlib", "_heapq", "_io", "_json"),
    *("_locale", "_lsprof", "_lzma", "_multiprocessing", "_operator", "_pickle", "_queue", "_random"),
    *("_socket", "_sre", "_ssl", "_statistics", "_string", "_struct", "_symtable", "_thread"),
    *("_tracemalloc", "_uuid", "_warnings", "_weakref", "_zoneinfo"),
)
# A shorter line that two files share ("Return True if successful.") proves nothing.
LEAST_LINE = 25
# A paragraph of fewer words is a heading or a name, and no prose.
PROSE_WORDS = 8


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


def compiled_docstrings(module: ModuleType) -> Iterator[str]:
    """Docstrings of a compiled module, of its functions, its classes and their methods."""
    members = sorted(vars(module).items())
    methods = [own for _, value in members if inspect.isclass(value) for own in sorted(vars(value).items())]
    kinds = (inspect.isclass, inspect.isroutine, inspect.ismodule, inspect.isdatadescriptor)
    for value in (module, *(value for _, value in (*members, *methods))):
        text = getattr(value, "__doc__", None) if any(kind(value) for kind in kinds) else None
        if isinstance(text, str):
            yield inspect.cleandoc(text)


def paragraphs(docstring: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Paragraphs of a docstring that are sentences, each on one line; `seen` are lines of the training text,
    without the blanks around them."""
    for block in docstring.split("\n\n"):
        lines = [line.strip() for line in block.strip().splitlines()]
        one = " ".join(lines)
        sentence = one[:1].isupper() and one.endswith((".", ":", "!", "?")) and ">>>" not in one
        known = any(len(line) >= LEAST_LINE and line in seen for line in lines)
        if sentence and not known and len(one.split()) >= PROSE_WORDS:
            yield one


@cache
def prose_text() -> tuple[str, ...]:
    """All paragraphs, each once, in a fixed shuffled order."""
    seen = frozenset(line.strip() for _, text in sources("train") for line in text.splitlines())
    found: dict[str, None] = {}
    documented = [text for _, source in sources("eval") for text in docstrings(source)]
    for name in COMPILED:
        with suppress(ImportError):
            documented += compiled_docstrings(importlib.import_module(name))
    for text in documented:
        found |= dict.fromkeys(paragraphs(text, seen))
    kept = [*found]
    return tuple(kept[place] for place in np.random.default_rng(0).permutation(len(kept)))


@cache
def prose() -> np.ndarray:
    """The paragraphs as one int64 array of token ids, each behind a line break."""
    encoded = load_tokenizer().backend_tokenizer.encode_batch([f"\n{one}" for one in prose_text()])
    return np.concatenate([np.asarray(one.ids, dtype=np.int64) for one in encoded])

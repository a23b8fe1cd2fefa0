"""Cuts a text file into documents, in tokens of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cut(
    ids: Sequence[int], opening: Sequence[int], *, context_tokens: int, behind: int, documents: int
) -> list[tuple[int, ...]]:
    """Pieces of `context_tokens + behind` tokens, spread over all of a text, none overlapping. Each begins
    with `opening`, which counts as context. ValueError: numbers below 1, or a text that is too short."""
    if documents < 1 or context_tokens <= len(opening):
        raise ValueError(
            f"pieces of a text: documents is 1 or more, got {documents}; context_tokens is "
            f"{len(opening) + 1} or more (special tokens are counted), got {context_tokens}."
        )
    length, stride = context_tokens - len(opening) + behind, len(ids) // documents
    if stride < length:
        raise ValueError(
            f"the text has {len(ids)} tokens, but {documents} pieces of {length} need {length * documents}: "
            "pass a longer text, or ask for fewer or shorter pieces."
        )
    return [(*opening, *ids[start * stride : start * stride + length]) for start in range(documents)]


def opening_of(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that begin a text: those that the tokenizer puts there, else its `bos_token`."""
    opening = tuple(id for id in tokenizer("")["input_ids"] if id != tokenizer.eos_token_id)
    return opening or (() if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,))


def read_text(path: str, tokenizer: Any) -> list[int]:
    """Token ids of a text file, without special tokens; ValueError: it cannot be read, or is no UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read: {error}. Pass a file in UTF-8.") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

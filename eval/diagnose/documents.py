"""Loads what diagnostics are run on: a model by its name, and documents with questions on them.

The reference generator writes documents with questions, on text that no training saw. A text is cut into
pieces, spread over all of it, that are continued: all but a piece's last token is its context, and the last
token its only turn, at which the model goes on writing. Perplexity cuts its pieces here too. Nothing is
padded or joined: a document is read as it is, alone, and a text too short for as many pieces as are asked
for is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retain.models.named import load_named

# Stream of the generator: no other use of it writes these documents (`retain.eval.tasks.reference_basic`).
_STREAM = 13


@dataclass(frozen=True)
class Asked:
    """A document.

    Args:
        name: in the record.
        context_ids: what is evicted from.
        turns: what is asked after it, one answer each; never empty.
    """

    name: str
    context_ids: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


def load(name: str, *, dtype: str = "auto", device: str = "cpu") -> tuple[Any, Any]:
    """A model (`reference:0`, a folder or a hub id) in eval mode and without gradients, and its tokenizer.

    Raises:
        ValueError: no such model, none that transformers can load, or one without a tokenizer.
    """
    model, tokenizer = load_named(name, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"model={name!r} has no tokenizer, and documents are texts.")
    return model.to(device).requires_grad_(False), tokenizer


def reference_asked(seed: int, count: int, context_tokens: int) -> Iterator[Asked]:
    """Documents of the reference generator with all their questions as turns; the answers are the model's.
    `seed` is of the model that will read them."""
    from retain.reference.documents import Writer, distill_document
    from retain.reference.tokenizer import ANSWER_ID, QUESTION_ID

    writer = Writer("eval", int(np.random.SeedSequence([_STREAM, seed]).generate_state(1)[0]))
    for number in range(count):
        document = distill_document(writer, context_tokens)
        ids = document.appendix_ids
        starts = [i for i, token in enumerate(ids) if token == QUESTION_ID]
        turns = tuple(ids[start : ids.index(ANSWER_ID, start) + 1] for start in starts)
        yield Asked(f"reference document {number}", document.context_ids, turns)


def text_ids(path: str | Path, tokenizer: Any) -> list[int]:
    """Token ids of a text file, without special tokens.

    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read: {error}. Pass a file in UTF-8.") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_asked(path: str | Path, tokenizer: Any, count: int, context_tokens: int) -> Iterator[Asked]:
    """Pieces of a text file, to be continued.

    Args:
        path: UTF-8 text.
        tokenizer: of the model; the special tokens that it puts before a text stand before each piece.
        context_tokens: length of a context, special tokens included; one more token is the turn.

    Raises:
        ValueError: no text, or one that is too short for as many pieces.
    """
    how = {"context_tokens": context_tokens, "behind": 1, "documents": count}
    for number, piece in enumerate(cut(text_ids(path, tokenizer), opening_of(tokenizer), **how)):
        yield Asked(f"{Path(path).name}, piece {number}", piece[:-1], (piece[-1:],))


def cut(
    ids: Sequence[int], opening: Sequence[int], *, context_tokens: int, behind: int, documents: int
) -> list[tuple[int, ...]]:
    """Pieces of a text, spread over all of it, none overlapping.

    Args:
        ids: of the text, without special tokens.
        opening: special tokens that stand before each piece, and count as context.

    Returns:
        pieces of `context_tokens + behind` tokens.

    Raises:
        ValueError: numbers below 1, or a text that is too short.
    """
    for name, number in {"behind": behind, "documents": documents}.items():
        if number < 1:
            raise ValueError(f"pieces of a text: {name} is 1 or more, got {number}.")
    if context_tokens <= len(opening):
        raise ValueError(
            f"pieces of a text: context_tokens={context_tokens} leaves no room behind {len(opening)} special "
            f"tokens: ask for {len(opening) + 1} or more."
        )
    length, stride = context_tokens - len(opening) + behind, len(ids) // documents
    if stride < length:
        raise ValueError(
            f"the text has {len(ids)} tokens, but {documents} pieces of {length} need {length * documents}: "
            "pass a longer text, or ask for fewer or shorter pieces."
        )
    return [(*opening, *ids[start * stride : start * stride + length]) for start in range(documents)]


def opening_of(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that stand before a text: those that the tokenizer puts there, else its first one.

    Not every tokenizer puts its first token (`bos_token`) where it belongs by itself; of one without such a
    token, no text has an opening.
    """
    whole, plain = (list(tokenizer("a", add_special_tokens=own)["input_ids"]) for own in (True, False))
    places = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    opening = tuple(whole[: places[0]]) if places else ()
    first = getattr(tokenizer, "bos_token_id", None)
    return opening if opening or first is None else (first,)

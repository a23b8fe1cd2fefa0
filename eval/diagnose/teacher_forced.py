"""One conversation for all caches: what is asked of a context, and what the full cache answers.

In: a model with `retain.hf.intercept.attach`ed attention, a cache that has seen a context, turns to ask. Out:
the answers, greedily; the transcript that every other cache is shown instead of its own words, with the
places at which a token of an answer is predicted; logits there. The one decision taken here: one token or
many, reading is one forward on the cache, so a full and an evicted cache differ in nothing but what they
hold.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.hf.cache.cache import Cache


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


@dataclass(frozen=True)
class Answer:
    """What a cache wrote to one turn.

    Args:
        tokens: without the end token.
        end: the token that ended it; None where it was cut off.
    """

    tokens: tuple[int, ...]
    end: int | None


def split(document: Asked, regime: str) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """What the cache has seen when it evicts, and what is read afterwards, a turn at a time.

    With the question seen, its last token is read again, so that the answer's first token too comes from what
    was kept.

    Raises:
        ValueError: nothing is asked.
    """
    if not document.turns or not all(document.turns):
        raise ValueError(f"document {document.name!r} needs at least one turn, and no empty one.")
    if regime == "context_only":
        return document.context_ids, list(document.turns)
    first, *later = document.turns
    return (*document.context_ids, *first[:-1]), [first[-1:], *later]


def respond(
    model: Any, cache: Cache, turns: Sequence[Sequence[int]], cap: int, *, total: int | None = None
) -> list[Answer]:
    """Greedy answers, turn by turn, from one cache, which goes on with its own words.

    Args:
        model: attached.
        cache: evicted; it is used up.
        turns: what is read before each answer.
        cap: most tokens of one answer, the end token counted.
        total: no further turn is asked once so many tokens were written.
    """
    ends = end_tokens(model)
    answers: list[Answer] = []
    pending: list[int] = []
    written = 0
    for turn in turns:
        if total is not None and written >= total:
            break
        pending = [*pending, *turn]
        tokens: list[int] = []
        end = None
        while end is None and len(tokens) < cap:
            token = int(read_on(model, cache, pending)[-1].argmax())
            pending = [token]
            written += 1
            if token in ends:
                end = token
            else:
                tokens.append(token)
                if len(tokens) == cap:
                    break
        answers.append(Answer(tuple(tokens), end))
    return answers


def transcript(
    turns: Sequence[Sequence[int]], answers: Sequence[Answer], steps: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The conversation after the eviction, as all policies are shown it.

    Args:
        turns: what was asked.
        answers: what the full cache wrote, of the first turns.
        steps: tokens of it that are measured, at most.

    Returns:
        tokens that are read; the places among them at which a token of an answer is predicted; those tokens.
        What comes after the last such place is not read.
    """
    tail: list[int] = []
    asks: list[int] = []
    targets: list[int] = []
    for turn, answer in zip(turns, answers, strict=False):
        tail += turn
        for token in (*answer.tokens, *(() if answer.end is None else (answer.end,))):
            asks.append(len(tail) - 1)
            targets.append(token)
            tail.append(token)
    asks, targets = asks[:steps], targets[:steps]
    return tuple(tail[: asks[-1] + 1]), tuple(asks), tuple(targets)


def read_on(model: Any, cache: Cache, tokens: Sequence[int]) -> Float[Tensor, "S V"]:
    """Read tokens behind what a cache has seen; logits `[tokens, V]`."""
    input_ids = ids_on(model, tokens)
    places = torch.arange(cache.num_seen, cache.num_seen + len(tokens), device=input_ids.device)[None]
    mask = torch.ones((1, cache.num_seen + len(tokens)), dtype=torch.int64, device=input_ids.device)
    output = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=places,
        past_key_values=cache,
        use_cache=True,
    )
    return output.logits[0]


def read_plainly(model: Any, tokens: Sequence[int], last: int) -> Float[Tensor, "S V"]:
    """Logits of the last tokens of a text, with no cache at all."""
    keep = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_on(model, tokens), use_cache=False, **keep).logits[0, -last:]


def ids_on(model: Any, tokens: Sequence[int]) -> Int[Tensor, "1 S"]:
    """Tokens as a batch of one, on the model's device."""
    return torch.tensor([list(tokens)], dtype=torch.int64, device=model.get_input_embeddings().weight.device)


def end_tokens(model: Any) -> frozenset[int]:
    """Tokens that end an answer: of the generation config, else of the model's own."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = model.config.get_text_config().eos_token_id if found is None else found
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)

"""Checks what a user passes for a batch: prompts, seeds, pinned spans, slack.

What a user stated once for prompts is turned into the same for sequences: `generate` repeats a prompt for
beams and for several returned sequences, and what belongs to the prompt is repeated with it. All is checked
before anything is allocated for it.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.gates.base import INPUTS
from retain.hf.intercept.forward_call import MASK_VALUES, shown
from retain.process.registry import lookup
from retain.protection import pinned_mask, spans_by_sequence

# Most free entries per row that may be asked for: all of them are allocated.
MOST_SLACK = 2**20


def whole(value: Any, name: str, wanted: str, least: int, most: int | None = None) -> int:
    """A whole number (numpy's too) between two bounds.

    Raises:
        ValueError: it is none, or lies outside.
    """
    try:
        number = None if isinstance(value, bool | Tensor) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r:.60}: pass {wanted}, a whole number {bounds}.")
    return number


def slack_from(slack: Any) -> int:
    """The `slack` that a user passed.

    Raises:
        ValueError: no whole number, negative, or more than `MOST_SLACK`.
    """
    return whole(slack, "slack", "free entries per row", 0, MOST_SLACK)


def seeds_from(seeds: Any) -> Sequence[int] | None:
    """The `seeds` that a user passed; how many sequences there are is not known yet.

    Raises:
        ValueError: no list of whole numbers.
    """
    if seeds is None:
        return None
    if isinstance(seeds, str | bytes) or not hasattr(seeds, "__iter__") or getattr(seeds, "ndim", 1) != 1:
        raise ValueError(f"seeds is {seeds!r:.60}: pass a list of whole numbers, one per sequence.")
    try:
        numbers = [operator.index(seed) for seed in seeds]
    except TypeError:
        raise ValueError(f"seeds is {seeds!r:.60}: pass a list of whole numbers, one per sequence.") from None
    return tuple(numbers) if isinstance(seeds, tuple) else numbers


def prompt_from(
    input_ids: Any, attention_mask: Any, vocabulary: int
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | Bool[Tensor, "B T"]]:
    """Token ids and mask of a prompt that a user passed by hand.

    Args:
        input_ids: of the prompts.
        attention_mask: None: no padding.
        vocabulary: tokens that the model knows.

    Raises:
        ValueError: no whole numbers `[B, T]`, none at all, ids that the model does not know; a mask of
            another shape, or of something else than 1 and 0.
    """
    wanted = "pass token ids [B, T], a tensor of whole numbers, as a tokenizer gives with return_tensors='pt'"
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}: {wanted}.")
    shape = tuple(input_ids.shape)
    if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"input_ids are {input_ids.dtype}: {wanted}.")
    if len(shape) != 2:
        step = " (of one prompt: input_ids[None])" if len(shape) == 1 else ""
        raise ValueError(f"input_ids are of shape {shape}: {wanted}{step}.")
    if not input_ids.numel():
        raise ValueError(f"input_ids are of shape {shape}, so there is nothing to read: {wanted}.")
    least, most = input_ids.aminmax()
    if int(least) < 0 or int(most) >= vocabulary:
        raise ValueError(
            f"input_ids go from {int(least)} to {int(most)}, and the model knows tokens 0 to "
            f"{vocabulary - 1}: use the model's own tokenizer."
        )
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids, dtype=torch.int64)
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask is {shown(attention_mask)}, and input_ids are {shape}: pass a mask of that "
            "shape, 1 on tokens and 0 on padding."
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(MASK_VALUES)
    return input_ids, attention_mask.to(torch.int64)


def seeds_of(seeds: Sequence[int] | None, num_sequences: int) -> Sequence[int] | None:
    """One seed a sequence."""
    return None if seeds is None else _repeated(seeds, num_sequences, "seeds")


def pins_of(spans: Any, num_sequences: int) -> Any:
    """Pinned spans, one list a sequence, or one list that is meant for all; None without any.

    Raises:
        ValueError: lists for another number of sequences.
    """
    if spans is None or spans_by_sequence(spans) is None:
        return spans
    return list(_repeated(spans, num_sequences, "pinned span lists"))


def pinned_of(spans: Any, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """The mask of pinned spans (`retain.protection.pinned_mask`); None without any.

    Raises:
        ValueError: a span that is none, or lists for another number of sequences.
    """
    spans = pins_of(spans, valid_BT.shape[0])
    return None if spans is None else pinned_mask(spans, valid_BT)


def _repeated(given: Sequence[Any], num_sequences: int, what: str) -> Sequence[Any]:
    """One a sequence: what belongs to a prompt that `generate` repeated (beams, ...) is repeated with it."""
    if len(given) == num_sequences:
        return given
    if not len(given) or num_sequences % len(given):
        raise ValueError(
            f"got {len(given)} {what} for {num_sequences} sequences: pass one per sequence (per prompt, "
            "where generate repeats prompts for beams or several returned sequences)."
        )
    return [one for one in given for _ in range(num_sequences // len(given))]


def check_wanted(wanted: Collection[str], hold_evidence: bool) -> None:
    """Refuse inputs of gates, to be shown by held evidence, that cannot be.

    Raises:
        ValueError: no names, unknown names, or no evidence is held.
    """
    if isinstance(wanted, str):
        raise ValueError(f"wanted is {wanted!r}, one name: pass several, as in wanted=({wanted!r},).")
    if not isinstance(wanted, list | tuple | set | frozenset | dict) or any(
        not isinstance(name, str) for name in wanted
    ):
        raise ValueError(f"wanted is {wanted!r:.60}: pass names of inputs of gates, of {', '.join(INPUTS)}.")
    for name in wanted:
        lookup(name, INPUTS, what="input of gates (wanted)")
    if wanted and not hold_evidence:
        raise ValueError(
            f"wanted={sorted(wanted)} is shown by held evidence, and none is held: pass evict=False and "
            "hold_evidence=True too."
        )

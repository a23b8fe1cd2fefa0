"""Computes the mask of protected entries, which are never evicted whatever their score.

Protection is a mask, not a large score. It lies inside the budget; a budget that cannot hold it is an error.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool
from pydantic.dataclasses import dataclass
from torch import Tensor

from retain.budget.largest_remainder import exact
from retain.config import STRICT, Share, Whole


@dataclass(frozen=True, config=STRICT)
class Protection:
    """Settings of the protection at both ends of a sequence.

    Args:
        sinks: first entries, always (attention sinks). The prefix covers them.
        prefix_fraction: share of the budget per head that protects the first entries, in [0, 1].
        suffix_fraction: share of the budget per head that protects the last entries, in [0, 1].
        minimum: least number of entries of a prefix or suffix whose fraction is not 0.
        recent: last entries, always (the observation window). It and the suffix cover each other.
    """

    sinks: Whole = 4
    prefix_fraction: Share = 0.1
    suffix_fraction: Share = 0.1
    minimum: Whole = 4
    recent: Whole = 0


def protected_mask(
    protection: Protection,
    valid_BT: Bool[Tensor, "B T"],
    budget_tokens_B: Sequence[Fraction | int] | None,
    *,
    pinned_BT: Tensor | None = None,
    intact_BT: Bool[Tensor, "B T"] | None = None,
    short_B: Sequence[bool] | None = None,
) -> Bool[Tensor, "B T"]:
    """Mask of the entries of each sequence that every head keeps.

    With `b` the budget per head and `n` the entries that exist, entry `i` (padding not counted) is protected
    where

        i < max(sinks, prefix)  or  i >= n - max(recent, suffix)  or  pinned[i],

    and intact, where `prefix = 0` if `prefix_fraction` is 0, else `max(minimum, floor(prefix_fraction * b))`;
    `suffix` alike. Sinks after "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).

    Args:
        protection: the settings.
        budget_tokens_B: entries per head of each sequence, exact; None where no budget is stated (admission
            by a threshold): then a fraction gives its `minimum`, and nothing is too much.
        pinned_BT: bool, [B, T], True where protected besides (`pinned_mask`); None for nothing.
        intact_BT: False where some head no longer holds the entry, after earlier evictions; None: all intact.
        short_B: sequences of which more entries may be protected than the budget holds; None for none.

    Raises:
        ValueError: if more entries are protected than the budget holds (says by how much) of a sequence that
            is not short.
    """
    B = len(valid_BT)
    assert pinned_BT is None or (pinned_BT.dtype == torch.bool and pinned_BT.shape == valid_BT.shape)
    lengths_B = valid_BT.sum(-1)
    counts = [_counts(protection, budget) for budget in budget_tokens_B or [0] * B]
    first_B1, last_B1 = lengths_B.new_tensor(counts).reshape(B, 2, 1).unbind(1)
    place_BT = valid_BT.cumsum(-1) - 1
    mask_BT = ((place_BT < first_B1) | (place_BT >= lengths_B[:, None] - last_B1)) & valid_BT
    if pinned_BT is not None:
        mask_BT = mask_BT | (pinned_BT.to(valid_BT.device) & valid_BT)
    if intact_BT is not None:
        mask_BT = mask_BT & intact_BT.to(valid_BT.device)
    pairs = zip(budget_tokens_B or (), mask_BT.sum(-1).tolist(), strict=budget_tokens_B is not None)
    for row, (budget, count) in enumerate(pairs):
        if count > budget and not (short_B is not None and short_B[row]):
            raise ValueError(
                f"sequence {row} has a budget of {float(budget):g} entries per head, "
                f"{math.ceil(count - budget)} fewer than the {count} protected: raise it (keep_ratio, "
                "tokens_per_head or bytes), or protect less (sinks, prefix_fraction, suffix_fraction, "
                "minimum, recent; pinned spans)."
            )
    return mask_BT


def pinned_mask(
    spans: Sequence[Sequence[Sequence[int]]], valid_BT: Bool[Tensor, "B T"]
) -> Bool[Tensor, "B T"]:
    """Mask of spans that the caller pins; `pinned_BT` of `protected_mask`.

    Args:
        spans: a list for each sequence (`pins_per_sequence`) of `(start, stop)` pairs, half-open, in the
            sequence's tokens (padding not counted). They may overlap.

    Raises:
        ValueError: names every span that is empty, reversed or out of range.

    Examples:
        >>> valid = torch.tensor([[False, True, True, True, True]])
        >>> pinned_mask([[(1, 3)]], valid).int().tolist()
        [[0, 0, 1, 1, 0]]
    """
    covered_BT = torch.zeros(valid_BT.shape, dtype=torch.bool)
    problems = []
    for row, (pairs, length) in enumerate(zip(spans, valid_BT.sum(-1).tolist(), strict=True)):
        for start, stop in pairs:
            if 0 <= start < stop <= length:
                covered_BT[row, start:stop] = True
            else:
                problems.append(f"span ({start}, {stop}) of sequence {row}, which has {length} tokens")
    if problems:
        raise ValueError(
            f"pinned spans: {'; '.join(problems)}. A span is (start, stop) with 0 <= start < stop <= the "
            "sequence's number of tokens, padding not counted."
        )
    place_BT = (valid_BT.cumsum(-1) - 1).clamp_min(0)
    return covered_BT.to(valid_BT.device).gather(-1, place_BT) & valid_BT


def spans_by_sequence(spans: Any) -> list[Sequence[Sequence[int]]]:
    """Lists of spans, one a sequence; a single one if it is meant for all; a ValueError if neither."""
    if isinstance(spans, Sequence) and not isinstance(spans, str):
        if all(_is_pair(item) for item in spans):
            return [spans]
        if all(isinstance(item, Sequence) and all(_is_pair(span) for span in item) for item in spans):
            return list(spans)
    raise ValueError(
        f"spans are {spans!r}, and must be one list of (start, stop) pairs for every sequence, or one list "
        "of pairs for each sequence."
    )


def _counts(protection: Protection, budget: Fraction | int) -> tuple[int, int]:
    """Number of protected first and last entries at this budget."""
    prefix, suffix = (
        max(protection.minimum, math.floor(exact(fraction) * budget)) if fraction else 0
        for fraction in (protection.prefix_fraction, protection.suffix_fraction)
    )
    return max(protection.sinks, prefix), max(protection.recent, suffix)


def _is_pair(item: object) -> bool:
    """True for one `(start, stop)`, not a list of them."""
    return isinstance(item, Sequence) and len(item) == 2 and all(isinstance(x, SupportsIndex) for x in item)


def one_per_sequence(given: Sequence[Any] | None, num_sequences: int, what: str) -> Sequence[Any] | None:
    """Repeat what was stated for prompts as `generate` repeats them (for beams, ...): one a sequence.

    Raises:
        ValueError: a number that does not fit.
    """
    if given is None or len(given) == num_sequences:
        return given
    if not len(given) or num_sequences % len(given):
        raise ValueError(
            f"got {len(given)} {what} for {num_sequences} sequences: pass one per sequence (per prompt, "
            "where generate repeats prompts for beams or several returned sequences)."
        )
    return [item for item in given for _ in range(num_sequences // len(given))]


def pins_per_sequence(spans: Any, num_sequences: int) -> Any:
    """Pinned spans as one list a sequence; None without any.

    Raises:
        ValueError: lists for another number of sequences.
    """
    each = None if spans is None else spans_by_sequence(spans)
    return one_per_sequence(each, num_sequences, "pinned span lists")

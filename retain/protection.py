"""Protection: which entries are never evicted, whatever their score.

In: the settings, the padding, and each sequence's budget per head. Out: a boolean mask. The decision taken
here: protection is a mask and never a huge score, it lies inside the budget, and a budget that cannot hold it
is an error and not a surprise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxtyping import Bool
from torch import Tensor

from retain.apportion import exact


@dataclass(frozen=True)
class Protection:
    """What is protected at both ends of a sequence.

    Args:
        sinks: first entries, always (attention sinks). The prefix covers them.
        prefix_fraction: share of the budget per head that protects the first entries, in [0, 1].
        suffix_fraction: share of the budget per head that protects the last entries, in [0, 1].
        minimum: least number of entries of a prefix or suffix whose fraction is not 0.
        recent: last entries, always (the observation window). It and the suffix cover each other.
    """

    sinks: int = 4
    prefix_fraction: float = 0.1
    suffix_fraction: float = 0.1
    minimum: int = 4
    recent: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, and must be 0 or more"
            for name, value in (("sinks", self.sinks), ("minimum", self.minimum), ("recent", self.recent))
            if value < 0
        ]
        problems += [
            f"{name} is {value}, and must lie in 0..1"
            for name, value in (
                ("prefix_fraction", self.prefix_fraction),
                ("suffix_fraction", self.suffix_fraction),
            )
            if not 0 <= value <= 1
        ]
        if problems:
            raise ValueError(f"protection: {'; '.join(problems)}.")


def protected_mask(
    protection: Protection, valid_BT: Bool[Tensor, "B T"], budget_tokens_B: Sequence[Fraction | int]
) -> Bool[Tensor, "B T"]:
    """Entries of each sequence that every head keeps.

    With `b` the budget per head: the first `max(sinks, prefix)` and the last `max(recent, suffix)` entries
    that exist, where `prefix = max(minimum, floor(prefix_fraction * b))`, or 0 if the fraction is 0, and
    `suffix` alike.

    Structural prefix and suffix protection as a share of the budget; sinks after StreamingLLM (arXiv
    2309.17453).

    Args:
        protection: the settings.
        valid_BT: False on padding, which is never protected.
        budget_tokens_B: entries per head of each sequence, exact.

    Returns:
        True where protected.

    Raises:
        ValueError: if more entries are protected than the budget holds; says by how much.
    """
    lengths = valid_BT.sum(-1).tolist()
    ends = [_ends(protection, budget) for budget in budget_tokens_B]
    for row, ((first, last), length, budget) in enumerate(zip(ends, lengths, budget_tokens_B, strict=True)):
        count = min(first + last, length)
        if count > budget:
            raise ValueError(
                f"sequence {row} has a budget of {float(budget):g} entries per head, "
                f"{math.ceil(count - budget)} fewer than the {count} protected ({first} first and {last} "
                f"last of {length}): raise the budget (keep_ratio, tokens_per_head or bytes), or protect "
                "less (sinks, prefix_fraction, suffix_fraction, minimum, recent)."
            )
    place_BT = valid_BT.cumsum(-1) - 1
    first_B1 = valid_BT.new_tensor([first for first, _ in ends], dtype=place_BT.dtype)[:, None]
    last_B1 = valid_BT.new_tensor(
        [length - last for (_, last), length in zip(ends, lengths, strict=True)], dtype=place_BT.dtype
    )[:, None]
    return valid_BT & ((place_BT < first_B1) | (place_BT >= last_B1))


def _ends(protection: Protection, budget: Fraction | int) -> tuple[int, int]:
    """How many first and last entries are protected at this budget."""
    prefix, suffix = (
        max(protection.minimum, math.floor(exact(fraction) * budget)) if fraction else 0
        for fraction in (protection.prefix_fraction, protection.suffix_fraction)
    )
    return max(protection.sinks, prefix), max(protection.recent, suffix)

"""Computes head budgets from quotas: the share of a joint budget that each head won on held-out documents.

Quotas are stored with gates (`GateSet.quotas`) and fitted by `train/calibration/fit.py`, where all entries of
all layers and heads compete by their true future risk: a static allocation, whatever the prompt (LKV, arXiv
2605.06676, learns head budgets end to end; Ada-KV, arXiv 2407.11550, finds them anew for each prompt).

Between stored keep_ratios the *number of entries* of a head is interpolated, not its share, so that no head
gets less when the budget grows; rounding may still cost it an entry or so.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from retain.budget.largest_remainder import exact, fill, round_shares


@dataclass(frozen=True)
class Quotas:
    """Stored quotas of the layers that evict.

    Args:
        keep_ratios: ascending, in (0, 1).
        parts: for each keep_ratio, `[L][H]` whole numbers, each head's part of their sum.
    """

    keep_ratios: tuple[Fraction, ...]
    parts: tuple[tuple[tuple[int, ...], ...], ...]

    def shares(self, keep_ratio: Fraction) -> list[Fraction]:
        """Each head's share of a budget of this size, layer after layer; they sum to 1.

        With `q_h(r)` the share at a stored keep_ratio r, and `c_h(r) = r q_h(r)` what the head then holds:
        between two stored ratios `q_h = c_h / r` with `c_h` on a straight line; below the first
        `q_h(r) = q_h(first)`; beyond the last the line ends where all is kept, `q_h(1) = 1 / (L H)`.

        Args:
            keep_ratio: share of what competes that is kept, in 0..1.
        """
        heads = sum(map(len, self.parts[0]))
        # Two sets of quotas, and how many entries, of all that are kept, go by each of them.
        below = [Fraction(0), *self.keep_ratios]
        number = bisect_right(below, keep_ratio) - 1
        low = self._at(max(0, number - 1))
        if number == 0 or below[number] == keep_ratio:
            return low
        last = number == len(self.keep_ratios)
        high = [Fraction(1, heads)] * heads if last else self._at(number)
        left, right = below[number], Fraction(1) if last else below[number + 1]
        along = (keep_ratio - left) / (right - left)
        by_low, by_high = (1 - along) * left / keep_ratio, along * right / keep_ratio
        return [by_low * own + by_high * other for own, other in zip(low, high, strict=True)]

    def _at(self, number: int) -> list[Fraction]:
        flat = [part for row in self.parts[number] for part in row]
        whole = sum(flat)
        return [Fraction(part, whole) if whole else Fraction(1, len(flat)) for part in flat]


def quotas_of(record: Mapping[str, Any] | None, heads: Mapping[int, int]) -> Quotas:
    """Read the stored quotas of the layers that evict.

    Args:
        record: `GateSet.quotas`: `keep_ratio` ascending, and `parts`, layer -> keep_ratio by keep_ratio -> a
            whole number for each KV head.
        heads: layer index -> KV heads, of each layer that evicts, in order.

    Raises:
        ValueError: none are stored, or not for these layers and heads.
    """
    if not record:
        raise ValueError(
            "allocation.quotas 'calibrated' wants quotas that are stored with the gates, and these were "
            "given none: train them with calibration.quotas true (train/distill.py), or leave quotas out."
        )
    parts, ratios = record["parts"], tuple(exact(ratio) for ratio in record["keep_ratio"])
    wrong = []
    for layer, H in heads.items():
        rows = parts.get(str(layer))
        if rows is None:
            wrong.append(f"none for layer {layer}")
        elif {len(row) for row in rows} != {H} or len(rows) != len(ratios):
            wrong.append(f"{rows!s:.60} for layer {layer}, which has {H} KV heads")
    if wrong:
        more = f" (and {len(wrong) - 1} layers more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"allocation.quotas 'calibrated' wants a quota for each head of every layer at each of "
            f"{len(ratios)} keep_ratios, and these gates have {wrong[0]}{more}: calibrate them again "
            "(train/distill.py, calibration.quotas true), or leave quotas out."
        )
    rows = [[tuple(parts[str(layer)][number]) for layer in heads] for number in range(len(ratios))]
    return Quotas(ratios, tuple(map(tuple, rows)))


def quota_budgets(
    shares: Sequence[Fraction],
    total: int,
    *,
    protected: int,
    least: int,
    capacity_LH: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Budgets of one sequence: every head holds the protected entries, and its share of the rest.

    `budget_h = protected + share_h * (total - protected * L H)`, at least `least`, at most what the head has;
    what a full head leaves goes to the others by their shares (`retain.budget.largest_remainder.fill`), and
    largest remainder makes it whole. Heads whose share is 0 get more than `least` only when all others are
    full.

    Args:
        shares: of all heads, layer after layer, which sum to 1: quotas (`Quotas.shares`), or shares by
            importance (`retain.budget.head_budgets.importance_shares`).
        total: entries over all layers and heads, at most those that exist; the budgets sum to it.
        protected: entries of every head that are protected.
        least: entries that every head gets, if it has them; no less than are protected.
        capacity_LH: entries that each head has.
    """
    flat = [own for row in capacity_LH for own in row]
    # A head that holds less than is protected (a sequence of few tokens) holds nothing that competes.
    inside = [min(protected, own) for own in flat]
    bounds = [
        [min(least, own) - safe for own, safe in zip(flat, inside, strict=True)],
        [own - safe for own, safe in zip(flat, inside, strict=True)],
    ]
    filled = round_shares(fill(total - sum(inside), shares, *bounds))
    budgets = iter([own + safe for own, safe in zip(filled, inside, strict=True)])
    return [[next(budgets) for _ in row] for row in capacity_LH]

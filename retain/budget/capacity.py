"""Measures whether a budget was too small: the largest predicted risk that was evicted, against a limit.

`Capacity` reports the *price* of an eviction (the largest risk that went), and the entries a budget needs so
that nothing above the limit goes. With one budget for the whole model and no draw, `price > limit` and
`need > kept` agree; with a drawn share, `need` is enough for any draw.

Contexts full of facts (retrieval among many keys) are beyond every method at small budgets: KVzip (arXiv
2505.23416) and KVzap (arXiv 2601.07891) lose there silently. Calibrated risk is comparable between heads and
documents, which makes a limit possible. `python -m retain.eval.diagnose.capacity` measures how well it
predicts failures, beside other signals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from retain.budget.cascade import keep_sets
from retain.budget.largest_remainder import exact, largest_remainder
from retain.budget.shares import Candidates, Shares, Split
from retain.budget.statement import Totals, select_rows
from retain.registry import lookup

ACTIONS: dict[str, str] = {
    "warn": "evict as stated, and say so",
    "raise": "evict nothing, and raise",
    "keep": "evict only what can be afforded",
}
# A larger budget is looked for until it is known to this part of all entries.
FINEST = 256


class CapacityWarning(UserWarning):
    """An eviction exceeded the limit of risk."""


class CapacityError(ValueError):
    """An eviction would have exceeded the limit of risk; nothing was evicted.

    Args:
        message: of the error.
        capacity: of the eviction, had it happened.
    """

    def __init__(self, message: str, capacity: "Capacity"):
        super().__init__(message)
        self.capacity = capacity


@dataclass(frozen=True)
class Guard:
    """States what happens if an eviction exceeds the limit of risk.

    Args:
        action: a name in `ACTIONS`.
        limit: the largest risk that may be evicted; None: the one that the gates were stored with.
    """

    action: str = "warn"
    limit: float | None = None

    def __post_init__(self) -> None:
        lookup(self.action, ACTIONS, what="what capacity does")
        if self.limit is not None and not _is_limit(self.limit):
            raise ValueError(
                f"capacity: limit is a risk, above 0 and finite; got {self.limit!r}: take one that "
                "python -m retain.eval.diagnose.capacity shows, or None for the one stored with the gates."
            )

    @property
    def holds_back(self) -> bool:
        """Whether nothing may be evicted before all layers have been seen."""
        return self.action != "warn"


@dataclass(frozen=True)
class Capacity:
    """Cost of an eviction, sequence by sequence.

    Args:
        limit: the largest risk that can be afforded.
        price_B: the largest risk that went; 0 where nothing did.
        lost_B: share of the total predicted risk that went, in 0..1.
        need_B: entries that a budget must hold, as it is shared out, so that nothing above the limit goes.
        kept_B: entries that were kept.
        entries_B: entries that there were.
        seen_B: entries of all tokens seen, or announced, of which a keep_ratio is a ratio; None: `entries_B`.
        enough: whether `need_B` would do; False: it takes at least that many.
        raised: whether the budget was enlarged to meet the limit.
    """

    limit: float
    price_B: tuple[float, ...]
    lost_B: tuple[float, ...]
    need_B: tuple[int, ...]
    kept_B: tuple[int, ...]
    entries_B: tuple[int, ...]
    seen_B: tuple[int, ...] | None = None
    enough: bool = True
    raised: bool = False

    @property
    def short_B(self) -> list[bool]:
        """Whether each sequence exceeded the limit: `price > limit`."""
        return [price > self.limit for price in self.price_B]

    @property
    def pressure_B(self) -> list[float]:
        """`need / kept`: above 1, a larger budget is needed."""
        return [need / max(1, kept) for need, kept in zip(self.need_B, self.kept_B, strict=True)]

    @property
    def ratio_B(self) -> list[float]:
        """`need / seen`: the keep_ratio that is enough."""
        whole_B = self.entries_B if self.seen_B is None else self.seen_B
        return [need / max(1, whole) for need, whole in zip(self.need_B, whole_B, strict=True)]

    @property
    def worst(self) -> int:
        """The sequence with the highest price."""
        return max(range(len(self.price_B)), key=lambda row: self.price_B[row])

    @property
    def fullest(self) -> int:
        """The short sequence that needs the largest keep_ratio; without a short one, the worst."""
        short = [row for row, is_short in enumerate(self.short_B) if is_short]
        return max(short, key=lambda row: self.ratio_B[row]) if short else self.worst

    def select_batch(self, rows: Sequence[int]) -> "Capacity":
        """Select some of the sequences."""
        return select_rows(self, rows)

    def placed(
        self, rows: Sequence[int], entries_B: Sequence[int], seen_B: Sequence[int] | None = None
    ) -> "Capacity":
        """Extend to a whole batch in which only `rows` were decided; the others lost nothing.

        Args:
            rows: place in the batch of each sequence here.
            entries_B: that each sequence of the batch had.
            seen_B: of each sequence of the batch, as in this class; None: `entries_B`.
        """
        place_of = {row: place for place, row in enumerate(rows)}
        others: dict[str, Sequence[float]] = {
            "price_B": [0.0] * len(entries_B),
            "lost_B": [0.0] * len(entries_B),
            "need_B": [0] * len(entries_B),
            "kept_B": entries_B,
            "entries_B": entries_B,
        }
        if self.seen_B is not None:
            others["seen_B"] = seen_B or entries_B
        whole: dict[str, Any] = {
            name: tuple(
                getattr(self, name)[place_of[row]] if row in place_of else other
                for row, other in enumerate(others_B)
            )
            for name, others_B in others.items()
        }
        return replace(self, **whole)

    def __str__(self) -> str:
        row, short = self.worst, sum(self.short_B)
        price = f"the largest predicted risk that went is {self.price_B[row]:.3g}, limit {self.limit:.3g}"
        lost = f"{self.lost_B[row]:.1%} of the predicted risk"
        kept = f"{self.kept_B[row]:,} of {self.entries_B[row]:,} entries"
        if self.raised:
            return f"budget enlarged to {kept}: {price} ({lost})"
        if not short:
            return f"within what can be afforded: {price} ({lost})"
        which = f"sequence {row} (of {short} such) keeps" if len(self.price_B) > 1 else "it keeps"
        about, most = "about" if self.enough else "at least", self.fullest
        needs = f"{about} {self.need_B[most]:,} entries"
        needs = f"{needs.capitalize()} would do" if most == row else f"Sequence {most} needs {needs}"
        return (
            f"more goes than can be afforded: {which} {kept}; {price} ({lost}). {needs} (keep_ratio {about} "
            f"{rounded_up(self.ratio_B[most]):.3g})"
        )


def rounded_up(ratio: float) -> float:
    """Round a ratio up to thousandths; at most 1."""
    return min(1.0, math.ceil(ratio * 1000 - 1e-9) / 1000)


class CapacityMeter:
    """Measures the capacity of an eviction layer by layer.

    Args:
        limit: the largest risk that may be evicted.
        split: how the budget is shared, on which the need depends.
        follows: whether entries of lower layers may still go when a layer comes.
    """

    def __init__(self, limit: float, split: Split, *, follows: bool = False):
        self.limit, self.split, self.follows = limit, split, follows
        # Layer by layer, on the layer's own device: the device is waited for only after the last.
        self._needs: list[Int64[Tensor, "2 B H"]] = []
        # Entries kept and all entries, risk lost and all risk, and the price.
        self._sums: list[Float64[Tensor, "5 B"]] = []
        self._held: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        layer: Candidates,
        keep_BHT: Bool[Tensor, "B H T"],
        lower: Sequence[Tensor | None] = (),
    ) -> None:
        """Add the next layer.

        Args:
            layer: its entries, scored in risk.
            keep_BHT: kept.
            lower: masks of lower layers as from `retain.budget.cascade.Cascade.add`.
        """
        score_BHT = layer.ranked_BHT
        exists_BHT = score_BHT > float("-inf")
        gone_BHT = exists_BHT & ~keep_BHT
        risk_BHT = score_BHT.double().masked_fill(~exists_BHT, 0.0)
        gone_risk_BHT = risk_BHT.masked_fill(~gone_BHT, 0.0)
        self._needs.append(self._needed(layer, exists_BHT))
        counts = [mask_BHT.sum((1, 2)).double() for mask_BHT in (exists_BHT & keep_BHT, exists_BHT)]
        risks = [gone_risk_BHT.sum((1, 2)), risk_BHT.sum((1, 2)), gone_risk_BHT.amax((1, 2))]
        self._sums.append(torch.stack([*counts, *risks]))
        for place, keep_N in enumerate(lower):
            if keep_N is not None and self.follows:
                self._shrink(place, keep_N)
        if self.follows:
            b_N, h_N, t_N = keep_BHT.nonzero(as_tuple=True)
            self._held.append((b_N, score_BHT[b_N, h_N, t_N]))

    @property
    def num_added(self) -> int:
        """Number of layers added."""
        return len(self._needs)

    def _needed(self, layer: Candidates, exists_BHT: Bool[Tensor, "B H T"]) -> Int64[Tensor, "2 B H"]:
        """Entries that each head must keep so that nothing above the limit goes: guaranteed ones, and others
        (where heads compete, bids above the limit, which a `floor` may have lifted there)."""
        own = self.split.allocation
        if layer.bids is None or own.normalise is not None or own.compete_by != "score":
            score_BHT = layer.ranked_BHT
            above_BHT = exists_BHT & ~layer.kept_BHT & (score_BHT > self.limit)
            return torch.stack([(exists_BHT & layer.kept_BHT).sum(-1), above_BHT.sum(-1)])
        sure_BH, above_N = layer.bids.guaranteed_BH, layer.bids.value_N > self.limit
        above_R = torch.zeros_like(sure_BH).flatten()
        above_R.scatter_add_(0, layer.bids.row_N.long(), above_N.long())
        return torch.stack([sure_BH, above_R.view_as(sure_BH)])

    def _shrink(self, place: int, keep_N: Bool[Tensor, " N"]) -> None:
        """Record that a lower layer evicts entries."""
        b_N, score_N = self._held[place]
        keep_N = keep_N.to(score_N.device)
        gone_N = score_N.double().masked_fill(keep_N, 0.0)
        kept_B, _, lost_B, _, price_B = self._sums[place]
        kept_B.scatter_add_(0, b_N, -(~keep_N).double())
        lost_B.scatter_add_(0, b_N, gone_N)
        price_B.scatter_reduce_(0, b_N, gone_N, "amax")
        left_N = keep_N.nonzero()[:, 0]
        self._held[place] = b_N[left_N], score_N[left_N]

    def read(self) -> Capacity:
        """Summarise all layers."""
        device = self._sums[0].device
        sums_L5B = torch.stack([sums.to(device) for sums in self._sums])
        kept_B, entries_B = sums_L5B[:, :2].sum(0).long().tolist()
        lost_B, total_B = sums_L5B[:, 2:4].sum(0)
        # Layers may have unlike numbers of heads.
        needs = torch.cat([need.to(device) for need in self._needs], -1)
        parts_L = [part.tolist() for part in needs.cpu().split([own.shape[-1] for own in self._needs], -1)]
        enough, need_B = True, []
        for row, entries in enumerate(entries_B):
            sure, above = ([part[kind][row] for part in parts_L] for kind in (0, 1))
            need, enough = needed(sure, above, self.split)
            need_B.append(min(need, entries))
        tiny = torch.finfo(torch.float64).tiny
        return Capacity(
            self.limit,
            tuple(sums_L5B[:, 4].amax(0).tolist()),
            tuple((lost_B / total_B.clamp_min(tiny)).tolist()),
            tuple(need_B),
            tuple(kept_B),
            tuple(entries_B),
            enough=enough,
        )


def needed(
    sure_LH: Sequence[Sequence[int]], above_LH: Sequence[Sequence[int]], split: Split
) -> tuple[int, bool]:
    """Entries that a budget for all layers must hold so that every head gets what it needs, and whether that
    number is enough.

    With `n_lh = sure_lh + above_lh` and `H_l` heads: `sum n_lh` where all heads share (`model`),
    `max_l ceil(sum_h n_lh / H_l) * sum H_l` where those of a layer do, `max n_lh * sum H_l` where none does.
    Where layers or heads get stated shares or keep the same tokens, or layers compete as layers, it is at
    least `sum n_lh`; where not all goes by score (a first stage), at least what it would be without. With a
    share s of the model's budget drawn: `sum sure_lh + f`, f the least with `f - floor(s f) >= sum above_lh`,
    enough for any draw.

    Args:
        sure_LH: entries that each head keeps in any case; at least one a head is counted.
        above_LH: the others that it needs.
        split: how the budget is shared.
    """
    sure_LH = [[max(1, own) for own in row] for row in sure_LH]
    need_LH = [list(map(sum, zip(*rows, strict=True))) for rows in zip(sure_LH, above_LH, strict=True)]
    heads, own = sum(map(len, need_LH)), split.allocation
    by_score = own.normalise is None and own.compete_by == "score"
    by_score = by_score and split.first_stage is None
    drawn = exact(split.drawn_share or 0.0)
    if split.scope == "model":
        sure, above = sum(map(sum, sure_LH)), sum(map(sum, above_LH))
        if drawn == 1:
            return sure + above, False
        return sure + (math.floor((above - 1) / (1 - drawn)) + 1 if above else 0), by_score
    by_score = by_score and not drawn
    alike = not own.states_heads and own.safeguard is None and split.shared is None
    if own.layers != "uniform" or not alike:
        return sum(map(sum, need_LH)), False
    if split.scope == "layer":
        return max(-(-sum(row) // len(row)) for row in need_LH) * heads, by_score
    return max(map(max, need_LH)) * heads, by_score


def capacity_of(
    shares: Shares, candidates: Sequence[Candidates], keeps: Sequence[Tensor], limit: float
) -> Capacity:
    """Measure the capacity of a decision about all layers: their entries, scored in risk, and keep masks."""
    meter = CapacityMeter(limit, shares.split)
    for layer, keep_BHT in zip(candidates, keeps, strict=True):
        meter.add(layer, keep_BHT)
    return replace(meter.read(), seen_B=seen_of(shares.totals))


def seen_of(totals: Totals) -> tuple[int, ...]:
    """Denominator of the keep_ratio of each sequence, in entries of all layers and heads."""
    return tuple(length * sum(totals.heads_L) for length in totals.lengths_B)


def enlarged(shares: Shares, totals_B: Sequence[int]) -> Shares:
    """Replace the totals (entries of each sequence, over all layers). Protected entries, and the budget that
    fractions refer to, stay. Whole pages stay whole."""
    totals = shares.totals
    weights = [Fraction(heads) for heads in totals.heads_L]
    equal_BL = tuple(
        tuple(largest_remainder(total, weights, [length * heads for heads in totals.heads_L]))
        for length, total in zip(totals.lengths_B, totals_B, strict=True)
    )
    totals = replace(totals, equal_BL=equal_BL)
    if shares.page is not None:
        totals = totals.in_pages(shares.page, [0] * len(totals.lengths_B), totals.tail_B)
    return replace(shares, totals=totals)


def enlarge_to_limit(
    shares: Shares, candidates: Sequence[Candidates], limit: float
) -> tuple[Shares, list[Tensor], Capacity]:
    """Find the least budget, at least the stated one, at which nothing above the limit is evicted.

    Each sequence gets its own: as counted (`needed`), where that is enough; else one found by halving, to
    `1 / FINEST` of all entries. Protected entries stay as the stated budget has them.

    Args:
        shares: totals and shares.
        candidates: all layers' entries, scored in risk.
        limit: the largest risk that can be afforded.

    Returns:
        the shares with those budgets, the keep masks, and their capacity.
    """
    if shares.threshold is not None:
        raise ValueError("a threshold states no budget that could be enlarged: state keep_ratio.")

    def tried(totals_B: np.ndarray) -> tuple[Shares, list[Tensor], Capacity]:
        own = enlarged(shares, totals_B.tolist())
        keeps = keep_sets(own, candidates)
        return own, keeps, capacity_of(own, candidates, keeps, limit)

    keeps = keep_sets(shares, candidates)
    stated = capacity_of(shares, candidates, keeps, limit)
    if not any(stated.short_B):
        return shares, keeps, stated
    totals = shares.totals
    all_B, low_B = np.array(seen_of(totals)), np.array(totals.stated_B)
    # The counted need is mostly enough, and never too much if one budget is shared by all.
    need_B = np.maximum(low_B, np.minimum(stated.need_B, all_B))
    high_B = np.where(stated.short_B, need_B, low_B)
    best = tried(high_B)
    if any(best[2].short_B) or not stated.enough:
        # Of these, high is enough and low is not.
        short_B = np.array(best[2].short_B)
        low_B, high_B = np.where(short_B, high_B, low_B), np.where(short_B, all_B, high_B)
        while (high_B - low_B > np.maximum(1, all_B // FINEST)).any():
            middle_B = (low_B + high_B) // 2
            short_B = np.array(tried(middle_B)[2].short_B)
            low_B, high_B = np.where(short_B, middle_B, low_B), np.where(short_B, high_B, middle_B)
        best = tried(high_B)
    return best[0], best[1], replace(best[2], raised=True)


def _is_limit(value: object) -> TypeGuard[float]:
    """Whether a value is a valid limit of risk."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def stored_limit(gates: Any) -> float | None:
    """Read the limit stored with gates (`train/calibration/capacity_limit.py`); None without one.

    Raises:
        ValueError: the stored value is no limit.
    """
    calibration = getattr(gates, "metadata", {}).get("calibration") or {}
    record = calibration.get("capacity")
    if record is None:
        return None
    limit = record.get("limit") if isinstance(record, Mapping) else None
    if not _is_limit(limit):
        raise ValueError(
            f"calibration.capacity of these gates is {record!r:.80}: wanted a limit above 0: calibrate them "
            "again (train/distill.py, calibration.capacity true), or pass capacity=None."
        )
    return float(limit)

"""Fits quotas of a budget on held-out documents: the share of each head where all compete by true risk.

The record is stored with gates (`retain.budget.quotas` reads it). Quotas follow the targets alone, and no
gate's score: they state what heads need, and a gate (any, or none) says which entries of a head those are.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from retain.budget.largest_remainder import exact, largest_remainder
from retain.budget.quotas import quota_budgets, quotas_of
from retain.gates.calibrate import PARTS
from retain.ranking import order_entries

# At which quotas are stored; between them heads' numbers of entries are interpolated.
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)

# Of a document: layer -> one number for each entry that counts, `[H, counted]`.
Rows = Mapping[int, Tensor]


def count_of(entries: int, keep_ratio: float) -> int:
    """`ceil(keep_ratio * entries)`, exactly as written, at least one."""
    return max(1, math.ceil(exact(keep_ratio) * entries))


def fit_quotas(targets: Sequence[Rows]) -> dict[str, Any]:
    """The share of a joint budget that each head takes, where all entries compete by their targets.

    Of a document with N entries over all layers and heads, the `n = ceil(keep_ratio N)` largest targets are
    kept; with `n_h` of them in head h, `quota_h = mean over documents of n_h / n`. Entries that tie with the
    last one kept share what is left between them, in parts of an entry: no head wins by its place.

    Returns:
        `keep_ratio`, ascending, and `parts`: layer -> for each keep_ratio, parts of `PARTS` for each head,
        whole numbers that sum to `PARTS` over all layers and heads.
    """
    ordered = [_flat(own).sort(descending=True).values for own in targets]
    parts: dict[str, list[list[int]]] = {str(layer): [] for layer in targets[0]}
    for ratio in RATIOS:
        share_R: Tensor | float = 0.0
        for own, ordered_N in zip(targets, ordered, strict=True):
            count = count_of(len(ordered_N), ratio)
            above_R, tied_R = (
                torch.cat([which(each).sum(-1) for each in own.values()]).double()
                for which in (ordered_N[count - 1].lt, ordered_N[count - 1].eq)
            )
            won_R = above_R + tied_R * (count - above_R.sum()) / tied_R.sum()
            share_R = share_R + won_R / (count * len(targets))
        assert isinstance(share_R, Tensor)
        whole = iter(largest_remainder(PARTS, [Fraction(share) for share in share_R.tolist()]))
        for layer, each in targets[0].items():
            parts[str(layer)].append([next(whole) for _ in range(len(each))])
    return {"keep_ratio": list(RATIOS), "parts": parts}


def report_quotas(
    targets: Sequence[Rows], scores: Sequence[Rows], quotas: Mapping[str, Any], keep_ratios: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Share of the whole model's target that is kept at each keep_ratio, in the mean over documents that
    quotas were not fitted to; scores are those after calibration.

    Each head keeps its first entries by score: as many as all others (`equal`), its quota (`quotas`), as many
    as it has among the model's first by score (`joint`) or by target (`by_target`)."""
    known = quotas_of(quotas, {layer: len(own) for layer, own in targets[0].items()})
    kept: dict[str, dict[str, float]] = {}
    for ratio in keep_ratios:
        shares: dict[str, list[float]] = {"equal": [], "quotas": [], "joint": [], "by_target": []}
        for target, score in zip(targets, scores, strict=True):
            capacity_LH = [[own.shape[1]] * len(own) for own in target.values()]
            capacity = [own for row in capacity_LH for own in row]
            entries = sum(capacity)
            total = count_of(entries, ratio)
            quota_LH = quota_budgets(
                known.shares(Fraction(total, entries)),
                total,
                protected=0,
                least=0,
                capacity_LH=capacity_LH,
            )
            counts = {
                "equal": largest_remainder(total, [Fraction(1)] * len(capacity), capacity),
                "quotas": [own for row in quota_LH for own in row],
                "joint": _won(score, total),
                "by_target": _won(target, total),
            }
            worth = [_so_far(*pair) for pair in zip(score.values(), target.values(), strict=True)]
            so_far = [head_N for own_HN in worth for head_N in own_HN]
            whole = float(sum(head_N[-1] for head_N in so_far))
            for name, first in counts.items():
                got = float(sum(head_N[count] for head_N, count in zip(so_far, first, strict=True)))
                shares[name].append(got / whole if whole > 0 else 1.0)
        kept[f"{ratio:g}"] = {name: sum(each) / len(each) for name, each in shares.items()}
    return kept


def _flat(rows: Rows) -> Tensor:
    return torch.cat([own.flatten() for own in rows.values()])


def _so_far(score_HT: Tensor, target_HT: Tensor) -> Float64[Tensor, "H counts"]:
    """The target that each head keeps with its first 0, 1, ... entries by score."""
    so_far_HT = target_HT.double().gather(1, order_entries(score_HT)).cumsum(1)
    return torch.cat([torch.zeros(len(so_far_HT), 1, dtype=torch.float64), so_far_HT], dim=1)


def _won(rows: Rows, total: int) -> list[int]:
    """Number of each head's entries among the first of all."""
    chosen_N = torch.zeros(sum(own.numel() for own in rows.values()), dtype=torch.bool)
    chosen_N[order_entries(_flat(rows)[None])[0, :total]] = True
    pieces = chosen_N.split([own.numel() for own in rows.values()])
    return [
        count
        for own, piece_N in zip(rows.values(), pieces, strict=True)
        for count in piece_N.view(own.shape).sum(-1).tolist()
    ]

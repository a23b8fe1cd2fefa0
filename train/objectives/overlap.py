"""Judges gates by overlap with the target's top fifth, beside scores that cost no training."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.attention.ranking import rank_entries
from retain.scores.value_norm import value_norm
from retain.train.objectives.case import keyed_generator

# Share of a head's entries whose finding is reported.
OVERLAP_SHARE = 0.2


def head_overlaps(
    output_HT: Float[Tensor, "H T"], target_HT: Float[Tensor, "H T"], reached_HT: Bool[Tensor, "H T"]
) -> Float[Tensor, " H"]:
    """Share of the target's top fifth of each head's reached entries that the output finds. Chance: a
    fifth."""
    size_BH1 = torch.round(OVERLAP_SHARE * reached_HT.sum(-1, keepdim=True)).long().clamp_min(1)[None]
    known_BHT, wanted_BHT = (
        rank_entries(score_HT.masked_fill(~reached_HT, -torch.inf)[None]) < size_BH1
        for score_HT in (output_HT, target_HT)
    )
    return ((known_BHT & wanted_BHT & reached_HT).sum(-1) / size_BH1[..., 0])[0]


def baseline_overlaps(
    values_BHTD: Float[Tensor, "1 H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    target_HT: Float[Tensor, "H T"],
    reached_HT: Bool[Tensor, "H T"],
    key: tuple[int, ...],
) -> dict[str, float]:
    """Overlap with the target's top fifth that costs no training, of one layer and one document.

    `overlap_random` (chance, from `key`), `overlap_recency` (later is better), `overlap_value_norm`
    (`||v W_O||_1` alone, largest of the group).
    """
    H, T = target_HT.shape
    norm_BQT = value_norm(values_BHTD, output_weight_QDE)
    scores = {
        "overlap_random": torch.rand(H, T, generator=keyed_generator(key)).to(target_HT.device),
        "overlap_recency": torch.arange(T, device=target_HT.device).float().expand(H, T),
        "overlap_value_norm": norm_BQT[0].unflatten(0, (H, -1)).amax(1),
    }
    return {
        name: float(head_overlaps(score_HT.float(), target_HT, reached_HT).mean())
        for name, score_HT in scores.items()
    }

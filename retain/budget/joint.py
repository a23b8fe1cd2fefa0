"""Joint top-k: heads of a layer, or of all layers, compete for one total with their entries.

Ada-KV (arXiv 2407.11550) flattens the heads of a layer so, Layer-DefensiveKV (arXiv 2510.13334) those of all
layers. A share of the places may be drawn in proportion to weight, which keeps sums right in the mean:
Priority Sampling for Estimation of Arbitrary Subset Sums (Duffield, Lund, Thorup; J. ACM 54(6), 2007) takes
of n weights `w_i` and uniform numbers `u_i` in (0, 1] the k largest `q_i = w_i / u_i`. An entry's number is
always the same (`retain.scores.random`), so that it is drawn again while its weight lasts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.attention.ranking import rank_kept_first, refuse_nan
from retain.budget.largest_remainder import ratio_of


class Bids(NamedTuple):
    """Entries of one layer that compete for a shared budget, in no particular order.

    Attributes:
        guaranteed_BH: entries that each head has in any case; they do not bid.
        value_N, place_N, row_N: score, place in the sequence, and row `b * H + h` of the others.
        draw_N: their keys where a share is drawn (`retain.scores.random.draw_keys`).
    """

    guaranteed_BH: Int64[Tensor, "B H"]
    value_N: Float[Tensor, " N"]
    place_N: Int32[Tensor, " N"]
    row_N: Int32[Tensor, " N"]
    draw_N: Float[Tensor, " N"] | None = None

    def select(self, which_N: Bool[Tensor, " N"]) -> "Bids":
        """Select some of the bids."""
        at_N = which_N.nonzero()[:, 0]  # counted once for all of the fields, since a count is waited for
        chosen: Any = (None if one is None else one[at_N] for one in self[1:])
        return Bids(self.guaranteed_BH, *chosen)


class Won(NamedTuple):
    """Budgets of one layer's heads.

    Attributes:
        budget_BH: entries of each head, guaranteed ones included.
        won_N: which of the layer's bids won; None where heads do not bid.
        drawn_N: which of them won by their key; None where nothing is drawn.
    """

    budget_BH: Int64[Tensor, "B H"]
    won_N: Bool[Tensor, " N"] | None = None
    drawn_N: Bool[Tensor, " N"] | None = None


def make_bids(
    compete_BHT: Float[Tensor, "B H T"],
    exists_BHT: Bool[Tensor, "B H T"],
    kept_BHT: Bool[Tensor, "B H T"],
    least_B: Sequence[int],
    place_BT: Int[Tensor, "B T"] | None = None,
    draw_BHT: Float[Tensor, "B H T"] | None = None,
) -> tuple[Bids, Bool[Tensor, "B H T"]]:
    """Make one layer's bids: its entries apart from the guaranteed ones.

    Args:
        compete_BHT: comparable across heads; no NaN.
        exists_BHT: False where the head holds no entry.
        kept_BHT: kept in any case (protected, a first stage).
        least_B: entries that every head of a sequence gets at least, the first of (kept, score).
        place_BT: places in the sequences; None: the index, the same in all layers.
        draw_BHT: keys where a share is drawn.

    Returns:
        the bids; and which entries bid, row after row in the order of the bids.
    """
    for score_BHT in (compete_BHT,) if draw_BHT is None else (compete_BHT, draw_BHT):
        refuse_nan(score_BHT)
    compete_BHT = compete_BHT.masked_fill(~exists_BHT, float("-inf"))
    least_B11 = torch.tensor(least_B, device=compete_BHT.device)[:, None, None]
    guaranteed_BHT = kept_BHT | ((rank_kept_first(compete_BHT, kept_BHT) < least_B11) & exists_BHT)
    free_BHT = exists_BHT & ~guaranteed_BHT
    b, h, t = free_BHT.nonzero(as_tuple=True)
    row_N, draw_N = b * compete_BHT.shape[1] + h, None if draw_BHT is None else draw_BHT[b, h, t]
    place_N = t if place_BT is None else place_BT.to(t.device)[b, t]
    bids = Bids(guaranteed_BHT.sum(-1), compete_BHT[b, h, t], place_N.int(), row_N.int(), draw_N)
    return bids, free_BHT


def allocate_joint(
    layers: Sequence[Bids], total_B: Sequence[int], drawn_share: float | None = None
) -> list[Won]:
    """Budgets of a joint top-k: heads, of one layer or of several, compete for one total.

    `budget_l[b, h] = guaranteed_l[b, h] + #{its bids among the first total_b - sum(guaranteed)}`. Equal bids
    go to the later position, then to the lower layer, then to the lower head. Afterwards a head's own
    top-`budget` is exactly its part of the joint top-k.

    With a drawn share, `floor(drawn_share * (total_b - sum(guaranteed)))` of the places go to the largest
    keys among the other bids, ties as above. As layers come both parts only lose to later ones.

    Args:
        layers: bids of each.
        total_B: entries that each sequence may keep; where fewer exist, all are kept.
        drawn_share: in [0, 1], of the entries that are not guaranteed; None: nothing is drawn.

    Raises:
        ValueError: if the guaranteed entries alone exceed the total.
    """
    device = layers[0].value_N.device
    moved: Any = [[None if one is None else one.to(device) for one in bids] for bids in layers]
    here = [Bids(*each) for each in moved]
    total = torch.tensor(total_B, dtype=torch.int64, device=device)
    free_B = total - torch.stack([bids.guaranteed_BH.sum(-1) for bids in here]).sum(0)
    if (free_B < 0).any():
        row = int((free_B < 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} has a budget of {int(total[row])} entries, {-int(free_B[row])} fewer than its "
            "heads are guaranteed (protected, a first stage, a safeguard, and one a head): raise the budget, "
            "or protect less."
        )
    value_N = torch.cat([bids.value_N for bids in here])
    # Where all else is equal the later place counts, then, as they stand here, the lower layer and head.
    later_N = torch.cat([bids.place_N for bids in here]).sort(descending=True, stable=True).indices
    sequence_N = torch.cat([bids.row_N // bids.guaranteed_BH.shape[1] for bids in here]).long()
    part, whole = ratio_of(drawn_share or 0.0)
    drawn_B = free_B * part // whole
    scored_N = _first_of_each(value_N, later_N, sequence_N, free_B - drawn_B)
    drawn_N = torch.zeros_like(scored_N)
    if drawn_share is not None:
        keys_N = torch.cat([bids.draw_N for bids in here if bids.draw_N is not None])
        # Those that went by score stand last; where there is too little left to draw, all of it is drawn.
        keys_N = keys_N.masked_fill(scored_N, float("-inf"))
        drawn_N = _first_of_each(keys_N, later_N, sequence_N, drawn_B) & ~scored_N
    sizes, answer = [len(bids.value_N) for bids in here], []
    parts = zip(layers, (scored_N | drawn_N).split(sizes), drawn_N.split(sizes), strict=True)
    for bids, won_N, lot_N in parts:
        home = bids.value_N.device
        won_N, budget_BH = won_N.to(home), bids.guaranteed_BH.clone()
        budget_BH.view(-1).scatter_add_(0, bids.row_N.long(), won_N.long())
        answer.append(Won(budget_BH, won_N, None if drawn_share is None else lot_N.to(home)))
    return answer


def _first_of_each(value_N: Tensor, later_N: Tensor, sequence_N: Tensor, count_B: Tensor) -> Tensor:
    """Mask of the first `count_B` of each sequence: by value, then in the order of `later_N`."""
    # One stable sort after another, the last the first to count.
    order_N = later_N[value_N[later_N].sort(descending=True, stable=True).indices]
    if len(count_B) > 1:
        order_N = order_N[sequence_N[order_N].sort(stable=True).indices]
    held_B = torch.zeros_like(count_B).scatter_add_(0, sequence_N, torch.ones_like(sequence_N))
    sorted_N = sequence_N[order_N]
    place_N = torch.arange(len(order_N), device=value_N.device) - (held_B.cumsum(0) - held_B)[sorted_N]
    return torch.zeros_like(order_N, dtype=torch.bool).scatter_(0, order_N, place_N < count_B[sorted_N])

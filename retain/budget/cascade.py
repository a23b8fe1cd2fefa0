"""Computes the keep sets of all layers, at once or layer by layer while a model prefills.

`head_budgets` serves both. While layers are still to come it gives the *ceiling* of each share, which
contains the final answer, so a `Cascade` that evicts at every step ends with the one-shot sets: joint
selection is a running threshold, and shares by weight (LAVa, CAKE) only shrink as layers come. Its peak is
the budget plus one full layer (plus rounding: one entry a layer), and a few percent of the keys and values
for scores and bids. A second eviction has all layers at once: no cascade runs.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.attention.ranking import admit, select
from retain.attention.two_stage import stage_by_budget
from retain.budget.allocation import Candidates, Plan, allocate_uniform
from retain.budget.joint import Won, allocate_joint
from retain.budget.largest_remainder import largest_remainder
from retain.presets import Policy

# Lower layers may hold so much of what they have lost, as part of a whole layer's entries, until the last
# comes: a cut lays a layer out anew. What has lost once loses whenever more layers come.
LEFT_OVER = Fraction(1, 2)


def keep_sets(plan: Plan, layers: Sequence[Candidates], *, first: int = 0) -> list[Bool[Tensor, "B H T"]]:
    """Compute the keep mask of each layer; their sum is exact when all layers have come.

    Args:
        layers: those that have come: all, or the first few of those that evict.
        first: place of `layers[0]` among them; not 0 only where layers do not depend on each other.
    """
    if plan.budget.threshold is not None:
        return [admit(layer.score_BHT, layer.kept_BHT, plan.budget.threshold) for layer in layers]
    budgets = head_budgets(plan, layers, first=first)
    return [_keep(plan.policy, layer, won) for layer, won in zip(layers, budgets, strict=True)]


def head_budgets(plan: Plan, layers: Sequence[Candidates], *, first: int = 0) -> list[Won]:
    """Compute the entries of each head of each layer; arguments as of `keep_sets`."""
    split, totals = plan.policy, plan.totals
    here = slice(first, first + len(layers))
    final = here.stop == len(totals.heads_L)
    bids = [layer.bids for layer in layers if layer.bids is not None]
    if split.scope == "model":
        return allocate_joint(bids, totals.total_B, split.drawn_share)
    if split.weights is not None:
        budgets_LBH = plan.alike_LBH[here]
        if first == 0 and final:  # all have come: the entries of each head are known
            budgets_LBH = plan.by_head_LBH([layer.capacity_BH.tolist() for layer in layers])
        pairs = zip(budgets_LBH, layers, strict=True)
        return [Won(torch.tensor(counts, device=layer.score_BHT.device)) for counts, layer in pairs]
    totals_LB = _by_weight(plan, layers, final) if plan.fixed_LB is None else plan.fixed_LB[here]
    if split.scope == "head":
        counts = [layer.capacity_BH for layer in layers]
        return [Won(allocate_uniform(*each)) for each in zip(totals_LB, counts, strict=True)]
    each = zip(bids, totals_LB, strict=True)
    return [allocate_joint([one], total_B, split.drawn_share)[0] for one, total_B in each]


def _by_weight(plan: Plan, layers: Sequence[Candidates], final: bool) -> list[list[int]]:
    """Entries of each layer and sequence by the layers' weights, rounded up while layers are to come."""
    totals, columns = plan.totals, []
    for row, total in enumerate(totals.total_B):
        # Protected entries of layers that are still to come are set aside; the rest is for those here.
        inside = [plan.protected_B[row] * heads for heads in totals.heads_L]
        held = [layer.held_B[row] for layer in layers]
        pairs = zip(layers, totals.heads_L, strict=False)
        columns.append(
            largest_remainder(
                min(total - sum(inside[len(layers) :]), sum(held)),
                [layer.weight_B[row] * heads for layer, heads in pairs],
                held,
                protected=inside[: len(layers)],
                least=[layer.guaranteed_B[row] for layer in layers],
                round_up=not final,
            )
        )
    return [list(column) for column in zip(*columns, strict=True)]


def _keep(split: Policy, layer: Candidates, won: Won) -> Bool[Tensor, "B H T"]:
    """Keep mask of a layer."""
    if split.draw is None:
        return keep_first(split, layer, won.budget_BH)
    # A drawn set follows no order of the head: it is what won a bid or made none.
    free_BHT = layer.free_BHT
    assert free_BHT is not None and won.won_N is not None, "where a share is drawn, all entries bid"
    return (~free_BHT).masked_scatter(free_BHT, won.won_N) & (layer.score_BHT > float("-inf"))


def keep_first(split: Policy, layer: Candidates, budget_BH: Int64[Tensor, "B H"]) -> Bool[Tensor, "B H T"]:
    """The top of each head, in one stage or two."""
    kept_BHT = layer.kept_BHT
    if split.two_stages:
        assert split.first_stage is not None and layer.first_BHT is not None
        kept_BHT = kept_BHT | stage_by_budget(layer.first_BHT, kept_BHT, budget_BH, split.first_stage.share)
    return select(layer.score_BHT, kept_BHT, budget_BH)


class Cascade:
    """Decides layer by layer, and shrinks lower layers as layers come: to their budget and `LEFT_OVER`, and
    exactly with the last layer."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.num_added = 0
        self.held: list[Candidates] = []

    def add(self, layer: Candidates) -> tuple[Bool[Tensor, "B H T"], list[Bool[Tensor, " N"] | None]]:
        """Add the next layer.

        Returns:
            its keep mask; and one for each lower layer, over the entries that it holds, row after row in
            order of time; None for one that keeps them all.
        """
        split, self.num_added = self.plan.policy, self.num_added + 1
        if not self.plan.crosses_layers:
            (keep_BHT,) = keep_sets(self.plan, [layer], first=self.num_added - 1)
            return keep_BHT, [None] * (self.num_added - 1)
        layers = [*self.held, layer]
        budgets = head_budgets(self.plan, layers)
        # Remaining entries of each sequence in each layer, in one transfer.
        device = budgets[0].budget_BH.device
        counts_LB = torch.stack([won.budget_BH.sum(-1).to(device) for won in budgets]).tolist()
        last = self.num_added == len(self.plan.totals.heads_L)
        # Budgets only shrink: the same sum is the same budgets.
        lost = [sum(held.held_B) - sum(count_B) for held, count_B in zip(self.held, counts_LB, strict=False)]
        left_over, spare = sum(lost), 0 if last else LEFT_OVER * sum(layer.held_B)
        lower: list[Bool[Tensor, " N"] | None] = [None] * len(self.held)
        for idx in sorted(range(len(lost)), key=lost.__getitem__, reverse=True):
            if left_over > spare:
                held, left_over = self.held[idx], left_over - lost[idx]
                keep_BHT = _keep(split, held, budgets[idx])
                lower[idx] = keep_BHT[held.score_BHT > float("-inf")]
                self.held[idx] = held.cut(keep_BHT, budgets[idx], counts_LB[idx])
        keep_BHT = _keep(split, layer, budgets[-1])
        self.held = [] if last else [*self.held, layer.cut(keep_BHT, budgets[-1], counts_LB[-1])]
        return keep_BHT, lower

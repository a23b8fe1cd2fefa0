"""Composes a policy on one screen: evidence -> scores -> fusion -> protection -> budget -> selection.

Each stage has its own file. `score_entries` is separate, so that a comparison scores once and selects at many
budgets; observed and learned scores can be passed in, so that controls run through the same stages. `plan_of`
and `candidates_of` are separate, so that a cache can decide layer by layer (`retain.budget.cascade`) with the
result of `decide_layers`, and evict again later (`retain.evidence.Stock`), when heads already hold
different numbers of entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from retain.attention.two_stage import stage_by_mass
from retain.budget.allocation import Candidates, Plan
from retain.budget.cascade import keep_sets
from retain.budget.joint import make_bids
from retain.budget.statement import Budget, spread
from retain.config import stated_of
from retain.evidence import Evidence, Stock
from retain.fusion import fuse
from retain.presets import ByScore, Policy, load_policy, policies
from retain.protection import protected_mask
from retain.scores import SCORES, Score, masked_score
from retain.scores.lava import entropy_weight
from retain.scores.random import draw_keys
from retain.shapes import LayerShape

__all__ = [
    "Decision",
    "Plan",
    "Policy",
    "candidates_of",
    "check_budget",
    "decide_layers",
    "load_policy",
    "plan_of",
    "policies",
    "score_entries",
    "shape_of",
]


@dataclass(frozen=True)
class Decision:
    """Keep set of one layer.

    Args:
        keep_BHT: True where kept.
        score_BHT: the score that ordered each head, float32, -inf where the head holds no entry.
        protected_BT: True where protected.
    """

    keep_BHT: Bool[Tensor, "B H T"]
    score_BHT: Float32[Tensor, "B H T"]
    protected_BT: Bool[Tensor, "B T"]


def decide_layers(
    policy: Policy,
    layers: Sequence[Evidence],
    budget: Budget,
    *,
    learned: Sequence[Score] | None = None,
    observed: Sequence[Score] | None = None,
    scores: Sequence[Score] | None = None,
    seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None,
    pinned_BT: Bool[Tensor, "B T"] | None = None,
    stock: Stock | None = None,
) -> list[Decision]:
    """Decide which entries of each layer stay.

    Args:
        layers: the evidence of all layers that evict, in order, of all tokens seen (after earlier evictions
            use `plan_of`, `candidates_of` and `keep_sets`, as a cache does).
        budget: of them all; a policy without scores keeps everything whatever the budget.
        learned: the gate's scores, one a layer.
        observed: replace the policy's own observed scores (controls).
        scores: of `score_entries`; then nothing is scored or fused here.
        seeds_B: one integer a sequence, for scores that draw numbers.
        pinned_BT: entries that the caller wants kept.
        stock: entries left after earlier evictions; None: all that the layers show (`held_BHT`).

    Returns:
        the keep sets, together exactly as large as the budget says (or as there are entries); under a
        threshold as large as the scores say.

    Raises:
        ValueError: if the budget cannot hold the protected entries, a score is missing, or the policy does
            not fit a threshold, or evicts nothing.
    """
    scored = scores is not None or observed is not None
    if policy.keeps_all and not scored:
        return [_everything(layer) for layer in layers]
    stock = stock_of(layers) if stock is None else stock
    shapes = [shape_of(layer) for layer in layers]
    plan = plan_of(policy, budget, layers[0].valid_BT, shapes, pinned_BT, stock=stock)
    if all(plan.covers_B) and not scored:
        return [_everything(layer) for layer in layers]
    if scores is None:
        none: list[Score | None] = [None] * len(layers)
        scores = [
            score_entries(policy, layer, learned=one, observed=other, seeds_B=seeds_B)
            for layer, one, other in zip(layers, learned or none, observed or none, strict=True)
        ]
    candidates = [candidates_of(plan, score) for score in scores]
    keeps = keep_sets(plan, candidates)
    return [
        Decision(keep_BHT, score.values_BHT, plan.protected_BT.to(keep_BHT.device))
        for keep_BHT, score in zip(keeps, scores, strict=True)
    ]


def stock_of(layers: Sequence[Evidence]) -> Stock | None:
    """The entries to choose from, by the evidence of all layers that evict; None: every token, in every
    head. Entries that have left a sliding window are none that could be chosen."""
    if all(layer.held_BHT is None for layer in layers):
        return None
    home = layers[0].valid_BT.device
    exists = [layer.exists_BHT for layer in layers]
    held_BL = torch.stack([held.sum((1, 2)).to(home) for held in exists], dim=1).tolist()
    intact_BT = torch.stack([held.all(1).to(home) for held in exists]).all(0)
    lengths_B = layers[0].valid_BT.sum(-1).tolist()
    return Stock(tuple(map(tuple, held_BL)), tuple(lengths_B), intact_BT)


def _everything(layer: Evidence) -> Decision:
    """Keep all entries: for a policy without scores, or a budget that holds everything."""
    exists_BHT = layer.exists_BHT
    score_BHT = torch.zeros(exists_BHT.shape, device=exists_BHT.device)
    return Decision(exists_BHT, score_BHT.masked_fill(~exists_BHT, float("-inf")), exists_BHT.all(1))


def score_entries(
    policy: Policy,
    evidence: Evidence,
    *,
    learned: Score | None = None,
    observed: Score | None = None,
    seeds_B: Sequence[int] | Int[Tensor, " B"] | None = None,
) -> Score:
    """Compute the policy's score of one layer, before the floor.

    Args:
        learned: the gate's score; read only if the policy takes one.
        observed: stands in for the policy's own observed score.
        seeds_B: one integer a sequence, for scores that draw numbers.

    Raises:
        ValueError: if a score that the policy needs is missing, or the units do not fit its fusion.
    """
    if observed is None and policy.observed is not None:
        family = SCORES[policy.observed]
        seeds = {"seeds_B": seeds_B} if "seeds" in family.needs else {}
        observed = family.function(evidence, **seeds, **policy.observed_settings)
    if policy.learned and learned is None:
        raise ValueError(
            f"policy {policy.name!r} takes a gate's score and there is none: pass gates=folder or hub id."
        )
    learned = learned if policy.learned else None
    if observed is None and learned is None:
        zeros_BHT = torch.zeros_like(evidence.keys_BHTD[..., 0])
        return masked_score(zeros_BHT, evidence.exists_BHT, "rank")
    how = policy.fusion_of(observed is not None, learned is not None)
    fused = fuse(observed, learned, how, weight=policy.fusion_weight)
    if policy.draw is not None:
        # By the observed score if there is one: the draw makes up for what a maximum passes over.
        fused = replace(fused, draw_BHT=draw_keys(observed or fused, evidence, seeds_B))
    if observed is None:
        return fused
    # The fused score keeps the other fields of the observed one.
    return replace(observed, values_BHT=fused.values_BHT, unit=fused.unit, draw_BHT=fused.draw_BHT)


def plan_of(
    policy: Policy,
    budget: Budget,
    valid_BT: Bool[Tensor, "B T"],
    shapes: Sequence[LayerShape],
    pinned_BT: Bool[Tensor, "B T"] | None = None,
    *,
    stock: Stock | None = None,
    short_tokens: int = 0,
) -> Plan:
    """Compute totals, protection and fixed shares, before any layer is scored.

    The budget is as stated, or everything if that is less. Entries are protected by their place among all
    tokens seen, as long as every head still holds them.

    Args:
        budget: of all layers. Under a threshold nothing is shared: the policy's scope is without effect.
        valid_BT: of all tokens seen, False on padding.
        shapes: of the layers that evict.
        pinned_BT: tokens that the caller wants kept.
        stock: entries that are left, and the lengths that ratios refer to; None: all that was seen.
        short_tokens: a sequence of at most so many tokens is held whole instead of an error
            (`Totals.whole_B`). Of a prompt that is still being read, all that are announced count.

    Raises:
        ValueError: if the budget cannot hold the protected entries, leaves a head empty that has entries, or
            is a threshold and does not go with the policy.
    """
    check_budget(policy, budget)
    seen_B = valid_BT.sum(-1).tolist()
    lengths_B, held_BL = (seen_B, None) if stock is None else (stock.lengths_B, stock.held_BL)
    shapes = [policy.shape_held(shape) for shape in shapes]
    totals = spread(budget, lengths_B, shapes, held_BL, short_tokens=short_tokens)
    protected_BT = protected_mask(
        policy.protection,
        valid_BT,
        totals.per_head_B if budget.threshold is None else None,
        pinned_BT=pinned_BT,
        intact_BT=None if stock is None else stock.intact_BT,
        short_B=[length <= short_tokens for length in totals.lengths_B],
    )
    plan = Plan(policy, budget, totals, protected_BT)
    if budget.threshold is None:
        pairs = zip(plan.protected_B, totals.per_head_B, strict=True)
        if short := [row for row, (protected, most) in enumerate(pairs) if protected > most]:
            plan = replace(plan, totals=totals.hold_whole(short))
    return plan


def check_budget(policy: Policy, budget: Budget, unit: str | None = None) -> None:
    """Refuse a threshold that does not fit the policy.

    A threshold judges each entry alone, so settings about sharing a budget have no effect; and it needs a
    score whose values mean something, not only their order.

    Args:
        unit: of the score (`policy.unit`, unless the score was passed in); None if unknown or irrelevant: a
            gate alone is compared with a threshold in its own unit (as in KV Admission and DMS).

    Raises:
        ValueError: with all problems.
    """
    if budget.threshold is None:
        return
    stated = stated_of(policy)
    shared = [f"allocation.{name}" for name in stated.get("allocation", ())]
    shared += [name for name in ("first_stage", "draw") if name in stated]
    problems = []
    if shared:
        problems.append(
            f"{', '.join(shared)} would not be read, since they say how a budget is shared: leave them out"
        )
    if unit == "rank":
        problems.append(
            "its score is in 'rank', of which only the order means something: take one in 'risk' or 'mass'"
        )
    if problems:
        raise ValueError(
            f"policy {policy.name!r} does not go with threshold={budget.threshold}: {'; '.join(problems)}; "
            "or state a budget (keep_ratio, tokens_per_head or bytes)."
        )


def candidates_of(
    plan: Plan,
    score: Score,
    protected_BT: Bool[Tensor, "B T"] | None = None,
    *,
    place_BT: Int[Tensor, "B T"] | None = None,
) -> Candidates:
    """Prepare one layer's entries for selection: guaranteed entries, bids of its heads, weight of the layer.

    Args:
        score: of the layer's entries, -inf where a head holds none.
        protected_BT: protected entries; None: the score is of all tokens seen.
        place_BT: their places in their sequences, by which equal bids of different layers are ordered; None:
            in all layers an entry's index is the same.

    Raises:
        ValueError: if the score lacks a field that the policy needs.
    """
    policy = plan.policy
    stage, score_BHT = policy.first_stage, score.values_BHT
    exists_BHT = score_BHT > float("-inf")
    held_BH = exists_BHT.sum(-1)
    protected_BT = plan.protected_BT if protected_BT is None else protected_BT
    protected_BHT = protected_BT.to(score_BHT.device)[:, None].expand(score_BHT.shape)
    check_budget(policy, plan.budget, None if policy.gate_alone else score.unit)
    kept_BHT = protected_BHT
    least_BH = torch.minimum(held_BH, torch.tensor(plan.least_B, device=held_BH.device)[:, None])
    if stage is not None and stage.by == "mass":
        means = zip(plan.totals.per_head_B, plan.protected_B, strict=True)
        kept_BHT = kept_BHT | stage_by_mass(
            _first_of(policy, score),
            protected_BHT,
            [math.floor(mean) - protected for mean, protected in means],
            stage.share,
            window=score.window,
        )
        # Heads with equal budgets all get what the fullest of them needs.
        least_BH = torch.minimum(held_BH, kept_BHT.sum(-1).amax(1, keepdim=True).clamp_min(1))
    bids, free_BHT = None, None
    weight_B: tuple[Fraction, ...] = ()
    if policy.scope != "head" and plan.budget.threshold is None:
        compete = score if policy.guard.compete_by == "score" else Score(_first_of(policy, score), score.unit)
        if policy.draw is not None and score.draw_BHT is None:
            raise ValueError(
                f"policy {policy.name!r} draws a share of its budget, and its score brings nothing to draw "
                "by: score with score_entries under the same policy, or take draw null."
            )
        draw_BHT = None if policy.draw is None else score.draw_BHT
        bids, free_BHT = make_bids(compete.values_BHT, exists_BHT, kept_BHT, plan.least_B, place_BT, draw_BHT)
        least_BH = bids.guaranteed_BH
    if isinstance(policy.allocation, ByScore):
        weight_B = _layer_weights(policy, score, exists_BHT, protected_BHT)
    first_BHT = _first_of(policy, score) if policy.two_stages else None
    held_B, guaranteed_B = torch.stack([held_BH.sum(-1), least_BH.sum(-1)]).tolist()
    sure = least_BH, tuple(guaranteed_B)
    return Candidates(score_BHT, kept_BHT, tuple(held_B), *sure, first_BHT, bids, free_BHT, weight_B)


def _first_of(policy: Policy, score: Score) -> Tensor:
    """Score of the first of two stages."""
    if score.first_BHT is None:
        raise ValueError(
            f"policy {policy.name!r} selects in two stages, and its score says nothing for the first: take "
            "observed 'critical' or 'defensive', or first_stage null and allocation.compete_by 'score'."
        )
    return score.first_BHT


def _layer_weights(
    policy: Policy, score: Score, exists_BHT: Tensor, protected_BHT: Tensor
) -> tuple[Fraction, ...]:
    """Weights by which layers share a budget; 0 for a sequence without entries."""
    if policy.layers == "cake":
        if score.layer_weight_B is None:
            raise ValueError(
                f"policy {policy.name!r}: its score measures none: take observed 'cake' for layers 'cake'."
            )
        weight_B = score.layer_weight_B
    else:
        if score.unit == "rank":
            raise ValueError(
                f"policy {policy.name!r} takes the entropy of scores, and its score is in 'rank', an order."
            )
        weight_B = entropy_weight(score.values_BHT, exists_BHT & ~protected_BHT)
    weights = weight_B.where(exists_BHT.flatten(1).any(-1).to(weight_B.device), 0.0).tolist()
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(
            f"policy {policy.name!r}: a layer's share of the budget comes out as {weights}: check the "
            "model's precision and the score's settings."
        )
    return tuple(Fraction(weight) for weight in weights)


def shape_of(evidence: Evidence) -> LayerShape:
    """KV heads of this layer, and bytes of one cached key and value."""
    keys, values = evidence.keys_BHTD, evidence.values_BHTD
    entry_bytes = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()
    widths = keys.shape[-1], values.shape[-1]
    return LayerShape(evidence.num_heads, entry_bytes, widths=widths, element_size=keys.element_size())

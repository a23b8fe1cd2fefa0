"""Budgets over layers and heads against their naive versions, and the cascade against the one-shot answer."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import Allocation, Candidates, Shares, Split
from retain.budget.cascade import LEFT_OVER, Cascade, keep_sets
from retain.budget.statement import Budget, LayerShape, spread
from retain.policy import candidates_of, decide_layers, plan_of, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from retain.two_stage import FirstStage
from tests.naive import random_evidence
from tests.refused import refused

SMALL = Protection(sinks=2, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=3)
T, H = 40, 3


def made(observed: str, scope: str = "head", *layers, floor=None, first_stage=None, **allocation) -> Policy:
    """A policy with a small protection; `layers` and `allocation` go to `Allocation`."""
    spread_as, how = Allocation(*layers, **allocation), {"floor": floor, "first_stage": first_stage}
    return Policy("own", observed=observed, scope=scope, protection=SMALL, allocation=spread_as, **how)


# Every way to spread a budget that crosses layers and is exact in a cascade; with a draw:
# tests/test_priority_sampling.py.
EXACT = {
    "joint": made("defensive", "model"),
    "joint, floored": made("defensive", "model", floor="mean"),
    "joint, guarded": made("defensive", "model", safeguard="guaranteed"),
    "joint, first stage by mass": made("defensive", "model", first_stage=FirstStage("mass", 0.5)),
    "joint, first stage by budget, by attention": made(
        "critical", "model", first_stage=FirstStage("budget", 0.5), compete_by="first"
    ),
    "lava": made("lava", "layer", "entropy"),
    "lava, guarded": made("lava", "layer", "entropy", safeguard="guaranteed"),
    "lava, equal heads": made("lava", "head", "entropy"),
    "lava, first stage by mass": made("defensive", "layer", "entropy", first_stage=FirstStage("mass", 0.5)),
    "cake": made("cake", "head", "cake"),
    "cake, heads compete": made("cake", "layer", "cake"),
}


def _case(seed: int, *, num_layers: int = 4, pads=(0, 9, 4), ties: bool = False, unlike: float = 3.0):
    """Evidence of some layers, and a score of each whose size differs from layer to layer."""
    layers, scores = [], []
    draw = torch.Generator().manual_seed(seed)
    for idx in range(num_layers):
        evidence = random_evidence(pads, num_tokens=T, num_heads=H, group=1, seed=seed + idx)
        values, first = (torch.rand(len(pads), H, T, generator=draw) ** 3 for _ in range(2))
        values = values * torch.rand(1, H, 1, generator=draw) * (1 + unlike * idx)
        if ties:
            values, first = (values * 4).floor(), (first * 4).floor() / 40
        weight = torch.rand(len(pads), generator=draw, dtype=torch.float64) ** 2
        score = masked_score(
            values, evidence.valid_BT, "risk", first_BHT=first, window=4, layer_weight_B=weight
        )
        layers.append(replace(evidence, layer_idx=idx))
        scores.append(score)
    return layers, scores


def _plan(policy, layers, budget):
    return plan_of(policy, budget, layers[0].valid_BT, [shape_of(layer) for layer in layers])


def run_cascade(plan, scores):
    """Keep masks by cascade, and the entries that each sequence held after every step."""
    cascade, keeps, held = Cascade(plan.shares), [], []
    for score in scores:
        keep_BHT, lower = cascade.add(candidates_of(plan, score))
        for keep, keep_N in zip(keeps, lower, strict=True):
            if keep_N is not None:
                keep[keep.clone()] = keep_N
        keeps.append(keep_BHT.clone())
        held.append(torch.stack([keep.sum((1, 2)) for keep in keeps]).sum(0).tolist())
    return keeps, held


def assert_as_at_once(policy, layers, scores, ratio):
    """The cascade ends with the keep masks of the one-shot answer, which are returned."""
    budget = Budget(keep_ratio=ratio)
    once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores)]
    keeps, held = run_cascade(_plan(policy, layers, budget), scores)
    assert all(map(torch.equal, keeps, once))
    return once, held


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 0.35, 0.6, 0.9, 1.0]), st.booleans())
def test_a_cascade_ends_with_the_one_shot_sets(name, seed, ratio, ties):
    policy, (layers, scores) = EXACT[name], _case(seed, ties=ties)
    once, held = assert_as_at_once(policy, layers, scores, ratio)
    totals = _plan(policy, layers, Budget(keep_ratio=ratio)).shares.totals.total_B
    assert torch.stack([keep.sum((1, 2)) for keep in once]).sum(0).tolist() == totals
    # On the way never more than the budget, what is rounded up (one entry a layer where layers have shares),
    # and half a layer that has lost; at the end exactly the budget.
    rounding = 0 if policy.scope == "model" else len(layers) * len(totals)
    for place, after in enumerate(held):
        left_over = LEFT_OVER * int(layers[place].exists_BHT.sum())
        assert sum(after) <= sum(totals) + rounding + left_over
    assert held[-1] == totals


def test_lower_layers_are_not_cut_for_every_layer_that_comes():
    num_layers = 16
    policy, (layers, scores) = EXACT["joint"], _case(0, num_layers=num_layers, unlike=0.0)
    cascade, cuts = Cascade(_plan(policy, layers, Budget(keep_ratio=0.2)).shares), []
    for score in scores:
        _, lower = cascade.add(candidates_of(_plan(policy, layers, Budget(keep_ratio=0.2)), score))
        cuts.append(sum(keep_N is not None for keep_N in lower))
    assert cuts[-1] == num_layers - 1, "all are exact at the end"
    assert 0 < sum(cuts[:-1]) < 0.6 * sum(range(num_layers - 1))


def _layer_counts(decisions):
    return torch.stack([one.keep_BHT.sum((1, 2)) for one in decisions], dim=1)


def test_more_weight_is_more_memory_up_to_what_exists():
    layers, scores = _case(1, pads=(0,))
    policy = EXACT["cake"]

    def counts(*weights):
        own = [
            replace(score, layer_weight_B=torch.tensor([weight], dtype=torch.float64))
            for score, weight in zip(scores, weights, strict=True)
        ]
        return _layer_counts(decide_layers(policy, layers, Budget(keep_ratio=0.5), scores=own))[0].tolist()

    assert counts(1, 1, 1, 1) == [60, 60, 60, 60]
    # 180 free entries: a tenth, two, three and four tenths, above 15 protected ones each.
    assert counts(1, 2, 3, 4) == [33, 51, 69, 87]
    # The last would get more than it has: the others share what it leaves, by weight.
    assert counts(1, 1, 2, 1000) == [34, 34, 52, 120]
    assert counts(0, 0, 0, 0) == [60, 60, 60, 60]


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("beta", [2.0, 20.0])
def test_pyramid_is_a_straight_line_whose_mean_is_the_uniform_share(scope, beta):
    policy = made("snapkv", scope, "pyramid", beta=beta)
    layers, scores = _case(3, pads=(0, 10), num_layers=5)
    decisions = decide_layers(policy, layers, Budget(keep_ratio=0.4), scores=scores)
    counts = _layer_counts(decisions)
    for b, length in enumerate((40, 30)):
        mean = math.floor(Fraction(2, 5) * length * H) - 5 * H
        last, room = Fraction(mean) / Fraction(beta), (length - 5) * H
        first = 2 * mean - last
        if first > room:
            first, last = room, 2 * mean - room
        line = [first - (first - last) * idx / 4 for idx in range(5)]
        assert sum(counts[b].tolist()) == 5 * (mean + 5 * H)
        for got, share in zip(counts[b].tolist(), line, strict=True):
            assert abs(got - 5 * H - share) < 1
        assert all(low >= high for low, high in pairwise(counts[b].tolist()))
    if scope == "head":
        for one in decisions:
            held = one.keep_BHT.sum(-1)
            assert (held.amax(-1) - held.amin(-1)).max() <= 1


def test_a_pyramid_holds_what_a_safeguard_guarantees():
    """At beta 20 the last layer's share would be a fifth of what its heads are guaranteed."""
    policy = made("snapkv", "layer", "pyramid", safeguard="guaranteed")
    once, _ = assert_as_at_once(policy, *_case(3, pads=(0, 9), num_layers=5), 0.4)
    for keep_BHT in once:
        # 16 and 12 (of 12.33) a head in the mean: 5 protected, and a fifth of the mean.
        assert keep_BHT.sum(-1)[0].min() >= 8 and keep_BHT.sum(-1)[1].min() >= 7
    assert sum(int(keep_BHT[0].sum()) for keep_BHT in once) == 5 * 48


@pytest.mark.parametrize("name", ["joint", "lava", "cake"])
def test_a_cascade_over_many_layers_of_one_head_with_layers_that_ask_for_nothing(name):
    layers, scores, draw = [], [], torch.Generator().manual_seed(5)
    for idx in range(9):
        evidence = random_evidence((0, 6), num_tokens=T, num_heads=1, group=1, seed=idx)
        values = torch.rand(2, 1, T, generator=draw) * (idx % 3)
        weight = torch.full((2,), float(idx % 3), dtype=torch.float64)
        layers.append(replace(evidence, layer_idx=idx))
        scores.append(masked_score(values, evidence.valid_BT, "risk", layer_weight_B=weight))
    once, _ = assert_as_at_once(EXACT[name], layers, scores, 0.4)
    assert torch.stack(once).sum((0, 2, 3)).tolist() == [9 * 16, 9 * 14]


def test_layers_of_unlike_heads_share_by_the_head():
    totals = spread(Budget(keep_ratio=0.5), [200], [LayerShape(heads, 8) for heads in (2, 8, 8, 8)])
    pyramid = Shares(Split("head", Allocation("pyramid", beta=4.0)), totals, (0,))
    per_head = [own[0] / heads for own, heads in zip(pyramid.fixed_LB, (2, 8, 8, 8), strict=True)]
    assert sum(own[0] for own in pyramid.fixed_LB) == 2600
    assert all(a > b for a, b in pairwise(per_head))
    alike = [
        Candidates(
            torch.rand(1, heads, 200), torch.zeros(1, heads, 200, dtype=torch.bool), (200 * heads,),
            torch.ones(1, heads, dtype=torch.int64), (heads,), weight_B=(Fraction(1),),
        )
        for heads in (2, 8, 8, 8)
    ]  # fmt: skip
    keeps = keep_sets(Shares(Split("head", Allocation("cake")), totals, (0,)), alike)
    assert [keep.sum(-1).unique().tolist() for keep in keeps] == [[100]] * 4


def test_what_cannot_be_is_refused():
    layers, scores = _case(0)
    plain, ranks = ([Score(score.values_BHT, unit) for score in scores] for unit in ("risk", "rank"))
    broken = [replace(score, layer_weight_B=score.layer_weight_B * float("nan")) for score in scores]
    for name, own, message in (
        ("cake", plain, "measures none: take observed 'cake'"),
        ("cake", broken, "share of the budget comes out as"),
        ("joint, first stage by mass", plain, "two stages, and its score says nothing for the first"),
        ("lava", ranks, "entropy of scores, and its score is in 'rank'"),
    ):
        refused(message, decide_layers, EXACT[name], layers, Budget(keep_ratio=0.5), scores=own)
    refused("5 protected", decide_layers, EXACT["joint"], layers, Budget(tokens_per_head=4), scores=scores)

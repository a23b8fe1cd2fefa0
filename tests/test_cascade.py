"""Budgets over layers against their naive versions, and the cascade against the one-shot answer."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.cascade import LEFT_OVER, Cascade
from retain.budget.statement import Budget
from retain.policy import candidates_of, decide_layers
from retain.scores import Score, masked_score
from tests.evictions import (
    FIXED,
    KINDS,
    check_competition,
    kind,
    made,
    made_scores,
    make_evidence,
    plan_for,
    stock_of,
)
from tests.naive import random_evidence
from tests.refused import refused


def run_cascade(plan, scores):
    """Keep masks by cascade; the entries that each sequence held, and the layers that were cut, after every
    step."""
    cascade, keeps, held, cuts = Cascade(plan), [], [], []
    for score in scores:
        keep_BHT, lower = cascade.add(candidates_of(plan, score))
        for keep, keep_N in zip(keeps, lower, strict=True):
            if keep_N is not None:
                keep[keep.clone()] = keep_N
        keeps.append(keep_BHT.clone())
        held.append(torch.stack([keep.sum((1, 2)) for keep in keeps]).sum(0).tolist())
        cuts.append(sum(keep_N is not None for keep_N in lower))
    return keeps, held, cuts


def counts_of(decisions):
    return torch.stack([one.keep_BHT.sum((1, 2)) for one in decisions], dim=1)


@pytest.mark.parametrize("declared", [None, (30, 60, 60)], ids=["prompt", "first chunk"])
@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.5, 0.9, 1.0]), st.booleans())
def test_a_cascade_ends_with_the_one_shot_sets(heads_file, name, declared, seed, ratio, ties):
    """Also for a chunk of a declared prompt, where one sequence has less than its
    budget, one more, and one nothing."""
    policy, budget = kind(name, heads_file), Budget(keep_ratio=ratio)
    pads = (0, 9, 4) if declared is None else (0, 12, 24)
    layers = make_evidence(seed, 1, 24, pads, num_layers=3)
    scores = made_scores(layers, seed, ties=ties)
    stock = None if declared is None else stock_of(layers, declared)
    once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores, stock=stock)]
    plan = plan_for(policy, layers, budget, stock)
    keeps, held, cuts = run_cascade(plan, scores)
    assert all(map(torch.equal, keeps, once))
    if policy.scope != "head":
        check_competition(policy, layers, scores, budget, once, stock)
    if not plan.crosses_layers:
        assert not any(cuts)
        return
    # On the way never more than the budget, what is rounded up (one entry a layer where layers have shares),
    # and half a layer that has lost; at the end exactly the budget.
    totals = plan.totals.total_B
    rounding = 0 if policy.scope == "model" else len(layers) * len(totals)
    for layer, after in zip(layers, held, strict=True):
        assert sum(after) <= sum(totals) + rounding + LEFT_OVER * int(layer.exists_BHT.sum())
    assert held[-1] == totals


def many_layers(num_layers: int, asks: int):
    """Layers of one head, whose scores and weights are the remainder of their number by `asks` times a random
    number, or all alike (0)."""
    layers, scores, draw = [], [], torch.Generator().manual_seed(5)
    for idx in range(num_layers):
        layer = replace(random_evidence((0, 6), num_tokens=40, num_heads=1, group=1, seed=idx), layer_idx=idx)
        size = float(idx % asks) if asks else 1.0
        values = torch.rand(2, 1, 40, generator=draw) * size
        weight = torch.full((2,), size, dtype=torch.float64)
        how = {"first_BHT": values, "window": 2, "layer_weight_B": weight}
        layers.append(layer)
        scores.append(masked_score(values, layer.valid_BT, "risk", **how))
    return layers, scores


@pytest.mark.parametrize("num_layers", [9, 10, 11])
@pytest.mark.parametrize("name", ["model", "entropy", "cake"])
def test_layers_that_ask_for_nothing(heads_file, name, num_layers):
    layers, scores = many_layers(num_layers, asks=3)
    policy, budget = kind(name, heads_file), Budget(keep_ratio=0.4)
    once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores)]
    keeps, _, _ = run_cascade(plan_for(policy, layers, budget, None), scores)
    assert all(map(torch.equal, keeps, once))
    assert torch.stack(once).sum((0, 2, 3)).tolist() == [num_layers * 16, num_layers * 14]


def test_a_share_that_a_light_layer_hardly_changes_is_not_rounded_down_before(heads_file):
    """A share of 10.6 entries that becomes 10.59 with the last layer may still be rounded up to 11."""
    policy, budget = kind("cake", heads_file), Budget(keep_ratio=0.5)
    for seed in range(20):
        layers, scores = many_layers(4, asks=0)
        weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weights[-1] = 1e-3
        scores = [replace(each, layer_weight_B=w) for each, w in zip(scores, weights, strict=True)]
        once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores)]
        keeps, _, _ = run_cascade(plan_for(policy, layers, budget, None), scores)
        assert all(map(torch.equal, keeps, once))


def test_more_weight_is_more_memory_up_to_what_exists(heads_file):
    layers = make_evidence(1, 1, 40, (0,), num_layers=4)
    scores, policy = made_scores(layers, 1, ties=False), kind("cake", heads_file)

    def counts(*weights):
        each = [
            replace(score, layer_weight_B=torch.tensor([weight], dtype=torch.float64))
            for score, weight in zip(scores, weights, strict=True)
        ]
        return counts_of(decide_layers(policy, layers, Budget(keep_ratio=0.5), scores=each))[0].tolist()

    assert counts(1, 1, 1, 1) == counts(0, 0, 0, 0) == [40, 40, 40, 40]
    # 136 free entries: a tenth, two, three and four tenths, above 6 protected ones each.
    assert counts(1, 2, 3, 4) == [20, 33, 47, 60]
    # The last would get more than it has: the others share what it leaves, by weight.
    assert counts(1, 1, 2, 1000) == [22, 21, 37, 80]


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("beta", [2.0, 20.0])
def test_pyramid_is_a_straight_line_whose_mean_is_the_uniform_share(scope, beta):
    policy = made(observed="snapkv", scope=scope, allocation={"layers": "pyramid", "beta": beta})
    layers = make_evidence(3, 1, 40, (0, 10), num_layers=5)
    scores = made_scores(layers, 3, ties=False)
    decisions = decide_layers(policy, layers, Budget(keep_ratio=0.4), scores=scores)
    for counts, length in zip(counts_of(decisions).tolist(), (40, 30), strict=True):
        mean = math.floor(Fraction(2, 5) * length * 2) - 3 * 2
        last, room = Fraction(mean) / Fraction(beta), (length - 3) * 2
        first = 2 * mean - last
        if first > room:
            first, last = room, 2 * mean - room
        line = [first - (first - last) * idx / 4 for idx in range(5)]
        assert sum(counts) == 5 * (mean + 6)
        assert all(abs(got - 6 - share) < 1 for got, share in zip(counts, line, strict=True))
        assert all(low >= high for low, high in pairwise(counts))


def test_what_cannot_be_is_refused(heads_file):
    layers = make_evidence(0, 1, 24, (0, 9, 4))
    scores = made_scores(layers, 0, ties=False)
    plain, ranks = ([Score(score.values_BHT, unit) for score in scores] for unit in ("risk", "rank"))
    broken = [replace(score, layer_weight_B=score.layer_weight_B * float("nan")) for score in scores]
    for name, each, tokens, message in (
        ("cake", plain, 9, "measures none: take observed 'cake'"),
        ("cake", broken, 9, "share of the budget comes out as"),
        ("model, by mass", plain, 9, "two stages, and its score says nothing for the first"),
        ("entropy", ranks, 9, "entropy of scores, and its score is in 'rank'"),
        ("model", scores, 2, f"{FIXED.sinks + FIXED.recent} protected"),
    ):
        how = Budget(tokens_per_head=tokens)
        refused(message, decide_layers, kind(name, heads_file), layers, how, scores=each)

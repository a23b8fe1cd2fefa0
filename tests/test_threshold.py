"""Admission by a threshold: each entry is judged alone, and no budget says how much stays."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.attention.chunked import truncate
from retain.budget.cascade import Cascade
from retain.budget.ranking import admit
from retain.budget.statement import Budget
from retain.policy import candidates_of, check_budget, decide_layers
from retain.protection import Protection
from retain.scores import Score
from tests.evictions import (
    held_scores,
    keeps_of_columns,
    made,
    made_scores,
    make_evidence,
    plan_for,
    ragged,
    stock_of,
)
from tests.refused import refused

LITTLE, WINDOW = Protection(1, 0.0, 0.0, 0, 2), Protection(0, 0.0, 0.0, 0, 64)


def case(seed: int, pads=(0, 21, 3)):
    layers = ragged(make_evidence(seed, 1, 21, pads, num_layers=3), seed)
    return layers, held_scores(layers, made_scores(layers, seed, ties=False))


@settings(deadline=None, max_examples=10, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.4, 2.0]), st.sampled_from(["head", "model"]))
def test_the_pipeline_admits_at_every_moment_layer_by_layer_and_alone(seed, threshold, scope):
    """Whoever shares a budget: here none is stated."""
    layers, scores = case(seed)
    policy, budget = made(protection=LITTLE, scope=scope), Budget(threshold=threshold)
    stock = stock_of(layers)
    plan = plan_for(policy, layers, budget, stock)
    decisions = decide_layers(policy, layers, budget, scores=scores, stock=stock)
    cascade = Cascade(plan)
    columns = keeps_of_columns(plan, layers, scores, [0, 1, 2], pad=2)
    alone = [keeps_of_columns(plan, layers, scores, [b]) for b in range(3)]
    for idx, (one, score) in enumerate(zip(decisions, scores, strict=True)):
        protected_BHT = plan.protected_BT[:, None].expand_as(one.keep_BHT)
        assert torch.equal(one.keep_BHT, admit(score.values_BHT, protected_BHT, threshold))
        keep_BHT, lower = cascade.add(candidates_of(plan, score))
        assert torch.equal(keep_BHT, one.keep_BHT) and lower == [None] * idx
        assert torch.equal(columns[idx], one.keep_BHT)
        assert torch.equal(torch.cat([own[idx] for own in alone]), one.keep_BHT)


def test_admitting_again_and_again_is_admitting_once_what_left_the_window():
    """Scores do not change, as those of a gate: chunk by chunk or all at the end, the same is kept."""
    policy, budget = made(protection=Protection(2, 0.0, 0.0, 0, 5)), Budget(threshold=0.3)
    layers = make_evidence(0, 1, 40, (0, 6), num_layers=2)
    scores = made_scores(layers, 0, ties=False)
    once = decide_layers(policy, layers, budget, scores=scores)
    held, peak = [layer.exists_BHT[..., :0] for layer in layers], 0
    for stop in (9, 17, 18, 31, 40):
        parts, shown = [], []
        for layer, own, score in zip(layers, held, scores, strict=True):
            new = layer.exists_BHT[..., own.shape[-1] : stop]
            part = replace(truncate(layer, stop), held_BHT=torch.cat([own, new], -1))
            values = score.values_BHT[..., :stop].masked_fill(~part.exists_BHT, float("-inf"))
            parts.append(part)
            shown.append(replace(score, values_BHT=values, first_BHT=None, draw_BHT=None))
        stock = stock_of(parts, [40, 40])
        held = [one.keep_BHT for one in decide_layers(policy, parts, budget, scores=shown, stock=stock)]
        peak = max(peak, *(int(own.sum()) for own in held))
    for own, one, layer in zip(held, once, layers, strict=True):
        assert torch.equal(own, one.keep_BHT)
        assert int(own.sum()) < int(layer.exists_BHT.sum()) // 2
    assert peak < int(layers[0].exists_BHT.sum())


def test_what_is_protected_is_never_too_much_and_fractions_give_their_minimum():
    layers, budget = make_evidence(0, 1, 21, (0, 3)), Budget(threshold=9.0)
    for protection, counts in (
        (Protection(0, 0.5, 0.0, 3, 0), [3, 3]),
        (Protection(0, 0.0, 0.5, 0, 0), [0, 0]),
        (WINDOW, [21, 18]),
    ):
        plan = plan_for(made(protection=protection), layers, budget, None)
        assert plan.protected_BT.sum(-1).tolist() == counts
        assert plan.covers_B == [count == length for count, length in zip(counts, (21, 18), strict=True)]
    # Where all is protected nothing is scored, not even by a score that would want a longer window.
    for one in decide_layers(made(observed="snapkv", protection=WINDOW), layers, budget):
        assert torch.equal(one.keep_BHT, layers[0].valid_BT[:, None].expand_as(one.keep_BHT))


def test_entries_that_one_head_has_lost_are_judged_though_their_place_is_protected():
    layers, scores = case(5, pads=(0, 3))
    policy, budget, stock = made(protection=WINDOW), Budget(threshold=9.0), stock_of(layers)
    assert plan_for(policy, layers, budget, stock).covers_B == [False, False]
    intact = torch.stack([layer.exists_BHT.all(1) for layer in layers]).all(0)
    assert 0 < int(intact.sum()) < int(layers[0].valid_BT.sum())
    for one in decide_layers(policy, layers, budget, scores=scores, stock=stock):
        assert torch.equal(one.keep_BHT, intact[:, None].expand_as(one.keep_BHT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scope": "layer", "allocation": {"safeguard": "guaranteed"}}, "allocation.safeguard would not"),
        ({"allocation": {"weights": "x.json"}}, "allocation.weights would not be read"),
        ({"first_stage": {"by": "budget"}}, "first_stage would not be read.*or state a budget"),
        ({"learned": True, "fusion": "rank_blend"}, "its score is in 'rank'.*'risk' or 'mass'; or state"),
    ],
)
def test_what_says_how_a_budget_is_shared_and_ranks_are_refused(changes, message):
    policy, budget = made(**changes), Budget(threshold=0.2)
    refused(
        f"policy 'own' does not go with threshold=0.2: {message}", check_budget, policy, budget, policy.unit
    )
    check_budget(policy, Budget(keep_ratio=0.2), policy.unit)
    layers, scores = case(1)
    ranks = [Score(score.values_BHT, "rank") for score in scores]
    refused("its score is in 'rank'", decide_layers, made(), layers, budget, scores=ranks)

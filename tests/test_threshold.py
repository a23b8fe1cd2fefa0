"""Admission by a threshold: each entry is judged alone, and no budget says how much stays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.attention.ranking import admit
from retain.budget.cascade import Cascade
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
def test_the_pipeline_admits_at_every_eviction_layer_by_layer_and_alone(seed, threshold, scope):
    """No budget is stated."""
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
        assert torch.equal(torch.cat([each[idx] for each in alone]), one.keep_BHT)


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
        ({"allocation": {"weights": "x.json"}}, "allocation.layers, allocation.weights would not be read"),
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

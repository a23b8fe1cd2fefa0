"""Admission by a threshold: each entry is judged alone, and no budget says how much stays."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.attention.chunked import truncate
from retain.budget.allocation import Allocation
from retain.budget.cascade import Cascade
from retain.budget.statement import Budget
from retain.policy import candidates_of, check_budget, decide_layers, load_policy
from retain.presets import Policy
from retain.protection import Protection
from retain.ranking import admit
from retain.scores import Score
from retain.two_stage import FirstStage
from tests.evictions import (
    held_scores,
    keeps_of_columns,
    made_scores,
    make_evidence,
    plan_for,
    ragged,
    stock_of,
)

PLAIN = Policy("plain", observed="critical", protection=Protection(1, 0.0, 0.0, 0, 2))


def _case(seed: int, pads=(0, 21, 3)):
    layers = ragged(make_evidence(seed, 1, 21, pads, num_layers=3), seed)
    return layers, held_scores(layers, made_scores(layers, seed, ties=False))


@settings(deadline=None, max_examples=10, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.4, 2.0]))
def test_the_pipeline_admits_at_every_moment_layer_by_layer_and_alone(seed, threshold):
    layers, scores = _case(seed)
    budget, stock = Budget(threshold=threshold), stock_of(layers)
    plan = plan_for(PLAIN, layers, budget, stock)
    decisions = decide_layers(PLAIN, layers, budget, scores=scores, stock=stock)
    cascade = Cascade(plan.shares)
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
    T, policy = 40, replace(PLAIN, protection=Protection(2, 0.0, 0.0, 0, 5))
    layers = make_evidence(0, 1, T, (0, 6), num_layers=2)
    scores = made_scores(layers, 0, ties=False)
    once = decide_layers(policy, layers, Budget(threshold=0.3), scores=scores)
    held, peak = [layer.exists_BHT[..., :0] for layer in layers], 0
    for stop in (9, 17, 18, 31, 40):
        parts = []
        for layer, own in zip(layers, held, strict=True):
            new = layer.exists_BHT[..., own.shape[-1] : stop]
            parts.append(replace(truncate(layer, stop), held_BHT=torch.cat([own, new], -1)))
        shown = []
        for score, part in zip(scores, parts, strict=True):
            values = score.values_BHT[..., :stop].masked_fill(~part.exists_BHT, float("-inf"))
            shown.append(replace(score, values_BHT=values, first_BHT=None, draw_BHT=None))
        decisions = decide_layers(
            policy, parts, Budget(threshold=0.3), scores=shown, stock=stock_of(parts, [T, T])
        )
        held = [one.keep_BHT for one in decisions]
        peak = max(peak, *(int(own.sum()) for own in held))
    for own, one, layer in zip(held, once, layers, strict=True):
        assert torch.equal(own, one.keep_BHT)
        assert int(own.sum()) < int(layer.exists_BHT.sum()) // 2
    assert peak < int(layers[0].exists_BHT.sum())


def test_what_is_protected_is_never_too_much_and_fractions_give_their_minimum():
    layers, scores = _case(0, pads=(0, 3))
    layers = [replace(layer, held_BHT=None) for layer in layers]
    for protection, counts in (
        (Protection(0, 0.5, 0.0, 3, 0), [3, 3]),
        (Protection(0, 0.0, 0.5, 0, 0), [0, 0]),
        (Protection(0, 0.0, 0.0, 0, 64), [21, 18]),
    ):
        plan = plan_for(replace(PLAIN, protection=protection), layers, Budget(threshold=9.0), None)
        assert plan.protected_BT.sum(-1).tolist() == counts
        assert plan.covers_B == [count == length for count, length in zip(counts, (21, 18), strict=True)]
    # Where all is protected nothing is scored, not even by a score that would want a longer window.
    policy = Policy("snap", observed="snapkv", protection=Protection(0, 0.0, 0.0, 0, 64))
    for one in decide_layers(policy, layers, Budget(threshold=9.0)):
        assert torch.equal(one.keep_BHT, layers[0].valid_BT[:, None].expand_as(one.keep_BHT))


def test_entries_that_one_head_has_lost_are_judged_though_their_place_is_protected():
    layers, scores = _case(5, pads=(0, 3))
    policy = replace(PLAIN, protection=Protection(0, 0.0, 0.0, 0, 64))
    plan = plan_for(policy, layers, Budget(threshold=9.0), stock_of(layers))
    assert plan.covers_B == [False, False]
    intact = torch.stack([layer.exists_BHT.all(1) for layer in layers]).all(0)
    assert 0 < int(intact.sum()) < int(layers[0].valid_BT.sum())
    for one in decide_layers(policy, layers, Budget(threshold=9.0), scores=scores, stock=stock_of(layers)):
        assert torch.equal(one.keep_BHT, intact[:, None].expand_as(one.keep_BHT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scope": "layer", "allocation": Allocation(safeguard="guaranteed")},
            "allocation.safeguard would not",
        ),
        ({"allocation": Allocation(weights="x.json")}, "allocation.weights would not be read"),
        ({"first_stage": FirstStage("budget", 0.5)}, "first_stage would not be read.*or state a budget"),
    ],
)
def test_what_says_how_a_budget_is_shared_is_refused(changes, message):
    layers, scores = _case(1)
    with pytest.raises(ValueError, match=f"policy 'plain' does not go with threshold=0.2: {message}"):
        decide_layers(replace(PLAIN, **changes), layers, Budget(threshold=0.2), scores=scores)


def test_ranks_have_no_threshold():
    layers, scores = _case(1)
    ranks = [Score(score.values_BHT, "rank") for score in scores]
    with pytest.raises(ValueError, match="its score is in 'rank'.*take one in 'risk' or 'mass'; or state"):
        decide_layers(PLAIN, layers, Budget(threshold=0.2), scores=ranks)
    # Known beforehand, all at once.
    recency = replace(
        load_policy("recency"), first_stage=FirstStage("budget", 0.5), observed=None, learned=True
    )
    assert recency.unit == "risk" and load_policy("recency").unit == "rank"
    blend = replace(recency, fusion="rank_blend", observed="observed_risk")
    assert blend.unit == "rank"
    with pytest.raises(ValueError, match="first_stage would not be read.*; its score is in 'rank'"):
        check_budget(blend, Budget(threshold=0.2), blend.unit)
    check_budget(replace(blend, first_stage=None), Budget(threshold=0.2))
    check_budget(blend, Budget(keep_ratio=0.2), blend.unit)

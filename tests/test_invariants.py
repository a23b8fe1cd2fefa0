"""Checks every eviction, the first and those after it, on every preset and every way to spread a budget;
and where kept sets nest."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.statement import Budget
from retain.policy import decide_layers
from retain.protection import Protection
from retain.scores import Score
from tests.evictions import (
    EVICTING,
    VARIANTS,
    check,
    held_scores,
    keeps_of_columns,
    learned_scores,
    made_scores,
    make_evidence,
    plan_for,
    ragged,
    scored,
    sequence_part,
    small,
    stock_of,
)

SMALL = Protection(2, 0.1, 0.1, 2, 4)
BUDGETS = (Budget(keep_ratio=0.5), Budget(keep_ratio=0.71), Budget(tokens_per_head=11), Budget(bytes=1500))


@pytest.mark.parametrize("again", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([25, 31]),
    st.sampled_from([Budget(keep_ratio=0.5), Budget(keep_ratio=0.71), Budget(tokens_per_head=10)]),
)
def test_every_preset_keeps_its_budget_and_what_is_protected(
    heads_file, name, again, seed, group, tokens, budget
):
    layers, policy, stock = make_evidence(seed, group, tokens, (0, 5, 2)), small(name, heads_file), None
    if again:
        layers = ragged(layers, seed)
        stock = stock_of(layers)
    scores = scored(policy, layers, [3, 4, 5], learned_scores(layers, seed))
    for score, layer in zip(scores, layers, strict=True):
        assert torch.equal(score.values_BHT > float("-inf"), layer.exists_BHT)
    check(policy, layers, scores, budget, stock)
    for full in (Budget(keep_ratio=1.0), Budget(tokens_per_head=tokens)):
        for keep_BHT, layer in zip(check(policy, layers, scores, full, stock), layers, strict=True):
            assert torch.equal(keep_BHT, layer.exists_BHT)


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([25, 31]))
def test_a_sequence_alone_keeps_what_it_keeps_in_a_padded_batch(heads_file, name, seed, group, tokens):
    layers, policy = make_evidence(seed, group, tokens, (0, 5, 2)), small(name, heads_file)
    learned, budget = learned_scores(layers, seed), Budget(keep_ratio=0.5)
    together = decide_layers(policy, layers, budget, learned=learned, seeds_B=[3, 4, 5])
    for b, pad in enumerate((0, 5, 2)):
        gates = [Score(each.values_BHT[b : b + 1, :, pad:], "risk") for each in learned]
        each = [sequence_part(layer, b) for layer in layers]
        alone = decide_layers(policy, each, budget, learned=gates, seeds_B=[3 + b])
        for batch, one in zip(together, alone, strict=True):
            assert torch.equal(batch.keep_BHT[b, :, pad:], one.keep_BHT[0])
            assert torch.equal(batch.protected_BT[b, pad:], one.protected_BT[0])


@pytest.mark.parametrize("again", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=2, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(BUDGETS), st.integers(0, 9), st.integers(1, 4))
def test_every_way_to_spread_a_budget_keeps_it(name, again, seed, ties, budget, ahead, pad):
    """The stated budget, or all that there is; and the same alone, and of columns that some head still holds,
    right-aligned, with whatever padding before them."""
    policy = replace(VARIANTS[name], protection=SMALL)
    layers = make_evidence(seed, 1, 21, (0, 21, 3), num_layers=2)
    if not again:
        check(policy, layers, made_scores(layers, seed, ties=ties), budget, None)
        return
    layers = ragged(layers, seed)
    scores = held_scores(layers, made_scores(layers, seed, ties=ties))
    # Of the second, everything is still to come.
    check(policy, layers, scores, budget, stock_of(layers, [21 + ahead, 9, 18 + ahead]))
    shown = check(policy, layers, scores, budget, stock_of(layers))
    plan = plan_for(policy, layers, budget, stock_of(layers))
    together = keeps_of_columns(plan, layers, scores, [0, 1, 2], pad)
    assert all(map(torch.equal, together, shown))
    for b in range(3):
        alone = keeps_of_columns(plan, layers, scores, [b])
        assert all(torch.equal(batch[b], each[0]) for batch, each in zip(together, alone, strict=True))


# Where kept sets nest as the budget grows, and where they do not. Protection is the same at all budgets.

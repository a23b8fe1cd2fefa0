"""A cache that has evicted evicts again: heads hold different numbers of entries, and a budget is what was
stated, or all that there is. What holds of every way to spread a budget: tests/test_invariants.py."""

from dataclasses import replace

import pytest
import torch

from retain.budget.cascade import keep_sets
from retain.budget.statement import Budget
from retain.policy import candidates_of
from retain.protection import Protection
from retain.scores import masked_score
from tests.evictions import (
    KINDS,
    held_scores,
    keeps_of_columns,
    kind,
    made,
    made_scores,
    make_evidence,
    plan_for,
    stock_of,
)
from tests.refused import refused

SMALL, NOTHING = Protection(2, 0.1, 0.1, 2, 4), Protection(0, 0.0, 0.0, 0, 0)


def test_equal_bids_of_layers_go_to_the_later_place_whatever_columns_they_have():
    """The first layer holds every token, the other three: of equal scores the last two tokens win."""
    layers = make_evidence(0, 1, 8, (0,), num_layers=2)
    tokens_T = torch.arange(8)
    each = ((tokens_T >= 0), (tokens_T % 3 == 1))
    layers = [replace(one, held_BHT=held.expand(1, 2, 8)) for one, held in zip(layers, each, strict=True)]
    ones = torch.ones(1, 2, 8)
    extra = {"first_BHT": ones, "layer_weight_B": torch.ones(1).double()}
    scores = [masked_score(ones, one.exists_BHT, "risk", **extra) for one in layers]
    plan = plan_for(
        made(scope="model", protection=NOTHING), layers, Budget(tokens_per_head=2), stock_of(layers)
    )
    keeps = keeps_of_columns(plan, layers, scores, [0])
    assert [keep[0].int().tolist() for keep in keeps] == [
        [[0, 0, 0, 0, 0, 1, 1, 1]] * 2,
        [[0, 0, 0, 0, 0, 0, 0, 1]] * 2,
    ]


@pytest.mark.parametrize("name", KINDS)
def test_covered_sequences_keep_everything_in_a_batch_with_others(heads_file, name):
    policy = kind(name, heads_file, SMALL)
    # The first holds all of 40 tokens, the second has 6 in all, and the third nothing.
    layers = make_evidence(4, 1, 40, (0, 34, 40), num_layers=3)
    layers = [replace(one, held_BHT=one.exists_BHT.clone()) for one in layers]
    scores = held_scores(layers, made_scores(layers, 4, ties=False))
    plan = plan_for(policy, layers, Budget(tokens_per_head=20), stock_of(layers, [40, 40, 40]))
    assert plan.covers_B == [False, True, True]
    keeps = keep_sets(plan, [candidates_of(plan, score) for score in scores])
    assert not all(torch.equal(keep[0], one.exists_BHT[0]) for keep, one in zip(keeps, layers, strict=True))
    for keep, one in zip(keeps, layers, strict=True):
        assert torch.equal(keep[1:], one.exists_BHT[1:])
    # Without them, the first keeps the same: nobody else is scored.
    alone = keeps_of_columns(plan, layers, scores, [0])
    assert all(torch.equal(each[0], keep[0]) for each, keep in zip(alone, keeps, strict=True))
    few = plan.select_batch([1, 2])
    assert few.covers_B == [True, True] and few.totals.held_BL == ((12,) * 3, (0,) * 3)
    assert torch.equal(few.protected_BT, plan.protected_BT[1:])


# What a ratio is a ratio of.


def _plan(budget: Budget, layers, protection: Protection, **changes):
    return plan_for(made(protection=protection), layers, budget, replace(stock_of(layers), **changes))


def test_the_first_chunk_of_a_declared_prompt_has_the_budget_of_the_prompt():
    """A window of 32 protects all of a chunk of 20 tokens: too much for a fifth of 20, and not of 400."""
    layers, protection = make_evidence(0, 1, 20, (0, 20)), Protection(recent=32)
    said = "budget of 4 entries per head, 16 fewer than the 20 protected"
    refused(said, _plan, Budget(keep_ratio=0.2), layers, protection)
    plan = _plan(Budget(keep_ratio=0.2), layers, protection, lengths_B=(400, 300))
    assert plan.protected_BT.sum(-1).tolist() == [20, 0] and plan.covers_B == [True, True]
    assert plan.totals.per_head_B == (80, 60)
    assert plan.totals.total_B == [120, 0]

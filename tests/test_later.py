"""A cache that has evicted evicts again: heads hold different numbers of entries, and a budget is what was
stated, or all that there is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import Allocation
from retain.budget.cascade import Cascade
from retain.budget.joint import Draw
from retain.budget.statement import Budget, Stock, select_rows
from retain.policy import candidates_of, decide_layers, keep_masks
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import masked_score
from retain.two_stage import FirstStage
from tests.evictions import (
    EVICTING,
    FIXED,
    VARIANTS,
    check_competition,
    check_later,
    held_scores,
    keeps_of_columns,
    learned_scores,
    made_scores,
    make_evidence,
    plan_for,
    ragged,
    scored,
    small,
    stock_of,
)
from tests.refused import refused

SMALL, NOTHING = Protection(2, 0.1, 0.1, 2, 4), Protection(0, 0.0, 0.0, 0, 0)
BUDGETS = (Budget(keep_ratio=0.5), Budget(keep_ratio=0.71), Budget(tokens_per_head=11), Budget(bytes=1500))
# Three sequences, of which one has no tokens.
PADS = (0, 21, 3)
# One of every way to share; `classes` wants a file.
_SETTINGS: dict[str, dict] = {
    "head": {},
    "head, two stages": {"first_stage": FirstStage("budget", 0.5)},
    "head, by mass": {"first_stage": FirstStage("mass", 0.5)},
    "pyramid": {"allocation": Allocation("pyramid", beta=4.0)},
    "classes": {},
    "layer": {"scope": "layer", "floor": "mean"},
    "layer, guaranteed": {"scope": "layer", "allocation": Allocation(safeguard="guaranteed")},
    "model": {"scope": "model"},
    "model, by mass": {"scope": "model", "first_stage": FirstStage("mass", 0.5)},
    "layer, drawn": {"scope": "layer", "draw": Draw(0.3)},
    "model, drawn": {"scope": "model", "draw": Draw(0.3)},
    "entropy, drawn": {"scope": "layer", "draw": Draw(0.3), "allocation": Allocation("entropy")},
    "cake": {"observed": "cake", "allocation": Allocation("cake")},
    "entropy": {"scope": "layer", "allocation": Allocation("entropy")},
}
KINDS = {name: Policy(name, **{"observed": "critical", **own}) for name, own in _SETTINGS.items()}


def _kind(name: str, heads_file: str, protection: Protection = SMALL) -> Policy:
    policy = replace(KINDS[name], protection=protection)
    return replace(policy, allocation=Allocation(weights=heads_file)) if name == "classes" else policy


def _case(seed: int, *, ties: bool = False, pads=PADS, num_layers: int = 2, num_tokens: int = 21):
    layers = ragged(make_evidence(seed, 1, num_tokens, pads, num_layers=num_layers), seed)
    return layers, held_scores(layers, made_scores(layers, seed, ties=ties))


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=2, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(BUDGETS), st.integers(0, 9))
def test_every_way_to_spread_keeps_what_is_stated_or_all_that_there_is(name, seed, ties, budget, ahead):
    policy = replace(VARIANTS[name], protection=SMALL)
    layers, scores = _case(seed, ties=ties)
    # Of the second, everything is still to come.
    stock = stock_of(layers, [21 + ahead, 9, 18 + ahead])
    keeps = check_later(policy, layers, scores, budget, stock)
    held = [layer.exists_BHT for layer in layers]
    assert any(not torch.equal(keep, own) for keep, own in zip(keeps, held, strict=True)) or all(
        plan_for(policy, layers, budget, stock).covers_B
    )
    if policy.scope != "head":
        check_competition(policy, layers, scores, budget, keeps, stock)


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=2, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([Budget(keep_ratio=0.4), Budget(tokens_per_head=10)]))
def test_every_preset_evicts_again_within_its_budget(heads_file, name, seed, budget):
    policy = small(name, heads_file)
    layers = ragged(make_evidence(seed, 2, 30, (0, 6, 2)), seed)
    scores = scored(policy, layers, [3, 4, 5], learned_scores(layers, seed))
    for score, layer in zip(scores, layers, strict=True):
        assert torch.equal(score.values_BHT > float("-inf"), layer.exists_BHT)
    keeps = check_later(policy, layers, scores, budget, stock_of(layers))
    evicted = any((layer.exists_BHT & ~keep).any() for layer, keep in zip(layers, keeps, strict=True))
    assert evicted or plan_for(policy, layers, budget, stock_of(layers)).covers_all
    if policy.scope != "head":
        check_competition(policy, layers, scores, budget, keeps, stock_of(layers))


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=2, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(BUDGETS), st.integers(1, 4))
def test_a_sequence_alone_keeps_what_it_keeps_in_a_batch(name, seed, ties, budget, pad):
    """Columns of tokens that some head still holds, right-aligned, with whatever padding before them."""
    policy = replace(VARIANTS[name], protection=SMALL)
    layers, scores = _case(seed, ties=ties)
    plan = plan_for(policy, layers, budget, stock_of(layers))
    together = keeps_of_columns(plan, layers, scores, [0, 1, 2], pad)
    for b in range(3):
        alone = keeps_of_columns(plan, layers, scores, [b])
        assert all(torch.equal(batch[b], own[0]) for batch, own in zip(together, alone, strict=True))
    # The same where columns are all tokens seen.
    shown = [
        one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores, stock=stock_of(layers))
    ]
    assert all(torch.equal(batch, own) for batch, own in zip(together, shown, strict=True))


def test_equal_bids_of_layers_go_to_the_later_place_whatever_columns_they_have():
    """One layer holds every token, the other only three: of equal scores the last two tokens win, of both."""
    layers = make_evidence(0, 1, 8, (0,), num_layers=2)
    tokens_T = torch.arange(8)
    own = ((tokens_T >= 0), (tokens_T % 3 == 1))
    layers = [replace(one, held_BHT=held.expand(1, 2, 8)) for one, held in zip(layers, own, strict=True)]
    ones = torch.ones(1, 2, 8)
    extra = {"first_BHT": ones, "layer_weight_B": torch.ones(1).double()}
    scores = [masked_score(ones, one.exists_BHT, "risk", **extra) for one in layers]
    policy = replace(KINDS["model"], protection=NOTHING)
    plan = plan_for(policy, layers, Budget(tokens_per_head=2), stock_of(layers))
    keeps = keeps_of_columns(plan, layers, scores, [0])
    assert [keep[0].int().tolist() for keep in keeps] == [
        [[0, 0, 0, 0, 0, 1, 1, 1]] * 2,
        [[0, 0, 0, 0, 0, 0, 0, 1]] * 2,
    ]


@pytest.mark.parametrize("name", KINDS)
def test_who_is_covered_keeps_everything_beside_others_who_are_not(heads_file, name):
    policy = _kind(name, heads_file)
    # The first holds all of 40 tokens, the second has 6 in all, and the third nothing.
    layers = make_evidence(4, 1, 40, (0, 34, 40), num_layers=3)
    layers = [replace(one, held_BHT=one.exists_BHT.clone()) for one in layers]
    scores = held_scores(layers, made_scores(layers, 4, ties=False))
    plan = plan_for(policy, layers, Budget(tokens_per_head=20), stock_of(layers, [40, 40, 40]))
    assert plan.covers_B == [False, True, True] and not plan.covers_all
    keeps = keep_masks(plan, [candidates_of(plan, score) for score in scores])
    assert not all(torch.equal(keep[0], one.exists_BHT[0]) for keep, one in zip(keeps, layers, strict=True))
    for keep, one in zip(keeps, layers, strict=True):
        assert torch.equal(keep[1:], one.exists_BHT[1:])
    # Without them, the first keeps the same: nobody else is scored.
    alone = keeps_of_columns(plan, layers, scores, [0])
    assert all(torch.equal(own[0], keep[0]) for own, keep in zip(alone, keeps, strict=True))
    few = plan.select_batch([1, 2])
    assert few.covers_all and few.shares.totals.held_BL == ((12,) * 3, (0,) * 3)
    assert torch.equal(few.protected_BT, plan.protected_BT[1:])


def test_what_a_layer_asks_for_where_a_sequence_has_no_entries_does_not_matter():
    """A mean over nothing is no number; over something it must be one."""
    layers, scores = _case(0)
    policy, budget, stock = replace(KINDS["cake"], protection=FIXED), BUDGETS[0], stock_of(layers)
    wanted = decide_layers(policy, layers, budget, scores=scores, stock=stock)
    for row in range(3):
        weights = [score.layer_weight_B.index_fill(0, torch.tensor(row), float("nan")) for score in scores]
        broken = [replace(score, layer_weight_B=own) for score, own in zip(scores, weights, strict=True)]
        if PADS[row] == 21:
            got = decide_layers(policy, layers, budget, scores=broken, stock=stock)
            assert all(torch.equal(a.keep_BHT, b.keep_BHT) for a, b in zip(got, wanted, strict=True))
        else:
            how = {"scores": broken, "stock": stock}
            refused("share of the budget comes out as", decide_layers, policy, layers, budget, **how)


def test_a_pyramid_moves_to_its_line_and_adds_nothing_to_what_was_evicted():
    """20 a head are 32 to 8 by the line: who has less keeps it, and nobody else gets it."""
    policy = Policy(
        "pyramid", observed="critical", protection=NOTHING,
        allocation=Allocation("pyramid", beta=2.5),
    )  # fmt: skip
    layers = make_evidence(0, 1, 60, (0,), num_layers=3)
    held = [torch.arange(60).expand(1, 2, 60) >= 60 - count for count in (25, 24, 24)]
    layers = [replace(one, held_BHT=own) for one, own in zip(layers, held, strict=True)]
    scores = held_scores(layers, made_scores(layers, 0, ties=False))
    once = decide_layers(policy, layers, Budget(tokens_per_head=20), scores=scores, stock=stock_of(layers))
    assert [one.keep_BHT.sum(-1).tolist() for one in once] == [[[25, 25]], [[20, 20]], [[8, 8]]]


# What a ratio is a ratio of.


def _plan(budget: Budget, layers, protection: Protection, **changes):
    policy = Policy("one", observed="critical", protection=protection)
    return plan_for(policy, layers, budget, replace(stock_of(layers), **changes))


def test_the_first_chunk_of_an_announced_prompt_has_the_budget_of_the_prompt():
    """A window of 32 protects all of a chunk of 20 tokens: too much for a fifth of 20, and not of 400."""
    layers, protection = make_evidence(0, 1, 20, (0, 20)), Protection(recent=32)
    said = "budget of 4 entries per head, 16 fewer than the 20 protected"
    refused(said, _plan, Budget(keep_ratio=0.2), layers, protection)
    plan = _plan(Budget(keep_ratio=0.2), layers, protection, lengths_B=(400, 300))
    assert plan.protected_BT.sum(-1).tolist() == [20, 0] and plan.covers_B == [True, True]
    assert plan.shares.totals.per_head_B == (80, 60)
    assert plan.shares.totals.total_B == [120, 0]


def test_fractions_of_a_fixed_budget_stay_as_tokens_come():
    """A tenth of 40 tokens a head is 4, whatever is left of them, and of a ratio it grows."""
    protection = Protection(0, 0.1, 0.1, 0, 0)
    firsts = []
    for tokens in (60, 90):
        layers = ragged(make_evidence(0, 1, tokens, (0,)), 1, fresh=9)
        layers = [replace(one, held_BHT=one.held_BHT | (one.places_BT[:, None] < 9)) for one in layers]
        fixed = _plan(Budget(tokens_per_head=40), layers, protection).protected_BT[0]
        grown = _plan(Budget(keep_ratio=0.5), layers, protection).protected_BT[0]
        firsts.append((int(fixed[:30].sum()), int(grown[:30].sum())))
        assert int(fixed[-30:].sum()) == 4
    assert firsts == [(4, 3), (4, 4)]


def test_a_sequence_that_has_nothing_yet_raises_nothing():
    """Not even where its announced length is too short for one entry a head."""
    layers = make_evidence(0, 1, 20, (20, 0))
    for lengths in ((0, 20), (1, 20)):
        plan = _plan(Budget(keep_ratio=0.2), layers, Protection(0, 0.0, 0.0, 0, 2), lengths_B=lengths)
        assert plan.covers_B == [True, False]
    said = "sequence 0 of 1 tokens gets 0 entries"
    refused(said, _plan, Budget(keep_ratio=0.2), make_evidence(0, 1, 20, (19, 0)), NOTHING)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "cake, even"])  # not exact in a cascade
@settings(deadline=None, max_examples=3, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.5]))
def test_a_cascade_over_the_first_chunk_ends_with_the_one_shot_sets(heads_file, name, seed, ratio):
    """One sequence has less than its announced budget, one more, and one nothing."""
    policy = _kind(name, heads_file, FIXED)
    layers = make_evidence(seed, 1, 24, (0, 12, 24), num_layers=3)
    scores = held_scores(layers, made_scores(layers, seed, ties=False))
    stock = stock_of(layers, [30, 60, 60])
    once = check_later(policy, layers, scores, Budget(keep_ratio=ratio), stock)
    plan = plan_for(policy, layers, Budget(keep_ratio=ratio), stock)
    # The second has less than its mean budget, and more than a pyramid's last layer gets.
    assert plan.covers_B == [False, name != "pyramid", True]
    cascade, keeps = Cascade(plan.shares), []
    for score in scores:
        keep_BHT, lower = cascade.add(candidates_of(plan, score))
        for own, keep_N in zip(keeps, lower, strict=True):
            if keep_N is not None:
                own[own.clone()] = keep_N
        keeps.append(keep_BHT.clone())
    assert all(torch.equal(own, want) for own, want in zip(keeps, once, strict=True))


def test_a_stock_is_of_its_layers_and_sequences():
    intact_BT = torch.ones(2, 5, dtype=torch.bool)
    refused("'lengths_B': 1.*pass one row each for every", Stock, ((4, 4), (4, 4)), (5,), intact_BT)
    refused(r"of \[1, 2\] layers", Stock, ((4, 4), (4,)), (5, 5), intact_BT)
    layers = make_evidence(0, 1, 5, (0, 0), num_layers=3)
    stock = Stock(((4, 4), (4, 4)), (5, 5), intact_BT)
    policy = Policy("one", observed="critical", protection=NOTHING)
    said = "holds entries in 2 layers, and 3 evict"
    refused(said, plan_for, policy, layers, Budget(keep_ratio=0.5), stock)
    some = Stock(((4, 6), (8, 2)), (5, 7), torch.tensor([[True], [False]]), (3, 2))
    some = select_rows(some, [1])
    assert (some.held_BL, some.lengths_B, some.prompt_lengths_B) == (((8, 2),), (7,), (2,))
    assert some.intact_BT.tolist() == [[False]]


def test_a_covered_batch_needs_no_score():
    layers, _ = _case(2, pads=(0, 9))
    once = decide_layers(
        replace(KINDS["layer"], protection=SMALL), layers, Budget(keep_ratio=1.0), stock=stock_of(layers)
    )
    for one, layer in zip(once, layers, strict=True):
        assert torch.equal(one.keep_BHT, layer.exists_BHT)
        assert torch.equal(one.score_BHT > float("-inf"), layer.exists_BHT)
        assert torch.equal(one.protected_BT, layer.exists_BHT.all(1))

"""Budgets of heads by weights, against their naive versions."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.allocation import Allocation
from retain.budget.cascade import Cascade
from retain.budget.largest_remainder import largest_remainder
from retain.budget.statement import Budget, Stock
from retain.head_weights import format_weights
from retain.policy import candidates_of, decide_layers, keep_masks, plan_of, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from tests.naive import random_evidence


def share_budgets(weights, total, *, protected, least, capacity_LH):
    """Budgets of one sequence's heads by their weights."""
    flat = [own for row in capacity_LH for own in row]
    inside, low = ([min(bound, own) for own in flat] for bound in (protected, least))
    budgets = iter(largest_remainder(total, weights, flat, protected=inside, least=low))
    return [[next(budgets) for _ in row] for row in capacity_LH]


def _naive_classes(classes_LH, total, least, capacity_LH):
    """DuoAttention, entry by entry: to the retrieval head that holds least, of equal ones the first; then to
    the others."""
    flat = [cell for row in classes_LH for cell in row]
    most = [own for row in capacity_LH for own in row]
    held = [min(least, own) for own in most]
    for _ in range(total - sum(held)):
        for retrieval in (True, False):
            able = [i for i, cell in enumerate(flat) if bool(cell) == retrieval and held[i] < most[i]]
            if able:
                held[min(able, key=lambda i: (held[i], i))] += 1
                break
    width = len(classes_LH[0])
    return [held[start : start + width] for start in range(0, len(held), width)]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.data())
def test_budgets_of_classes_are_the_naive_ones_and_sum_exactly(num_layers, num_heads, protected, data):
    def table(cell):
        row = st.lists(cell, min_size=num_heads, max_size=num_heads)
        return data.draw(st.lists(row, min_size=num_layers, max_size=num_layers))

    classes_LH, capacity_LH = table(st.sampled_from([0, 1])), table(st.integers(protected, 9))
    flat = [own for row in capacity_LH for own in row]
    least = max(1, protected)
    total = data.draw(st.integers(sum(min(least, own) for own in flat), sum(flat)))
    weights = [Fraction(cell) for row in classes_LH for cell in row]
    bounds = {"protected": protected, "least": least, "capacity_LH": capacity_LH}
    budgets = share_budgets(weights, total, **bounds)
    assert budgets == _naive_classes(classes_LH, total, least, capacity_LH)
    assert sum(map(sum, budgets)) == total


# Heads of two layers, of two and three; the second is worth nothing.
UNEQUAL = [Fraction(own, 10) for own in (6, 0, 1, 1, 2)]


def naive_by_shares(shares, total, protected, least, capacity):
    """By a level that is found by halving, in floats: each head the larger of `least` and its share, cut at
    what it has; then one entry at a time to the largest remainder."""
    free, low, high = total - protected * len(shares), 0.0, 1e12

    def held(level):
        return [
            min(max(level * share, least - protected), own - protected)
            for share, own in zip(shares, capacity, strict=True)
        ]

    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(held(middle)) > free else (middle, high)
    return [own + protected for own in held(low)]


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([Fraction(1), Fraction(2, 3), Fraction(1, 4)]), st.data())
def test_budgets_by_shares_are_the_naive_ones_and_sum_exactly(pool, data):
    given_shares, n = [(1 - pool) / 5 + pool * own for own in UNEQUAL], data.draw(st.integers(4, 60))
    protected = data.draw(st.integers(0, min(3, n)))
    capacity = data.draw(st.lists(st.integers(max(1, protected), n), min_size=5, max_size=5))
    total = data.draw(st.integers(5 * max(1, protected), sum(capacity)))
    least, capacity_LH = max(1, protected), [capacity[:2], capacity[2:]]
    rows = share_budgets(given_shares, total, protected=protected, least=least, capacity_LH=capacity_LH)
    assert [len(row) for row in rows] == [2, 3]
    got = [own for row in rows for own in row]
    assert sum(got) == total
    assert all(least <= own <= most for own, most in zip(got, capacity, strict=True))
    shares = [float(share) for share in given_shares]
    wanted = naive_by_shares(shares, total, protected, least, capacity)
    full = [own for own, most, share in zip(got, capacity, shares, strict=True) if share and own < most] == []
    if sum(wanted) < total - 1e-6:  # then those that weigh nothing share what is left, alike
        assert full and min(shares) == 0
    else:
        assert all(abs(own - want) < 1 + 1e-6 for own, want in zip(got, wanted, strict=True))


def test_heads_of_no_weight_get_more_when_all_others_are_full():
    shares, capacity_LH = UNEQUAL, [[10, 10], [10, 10, 10]]
    given = {"protected": 2, "least": 2, "capacity_LH": capacity_LH}
    assert share_budgets(shares, 10, **given) == [[2, 2], [2, 2, 2]]
    assert share_budgets(shares, 20, **given) == [[8, 2], [3, 3, 4]]
    # The first is full; the others share by their weights, and the one that weighs nothing comes last.
    assert share_budgets(shares, 40, **given) == [[10, 2], [9, 9, 10]]
    assert share_budgets(shares, 45, **given) == [[10, 5], [10, 10, 10]]
    empty = {**given, "capacity_LH": [[0, 0], [0, 0, 0]]}
    assert share_budgets(shares, 0, **empty) == [[0, 0], [0, 0, 0]]


# In a policy.

T, H = 40, 3
PADS = (0, 9, 4)
TABLE = [[0.4, 0.1, 0.0], [0.1, 0.2, 0.2]]
FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


@pytest.fixture(scope="module")
def by_importance(tmp_path_factory):
    """A policy whose heads share by weights."""
    path = tmp_path_factory.mktemp("heads") / "importance.json"
    path.write_text(format_weights(dict(enumerate(TABLE))))
    return Policy("own", learned=True, protection=FEW, allocation=Allocation(weights=str(path)))


def case(seed: int, pads=PADS):
    draw, layers, scores = torch.Generator().manual_seed(seed), [], []
    for idx in range(2):
        evidence = random_evidence(pads, num_tokens=T, num_heads=H, group=1, seed=seed + idx)
        layers.append(replace(evidence, layer_idx=idx))
        values = torch.rand(len(pads), H, T, generator=draw)
        scores.append(masked_score(values, evidence.valid_BT, "risk"))
    return layers, scores


@pytest.mark.parametrize("ratio", [0.2, 0.35, 0.8, 1.0])
def test_each_head_keeps_its_share_of_each_sequence(by_importance, ratio):
    layers, scores = case(3)
    made = decide_layers(by_importance, layers, Budget(keep_ratio=ratio), scores=scores)
    held_BLH = torch.stack([one.keep_BHT.sum(-1) for one in made], dim=1)
    for b, pad in enumerate(PADS):
        length = T - pad
        total = 2 * int(Fraction(str(ratio)) * length * H + Fraction(1, 2))
        assert int(held_BLH[b].sum()) == total
        wanted = naive_by_shares([cell for row in TABLE for cell in row], total, 3, 3, [length] * 6)
        got = held_BLH[b].flatten().tolist()
        if ratio < 0.8:
            # The head that is worth nothing has what is protected: the others are not full.
            assert got[2] == 3 and sum(wanted) == pytest.approx(total)
            assert all(abs(one - want) < 1 + 1e-6 for one, want in zip(got, wanted, strict=True))
        # Inside a head: protected entries, then the first by score.
        for layer, one in enumerate(made):
            rank = scores[layer].values_BHT[b] + 9.0 * one.protected_BT[b]
            for h in range(H):
                order = rank[h].argsort(descending=True).tolist()
                kept = one.keep_BHT[b, h].nonzero().flatten().tolist()
                assert kept == sorted(order[: int(held_BLH[b, layer, h])])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), ratio=st.sampled_from([0.2, 0.35, 0.6, 1.0]))
def test_a_cascade_ends_with_the_one_shot_sets(by_importance, seed, ratio):
    """Static shares: each layer is cut once, when it comes, and none shrinks later."""
    layers, scores = case(seed)
    budget = Budget(keep_ratio=ratio)
    once = [one.keep_BHT for one in decide_layers(by_importance, layers, budget, scores=scores)]
    plan = plan_of(by_importance, budget, layers[0].valid_BT, [shape_of(one) for one in layers])
    cascade = Cascade(plan.shares)
    for score, want in zip(scores, once, strict=True):
        keep_BHT, lower = cascade.add(candidates_of(plan, score))
        assert torch.equal(keep_BHT, want) and all(one is None for one in lower)
    assert not plan.covers_all if ratio < 1 else plan.covers_all
    # Sequences on their own keep what they keep in the batch.
    alone = plan.select_batch([1])
    part = [Score(score.values_BHT[1:2], "risk") for score in scores]
    protected_BT = plan.protected_BT[1:2]
    kept = keep_masks(alone, [candidates_of(alone, score, protected_BT) for score in part])
    assert all(torch.equal(one[0], want[1]) for one, want in zip(kept, once, strict=True))


def test_heads_that_hold_less_than_their_share_leave_it_to_the_others(by_importance):
    """A later moment: the sum stays what was stated, as long as there is so much."""
    layers, scores = case(5, pads=(0,))
    draw = torch.Generator().manual_seed(9)
    held = []
    for idx, score in enumerate(scores):
        held_BHT = torch.rand(1, H, T, generator=draw) < (0.35 if idx == 0 else 0.7)
        held_BHT[..., 0], held_BHT[..., -2:] = True, True
        held.append(held_BHT)
        scores[idx] = Score(score.values_BHT.masked_fill(~held_BHT, float("-inf")), "risk")
    stock = Stock(
        (tuple(int(each.sum()) for each in held),),
        (T,),
        torch.stack([each.all(1) for each in held]).all(0),
    )
    counts = torch.stack([each.sum(-1) for each in held], dim=1)
    for ratio, whole in ((0.3, False), (0.5, False), (0.9, True)):
        made = decide_layers(by_importance, layers, Budget(keep_ratio=ratio), scores=scores, stock=stock)
        kept = torch.stack([one.keep_BHT.sum(-1) for one in made], dim=1)
        total = min(2 * int(ratio * T * H + 0.5), int(counts.sum()))
        assert int(kept.sum()) == total and bool((kept <= counts).all())
        assert bool((kept == counts).all()) == whole
        if ratio == 0.3:
            # The first head of the first layer would get 25 of the 72, and holds fewer: it keeps them all.
            assert int(kept[0, 0, 0]) == int(counts[0, 0, 0]) < 25

"""Quotas against their naive versions: what is stored, what is between two keep_ratios, whole entries."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain import config
from retain.budget.allocation import Allocation
from retain.budget.cascade import Cascade
from retain.budget.quotas import Quotas, quota_budgets, quotas_of
from retain.budget.statement import Budget, LayerShape, Stock
from retain.policy import candidates_of, decide_layers, keep_masks, plan_of, score_entries, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from tests.naive import random_evidence
from tests.refused import refused

RATIOS = (0.1, 0.25, 0.5)
# Two layers of two and three heads; a head that is worth nothing at small budgets.
PARTS = {
    "4": [[600_000, 0], [400_000, 50_000], [300_000, 100_000]],
    "7": [[100_000, 100_000, 200_000], [150_000, 200_000, 200_000], [200_000, 200_000, 200_000]],
}
RECORD = {"keep_ratio": list(RATIOS), "parts": PARTS}
HEADS = {4: 2, 7: 3}
FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


def naive_shares(keep_ratio: float) -> list[float]:
    """Head by head: its share of all that exists at each stored ratio, and a straight line between them."""
    answer = []
    for layer, head in ((4, 0), (4, 1), (7, 0), (7, 1), (7, 2)):
        held = [(0.0, 0.0)]
        held += [(ratio, ratio * PARTS[str(layer)][idx][head] / 1e6) for idx, ratio in enumerate(RATIOS)]
        held.append((1.0, 1 / 5))
        for (low, at_low), (high, at_high) in zip(held, held[1:], strict=False):
            if low < keep_ratio <= high:
                answer.append((at_low + (keep_ratio - low) / (high - low) * (at_high - at_low)) / keep_ratio)
    return answer


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 100))
def test_between_stored_ratios_a_head_s_entries_lie_on_a_line(percent):
    quotas = quotas_of(RECORD, HEADS)
    shares = quotas.shares(Fraction(percent, 100))
    assert sum(shares) == 1 and all(isinstance(share, Fraction) for share in shares)
    assert [float(share) for share in shares] == pytest.approx(naive_shares(percent / 100), rel=1e-12)


def test_outside_of_stored_ratios_the_first_goes_on_and_all_end_alike():
    quotas = quotas_of(RECORD, HEADS)
    assert quotas.shares(Fraction(0)) == quotas.shares(Fraction(1, 50)) == quotas.shares(Fraction(1, 10))
    assert quotas.shares(Fraction(1)) == [Fraction(1, 5)] * 5


def naive_budgets(shares, total, protected, least, capacity):
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
@given(st.data())
def test_budgets_are_the_naive_ones_and_sum_exactly(data):
    quotas, n = quotas_of(RECORD, HEADS), data.draw(st.integers(4, 60))
    protected = data.draw(st.integers(0, min(3, n)))
    capacity = data.draw(st.lists(st.integers(max(1, protected), n), min_size=5, max_size=5))
    total = data.draw(st.integers(5 * max(1, protected), sum(capacity)))
    ratio = Fraction(data.draw(st.integers(1, 99)), 100)
    least, capacity_LH = max(1, protected), [capacity[:2], capacity[2:]]
    rows = quota_budgets(
        quotas.shares(ratio), total, protected=protected, least=least, capacity_LH=capacity_LH
    )
    assert [len(row) for row in rows] == [2, 3]
    got = [own for row in rows for own in row]
    assert sum(got) == total
    assert all(least <= own <= most for own, most in zip(got, capacity, strict=True))
    shares = [float(share) for share in quotas.shares(ratio)]
    wanted = naive_budgets(shares, total, protected, least, capacity)
    full = [own for own, most, share in zip(got, capacity, shares, strict=True) if share and own < most] == []
    if sum(wanted) < total - 1e-6:  # then those that weigh nothing share what is left, alike
        assert full and min(shares) == 0
    else:
        assert all(abs(own - want) < 1 + 1e-6 for own, want in zip(got, wanted, strict=True))


def test_heads_of_no_weight_get_more_when_all_others_are_full():
    quotas, capacity_LH = quotas_of(RECORD, HEADS).shares(Fraction(1, 10)), [[10, 10], [10, 10, 10]]
    given = {"protected": 2, "least": 2, "capacity_LH": capacity_LH}
    assert quota_budgets(quotas, 10, **given) == [[2, 2], [2, 2, 2]]
    assert quota_budgets(quotas, 20, **given) == [[8, 2], [3, 3, 4]]
    # The first is full; the others share by their quotas, and the one that weighs nothing comes last.
    assert quota_budgets(quotas, 40, **given) == [[10, 2], [9, 9, 10]]
    assert quota_budgets(quotas, 45, **given) == [[10, 5], [10, 10, 10]]
    empty = {**given, "capacity_LH": [[0, 0], [0, 0, 0]]}
    assert quota_budgets(quotas, 0, **empty) == [[0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("record", "heads", "message"),
    [
        (None, HEADS, "stored with the gates, and these were given none: train them"),
        ({}, HEADS, "stored with the gates, and these were given none: train them"),
        (RECORD, {5: 2, 4: 2, 6: 3}, r"have none for layer 5 \(and 1 layers more\): calibrate"),
        (RECORD, {4: 2, 7: 2}, r"for layer 7, which has 2 KV heads: calibrate"),
        ({"keep_ratio": [0.1, 0.2], "parts": PARTS}, HEADS, r"for layer 4, which has 2 KV heads"),
    ],
)
def test_quotas_of_other_layers_and_none_are_refused(record, heads, message):
    refused(message, quotas_of, record, heads)


def test_quotas_of_some_layers_and_equal_ones_where_all_are_0():
    assert quotas_of(RECORD, {7: 3}).parts[0] == ((100_000, 100_000, 200_000),)
    assert Quotas((Fraction(1, 2),), (((0, 0), (0, 0)),)).shares(Fraction(1, 4)) == [Fraction(1, 4)] * 4


# In a policy.

QUOTA = Allocation(quotas="calibrated")
T, H = 40, 3
RECORD_LH = {
    "keep_ratio": [0.2, 0.5],
    "parts": {
        "0": [[400_000, 100_000, 0], [300_000, 100_000, 50_000]],
        "1": [[100_000, 200_000, 200_000], [200_000, 200_000, 150_000]],
    },
}


def own(**changes) -> Policy:
    return Policy("own", **{"learned": True, "protection": FEW, "allocation": QUOTA, **changes})


def case(seed: int, pads=(0, 9, 4), *, quotas=RECORD_LH):
    draw, layers, scores = torch.Generator().manual_seed(seed), [], []
    for idx in range(2):
        evidence = random_evidence(pads, num_tokens=T, num_heads=H, group=1, seed=seed + idx)
        layers.append(replace(evidence, layer_idx=idx))
        values = torch.rand(len(pads), H, T, generator=draw)
        scores.append(replace(masked_score(values, evidence.valid_BT, "risk"), quotas=quotas))
    return layers, scores


@pytest.mark.parametrize("ratio", [0.2, 0.35, 0.8, 1.0])
def test_each_head_keeps_its_quota_of_each_sequence(ratio):
    layers, scores = case(3)
    made = decide_layers(own(), layers, Budget(keep_ratio=ratio), scores=scores)
    held_BLH = torch.stack([one.keep_BHT.sum(-1) for one in made], dim=1)
    quotas = quotas_of(RECORD_LH, {0: H, 1: H})
    for b, pad in enumerate((0, 9, 4)):
        length = T - pad
        total = 2 * int(Fraction(str(ratio)) * length * H + Fraction(1, 2))
        free, room = total - 3 * 6, (length - 3) * 6
        shares = [float(share) for share in quotas.shares(Fraction(free, room))]
        assert int(held_BLH[b].sum()) == total
        wanted = naive_budgets(shares, total, 3, 3, [length] * 6)
        got = held_BLH[b].flatten().tolist()
        # Also at 0.2, where a head's quota is 0: the others are not full, so that it has what is protected.
        assert (min(shares) == 0) == (ratio == 0.2) and sum(wanted) == pytest.approx(total)
        assert all(abs(one - want) < 1 + 1e-6 for one, want in zip(got, wanted, strict=True))
        # Inside a head: protected entries, then the first by score.
        for layer, one in enumerate(made):
            rank = scores[layer].values_BHT[b] + 9.0 * one.protected_BT[b]
            for h in range(H):
                order = rank[h].argsort(descending=True).tolist()
                kept = one.keep_BHT[b, h].nonzero().flatten().tolist()
                assert kept == sorted(order[: int(held_BLH[b, layer, h])])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 0.35, 0.6, 1.0]))
def test_a_cascade_ends_with_the_one_shot_sets(seed, ratio):
    """Static shares: each layer is cut once, when it comes, and none shrinks later."""
    layers, scores = case(seed)
    budget, policy = Budget(keep_ratio=ratio), own()
    once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores)]
    quotas = quotas_of(RECORD_LH, {0: H, 1: H})
    plan = plan_of(policy, budget, layers[0].valid_BT, [shape_of(one) for one in layers], quotas=quotas)
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


def test_heads_that_hold_less_than_their_quota_leave_it_to_the_others():
    """A later moment: the sum stays what was stated, as long as there is so much."""
    layers, scores = case(5, pads=(0,))
    draw = torch.Generator().manual_seed(9)
    held = []
    for idx, score in enumerate(scores):
        held_BHT = torch.rand(1, H, T, generator=draw) < (0.35 if idx == 0 else 0.7)
        held_BHT[..., 0], held_BHT[..., -2:] = True, True
        held.append(held_BHT)
        values = score.values_BHT.masked_fill(~held_BHT, float("-inf"))
        scores[idx] = Score(values, "risk", quotas=RECORD_LH)
    stock = Stock(
        (tuple(int(each.sum()) for each in held),),
        (T,),
        torch.stack([each.all(1) for each in held]).all(0),
    )
    counts = torch.stack([each.sum(-1) for each in held], dim=1)
    for ratio, whole in ((0.3, False), (0.5, False), (0.9, True)):
        made = decide_layers(own(), layers, Budget(keep_ratio=ratio), scores=scores, stock=stock)
        kept = torch.stack([one.keep_BHT.sum(-1) for one in made], dim=1)
        total = min(2 * int(ratio * T * H + 0.5), int(counts.sum()))
        assert int(kept.sum()) == total and bool((kept <= counts).all())
        assert bool((kept == counts).all()) == whole
        if ratio == 0.3:
            # The first head of the first layer would get 25 of the 72, and holds fewer: it keeps them all.
            assert int(kept[0, 0, 0]) == int(counts[0, 0, 0]) < 25


def test_quotas_come_with_the_gates_score_through_fusion():
    layers, scores = case(7)
    for fusion in (None, "observed", "rank_blend", "learned"):
        policy = own(observed="observed_risk", observed_settings={"window": 4}, fusion=fusion)
        for layer, score in zip(layers, scores, strict=True):
            assert score_entries(policy, layer, learned=score).quotas is RECORD_LH
    bare = Policy("bare", observed="observed_risk", observed_settings={"window": 4})
    assert score_entries(bare, layers[0], learned=scores[0]).quotas is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learned": False, "observed": "keydiff"}, "is stored with gates, and this policy takes none"),
        ({"scope": "model"}, "quotas states each head's budget: take scope 'head'"),
        ({"scope": "layer"}, "quotas states each head's budget: take scope 'head'"),
        (
            {"allocation": Allocation("pyramid", quotas="calibrated")},
            "quotas states each head's budget: take allocation.layers 'uniform'",
        ),
        (
            {"allocation": Allocation(head_classes="x.tsv", quotas="calibrated")},
            "head_classes and quotas both state each head's budget",
        ),
    ],
)
def test_policies_that_do_not_go_with_quotas(changes, message):
    refused(message, own, **changes)


def test_budgets_that_do_not_go_with_quotas():
    with pytest.raises(ValueError, match="quotas.*'calibrate'.*did you mean 'calibrated'"):
        config.build({"quotas": "calibrate"}, Allocation)
    layers, scores = case(1, quotas=None)
    with pytest.raises(ValueError, match="stored with gates, and there are none: score with gates that"):
        decide_layers(own(), layers, Budget(keep_ratio=0.4), scores=scores)
    # Where all is kept no quota is needed.
    made = decide_layers(own(), layers, Budget(keep_ratio=1.0), scores=scores)
    assert all(torch.equal(one.keep_BHT, layer.exists_BHT) for one, layer in zip(made, layers, strict=True))
    layers, scores = case(1)
    with pytest.raises(ValueError, match="allocation.quotas would not be read"):
        decide_layers(own(), layers, Budget(threshold=0.5), scores=scores)
    with pytest.raises(ValueError, match="take scope 'head'"):
        decide_layers(own(), layers, Budget(keep_ratio=0.4, scope="model"), scores=scores)
    # A budget in bytes is looked up by the keep_ratio that it comes to.
    size = [LayerShape(H, 24)] * 2
    assert plan_of(own(), Budget(bytes=24 * 100), layers[0].valid_BT, size).shares.totals.total_B == [100] * 3

"""Budgets in whole pages: counts, exact totals, and who keeps what, against plain loops."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.cascade import head_budgets
from retain.budget.largest_remainder import exact
from retain.budget.statement import Budget
from retain.policy import Plan, candidates_of, plan_of, shape_of
from retain.presets import load_policy
from retain.vllm.packing.whole_pages import in_pages, keep_pages
from tests.evictions import (
    EVICTING,
    FIXED,
    VARIANTS,
    learned_scores,
    made_scores,
    make_evidence,
    scored,
    small,
)

TOKENS = 61


def plan_for(policy, layers, ratio: float, page: int) -> Plan:
    """The plan of one prompt, in whole pages; of no page, in entries."""
    plan = plan_of(policy, Budget(keep_ratio=ratio), layers[0].valid_BT, list(map(shape_of, layers)))
    return in_pages(plan, page) if page else plan


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.4, 0.55, 0.8]), st.sampled_from([4, 7, 16]))
def test_every_head_holds_whole_pages_and_the_tail(heads_file, name, seed, ratio, page):
    policy, layers = small(name, heads_file), make_evidence(seed, 2, TOKENS, (0,))
    scores = scored(policy, layers, [5], learned_scores(layers, seed))
    plain, plan = (plan_for(policy, layers, ratio, size) for size in (0, page))
    full, tail = divmod(TOKENS, page)
    mean, inside = plain.totals.per_head_B[0], int(plain.protected_BT[0, : TOKENS - tail].sum())
    K = min(full, max(math.ceil((mean - tail) / page), math.ceil(inside / page), 0))
    held = [0, 0]
    for keep_BHT in keep_pages(plan, [candidates_of(plan, score) for score in scores], page):
        assert keep_BHT[..., TOKENS - tail :].all() and keep_BHT[..., plain.protected_BT[0]].all()
        assert ((keep_BHT.sum(-1) - tail) % page == 0).all() and keep_BHT.any(-1).all()
        held = [held[0] + int(keep_BHT.sum()), held[1] + keep_BHT.shape[1]]
    assert held[0] == held[1] * (K * page + tail) == plan.totals.total_B[0]


def counts_by_hand(plan: Plan, candidates, page: int) -> list[list[int]]:
    """Entries of each head of each layer: its share in pages, never below what is guaranteed, the rest by
    largest remainder, and the tail."""
    (seen,), H = plan.totals.lengths_B, candidates[0].score_BHT.shape[1]
    tail = seen % page
    entries = [count - tail for won in head_budgets(plan, candidates) for count in won.budget_BH[0].tolist()]
    least = [
        max(0, math.ceil(Fraction(count - tail, page)))
        for layer in candidates
        for count in layer.guaranteed_BH[0].tolist()
    ]
    total, open_to, shares = Fraction(sum(entries), page), set(range(len(entries))), {}
    assert total.denominator == 1
    while open_to:  # heads below their bound take it, and the others share what is left
        left, weight = total - sum(shares.values()), sum(entries[i] for i in open_to)
        level = left / weight if weight else Fraction(0)
        short = {i for i in open_to if level * entries[i] < least[i] or not entries[i]}
        if not short:
            shares |= {i: level * entries[i] for i in open_to}
            break
        shares |= {i: Fraction(least[i]) for i in short}
        open_to -= short
    pages = [math.floor(shares[i]) for i in range(len(entries))]
    order = sorted(range(len(entries)), key=lambda i: (pages[i] - shares[i], i))
    for i in order[: int(total) - sum(pages)]:
        pages[i] += 1
    return [[number * page + tail for number in pages[i : i + H]] for i in range(0, len(pages), H)]


def best_by_hand(policy, layer, h: int, count: int) -> set[int]:
    """The entries of a head that stay: in two stages, or by score."""
    kept = set(layer.kept_BHT[0, h].nonzero().flatten().tolist())
    stages = [(layer.score_BHT, count)]
    if policy.two_stages:
        stages.insert(0, (layer.first_BHT, math.floor(exact(policy.first_stage.share) * count)))
    exists = (layer.score_BHT[0, h] > float("-inf")).nonzero().flatten().tolist()
    for score_BHT, number in stages:
        scores = score_BHT[0, h].tolist()
        kept |= set(sorted(exists, key=lambda i: (i in kept, scores[i], i), reverse=True)[:number])
    return kept


def drawn_by_hand(layer, won, h: int, count: int) -> set[int]:
    """The entries of a head of which a share is drawn: it won w bids, d of them by lot."""
    bids, places = layer.bids, set((layer.score_BHT[0, h] > float("-inf")).nonzero().flatten().tolist())
    columns = (bids.row_N, bids.place_N, bids.value_N, bids.draw_N, won.drawn_N)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    mine = [tuple(bid) for row, *bid in rows if row == h]
    guaranteed = places - {place for place, *_ in mine}
    d, w = sum(bid[3] for bid in mine), int(won.budget_BH[0, h]) - len(guaranteed)
    free = count - len(guaranteed)
    lots = d * free // w if w else 0
    by_score = sorted(mine, key=lambda bid: (bid[1], bid[0]), reverse=True)
    by_lot = sorted(by_score[free - lots :], key=lambda bid: (bid[2], bid[0]), reverse=True)
    return guaranteed | {bid[0] for bid in (*by_score[: free - lots], *by_lot[:lots])}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0.2, 0.45, 0.7]),
    st.sampled_from([1, 2, 3, 5]),
)
def test_heads_and_entries_are_those_of_plain_loops(name, seed, ties, ratio, page):
    policy = replace(VARIANTS[name], protection=FIXED)
    layers = make_evidence(seed, 1, 27, (0,))
    plan = plan_for(policy, layers, ratio, page)
    candidates = [candidates_of(plan, score) for score in made_scores(layers, seed, ties=ties)]
    counts, wons = counts_by_hand(plan, candidates, page), head_budgets(plan, candidates)
    for idx, keep_BHT in enumerate(keep_pages(plan, candidates, page)):
        for h, count in enumerate(counts[idx]):
            if policy.draw is not None:
                wanted = drawn_by_hand(candidates[idx], wons[idx], h, count)
            else:
                wanted = best_by_hand(policy, candidates[idx], h, count)
            assert set(keep_BHT[0, h].nonzero().flatten().tolist()) == wanted


def test_a_tail_beyond_the_budget_is_no_error():
    layers = make_evidence(0, 1, 31, (0,))
    policy = replace(load_policy("recency"), protection=FIXED)
    plan = plan_for(policy, layers, 5 / 31, 16)
    assert plan.totals.total_B[0] == 6 * (16 + 15)  # 15 in the tail, protected ones in a page

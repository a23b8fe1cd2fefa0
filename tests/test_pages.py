"""Budgets in whole pages: counts, exact totals, and who keeps what, against plain loops."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.cascade import Cascade, head_budgets
from retain.budget.largest_remainder import exact
from retain.budget.pages import pages_a_head, round_to_pages
from retain.budget.statement import Budget, LayerShape, Stock, spread
from retain.policy import candidates_of, decide_layers, keep_masks, pages_of, plan_of, shape_of
from retain.presets import load_policy
from tests.evictions import (
    EVICTING,
    FIXED,
    PRESETS,
    VARIANTS,
    held_scores,
    keeps_of_columns,
    learned_scores,
    made_scores,
    make_evidence,
    own_part,
    plan_for,
    ragged,
    scored,
    small,
    stock_of,
)
from tests.refused import refused

PADS, TOKENS = (0, 11, 4), 61
LENGTHS = [TOKENS - pad for pad in PADS]
# Of one, two and nine entries are the tails of these lengths, of none, of six.
SIZES = (4, 7, 16)


def case(name: str, heads_file: str, seed: int):
    policy = small(name, heads_file)
    layers = make_evidence(seed, 2, TOKENS, PADS)
    return policy, layers, scored(policy, layers, [5, 6, 7], learned_scores(layers, seed))


def keeps_of(policy, layers, budget, scores, stock=None) -> torch.Tensor:
    """Keep sets `[L, B, H, T]`."""
    made = decide_layers(policy, layers, budget, scores=scores, stock=stock)
    return torch.stack([one.keep_BHT for one in made])


def tail_of(length: int, page: int) -> range:
    """The last columns of a sequence, which fill no page."""
    return range(TOKENS - length % page, TOKENS)


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.4, 0.55, 0.8]), st.sampled_from(SIZES))
def test_every_head_holds_whole_pages_and_the_tail(heads_file, name, seed, ratio, page):
    policy, layers, scores = case(name, heads_file, seed)
    budget, shapes = Budget(keep_ratio=ratio, page=page), [shape_of(layer) for layer in layers]
    plain = plan_of(policy, replace(budget, page=None), layers[0].valid_BT, shapes)
    keeps, paged = keeps_of(policy, layers, budget, scores), plan_for(policy, layers, budget, None)
    for b, length in enumerate(LENGTHS):
        full, tail = divmod(length, page)
        held = keeps[:, b].sum(-1)
        assert ((held - tail) % page == 0).all() and (held >= tail).all() and (held >= 1).all()
        assert keeps[:, b, :, list(tail_of(length, page))].all()
        assert keeps[:, b][..., plain.protected_BT[b]].all()
        assert not (keeps[:, b] & ~layers[0].valid_BT[b]).any()
        own = {*plain.protected_BT[b].nonzero().flatten().tolist(), *tail_of(length, page)}
        assert {*paged.protected_BT[b].nonzero().flatten().tolist()} == own
        mean = plain.shares.totals.per_head_B[b]
        inside = int(plain.protected_BT[b, : TOKENS - tail].sum())
        K = pages_of(policy, budget, length, shapes)
        assert min(full, max(math.ceil((mean - tail) / page), math.ceil(inside / page), 0)) == K
        assert int(held.sum()) == 6 * (K * page + tail)
        # A sequence keeps what it keeps alone.
        own = [own_part(layer, b) for layer in layers]
        learned = [
            replace(score, values_BHT=score.values_BHT[b : b + 1, :, -length:])
            for score in learned_scores(layers, seed)
        ]
        alone = keeps_of(policy, own, budget, scored(policy, own, [5 + b], learned))
        assert torch.equal(alone[:, 0], keeps[:, b, :, -length:])


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_of_one_entry_rounds_nothing_and_a_large_one_keeps_all(heads_file, name):
    policy, layers, scores = case(name, heads_file, 3)
    exists_BHT = layers[0].exists_BHT
    for ratio in (0.7, 0.83, 1.0):
        budget = Budget(keep_ratio=ratio)
        plain = keeps_of(policy, layers, budget, scores)
        assert torch.equal(keeps_of(policy, layers, replace(budget, page=1), scores), plain)
        large = keeps_of(policy, layers, replace(budget, page=64), scores)
        assert torch.equal(large, exists_BHT.expand_as(large))
    budget, shapes = Budget(keep_ratio=0.7, page=64), [shape_of(layer) for layer in layers]
    assert [pages_of(policy, budget, length, shapes) for length in (61, 64, 640)] == [
        0,
        1,
        7 + 3 * (name == "full"),
    ]


@pytest.mark.parametrize("name", EVICTING)
def test_what_rounds_a_whole_mean_to_one_entry_changes_nothing(heads_file, name):
    """The same without the short cut: all the work of pages, at pages of one entry."""
    policy, layers, scores = case(name, heads_file, 4)
    policy = replace(policy, protection=FIXED)
    plan = plan_for(policy, layers, Budget(tokens_per_head=8), None)
    once = keep_masks(plan, [candidates_of(plan, score) for score in scores])
    paged = replace(plan, shares=replace(plan.shares, page=1))
    again = keep_masks(paged, [candidates_of(paged, score) for score in scores])
    assert all(map(torch.equal, once, again))


def rounded_by_hand(entries, total: int, page: int, least, most) -> list[int]:
    """One page after another."""
    pages = [min(max(own // page, low), high) for own, low, high in zip(entries, least, most, strict=True)]
    while sum(pages) != total:
        beyond = [Fraction(own, page) - count for own, count in zip(entries, pages, strict=True)]
        if sum(pages) < total:
            open_to = [i for i in range(len(pages)) if pages[i] < most[i]]
            pages[max(open_to, key=lambda i: (beyond[i], -i))] += 1
        else:
            open_to = [i for i in range(len(pages)) if pages[i] > least[i]]
            pages[min(open_to, key=lambda i: (beyond[i], -i))] -= 1
    return pages


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pages_go_by_largest_remainder_between_bounds(data):
    page, most = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 6))
    entries = data.draw(st.lists(st.integers(0, most * page), min_size=1, max_size=9))
    least = [data.draw(st.integers(0, most)) for _ in entries]
    total = data.draw(st.integers(sum(least), most * len(entries)))
    got = round_to_pages(entries, total, page, least=least, most=[most] * len(entries))
    assert got == rounded_by_hand(entries, total, page, least, [most] * len(entries))
    whole = [own // page * page for own in entries]
    assert round_to_pages(
        whole, sum(whole) // page, page, least=[0] * len(whole), most=[most] * len(whole)
    ) == [own // page for own in whole]


def test_the_largest_remainder_wins_and_the_smallest_pays():
    bounds = {"least": [0, 0, 0], "most": [9, 9, 9]}
    assert round_to_pages([7, 7, 2], 4, 4, **bounds) == [2, 2, 0]
    assert round_to_pages([6, 6, 4], 4, 4, **bounds) == [2, 1, 1]  # ties to the lower
    # The third needs one more than it won: of two that can pay alike, the higher does.
    assert round_to_pages([8, 8, 0], 4, 4, least=[0, 0, 1], most=[9, 9, 9]) == [2, 1, 1]
    assert round_to_pages([8, 9, 0], 4, 4, least=[0, 0, 1], most=[9, 9, 9]) == [1, 2, 1]
    said = "4 pages of 4 entries do not fit 2 heads or layers, which need at least 5 .* can hold 9: raise the"
    refused(said, round_to_pages, [8, 8], 4, 4, least=[3, 2], most=[4, 5])


def kept_by_hand(policy, shares, candidates, b: int, page: int, seen: int) -> list[list[set[int]]]:
    """Rules of heads and of entries in loops: budgets of heads as without pages, rounded, then filled."""
    H, tail = candidates[0].score_BHT.shape[1], seen % page
    own = policy.allocation
    held = [(layer.score_BHT[b] > float("-inf")).sum(-1).tolist() for layer in candidates]
    crosses = policy.scope == "model" or own.layers in ("cake", "entropy") or own.weights is not None
    wons = head_budgets(shares, candidates)
    budgets = [won.budget_BH[b].tolist() for won in wons]
    sure = [layer.guaranteed_BH[b].tolist() for layer in candidates]
    groups = [range(len(candidates))] if crosses else [[idx] for idx in range(len(candidates))]
    rounded: dict[int, list[int]] = {}
    for group in groups:
        places = [(idx, h) for idx in group for h in range(H)]
        entries = [budgets[idx][h] - tail for idx, h in places]
        least = [max(0, math.ceil(Fraction(sure[idx][h] - tail, page))) for idx, h in places]
        total = Fraction(sum(entries), page)
        if crosses:
            total = Fraction(shares.totals.total_B[b] - tail * H * len(candidates), page)
        assert total.denominator == 1
        most = [(held[idx][h] - tail) // page for idx, h in places]
        pages = rounded_by_hand(entries, int(total), page, least, most)
        for (idx, _), count in zip(places, pages, strict=True):
            rounded.setdefault(idx, []).append(count * page + tail)
    answer = []
    for idx, layer in enumerate(candidates):
        row = []
        for h in range(H):
            kept = set(layer.kept_BHT[b, h].nonzero().flatten().tolist())
            scores, budget = layer.score_BHT[b, h].tolist(), rounded[idx][h]
            exists = [i for i, value in enumerate(scores) if value > float("-inf")]
            if policy.draw is not None:
                pool = candidates if policy.scope == "model" else [layer]
                all_budgets = budgets if policy.scope == "model" else [budgets[idx]]
                row.append(drawn_by_hand(policy, pool, all_budgets, candidates, (idx, b, h), budget, exists))
                continue
            if policy.split.two_stages:
                first = layer.first_BHT[b, h].tolist()
                order = sorted(exists, key=lambda i: (i in kept, first[i], i), reverse=True)
                kept |= set(order[: math.floor(exact(policy.first_stage.share) * budget)])
            order = sorted(exists, key=lambda i: (i in kept, scores[i], i), reverse=True)
            row.append(set(order[:budget]))
        answer.append(row)
    return answer


def bids_of(layer, idx: int, b: int) -> list[tuple]:
    """Bids `(value, place, -layer, -head, key)` of a sequence, which stand at their places."""
    H, bids = layer.score_BHT.shape[1], layer.bids
    columns = bids.value_N, bids.place_N, bids.row_N, bids.draw_N
    rows = zip(*(own.tolist() for own in columns), strict=True)
    return [(value, place, -idx, -(row % H), key) for value, place, row, key in rows if row // H == b]


def drawn_by_hand(policy, pool: Sequence, budgets, candidates, where, budget: int, exists) -> set[int]:
    """What a head keeps of which a share is drawn: it has won so many bids, so many of them by lot."""
    idx, b, h = where
    numbers = [next(i for i, one in enumerate(candidates) if one is layer) for layer in pool]
    bids = [bid for number, layer in zip(numbers, pool, strict=True) for bid in bids_of(layer, number, b)]
    sure = sum(int(layer.bids.guaranteed_BH[b].sum()) for layer in pool)
    free = sum(map(sum, budgets)) - sure
    drawn = math.floor(exact(policy.draw.share).limit_denominator(10**6) * free)
    by_score = sorted(bids, key=lambda bid: bid[:4], reverse=True)[: free - drawn]
    rest = sorted(set(bids) - set(by_score), key=lambda bid: (bid[4], *bid[1:4]), reverse=True)[:drawn]
    mine = [bid for bid in bids if bid[2:4] == (-idx, -h)]
    d, w = len(set(mine) & set(rest)), len(set(mine) & {*by_score, *rest})
    guaranteed = set(exists) - {bid[1] for bid in mine}
    places = budget - len(guaranteed)
    lots = d * places // w if w else 0
    order = sorted(mine, key=lambda bid: (bid[0], bid[1]), reverse=True)
    left = sorted(order[places - lots :], key=lambda bid: (bid[4], bid[1]), reverse=True)
    return guaranteed | {bid[1] for bid in (*order[: places - lots], *left[:lots])}


def check_by_hand(policy, layers, scores, budget: Budget, stock: Stock | None = None) -> None:
    keeps = keeps_of(policy, layers, budget, scores, stock)
    plan = plan_for(policy, layers, budget, stock)
    candidates = [candidates_of(plan, score) for score in scores]
    for b, seen in enumerate(layers[0].valid_BT.sum(-1).tolist()):
        for idx, row in enumerate(kept_by_hand(policy, plan.shares, candidates, b, budget.page, seen)):
            for h, kept in enumerate(row):
                assert keeps[idx, b, h].nonzero().flatten().tolist() == sorted(kept)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0.2, 0.45, 0.7]),
    st.sampled_from([2, 3, 5]),
)
def test_heads_and_entries_are_those_of_plain_loops(name, seed, ties, ratio, page):
    policy = replace(VARIANTS[name], protection=FIXED)
    layers = make_evidence(seed, 1, 27, (0, 5))
    check_by_hand(policy, layers, made_scores(layers, seed, ties=ties), Budget(keep_ratio=ratio, page=page))


@pytest.mark.parametrize("name", ["fused", "duoattention", "layer_defensivekv", "pyramidkv", "lava", "cake"])
@settings(deadline=None, max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from([0.6, 0.8]), st.sampled_from(SIZES))
def test_presets_are_those_of_plain_loops(heads_file, name, seed, ratio, page):
    policy, layers, scores = case(name, heads_file, seed)
    check_by_hand(policy, layers, scores, Budget(keep_ratio=ratio, page=page))


def test_streaming_heads_hold_the_protected_and_full_heads_what_there_is(tmp_path):
    table = tmp_path / "heads.json"
    table.write_text('{"0": [1, 0], "1": [0, 0], "2": [0, 0]}')
    policy = small("duoattention", str(table))
    layers = make_evidence(0, 1, 61, (0,))
    scores = scored(policy, layers, None, learned_scores(layers, 0))

    def held(**budget):
        return keeps_of(policy, layers, Budget(**budget), scores).sum(-1)[:, 0].tolist()

    # Two of the protected lie before the tail of 13. The page that they need in each streaming head is taken
    # from the full one, which has two of three left over.
    assert held(tokens_per_head=20) == [[61, 12], [12, 12], [12, 11]]
    assert held(tokens_per_head=20, page=16) == [[29, 29]] * 3
    assert held(tokens_per_head=32, page=8) == [[61, 37], [37, 29], [29, 29]]


def test_a_tail_beyond_the_budget_is_no_error_and_protection_beyond_it_is():
    layers = make_evidence(1, 1, 31, (0,))
    scores = learned_scores(layers, 1)
    policy = replace(small("snapkv", ""), protection=FIXED)
    keeps = keeps_of(policy, layers, Budget(tokens_per_head=4, page=16), scores)
    # 15 in the tail, the sink in a page of its own.
    assert keeps.sum(-1).unique().tolist() == [31]
    layers = make_evidence(1, 1, 47, (0,))
    keeps = keeps_of(policy, layers, Budget(tokens_per_head=4, page=16), learned_scores(layers, 1))
    assert keeps.sum(-1).unique().tolist() == [31]
    said = "a budget of 2 entries per head, 1 fewer than the 3 protected"
    refused(said, keeps_of, policy, layers, Budget(tokens_per_head=2, page=16), learned_scores(layers, 1))


def test_a_scheduler_asks_with_plain_numbers():
    shapes = [LayerShape(8, 512), LayerShape(2, 512)]
    policy = load_policy("snapkv")
    for budget, length, pages in (
        ({"keep_ratio": 0.2}, 1000, 12),  # 200 entries, of which 8 lie in the tail
        ({"keep_ratio": 0.2}, 1007, 12),  # 201.4 are 201.4, rounded layer by layer to 201.4
        ({"tokens_per_head": 100}, 1000, 6),
        ({"bytes": 10 * 512 * 101}, 1000, 6),
        ({"bytes": 10 * 512 * 105}, 1000, 7),
        ({"keep_ratio": 1.0}, 1000, 62),
    ):
        assert pages_of(policy, Budget(**budget, page=16), length, shapes) == pages
    mean = plan_of(policy, Budget(keep_ratio=0.2), torch.ones(1, 1007) > 0, shapes).shares.totals.per_head_B[
        0
    ]
    assert pages_a_head(mean, 1007, 16, protected=36) == 12
    assert (pages_a_head(Fraction(33, 2), 100, 4), pages_a_head(16, 100, 4)) == (5, 4)
    assert pages_a_head(3, 15, 16) == 0 and pages_a_head(3, 16, 16) == 1
    # 61 entries beside the tail of 63 fill one page, and 92 of 124 protected ones take two.
    pinned = [100 <= i < 180 for i in range(1023)]
    assert pages_of(policy, Budget(tokens_per_head=124, page=64), 1023, shapes, pinned_T=pinned) == 2
    assert pages_of(load_policy("recency"), Budget(tokens_per_head=124, page=64), 1023, shapes) == 1
    # Of 66 protected entries 60 lie in the tail, and the others fit into the one page.
    pinned = [i >= 1023 - 60 for i in range(1023)]
    assert pages_of(policy, Budget(tokens_per_head=66, page=64), 1023, shapes, pinned_T=pinned) == 1
    refused("not rounded to pages: state page=", pages_of, policy, Budget(keep_ratio=0.2), 1000, shapes)


@pytest.mark.parametrize("page", [0, -1, True])
def test_a_page_that_is_none_is_refused(page):
    refused(f"page is the entries of a page, a whole .* got {page!r}", Budget, keep_ratio=0.5, page=page)


def test_what_states_no_budget_of_a_sequence_is_not_rounded():
    refused("and threshold=0.5 states none: leave the page out", Budget, threshold=0.5, page=16)
    refused("and byte_ratio=0.9 states none: .* tokens_per_head or bytes", Budget, byte_ratio=0.9, page=16)


def test_what_is_a_share_of_the_budget_is_one_of_the_rounded():
    """Safeguards, lines over depth and other shares are of what a sequence holds in the end."""
    layers = make_evidence(0, 1, 40, (0, 3))
    policy = replace(small("pyramidkv", ""), protection=FIXED)
    totals = plan_for(policy, layers, Budget(keep_ratio=0.5, page=8), None).shares.totals
    assert totals.per_head_B == [24, 21]


def test_pages_are_counted_of_all_that_was_seen_in_all_layers():
    policy = replace(small("snapkv", ""), protection=FIXED)
    layers = make_evidence(0, 1, 40, (0, 3))
    budget, scores = Budget(keep_ratio=0.5, page=4), learned_scores(layers, 0)
    whole = decide_layers(policy, layers, budget, scores=scores, stock=stock_of(layers))
    plain = decide_layers(policy, layers, budget, scores=scores)
    assert all(torch.equal(one.keep_BHT, own.keep_BHT) for one, own in zip(whole, plain, strict=True))
    said = r"page=4: heads hold whole pages .* sequence 0, whose last page has 0, .* hold \[14, 30, 15\]"
    refused(said, plan_for, policy, layers, budget, stock_of(ragged(layers, 0)))
    stock = stock_of(layers)
    torn = replace(stock, intact_BT=stock.intact_BT & (torch.arange(40) < 39))
    said = "sequence 1, whose last page has 1, .*evicted without pages"
    refused(said, plan_for, policy, layers, budget, torn)
    plan = plan_for(policy, layers, budget, None)
    with pytest.raises(AssertionError, match="whole pages are counted of all layers at once"):
        Cascade(plan.shares).add(candidates_of(plan, scores[0]))


def paged_before(layers: Sequence, seed: int, page: int, fresh: int) -> list:
    """The same layers after an earlier eviction in pages: of the tokens before the last `fresh` ones, each
    head holds some full pages of whichever, and their unfilled last page."""
    draw, answer = torch.Generator().manual_seed(seed), []
    for layer in layers:
        held = layer.valid_BT[:, None].expand(layer.keys_BHTD.shape[:3]).clone()
        for b, h in torch.ones(held.shape[:2]).nonzero().tolist():
            own = layer.valid_BT[b].nonzero().flatten()
            full = max(0, len(own) - fresh) // page
            left = int(torch.randint(0, full + 1, (), generator=draw)) * page
            gone = torch.randperm(full * page, generator=draw)[left:]
            held[b, h, own[gone]] = False
        answer.append(replace(layer, held_BHT=held))
    return answer


# The last two tokens, which are protected, have come since or were kept.
LATER = st.tuples(st.integers(0, 10**6), st.booleans(), st.sampled_from([2, 3, 5]), st.integers(2, 9))


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(VARIANTS)), LATER, st.sampled_from([0.2, 0.45, 0.7]), st.integers(0, 12))
def test_a_later_eviction_holds_whole_pages_by_the_same_rules(name, drawn, ratio, announced):
    """Heads hold unlike numbers of pages; a ratio may be one of tokens that are still to come."""
    policy, (seed, ties, page, fresh) = replace(VARIANTS[name], protection=FIXED), drawn
    layers = paged_before(make_evidence(seed, 1, 27, (0, 5)), seed, page, fresh)
    scores = held_scores(layers, made_scores(layers, seed, ties=ties))
    seen_B, shapes = (27, 22), [shape_of(layer) for layer in layers]
    stock = stock_of(layers, [seen + announced for seen in seen_B])
    budget = Budget(keep_ratio=ratio, page=page)
    keeps = keeps_of(policy, layers, budget, scores, stock)
    plain = plan_for(policy, layers, replace(budget, page=None), stock)
    stated = spread(budget, stock.lengths_B, shapes).per_head_B
    plan = plan_for(policy, layers, budget, stock)
    held_BL = torch.stack([layer.exists_BHT.sum((1, 2)) for layer in layers], 1).tolist()
    alone = policy.allocation.layers == "uniform" and policy.scope != "model"
    for b, (seen, mean) in enumerate(zip(seen_B, stated, strict=True)):
        tail = seen % page
        inside = plain.protected_BT[b] & (torch.arange(27) < 27 - tail)
        K = max(math.ceil((mean - tail) / page), math.ceil(Fraction(int(inside.sum()), page)), 0)
        groups = [[own] for own in held_BL[b]] if alone else [held_BL[b]]
        totals = [min((K * page + tail) * 2 * len(group), sum(group)) for group in groups]
        assert int(keeps[:, b].sum()) == sum(totals)
        assert min(K, seen // page) == min(plan.pages_B[b], seen // page)
        assert ((keeps[:, b].sum(-1) - tail) % page == 0).all()
        assert keeps[:, b, :, 27 - tail :].all() and keeps[:, b][..., plain.protected_BT[b]].all()
        assert torch.equal(plan.protected_BT[b], plain.protected_BT[b] | (torch.arange(27) >= 27 - tail))
    assert not any((keep & ~layer.exists_BHT).any() for keep, layer in zip(keeps, layers, strict=True))
    if not plan.covers_all:
        check_by_hand(policy, layers, scores, budget, stock)
    # The same is decided of the columns that are held, of each sequence alone, as a cache does; but where a
    # sum of means, which depends on its order, decides between ties.
    other = ties and policy.allocation.normalise is not None
    for row in [row for row, covered in enumerate(plan.covers_B) if not covered and not other]:
        shown = keeps_of_columns(plan, layers, scores, [row], pad=row)
        assert torch.equal(torch.stack(shown)[:, 0], keeps[:, row])


def test_heads_that_hold_less_than_their_pages_leave_them_to_others():
    layers, page = make_evidence(0, 1, 30, (0,)), 4
    held = torch.ones(1, 2, 30, dtype=torch.bool)
    held[0, 0, 4:24] = False  # the first head has two pages left beside the tail of two
    layers = [replace(layer, held_BHT=held) for layer in layers]
    scores = learned_scores(layers, 1)
    for name in ("layer_defensivekv", "snapkv", "pyramidkv"):
        policy = replace(small(name, ""), protection=FIXED)
        own = [replace(score, first_BHT=score.values_BHT) for score in scores]
        keeps = keeps_of(policy, layers, Budget(tokens_per_head=18, page=page), own, stock_of(layers))
        # Four pages a head beside the tail of two, of which the first heads hold two each.
        assert int(keeps.sum()) == 6 * (4 * page + 2)
        assert (keeps.sum(-1)[:, 0, 0] <= 2 * page + 2).all()

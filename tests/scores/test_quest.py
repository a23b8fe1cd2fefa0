import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.scores import quest
from tests.naive import assert_heads_close, mean, naive_scores, random_evidence, special_layer


def _naive(evidence, page_size, group):
    T, G, H = evidence.num_seen, evidence.group, evidence.num_heads
    keys, queries = evidence.keys_BHTD.tolist(), evidence.queries_BQSD[:, :, -1].tolist()
    own = [[i for i in range(T) if valid[i]] for valid in evidence.valid_BT]

    def bound(b, h, i):
        place = own[b].index(i) // page_size * page_size
        page = list(zip(*(keys[b][h][k] for k in own[b][place : place + page_size]), strict=True))
        bounds = [
            sum(max(x * max(column), x * min(column)) for x, column in zip(query, page, strict=True))
            for query in queries[b][h * G : h * G + G]
        ]
        return max(bounds) if group == "max" else mean(bounds)

    naive = naive_scores(evidence, bound)
    for b, h in itertools.product(range(len(own)), range(H)):
        lowest = float(naive[b, h, own[b]].min())
        # The next query, at T, does not see these.
        gone = [i for i in own[b] if T - i >= (T + 1 if evidence.window is None else evidence.window)]
        naive[b, h, gone] = lowest - abs(lowest) - 1
    return naive


@pytest.mark.parametrize("query_heads", [1, 4, 8])
@pytest.mark.parametrize("page_size", [1, 3, 16, 40])
@pytest.mark.parametrize("group", ["max", "mean"])
def test_quest_is_its_formula(query_heads, page_size, group):
    evidence = random_evidence(pads=(0, 4, 17), num_tokens=35, group=query_heads)
    score = quest(evidence, page_size=page_size, group=group)
    assert score.unit == "rank"
    assert_heads_close(score.values_BHT, _naive(evidence, page_size, group))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    page_size=st.integers(1, 20),
    num_tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
    group=st.sampled_from([1, 4, 8]),
)
def test_the_page_score_bounds_every_product_in_the_page(page_size, num_tokens, seed, group):
    pads = (0, seed % num_tokens)
    evidence = random_evidence(pads=pads, num_tokens=num_tokens, group=group, seed=seed)
    score = quest(evidence, page_size=page_size).values_BHT.unflatten(1, (2, 1))
    last = evidence.queries_BQSD[:, :, -1].unflatten(1, (2, group))
    product = last @ evidence.keys_BHTD.transpose(-1, -2)
    slack = 1e-5 * float(product.abs().max())
    own = evidence.valid_BT[:, None, None].expand_as(product)
    assert (product <= score + slack)[own].all()


@pytest.mark.parametrize("window", [1, 2, 9, 35, 36])
def test_what_a_sliding_window_has_left_comes_last(window):
    evidence = random_evidence(pads=(0, 4, 17), num_tokens=35, group=4, window=window)
    score = quest(evidence, page_size=4).values_BHT
    assert_heads_close(score, _naive(evidence, 4, "max"))
    gone = torch.arange(35) <= 35 - window
    for b in range(3):
        own = evidence.valid_BT[b]
        if (own & gone).any() and (own & ~gone).any():
            assert (score[b][:, own & gone].amax(-1) < score[b][:, own & ~gone].amin(-1)).all()


@pytest.mark.parametrize("layer", ["soft_cap", "sinks"])
def test_a_cap_and_a_sink_change_no_order(layer):
    evidence = random_evidence(group=4)
    assert torch.equal(quest(special_layer(evidence, layer)).values_BHT, quest(evidence).values_BHT)


def test_only_the_last_query_is_read():
    evidence = random_evidence()
    last = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, -1:])
    assert torch.equal(quest(evidence).values_BHT, quest(last).values_BHT)

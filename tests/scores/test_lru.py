from dataclasses import replace

import pytest
import torch

from retain.evidence import RunningStatistics
from retain.ranking import rank_entries
from retain.scores import lru, recency
from retain.scores.lru import last_access
from tests.naive import LAYERS, alone, naive_attention, random_evidence, special_layer


def _naive(evidence, share):
    """Last access in valid places, entry by entry; -inf on padding."""
    attention = naive_attention(evidence)
    B, H, T = evidence.keys_BHTD.shape[:3]
    G = evidence.group
    naive = torch.full((B, H, T), float("-inf"))
    for b in range(B):
        places = [i for i in range(T) if evidence.valid_BT[b, i]]
        for h in range(H):
            for place, i in enumerate(places):
                last = place
                for later, j in enumerate(places):
                    reach = T if evidence.window is None else evidence.window
                    seen = [k for k in places if k <= j and j - k < reach]
                    if i in seen and any(
                        float(attention[b, q, j, i]) >= share / len(seen) for q in range(h * G, h * G + G)
                    ):
                        last = max(last, later)
                naive[b, h, i] = last
    return naive


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 3.0, 1e6])
def test_lru_is_its_definition(group, share):
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, group=group)
    score = lru(evidence, share=share)
    assert score.unit == "rank"
    assert torch.equal(score.values_BHT, _naive(evidence, share))


@pytest.mark.parametrize("chunk", [1, 5, 128])
@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_lru_however_it_is_chunked(chunk, layer, share):
    evidence = random_evidence(pads=(0, 4, 7), num_tokens=15)
    evidence = evidence if layer is None else special_layer(evidence, layer)
    assert torch.equal(lru(evidence, share=share, chunk=chunk).values_BHT, _naive(evidence, share))


def test_share_zero_keeps_exactly_the_last_entries():
    """Every query accesses all, all tie, ties go to the later position: kept sets are those of recency."""
    evidence = random_evidence(pads=(0, 5), num_tokens=23)
    score = lru(evidence, share=0.0).values_BHT
    own = score[evidence.valid_BT[:, None].expand_as(score)].view(-1)
    assert set(score[0, 0].tolist()) == {22.0} and set(own.tolist()) == {22.0, 17.0}
    assert torch.equal(rank_entries(score), rank_entries(recency(evidence).values_BHT))


def test_a_share_out_of_reach_is_recency():
    evidence = random_evidence(pads=(0, 5), num_tokens=23)
    assert torch.equal(lru(evidence, share=1e6).values_BHT, recency(evidence).values_BHT)


def test_indifferent_queries_access_everything_they_see():
    """Equal logits pay 1/n only up to rounding; which entries count must not depend on it."""
    evidence = random_evidence(pads=(0, 6), num_tokens=301)
    orders = torch.stack([torch.randperm(3) for _ in range(301)])
    keys = torch.tensor([0.1, 0.2, 0.7])[orders].expand(2, 2, 301, 3)
    queries = torch.full_like(evidence.queries_BQSD, 1.7)
    score = lru(replace(evidence, queries_BQSD=queries, keys_BHTD=keys)).values_BHT
    assert (score[0] == 300).all() and (score[1, :, 6:] == 294).all()


def test_beside_a_sink_an_indifferent_query_pays_less_than_its_share():
    """The sink takes a half or more: 1/n is out of reach of all, a half of that not of the last query."""
    evidence = random_evidence(pads=(0,), num_tokens=8, num_queries=8)
    zeros = {"keys_BHTD": torch.zeros_like(evidence.keys_BHTD)}
    plain = replace(evidence, **zeros)
    sink = replace(plain, sinks_Q=torch.full((4,), 8.0).log())  # as much as the last query's 8 entries
    assert (lru(plain).values_BHT == 7).all()
    assert torch.equal(lru(sink).values_BHT, recency(evidence).values_BHT)
    assert (lru(sink, share=0.5).values_BHT == 7).all()


def test_an_entry_that_a_late_query_wants_outlives_newer_ones():
    evidence = random_evidence(pads=(0,), num_tokens=12, num_heads=1, group=1)
    keys, queries = torch.zeros(1, 1, 12, 3), torch.zeros(1, 1, 12, 3)
    keys[0, 0, 2, 0], queries[0, 0, 10:, 0] = 50.0, 50.0
    score = lru(replace(evidence, keys_BHTD=keys, queries_BQSD=queries)).values_BHT[0, 0]
    assert score.tolist() == [9.0, 9.0, 11.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 10.0, 11.0]


def test_running_statistics_are_read_where_they_are_kept():
    """They win over the queries, which may then be a window; a sequence's padding is not counted."""
    evidence = random_evidence(pads=(0, 4), num_tokens=14)
    running = RunningStatistics(torch.zeros(2, 2, 14), last_access(evidence))
    want = lru(evidence).values_BHT
    short = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, -3:], running=running)
    assert torch.equal(lru(short).values_BHT, want)
    # Places go beyond the entries held, once some are evicted.
    later = replace(short, running=RunningStatistics(running.mass_BHT, running.last_access_BHT + 2**20))
    assert torch.equal(lru(later).values_BHT, want + 2**20)


def test_padding_does_not_matter():
    evidence = random_evidence(pads=(0, 5, 2), num_tokens=19)
    score = lru(evidence).values_BHT
    for b, pad in enumerate((0, 5, 2)):
        assert torch.equal(score[b : b + 1, :, pad:], lru(alone(evidence, b)).values_BHT)


def test_missing_queries_and_negative_shares_are_refused():
    evidence = random_evidence(num_tokens=24, num_queries=8)
    with pytest.raises(
        ValueError, match=r"holds the last 8 of 24 and no running statistics.*all queries at prefill"
    ):
        lru(evidence)
    for share in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0; got"):
            lru(random_evidence(), share=share)

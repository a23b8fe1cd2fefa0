from dataclasses import replace

import pytest
import torch

from retain.attention.received import advance
from retain.ranking import rank_entries
from retain.scores import lru, recency
from tests.naive import LAYERS, naive_attention, naive_scores, random_evidence, special_layer


def _naive(evidence, share):
    """Last access in valid places, entry by entry."""
    attention, T, G = naive_attention(evidence), evidence.num_seen, evidence.group
    reach = T if evidence.window is None else evidence.window

    def number(b, h, i):
        places = [k for k in range(T) if evidence.valid_BT[b, k]]
        last = places.index(i)
        for later, j in enumerate(places):
            seen = [k for k in places if k <= j and j - k < reach]
            paid = [float(attention[b, q, j, i]) for q in range(h * G, h * G + G)]
            if i in seen and max(paid) >= share / len(seen):
                last = max(last, later)
        return last

    return naive_scores(evidence, number).float()


@pytest.mark.parametrize(
    ("group", "chunk", "layer"),
    [
        *((group, None, None) for group in (1, 4, 8)),
        *((2, chunk, layer) for chunk in (1, 5, 128) for layer in (None, *LAYERS)),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 3.0, 1e6])
def test_lru_is_its_definition_however_it_is_chunked(group, chunk, layer, share):
    evidence = special_layer(random_evidence(pads=(0, 4, 9), num_tokens=17, group=group), layer)
    score = lru(evidence, share=share, chunk=chunk)
    assert score.unit == "rank"
    assert torch.equal(score.values_BHT, _naive(evidence, share))


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
    want, running = lru(evidence).values_BHT, advance(evidence)
    short = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, -3:], running=running)
    assert torch.equal(lru(short).values_BHT, want)
    # Places go beyond the entries held, once some are evicted.
    far = replace(running, last_access_BHT=running.last_access_BHT + 2**20)
    assert torch.equal(lru(replace(short, running=far)).values_BHT, want + 2**20)

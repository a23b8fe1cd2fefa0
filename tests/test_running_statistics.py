"""Running statistics: folded query by query, chunk by chunk or at once, over entries held or not."""

from dataclasses import replace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.attention.received import _entries_seen, advance
from retain.evidence import RunningStatistics, visible
from retain.scores import h2o, lru
from tests.close import assert_close
from tests.held import ASKED, filled, held_evidence, naive_held_attention
from tests.naive import LAYERS, random_evidence, special_layer


def _naive(evidence, share):
    """Mass and last access by loops, of the held queries and what was known before."""
    attention, places = naive_held_attention(evidence), evidence.places_BT
    (B, H, T), S, G = evidence.keys_BHTD.shape[:3], evidence.num_queries, evidence.group
    before = evidence.running
    mass = torch.zeros(B, H, T, dtype=torch.float64) if before is None else before.mass_BHT.clone()
    last = places[:, None].expand(B, H, T).clone()
    for b in range(B):
        for h in range(H):
            for i in range(T):
                if before is not None:
                    last[b, h, i] = max(int(places[b, i]), int(before.last_access_BHT[b, h, i]))
                for s in range(S):
                    paid = [float(attention[b, q, s, i]) for q in range(h * G, h * G + G)]
                    mass[b, h, i] += sum(paid) / G
                    seen = int((attention[b, h * G, s] > 0).sum())
                    if attention[b, h * G, s, i] > 0 and max(paid) >= share / seen:
                        last[b, h, i] = max(int(last[b, h, i]), int(places[b, T - S + s]))
    return mass, last


@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("share", [0.0, 1.0, 2.5])
def test_statistics_are_their_formula(layer, own, share):
    """Own entries not held, and heads that hold nothing, among them."""
    evidence = held_evidence(own=own)
    evidence = special_layer(evidence, layer)
    mass, last = _naive(evidence, share)
    exists = evidence.exists_BHT
    for chunk in (1, 3, 128):
        got = advance(filled(evidence, float("nan")), evidence.running, chunk, share=share)
        assert_close(got.mass_BHT[exists], mass[exists])
        assert torch.equal(got.last_access_BHT[exists], last[exists])


@pytest.mark.parametrize("own", [True, False])
def test_a_sequence_that_came_with_fewer_queries_folds_those(own):
    evidence = held_evidence(own=own)
    queried = torch.arange(ASKED) >= torch.tensor([[0], [5], [8]])
    few = replace(evidence, queried_BS=queried)
    mass, last = _naive(few, 1.0)
    for garbage in (0.0, float("nan")):
        queries = few.queries_BQSD.masked_fill(~queried[:, None, :, None], garbage)
        got = advance(replace(few, queries_BQSD=queries), few.running, 3)
        exists = evidence.exists_BHT
        assert_close(got.mass_BHT[exists], mass[exists])
        assert torch.equal(got.last_access_BHT[exists], last[exists])
    # Of the last sequence nothing came.
    assert torch.equal(got.mass_BHT[2], few.running.mass_BHT[2])
    assert torch.equal(got.last_access_BHT[2], few.running.last_access_BHT[2])


@pytest.mark.parametrize("layer", [None, *LAYERS])
@pytest.mark.parametrize("parts", [(14,), (7, 7), (1, 12, 1), (3, 4, 2, 5)])
def test_chunks_of_queries_fold_to_what_all_at_once_do(layer, parts):
    evidence = random_evidence((0, 3), num_tokens=14)
    evidence = special_layer(evidence, layer)
    whole, running, stop = advance(evidence), None, 0
    for part in parts:
        start, stop = stop, stop + part
        shown = truncate(evidence, stop)
        shown = replace(shown, queries_BQSD=shown.queries_BQSD[:, :, start:])
        if running is not None:
            # Entries that came since begin at nothing, as in a side column.
            old = running
            running = RunningStatistics(torch.zeros(2, 2, stop), torch.zeros(2, 2, stop, dtype=torch.int32))
            running.mass_BHT[..., :start] = old.mass_BHT
            running.last_access_BHT[..., :start] = old.last_access_BHT
        running = advance(shown, running, 2)
    assert_close(running.mass_BHT, whole.mass_BHT)
    valid = evidence.valid_BT[:, None].expand(2, 2, 14)
    assert torch.equal(running.last_access_BHT[valid], whole.last_access_BHT[valid])
    # And these are the numbers that scores make of every query.
    last = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, -1:], running=running)
    assert_close(h2o(last).values_BHT[valid], h2o(evidence).values_BHT[valid])
    assert torch.equal(lru(last).values_BHT, lru(evidence).values_BHT)


@pytest.mark.parametrize("window", [None, 1, 4, 14, 100])
@pytest.mark.parametrize("garbage", [0, -7, 10**6])
def test_how_many_entries_a_query_sees_is_counted_without_looking_at_pairs(window, garbage):
    """Places of padding mean nothing."""
    evidences = [
        random_evidence((0, 3, 5), num_queries=ASKED),
        *(held_evidence(own=own) for own in (True, False)),
    ]
    for plain in (replace(evidence, window=window) for evidence in evidences):
        evidence = plain
        if plain.place_BT is not None:
            place_BT = plain.place_BT.masked_fill(~plain.valid_BT, garbage)
            evidence = replace(plain, place_BT=place_BT)
        want = visible(plain, 0, ASKED).sum(-1).expand(-1, 2, -1).repeat_interleave(2, dim=1)
        assert torch.equal(_entries_seen(evidence), want)


def test_what_was_known_is_left_alone():
    evidence = held_evidence()
    mass, last = (x.clone() for x in vars(evidence.running).values())
    advance(evidence, evidence.running)
    assert torch.equal(evidence.running.mass_BHT, mass) and torch.equal(
        evidence.running.last_access_BHT, last
    )


@pytest.mark.parametrize("layer", [None, *LAYERS])
def test_what_a_query_sees_is_what_it_may_pay(layer):
    """Of everything, with padding; of what heads hold; and of fewer queries in some sequences."""
    queried = torch.arange(ASKED) >= torch.tensor([[0], [5], [8]])
    for evidence in (
        random_evidence((0, 3, 5), num_queries=ASKED),
        held_evidence(own=False),
        replace(held_evidence(), queried_BS=queried),
    ):
        evidence = special_layer(evidence, layer)
        pays = (naive_held_attention(evidence) > 0).unflatten(1, (2, 2))[:, :, 0]
        assert torch.equal(visible(evidence, 0, ASKED).expand_as(pays), pays)
        assert torch.equal(visible(evidence, 2, 5).expand_as(pays[:, :, 2:5]), pays[:, :, 2:5])

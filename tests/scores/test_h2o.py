from dataclasses import replace

import pytest
import torch

from retain.evidence import RunningStatistics
from retain.scores import h2o
from tests.naive import (
    LAYERS,
    SHAPES,
    assert_heads_close,
    naive_attention,
    naive_running_mass,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, reduce):
    attention = naive_attention(evidence)
    (B, H, T), G = evidence.keys_BHTD.shape[:3], evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                if evidence.valid_BT[b, i]:
                    mass = naive_running_mass(attention, b, h, i, G)
                    reach = T if evidence.window is None else evidence.window
                    payers = sum(j - i < reach for j in range(i, T))
                    naive[b, h, i] = mass if reduce == "sum" else mass / payers
    return naive


def _counted(evidence):
    """The same layer with what a cache would have counted, and the last query only."""
    mass = _naive(evidence, "sum").masked_fill(~evidence.valid_BT[:, None], 0.0).float()
    running = RunningStatistics(mass, torch.zeros(mass.shape, dtype=torch.int64))
    return replace(evidence, running=running, queries_BQSD=evidence.queries_BQSD[:, :, -1:])


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [1, 5, 128])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_h2o_is_its_formula_however_it_is_chunked(reduce, chunk, shape):
    evidence, _ = shaped_evidence(shape, num_queries=None)
    score = h2o(evidence, reduce=reduce, chunk=chunk)
    assert score.window == 0
    assert_heads_close(score.values_BHT, _naive(evidence, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("layer", [None, *LAYERS])
def test_what_a_cache_counted_is_what_the_queries_say(reduce, layer):
    evidence = random_evidence(pads=(0, 4, 1))
    evidence = evidence if layer is None else special_layer(evidence, layer)
    assert_heads_close(h2o(evidence, reduce=reduce).values_BHT, _naive(evidence, reduce))
    assert_heads_close(h2o(_counted(evidence), reduce=reduce).values_BHT, _naive(evidence, reduce))


def test_what_was_counted_is_preferred_to_counting_again():
    counted = replace(random_evidence(), running=_counted(random_evidence(seed=1)).running)
    assert torch.equal(h2o(counted).values_BHT, h2o(_counted(random_evidence(seed=1))).values_BHT)


def test_the_mean_counts_the_queries_of_entries_that_are_gone():
    """Entries 3, 4 and 9 were evicted: what they asked is in the mass, and must be in the count."""
    whole = _counted(random_evidence(pads=(0, 0)))
    left = [i for i in range(14) if i not in (3, 4, 9)]
    held = replace(
        whole,
        keys_BHTD=whole.keys_BHTD[:, :, left],
        values_BHTD=whole.values_BHTD[:, :, left],
        positions_BT=whole.positions_BT[:, left],
        valid_BT=whole.valid_BT[:, left],
        place_BT=whole.places_BT[:, left],
        running=RunningStatistics(
            *(x[..., left] for x in (whole.running.mass_BHT, whole.running.last_access_BHT))
        ),
    )
    assert torch.equal(h2o(held, reduce="mean").values_BHT, h2o(whole, reduce="mean").values_BHT[..., left])


def test_float64_evidence_is_summed_in_float64_and_rounded_once():
    evidence = random_evidence(pads=(0,), num_tokens=60, dtype=torch.float64)
    assert torch.equal(h2o(evidence, chunk=1).values_BHT, _naive(evidence, "sum").float())


def test_h2o_needs_every_query():
    message = "h2o sums the attention of every query, but the evidence holds the last 8 of 24 and no running"
    with pytest.raises(ValueError, match=message):
        h2o(random_evidence(pads=(0,), num_tokens=24, num_queries=8))
    with pytest.raises(ValueError, match="reduce is 'sum' or 'mean'; got 'max'"):
        h2o(random_evidence(), reduce="max")

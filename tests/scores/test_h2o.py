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
    naive_scores,
    random_evidence,
    shaped_evidence,
    special_layer,
)


def _naive(evidence, reduce):
    attention, T = naive_attention(evidence), evidence.num_seen
    reach = T if evidence.window is None else evidence.window

    def number(b, h, i):
        mass = naive_running_mass(attention, b, h, i, evidence.group)
        return mass if reduce == "sum" else mass / sum(j - i < reach for j in range(i, T))

    return naive_scores(evidence, number)


def counted(evidence):
    """The same layer with the statistics that a cache would have counted, and the last query only."""
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
def test_running_statistics_of_a_cache_give_the_same_and_are_preferred(reduce, layer):
    evidence = special_layer(random_evidence(pads=(0, 4, 1)), layer)
    own, naive = counted(evidence), _naive(evidence, reduce)
    assert_heads_close(h2o(evidence, reduce=reduce).values_BHT, naive)
    assert_heads_close(h2o(own, reduce=reduce).values_BHT, naive)
    other = special_layer(random_evidence(pads=(0, 4, 1), seed=1), layer)
    assert_heads_close(h2o(replace(other, running=own.running), reduce=reduce).values_BHT, naive)


def test_the_mean_counts_the_queries_of_entries_that_are_gone():
    """Entries 3, 4 and 9 were evicted: what they asked is in the mass, and must be in the count."""
    whole = counted(random_evidence(pads=(0, 0)))
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

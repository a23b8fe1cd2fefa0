"""The limit that is stored with gates: read off their curve, where one means something."""

import math

import pytest
import torch

from retain.budget.capacity import stored_limit
from retain.gates import GateSet, LinearGate
from retain.train.calibration.capacity_limit import AFFORDABLE, limit_record
from retain.train.calibration.fit import CalibrationSettings, LayerLook, calibrate_

CURVE = {"keep_ratio": [0.02, 0.04, 0.08], "threshold": [400.0, 100.0, 25.0]}


class Gates:
    def __init__(self, record):
        self.metadata = {"calibration": {"capacity": record}}


def test_it_is_the_price_of_usual_documents_and_a_cache_reads_it():
    record = limit_record(CURVE, "risk")
    assert record == {"limit": pytest.approx(100.0), "keep_ratio": AFFORDABLE, "unit": "risk"}
    assert stored_limit(Gates(record)) == pytest.approx(100.0)
    between = limit_record(CURVE, "risk", affordable=0.03)
    assert between["limit"] == pytest.approx(math.sqrt(400 * 100)) and between["keep_ratio"] == 0.03


@pytest.mark.parametrize("unit", ["mass", "rank"])
def test_there_is_none_where_scores_are_no_risk(unit):
    assert limit_record(CURVE, unit) is None
    assert limit_record({**CURVE, "threshold": [0.0, 0.0, 0.0]}, "risk") is None


@pytest.mark.parametrize("curve", [True, False])
def test_it_is_stored_whether_or_not_the_curve_is(curve):
    draw, gates = torch.Generator().manual_seed(0), GateSet({0: LinearGate(E=4, H=2)})
    looks = []
    for _ in range(4):
        target_HT = torch.rand(2, 200, generator=draw).square()
        looks.append({0: LayerLook(target_HT.clone(), target_HT, torch.ones(200, dtype=torch.bool))})
    settings = CalibrationSettings(kind="none", fusion_weights=False, quotas=True, curve=curve)
    record = calibrate_(gates, looks, settings)
    # Of the documents that are fitted, four hundredths of the entries are above it.
    fitted = torch.cat([own[0].target_HT.flatten() for own in looks[0::2]])
    limit = stored_limit(gates)
    assert ("curve" in record) == curve and record["capacity"]["limit"] == limit
    assert (fitted >= limit).double().mean() == pytest.approx(AFFORDABLE, abs=2 / len(fitted))
    without = CalibrationSettings(kind="none", fusion_weights=False, curve=curve, capacity=False)
    assert "capacity" not in calibrate_(gates, looks, without) and stored_limit(gates) is None


def test_a_curve_that_does_not_reach_so_far_is_refused():
    with pytest.raises(ValueError, match="0.01"):
        limit_record(CURVE, "risk", affordable=0.01)

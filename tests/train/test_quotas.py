"""Quotas as they are fitted: against a plain count, with ties, and what they keep of other documents."""

import json
import math

import pytest
import torch

from retain.gates import GateSet, LinearGate
from retain.gates.calibrate import PARTS
from retain.train.calibration.fit import CalibrationSettings, LayerLook, calibrate_
from retain.train.calibration.quotas import RATIOS, count_of, fit_quotas, report_quotas

# Layers of unlike numbers of heads and of counted entries.
SIZES = {2: (3, 40), 5: (1, 25)}
# How much the heads of each layer are worth.
WORTH = {2: (1.0, 4.0, 0.3), 5: (2.0,)}


def targets(count: int, *, seed: int = 0, levels: int | None = None):
    draw, made = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        document = {}
        for layer, (H, N) in SIZES.items():
            risk = torch.rand(H, N, generator=draw) ** 2 * torch.tensor(WORTH[layer])[:, None]
            document[layer] = risk if levels is None else (risk * levels).floor()
        made.append(document)
    return made


def naive_shares(documents, ratio):
    """One entry after another, largest first; those that tie with the last one share what is left."""
    total = {(layer, h): 0.0 for layer, (H, _) in SIZES.items() for h in range(H)}
    for document in documents:
        entries = [
            (float(own[h, i]), (layer, h))
            for layer, own in document.items()
            for h in range(own.shape[0])
            for i in range(own.shape[1])
        ]
        count = max(1, math.ceil(ratio * len(entries) - 1e-9))
        last = sorted((value for value, _ in entries), reverse=True)[count - 1]
        above = [head for value, head in entries if value > last]
        tied = [head for value, head in entries if value == last]
        for head in above:
            total[head] += 1 / count / len(documents)
        for head in tied:
            total[head] += (count - len(above)) / len(tied) / count / len(documents)
    return total


@pytest.mark.parametrize("levels", [None, 3, 0], ids=["apart", "ties", "all zero"])
def test_quotas_are_what_heads_win_by_true_risk(levels):
    documents = targets(3, levels=levels)
    record = fit_quotas(documents)
    assert json.loads(json.dumps(record)) == record and record["keep_ratio"] == list(RATIOS)
    for number, ratio in enumerate(RATIOS):
        wanted = naive_shares(documents, ratio)
        got = {
            (int(layer), h): part
            for layer, rows in record["parts"].items()
            for h, part in enumerate(rows[number])
        }
        assert sum(got.values()) == PARTS and all(isinstance(part, int) for part in got.values())
        for head, share in wanted.items():
            assert abs(got[head] / PARTS - share) < 1.1e-6
    if levels == 0:  # nobody is worth more by its place
        assert record["parts"]["2"][0] == pytest.approx([PARTS * 40 / 145] * 3, abs=1)


def test_a_count_is_rounded_up_and_is_never_0():
    assert [count_of(10, ratio) for ratio in (0.01, 0.1, 0.11, 0.95)] == [1, 1, 2, 10]
    # As written: 0.55 * 100 is a little more than 55 in doubles.
    assert [count_of(100, ratio) for ratio in (0.07, 0.55, 0.551)] == [7, 55, 56]


def test_what_quotas_keep_of_other_documents():
    fitted, reported = targets(4), targets(3, seed=8)
    noise = torch.Generator().manual_seed(1)
    scores = [
        {layer: own * (torch.rand(own.shape, generator=noise) + 0.5) for layer, own in document.items()}
        for document in reported
    ]
    ratios = (0.05, 0.2, 0.5)
    report = report_quotas(reported, scores, fit_quotas(fitted), ratios)
    for ratio in ratios:
        kept = report[f"{ratio:g}"]
        assert kept["quotas"] > kept["equal"] + 0.01 and kept["by_target"] > kept["quotas"] - 0.02
        # Joint selection by score, entry by entry.
        joint = []
        for score, target in zip(scores, reported, strict=True):
            entries = sorted(
                (
                    (float(score[layer][h, i]), float(target[layer][h, i]))
                    for layer, (H, N) in SIZES.items()
                    for h in range(H)
                    for i in range(N)
                ),
                reverse=True,
            )
            first = entries[: count_of(len(entries), ratio)]
            joint.append(sum(worth for _, worth in first) / sum(worth for _, worth in entries))
        assert kept["joint"] == pytest.approx(sum(joint) / len(joint), rel=1e-6)
    exact = report_quotas(reported, reported, fit_quotas(fitted), ratios)
    assert all(kept["joint"] == kept["by_target"] >= kept["quotas"] for kept in exact.values())


def test_equal_budgets_and_quotas_are_counted_head_by_head():
    """Two heads of four entries, one worth four times the other: by hand."""
    target = {0: torch.tensor([[8.0, 4.0, 2.0, 1.0], [2.0, 1.0, 0.5, 0.25]])}
    quotas = {"keep_ratio": [0.5], "parts": {"0": [[750_000, 250_000]]}}
    (kept,) = report_quotas([target], [target], quotas, (0.5,)).values()
    assert kept["equal"] == pytest.approx((8 + 4 + 2 + 1) / 18.75)
    assert kept["quotas"] == pytest.approx((8 + 4 + 2 + 2) / 18.75)
    worthless = {0: torch.zeros(2, 4)}
    assert set(report_quotas([worthless], [target], quotas, (0.5,))["0.5"].values()) == {1.0}


def test_they_are_stored_with_the_gates_from_the_half_that_is_fitted():
    gates = GateSet({layer: LinearGate(E=4, H=H) for layer, (H, _) in SIZES.items()})
    documents = targets(4)
    looks = [
        {
            layer: LayerLook(own + 0.1, own, torch.arange(own.shape[1]) < own.shape[1] - 3)
            for layer, own in document.items()
        }
        for document in documents
    ]
    settings = CalibrationSettings(kind="none", fusion_weights=False, curve=False)
    record = calibrate_(gates, looks, settings)
    counted = [{layer: own[:, :-3] for layer, own in document.items()} for document in documents[0::2]]
    assert record["quotas"] == fit_quotas(counted) == gates.quotas
    assert set(record["report"]["quotas"]) == {"0.05", "0.1", "0.2", "0.3", "0.5"}
    settings = CalibrationSettings(kind="none", fusion_weights=False, quotas=False)
    assert "quotas" not in calibrate_(gates, looks, settings) and gates.quotas is None

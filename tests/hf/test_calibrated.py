"""Calibrated gates in a cache and in an artifact: curves and thresholds."""

import torch

from retain.gates.artifact import load_gates, save_gates
from retain.hf.cache.cache import Cache
from retain.hf.intercept.observe import observe
from retain.hf.model.identity import fingerprint
from retain.policy import Policy
from retain.train.calibration.fit import calibrate_, look_at
from tests.evictions import policy_of
from tests.hf.regime_runs import FEW, gates_of
from tests.tiny import attached, tiny_batch, tiny_model

RISK = {"observed": "observed_risk", "observed_settings": {"window": 4}}


def policy(**settings) -> Policy:
    return policy_of("own", **{"learned": True, "protection": FEW, **settings})


def held_out(model, gates, documents=4):
    looks = []
    for seed in range(documents):
        look = {}
        for layer in observe(model, *tiny_batch((0,), 80, seed=seed), wanted=gates.inputs):
            target = layer.values_BHTD.double().square().mean(-1)[0] * 1.7
            counted = torch.arange(80) < 72
            look[layer.layer_idx] = look_at(gates, layer, target, counted)
        looks.append(look)
    return looks


def test_calibrated_gates_are_saved_loaded_and_held_to_a_threshold(tmp_path):
    model, gates = attached("qwen3"), gates_of(tiny_model("qwen3")).float()  # as they are read back
    looks = held_out(model, gates)
    record = calibrate_(gates, looks)
    folder = save_gates(
        gates, tmp_path / "gates", fingerprint=fingerprint(model), metadata={"calibration": record}
    )
    back = load_gates(folder)
    assert back.unit == "risk" and back.metadata["calibration"] == record
    assert back.threshold_for(0.33) == gates.threshold_for(0.33)
    for layer in observe(model, *tiny_batch((0, 5), 60)):
        assert torch.equal(gates.score(layer).values_BHT, back.score(layer).values_BHT)
    ids, mask = tiny_batch((0,), 200, seed=9)
    shares = []
    for ratio in (0.2, 0.5, 0.8):
        cache = Cache(model, policy(), gates=back, threshold=back.threshold_for(ratio)).prefill(ids, mask)
        shares.append(cache.entries_held / (3 * 2 * 200))
    assert shares == sorted(shares) and all(
        abs(share - ratio) < 0.15 for share, ratio in zip(shares, (0.2, 0.5, 0.8), strict=True)
    )
    cache = Cache(model, policy(**RISK), gates=back, keep_ratio=0.3).prefill(ids, mask)
    assert cache.report().total.entries_evicted > 0

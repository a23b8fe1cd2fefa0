"""Distillation on a model with latent attention: one gate output a token and layer."""

from pathlib import Path

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.intercept.observe import observe
from retain.train.distill import distill
from tests.tiny import tiny_batch, tiny_model


@pytest.mark.always
def test_a_gate_learns_on_latents_and_is_loaded(make_config, tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path / "model")
    config = make_config(**{"model": str(tmp_path / "model"), "training.steps": 2})
    folder = distill(config)
    retain.attach(model)
    gates = retain.load_gates(folder, model)
    before = retain.new_gates(model, family=gates.family)
    for evidence in observe(model, tiny_batch((0,), 20)[0]):
        score = gates.score(evidence).values_BHT
        assert score.shape == (1, 1, 20) and score.isfinite().all()
        assert not torch.equal(score, before.score(evidence).values_BHT)
    cache = Cache(model, policy="gate", gates=gates, keep_ratio=0.5, protection={"recent": 8})
    assert cache.prefill(tiny_batch((0,))[0]).entries_held == 2 * 20

"""Published gates for a model at hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import retain
from retain.gates.artifact import save_gates
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.models.named_gates import import_gates
from tests.refused import refused
from tests.tiny import tiny_model


def kvzap(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """A KVzap-Linear release for this model."""
    state: dict[str, Tensor] = {}
    for spec in describe(model):
        state[f"layers.{spec.layer_idx}.weight"] = torch.randn(spec.num_kv_heads, spec.hidden_size)
        state[f"layers.{spec.layer_idx}.bias"] = torch.randn(spec.num_kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "kvzap", "hidden_dim": None}))
    return state


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


def assert_is_kvzap(gates, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Gates score what KVzap computes of its attention inputs."""
    assert gates.metadata["published"]["kind"] == "kvzap" and gates.unit == "rank"
    for shown in observe(model, torch.randint(1, 90, (1, 12))):
        weight, bias = (state[f"layers.{shown.layer_idx}.{name}"] for name in ("weight", "bias"))
        score = functional.linear(shown.hidden_BTE, weight, bias).transpose(1, 2).exp()
        torch.testing.assert_close(gates.score(shown).values_BHT, score, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
def test_a_release_is_imported_and_kept_for_its_model(end, model, tmp_path) -> None:
    state = kvzap(model, tmp_path / "release")
    if end == ".bin":
        (tmp_path / "release" / "model.safetensors").unlink()
        torch.save(state, tmp_path / "release" / "model.bin")
    gates = import_gates(tmp_path / "release", model)
    assert gates.metadata["published"]["source"] == str(tmp_path / "release")
    assert_is_kvzap(gates, model, state)
    folder = save_gates(gates, tmp_path / "gates", fingerprint=fingerprint(model))
    assert_is_kvzap(retain.load_gates(folder, model), model, state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    refused("trained on another model", retain.load_gates, folder, model)
    refused("is not of this model", import_gates, tmp_path / "release", tiny_model("qwen3"))

"""Published gates for a model at hand: the command line, and what the hub gives."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import retain
from retain.gates.hub import HTTP
from retain.hf.intercept.observe import observe
from retain.hf.model import published
from retain.hf.model.decoder import describe
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


@pytest.fixture
def given(model: nn.Module, tmp_path: Path) -> list[str]:
    """Arguments for a release in `release`."""
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    release, out = str(tmp_path / "release"), str(tmp_path / "gates")
    return ["--from", release, "--model", str(tmp_path / "base"), "--out", out]


def assert_is_kvzap(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    """The artifact loads for the model, and scores what KVzap computes of its attention inputs."""
    gates = retain.load_gates(folder, model)
    assert gates.metadata["published"]["kind"] == "kvzap" and gates.unit == "rank"
    for shown in observe(model, torch.randint(1, 90, (1, 12))):
        weight, bias = (state[f"layers.{shown.layer_idx}.{name}"] for name in ("weight", "bias"))
        score = functional.linear(shown.hidden_BTE, weight, bias).transpose(1, 2).exp()
        torch.testing.assert_close(gates.score(shown).values_BHT, score, rtol=1e-5, atol=1e-6)


def test_the_command_line(model, given, tmp_path, capsys) -> None:
    state = kvzap(model, tmp_path / "release")
    assert published.main([*given, "--kind", "kvzap"]) == 0
    assert "kvzap, as linear, 2 layers" in capsys.readouterr().out
    assert_is_kvzap(tmp_path / "gates", model, state)
    record = json.loads((tmp_path / "gates" / "gates.json").read_text())
    assert record["published"]["source"] == given[1] and record["base_model"] == given[3]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    refused("trained on another model", retain.load_gates, tmp_path / "gates", model)


def test_errors_of_the_command_line(given, tmp_path, capsys) -> None:
    kvzap(tiny_model("qwen3"), tmp_path / "release")
    assert published.main(given) == 1
    assert "error: " in (said := capsys.readouterr().err) and "is not of this model" in said
    assert not (tmp_path / "gates").exists()


def test_a_pickled_release_is_imported(model, given, tmp_path) -> None:
    state = kvzap(model, tmp_path / "release")
    (tmp_path / "release" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "release" / "model.bin")
    assert published.main(given) == 0
    assert_is_kvzap(tmp_path / "gates", model, state)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_gates_from_the_hub(name: str, model: nn.Module, tmp_path: Path, monkeypatch) -> None:
    """Safetensors are fetched where there are any, else pickles."""
    state, asked = kvzap(model, tmp_path), []
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    if name.endswith(".pth"):
        torch.save(state, tmp_path / name)

    def fetch(hub_id: str, allow_patterns: Sequence[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("retain.gates.hub.snapshot_download", fetch)
    assert published.published_gates("some/gates", model).layers == (0, 1)
    assert asked[0] == ["config.json", "*.safetensors"] and len(asked) == 1 + name.endswith(".pth")


FAILURES = [HTTP.ReadTimeout("slow"), HTTP.RemoteProtocolError("cut"), ConnectionError("y")]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("which", ["published", "artifact"])
def test_a_connection_that_fails_in_any_way(which: str, failure: Exception, model, monkeypatch) -> None:
    """Errors of the hub's HTTP client are no OSError."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("retain.gates.hub.snapshot_download", fail)
    load = published.published_gates if which == "published" else retain.load_gates
    refused(f"could not be fetched .{type(failure).__name__}: ", load, "some/gates", model)

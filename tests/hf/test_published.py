"""Published gates for a model at hand: the command line, and what the hub gives."""

import json
import subprocess
import sys
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
from tests.launch import ROOT
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
    with pytest.raises(SystemExit):
        published.main([*given[:2], *given[4:]])
    assert "--from needs --model" in capsys.readouterr().err and not (tmp_path / "gates").exists()


def test_a_pickle_is_converted_by_the_command_that_the_error_names(model, given, tmp_path, capsys) -> None:
    state = kvzap(model, tmp_path / "release")
    (tmp_path / "release" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "release" / "model.bin")
    assert published.main(given) == 1
    said = capsys.readouterr().err
    command = [sys.executable, *said[said.index("`python ") + 1 : said.index("`,")].split()[1:]]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert run.returncode == 0 and "wrote " in run.stdout, run.stderr
    assert published.main(given) == 0
    assert_is_kvzap(tmp_path / "gates", model, state)


class Hub:
    """A repository that was fetched before: what is asked of it is noted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.fetched: list[str] = []

    def list_repo_files(self, hub_id: str, revision: str | None = None) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def fetch(self, hub_id: str, revision: str | None = None, allow_patterns: Sequence[str] = ()) -> str:
        self.fetched += allow_patterns
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(published, "HfApi", lambda: hub)
    monkeypatch.setattr(published, "snapshot_download", hub.fetch)
    return hub


def test_gates_from_the_hub(model: nn.Module, hub: Hub) -> None:
    kvzap(model, hub.folder)
    gates = published.published_gates("some/gates", model)
    assert gates.layers == (0, 1) and hub.fetched == ["config.json", "model.safetensors"]


def test_pickles_on_the_hub_are_refused_before_they_are_fetched(model: nn.Module, hub: Hub) -> None:
    def refuses(said: str) -> None:
        refused(said, published.published_gates, "some/gates", model)

    (hub.folder / "trimkv_weights.pth").write_bytes(b"pickle")
    refuses("was released as pickles .trimkv_weights.pth.*--convert FOLDER/trim")
    others = [hub.folder / f"model{number}.pth" for number in range(6)]
    for path in others:
        path.write_bytes(b"pickle")
    refuses("model5.pth, trimkv_.*hf download some/gates FILE .*--convert FOLDER/FILE --out FOLDER/g")
    for path in (*others, hub.folder / "trimkv_weights.pth"):
        path.unlink()
    refuses("has no safetensors with gates")
    assert hub.fetched == []


FAILURES = [HTTP.ReadTimeout("slow"), HTTP.RemoteProtocolError("cut"), ConnectionError("y")]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("which", ["published", "artifact"])
def test_a_connection_that_fails_in_any_way(which: str, failure: Exception, model, monkeypatch) -> None:
    """Errors of the hub's HTTP client are no OSError."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(published.HfApi, "list_repo_files", fail)
    monkeypatch.setattr("retain.gates.hub.snapshot_download", fail)
    load = published.published_gates if which == "published" else retain.load_gates
    refused(f"could not be fetched .{type(failure).__name__}: ", load, "some/gates", model)

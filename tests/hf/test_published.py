"""Published gates for a model at hand: the command line, and what the hub gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import retain
from retain.hf.intercept.observe import observe
from retain.hf.model import published
from retain.hf.model.decoder import describe
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
def base(model: nn.Module, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    return tmp_path / "base"


def assert_is_kvzap(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    """The artifact loads for the model, and scores what KVzap computes of its attention inputs."""
    gates = retain.load_gates(folder, model)
    assert gates.metadata["published"]["kind"] == "kvzap" and gates.unit == "rank"
    for shown in observe(model, torch.randint(1, 90, (1, 12))):
        layer = shown.layer_idx
        score = functional.linear(
            shown.hidden_BTE, state[f"layers.{layer}.weight"], state[f"layers.{layer}.bias"]
        )
        torch.testing.assert_close(
            gates.score(shown).values_BHT, score.transpose(1, 2).exp(), rtol=1e-5, atol=1e-6
        )


def test_the_command_line(
    model: nn.Module, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = kvzap(model, tmp_path / "release")
    given = ["--kind", "kvzap", "--from", str(tmp_path / "release"), "--model", str(base)]
    assert published.main([*given, "--out", str(tmp_path / "gates")]) == 0
    assert "kvzap, as linear, 2 layers" in capsys.readouterr().out
    assert_is_kvzap(tmp_path / "gates", model, state)
    record = json.loads((tmp_path / "gates" / "gates.json").read_text())
    assert record["published"]["source"] == str(tmp_path / "release") and record["base_model"] == str(base)


def test_gates_made_of_a_release_are_refused_by_another_model(
    model: nn.Module, base: Path, tmp_path: Path
) -> None:
    kvzap(model, tmp_path / "release")
    given = ["--from", str(tmp_path / "release"), "--model", str(base), "--out", str(tmp_path / "gates")]
    assert published.main(given) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with pytest.raises(ValueError, match="trained on another model"):
        retain.load_gates(tmp_path / "gates", model)


def test_errors_of_the_command_line(
    model: nn.Module, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvzap(tiny_model("qwen3"), tmp_path / "other")
    out = ["--model", str(base), "--out", str(tmp_path / "gates")]
    assert published.main(["--from", str(tmp_path / "other"), *out]) == 1
    assert "error: " in (said := capsys.readouterr().err) and "is not of this model" in said
    assert published.main(["--from", "no/such-gates", *out]) == 1
    assert "there are no published gates at 'no/such-gates'" in capsys.readouterr().err
    assert not (tmp_path / "gates").exists()
    with pytest.raises(SystemExit):
        published.main(["--from", str(tmp_path / "other"), "--out", "x"])
    assert "--from needs --model" in capsys.readouterr().err


def test_a_pickle_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.pt")
    monkeypatch.setattr(published, "load_named_model", lambda name: pytest.fail("it was loaded"))
    given = ["--from", str(tmp_path / "weights.pt"), "--model", "no/model", "--out", str(tmp_path / "out")]
    assert published.main(given) == 1
    assert "weights.pt is a pickle, which is a program" in capsys.readouterr().err


def test_a_pickle_is_converted_by_the_command_that_the_error_names(
    model: nn.Module, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = kvzap(model, tmp_path / "release")
    (tmp_path / "release" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "release" / "model.bin")
    given = ["--from", str(tmp_path / "release"), "--model", str(base), "--out", str(tmp_path / "gates")]
    assert published.main(given) == 1
    said = capsys.readouterr().err
    command = said[said.index("`python ") + 1 : said.index("`,")].split()
    run = subprocess.run(
        [sys.executable, *command[1:]],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=180,
    )
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

    def fetch(self, hub_id: str, name: str, revision: str | None = None) -> str:
        self.fetched.append(name)
        return str(self.folder / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(published, "HfApi", lambda: hub)
    monkeypatch.setattr(published, "hf_hub_download", hub.fetch)
    return hub


def test_gates_from_the_hub(model: nn.Module, hub: Hub) -> None:
    kvzap(model, hub.folder)
    gates = published.published_gates("some/gates", model)
    assert gates.layers == (0, 1) and hub.fetched == ["model.safetensors", "config.json"]


def test_of_a_whole_model_on_the_hub_only_files_with_gates_are_fetched(model: nn.Module, hub: Hub) -> None:
    spec = describe(model)[0]
    wide = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    state = {}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn."
        state[f"{prefix}fc1.weight"] = torch.randn(5, wide)
        state[f"{prefix}fc2.weight"] = torch.randn(spec.num_kv_heads, 5)
    save_file(state, hub.folder / "model-00002-of-00002.safetensors")
    save_file({"lm_head.weight": torch.randn(3, 3)}, hub.folder / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(state, "model-00002-of-00002.safetensors")
    weight_map["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (hub.folder / published.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    gates = published.published_gates("some/model", model)
    assert gates.family == "qkv"
    assert hub.fetched == [published.INDEX_FILE, "model-00002-of-00002.safetensors"]


def test_pickles_on_the_hub_are_refused_before_they_are_fetched(model: nn.Module, hub: Hub) -> None:
    (hub.folder / "trimkv_weights.pth").write_bytes(b"pickle")
    with pytest.raises(
        ValueError, match="was released as pickles .trimkv_weights.pth.*--convert FOLDER/trim"
    ):
        published.published_gates("some/gates", model)
    for number in range(6):
        (hub.folder / f"model{number}.pth").write_bytes(b"pickle")
    wanted = (
        "model5.pth, trimkv_weights.pth.*hf download some/gates FILE .*--convert FOLDER/FILE --out FOLDER/g"
    )
    with pytest.raises(ValueError, match=wanted):
        published.published_gates("some/gates", model)
    for number in range(6):
        (hub.folder / f"model{number}.pth").unlink()
    (hub.folder / "trimkv_weights.pth").rename(hub.folder / "README.md")
    with pytest.raises(ValueError, match="has no safetensors with gates"):
        published.published_gates("some/gates", model)
    assert hub.fetched == []


def test_a_hub_that_cannot_be_reached(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> list[str]:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(published.HfApi, "list_repo_files", away)
    with pytest.raises(ValueError, match="could not be fetched .ConnectionError: Name or service not known"):
        published.published_gates("some/gates", model)


@pytest.mark.parametrize(
    "failure", [httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut"), TimeoutError("x")]
)
@pytest.mark.parametrize("which", ["published", "artifact"])
def test_a_connection_that_fails_in_any_way(
    which: str, failure: Exception, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of httpx are no OSError."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(published.HfApi, "list_repo_files", fail)
    monkeypatch.setattr("retain.hf.model.gates.snapshot_download", fail)
    load = published.published_gates if which == "published" else retain.load_gates
    with pytest.raises(ValueError, match=f"could not be fetched .{type(failure).__name__}: "):
        load("some/gates", model)


def test_a_port_where_nobody_listens() -> None:
    """As a machine without a way to the hub sees it; in a process of its own, which may ask."""
    code = """
import torch, retain
from retain.hf.model.published import published_gates
for load in (published_gates, retain.load_gates):
    try:
        load("some/gates", torch.nn.Linear(1, 1))
    except ValueError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert len(said) == 2 and "there are no published gates at 'some/gates'" in said[0]
    assert "could not be fetched (ConnectError" in said[0] and "there are no gates at 'some/gates'" in said[1]

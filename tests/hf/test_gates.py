"""Gates come from a folder or the hub, and only onto the model that they were trained on."""

from pathlib import Path

import pytest

import retain
from retain.gates import build_gates
from retain.gates.store import save_gates
from retain.hf.model import describe, fingerprint
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3", seed=0)
    layers = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads} for spec in describe(model)}
    folder = tmp_path_factory.mktemp("gates")
    return save_gates(build_gates("linear", layers), folder, fingerprint=fingerprint(model))


def test_gates_load_onto_their_model_and_without_one(artifact: Path) -> None:
    model = tiny_model("qwen3", seed=0)
    assert list(retain.load_gates(artifact, model).layers) == [0, 1, 2]
    assert retain.load_gates(str(artifact)).family == "linear"


def test_gates_of_another_model_are_refused(artifact: Path) -> None:
    with pytest.raises(ValueError, match="were trained on another model"):
        retain.load_gates(artifact, tiny_model("qwen3", seed=1))


def test_a_folder_without_gates_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a gate artifact"):
        retain.load_gates(tmp_path)


@pytest.mark.parametrize("name", ["runs/nothing-here", "three/parts/deep", "/nowhere/at/all"])
def test_neither_a_folder_nor_a_repository(name: str) -> None:
    with pytest.raises(ValueError, match=f"there are no gates at '{name}': it is no folder here"):
        retain.load_gates(name)


def test_a_hub_id_fetches_the_two_files_alone(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo_id: str, **settings: object) -> str:
        asked.update(settings, repo_id=repo_id)
        return str(artifact)

    monkeypatch.setattr("retain.hf.gates.snapshot_download", download)
    assert retain.load_gates("someone/gates").family == "linear"
    assert asked["repo_id"] == "someone/gates"
    assert asked["allow_patterns"] == ["gates.json", "gates.safetensors"]

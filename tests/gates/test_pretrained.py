"""Gates saved and read by huggingface_hub's mixin, with a card."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi

import retain
from retain.gates import GateSet, build_gates, hub
from retain.gates.artifact import save_gates
from tests.refused import refusal


@pytest.fixture
def gates(tmp_path: Path) -> GateSet:
    made = build_gates("mlp", {0: {"E": 6, "H": 2}})
    torch.nn.init.normal_(made[0].out.weight)
    metadata = {"base_model": "owner/tiny", "license": "mit", "target": {"horizon": 8}}
    fingerprint = {"model_type": "llama", "sha256": "abc"}
    return retain.load_gates(save_gates(made, tmp_path / "made", fingerprint=fingerprint, metadata=metadata))


def test_saved_gates_are_the_same_gates_with_a_card(gates: GateSet, tmp_path: Path) -> None:
    gates.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        *("gates.json", "gates.safetensors", "README.md")
    }
    back = GateSet.from_pretrained(tmp_path / "saved")
    assert back.metadata == gates.metadata
    assert all(torch.equal(back.state_dict()[name], one) for name, one in gates.state_dict().items())
    back.metadata["license"] = "apache-2.0"
    back.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "Licence: `apache-2.0`" in card and "`mit`" not in card, "the card of the gates beside it"
    with refusal("do not say which model they belong to"):
        build_gates("mlp", {0: {"E": 6, "H": 2}}).save_pretrained(tmp_path / "other")


def test_the_arguments_of_the_mixin_go_to_the_hub(gates: GateSet, tmp_path: Path, monkeypatch: Any) -> None:
    commit = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    gates.save_pretrained(commit)
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "v1").write_text(commit.name)
    where = {"revision": "v1", "cache_dir": tmp_path / "cache", "local_files_only": True}
    assert GateSet.from_pretrained("owner/name", **where).metadata == gates.metadata
    with refusal("local_files_only asks no hub"):
        GateSet.from_pretrained("owner/name", cache_dir=tmp_path / "empty", local_files_only=True)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda _, **how: asked.update(how) or commit)
    GateSet.from_pretrained("owner/name", force_download=True, token="mine")
    assert asked["force_download"] and asked["token"] == "mine" and not asked["local_files_only"]


def test_pushed_gates_have_a_card_that_loads_them(
    gates: GateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, Any] = {}

    def create_repo(api: HfApi, repo_id: str, **how: Any) -> Any:
        pushed.update(how)
        return type("Url", (), {"repo_id": repo_id})

    def upload_folder(api: HfApi, *, folder_path: Path, **how: Any) -> str:
        pushed.update(how, files={path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        return "address"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert gates.push_to_hub("owner/name", branch="dev", private=True, commit_message="first") == "address"
    assert pushed["private"] and pushed["revision"] == "dev" and pushed["commit_message"] == "first"
    assert {*pushed["files"]} == {"gates.json", "gates.safetensors", "README.md"}
    card = pushed["files"]["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    wanted = {"library_name": "retain", "base_model": "owner/tiny", "license": "mit"}
    assert wanted.items() <= front.items() and "gate-mlp" in front["tags"]
    for line in (
        "retain.load_gates('owner/name@dev', model)",
        "| `target.horizon` | `8` |",
        "Licence: `mit`",
    ):
        assert line in card
    gates.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="owner/other")
    assert "retain.load_gates('owner/other', model)" in pushed["files"]["README.md"].decode()

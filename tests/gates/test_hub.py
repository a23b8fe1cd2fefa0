"""Gates on the hub: pushed with a card, found again at a branch or a commit, refused with a reason.

A folder stands in for the hub, behind the three calls of huggingface_hub that its mixin and `fetch` make.
"""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from torch import nn

import retain
from retain.gates import GateSet, build_gates, hub
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from tests.launch import ROOT
from tests.refused import refused
from tests.tiny import tiny_model


class Hub:
    """Repositories, each with its commits by revision; `asked` has the settings of the last call."""

    def __init__(self, folder: Path):
        self.folder, self.asked = folder, dict[str, Any]()
        self.commits: dict[str, dict[str, Path]] = {}

    def create_repo(self, repo_id: str, **how: Any) -> Any:
        self.asked = how
        self.commits.setdefault(repo_id, {})
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, revision: str | None = None, **how: Any
    ) -> str:
        self.asked |= how
        sha = f"{len(list(self.folder.iterdir())):040x}"
        commit = Path(shutil.copytree(folder_path, self.folder / sha))
        self.commits[repo_id] |= {revision or "main": commit, sha: commit}
        return f"https://huggingface.co/{repo_id}/commit/{sha}"

    def download(self, repo_id: str, revision: str | None = None, **how: Any) -> str:
        self.asked = how
        response: Any = SimpleNamespace(headers={}, request=None)
        if how.get("local_files_only"):
            raise LocalEntryNotFoundError("nothing here")
        if repo_id not in self.commits:
            raise RepositoryNotFoundError("not found", response=response)
        if (revision or "main") not in self.commits[repo_id]:
            raise RevisionNotFoundError("not found", response=response)
        return str(self.commits[repo_id][revision or "main"])


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub").mkdir()
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(HfApi, "create_repo", lambda _, repo_id, **how: made.create_repo(repo_id, **how))
    monkeypatch.setattr(HfApi, "upload_folder", lambda _, **how: made.upload_folder(**how))
    monkeypatch.setattr(hub, "snapshot_download", made.download)
    return made


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture
def gates(model: nn.Module, tmp_path: Path) -> GateSet:
    metadata = {"base_model": "owner/tiny", "license": "mit", "target": {"horizon": 8}}
    print_ = fingerprint(model)
    made = save_gates(retain.new_gates(model), tmp_path / "made", fingerprint=print_, metadata=metadata)
    return retain.load_gates(made)


def same(one: GateSet, other: GateSet) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_pushed_gates_are_the_same_gates_with_a_card(online: Hub, model: nn.Module, gates: GateSet) -> None:
    address = gates.push_to_hub("owner/name", private=True, commit_message="first")
    assert online.asked["private"] and online.asked["commit_message"] == "first"
    assert same(retain.load_gates("owner/name", model), gates)
    first = address.rpartition("/")[2]
    files = online.commits["owner/name"]["main"]
    assert {path.name for path in files.iterdir()} == {"gates.json", "gates.safetensors", "README.md"}
    card = (files / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    wanted = {"library_name": "retain", "base_model": "owner/tiny", "license": "mit"}
    assert wanted.items() <= front.items() and "gate-mlp" in front["tags"]
    for line in ("retain.load_gates('owner/name', model)", "| `target.horizon` | `8` |", "Licence: `mit`"):
        assert line in card, line
    # A branch moves, a commit stays.
    other = retain.load_gates("owner/name")
    other.gates["0"].out.bias.add_(1.0)
    other.push_to_hub("owner/name")
    assert same(retain.load_gates("owner/name@main", model), other) and not same(other, gates)
    assert same(retain.load_gates(f"owner/name@{first}"), gates)
    assert same(GateSet.from_pretrained("owner/name", revision=first, token="mine"), gates)
    assert online.asked["token"] == "mine" and online.asked["allow_patterns"] == [
        *("gates.json", "gates.safetensors")
    ]


def test_gates_that_cannot_be_had_are_refused(online: Hub, gates: GateSet, tmp_path: Path) -> None:
    gates.push_to_hub("owner/name", branch="dev")
    assert (
        "retain.load_gates('owner/name@dev', model)"
        in (online.commits["owner/name"]["dev"] / "README.md").read_text()
    )
    said = r"could not be fetched \(Re\w+NotFoundError: .*private or gated.*hf auth login"
    refused(said, retain.load_gates, "owner/none")
    refused(said, retain.load_gates, "owner/name@none")
    refused("name a revision, and revision='dev' another", retain.load_gates, "owner/name@a", revision="dev")
    refused(
        "LocalEntryNotFoundError: .*HF_HUB_OFFLINE",
        GateSet.from_pretrained,
        "owner/name",
        local_files_only=True,
    )
    online.commits["owner/model"] = {"main": tmp_path}
    refused("is not a gate artifact: it has no gates.json", retain.load_gates, "owner/model")
    fresh = build_gates("mlp", {0: {"E": 6, "H": 2}})
    refused("do not say which model they belong to", fresh.save_pretrained, tmp_path / "other")


def test_the_page_of_the_hub_runs(online: Hub, model: nn.Module, gates: GateSet, tmp_path: Path) -> None:
    """The blocks of docs/hub.md."""
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    scope: dict[str, Any] = {
        "name": str(tmp_path / "model"),
        "folder": tmp_path / "made",
        "mine": "owner/mine",
    }
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), flags=re.DOTALL):
        exec(block, scope)
    assert online.commits.keys() == {"owner/mine"}
    assert same(scope["pinned"], scope["gates"]) and same(scope["newest"], scope["gates"])
    assert scope["cache"].prefill(torch.arange(300)[None] % 90).report().total.entries_evicted > 0

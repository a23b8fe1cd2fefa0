"""Gates, models and data sets go through a hub: real clients, against a server that speaks its protocol."""

import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

import retain
from retain.models.named import load
from tests.hub.client import same
from tests.hub.server import Hub
from tests.refused import refused

LOG_IN = "log in with `hf auth login` (or set HF_TOKEN"
ALL_TEXTS = [f"Text {number}." for number in range(40)]


def test_pushed_gates_are_the_same_gates(online: dict[str, Any], hub: Hub) -> None:
    found, pushed = online["pushed_gates"], hub.repositories["models", "owner/pushed"]
    assert pushed.private and found["same"] and found["license"] == "apache-2.0"
    assert found["address"].endswith(f"/owner/pushed/commit/{pushed.branches['main']}")
    commit = pushed.commits[pushed.branches["main"]]
    assert {*commit.files} == {"gates.json", "gates.safetensors", "README.md"} and commit.title == "first"
    text = commit.files["README.md"].data.decode()
    front = yaml.safe_load(text.split("---\n")[1])
    wanted = {"library_name": "retain", "base_model": "owner/tiny", "license": "apache-2.0"}
    assert wanted.items() <= front.items() and "retain.load_gates('owner/pushed', model)" in text


def test_a_branch_is_followed_and_a_commit_stays(online: dict[str, Any]) -> None:
    found = online["moved_gates"]
    assert found["first"] and found["new"] and found["old"]


def test_gates_that_are_not_there_are_refused(online: dict[str, Any]) -> None:
    said = online["absent_gates"]
    assert "It does not exist, or it is private or gated" in said["missing"] and LOG_IN in said["missing"]
    assert "has no such branch, tag or commit" in said["revision"]
    assert "is not a gate artifact: it has no gates.json" in said["file"]
    assert "name a revision, and revision='dev' another way" in said["twice"]


def test_the_page_of_the_hub_runs(online: dict[str, Any], hub: Hub) -> None:
    found = online["documented"]
    assert hub.repositories["models", "owner/documented"].private
    assert found["same"] and found["evicted"] > 0


def test_a_model_by_name_is_attached_and_generates(online: dict[str, Any], hub: Hub) -> None:
    assert online["model"]["new"] == 4 and 0.15 < online["model"]["held"] < 0.25
    assert online["model"]["commit"] == hub.repositories["models", "owner/tiny"].branches["main"]


def test_streams_are_read_whole_and_go_on_from_a_state(online: dict[str, Any]) -> None:
    assert online["streams"] == {"lines": ALL_TEXTS, "pages": ALL_TEXTS}


def test_a_stream_stays_at_its_commit(online: dict[str, Any]) -> None:
    found = online["moved_stream"]
    assert found["resumed"] == ["Text", "3."] and found["new"] == "quite another text"
    assert all(found[name] for name in ("second pass", "resumed commit", "new commit", "pinned"))


def test_tasks_read_their_data_sets(online: dict[str, Any]) -> None:
    assert online["rows"] == {"ruler": [4, ["2"]], "trec": [3, ["north"]]}


def test_what_is_private_is_said_to_be_so_and_read_with_a_token(online: dict[str, Any]) -> None:
    without, found = online["hidden"]["without"], online["hidden"]["with"]
    assert {*without} == {"gates", "model", "stream", "rows"}
    for name, said in without.items():
        assert said.startswith("ValueError: ") and "private" in said and "hf auth login" in said, name
    assert found.pop("gates").endswith("it resumes.")  # it is read, and holds a model
    assert "has no column 'context'" in found.pop("rows")  # it is read, and holds texts
    assert {*found.values()} == {"no error"}


def test_without_the_hub_its_cache_is_read(
    online: dict[str, Any], hub_folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which is offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_folder / "home" / "hub"))
    asked = len(hub.log)
    assert same(retain.load_gates("owner/gates"), retain.load_gates(hub_folder / "gates"))
    assert same(retain.load_gates("owner/moved@main"), retain.load_gates(hub_folder / "gates"))
    model, tokenizer = load("owner/tiny")
    assert type(model).__name__ == "LlamaForCausalLM" and tokenizer is not None
    began = time.perf_counter()
    refused("It is not in the hub's cache, and HF_HUB_OFFLINE is set", retain.load_gates, "owner/never")
    refused("model='owner/never' cannot be loaded", load, "owner/never")
    assert time.perf_counter() - began < 2 and len(hub.log) == asked

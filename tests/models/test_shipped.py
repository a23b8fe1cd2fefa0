"""Gates that ship: found by the model's weights, named in the report; what is said where there are none."""

import pytest

import retain
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.models import named_gates as each
from retain.models import shipped
from tests.refused import refusal, refused
from tests.tiny import tiny_batch, tiny_model


@pytest.fixture
def shipping(tmp_path, monkeypatch):
    """A function that ships untrained gates for a model, under a name."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(each, "FOLDER", tmp_path)
    shipped.records.cache_clear()

    def ship(model, name="tiny"):
        gates = retain.new_gates(model, F=4)
        save_gates(gates, tmp_path / name, fingerprint=fingerprint(model), half=True)
        shipped.records.cache_clear()
        return gates

    yield ship
    shipped.records.cache_clear()


def test_a_cache_finds_the_gates_of_its_model_and_says_so(shipping):
    model = tiny_model("qwen3")
    shipping(model)
    ids, mask = tiny_batch((0,), 60)
    with retain.attach(model):
        found = retain.Cache(model, policy="learned", keep_ratio=0.5, short="raise").prefill(ids, mask)
        given = retain.Cache(
            model, policy="learned", keep_ratio=0.5, short="raise", gates=retain.load_gates("tiny", model)
        ).prefill(ids, mask)
    assert found.report().gates == "tiny (they ship with retain)"
    assert "gates: tiny (they ship with retain)" in str(found.report())
    assert found.entries_by_head().equal(given.entries_by_head())


def test_gates_are_used_on_other_weights_only_if_that_is_said(shipping):
    model, other = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    shipping(model)
    refused("needs gates, and none ship", retain.Cache, other, keep_ratio=0.5)
    gates = retain.load_gates("tiny", other, allow_other_weights=True)
    assert retain.Cache(other, "gate", keep_ratio=0.5, gates=gates) is not None
    refused("tiny", retain.load_gates, "tiny", other)


def test_a_model_without_gates_is_told_every_choice():
    model = tiny_model("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-8B"
    with refusal("needs gates, and none ship for Qwen/Qwen3-8B") as caught:
        retain.Cache(model, keep_ratio=0.5)
    said = str(caught.value)
    for part in (
        "import_gates('owner/name', model)",
        "retain train Qwen/Qwen3-8B FILE.jsonl output=gates",
        f"policy={each.TRAINING_FREE_UNKNOWN!r} where the question comes after",
        f"policy={each.TRAINING_FREE_KNOWN!r} where it is read before",
    ):
        assert part in said, part

"""Gates come from a folder or the hub, and only onto the model that they were trained on."""

import dataclasses
from pathlib import Path

import pytest
import torch

import retain
from retain.gates import GATES, build_gates
from retain.gates.artifact import save_gates
from retain.hf.cache.cache import Cache
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3", seed=0)
    layers = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads} for spec in describe(model)}
    folder = tmp_path_factory.mktemp("gates")
    return save_gates(build_gates("linear", layers), folder, fingerprint=fingerprint(model))


def test_gates_are_of_the_model_s_weights_and_sizes(artifact: Path) -> None:
    model, other, third = (tiny_model("qwen3", seed=seed) for seed in range(3))
    assert list(retain.load_gates(artifact, model).layers) == [0, 1, 2]
    how = {"keep_ratio": 0.5}
    for refusing in (retain.load_gates, lambda path, model: Cache(model, "gate", gates=path, **how)):
        refused("trained on another model .sha256 .*allow_other_weights=True", refusing, artifact, other)
    allowed = retain.load_gates(artifact, other, allow_other_weights=True)
    for one in (model, other):
        assert Cache(one, "gate", gates=allowed, **how).state.bound_policy.name == "gate"
    said = "the GateSet given were trained on another model .sha256"
    refused(said, Cache, third, "gate", gates=allowed, **how)
    refused(said, Cache, other, "gate", gates=retain.load_gates(str(artifact)), **how)
    wide = tiny_model("qwen3", hidden_size=64)
    refused("hidden_size 48 -> 64", retain.load_gates, artifact, wide, allow_other_weights=True)
    Cache(model, "gate", gates=retain.new_gates(model, "linear"), **how)
    layers = {0: {"E": 48, "H": 2}, 1: {"E": 48, "H": 3}}
    said = "do not fit Qwen3For.*: layer 1 has .*'E': 48, 'H': 3. in the gates and .'E': 48, 'H': 2. in the"
    refused(said, Cache, model, "gate", gates=build_gates("linear", layers), **how)
    two = build_gates("linear", {layer: {"E": 48, "H": 2} for layer in (0, 1)})
    said = "do not fit .*layer 2 has nothing in the gates and .*'E': 48, 'H': 2"
    refused(said, Cache, model, "gate", gates=two, **how)
    refused("gates are a folder, a hub id or a loaded GateSet; got", Cache, model, "gate", gates=3, **how)


@pytest.mark.parametrize("family", sorted(GATES))
def test_untrained_gates_of_every_family_in_one_call(family: str) -> None:
    ahead = family == "lookahead"
    model = tiny_model("qwen3" if ahead else "qwen3_next")  # two of its four layers evict
    drawn = torch.random.get_rng_state()
    gates = retain.new_gates(model, family, seed=3)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert gates.family == family and gates.metadata == {}
    assert gates.layers == ((0, 1, 2) if ahead else (1, 3))
    same, other = retain.new_gates(model, family, seed=3), retain.new_gates(model, family, seed=4)
    pairs = [list(zip(gates.parameters(), one.parameters(), strict=True)) for one in (same, other)]
    assert all(torch.equal(a, b) for a, b in pairs[0])
    assert not all(torch.equal(a, b) for a, b in pairs[1])
    if gates.unit != "rank":
        Cache(model, "learned", keep_ratio=0.5, gates=gates)


def test_settings_of_untrained_gates_are_the_familys() -> None:
    model = tiny_model("llama")
    assert retain.new_gates(model, F=5)[0].dims()["F"] == 5
    assert len(retain.new_gates(model, "lookahead", num_tokens=3).extension.tokens_SE) == 3
    refused("unknown key 'mlp.hidden'.*F", retain.new_gates, model, hidden=5)
    said = "setting of gate family 'lookahead' is 'num_tokens', .*got 'tokens'"
    refused(said, retain.new_gates, model, "lookahead", tokens=5)
    refused("gate family 'mpl'.*did you mean", retain.new_gates, model, "mpl")


def test_each_gate_follows_its_layer() -> None:
    model = tiny_model("qwen3")
    gates = build_gates("linear", {layer: {"E": 48, "H": 2} for layer in range(3)})
    layers = observe(model, *tiny_batch((0, 3)))
    tensors = {name: value for name, value in vars(layers[1]).items() if isinstance(value, torch.Tensor)}
    meta = dataclasses.replace(layers[1], **{name: value.to("meta") for name, value in tensors.items()})
    with torch.inference_mode():
        assert gates.score(meta).values_BHT.device.type == "meta"
        assert gates.score(layers[0]).values_BHT.device.type == "cpu"
    assert [next(gates[layer].parameters()).device.type for layer in range(3)] == ["cpu", "meta", "cpu"]
    assert not any(parameter.is_inference() for parameter in gates.parameters())

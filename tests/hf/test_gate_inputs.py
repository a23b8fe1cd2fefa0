"""Gates that look at more than the attention input, or whose score ages: what a cache shows them, in every
regime, and what is refused before anything is read."""

import pytest
import torch

import retain
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import base_model
from retain.policy import Policy
from retain.scores import Score
from tests.evictions import policy_of
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import FEW, agree, exact_model, life
from tests.refused import refused
from tests.tiny import FAMILIES, tiny_batch, tiny_model


def policy(name: str = "made", observed: str | None = None, **settings) -> Policy:
    return policy_of(name, observed, **{"learned": True, "protection": FEW, **settings})


def gates_of(model, family: str, settings=None, *, dtype=torch.float64) -> GateSet:
    """Random gates of a family, whose scores differ enough to matter; float64, so that a token that comes
    twice has one score wherever in a product it stands, on every CPU."""
    gates = retain.new_gates(model, family, **(settings or {})).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for parameter in gates.parameters():
        spread = 0.5 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * spread)
    return gates


class NaiveAges(Naive):
    """Scores of a gate that ages, entry by entry: what is left of it after each of the tokens since."""

    def _score(self, layer, seeds):
        gate = self.gates[layer.layer_idx]
        mean, scale = gate.input_mean_E.double(), gate.input_scale_E.double()
        up, out = gate.up, gate.out
        values = torch.full(layer.exists_BHT.shape, float("-inf"))
        newest = layer.num_seen - 1
        for i in range(layer.num_seen):
            x = (layer.hidden_BTE[0, i] - mean) / scale
            inner = up.weight.double() @ x + up.bias.double()
            logit = out.weight.double() @ (inner * torch.sigmoid(inner)) + out.bias.double()
            log_beta = -torch.log1p(torch.exp(-logit))
            for h in range(layer.num_heads):
                if layer.exists_BHT[0, h, i]:
                    values[0, h, i] = sum(float(log_beta[h]) for _ in range(newest - i))
        return Score(values, "rank")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_what_the_layer_norm_reads(family):
    model = tiny_model(family)
    ids, mask = tiny_batch((0, 9))
    assert all(layer.stream_BTE is None for layer in observe(model, ids, mask))
    shown = observe(model, ids, mask, wanted=("hidden", "stream"))
    layers, real = base_model(model).layers, mask.bool()
    for layer in shown:
        if family == "olmo2":  # which has its norms behind attention, not before it
            assert torch.equal(layer.stream_BTE, layer.hidden_BTE)
            continue
        stream_BTE, norm = layer.stream_BTE, layers[layer.layer_idx].input_layernorm
        assert torch.equal(norm(stream_BTE)[real], layer.hidden_BTE[real])
    assert torch.equal(shown[-1].stream_BTE, shown[-1].hidden_BTE) is (family == "olmo2")
    if shown[0].layer_idx == 0 and family not in ("gemma3", "granite"):  # these multiply the embeddings
        assert torch.equal(shown[0].stream_BTE[real], model.get_input_embeddings()(ids)[real])


INPUTS = {
    "stream": ("dms", {}),
    "keys before and after": ("admission", {}),
    "queries before": ("qkv", {"F": 24}),
    "queries after": ("qkv", {"F": 24, "rope": "after"}),
    "hidden, mass": ("lowrank", {}),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("when", ["decode", "chunk+decode"])
def test_entries_are_scored_when_they_come_by_whatever_gates_look_at(name, when):
    model = exact_model()
    agree(model, policy(), life(3), gates=gates_of(model, *INPUTS[name]), when=when, tokens_per_head=12)


KINDS = [
    (family, name)
    for family in ("llama", "gemma3", "gpt_oss", "qwen3_next", "phi3")
    for name in ("stream", "queries before")
    if (family, name) != ("gpt_oss", "queries before")  # refused below
]


@pytest.mark.parametrize(("family", "name"), KINDS)
def test_in_every_kind_of_model(family, name):
    model = exact_model(family)
    agree(model, policy(), life(3), gates=gates_of(model, *INPUTS[name]), tokens_per_head=11)


def test_a_blend_with_a_score_that_reads_queries_too():
    model = exact_model()
    window = {"observed_settings": {"window": 4}, "fusion": "rank_blend", "scope": "layer"}
    blend = policy("blend", "observed_risk", **window)
    agree(model, blend, life(3), gates=gates_of(model, "qkv", {"F": 8}), tokens_per_head=12)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_what_ages_is_scored_at_the_time_of_each_eviction(scope):
    model = exact_model()
    given = {"gates": gates_of(model, "decay", {"F": 16}), "naive": NaiveAges}
    agree(model, policy(scope=scope), life(3), **given, keep_ratio=0.3)
    agree(model, policy(scope=scope), life(3), **given, when="decode", tokens_per_head=9)


def test_units_that_do_not_fit_are_refused_when_the_cache_is_made():
    model = tiny_model("llama")
    mass, rank = gates_of(model, "lowrank"), gates_of(model, "decay", {"F": 8})
    both = {"observed": "observed_risk", "observed_settings": {"window": 4}}
    by_value, half = policy(scope="layer", allocation={"layers": "entropy"}), {"keep_ratio": 0.5}
    max_wants = "fusion 'max' wants a gate in 'risk', and these gates are in"
    for said, made, gates, budget in (
        (f"{max_wants} 'mass': calibrate", policy(**both), mass, half),
        ("allocation.layers 'entropy' wants numbers, and the score is in 'rank'", by_value, rank, half),
        ("in 'rank', of which only the order", policy(**both, fusion="rank_blend"), mass, {"threshold": 0.1}),
    ):
        refused(said, Cache, model, made, gates=gates, **budget)
    with retain.attach(model):  # what its paper does: a threshold on the gate's number
        made = Cache(model, policy(), gates=gates_of(model, "admission"), threshold=-0.7)
        assert made.prefill(*tiny_batch((0,), 60)).report().total.entries_evicted > 0


def test_gates_that_do_not_fit_the_model_are_refused(monkeypatch):
    model, wide = tiny_model("gpt_oss"), tiny_model("gpt_oss", head_dim=16)
    said = "'Q': 4, 'D': 16. in the gates and .*'H': 2, 'Q': 4, 'D': 8. in the model"
    refused(said, Cache, model, policy(), gates=gates_of(wide, "qkv", {"F": 8}), keep_ratio=0.5)
    # What is before RoPE needs a rotation that is understood.
    monkeypatch.setattr("retain.hf.cache.bound_policy.rotary_of", lambda model: None)
    said = "a model whose rotary embedding is not understood: they look at queries or keys before"
    refused(said, Cache, model, policy(), gates=gates_of(model, "qkv", {"F": 8}), keep_ratio=0.5)
    Cache(model, policy(), gates=gates_of(model, "qkv", {"F": 8, "rope": "after"}), keep_ratio=0.5)

"""The lookahead pass: what it scores is what `[prompt; lookahead tokens]` would, and nothing else changes."""

import pytest
import torch

import retain
from retain.gates import GateSet, inputs_of
from retain.hf.cache.bound_policy import bind_policy
from retain.hf.cache.cache import Cache
from retain.hf.intercept.lookahead_pass import look_ahead, lookahead_gates
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.behind import paid_behind
from tests.hf.test_attach import everything_about
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

NUM_TOKENS = 5
# Family -> padding of the batch and its width.
BATCHES = {"llama": ((0, 7), 40), "qwen3": ((3, 0), 40), "phi3": ((0, 7), 40), "mixtral": ((0, 7), 40)}
PROTECTION = {
    "protection": {"sinks": 1, "recent": 2, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "minimum": 0}
}

# Policy -> what it observes beside the gate: nothing, the last queries, all queries.
OBSERVED = {
    "gate": {},
    "learned": {"observed": "snapkv", "observed_settings": {"window": 4}},
    "h2o": {"observed": "h2o", "learned": True, "fusion": "rank_blend"},
}


def trained(model, **settings) -> GateSet:
    """Gates whose adapters do something, in the model's precision."""
    gates = lookahead_gates(model, num_tokens=NUM_TOKENS, **settings)
    generator = torch.Generator().manual_seed(3)
    for up in gates.extension.up.values():
        up.data = 0.1 * torch.randn(up.shape, generator=generator)
    return gates.to(model.dtype).requires_grad_(False)


def gated(model, gates=None, policy="gate", **settings) -> Cache:
    settings = {"keep_ratio": 0.4, "gates": gates or trained(model), **PROTECTION, **settings}
    return Cache(model, policy, **settings)


@pytest.mark.parametrize("family", BATCHES)
def test_scores_are_those_of_one_forward_with_adapters_by_hand(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    gates, (input_ids, mask) = trained(model), tiny_batch(*BATCHES[family])
    before, evidence = everything_about(model), observe(model, input_ids, mask, ahead=gates)
    assert everything_about(model) == before
    for row, (ids, real) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        with torch.no_grad():
            paid = paid_behind(model, ids[real][None], gates.extension.tokens_SE[None], gates.extension)
        for spec, layer, paid_QT in zip(describe(model), evidence, paid, strict=True):
            score = gates.score(layer)
            wanted_HT = paid_QT.unflatten(0, (spec.num_kv_heads, -1)).mean(1)
            # Norms are computed in float32 inside the models.
            assert_close(score.values_BHT[row, :, real], wanted_HT.float(), ops=MODEL)
            assert score.unit == "mass"


@pytest.mark.parametrize("family", BATCHES)
@pytest.mark.parametrize("policy", OBSERVED)
def test_generate_keeps_what_decide_keeps_and_frees_the_rest(family: str, policy: str) -> None:
    model = tiny_model(family)
    gates, (input_ids, mask) = trained(model), tiny_batch(*BATCHES[family])
    settings = {"gates": gates, "overrides": {**PROTECTION, **OBSERVED[policy]}}
    rule = bind_policy(model, policy, layers=describe(model), budget={"keep_ratio": 0.4}, **settings)
    wanted = rule.decide(observe(model, input_ids, mask, ahead=gates)).finish()
    before, weights = (
        everything_about(model),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    with retain.attach(model):
        cache = gated(model, gates, policy, **OBSERVED[policy]).prefill(input_ids, mask)
        assert all(layer.keys is None and layer.values is None for layer in cache.state.ragged)
        positions_BT = cache.state.positions_BT
        for layer, keep_BHT in zip(cache.state.ragged, wanted, strict=True):
            store = layer.store
            for row in range(len(store.lengths_R)):
                b, h = divmod(row, store.num_heads)
                start, length = int(store.offsets_R1[row]), int(store.lengths_R[row])
                held = store.positions_C[start : start + length]
                assert held.tolist() == positions_BT[b][keep_BHT[b, h]].tolist()
        report = cache.report().total
        assert cache.evictions == 1 and report.bytes_held < 0.45 * report.bytes_full
    assert everything_about(model) == before
    with retain.attach(model):
        other = gated(model, gates, policy, **OBSERVED[policy])
        how = {"attention_mask": mask, CACHE: other, "max_new_tokens": 3, "do_sample": False}
        assert model.generate(input_ids, **how).shape[1] == input_ids.shape[1] + 3
    heads = sum(spec.num_kv_heads for spec in describe(model))
    assert other.report().total.entries_held - report.entries_held == 2 * len(input_ids) * heads
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert list(model.state_dict()) == list(weights)


def test_what_cannot_be_looked_behind_is_refused() -> None:
    model = tiny_model("llama")
    gates, (input_ids, mask) = trained(model), tiny_batch((0,), 40)
    layers = observe(model, input_ids, mask)
    refused("queries of .*lookahead tokens", gates.score, layers[0])
    for family in ("gemma3", "qwen3_next"):
        said = "take models whose layers all evict, and .* has others .(sliding|linear)_attention"
        refused(said, lookahead_gates, tiny_model(family))


def test_what_is_adapted_is_what_matters() -> None:
    model = tiny_model("llama")
    all_of_them = lookahead_gates(model).extension.modules_of
    last = [name.rpartition(".")[2] for name in all_of_them if name.startswith("layers.1")]
    assert last == ["q_proj", "k_proj"]
    assert [name for name in all_of_them if name.startswith("layers.0")] == [
        *(f"layers.0.self_attn.{part}_proj" for part in "qkvo"),
        *(f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
    ]
    fused = lookahead_gates(tiny_model("phi3")).extension.modules_of  # which projections are one module
    assert [name for name in fused if name.startswith("layers.1")] == ["layers.1.self_attn.qkv_proj"]


def test_every_adapted_parameter_is_reached() -> None:
    """Parameters that the score does not depend on would be weights that nobody can train."""
    model = tiny_model("qwen3")
    gates = trained(model).requires_grad_(True)
    layers = observe(model, *(batch := tiny_batch((0, 3))))
    with torch.enable_grad(), retain.attach(model):
        whole = Cache(model, policy=None).prefill(*batch, evict=False).engine.read_only()
        evidence = look_ahead(model, gates, whole, layers)
        scores = [gates[layer.layer_idx](inputs_of(layer, gates[layer.layer_idx])) for layer in evidence]
        sum((score * torch.randn(score.shape[-1])).sum() for score in scores).backward()
    assert all(float(p.grad.abs().max()) > 0 for p in gates.extension.parameters())
    assert all(p.grad is None for p in model.parameters())

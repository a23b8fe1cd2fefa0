import pytest
import torch

import retain
from retain.budget import budget_tokens
from retain.gates import build_gates
from retain.gates.store import save_gates
from retain.hf.cache import Cache
from retain.hf.gates import load_gates
from retain.hf.model import fingerprint
from retain.policy import Policy, load_policy
from retain.protection import Protection
from tests.tiny import tiny_batch, tiny_model

SMALL = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)
SEEDS = (3, 4, 5)


@pytest.fixture
def gates_folder(tmp_path):
    model = tiny_model("qwen3")
    dims = {layer: {"E": 48, "H": 2} for layer in range(3)}
    return save_gates(build_gates("linear", dims), tmp_path / "gates", fingerprint=fingerprint(model))


def settings_of(name, gates_folder):
    policy = load_policy(name)
    return {"gates": str(gates_folder)} if policy.learned else {}


@pytest.mark.parametrize("name", ["random", "recency", "snapkv", "defensive", "h2o", "gate", "fused"])
def test_named_policies_evict_in_generate_exactly_their_budget(name, gates_folder):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 3, 11), 120)
    with retain.attach(model):
        cache = retain.Cache(
            model,
            policy=name,
            keep_ratio=0.5,
            seeds=SEEDS,
            protection=SMALL,
            **settings_of(name, gates_folder),
        )
        output = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
        )
    assert output.shape == (3, 126)
    _, total_B = budget_tokens(retain.budget.Budget(keep_ratio=0.5), mask.bool(), 2, 128)
    assert cache.entries_held == int(total_B.sum()) * 3 + 5 * 3 * 2 * 3
    assert name in str(cache.report())


@pytest.mark.parametrize("name", ["snapkv", "fused"])
def test_one_prefill_serves_many_policies(name, gates_folder):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 3, 11), 120)
    gates = load_gates(gates_folder, model)
    settings = {"keep_ratio": 0.4, "protection": SMALL}
    with retain.attach(model):
        alone = Cache(model, policy=name, gates=gates, **settings).prefill(ids, mask)
        base = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
        fork = base.fork().evict(name, gates=gates, **settings)
    for one, two in zip(alone.layers, fork.layers, strict=True):
        for a, b in zip(one.store.flat(), two.store.flat(), strict=True):
            assert torch.equal(a, b)


def test_bytes_are_split_over_layers_exactly():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0,), 120)
    entry, num_entries = 2 * 16 * 4, 400
    with retain.attach(model):
        cache = Cache(model, policy="snapkv", bytes=num_entries * entry, protection=SMALL).prefill(ids, mask)
    assert cache.bytes_held() == num_entries * entry


def test_full_needs_no_budget_and_a_policy_object_is_taken():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0,), 60)
    with retain.attach(model):
        assert Cache(model, policy="full").prefill(ids, mask).entries_evicted == 0
        mine = Policy(name="mine", observed="recency", protection=SMALL)
        assert Cache(model, policy=mine, tokens_per_head=10).prefill(ids, mask).entries_held == 10 * 2 * 3


def test_requests_that_cannot_be_met(gates_folder):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="policy 'gate' needs gates: pass gates="):
        Cache(model, policy="gate", keep_ratio=0.2)
    with pytest.raises(ValueError, match="stated once"):
        Cache(model, policy="snapkv")
    with pytest.raises(ValueError, match="snapkv"):
        Cache(model, policy="snapk", keep_ratio=0.2)
    with pytest.raises(ValueError, match="protecton .did you mean 'protection'"):
        Cache(model, policy="snapkv", keep_ratio=0.2, protecton=SMALL)
    with pytest.raises(ValueError, match="a name, a path, a Policy or a function"):
        Cache(model, policy=3)
    with pytest.raises(ValueError, match="trained on another model"):
        Cache(tiny_model("qwen3", seed=1), policy="gate", keep_ratio=0.2, gates=str(gates_folder))

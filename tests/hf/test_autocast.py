"""A cache under `torch.autocast`: the model multiplies in half precision, scores and attention do not."""

import pytest
import torch

import retain
from retain.hf.version_names import CACHE
from tests.tiny import attached, tiny_batch

HALF = torch.bfloat16
LEAST = {"prefix_fraction": 0, "suffix_fraction": 0, "minimum": 0, "recent": 8}


def generated(model, cache, autocast):
    ids, mask = tiny_batch((0, 5))
    with torch.autocast("cpu", dtype=autocast):
        return model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("policy", ["snapkv", "criticalkv", "keydiff", "defensivekv"])
def test_autocast_decides_nothing(policy):
    """The same entries of a prompt are kept whether autocast is on at the eviction or not, and a policy never
    sees it on."""
    model, (ids, mask) = attached("llama"), tiny_batch((0, 5))
    kept = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=HALF):
            cache = retain.Cache(model, policy=policy, keep_ratio=0.6, protection=LEAST)
            cache.prefill(ids, mask, evict=False, hold_evidence=True)
        with torch.autocast("cpu", dtype=HALF, enabled=on):
            cache.evict_with(cache.state.bound_policy.decide(cache.evidence).finish())
        kept.append([layer.store.positions_C for layer in cache.layers])
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))

    states = []

    def seen(evidence):
        states.append(torch.is_autocast_enabled("cpu"))
        return torch.ones(evidence.keys_BHTD.shape[:3], dtype=torch.bool)

    generated(model, retain.Cache(model, policy=seen, when="prefill+decode", every=3), HALF)
    assert len(states) > len(model.model.layers) and not any(states)

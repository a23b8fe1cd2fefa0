"""Files of caches in few bits: a cache goes on with what it held."""

import pytest
import torch

from retain.cache.precision import Precision
from retain.hf.cache.cache import Cache
from tests.hf.test_saving import SMALL, assert_same_state, continued, forward, grown, started
from tests.tiny import attached, tiny_batch

SNAPKV = {"policy": "snapkv", "protection": SMALL, "observed_settings": {"window": 4}}
POLICIES = {
    "snapkv": {**SNAPKV, "keep_ratio": 0.5},
    "full": {"policy": "full"},
}


@pytest.mark.always
@pytest.mark.parametrize(("policy", "bits"), [("snapkv", 2), ("full", 4)])
def test_packed_entries_go_on_exactly(policy, bits, tmp_path):
    model = attached("llama")
    cache = Cache(model, **POLICIES[policy], precision={"bits": bits, "recent": 4})
    mask = started(model, cache)
    path = cache.save(tmp_path / "context.safetensors")
    again = Cache.load(path, model)
    assert_same_state(again, cache)
    assert again.state.packed_at == cache.state.packed_at
    assert again.state.bound_policy.precision == cache.state.bound_policy.precision is not None
    for one, other in zip(again.state.stores, cache.state.stores, strict=True):
        assert one.precision == other.precision and one.packed.codec == other.packed.codec
        assert one.bytes_held == other.bytes_held
    before = [store.packed.entries_held for store in cache.state.stores]
    assert torch.equal(continued(model, again, mask, steps=33), continued(model, cache, mask, steps=33))
    assert_same_state(again, cache)
    if policy == "full":  # packing went on
        after = [store.packed.entries_held for store in again.state.stores]
        assert all(one > other for one, other in zip(after, before, strict=True))
        for one in (again, cache):  # and goes on in a new conversation
            one.reset()
            started(model, one, steps=0)
        assert_same_state(again, cache)


def test_a_hand_made_precision_and_a_stack_of_caches(tmp_path):
    """The precision of a layer is not the policy's, or is nobody's any more."""
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 3))
    keep = [torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(layer)) < 0.6 for layer in range(3)]
    held = [Cache(model, policy=None).prefill(ids, mask, evict=False) for _ in range(2)]
    held[0].evict_with(keep, precision=Precision(bits=4, recent=4))
    held[1].evict_with(keep)
    for cache in (held[0], Cache.concat(held)):
        again = Cache.load(cache.save(tmp_path / "context.safetensors"), model)
        assert_same_state(again, cache)
        assert again.state.bound_policy.precision is None
        turn, padded = tiny_batch((0, 2, 1, 0)[: cache.batch_size], 5, seed=9)
        whole = grown(mask.repeat(cache.batch_size // 2, 1), padded)
        assert torch.equal(forward(model, again, turn, whole), forward(model, cache, turn, whole))

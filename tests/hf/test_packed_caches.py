"""Caches that hold entries in fewer bits or channels, forward by forward, against dense attention over exactly
what they hold; and what else is done with such a cache.
"""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import retain
from retain.cache.store import LOG_WEIGHT
from retain.cache.tiered_store import TieredStore
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import cache_in
from retain.hf.version_names import CACHE
from retain.precision import Precision
from tests.close import MODEL, assert_close
from tests.hf.masked import evicting, full_cache, positions_of
from tests.hf.regime_runs import FEW, gates_of, life_of
from tests.hf.test_families import INSIDE
from tests.refused import refused
from tests.tiny import FAMILIES, SINGLE, attached, tiny_batch, tiny_model

EIGHT = {"group": 8, "recent": 4}
SETTINGS = {
    "8 bits": {"bits": 8, **EIGHT},
    "4 bits": {"bits": 4, **EIGHT},
    "2 bits": {"bits": 2, **EIGHT},
    "mikv": {"bits": 2, "keys": "token", "group": 4, "balance": True, "full": 0.3},
    "arkv": {"bits": 8, "keys": "token", "full": 0.4, "full_layers": "preference"},
    "channels": {"channels": 0.6, **EIGHT},
    "channels by layer": {"channels": 0.6, "channel_heads": "layer", **EIGHT},
    "channels in 4 bits": {"channels": 0.6, "bits": 4, **EIGHT},
    "channels by layer in 4 bits": {"channels": 0.6, "channel_heads": "layer", "bits": 4, **EIGHT},
}
REGIMES = {
    "prefill": {},
    "chunked": {},
    "decode": {"every": 3},
    "prefill+decode": {"every": 3},
    "chunked+decode": {"every": 3},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def policy_of(name, **more):
    """A policy whose score decides, by windows of 2."""
    observed = "cake" if name == "arkv" else more.pop("observed", "snapkv")
    window = {} if observed in ("h2o", "knorm") else {"observed_settings": {"window": 2}}
    own = {"protection": FEW, "precision": SETTINGS[name], **window}
    return {"policy": observed, "keep_ratio": 0.5, **own, **more}


class Held(DynamicLayer):
    """A layer of the oracle: keys and values as a store shows them, `[B, H, N, D]`, with room where a row holds
    fewer; and how much each entry adds to its logits."""

    def __init__(self, store, seen):
        super().__init__()
        keys, values, positions, rows = store.flat()
        lengths, H = store.lengths_R.long(), store.num_heads
        N, R = int(lengths.max()), len(lengths)
        order = rows.argsort(stable=True)
        place = torch.cat([torch.arange(length) for length in lengths.tolist()])
        weight = store.log_weight_C
        added = torch.zeros(len(keys)) if weight is None else weight[store.index_N()]
        sides = {"keys": keys, "values": values, "added": added.to(keys.dtype), "positions": positions}
        for side, own in sides.items():
            dense = own.new_zeros(R, N, *own.shape[1:])
            dense[rows[order], place] = own[order]
            setattr(self, side, dense.unflatten(0, (-1, H)))
        self.exists = (torch.arange(N) < lengths[:, None]).unflatten(0, (-1, H))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.seen = seen

    def get_seq_length(self, *args):
        return self.seen

    def get_mask_sizes(self, query_length, *args):
        return self.seen + query_length, 0


@torch.no_grad()
def dense_logits(model, cache, ids, mask):
    """Logits of more tokens, by the unattached model: its attention sees what the cache's stores hold now,
    decoded, and the new tokens as they are."""
    state, seen = cache.state, cache.num_seen
    oracle = full_cache(model)
    windows = evicting(model)
    for idx, layer in enumerate(state.layers):
        oracle.layers[idx] = Held(layer.store, seen) if idx in windows else copy.deepcopy(layer)
    positions = positions_of(mask)[:, seen:]
    real = mask[:, seen:].bool()

    def give_mask(module, args, kwargs):
        layer = cache_in(kwargs).layers[module.layer_idx]
        S, (B, H, N) = ids.shape[1], layer.exists.shape
        at, window = positions[:, None, :, None], windows[module.layer_idx]
        old = layer.exists[:, :, None].expand(B, H, S, N)
        new = torch.ones(S, S).tril().bool()[None, None] & real[:, None, None]
        new = new.expand(B, H, S, S)
        if window is not None:
            old = old & (layer.positions[:, :, None] > at - window)
            new = new & (positions[:, None, None] > at - window)
        new = new | torch.eye(S).bool()  # a pad sees itself; nobody looks
        visible = torch.cat([old, new], -1)
        added = torch.cat([layer.added[:, :, None].expand(B, H, S, N), torch.zeros(B, H, S, S)], -1)
        bias = added.to(layer.dtype).masked_fill(~visible, float("-inf"))
        return args, {**kwargs, "attention_mask": bias.repeat_interleave(module.num_key_value_groups, dim=1)}

    hooks = [
        model.model.layers[idx].self_attn.register_forward_pre_hook(give_mask, with_kwargs=True)
        for idx in windows
    ]
    try:
        given = {"attention_mask": mask, "position_ids": positions}
        return model(input_ids=ids, **{CACHE: oracle}, **given).logits
    finally:
        for hook in hooks:
            hook.remove()


def held(cache):
    """What each layer holds packed: (row, position) -> key and value."""
    found = []
    for store in cache.state.stores:
        packed = {}
        for tier in store.packed if isinstance(store, TieredStore) else ():
            keys, values, positions, rows = tier.flat()
            for key, value, position, row in zip(keys, values, positions.tolist(), rows.tolist(), strict=True):
                packed[row, position] = (key, value)
        found.append(packed)
    return found


def num_packed(cache):
    return sum(len(own) for own in held(cache))


@torch.no_grad()
def assert_life(model, cache, life):
    """Each forward but the first is that of dense attention over what was held before it; and what was packed
    once is never touched again. Most entries that were ever packed at once."""
    seen, most, before = 0, 0, None
    if life.prompt > 1:
        cache.state.announce(sum(ids.shape[1] for ids in life.chunks[: life.prompt]))
    for number, ids in enumerate(life.chunks):
        mask = life.mask[:, : seen + ids.shape[1]]
        real = mask[:, seen:].bool()
        given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
        if number == 0:
            want = model(input_ids=ids, **given).logits
        else:
            want = dense_logits(model, cache, ids, mask)
        with retain.attach(model):
            got = model(input_ids=ids, **{CACHE: cache}, **given).logits
        assert_close(got[real], want[real], **INSIDE)
        now = held(cache)
        for old, new in zip(before or now, now, strict=True):
            for where in old.keys() & new.keys():
                assert all(torch.equal(a, b) for a, b in zip(old[where], new[where], strict=True))
        before, seen, most = now, mask.shape[1], max(most, num_packed(cache))
    return most


@pytest.mark.parametrize("regime", REGIMES)
@every_setting
def test_attention_is_that_over_what_is_held(name, regime, family="qwen3"):
    model = tiny_model(family, dtype=torch.float64)
    life = life_of(model, chunk=16 if "chunked" in regime else None, steps=(10, 12))
    cache = Cache(model, regime=regime, **policy_of(name), **REGIMES[regime])
    assert assert_life(model, cache, life) > 20 and cache.evictions


@pytest.mark.parametrize("name", ["4 bits", "mikv", "arkv", "channels by layer in 4 bits"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, name):
    model = tiny_model(family, dtype=torch.float32 if family in SINGLE else torch.float64)
    life = life_of(model, chunk=None, steps=(2, 2))
    cache = Cache(model, regime="prefill+decode", every=3, **policy_of(name))
    assert assert_life(model, cache, life) > 20

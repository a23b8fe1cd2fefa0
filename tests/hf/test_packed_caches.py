"""Caches that hold entries in fewer bits, forward by forward, against dense attention over
exactly what they hold; and what else is done with such a cache.
"""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import retain
from retain.cache.store import LOG_WEIGHT
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import cache_in
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.masked import evicting, full_cache, positions_of
from tests.hf.regime_runs import FEW, life
from tests.hf.test_families import INSIDE
from tests.refused import refused
from tests.tiny import FAMILIES, SINGLE, attached, tiny_batch, tiny_model

SETTINGS = {f"{bits} bits": {"bits": bits, "recent": 4} for bits in (8, 4, 2)}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def policy_of(name, **more):
    """A policy whose score decides, by windows of 2."""
    parts = {"protection": FEW, "precision": SETTINGS[name], "observed_settings": {"window": 2}}
    return {"policy": "snapkv", "keep_ratio": 0.5, **parts, **more}


def weights_of(store):
    """Log weights of all entries, packed ones first."""
    weights = [(part, part.log_weight_C) for part in store.parts]
    return torch.cat([torch.zeros(len(p.index_N())) if w is None else w[p.index_N()] for p, w in weights])


class Held(DynamicLayer):
    """A layer of the oracle: keys and values as a store shows them, `[B, H, N, D]`, with room where a row
    holds fewer; and how much each entry adds to its logits."""

    def __init__(self, store, seen):
        super().__init__()
        keys, values, positions, rows = store.flat()
        lengths, H = store.lengths_BH.flatten(), store.num_heads
        N, R = int(lengths.max()), len(lengths)
        order = rows.argsort(stable=True)
        place = torch.cat([torch.arange(length) for length in lengths.tolist()])
        added = weights_of(store)
        sides = {"keys": keys, "values": values, "added": added.to(keys.dtype), "positions": positions}
        for side, column in sides.items():
            dense = column.new_zeros(R, N, *column.shape[1:])
            dense[rows[order], place] = column[order]
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
    evicts = evicting(model)
    for idx, layer in enumerate(state.layers):
        oracle.layers[idx] = Held(layer.store, seen) if idx in evicts else copy.deepcopy(layer)
    positions = positions_of(mask)[:, seen:]
    real = mask[:, seen:].bool()

    def give_mask(module, args, kwargs):
        layer = cache_in(kwargs).layers[module.layer_idx]
        S, (B, H, N) = ids.shape[1], layer.exists.shape
        old = layer.exists[:, :, None].expand(B, H, S, N)
        new = torch.ones(S, S).tril().bool()[None, None] & real[:, None, None]
        new = new.expand(B, H, S, S)
        new = new | torch.eye(S).bool()  # a pad sees itself; nobody looks
        visible = torch.cat([old, new], -1)
        added = torch.cat([layer.added[:, :, None].expand(B, H, S, N), torch.zeros(B, H, S, S)], -1)
        bias = added.to(layer.dtype).masked_fill(~visible, float("-inf"))
        return args, {**kwargs, "attention_mask": bias.repeat_interleave(module.num_key_value_groups, dim=1)}

    hooks = [
        model.model.layers[idx].self_attn.register_forward_pre_hook(give_mask, with_kwargs=True)
        for idx in evicts
    ]
    try:
        given = {"attention_mask": mask, "position_ids": positions}
        return model(input_ids=ids, **{CACHE: oracle}, **given).logits
    finally:
        for hook in hooks:
            hook.remove()


def held(cache):
    """The packed entries of each layer: (row, position) -> key and value."""
    found = []
    for store in cache.state.stores:
        packed = {}
        if store.packed is not None:
            keys, values, positions, rows = store.packed.flat()
            for key, value, position, row in zip(
                keys, values, positions.tolist(), rows.tolist(), strict=True
            ):
                packed[row, position] = (key, value)
        found.append(packed)
    return found


def num_packed(cache):
    return sum(len(parts) for parts in held(cache))


@torch.no_grad()
def assert_life(model, cache, life):
    """Each forward but the first is that of dense attention over what was held before it; and what was packed
    once is never touched again. Most entries that were ever packed at once."""
    seen, most, before = 0, 0, None
    if life.prompt > 1:
        width = sum(ids.shape[1] for ids in life.chunks[: life.prompt])
        cache.state.prompt_mask_BT = life.mask[:, :width].bool()
    for number, ids in enumerate(life.chunks):
        mask = life.mask[:, : seen + ids.shape[1]]
        real = mask[:, seen:].bool()
        given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
        want = model(input_ids=ids, **given).logits if number == 0 else dense_logits(model, cache, ids, mask)
        with retain.attach(model):
            got = model(input_ids=ids, **{CACHE: cache}, **given).logits
        assert_close(got[real], want[real], **INSIDE)
        now = held(cache)
        for old, new in zip(before or now, now, strict=True):
            for where in old.keys() & new.keys():
                assert all(torch.equal(a, b) for a, b in zip(old[where], new[where], strict=True))
        before, seen, most = now, mask.shape[1], max(most, num_packed(cache))
    return most


@pytest.mark.always
@pytest.mark.parametrize("chunk", [None, 16])
@every_setting
def test_attention_is_that_over_what_is_held(name, chunk, family="qwen3"):
    model = tiny_model(family, dtype=torch.float64, num_hidden_layers=2)
    scenario = life(chunk=chunk, steps=(36, 2), turn=4)  # more than are packed at a time
    cache = Cache(model, **policy_of(name))
    assert assert_life(model, cache, scenario) > 20 and cache.evictions


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, name="4 bits"):
    model = tiny_model(family, dtype=torch.float32 if family in SINGLE else torch.float64)
    scenario = life(chunk=None, steps=(2, 2))
    assert assert_life(model, Cache(model, **policy_of(name)), scenario) > 20


def decode(model, cache, tokens, mask):
    """Logits of single tokens."""
    logits = []
    with torch.no_grad():
        for step in range(tokens.shape[1]):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -1:]}
            logits.append(model(input_ids=tokens[:, step : step + 1], **{CACHE: cache}, **given).logits)
    return logits


TOKENS = tiny_batch((0, 0), 40, seed=8)[0]


@pytest.mark.parametrize("policy", ["snapkv", "full"])
def test_decoded_tokens_are_packed_once_a_group_of_them_has_come(policy):
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    how = {"precision": SETTINGS["4 bits"]}
    if policy == "snapkv":
        how |= {"keep_ratio": 0.6, "observed_settings": {"window": 2}}
    cache = Cache(model, policy, **how).prefill(ids, mask)
    plain = cache.state.stores
    assert all(bool((store.lengths_R == 4).all()) for store in plain)
    for step in range(40):
        decode(model, cache, TOKENS[:, step : step + 1], torch.cat([mask, mask.new_ones(2, step)], dim=1))
        wanted = 4 + (step + 1) % 32
        assert all(bool((store.lengths_R == wanted).all()) for store in cache.state.stores)
    assert all(store.packed.codec.bits == 4 for store in cache.state.stores)


@pytest.mark.always
def test_beams_repeats_and_forks_share_nothing_and_encode_nothing_again(name="4 bits"):
    model, (ids, mask) = attached(num_hidden_layers=2), tiny_batch((0, 3), 40)
    cache = Cache(model, **policy_of(name)).prefill(ids, mask)
    before = [[side.clone() for side in store.flat()] for store in cache.state.stores]
    other = cache.fork()
    want = decode(model, cache.fork(), TOKENS[:, :9], mask)
    other.batch_repeat_interleave(2)
    got = decode(model, other, TOKENS[:, :9].repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
    for one, two in zip(got, want, strict=True):
        assert_close(one, two.repeat_interleave(2, 0).double(), ops=MODEL)
    for store, sides in zip(cache.state.stores, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(store.flat(), sides, strict=True))
    beams = Cache(model, **policy_of(name))
    how = {"attention_mask": mask, "max_new_tokens": 10, "num_beams": 2, "do_sample": False}
    out = model.generate(ids, **{CACHE: beams}, **how)
    again = model.generate(ids, **{CACHE: Cache(model, **policy_of(name))}, **how)
    assert torch.equal(out, again) and out.shape[1] == 50
    assert beams.batch_size == 4 and num_packed(beams) > num_packed(cache)


def test_a_concatenated_cache_packs_no_new_entries():
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    cache = Cache(model, **policy_of("4 bits")).prefill(ids, mask)
    whole, before = Cache.concat([cache]), num_packed(cache)
    for parts in (cache, whole):
        decode(model, parts, TOKENS, mask)
    assert num_packed(whole) == before < num_packed(cache)
    assert whole.bytes_held() > cache.bytes_held()


@pytest.mark.parametrize("policy", ["snapkv", "lava"])
def test_one_eviction_merges_and_then_packs(policy):
    """Layers may share the budget: then lower ones are cut again as others come."""
    model, (ids, mask) = tiny_model(dtype=torch.float64), tiny_batch((0, 7), 60)
    how = {"keep_ratio": 0.4, "protection": FEW, "observed_settings": {"window": 2}}
    how |= {"correction": {"threshold": 0.2, "recent": 3}}
    with retain.attach(model):
        merged = Cache(model, policy, **how).prefill(ids, mask)
        packed = Cache(model, policy, precision=SETTINGS["8 bits"], **how).prefill(ids, mask)
    for a, b in zip(merged.state.stores, packed.state.stores, strict=True):
        orders = [(s.flat()[3] * 1000 + s.flat()[2]).argsort() for s in (a, b)]
        want, got = a.flat()[1][orders[0]], b.flat()[1][orders[1]]
        assert float((want - got).abs().max()) < 0.02 * float(want.abs().max()) and b.packed
        assert LOG_WEIGHT in b.side
        one, two = (weights_of(s)[order] for s, order in zip((a, b), orders, strict=True))
        assert torch.equal(one, two) and bool(one.any())
    new, new_mask = tiny_batch((0, 2), 5, seed=5)
    whole = torch.cat([mask, new_mask], dim=1)
    want = dense_logits(model, packed, new, whole)[new_mask.bool()]
    given = {"attention_mask": whole, "position_ids": positions_of(whole)[:, 60:]}
    with retain.attach(model), torch.no_grad():
        got = model(input_ids=new, **{CACHE: packed}, **given).logits[new_mask.bool()]
    assert_close(got, want, **INSIDE)


def test_settings_that_make_no_sense_are_refused_when_a_cache_is_made():
    model = attached()
    refused("missing key 'precision.bits'", Cache, model, "snapkv", keep_ratio=0.5, precision={"recent": 3})
    refused("bits", Cache, model, "snapkv", keep_ratio=0.5, precision={"bits": 5})
    refused("byte_ratio", Cache, model, "snapkv", byte_ratio=1.5)
    asked = {"keep_ratio": 0.5, "precision": {"bits": 8}, "when": "prefill+decode"}
    refused("precision and evictions later again", Cache, model, "snapkv", **asked)


@pytest.mark.parametrize("stated", ["byte_ratio", "bytes"])
@pytest.mark.parametrize("policy", ["snapkv", "adakv", "lava", "pyramidkv", "cake"])
@pytest.mark.parametrize("name", ["4 bits", "2 bits"])
def test_bytes_are_as_stated(name, policy, stated):
    """At most what is stated, and less by at most a group, an entry and rounding, of each head."""
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 7), 120)
    budget = {"byte_ratio": 0.15} if stated == "byte_ratio" else {"bytes": 12_000}
    observed = {} if policy == "cake" else {"observed_settings": {"window": 2}}
    cache = Cache(model, policy, protection=FEW, precision=SETTINGS[name], **budget, **observed)
    cache.prefill(ids, mask)
    H, entry = 2, 2 * 16 * 4
    for b, length in enumerate((120, 113)):
        alone = cache.fork()
        alone.batch_select_indices(torch.tensor([b]))
        most = 0.15 * length * 3 * H * entry if stated == "byte_ratio" else 12_000
        got = alone.bytes_held()
        assert got <= most
        assert got >= most - 3 * H * (entry + 4 * 16 + 4 * entry)
        held_ratio = got / (length * 3 * H * entry)
        assert alone.entries_held > 1.3 * held_ratio * length * 3 * H


def test_a_prompt_in_chunks_is_packed_when_it_was_evicted_from():
    """Chunks are read at full precision, so that what is held is as if it had come at once."""
    model, (ids, mask) = attached(dtype=torch.float64), tiny_batch((0, 3), 40)
    how = policy_of("4 bits")
    one = Cache(model, **how).prefill(ids, mask)
    chunked = Cache(model, **how).prefill(ids, mask, chunk_size=16)
    for a, b in zip(one.state.stores, chunked.state.stores, strict=True):
        assert torch.equal(a.lengths_R, b.lengths_R) and b.packed
        for x, y in zip(a.flat(), b.flat(), strict=True):
            assert float((x.double() - y.double()).abs().max()) < 1e-3 * max(1, float(x.abs().max()))

"""Caches that hold entries in fewer bits or channels, forward by forward, against dense attention over
exactly what they hold; and what else is done with such a cache.
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
from tests.tiny import HEADED, SINGLE, attached, tiny_batch, tiny_model

EIGHT = {"group": 8, "recent": 4}
SETTINGS = {
    "8 bits": {"bits": 8, **EIGHT},
    "4 bits": {"bits": 4, **EIGHT},
    "2 bits": {"bits": 2, **EIGHT},
    "full by token": {"bits": 2, "keys": "token", "group": 4, "balance": True, "full": 0.3},
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
    """A layer of the oracle: keys and values as a store shows them, `[B, H, N, D]`, with room where a row
    holds fewer; and how much each entry adds to its logits."""

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
            for key, value, position, row in zip(
                keys, values, positions.tolist(), rows.tolist(), strict=True
            ):
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
@pytest.mark.parametrize("regime", REGIMES)
@every_setting
def test_attention_is_that_over_what_is_held(name, regime, family="qwen3"):
    model = tiny_model(family, dtype=torch.float64, num_hidden_layers=2)
    life = life_of(model, chunk=16 if "chunked" in regime else None, steps=(9, 2), turn=4)
    cache = Cache(model, regime=regime, **policy_of(name), **REGIMES[regime])
    assert assert_life(model, cache, life) > 20 and cache.evictions


@pytest.mark.parametrize("name", ["4 bits", "full by token", "arkv", "channels by layer in 4 bits"])
@pytest.mark.parametrize("family", HEADED)
def test_every_family(family, name):
    model = tiny_model(family, dtype=torch.float32 if family in SINGLE else torch.float64)
    life = life_of(model, chunk=None, steps=(2, 2))
    cache = Cache(model, regime="prefill+decode", every=3, **policy_of(name))
    assert assert_life(model, cache, life) > 20


def test_learned_side_columns_stay_beside_their_entries():
    """A gate's score, noted when an entry comes, is where it is in a run at full precision: with 8 bits the
    first layer, whose keys do not depend on others, keeps the same."""
    model, life = attached("qwen3"), life_of(tiny_model("qwen3"), chunk=None, steps=(12, 2), turn=4)
    how = {"gates": gates_of(model), "keep_ratio": 0.5, "protection": FEW, "scope": "head"}
    caches = [
        Cache(model, "gate", regime="prefill+decode", every=4, **how, **more)
        for more in ({}, {"precision": SETTINGS["8 bits"]})
    ]
    seen = 0
    with torch.no_grad():
        for ids in life.chunks:
            mask = life.mask[:, : seen + ids.shape[1]]
            given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
            for cache in caches:
                model(input_ids=ids, **{CACHE: cache}, **given)
            seen = mask.shape[1]
            plain, packed = (cache.state.stores[0] for cache in caches)
            sides = []
            for store in (plain, packed):
                index_N, rows_N = store.index_N(), store.rows_N()
                order = (rows_N * 1000 + store.positions_C[index_N]).argsort()
                column = store.beside["learned"][index_N][order]
                sides.append((rows_N[order], store.positions_C[index_N][order], column))
            for one, other in zip(*sides, strict=True):
                assert torch.equal(one, other)
    assert num_packed(caches[1]) > 20


def test_running_statistics_stay_beside_their_entries():
    """What each entry of the first layer received is what loops add up over what is held."""
    model = attached("qwen3", num_hidden_layers=1)
    life = life_of(model, chunk=None, steps=(9, 0), turn=0)
    how = {"keep_ratio": 0.5, "protection": FEW, "regime": "prefill+decode", "every": 3}
    caches = [
        Cache(model, "h2o", **how),
        Cache(model, "h2o", precision={"bits": 8, "group": 4, "recent": 2}, **how),
    ]
    seen = 0
    for ids in life.chunks:
        mask = life.mask[:, : seen + ids.shape[1]]
        given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
        with torch.no_grad():
            for cache in caches:
                model(input_ids=ids, **{CACHE: cache}, **given)
        seen = mask.shape[1]
    mass = []
    for cache in caches:
        (store,) = cache.state.stores
        index_N = store.index_N()
        order = (store.rows_N() * 1000 + store.positions_C[index_N]).argsort()
        mass.append((store.rows_N()[order], store.positions_C[index_N][order], store.beside["mass"][index_N]))
        mass[-1] = (*mass[-1][:2], mass[-1][2][order])
    assert torch.equal(mass[0][0], mass[1][0]) and torch.equal(mass[0][1], mass[1][1])
    assert num_packed(caches[1]) > 20
    assert float((mass[0][2] - mass[1][2]).abs().max()) < 0.02 * float(mass[0][2].max())


def decode(model, cache, tokens, mask):
    """Logits of single tokens."""
    logits = []
    with torch.no_grad():
        for step in range(tokens.shape[1]):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -1:]}
            logits.append(model(input_ids=tokens[:, step : step + 1], **{CACHE: cache}, **given).logits)
    return logits


TOKENS = tiny_batch((0, 0), 20, seed=8)[0]


@pytest.mark.parametrize("policy", ["snapkv", "full"])
def test_decoded_tokens_are_packed_once_a_group_of_them_has_come(policy):
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    precision, how = {"bits": 4, "group": 8, "recent": 4}, {}
    if policy == "snapkv":
        how = {"keep_ratio": 0.6, "observed_settings": {"window": 2}}
    cache = Cache(model, policy, precision=precision, **how).prefill(ids, mask)
    plain = [store.plain for store in cache.state.stores]
    assert all(bool((store.lengths_R == 4).all()) for store in plain)
    for step in range(20):
        decode(model, cache, TOKENS[:, step : step + 1], torch.cat([mask, mask.new_ones(2, step)], dim=1))
        wanted = 4 + (step + 1) % 8
        assert all(bool((store.plain.lengths_R == wanted).all()) for store in cache.state.stores)
    for store in cache.state.stores:
        assert [tier.form.bits for tier in store.packed] == [4]


def test_a_policy_that_keeps_all_packs_in_every_regime():
    """Nothing is noted for an eviction that never comes."""
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    cache = Cache(model, "full", regime="decode", precision={"bits": 4, "group": 8, "recent": 4})
    cache.prefill(ids, mask)
    decode(model, cache, TOKENS[:, :8], mask)
    assert all(bool((store.plain.lengths_R == 4).all()) for store in cache.state.stores)


@pytest.mark.parametrize("name", ["4 bits", "full by token"])
def test_a_prompt_in_chunks_is_packed_when_it_was_evicted_from(name):
    """Chunks are read at full precision, so that what is held is as if it had come at once."""
    model, (ids, mask) = attached(dtype=torch.float64), tiny_batch((0, 3), 40)
    how = policy_of(name)
    how["precision"] = {**how["precision"], "channels": 1.0, "channel_heads": "equal", "balance": False}
    one = Cache(model, **how).prefill(ids, mask)
    chunked = Cache(model, **how).prefill(ids, mask, chunk_size=16)
    for a, b in zip(one.state.stores, chunked.state.stores, strict=True):
        assert torch.equal(a.plain.lengths_R, b.plain.lengths_R) and b.packed
        for x, y in zip(a.flat(), b.flat(), strict=True):
            assert float((x.double() - y.double()).abs().max()) < 1e-3 * max(1, float(x.abs().max()))


@every_setting
def test_what_is_held_is_what_full_precision_keeps_to_a_step(name):
    """The same entries stay, whatever they are held in; those that stay whole are untouched."""
    model, (ids, mask) = attached(), tiny_batch((0, 7), 40)
    how = policy_of(name)
    plain = Cache(model, **{**how, "precision": None}).prefill(ids, mask)
    packed = Cache(model, **how).prefill(ids, mask)
    settings = Precision(**SETTINGS[name])
    whole = 0
    for a, b in zip(plain.state.stores, packed.state.stores, strict=True):
        sides = []
        for store in (a, b):
            keys, values, positions, rows = store.flat()
            order = (rows * 1000 + positions).argsort()
            sides.append([side[order] for side in (keys, values, positions, rows)])
        (keys, values, *where), (keys8, values8, *where8) = sides
        assert all(torch.equal(x, y) for x, y in zip(where, where8, strict=True))
        span = (values.amax(-1) - values.amin(-1))[:, None]
        steps = 1e-2 if settings.bits is None else 0.51 / (2**settings.bits - 1) + 2e-3
        assert bool(((values - values8).abs() <= steps * span + 1e-3).all())
        if settings.channels < 1:
            assert 0.25 < float((keys8 == 0).float().mean()) < 0.5
        elif settings.bits == 8:
            assert float((keys - keys8).abs().max()) < 0.02 * float(keys.abs().max())
        whole += b.plain.entries_held
    if settings.full:
        total = sum(store.entries_held for store in packed.state.stores)
        assert abs(whole - settings.full * total) <= 2 * len(packed.state.stores)


@pytest.mark.always
@pytest.mark.parametrize("name", ["4 bits", "full by token"])
def test_beams_repeats_and_forks_share_nothing_and_encode_nothing_again(name):
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


def test_crop_goes_back_and_on():
    """Behind what was packed nothing is lost: the same tokens give the same again."""
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    cache = Cache(model, **policy_of("4 bits")).prefill(ids, mask)
    want = decode(model, cache.fork(), TOKENS[:, :6], mask)
    decode(model, cache, TOKENS[:, 6:12], mask)
    cache.crop(40)
    for one, two in zip(decode(model, cache, TOKENS[:, :6], mask), want, strict=True):
        assert_close(one, two.double(), ops=MODEL)
    decode(model, cache, TOKENS[:, 6:], torch.cat([mask, mask.new_ones(2, 6)], dim=1))
    packed = held(cache)
    cache.crop(50)
    assert cache.num_seen == 50
    for old, new in zip(packed, held(cache), strict=True):
        assert new.keys() == {where for where in old if where[1] < 50 - 3 * (where[0] >= 2)}
    decode(model, cache, TOKENS[:, :10], torch.cat([mask, mask.new_ones(2, 10)], dim=1))


def test_caches_of_different_precision_decode_as_one_batch():
    model, (ids, mask) = attached(), tiny_batch((3,), 40)
    names = ["4 bits", "full by token", "channels by layer in 4 bits", "8 bits", None]
    caches = [
        Cache(model, **(policy_of(name) if name else {"policy": None})).prefill(ids, mask) for name in names
    ]
    whole = Cache.concat(caches)
    assert whole.bytes_held() == sum(cache.bytes_held() for cache in caches)
    got = decode(model, whole, TOKENS[:1, :4].expand(5, -1), mask.expand(5, -1))
    for number, cache in enumerate(caches):
        want = decode(model, cache, TOKENS[:1, :4], mask)
        for one, two in zip(got, want, strict=True):
            assert_close(one[number : number + 1], two.double(), ops=MODEL)


def test_a_concatenated_cache_packs_no_new_entries():
    model, (ids, mask) = attached(), tiny_batch((0, 3), 40)
    cache = Cache(model, **policy_of("4 bits")).prefill(ids, mask)
    whole, before = Cache.concat([cache]), num_packed(cache)
    for own in (cache, whole):
        decode(model, own, TOKENS, mask)
    assert num_packed(whole) == before < num_packed(cache)
    assert whole.bytes_held() > cache.bytes_held()


MERGES = {"threshold": 0.2, "recent": 3}


@pytest.mark.parametrize("policy", ["snapkv", "lava"])
@pytest.mark.parametrize("count", [False, True])
def test_one_eviction_merges_and_then_packs(policy, count):
    """Of a budget that layers share too, where lower layers are cut again as others come."""
    model, (ids, mask) = tiny_model(dtype=torch.float64), tiny_batch((0, 7), 60)
    how = {"keep_ratio": 0.4, "protection": FEW, "observed_settings": {"window": 2}}
    how |= {"correction": {**MERGES, "count": count}}
    with retain.attach(model):
        merged = Cache(model, policy, **how).prefill(ids, mask)
        packed = Cache(model, policy, precision=SETTINGS["8 bits"], **how).prefill(ids, mask)
    for a, b in zip(merged.state.stores, packed.state.stores, strict=True):
        orders = [(s.rows_N() * 1000 + s.positions_C[s.index_N()]).argsort() for s in (a, b)]
        want, got = a.flat()[1][orders[0]], b.flat()[1][orders[1]]
        assert float((want - got).abs().max()) < 0.02 * float(want.abs().max()) and b.packed
        assert (LOG_WEIGHT in b.beside) == count
        if count:
            one, two = (s.log_weight_C[s.index_N()][order] for s, order in zip((a, b), orders, strict=True))
            assert torch.equal(one, two) and bool(one.any())
    new, new_mask = tiny_batch((0, 2), 5, seed=5)
    whole = torch.cat([mask, new_mask], dim=1)
    want = dense_logits(model, packed, new, whole)[new_mask.bool()]
    given = {"attention_mask": whole, "position_ids": positions_of(whole)[:, 60:]}
    with retain.attach(model), torch.no_grad():
        got = model(input_ids=new, **{CACHE: packed}, **given).logits[new_mask.bool()]
    assert_close(got, want, **INSIDE)


def test_a_correction_beside_precision_stands_at_one_eviction():
    model, (ids, mask) = attached(), tiny_batch((0, 7), 60)
    how = {**policy_of("4 bits"), "correction": MERGES}
    for regime in ("chunked", "decode", "prefill+decode", "chunked+decode"):
        refused("cannot be merged into any more", Cache, model, regime=regime, **how)
    refused("cannot be merged into any more", Cache(model, **how).prefill, ids, mask, chunk_size=16)
    window = attached("mistral_window")
    refused("cannot be merged into any more", Cache(window, **how).prefill, ids, mask)


def test_settings_that_make_no_sense_are_refused_when_a_cache_is_made():
    model = attached()
    refused("nothing is made smaller", Cache, model, "snapkv", keep_ratio=0.5, precision={"recent": 3})
    refused("full says which entries stay", Cache, model, "full", precision={"bits": 4, "full": 0.5})
    refused("measures none", Cache, model, **{**policy_of("arkv"), "policy": "snapkv"})
    refused("bits", Cache, model, "snapkv", keep_ratio=0.5, precision={"bits": 5})
    refused("byte_ratio", Cache, model, "snapkv", byte_ratio=1.5)
    by_layer = {"channels": 0.6, "channel_heads": "layer"}
    refused("hold keys of unlike widths", Cache, model, "adakv", bytes=9999, precision=by_layer)
    how = {"byte_ratio": 0.5, "regime": "chunked"}
    refused(
        "scales of keys that several entries", Cache, model, "snapkv", precision=SETTINGS["4 bits"], **how
    )
    refused("larger", Cache, model, "snapkv", keep_ratio=0.5, precision={"bits": 8, "group": 1})


PRICES = {
    "4 bits": {"bits": 4, "group": 8, "recent": 4},
    "by token": {"bits": 4, "keys": "token", "group": 8, "recent": 4},
    "full": {"bits": 4, "keys": "token", "group": 8, "full": 0.2},
    "channels": {"channels": 0.6, "bits": 4, "group": 8, "recent": 4},
}


@pytest.mark.parametrize("stated", ["byte_ratio", "bytes"])
@pytest.mark.parametrize("policy", ["snapkv", "adakv", "lava", "pyramidkv", "cake"])
@pytest.mark.parametrize("name", PRICES)
def test_bytes_are_as_stated(name, policy, stated):
    """At most what is stated, and less by at most a group, an entry and rounding, of each head."""
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 7), 120)
    budget = {"byte_ratio": 0.15} if stated == "byte_ratio" else {"bytes": 12_000}
    observed = {} if policy == "cake" else {"observed_settings": {"window": 2}}
    cache = Cache(model, policy, protection=FEW, precision=PRICES[name], **budget, **observed)
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


def test_a_keep_ratio_counts_entries_whatever_they_are_held_in():
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 7), 40)
    plain = Cache(model, **{**policy_of("4 bits"), "precision": None}).prefill(ids, mask)
    for name in SETTINGS:
        if name != "arkv":  # whose layers have other scores
            assert Cache(model, **policy_of(name)).prefill(ids, mask).entries_held == plain.entries_held


REST = {"bits": 2, "keys": "token", "group": "half", "balance": True, "rest": True}


def full_positions(cache):
    """Of each layer and row, positions of what is held as it is."""
    stores = [getattr(layer.store, "plain", layer.store) for layer in cache.state.ragged]
    rows = range(stores[0].num_rows)
    return [[store.row(*divmod(row, store.num_heads))[2].tolist() for row in rows] for store in stores]


@pytest.mark.parametrize("policy", ["snapkv", "lava"])  # each head its own budget; a cascade over layers
def test_what_would_be_evicted_stays_in_few_bits(policy):
    model, (ids, mask) = attached(dtype=torch.float32), tiny_batch((0, 5), 60)
    how = {"short": "raise", "observed_settings": {"window": 4}, "protection": {"recent": 4, "minimum": 1}}
    evicting = Cache(model, policy, keep_ratio=0.4, **how).prefill(ids, mask)
    packing = Cache(model, policy, keep_ratio=0.4, precision=REST, **how).prefill(ids, mask)
    assert full_positions(packing) == full_positions(evicting)
    assert packing.entries_held == packing.entries_seen and not packing.evictions
    later = Cache(model, policy, keep_ratio=0.4, precision=REST, **how)
    later.prefill(ids, mask, evict=False, hold_evidence=True).evict()
    for one, other in zip(packing.state.stores, later.state.stores, strict=True):
        for row in range(one.num_rows):  # by position: a cascade packs in several steps
            assert all(
                map(torch.equal, one.row(*divmod(row, one.num_heads)), other.row(*divmod(row, one.num_heads)))
            )
    token = TOKENS[:, :1]
    both = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    given = {"attention_mask": both, "position_ids": positions_of(both)[:, -1:]}
    want = dense_logits(model, packing, token, both)
    assert_close(model(input_ids=token, **{CACHE: packing.fork()}, **given).logits, want, **INSIDE)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_bytes_pay_for_what_stays_in_few_bits_first(scope):
    model, (ids, _) = attached(dtype=torch.float32), tiny_batch((0, 0), 160)
    how = {"scope": scope, "short": "raise", "observed_settings": {"window": 4}, "precision": REST}
    cache = Cache(model, "snapkv", byte_ratio=0.6, protection={"recent": 4}, **how).prefill(ids)
    stated = 0.6 * cache.bytes_full()
    entry = cache.state.stores[0].entry_bytes
    # Whole entries, of two sequences.
    assert stated - 2 * len(cache.state.stores) * entry < cache.bytes_held() <= stated


def test_what_lets_nothing_go_is_refused_where_something_must():
    model = attached()
    with pytest.raises(ValueError, match="lets nothing go, so correction would not be read"):
        Cache(model, "snapkv", keep_ratio=0.5, precision=REST, correction={"threshold": 0.5})
    with pytest.raises(ValueError, match="'decode' evicts again later, and policy 'snapkv' lets nothing go"):
        Cache(model, "snapkv", keep_ratio=0.5, precision=REST, regime="decode")
    with pytest.raises(ValueError, match="holds what would be evicted in few bits, and nothing would be"):
        Cache(model, "full", precision=REST)


@pytest.mark.parametrize("how", [{}, {"policy": "lava"}, {"page": 4}])
def test_channels_go_by_what_is_kept_in_the_end(how):
    model, (ids, _) = attached(dtype=torch.float32), tiny_batch((0,), 60)
    asked = {"policy": "snapkv", "keep_ratio": 0.5, "precision": {"channels": 0.6, "recent": 4}, **how}
    asked |= {"observed_settings": {"window": 4}, "protection": {"recent": 4, "minimum": 1}}
    cut = Cache(model, **asked).prefill(ids)
    later = Cache(model, **asked).prefill(ids, evict=False, hold_evidence=True).evict()
    for one, other in zip(cut.state.stores, later.state.stores, strict=True):
        assert torch.equal(one.rows.channels_RD, other.rows.channels_RD)


def test_groups_of_half_a_head_are_packed_while_decoding():
    model, (ids, mask) = attached(dtype=torch.float32), tiny_batch((0, 5), 40)
    precision = {"bits": 4, "keys": "token", "group": "half", "recent": 4}
    cache = Cache(model, "full", precision=precision).prefill(ids, mask)
    decode(model, cache, TOKENS[:, :4], mask)
    assert all(bool((store.plain.lengths_R == 4).all()) for store in cache.state.stores)


def test_masks_of_what_stays_as_it_is_are_checked_before_anything_goes():
    model, (ids, _) = attached(), tiny_batch((0,), 20)
    cache = Cache(model, policy=None).prefill(ids, evict=False)
    keep = [torch.ones(1, layer.keys.shape[1], 20, dtype=torch.bool) for layer in cache.state.ragged]
    half = Precision(bits=8, full=0.5)
    for fulls, precision, why in (
        (None, half, "no masks say which"),
        (keep, None, "no precision with full reads them"),
        (keep[:1], half, "got 1 masks in fulls"),
        ([*keep[:-1], keep[-1][..., :3]], half, "keep mask is"),
    ):
        with pytest.raises(ValueError, match=why):
            cache.evict_with(keep, precision=precision, fulls=fulls)
    assert cache.evict_with(keep, precision=half, fulls=keep).entries_held

"""Caches that hold entries in fewer bits, forward by forward, against caches of the decoded entries; and what
else is done with them."""

import pytest
import torch

import retain
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.hf.masked import positions_of
from tests.hf.regime_runs import FEW
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


def unpacked(cache):
    """The same cache with all entries as plain numbers: the oracle."""
    other = cache.fork()
    for layer in other.state.ragged:
        store = layer.store
        keys, values, positions, rows = store.flat()
        order = rows.argsort(stable=True)
        columns = {"keys": keys[order], "values": values[order], "positions": positions[order].int()}
        if store.log_weight_C is not None:
            columns[LOG_WEIGHT] = weights_of(store)[order]
        layer.store = RaggedStore.from_rows(columns, store.lengths_BH.flatten(), store.num_heads)
    return other


@torch.no_grad()
def forward(model, cache, ids, mask):
    given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -ids.shape[1] :]}
    return model(input_ids=ids, **{CACHE: cache}, **given).logits


def grown(mask, number):
    return torch.cat([mask, mask.new_ones(len(mask), number)], dim=1)


def num_packed(cache):
    return sum(store.packed.entries_held for store in cache.state.stores if store.packed is not None)


@pytest.mark.always
@pytest.mark.parametrize("family", FAMILIES)
@every_setting
def test_attention_is_that_over_what_is_held(name, family):
    """A question, and more tokens than are packed at a time."""
    model = attached(family, dtype=torch.float32 if family in SINGLE else torch.float64)
    ids, mask = tiny_batch((0, 3, 11))
    cache = Cache(model, **policy_of(name)).prefill(ids, mask, chunk_size=16)
    question, tokens = tiny_batch((0, 0, 0), 4, seed=5)[0], tiny_batch((0, 0, 0), 36, seed=6)[0]
    before = num_packed(cache)
    for new in (question, *tokens.split(1, 1)):
        mask = grown(mask, new.shape[1])
        want = forward(model, unpacked(cache), new, mask)
        assert_close(forward(model, cache, new, mask), want, **INSIDE)
    assert num_packed(cache) > before > 20 and cache.evictions == 1


def decode(model, cache, tokens, mask):
    """Logits of single tokens."""
    return [forward(model, cache, one, grown(mask, at + 1)) for at, one in enumerate(tokens.split(1, 1))]


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
    with retain.attach(model):
        want, got = (forward(model, one, new, whole) for one in (unpacked(packed), packed))
    assert_close(got[new_mask.bool()], want[new_mask.bool()], **INSIDE)


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

"""A cache that merges, forward by forward, against a full cache under a mask whose values loops have merged:
every family, every regime. And what else is done with a cache.
"""

import pytest
import torch

import retain
from retain.correction.merge import Merge
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import assert_close
from tests.correction.test_merge import naive
from tests.hf.masked import evicting, full_cache, masked, positions_of
from tests.hf.regime_runs import FEW, gates_of, life, lived
from tests.hf.test_families import INSIDE, every_family
from tests.tiny import SINGLE, attached, tiny_batch, tiny_model

THRESHOLD = 0.2
MERGE = {"threshold": THRESHOLD, "recent": 3}
SETTINGS = {"observed_settings": {"window": 2}, "protection": FEW, "keep_ratio": 0.4}
WHEN = {"prefill": {}, "chunk": {}, "decode": {"every": 3}, "prefill+decode": {"every": 3}}


def merged_(layer, before, after, weight, how):
    """Merge in a layer of the oracle, and count: what was held, and what is held now."""
    B, H, T = after.shape
    keys, values = (side[:, :, :T].flatten(0, 1) for side in (layer.keys, layer.values))
    exists, keep, weights = before.flatten(0, 1), after.flatten(0, 1), weight.flatten(0, 1)
    new_values, counts = naive(keys, values, exists, keep, how, weights)
    values, weights = values.clone(), weights.clone()
    values[keep], weights[keep] = new_values.to(values.dtype), counts.float()
    layer.values[:, :, :T] = values.view(B, H, T, -1)
    weight[:] = weights.view(B, H, T)


@torch.no_grad()
def oracle(model, life, history, how):
    """Logits of each forward, where the layers hold what `history` says, and the entries that were merged."""
    cache, logits, merged, seen = full_cache(model), [], 0, 0
    layers = evicting(model)
    weights = [None] * len(layers)
    before = [None] * len(layers)
    with masked(model, None, life.mask, weights) as kept:
        for number, ids in enumerate(life.chunks):
            mask = life.mask[:, : seen + ids.shape[1]]
            given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
            logits.append(model(input_ids=ids, **{CACHE: cache}, **given).logits)
            seen = mask.shape[1]
            for place, idx in enumerate(layers):
                after = history[number][place]
                grown = mask.bool()[:, None].expand_as(after).clone()
                ones = torch.ones(after.shape)
                if before[place] is not None:
                    old = before[place].shape[2]
                    grown[:, :, :old] = before[place]
                    ones[:, :, :old] = weights[place]
                weights[place], before[place], kept[place] = ones, after, after
                if bool((grown & ~after).any()):
                    merged_(cache.layers[idx], grown, after, ones, how)
                    merged += int((ones > 1).sum())
    return logits, merged


@pytest.mark.parametrize("when", WHEN)
@every_family
def test_logits_are_those_of_a_masked_full_cache_that_merged(family, when):
    model = tiny_model(family, dtype=torch.float32 if family in SINGLE else torch.float64)
    scenario = life(chunk=16 if when == "chunk" else None, turn=0)
    with retain.attach(model):
        cache = Cache(model, "snapkv", when=when, correction=MERGE, **SETTINGS, **WHEN[when])
        got, history = lived(model, cache, scenario)
    want, merged = oracle(model, scenario, history, Merge(**MERGE))
    assert merged > 10 and cache.evictions
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        real = scenario.mask[:, : sum(ids.shape[1] for ids in scenario.chunks[: number + 1])][
            :, -one.shape[1] :
        ].bool()
        assert_close(one[real], other[real], **INSIDE)


def run(model, policy, **settings):
    """A prompt's cache, with a correction or without."""
    ids, mask = tiny_batch((0, 7), 60)
    gates = gates_of(model) if policy == "learned" else None
    return Cache(model, policy, gates=gates, **{**SETTINGS, **settings}).prefill(ids, mask)


def held(cache):
    """Positions, keys and values of each layer."""
    return [store.flat() for store in cache.state.stores]


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "lava", "cake", "layer_defensivekv", "learned"])
def test_to_evict_later_is_to_evict_at_once(policy):
    """Also where layers share: an entry is merged once, by the final sets, and not layer by layer."""
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 7), 60)
    gates = {"gates": gates_of(model)} if policy == "learned" else {}
    whole = Cache(model, "recency", keep_ratio=0.5).prefill(ids, mask, evict=False, hold_evidence=True)
    for correction in (MERGE, None):  # the fork that shares its tensors was not written to
        bound = Cache(model, policy, correction=correction, **gates, **SETTINGS).state.bound_policy
        keep = bound.decide(whole.evidence).finish()
        later = whole.fork().evict_with(keep, correction=bound.correction)
        for one, other in zip(held(run(model, policy, correction=correction)), held(later), strict=True):
            assert all(map(torch.equal, one, other))


def test_weights_go_where_their_entries_go(tmp_path):
    """Forks, beams, files: a cache that evicts again goes on as the one that it came from."""
    model = attached("qwen3")
    cache = run(model, "snapkv", correction=MERGE, when="prefill+decode", every=3)
    weights = [store.log_weight_C[store.index_N()].exp() for store in cache.state.stores]
    assert sum(int((before_N - 1).sum()) for before_N in weights) > 10
    cache.save(tmp_path / "cache.safetensors")
    others = [cache.fork(), Cache.load(tmp_path / "cache.safetensors", model), cache.fork()]
    others[2].batch_select_indices(torch.tensor([1, 0]))
    others[2].batch_select_indices(torch.tensor([1, 0]))
    mask = torch.cat([tiny_batch((0, 7), 60)[1], torch.ones(2, 9, dtype=torch.long)], dim=1)

    def go_on(each):
        logits = []
        for step in range(8):
            given = {"attention_mask": mask[:, : 61 + step], CACHE: each}
            where = positions_of(mask[:, : 61 + step])[:, -1:]
            out = model(input_ids=torch.tensor([[5 + step], [9 + step]]), position_ids=where, **given)
            logits.append(out.logits)
        return torch.cat(logits)

    with torch.no_grad():
        wanted = go_on(cache)
        assert cache.evictions > 1
        fork, loaded, reordered = map(go_on, others)
    assert torch.equal(fork, wanted) and torch.equal(reordered, wanted)
    # Rooms of a file are laid out anew, so sums go in another order.
    torch.testing.assert_close(loaded, wanted, rtol=1e-5, atol=1e-5)


def test_counts_last_while_a_cache_is_decoded_from_and_stacked():
    model = attached("qwen3")
    plain, counted = run(model, "snapkv"), run(model, "snapkv", correction=MERGE)
    before = [store.log_weight_C[store.index_N()] for store in counted.state.stores]
    both = Cache.concat([plain.fork(), counted.fork()])
    for store, before_N in zip(both.state.stores, before, strict=True):
        weight_N = store.log_weight_C[store.index_N()]
        assert not bool(weight_N[: -len(before_N)].any()) and torch.equal(
            weight_N[-len(before_N) :], before_N
        )
    mask = torch.cat([tiny_batch((0, 7), 60)[1], torch.ones(2, 3, dtype=torch.long)], dim=1)
    ids = torch.randint(5, 90, (2, 3), generator=torch.Generator().manual_seed(1))

    def asked(each, times):
        where = positions_of(mask)[:, -3:].repeat(times, 1)
        given = {"attention_mask": mask.repeat(times, 1), CACHE: each, "position_ids": where}
        with torch.no_grad():
            return model(input_ids=ids.repeat(times, 1), **given).logits

    apart = torch.cat([asked(plain, 1), asked(counted, 1)])
    assert_close(asked(both, 2), apart, dtype=torch.float32, ops=8)
    assert float((apart[:2] - apart[2:]).abs().max()) > 1e-3
    counted.crop(60)
    for store, before_N in zip(counted.state.stores, before, strict=True):
        assert torch.equal(store.log_weight_C[store.index_N()], before_N)

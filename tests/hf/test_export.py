"""Token sets of a cache, and a plain `DynamicCache` of them that goes on to the same numbers."""

from dataclasses import replace

import pytest
import torch

import retain
from retain.budget.one_set import Selection
from retain.hf.model.decoder import describe
from retain.hf.version_names import CACHE
from retain.policy import load_policy
from retain.protection import Protection
from tests.close import assert_close
from tests.hf.regime_runs import agree, exact_model, life
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

FEW = {"sinks": 1, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "minimum": 0, "recent": 4}
SNAPKV = {"observed_settings": {"window": 4}, "protection": FEW}


def made(model, **settings):
    return retain.Cache(model, "snapkv", **{**SNAPKV, "keep_ratio": 0.4, **settings})


def entry_bytes(model):
    """Bytes of a key and a value."""
    spec = describe(model)[0]
    return 2 * spec.head_dim * model.dtype.itemsize


@pytest.mark.parametrize("shared", ["layer", "model"])
def test_other_code_goes_on_from_a_token_set_as_the_cache_does(shared):
    model = exact_model()
    retain.attach(model)
    ids, _ = tiny_batch((0, 0), 40)
    cache = made(model, selection={"shared": shared}).prefill(ids[:, :30])
    sets, plain = cache.token_sets(), cache.to_dynamic_cache()
    assert all(tokens.shape == (2, 12) for tokens in sets) and plain.get_seq_length() == 12
    assert all(torch.equal(sets[0], tokens) for tokens in sets) == (shared == "model")
    # Of a budget that leaves an entry, what all heads (and layers) hold is exported.
    uneven = made(model, selection={"shared": shared}, keep_ratio=None, bytes=entry_bytes(model) * 75)
    uneven.prefill(ids[:, :30])
    assert uneven.report().total.entries_held == 150
    assert uneven.to_dynamic_cache().get_seq_length() == 12
    for tokens in sets:
        assert {0, 26, 27, 28, 29} <= {*tokens[0].tolist()} and bool((tokens.diff() > 0).all())
    with torch.no_grad():
        for at in range(30, 33):
            place = torch.full((2, 1), at)
            want = model(ids[:, at : at + 1], **{CACHE: cache}).logits
            got = model(ids[:, at : at + 1], position_ids=place, **{CACHE: plain}).logits
            assert_close(got, want)
    assert plain.get_seq_length() == 15


def test_entries_in_few_bits_are_decoded():
    """What attention decodes as it reads is what the copy holds, row by row."""
    model = exact_model()
    retain.attach(model)
    ids, _ = tiny_batch((0, 0), 40)
    own = {"selection": {"shared": "model"}, "precision": {"bits": 4, "group": 4, "recent": 5}}
    cache = made(model, **own).prefill(ids[:, :30])
    sets, plain = cache.token_sets(), cache.to_dynamic_cache()
    for idx, (store, tokens) in enumerate(zip(cache.state.stores, sets, strict=True)):
        assert [tier.entries_held for tier in store.tiers] == [2 * 2 * 7, 2 * 2 * 5]
        for row in range(4):
            keys, values, positions = store.row(*divmod(row, 2))
            assert torch.equal(positions, tokens[row // 2])
            assert torch.equal(plain.layers[idx].keys[divmod(row, 2)], keys)
            assert torch.equal(plain.layers[idx].values[divmod(row, 2)], values)
    with torch.no_grad():
        place = torch.full((2, 1), 30)
        want = model(ids[:, 30:31], **{CACHE: cache}).logits
        assert_close(model(ids[:, 30:31], position_ids=place, **{CACHE: plain}).logits, want)


@pytest.mark.parametrize("shared", ["layer", "model"])
@pytest.mark.parametrize("regime", ["prefill+decode", "chunked+decode"])
def test_a_shared_set_in_a_life_of_evictions(shared, regime):
    policy = replace(
        load_policy("snapkv", ["observed_settings={window: 4}"]),
        selection=Selection(shared),
        protection=Protection(**FEW),
    )
    naive = agree(exact_model(), policy, life(1), regime=regime, keep_ratio=0.4)
    sets = naive.history[-1]
    for held in sets:  # but for one token that the budget leaves to some
        assert (held.any(1) & ~held.all(1)).sum(-1).le(1).all()
    some, every = torch.cat(sets, 1).any(1), torch.cat(sets, 1).all(1)
    assert ((some & ~every).sum(-1).le(1).all()) == (shared == "model")


@pytest.mark.parametrize("shared", ["layer", "model"])
@pytest.mark.parametrize(("name", "ratio"), [("snapkv", 0.37), ("h2o", 0.37), ("keydiff", 0.43)])
def test_heads_do_not_drift_apart_while_tokens_are_generated(shared, name, ratio):
    """What a budget leaves to some heads changes with every eviction."""
    model = exact_model("qwen3")
    retain.attach(model)
    ids, _ = tiny_batch((0,), 70)
    own = {**SNAPKV, "observed_settings": {"window": 4} if name == "snapkv" else {}}
    cache = retain.Cache(
        model, name, keep_ratio=ratio, regime="prefill+decode", every=3, selection={"shared": shared}, **own
    )
    cache.prefill(ids[:, :40])
    with torch.no_grad():
        for at in range(40, 70):
            model(ids[:, at : at + 1], **{CACHE: cache})
            sets = cache.token_sets()
            assert cache.to_dynamic_cache().get_seq_length() <= len(sets[0][0])
            if cache.num_seen == cache.state.evicted_at:  # the budget, to the entry
                entries = sum(int(ratio * (at + 1) * 2 + 0.5) for _ in sets)
                assert cache.report().total.entries_held == entries


def test_what_has_no_token_set_is_said():
    model = tiny_model("llama")
    retain.attach(model)
    ids, mask = tiny_batch((0, 6), 40)
    refused("nothing was evicted, so each layer holds all", made(model).prefill(ids, evict=False).token_sets)
    refused(
        "heads of layer 0 hold different tokens, .* of 16 not in all",
        made(model).prefill(ids).token_sets,
    )
    own = {"shared": "layer"}
    uneven = made(model, selection=own).prefill(ids, mask)
    refused("sequences hold between 13 and 16 tokens in layer 0", uneven.token_sets)
    falling = made(model, selection=own, allocation={"layers": "pyramid", "beta": 4}).prefill(ids)
    assert falling.token_sets()[0].shape > falling.token_sets()[-1].shape
    refused("a DynamicCache is as long in each", falling.to_dynamic_cache)
    merged = made(model, selection=own, correction={"threshold": 0.1, "count": True}).prefill(ids)
    refused("count for several", merged.to_dynamic_cache)
    sliding = tiny_model("gemma3")
    retain.attach(sliding)
    cache = made(sliding, selection=own).prefill(ids)
    assert len(cache.token_sets()) < len(cache.layers)
    refused("layers .* evict nothing, and what they hold is not exported", cache.to_dynamic_cache)

"""Short sequences: held whole where the policy cannot evict from them within its budget, and reported; or
refused, as longer ones are."""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.hf.regime_runs import exact_model
from tests.refused import refused
from tests.tiny import PAD, tiny_batch

HEADS, ENTRY = 3 * 2, 2 * 16 * 8  # of the model: KV heads of all layers, bytes of an entry in float64
# Sequences of 300, 60 and 15 tokens; what snapkv protects is 36 tokens.
PADS, WIDTH = (0, 240, 285), 300


def test_what_short_is_and_what_is_done_about_it(tmp_path):
    model = exact_model("qwen3")
    ids, mask = tiny_batch((0, 40), 100)
    given = {"keep_ratio": 0.2, "when": "chunk"}
    with retain.attach(model):
        cache = Cache(model, "snapkv", **given, short="raise")
        refused("sequence 0 has a budget of 20 .* 16 fewer than the 36", cache.prefill, ids, mask)
        with pytest.raises(ValueError, match="sequence 0 has a budget of 20"):
            cache.prefill(ids, mask, chunk_size=30)  # of which no chunk alone is too long
        cache = Cache(model, "snapkv", **given).prefill(ids, mask)
        assert cache.state.held_whole == [0, 1] and cache.evictions == 0
        again = Cache.load(cache.save(tmp_path / "short.safetensors"), model)
        assert again.state.held_whole == [0, 1] and again.short == "keep"
        again.batch_select_indices(torch.tensor([1, 0, 1]))
        one = Cache(model, "snapkv", tokens_per_head=40).prefill(ids, mask)
        stacked = Cache.concat([one, again, again.fork()])
        assert one.state.held_whole == [] and stacked.state.held_whole == [*range(2, 8)]
        # A turn makes them long enough for a budget that holds what is protected.
        new, more = tiny_batch((0, 0, 0), 200, seed=3)
        whole = torch.cat([again.state.valid_BT.long(), more], dim=1)
        where = (whole.cumsum(-1) - 1)[:, again.num_seen :]
        with torch.no_grad():
            model.model(input_ids=new, attention_mask=whole, position_ids=where, **{CACHE: again})
        assert again.state.held_whole == [] and again.evictions == 1
    refused("short is 'keep' or 'raise'; got 'kept'", Cache, model, "snapkv", keep_ratio=0.2, short="kept")


def test_a_sequence_that_grows_too_long_to_be_held_whole_is_an_error_that_breaks_nothing():
    model, (ids, mask) = exact_model("qwen3"), tiny_batch((0, 0), 246)
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    with retain.attach(model):
        given = {"tokens_per_head": 16, "when": "prefill+decode", "every": 4}
        cache = Cache(model, "snapkv", **given)
        with pytest.raises(ValueError, match="sequence 0 has a budget of 16 .* 20 fewer than the 36"):
            model.generate(ids, attention_mask=mask, **{CACHE: cache}, **how)
        assert (
            cache.num_seen == 258
            and cache.entries_held == cache.report().total.entries_seen == 2 * 258 * HEADS
        )
        assert cache.fork().state.held_whole == [0, 1]  # a broken one refuses to be copied


def test_what_is_too_short_for_anything():
    """Fewer tokens than heads can share, or than the window that is looked at."""
    model, (ids, mask) = exact_model("qwen3"), tiny_batch((0, 37), 40)
    few = {"protection": {"sinks": 1, "recent": 1, "prefix_fraction": 0.0, "suffix_fraction": 0.0}}
    with retain.attach(model):
        for settings in ({"observed_settings": {"window": 8}}, {}):
            name = "snapkv" if settings else "knorm"
            asked = {"keep_ratio": 0.7 if settings else 0.1, **few, **settings}
            cache = Cache(model, name, **asked).prefill(ids, mask)
            assert cache.state.held_whole == [1] and cache.evictions == 1
            with pytest.raises(ValueError, match="sequence 1 of (2 has 3 tokens, which is shorter|3 tokens)"):
                Cache(model, name, short="raise", **asked).prefill(ids, mask)

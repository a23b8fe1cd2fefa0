"""Peak memory, counted storage by storage while a model reads: what is claimed beyond what stays."""

import pytest
import torch

from retain.hf.cache.cache import Cache
from tests.memory import Watch
from tests.tiny import attached, tiny_batch

LAYERS, TOKENS = 6, 1024
LAYER = 2 * TOKENS * 2 * 64 * 2 * 4  # sequences x tokens x heads x width x (keys, values) x bytes
PROTECTION = {"recent": 8, "sinks": 2, "prefix_fraction": 0, "suffix_fraction": 0}
POLICIES = {"snapkv": {}, "adakv": {}, "lava": {}, "cake": {}, "joint": {"policy": "adakv", "scope": "model"}}


def model():
    return attached("llama", num_hidden_layers=LAYERS, hidden_size=32, head_dim=64)


def cache_of(model, name, **settings):
    given = {"policy": name, "observed_settings": {"window": 8}, "protection": PROTECTION, **POLICIES[name]}
    return Cache(model, keep_ratio=0.1, **{**given, **settings})


@torch.no_grad()
def without_cache(model, ids, mask) -> int:
    with Watch() as watch:
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    return watch.peak


def test_the_watch_sees_a_cache_that_holds_everything():
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    alone = without_cache(one, ids, mask)
    with Watch() as watch:
        cache = Cache(one, policy=None).prefill(ids, mask)
    assert watch.peak - alone > (LAYERS - 1) * LAYER
    assert watch.live > LAYERS * LAYER * 0.9
    assert cache.entries_evicted == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefill_holds_the_budget_and_one_layer_and_its_copy_at_most(name):
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    alone = without_cache(one, ids, mask)
    with Watch() as watch:
        cache = cache_of(one, name).prefill(ids, mask)
    assert cache.entries_evicted > 0.85 * cache.entries_seen
    assert watch.peak - alone <= cache.bytes_allocated() + 2 * LAYER
    assert watch.live <= cache.bytes_allocated() + LAYER / 8  # what else stays: padding, positions, token ids


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk", [64, 100])
def test_a_chunked_prefill_holds_the_budget_and_a_chunk(name, chunk):
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    share = chunk / TOKENS
    alone = without_cache(one, ids[:, :chunk], mask[:, :chunk])
    with Watch() as watch:
        cache = cache_of(one, name, regime="chunked").prefill(ids, mask, chunk_size=chunk)
    assert cache.evictions == -(-TOKENS // chunk) - cache_free_chunks(chunk)
    # The chunk is in all layers before they are cut. One layer's copy: its columns, at most all that was
    # seen.
    room = cache.bytes_allocated() + share * LAYERS * LAYER + 2 * LAYER
    assert watch.peak - alone <= room
    assert room < 0.75 * LAYERS * LAYER  # or else it would claim nothing


def cache_free_chunks(chunk: int) -> int:
    """Chunks after which the budget, a tenth of the whole context, still holds everything."""
    return int(0.1 * TOKENS) // chunk

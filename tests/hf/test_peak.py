"""Peak memory, counted storage by storage while a model reads: what is claimed beyond what stays."""

import pytest
import torch

from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.hf import test_static_decoding as static
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
    assert cache.report().total.entries_evicted == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefill_holds_the_budget_and_one_layer_and_its_copy_at_most(name):
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    alone = without_cache(one, ids, mask)
    with Watch() as watch:
        cache = cache_of(one, name).prefill(ids, mask)
    assert cache.report().total.entries_evicted > 0.85 * cache.report().total.entries_seen
    assert watch.peak - alone <= cache.report().total.bytes_allocated + 2 * LAYER
    assert (
        watch.live <= cache.report().total.bytes_allocated + LAYER / 8
    )  # what else stays: padding, positions, token ids


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk", [64, 100])
def test_a_chunked_prefill_holds_the_budget_and_a_chunk(name, chunk):
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    share = chunk / TOKENS
    alone = without_cache(one, ids[:, :chunk], mask[:, :chunk])
    with Watch() as watch:
        cache = cache_of(one, name, when="chunk").prefill(ids, mask, chunk_size=chunk)
    assert cache.evictions == -(-TOKENS // chunk) - cache_free_chunks(chunk)
    # The chunk is in all layers before they are cut. One layer's copy: its columns, at most all that was
    # seen.
    room = cache.report().total.bytes_allocated + share * LAYERS * LAYER + 2 * LAYER
    assert watch.peak - alone <= room
    assert room < 0.75 * LAYERS * LAYER  # or else it would claim nothing


def cache_free_chunks(chunk: int) -> int:
    """Chunks after which the budget, a tenth of the whole context, still holds everything."""
    return int(0.1 * TOKENS) // chunk


LONG, NEW = 2048, 64  # tokens of a prompt that is decoded in one graph


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "snapkv", "layer_defensivekv", "merge", "packed_merged"])
def test_a_pool_takes_a_quarter_more_than_its_entries_at_most(policy):
    """Allocated are the kept entries and places for the tokens to come, by 1.25, and tables; and a prefill
    peaks at the budget and two full layers, the pool included."""
    one, (ids, mask) = model(), tiny_batch((0, 5), LONG)
    alone = without_cache(one, ids, mask)
    with Watch() as watch:
        bits = {"precision": {"bits": 4, "recent": 32}} if policy in static.PACKED else {}
        cache = Cache(one, None) if policy == "full" else static.cache_of(one, policy, keep_ratio=0.2, **bits)
        with cache.engine.generation.running(cache.state, NEW):
            one(ids, attention_mask=mask, logits_to_keep=1, **{CACHE: cache})
            assert cache.engine.is_static
            total, stores = cache.report().total, cache.state.stores
            taken = watch.peak
    places = tables = 0
    for store in stores:
        for part in store.parts:
            columns = list(part.columns.values())
            each = sum(column[:1].numel() * column.element_size() for column in columns)
            # Places for what comes, of codes too; of plain rows beside codes until they are packed.
            come = NEW if part is store.packed or store.packed is None else 32
            places += (int(part.lengths_R.sum()) + len(part.lengths_R) * come) * each
            tables += sum(column.nbytes for column in part.storages()) - sum(
                column.nbytes for column in columns
            )
    assert total.bytes_held < places < total.bytes_allocated <= 1.25 * places + tables
    if "merge" not in policy:  # which has temporaries of its own
        assert taken - alone <= total.bytes_allocated + 2 * LAYER * LONG // TOKENS

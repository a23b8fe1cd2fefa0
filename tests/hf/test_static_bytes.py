"""Bytes of a cache that is decoded in one graph: what its pool takes, and the peak of its prefill."""

import pytest
import torch

from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.hf.test_peak import model, without_cache
from tests.hf.test_static_decoding import PACKED, cache_of
from tests.memory import Watch
from tests.tiny import tiny_batch

TOKENS, NEW = 2048, 64
LAYER = 2 * TOKENS * 2 * 64 * 2 * 4  # sequences x tokens x heads x width x (keys, values) x bytes


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "snapkv", "layer_defensivekv", "merge", "packed_merged"])
def test_a_pool_takes_a_quarter_more_than_its_entries_at_most(policy):
    """Allocated are the kept entries and places for the tokens to come, by 1.25, and tables; and a prefill
    peaks at the budget and two full layers, the pool included."""
    one, (ids, mask) = model(), tiny_batch((0, 5), TOKENS)
    alone = without_cache(one, ids, mask)
    with Watch() as watch:
        bits = {"precision": {"bits": 4, "recent": 32}} if policy in PACKED else {}
        cache = Cache(one, None) if policy == "full" else cache_of(one, policy, keep_ratio=0.2, **bits)
        with cache.engine.generating(NEW):
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
            places += (part.entries_held + len(part.lengths_R) * come) * each
            tables += sum(column.nbytes for column in part.storages()) - sum(
                column.nbytes for column in columns
            )
    assert total.bytes_held < places < total.bytes_allocated <= 1.25 * places + tables
    if "merge" not in policy:  # which has temporaries of its own
        assert taken - alone <= total.bytes_allocated + 2 * LAYER

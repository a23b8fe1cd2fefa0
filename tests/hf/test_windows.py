"""Models whose layers all have a sliding window: what no later query sees goes first, whichever way a cache
is cut, and a sequence is cut alike whatever its batch-mates' lengths are."""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from tests.close import MODEL, assert_close
from tests.hf.regime_runs import exact_model, gates_of
from tests.tiny import tiny_batch, tiny_model

WINDOW = 24  # of `mistral_window`


def next_logits(model, cache, mask, turn):
    """Logits of a turn behind what the cache holds."""
    B, S = turn.shape
    longer = torch.cat([mask, torch.ones_like(turn)], dim=1)
    positions = longer.cumsum(-1)[:, -S:] - 1
    how = {"attention_mask": longer, "position_ids": positions}
    with torch.no_grad():
        return model(input_ids=turn, cache=cache, **how).logits


@pytest.mark.parametrize("way", ["prefill", "evict_with", "function"])
@pytest.mark.parametrize("correction", [None, {"threshold": -1.0}])
def test_what_left_the_window_neither_competes_nor_is_merged(way, correction):
    """With a budget for all that a later query sees, logits are those of the full cache."""
    model = exact_model("mistral_window")
    ids, mask = tiny_batch((0, 7), 40)
    reach = WINDOW - 1
    how = {"correction": correction, "tokens_per_head": reach + bool(correction) * 2}
    with retain.attach(model):
        want = next_logits(model, Cache(model, None).prefill(ids, mask), mask, ids[:, -3:])
        cache = Cache(model, "snapkv", **how)
        if way == "prefill":
            cache.prefill(ids, mask)
        elif way == "function":
            cache = Cache(model, lambda evidence: evidence.exists_BHT).prefill(ids, mask)
        else:
            everything = [
                mask.bool()[:, None].expand(-1, spec.num_kv_heads, -1) for spec in cache.state.specs
            ]
            merge = cache.state.bound_policy.correction
            cache.prefill(ids, mask, evict=False).evict_with(everything, correction=merge)
        assert cache.report().total.entries_held == 2 * reach * cache.state.layout.num_kv_heads
        assert_close(next_logits(model, cache, mask, ids[:, -3:]), want, ops=MODEL)


@pytest.mark.parametrize("name", ["snapkv", "merge", "h2o", "expected_attention", "cake"])
def test_batch_mates_decide_nothing(name):
    """A sequence of 35 tokens, alone, padded to more than the window of 40, and beside one of 55 tokens."""
    model = tiny_model("mistral_window", sliding_window=40, dtype=torch.float64)
    ids, mask = tiny_batch((0, 20), 55)
    how = {"gates": gates_of(model), "protection": {"sinks": 2, "recent": 4}} if name == "merge" else {}
    found = []
    with retain.attach(model):
        for seq_ids, seq_mask in ((ids[1:, 20:], mask[1:, 20:]), (ids[1:], mask[1:]), (ids, mask)):
            cache = Cache(model, name, keep_ratio=0.3, **how).prefill(seq_ids, seq_mask)
            logits = next_logits(model, cache, seq_mask, seq_ids[:, -3:])
            found.append((cache.entries_by_head()[-1], logits[-1]))
    for held_LH, logits in found[1:]:
        assert torch.equal(held_LH, found[0][0])
        assert_close(logits, found[0][1], ops=MODEL)

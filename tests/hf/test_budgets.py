"""Budgets that cross layers, in a cache that is really filled: what it holds, when, and that it attends
right."""

import pytest
import torch

from retain.attention.head_weights import format_weights
from retain.budget.statement import Budget, spread
from retain.hf.cache.cache import Cache
from retain.protection import Protection
from retain.shapes import LayerShape
from tests.evictions import policy_of
from tests.held import row_of
from tests.hf.regime_runs import FEW, assert_same_stores
from tests.tiny import attached, tiny_batch

SMALL = Protection(sinks=2, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=4)
WINDOW = {"window": 8}
CROSSING = {
    "joint": policy_of(
        "joint", "defensive", {**WINDOW, "norm": "token_sum"}, protection=SMALL, scope="model"
    ),
    "joint in two stages": policy_of(
        "joint2",
        "critical",
        WINDOW,
        protection=SMALL,
        scope="model",
        first_stage={"by": "budget", "share": 0.5},
    ),
    "lava": policy_of(
        "lava", "lava", WINDOW, protection=SMALL, scope="layer", allocation={"layers": "entropy"}
    ),
    "cake": policy_of("cake", "cake", WINDOW, protection=SMALL, allocation={"layers": "cake"}),
    "pyramid": policy_of(
        "pyramid", "snapkv", WINDOW, protection=SMALL, allocation={"layers": "pyramid", "beta": 5.0}
    ),
}


def _model(**settings):
    return attached("qwen3", num_hidden_layers=5, **settings)


@pytest.mark.parametrize("name", CROSSING)
def test_what_is_evicted_layer_by_layer_is_what_would_be_evicted_at_once(name):
    model, (ids, mask) = _model(), tiny_batch((0, 3, 11), 60)
    cascade = Cache(model, CROSSING[name], keep_ratio=0.3).prefill(ids, mask)
    once = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
    once.evict_with(cascade.state.bound_policy.decide(once.evidence).finish())
    assert (
        cascade.entries_held
        == once.entries_held
        == sum(5 * int(0.3 * length * 2 + 0.5) for length in (60, 57, 49))
    )
    assert_same_stores(cascade, once)
    assert len(set(cascade.entries_by_head()[0].flatten().tolist())) > 1


@pytest.mark.parametrize("correction", [None, {"threshold": -1.0}])
def test_a_byte_ratio_is_never_exceeded_and_what_fits_stays(correction):
    """41 tokens in 3 layers of 2 heads: 246 entries, 0.4 of which are 98.4."""
    model, (ids, mask) = attached("qwen3", num_hidden_layers=3), tiny_batch((0,), 41)
    how = {"protection": SMALL, "scope": "model", "correction": correction}
    for ratio in (0.2, 0.4, 0.7, 0.99):
        cache = Cache(model, "snapkv", byte_ratio=ratio, **how).prefill(ids, mask)
        entry = cache.bytes_held() // cache.entries_held
        assert (
            ratio * cache.report().total.bytes_full - entry
            < cache.bytes_held()
            <= ratio * cache.report().total.bytes_full
        )
    full = cache.report().total.bytes_full
    for whole in ({"byte_ratio": 1.0}, {"bytes": full}, {"bytes": full + 100}):
        cache = Cache(model, "snapkv", **whole, **how).prefill(ids, mask)
        assert (cache.entries_held, cache.bytes_held(), cache.evictions) == (246, full, 0)
    cache = Cache(model, "snapkv", bytes=full - 1, **how).prefill(ids, mask)
    assert cache.evictions == 1 and cache.bytes_held() <= full - 1


def test_a_sequence_that_fits_is_held_as_it_is_next_to_one_that_is_merged():
    model, (ids, mask) = attached("qwen3", num_hidden_layers=3), tiny_batch((0, 20), 41)
    how = {"protection": SMALL, "correction": {"threshold": -1.0}}
    alone = Cache(model, "snapkv", bytes=10**6, **how).prefill(ids[1:, 20:])
    cache = Cache(model, "snapkv", bytes=alone.bytes_held(), **how).prefill(ids, mask)
    assert cache.entries_by_head()[1].sum() == alone.entries_held == 21 * 6
    assert cache.state.stores[0].log_weight_C is not None
    assert alone.bytes_held() < cache.bytes_held() <= 2 * alone.bytes_held()


@pytest.mark.parametrize(
    "budget", [{"keep_ratio": 0.3}, {"tokens_per_head": 30}, {"bytes": 128 * 200}, {"byte_ratio": 0.4}]
)
def test_a_prefill_holds_exactly_what_was_stated_and_each_head_its_share(budget, tmp_path):
    table = tmp_path / "heads.json"
    importance = (0.35, 0.05, 0.2, 0.15, 0.1, 0.15)
    table.write_text(format_weights({i: importance[2 * i : 2 * i + 2] for i in range(3)}))
    allocation = {"weights": str(table)}
    model, chosen = attached("qwen3"), policy_of("own", "knorm", protection=FEW, allocation=allocation)
    ids, mask = tiny_batch((0, 5, 30), 120)
    cache = Cache(model, chosen, **budget).prefill(ids, mask)
    batch = [layer.store.lengths_R.view(3, 2).tolist() for layer in cache.layers]
    for b in range(3):
        alone = Cache(model, chosen, **budget)
        alone.prefill(ids[b : b + 1, mask[b].bool()], mask[b : b + 1, mask[b].bool()])
        assert [layer.store.lengths_R.tolist() for layer in alone.layers] == [row[b] for row in batch]
    totals = spread(Budget(**budget), mask.sum(-1).tolist(), [LayerShape(2, 128)] * 3)
    for b, (total, length) in enumerate(zip(totals.total_B, totals.lengths_B, strict=True)):
        held = [count for row in batch for count in row[b]]
        assert sum(held) == total
        wanted = [3 + (total - 3 * 6) * share for share in importance]
        # No head is full, and none has less than is protected: nothing but rounding is between.
        assert max(wanted) <= length and min(wanted) >= 3
        assert all(abs(count - want) < 1 for count, want in zip(held, wanted, strict=True))
    assert cache.bytes_held() == sum(totals.total_B) * 128


def test_pinned_spans_follow_their_sequences_and_may_be_empty():
    model, (ids, mask) = _model(), tiny_batch((0, 11), 60)
    cache = Cache(model, CROSSING["joint"], keep_ratio=0.3, pinned=[[], [(30, 35)]])
    cache.prefill(ids, mask).batch_select_indices(torch.tensor([1, 0, 1]))
    assert cache.state.pinned == [[(30, 35)], [], [(30, 35)]]
    for b, pinned in ((0, True), (1, False), (2, True)):
        held = [
            set(range(30, 35)) <= set(row_of(layer.store, b, h)[2].tolist())
            for layer in cache.layers
            for h in range(2)
        ]
        assert all(held) if pinned else not all(held)
    for wrong in ([5], [(1, 2, 3)], "0-5", [[(1, 2)], [3]]):
        with pytest.raises(ValueError, match="spans are .* must be one list of .start, stop. pairs"):
            Cache(model, CROSSING["joint"], keep_ratio=0.3, pinned=wrong)

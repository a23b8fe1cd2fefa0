"""Going back and parting ways: crop equals a fresh prefill with the same evictions, or is refused and changes
nothing; a fork and what it was forked from do not reach one another."""

import pytest
import torch

from retain.cache.file_format import store_tensors
from retain.eviction import WHEN
from retain.hf.cache.cache import Cache
from tests.close import MODEL, assert_close
from tests.hf.moments import policy
from tests.hf.test_saving import POLICIES, SMALL, assert_same_state, forward, grown, random_gates
from tests.refused import refused
from tests.tiny import FAMILIES, attached, tiny_batch

PADS = (0, 3, 11)
# Families whose layers left alone (a window, a recurrent state) let go of what a crop would need.
STATEFUL = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "gemma2", "cohere2")


def fed(model, cache, mask, tokens):
    """Forwards of given tokens `[B, s]`; the last logits and the mask."""
    logits = None
    for ids in tokens:
        mask = grown(mask, ids.shape[1])
        logits = forward(model, cache, ids, mask)
    return logits, mask


def steps(number, seed):
    return list(tiny_batch((0, 0, 0), number, seed=seed)[0].split(1, dim=1))


def same_entries(one, other):
    """Every layer holds the same entries, and what stands beside them."""
    for a, b in zip(one.state.ragged, other.state.ragged, strict=True):
        left, right = store_tensors(a.store), store_tensors(b.store)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_crop_equals_never_having_read_on_or_is_refused(family):
    model, (ids, mask) = attached(family), tiny_batch(PADS)
    cache = Cache(model, policy=policy)
    forward(model, cache, ids, mask)
    fresh, base = cache.fork(), cache.fork()
    fed(model, cache, mask, steps(7, 5))
    if family in STATEFUL:
        before = cache.fork()
        refused(r"recurrent state, or whose sliding window is full.*fork\(\)", cache.crop, 42)
        assert_same_state(cache, before)
        return
    cache.crop(42)
    _, mask_42 = fed(model, fresh, mask, steps(7, 5)[:2])
    assert_same_state(cache, fresh)
    after = steps(9, 6)
    got, want = (fed(model, one, mask_42, after)[0] for one in (cache, fresh))
    assert torch.equal(got, want)
    assert_same_state(cache, fresh)
    # Back by a number, to where the prompt ended; as if only that had been read.
    cache.crop(-11)
    assert same_entries(cache, base) and cache.num_seen == 40
    got, want = (fed(model, one, mask, after)[0] for one in (cache, base))
    assert torch.equal(got, want)
    refused(r"cannot go back to 39: entries were evicted.*fork\(\)", cache.crop, 39)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma2", "cohere2"])
def test_layers_with_a_window_go_back_until_it_is_full(family):
    """As if the tokens had never come; a fork from before is not reached."""
    model, (ids, mask) = attached(family), tiny_batch((0, 2, 3), 7)
    cache = Cache(model, policy=None)
    forward(model, cache, ids, mask)
    fresh, base = cache.fork(), cache.fork()
    fed(model, cache, mask, steps(6, 5))
    cache.crop(9)
    _, mask_9 = fed(model, fresh, mask, steps(6, 5)[:2])
    assert_same_state(cache, fresh)
    after = steps(9, 6)  # on beyond the window
    got, want = (fed(model, one, mask_9, after)[0] for one in (cache, fresh))
    assert torch.equal(got, want)
    assert_same_state(cache, fresh)
    refused(r"window is full.*fork\(\)", cache.crop, 9)
    assert base.num_seen == 7 and fresh.report().total.bytes_held == cache.report().total.bytes_held


# Of keys; of attention inputs; of a window of queries; of all queries since the last eviction.
AGAIN = {"keydiff": {"keep_ratio": 0.4}, **{name: POLICIES[name] for name in ("gate", "snapkv")}}
AGAIN["expected_attention"] = POLICIES["expected_attention"]


def evicts_again(family, name, when, every, **settings):
    """A model, the mask of a prompt, and a cache that has read it."""
    model, (ids, mask) = attached(family), tiny_batch(PADS)
    settings = {"protection": SMALL, **settings}
    gates = random_gates(model) if settings.pop("gates", None) else None
    cache = Cache(model, name, gates=gates, when=when, every=every, **settings)
    forward(model, cache, ids, mask)
    return model, mask, cache


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("when", WHEN[1:])
@pytest.mark.parametrize("name", AGAIN)
def test_later_evictions_are_those_of_a_cache_that_never_read_on(family, when, name):
    model, mask, cache = evicts_again(family, name, when, 8, **AGAIN[name])
    fresh, turn = cache.fork(), tiny_batch((0, 0, 0), 6, seed=8)[0]
    fed(model, cache, mask, steps(6, 5))
    cache.crop(42)
    _, mask_42 = fed(model, fresh, mask, steps(6, 5)[:2])
    assert_same_state(cache, fresh)
    evictions = cache.evictions
    for after in (steps(9, 6), [turn], steps(8, 9)):
        got, want = (fed(model, one, mask_42, after)[0] for one in (cache, fresh))
        mask_42 = grown(mask_42, sum(ids.shape[1] for ids in after))
        assert torch.equal(got, want)
        assert_same_state(cache, fresh)
    assert cache.evictions > evictions


@pytest.mark.parametrize("name, why", [("keydiff", None), ("gate", None), ("snapkv", "queries from before")])
def test_crop_into_tokens_whose_metadata_is_stored(name, why, monkeypatch):
    monkeypatch.setattr("retain.hf.cache.engine.MOST_RECENT", 4)
    model, mask, cache = evicts_again("qwen3", name, "prefill+decode", 16, **AGAIN[name])
    fresh = cache.fork()
    fed(model, cache, mask, steps(7, 5))
    if why:
        before = cache.fork()
        refused(rf"{why}.*fork\(\)", cache.crop, 42)
        assert_same_state(cache, before)
        return
    cache.crop(42)
    _, mask_42 = fed(model, fresh, mask, steps(7, 5)[:2])
    got, want = (fed(model, one, mask_42, steps(20, 6))[0] for one in (cache, fresh))
    assert_close(got, want, ops=MODEL)
    assert cache.evictions == 2 and torch.equal(cache.entries_by_head(), fresh.entries_by_head())


@pytest.mark.parametrize(
    "name, when, length, why",
    [
        ("h2o", "prefill+decode", 42, "statistics of all queries"),
        ("keydiff", "prefill+decode", 47, "entries were evicted when it had seen 48"),
        ("keydiff", "decode", 39, "entries were evicted when it had seen 48"),
    ],
)
def test_crop_is_refused_where_later_evictions_would_read_freed_data(name, when, length, why):
    settings = {"h2o": POLICIES["h2o"], "keydiff": AGAIN["keydiff"]}[name]
    model, mask, cache = evicts_again("llama", name, when, 8, **settings)
    fed(model, cache, mask, steps(7 if name == "h2o" else 9, 5))
    before = cache.fork()
    refused(rf"{why}.*fork\(\)", cache.crop, length)
    assert_same_state(cache, before)


def test_crop_is_refused_while_the_first_prompt_is_read():
    model, (ids, mask) = attached("llama"), tiny_batch(PADS)
    cache = Cache(model, "keydiff", keep_ratio=0.4, when="decode", protection=SMALL)
    cache.state.prompt_mask_BT = mask.bool()
    forward(model, cache, ids[:, :20], mask[:, :20])
    refused(r"still being read.*fork\(\)", cache.crop, 12)


@pytest.mark.parametrize("name", POLICIES)
def test_chosen_sequences_go_on_as_they_would_have(name):
    """Evidence follows its sequence: queries, attention inputs, statistics, seeds and pins."""
    model, (ids, mask) = attached("qwen3", dtype=torch.float64), tiny_batch(PADS)
    idx, after = torch.tensor([2, 0, 2]), steps(9, 6)
    settings = {"protection": SMALL, **POLICIES[name]}
    gates = random_gates(model) if settings.pop("gates", None) else None
    when = {"when": "prefill+decode", "every": 5}
    cache = Cache(model, name.partition(":")[0], gates=gates, **when, **settings)
    forward(model, cache, ids, mask)
    whole = fed(model, cache, mask, steps(3, 5))[1]
    some, again = cache.fork(), cache.fork()
    some.batch_select_indices(idx)
    again.reorder_cache(idx)
    want, _ = fed(model, cache, whole, after)
    for one in (some, again):
        got, _ = fed(model, one, whole[idx], [tokens[idx] for tokens in after])
        assert_close(got, want[idx], dtype=torch.float32, ops=MODEL)
        assert torch.equal(one.entries_by_head(), cache.entries_by_head()[idx])
        assert one.evictions == cache.evictions == 3

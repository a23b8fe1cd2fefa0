"""Chunks, turns and conversations on a cache that evicts again: against one-shot, solo and fresh runs."""

import itertools
from dataclasses import replace

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import assert_close
from tests.evictions import EVICTING, small
from tests.hf.masked import positions_of
from tests.hf.regime_runs import (
    FEW,
    SEEDS,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
)
from tests.refused import refused
from tests.tiny import tiny_batch


@pytest.fixture(scope="module")
def exact():
    """A model in float64, attached for this file."""
    model = exact_model()
    with retain.attach(model):
        yield model


def named(model, policy, *, batch: int = 3, **settings) -> Cache:
    gates = gates_of(model) if policy.learned else None
    return Cache(model, policy, gates=gates, **{"seeds": SEEDS[:batch], "keep_ratio": 0.4, **settings})


@torch.no_grad()
def ask(model, cache, mask, seed: int = 5):
    """Logits of a left-padded question, and the mask after it."""
    new, new_mask = tiny_batch(tuple(range(len(mask))), 5, seed=seed)
    whole = torch.cat([mask, new_mask], dim=1)
    where = positions_of(whole)[:, mask.shape[1] :]
    logits = model(input_ids=new, attention_mask=whole, position_ids=where, **{CACHE: cache}).logits
    return logits[new_mask.bool()], whole


def same_stores(one: Cache, two: Cache, mask) -> None:
    for a, b in zip(held_by(one, mask), held_by(two, mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", EVICTING)
def test_a_prompt_in_chunks_that_is_evicted_once_equals_the_prompt_at_once(name, exact, heads_file):
    policy, (ids, mask) = small(name, heads_file), tiny_batch((0, 3, 11))
    once = named(exact, policy).prefill(ids, mask)
    # 7 does not divide 40, and the first chunk of the third sequence is all padding.
    chunks = named(exact, policy).prefill(ids, mask, chunk_size=7)
    same_stores(chunks, once, mask)
    assert chunks.evictions == once.evictions == 1 and chunks.report().total.entries_evicted > 0
    got, whole = ask(exact, chunks, mask)
    want, _ = ask(exact, once, mask)
    assert_close(got, want, dtype=torch.float32)
    free, _ = ask(exact, Cache(exact, policy=None).prefill(ids, mask), mask)
    assert float((got - free).abs().max()) > 1e-2
    # Nothing that only a later eviction would read is held for one that does not come.
    for layer in chunks.state.ragged:
        assert layer.recent.num_bytes == 0 and set(layer.store.side) <= {"log_weight"}
    same_stores(chunks, once, whole)


@pytest.mark.parametrize("every", [1, 3])
def test_decoding_goes_back_to_the_budget_and_never_into_the_recent_window(every, exact, heads_file):
    policy = replace(small("tova", heads_file), protection=replace(FEW, recent=5))
    scenario = life(3, chunk=None, steps=(13, 0), turn=0)
    cache = named(exact, policy, when="prefill+decode", every=every, keep_ratio=None, tokens_per_head=9)
    _, held = lived(exact, cache, scenario)
    for step, layers in enumerate(held):
        for layer in layers:
            assert set(layer.sum(-1).flatten().tolist()) == {9 + step % every}
            assert bool(layer[..., -5:].all())  # decided later
    # What was in the window at one moment goes at a later one.
    assert any(not bool(layer[..., -9:-5].all()) for layer in held[-1])
    assert cache.evictions == 1 + 13 // every
    assert cache.report().evictions == cache.evictions


def test_a_ratio_grows_with_what_was_seen_and_decode_alone_waits_for_the_prompt_to_end(exact, heads_file):
    policy = small("knorm", heads_file)
    scenario = life(1, chunk=None, steps=(12, 0), turn=0)
    cache = named(exact, policy, batch=1, when="decode", every=4, keep_ratio=0.5)
    _, held = lived(exact, cache, scenario)
    entries = [sum(int(layer.sum()) for layer in layers) // 6 for layers in held]
    assert entries == [40, 41, 42, 43, 22, 23, 24, 25, 24, 25, 26, 27, 26]


@pytest.fixture
def forwards(exact):
    """Attention calls so far."""
    calls: list[int] = []
    hook = exact.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
    yield calls
    hook.remove()


def test_what_a_regime_is_not(exact, forwards):
    wrong = {
        "when is 'prefill', 'chunk', .*; got 'chunkd'": {"when": "chunkd"},
        "every is 0, and must be a whole number of tokens": {"when": "decode", "every": 0},
        "'wen' .did you mean 'when'": {"wen": "chunk"},
    }
    for said, given in wrong.items():
        refused(said, Cache, exact, "snapkv", keep_ratio=0.5, **given)
    (ids, mask), asked = tiny_batch((0,)), {"keep_ratio": 0.5, "protection": FEW}
    cache = Cache(exact, "knorm", when="prefill+decode", **asked)
    refused(r"evict=False, which leaves evicting to you", cache.prefill, ids, mask, evict=False)
    cache = Cache(exact, "knorm", **asked)
    refused("chunk_size is 0: pass a whole number of at least 1", cache.prefill, ids, mask, chunk_size=0)
    assert not forwards


@pytest.mark.parametrize("when", ["prefill", "chunk", "chunk+decode"])
def test_too_small_a_budget_is_found_before_the_first_chunk(when, exact, forwards):
    ids, mask = tiny_batch((0, 11))
    wide = replace(FEW, recent=9)
    budgets = [{"tokens_per_head": 8}, {"keep_ratio": 0.22}]
    for budget, chunk_size in itertools.product(budgets, (None, 7)):
        cache = Cache(exact, "knorm", **budget, when=when, every=8, protection=wide, short="raise")
        with pytest.raises(ValueError, match=r"budget of [\d.]* entries per head.*10 protected"):
            cache.prefill(ids, mask, chunk_size=chunk_size)
        assert not forwards and cache.num_seen == 0


def test_decoding_alone_asks_nothing_of_the_prompts_budget(exact):
    """A ratio of the prompt may be less than what is protected, as long as nothing is evicted yet."""
    ids, mask = tiny_batch((0,))
    settings = {"keep_ratio": 0.3, "when": "decode", "every": 100, "protection": replace(FEW, recent=16)}
    at_once = Cache(exact, "knorm", **settings).prefill(ids, mask)
    in_chunks = Cache(exact, "knorm", **settings).prefill(ids, mask, chunk_size=16)
    assert at_once.entries_held == in_chunks.entries_held == 40 * 6

"""Chunks, turns and conversations on a cache that evicts again: against one-shot, solo and fresh runs."""

import itertools
from dataclasses import replace

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.policy import Policy
from retain.protection import Protection
from tests.close import assert_close
from tests.evictions import EVICTING, small
from tests.hf.masked import masked_logits, positions_of
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import (
    FEW,
    SEEDS,
    assert_same_held,
    assert_same_logits,
    differs,
    eviction_free,
    exact_model,
    gates_of,
    held_by,
    life,
    lived,
    of_sequence,
)
from tests.tiny import tiny_batch

REGIMES = ("prefill", "chunked", "decode", "prefill+decode", "chunked+decode")


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
    assert chunks.evictions == once.evictions == 1 and chunks.entries_evicted > 0
    got, whole = ask(exact, chunks, mask)
    want, _ = ask(exact, once, mask)
    assert_close(got, want, dtype=torch.float32)
    free, _ = ask(exact, Cache(exact, policy=None).prefill(ids, mask), mask)
    assert float((got - free).abs().max()) > 1e-2
    # Nothing that only a later eviction would read is held for one that does not come.
    assert all(layer.recent.num_bytes == 0 and not layer.store.beside for layer in chunks.state.ragged)
    same_stores(chunks, once, whole)


@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *(("layer_defensivekv", regime) for regime in REGIMES),
        ("h2o", "decode"),
        ("lru", "chunked+decode"),
        ("random", "prefill+decode"),
    ],
)
def test_a_padded_batch_equals_its_sequences_alone(name, regime, exact, heads_file):
    policy = small(name, heads_file)
    own = life(3, chunk=9)
    cache = named(exact, policy, regime=regime, every=3)
    got, held = lived(exact, cache, own)
    for b in range(3):
        solo = Cache(exact, policy, keep_ratio=0.4, seeds=SEEDS[b : b + 1], regime=regime, every=3)
        want, want_held = lived(exact, solo, own.alone(b))
        logits, mine = of_sequence(own, b, got, held)
        assert_same_logits(logits, want, own.alone(b).mask)
        assert_same_held(mine, want_held)
        assert solo.evictions > 0
    assert differs(got, eviction_free(exact, own), own.mask)


@pytest.mark.parametrize("every", [1, 3])
def test_decoding_goes_back_to_the_budget_and_never_into_the_recent_window(every, exact, heads_file):
    policy = replace(small("tova", heads_file), protection=replace(FEW, recent=5))
    own = life(3, chunk=None, steps=(13, 0), turn=0)
    cache = named(exact, policy, regime="prefill+decode", every=every, keep_ratio=None, tokens_per_head=9)
    _, held = lived(exact, cache, own)
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
    own = life(1, chunk=None, steps=(12, 0), turn=0)
    cache = named(exact, policy, batch=1, regime="decode", every=4, keep_ratio=0.5)
    _, held = lived(exact, cache, own)
    entries = [sum(int(layer.sum()) for layer in layers) // 6 for layers in held]
    assert entries == [40, 41, 42, 43, 22, 23, 24, 25, 24, 25, 26, 27, 26]


def turns_of(number: int, tokens: int = 12):
    """Token ids of a conversation, turn by turn."""
    return [tiny_batch((0,), tokens, seed=20 + turn)[0] for turn in range(number)]


def test_ten_turns_keep_a_pinned_span_in_constant_memory(exact):
    turns, pinned = turns_of(10), [(0, 10)]
    policy = Policy(
        "turns",
        "snapkv",
        {"window": 4, "pool_size": 3},
        scope="layer",
        protection=Protection(0, 0.0, 0.0, 0, 4),
    )
    # A question read at once, an answer token by token.
    chunks = [part for ids in turns for part in (ids[:, :-2], *ids[:, -2:].split(1, dim=1))]
    ids = torch.cat(chunks, dim=1)
    own = replace(life(1), chunks=chunks, mask=torch.ones_like(ids), prompt=1)
    settings = {"regime": "chunked+decode", "every": 2, "pinned": pinned}
    cache = Cache(exact, policy, tokens_per_head=30, **settings)
    got, held = lived(exact, cache, own)
    naive = Naive(exact, policy, {"tokens_per_head": 30}, **settings)
    want = naive.run(chunks, own.mask, 1)
    assert_same_held(held, naive.history)
    assert_same_logits(got, want, own.mask)
    full = [number for number, layers in enumerate(held) if layers[0].shape[-1] > 35]
    assert all(bool(layer[..., :10].all()) for number in full for layer in held[number])
    assert cache.evictions > 10 and cache.entries_evicted > 0
    counts = {sum(int(layer.sum()) for layer in held[number]) for number in full[1:]}
    # Constant, the tokens since the last moment apart.
    assert min(counts) == 30 * 6 and max(counts) <= 30 * 6 + 6
    assert differs(got, masked_logits(exact, None, chunks, own.mask), own.mask)


def test_two_conversations_do_not_disturb_each_other(exact, heads_file):
    """Forward by forward in turn, each does what it does alone."""
    lives = [life(3, chunk=9, steps=(5, 3)), life(1, tokens=25, chunk=9, steps=(7, 1), seed=7)]
    caches = [("fused", "chunked+decode"), ("h2o", "decode")]

    def cache_of(number):
        name, regime = caches[number]
        return named(exact, small(name, heads_file), batch=3 - 2 * number, regime=regime, every=3)

    alone = [lived(exact, cache_of(number), own) for number, own in enumerate(lives)]
    runs = [_stepwise(exact, cache_of(number), own) for number, own in enumerate(lives)]
    together: list[list] = [[], []]
    for steps in itertools.zip_longest(*runs):
        for out, step in zip(together, steps, strict=True):
            out += [] if step is None else [step]
    for steps, (want, want_held), own in zip(together, alone, lives, strict=True):
        logits, held = zip(*steps, strict=True)
        assert_same_held(held, want_held)
        assert_same_logits(logits, want, own.mask)


@torch.no_grad()
def _stepwise(model, cache, own):
    """`lived`, a forward at a time."""
    seen = 0
    cache.state.announce(sum(ids.shape[1] for ids in own.chunks[: own.prompt]))
    for ids in own.chunks:
        mask = own.mask[:, : seen + ids.shape[1]]
        given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
        logits = model(input_ids=ids, **{CACHE: cache}, **given).logits
        seen += ids.shape[1]
        yield logits, held_by(cache, mask)

"""What is refused of a regime, before any work; and lives that are cropped, forked or partly forgotten."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.regime_runs import (
    FEW,
    Life,
    assert_same_held,
    exact_model,
    held_by,
    lived,
    of_sequence,
)
from tests.tiny import tiny_batch


@pytest.fixture(scope="module")
def exact():
    model = exact_model()
    with retain.attach(model):
        yield model


@pytest.fixture
def forwards(exact):
    """Attention calls so far."""
    calls: list[int] = []
    hook = exact.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
    yield calls
    hook.remove()


def test_what_a_regime_is_not(exact, forwards):
    model = exact
    with pytest.raises(ValueError, match="regime is 'chunkd' .did you mean 'chunked'.*one of prefill"):
        Cache(model, "snapkv", keep_ratio=0.5, regime="chunkd")
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match=f"every is {wrong!r}, and must be a whole number of tokens"):
            Cache(model, "snapkv", keep_ratio=0.5, regime="decode", every=wrong)
    with pytest.raises(ValueError, match="'regim' .did you mean 'regime'"):
        Cache(model, "snapkv", keep_ratio=0.5, regim="chunked")
    ids, mask = tiny_batch((0,))
    for regime in ("chunked", "decode", "prefill+decode"):
        cache = Cache(model, "knorm", keep_ratio=0.5, regime=regime, protection=FEW)
        with pytest.raises(ValueError, match=rf"evict=False leaves .* regime '{re.escape(regime)}'"):
            cache.prefill(ids, mask, evict=False)
    with pytest.raises(
        ValueError, match="chunk_size is 0: pass tokens a forward, a whole number of at least 1"
    ):
        Cache(model, "knorm", keep_ratio=0.5, protection=FEW).prefill(ids, mask, chunk_size=0)
    assert not forwards


@pytest.mark.parametrize("regime", ["prefill", "chunked", "chunked+decode", "decode"])
def test_too_small_a_budget_is_found_before_the_first_chunk(regime, exact, forwards):
    ids, mask = tiny_batch((0, 11))
    wide = replace(FEW, recent=9)
    budgets = [{"tokens_per_head": 8}, {"keep_ratio": 0.22}]
    if regime == "decode":
        budgets = [{"tokens_per_head": 9}, {"keep_ratio": 0.12}, {"bytes": 9 * 6 * 256}]
    for budget, chunk_size in itertools.product(budgets, (None, 7)):
        cache = Cache(exact, "knorm", **budget, regime=regime, every=8, protection=wide, short="raise")
        with pytest.raises(ValueError, match=r"budget of [\d.]* entries per head.*10 protected"):
            cache.prefill(ids, mask, chunk_size=chunk_size)
        assert not forwards and cache.num_seen == 0
    if regime == "decode":  # a prompt and its first tokens that the budget holds need no protection
        held = Cache(exact, "knorm", tokens_per_head=9, regime=regime, every=4, protection=wide)
        held.prefill(ids[:, :4])
        assert forwards


def test_decoding_alone_asks_nothing_of_the_prompts_budget(exact):
    """A ratio of the prompt may be less than what is protected, as long as nothing is evicted yet."""
    ids, mask = tiny_batch((0,))
    settings = {"keep_ratio": 0.3, "regime": "decode", "every": 100, "protection": replace(FEW, recent=16)}
    at_once = Cache(exact, "knorm", **settings).prefill(ids, mask)
    in_chunks = Cache(exact, "knorm", **settings).prefill(ids, mask, chunk_size=16)
    assert at_once.entries_held == in_chunks.entries_held == 40 * 6


def dormant(wakes: int) -> Life:
    """The second sequence has nothing in six turns, and then some tokens."""
    ids, mask = tiny_batch((0, 3))
    draw = torch.Generator().manual_seed(4)
    chunks, rows = [ids], [mask]
    for turn in range(7):
        chunks.append(torch.randint(2, 90, (2, 9), generator=draw))
        awake = torch.arange(9) >= (9 - wakes if turn == 6 else 9)
        rows.append(torch.stack([torch.ones(9, dtype=torch.long), awake.long()]))
    return Life(chunks, torch.cat(rows, dim=1), 1)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "layer_defensivekv"])
def test_queries_stay_few_while_a_sequence_has_nothing_to_say(name, exact, heads_file, monkeypatch):
    monkeypatch.setattr("retain.hf.cache.engine.MOST_UNNOTED", 8)
    policy, own, queries = small(name, heads_file), dormant(6), []
    settings = {"tokens_per_head": 12, "regime": "chunked", "seeds": None}
    cache = Cache(exact, policy, **settings)

    def look(number):
        queries.append(max(layer.recent.num_queries for layer in cache.state.ragged))

    got, held = lived(exact, cache, own, look)
    look(-1)
    window = cache.state.bound_policy.wants.queries
    assert max(queries) <= window + 8
    for b in range(2):  # each is decided on as it would be alone
        _, want = lived(exact, Cache(exact, policy, **settings), own.alone(b))
        assert_same_held(of_sequence(own, b, got, held)[1], want)
    assert cache.evictions == 8


@pytest.mark.parametrize("how", ["batch_select_indices", "reorder_cache", "repeat"])
def test_what_is_known_of_a_prompt_that_is_still_to_come_follows_its_sequences(how, exact, heads_file):
    ids, mask = tiny_batch((0, 3, 11))
    rows = torch.tensor(
        [0, 0, 1, 1, 2, 2] if how == "repeat" else [2, 0, 1] if how == "reorder_cache" else [2, 0]
    )
    settings = {"keep_ratio": 0.4, "regime": "chunked", "pinned": [(25, 27)]}

    @torch.no_grad()
    def read(cache, rows, start, stop):
        given = {"attention_mask": mask[rows, :stop], "position_ids": positions_of(mask[rows])[:, start:stop]}
        exact(input_ids=ids[rows, start:stop], **{CACHE: cache}, **given)

    cache, fresh = (Cache(exact, small("adakv", heads_file), **settings) for _ in range(2))
    every = torch.arange(3)
    cache.state.announce(40, mask)
    read(cache, every, 0, 8)
    read(cache, every, 8, 16)
    if how == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        getattr(cache, how)(rows)
    fresh.state.announce(40, mask[rows])
    for start in range(0, 40, 8):
        read(fresh, rows, start, start + 8)
        if start >= 16:
            read(cache, rows, start, start + 8)
            held = held_by(cache, mask[rows, : start + 8]), held_by(fresh, mask[rows, : start + 8])
            assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
    counts = cache.budgets().held_BLH.sum(-1)
    lengths = mask.sum(-1)[rows]
    assert torch.equal(counts, (0.4 * 2 * lengths + 0.5).long()[:, None].expand(-1, 3))
    assert cache.state.announced_BT is None and cache.evictions == fresh.evictions > 2

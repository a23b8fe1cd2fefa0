"""Regimes, budgets and turns that are refused before any work."""

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
    exact_model,
)
from tests.refused import refused
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
    with pytest.raises(ValueError, match="chunk_size is 0: pass a whole number of at least 1"):
        Cache(model, "knorm", keep_ratio=0.5, protection=FEW).prefill(ids, mask, chunk_size=0)
    assert not forwards


@pytest.mark.parametrize("regime", ["prefill", "chunked", "chunked+decode"])
def test_too_small_a_budget_is_found_before_the_first_chunk(regime, exact, forwards):
    ids, mask = tiny_batch((0, 11))
    wide = replace(FEW, recent=9)
    budgets = [{"tokens_per_head": 8}, {"keep_ratio": 0.22}]
    for budget, chunk_size in itertools.product(budgets, (None, 7)):
        cache = Cache(exact, "knorm", **budget, regime=regime, every=8, protection=wide, short="raise")
        with pytest.raises(ValueError, match=r"budget of [\d.]* entries per head.*10 protected"):
            cache.prefill(ids, mask, chunk_size=chunk_size)
        assert not forwards and cache.num_seen == 0


def test_decoding_alone_asks_nothing_of_the_prompts_budget(exact):
    """A ratio of the prompt may be less than what is protected, as long as nothing is evicted yet."""
    ids, mask = tiny_batch((0,))
    settings = {"keep_ratio": 0.3, "regime": "decode", "every": 100, "protection": replace(FEW, recent=16)}
    at_once = Cache(exact, "knorm", **settings).prefill(ids, mask)
    in_chunks = Cache(exact, "knorm", **settings).prefill(ids, mask, chunk_size=16)
    assert at_once.entries_held == in_chunks.entries_held == 40 * 6


def test_a_turn_without_tokens_is_refused_where_its_queries_decide(exact, heads_file):
    (ids, mask), turn = tiny_batch((0, 3)), torch.full((2, 5), 7)
    whole = torch.cat([mask, torch.tensor([[1] * 5, [0] * 5])], dim=1)
    given = {"attention_mask": whole, "position_ids": positions_of(whole)[:, -5:]}
    for name, said in (("expected_attention", "evicts by the queries of each turn"), ("snapkv", None)):
        cache = Cache(exact, small(name, heads_file), tokens_per_head=12, regime="chunked").prefill(ids, mask)
        if said is not None:
            refused(said, exact, input_ids=turn, **{CACHE: cache}, **given)
            assert cache.fork().num_seen == 40
            continue
        with torch.no_grad():
            exact(input_ids=turn, **{CACHE: cache}, **given)
        assert cache.entries_by_head()[1].eq(12).all()

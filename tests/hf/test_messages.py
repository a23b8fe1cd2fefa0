"""Mistakes of newcomers are named, and numbers of other libraries are numbers."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.version_names import CACHE
from tests.tiny import tiny_batch, tiny_model

FEW = {"protection": {"recent": 4}, "observed_settings": {"window": 4}}
HOW = {"max_new_tokens": 3, "do_sample": False}


@pytest.mark.parametrize("num_ids", [1, 7, 40, 41, 60])
def test_ids_of_the_question_alone_are_refused_by_name(num_ids):
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    question = tiny_batch((0, 0), num_ids, seed=9)[0]
    with attach(model):
        cache = Cache(model, "snapkv", keep_ratio=0.5, **FEW).prefill(ids, mask)
        said = (
            f"has {num_ids} tokens a row, and this cache has read 40" if num_ids <= 40 else "does not begin"
        )
        for given in ({}, {"attention_mask": torch.ones_like(question)}):
            with pytest.raises(
                ValueError, match=rf"input_ids {said}.*torch.cat\(\[context_ids, question_ids"
            ):
                model.generate(question, **{CACHE: cache}, **given, **HOW)
        assert cache.num_seen == 40


def test_embeddings_of_both_say_what_ids_of_both_say():
    model, (ids, mask) = tiny_model("gemma3"), tiny_batch((0, 3))
    question = tiny_batch((0, 0), 7, seed=9)[0]
    whole = {"attention_mask": torch.cat([mask, torch.ones_like(question)], dim=1)}
    embed, both = model.get_input_embeddings(), torch.cat([ids, question], dim=1)
    with attach(model):
        cache = Cache(model, "snapkv", keep_ratio=0.5, **FEW).prefill(ids, mask)
        want = model.generate(both, **{CACHE: cache.fork()}, **whole, **HOW)[:, -3:]
        rounded = embed(both).bfloat16().float()[:, :40]
        for given in (embed(both), torch.cat([rounded, embed(question)], dim=1)):
            got = model.generate(inputs_embeds=given, **{CACHE: cache.fork()}, **whole, **HOW)
            assert torch.equal(got, want)
        given = {"input_ids": both, "inputs_embeds": embed(both)}
        got = model.generate(**given, **{CACHE: cache.fork()}, **whole, **HOW)
        assert torch.equal(got[:, -3:], want)


def test_a_generate_that_reads_nothing_is_no_silent_success(monkeypatch):
    model, ids = tiny_model("llama"), tiny_batch()[0]
    monkeypatch.setattr(type(model), "generate", lambda self, inputs, **given: inputs)
    with attach(model), pytest.raises(ValueError, match="left the cache unread.*0 tokens, as before"):
        model.generate(ids, **{CACHE: Cache(model, "snapkv", keep_ratio=0.5, **FEW)})


NUMBERS = {
    "keep_ratio": (0.3, np.float64(0.3), Fraction(3, 10)),
    "tokens_per_head": (20, np.int64(20), torch.tensor(20)),
    "bytes": (4000, np.int32(4000)),
    "threshold": (0.25, np.float32(0.25), Fraction(1, 4)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_budget_is_any_number(name):
    model, ids = tiny_model("llama"), tiny_batch()[0]
    with attach(model):
        caches = [Cache(model, "snapkv", **{name: one}, **FEW).prefill(ids) for one in NUMBERS[name]]
    assert (
        len({cache.entries_held for cache in caches}) == 1 < caches[0].entries_held < caches[0].entries_seen
    )
    budgets = [cache.state.bound_policy.budget for cache in caches]
    assert len({repr(budget) for budget in budgets}) == 1  # which a file can hold

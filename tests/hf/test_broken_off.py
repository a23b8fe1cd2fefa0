"""A change that breaks off midway leaves a cache that says so at its next use, and that can be emptied."""

import pytest
import torch

from retain.cache.store import RaggedStore
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.hf.moments import policy
from tests.hf.test_saving import assert_same_state, forward, grown
from tests.refused import refused
from tests.tiny import attached, tiny_batch

PADS = (0, 3, 11)
BROKE = r"broke off .*half-updated.*reset\(\)"


@pytest.fixture
def model():
    return attached("qwen3")


def steps(model, cache, mask, number, seed=3):
    for ids in tiny_batch((0, 0, 0), number, seed=seed)[0].split(1, dim=1):
        mask = grown(mask, 1)
        forward(model, cache, ids, mask)
    return mask


def begun(model, when="chunk+decode", num=2):
    """A cache that has read a prompt and decoded some tokens; its mask."""
    ids, mask = tiny_batch(PADS)
    cache = Cache(model, policy=policy, when=when, every=4)
    forward(model, cache, ids, mask)
    return cache, steps(model, cache, mask, num)


def turn(model, cache, mask):
    forward(model, cache, tiny_batch((0, 0, 0), 6, seed=5)[0], grown(mask, 6))


# What is done, the method of a store that it changes each layer by, and in which regime.
CHANGES = {
    "a turn": ("filter_", "chunk+decode", turn),
    "decoding": ("compact_", "chunk+decode", lambda *how: steps(*how, 4)),
    "crop": ("filter_", "prefill", lambda model, cache, mask: cache.crop(41)),
    "beams": (
        "select_batch",
        "chunk",
        lambda model, cache, mask: cache.reorder_cache(torch.tensor([2, 0, 0])),
    ),
}


def uses(model, cache, mask, path):
    yield lambda: cache.fork()
    yield lambda: cache.crop(40)
    yield lambda: cache.batch_select_indices(torch.tensor([0]))
    yield lambda: cache.save(path)
    yield lambda: Cache.concat([cache])
    # Forwards last: they must not be what makes the others notice.
    yield lambda: steps(model, cache, mask, 1)
    yield lambda: turn(model, cache, mask)
    yield lambda: model.generate(torch.ones(3, 60, dtype=torch.long), **{CACHE: cache}, max_new_tokens=2)


def assert_refused(model, cache, mask, tmp_path):
    """Every use says so, as often as it is asked; emptied, it is as new."""
    for use in uses(model, cache, mask, tmp_path / "context.safetensors"):
        refused(BROKE, use)
    assert not list(tmp_path.iterdir())
    cache.reset()
    fresh = Cache(model, policy=policy, when=cache.state.when.name, every=4)
    ids, mask = tiny_batch(PADS, seed=8)
    for one in (cache, fresh):
        forward(model, one, ids, mask)
        turn(model, one, steps(model, one, mask, 5))
    assert_same_state(cache, fresh)


def out_of_memory(monkeypatch, name, at):
    """Has a method of stores run out of memory at its n-th call, before anything is changed."""
    method, calls = getattr(RaggedStore, name), []

    def counted(store, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("out of memory")
        return method(store, *args, **kwargs)

    monkeypatch.setattr(RaggedStore, name, counted)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_breaks_off_is_refused_ever_after(name, at, model, tmp_path, monkeypatch):
    method, when, change = CHANGES[name]
    cache, mask = begun(model, when)
    aside = cache.fork()
    with monkeypatch.context() as patch:
        out_of_memory(patch, method, at)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            change(model, cache, mask)
    assert_refused(model, cache, mask, tmp_path)
    change(model, aside, mask)  # a fork that was made before goes on


@pytest.mark.parametrize("first", [True, False])
def test_a_forward_that_breaks_off_is_refused_ever_after(first, model, tmp_path):
    """An error of the model's: some layers have the new tokens, and some have not."""
    cache, mask = begun(model)
    if first:
        cache, mask = Cache(model, policy=policy, when="chunk+decode", every=4), mask[:, :0]
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        turn(model, cache, mask)
    hook.remove()
    refused(BROKE, turn, model, cache, mask)
    if not first:
        assert_refused(model, cache, mask, tmp_path)


def test_a_prefill_that_breaks_off_empties_the_cache(model, monkeypatch):
    ids, mask = tiny_batch(PADS)
    caches = [Cache(model, policy=policy, when="chunk", every=4) for _ in range(2)]
    with monkeypatch.context() as patch:
        out_of_memory(patch, "filter_", 2)
        with pytest.raises(torch.OutOfMemoryError):
            caches[0].prefill(ids, mask, chunk_size=16)  # in the second chunk
    for cache in caches:
        cache.prefill(ids, mask, chunk_size=16)
    assert_same_state(*caches)


def test_a_policy_functions_wrong_mask_is_found_before_any_layer_is_cut(model):
    good = [True]

    def sometimes_wrong(evidence):
        return policy(evidence) if good[0] or evidence.layer_idx != 2 else policy(evidence)[:, :1]

    (ids, mask), cache = tiny_batch(PADS), Cache(model, policy=sometimes_wrong, when="chunk")
    forward(model, cache, ids, mask)
    good[0], fresh = False, cache.entries_held
    refused(r"policy function gave torch\.\w+ \(.*for layer 2, which", turn, model, cache, mask)
    assert cache.entries_held == fresh + 6 * len(ids) * 6  # with all that had come
    refused(BROKE, cache.fork)

"""One cache is one conversation of one thread, and belongs to a model that no pickle of it carries."""

import copy
import io
import pickle
from threading import Event, Thread

import pytest
import torch

from retain.hf.cache.cache import Cache
from tests.hf.test_saving import assert_same_state
from tests.refused import refused
from tests.tiny import attached, tiny_batch

IDS, MASK = tiny_batch((0,), 40)


def made(model):
    return Cache(model, "snapkv", keep_ratio=0.5, protection={"recent": 4})


def generated(model, cache):
    return model.generate(IDS, attention_mask=MASK, cache=cache, max_new_tokens=4, do_sample=False)


def in_a_layer(model, during):
    """Runs `generate` in a thread, which waits within its second forward until `during(cache)` is over.

    Returns:
        the cache, what was generated, and what the thread raised."""
    cache, inside, go_on, ended = made(model), Event(), Event(), []

    def wait(module, args):
        if cache.num_seen and not go_on.is_set():
            inside.set()
            assert go_on.wait(60)

    def run():
        try:
            ended.append(generated(model, cache))
        except BaseException as error:
            ended.append(error)

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    thread = Thread(target=run)
    thread.start()
    try:
        assert inside.wait(60)
        during(cache)
    finally:
        go_on.set()
        thread.join()
        hook.remove()
    return cache, ended[0]


def test_a_second_thread_is_refused_and_the_first_goes_on(tmp_path):
    model = attached("llama")
    want = made(model)
    text = generated(model, want)

    def during(cache):
        positions = torch.arange(40, 45)[None]
        said = "in use by another thread .* fork.. it before, make one for each thread, or reset"
        refused(said, model, IDS[:, :5], position_ids=positions, cache=cache)
        refused(said, generated, model, cache)
        for change in (
            lambda: cache.fork(),
            lambda: cache.crop(20),
            lambda: cache.save(tmp_path / "c"),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.evict("snapkv", keep_ratio=0.1),
            lambda: Cache.concat([cache]),
        ):
            refused(said, change)

    cache, got = in_a_layer(model, during)
    assert isinstance(got, torch.Tensor) and torch.equal(got, text)
    assert_same_state(cache, want)
    # Once it is over, any thread may have it.
    assert cache.fork().num_seen == want.num_seen
    assert model.generate(torch.cat([text, text[:, -3:]], 1), cache=cache, max_new_tokens=2) is not None


def test_a_cache_whose_thread_broke_off_is_free_again():
    model = attached("llama")
    cache = made(model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: {}["off"])
    errors = []

    def run():
        try:
            model(IDS, cache=cache)
        except KeyError as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    hook.remove()
    assert errors and generated(model, cache).shape[1] == 44


@pytest.mark.parametrize("write", [pickle.dumps, lambda own: torch.save(own, io.BytesIO())])
def test_no_pickle_of_a_cache_carries_its_model(write):
    model = attached("llama")
    cache = made(model).prefill(IDS)
    said = r"cache\.save\(path\), and read it with retain\.Cache\.load\(path, model\)"
    with pytest.raises(TypeError, match=said):
        write({"cache": cache})
    for same in (copy.copy(cache), copy.deepcopy(cache)):
        assert same.model is model and same.state is not cache.state
        assert_same_state(same, cache)

"""Attached models and filled caches, copied: by pickle, by `torch.save`, and models that share a config."""

import copy
import io
import pickle

import pytest
import torch

from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach, attachment_of
from tests.hf.test_attach import REGISTRIES, everything_about
from tests.tiny import tiny_batch, tiny_model

SETTINGS = {
    "policy": "snapkv",
    "keep_ratio": 0.5,
    "protection": {"recent": 4},
    "observed_settings": {"window": 4},
}
HOW = {"max_new_tokens": 3, "do_sample": False}


def by_pickle(what):
    return pickle.loads(pickle.dumps(what))


def by_torch(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def generated(model, cache=None):
    ids, mask = tiny_batch((0, 3))
    cache = Cache(model, **SETTINGS) if cache is None else cache
    if cache.num_seen:
        ids = torch.cat([ids, ids[:, -1:]], dim=1)
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **HOW)


@pytest.mark.parametrize("copied", [by_pickle, by_torch, copy.deepcopy])
def test_a_copy_of_an_attached_model_is_attached_and_undone_alone(copied):
    model = tiny_model("qwen3")
    before = everything_about(model)
    handle = attach(model)
    attached, want = everything_about(model), generated(model)
    twin = copied(model)
    assert torch.equal(generated(twin), want)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=2 asks for assisted"):
        twin.generate(tiny_batch()[0], past_key_values=Cache(twin, **SETTINGS), prompt_lookup_num_tokens=2)
    attach(twin).undo()
    assert everything_about(twin) == before and everything_about(model) == attached
    other, own = copied((model, handle))
    own.undo()
    assert attachment_of(other) is None
    handle.undo()
    assert everything_about(model) == before


@pytest.mark.parametrize("copied", [by_pickle, by_torch])
@pytest.mark.parametrize("policy", ["snapkv", "full"])
def test_a_conversation_goes_on_in_a_copy(copied, policy):
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    settings = SETTINGS if policy == "snapkv" else {"policy": "full"}
    with attach(model):
        cache = Cache(model, **settings, regime="prefill+decode", every=2).prefill(ids, mask)
        twin, other = copied((model, cache))
        assert other.model is twin
        want = generated(model, cache)
        assert torch.equal(generated(twin, other), want)
        assert str(other.report()) == str(cache.report())


def test_a_process_that_attached_nothing_yet_learns_the_names_with_the_copy(monkeypatch):
    model = tiny_model("llama")
    with attach(model):
        want, pickled = generated(model), pickle.dumps(model)
    for registry in REGISTRIES:
        names = {name: one for name, one in registry._global_mapping.items() if "retain" not in name}
        monkeypatch.setattr(registry, "_global_mapping", names)
    assert torch.equal(generated(pickle.loads(pickled)), want)


@pytest.mark.parametrize("first", ["one", "two"])
def test_models_that_share_a_config_are_attached_and_undone_each_for_itself(first):
    one = tiny_model("llama")
    two = type(one)(one.config).eval()
    assert two.config is one.config
    three = type(one)(one.config).eval()  # never attached
    plain = three.generate(tiny_batch()[0], **HOW)
    before = everything_about(one), everything_about(two)
    handles = {"one": attach(one), "two": attach(two)}
    four = type(one)(copy.deepcopy(one.config)).eval()  # of a config that says our name
    wants = generated(one), generated(two)
    handles.pop(first).undo()
    left, want = (two, wants[1]) if first == "one" else (one, wants[0])
    assert torch.equal(generated(left), want)
    assert torch.equal(three.generate(tiny_batch()[0], **HOW), plain)
    handles.popitem()[1].undo()
    assert (everything_about(one), everything_about(two)) == before
    assert torch.equal(three.generate(tiny_batch()[0], **HOW), plain)
    with attach(four):
        assert generated(four).shape == want.shape
    assert four.config._attn_implementation == "sdpa"


def test_gradient_checkpointing_in_training_mode_is_refused_in_its_own_words():
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    ids, mask = tiny_batch()
    with attach(model):
        want = Cache(model, **SETTINGS).prefill(ids, mask).entries_held  # in eval mode it does nothing
        model.train()
        for call in (
            lambda cache: cache.prefill(ids, mask),
            lambda cache: model(ids, past_key_values=cache),
            lambda cache: model.generate(ids, past_key_values=cache, **HOW),
        ):
            cache = Cache(model, **SETTINGS)
            with pytest.raises(ValueError, match="training mode with gradient checkpointing.*model.eval"):
                call(cache)
            assert cache.num_seen == 0
        model.gradient_checkpointing_disable()
        assert Cache(model, **SETTINGS).prefill(ids, mask).entries_held == want

import copy
import inspect
import io
import logging
import pickle
from functools import partial

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import PREVIOUS, attach, attachment_of
from retain.hf.version_names import CACHE, NAMES, set_checkpointing_
from tests.refused import refused
from tests.tiny import EAGER, FAMILIES, tiny_batch, tiny_model

# Every family with every attention implementation that it has.
WAYS = [
    (family, attn)
    for family in FAMILIES
    for attn in ("sdpa", "eager")
    if attn == "eager" or family not in EAGER
]
# Families for whose recurrent layers transformers has no static cache.
RECURRENT = ("qwen3_next", "qwen3_5")
REGISTRIES = (AttentionInterface, AttentionMaskInterface)


def everything_about(model):
    """What attaching may touch: hooks, attributes, the config, the registries (not our own names there)."""
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    config = model.config.to_dict(), model.config._attn_implementation
    ours = set(PREVIOUS.values())
    return hooks, config, [sorted(set(registry._global_mapping) - ours) for registry in REGISTRIES]


@pytest.mark.parametrize(("family", "attn"), WAYS)
def test_undo_leaves_no_trace(family, attn):
    model = tiny_model(family, attn=attn)
    before = everything_about(model)
    handle = attach(model)
    assert everything_about(model) != before and attachment_of(model) is not None
    assert model.config._attn_implementation == f"retain_{attn}"
    handle.undo()
    handle.undo()
    assert everything_about(model) == before and attachment_of(model) is None
    with attach(model):
        model(input_ids=tiny_batch()[0], **{CACHE: Cache(model, policy=None)})
    assert everything_about(model) == before


@pytest.mark.parametrize(("family", "attn"), WAYS)
def test_inert_for_other_caches_and_for_none(family, attn):
    model = tiny_model(family, attn=attn)
    ids, mask = tiny_batch((0, 6))

    @torch.no_grad()
    def run():
        outputs = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits]
        dynamic = DynamicCache(config=model.config)
        outputs.append(model(input_ids=ids, attention_mask=mask, **{CACHE: dynamic}).logits)
        settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        outputs.append(model.generate(input_ids=ids, **settings))
        if family not in RECURRENT:
            static = StaticCache(config=model.config, max_cache_len=64)
            outputs.append(model(input_ids=ids, attention_mask=mask, **{CACHE: static}).logits)
        return outputs

    before = run()
    with attach(model):
        during = run()
    for a, b, c in zip(before, during, run(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


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


def generated(model, cache=None, **how):
    ids, mask = tiny_batch((0, 3))
    cache = Cache(model, **SETTINGS) if cache is None else cache
    if cache.num_seen:
        ids = torch.cat([ids, ids[:, -1:]], dim=1)
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
    return model.generate(ids, attention_mask=mask, **{CACHE: cache}, **HOW, **how)


@pytest.mark.parametrize("copied", [by_pickle, by_torch, copy.deepcopy])
def test_a_copy_of_an_attached_model_is_attached_and_undone_alone(copied):
    model = tiny_model("qwen3")
    before = everything_about(model)
    handle = attach(model)
    attached, want = everything_about(model), generated(model)
    twin = copied(model)
    assert torch.equal(generated(twin), want)
    how = {CACHE: Cache(twin, **SETTINGS), "prompt_lookup_num_tokens": 2}
    refused("prompt_lookup_num_tokens=2 asks for assisted", twin.generate, tiny_batch()[0], **how)
    attach(twin).undo()
    assert everything_about(twin) == before and everything_about(model) == attached
    other, own = copied((model, handle))
    own.undo()
    assert attachment_of(other) is None
    handle.undo()
    assert everything_about(model) == before


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
    set_checkpointing_(model, True)
    ids, mask = tiny_batch()
    with attach(model):
        want = Cache(model, **SETTINGS).prefill(ids, mask).entries_held  # in eval mode it does nothing
        model.train()
        for call in (
            lambda cache: cache.prefill(ids, mask),
            lambda cache: model(ids, **{CACHE: cache}),
            lambda cache: model.generate(ids, **{CACHE: cache}, **HOW),
        ):
            cache = Cache(model, **SETTINGS)
            refused("training mode with gradient checkpointing.*model.eval", call, cache)
            assert cache.num_seen == 0
        set_checkpointing_(model, False)
        assert Cache(model, **SETTINGS).prefill(ids, mask).entries_held == want


# The names under which one cache is given; None: the other name is there too, and says None.
GIVEN = [(CACHE,), *((name,) for name in NAMES if name != CACHE), NAMES, *((name, None) for name in NAMES)]


def given(model, names=(CACHE,)):
    """A new cache as keyword arguments."""
    cache = Cache(model, policy="snapkv", keep_ratio=0.5)
    return {**(dict.fromkeys(NAMES) if None in names else {}), **{name: cache for name in names if name}}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_our_cache_is_taken_by_either_name(family, caplog, monkeypatch):
    """Whichever name this version of transformers has, without a warning: of a first prompt and of a second
    on the used cache, in `generate`, in a forward of the model and in one of its decoder."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logging.Logger.warning_once.cache_clear()  # transformers' own, which says a thing once a process
    model, parts = tiny_model(family), tiny_batch()[0].split(30, dim=1)

    def read(names):
        in_generate, in_model, in_decoder = (given(model, names) for _ in range(3))
        tokens = parts[0][:, :0]
        for part in parts:
            tokens = model.generate(torch.cat([tokens, part], dim=1), **in_generate, **HOW)
        logits = [model(part, **in_model).logits for part in parts]
        return [tokens, *logits, *(model.model(part, **in_decoder).last_hidden_state for part in parts)]

    with attach(model):
        want = read(GIVEN[0])
        for names in GIVEN[1:]:
            assert all(map(torch.equal, read(names), want)), names
    assert "deprecated" not in caplog.text


def test_our_cache_is_taken_by_its_place():
    model, parts = tiny_model("llama"), tiny_batch()[0].split(30, dim=1)
    with attach(model):
        for forward in (model, model.model):
            by_name, by_place = given(model), given(model)[CACHE]
            before = [None] * (list(inspect.signature(forward.forward).parameters).index(CACHE) - 1)
            for part in parts:
                assert torch.equal(forward(part, *before, by_place)[0], forward(part, **by_name)[0])


def test_two_caches_by_two_names_are_refused():
    model, ids = tiny_model("llama"), tiny_batch()[0]
    ours, another, foreign = Cache(model, None), Cache(model, None), DynamicCache(config=model.config)
    with attach(model):
        for forward in (model, model.model, partial(model.generate, **HOW)):
            for cache, former in ((ours, another), (ours, foreign), (foreign, ours)):
                said = f"cache={type(cache).__name__}, past_key_values={type(former).__name__}"
                both = {"cache": cache, "past_key_values": former}
                refused(f"two caches were given.*{said}.*one of the two", forward, ids, **both)
    assert [cache.get_seq_length() for cache in (ours, another, foreign)] == [0, 0, 0]

"""A model is attached, changed, copied, attached by threads at once, and detached without a trace."""

import inspect
import threading
import time
import types

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

import retain
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import PREVIOUS, attach, attachment_of
from retain.hf.model.decoder import layout_of
from retain.hf.version_names import CACHE, CHECKPOINTING, NAMES
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
SETTINGS = {
    "policy": "snapkv",
    "keep_ratio": 0.5,
    "protection": {"recent": 4},
    "observed_settings": {"window": 4},
}
HOW = {"max_new_tokens": 3, "do_sample": False}


def everything_about(model):
    """All that attaching may touch: hooks, attributes, the config, the registries (not our names there)."""
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    config = model.config.to_dict(), model.config._attn_implementation
    ours = set(PREVIOUS.values())
    return hooks, config, [sorted(set(registry._global_mapping) - ours) for registry in REGISTRIES]


def generated(model, cache=None, **how):
    ids, mask = tiny_batch((0, 3))
    cache = Cache(model, **SETTINGS) if cache is None else cache
    if cache.num_seen:
        ids = torch.cat([ids, ids[:, -1:]], dim=1)
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
    return model.generate(ids, attention_mask=mask, **{CACHE: cache}, **HOW, **how)


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


def test_gradient_checkpointing_in_training_mode_is_refused():
    """It takes the cache away from layers, where gradients are on."""
    model = tiny_model("llama")
    getattr(model, f"{CHECKPOINTING}_enable")()
    ids, mask = tiny_batch()
    with attach(model):
        want = Cache(model, **SETTINGS).prefill(ids, mask).entries_held
        model.train()
        assert Cache(model, **SETTINGS).prefill(ids, mask).entries_held == want
        given = {"attention_mask": mask, CACHE: Cache(model, **SETTINGS)}
        refused("checkpointed in training mode .*model.eval", model, ids, **given)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_our_cache_is_taken_by_its_place_too_and_by_generate_by_either_name(family):
    model, parts = tiny_model(family), tiny_batch()[0].split(30, dim=1)

    def forwards(given):
        for forward in (model, model.model):
            how = given(forward, Cache(model, policy="snapkv", keep_ratio=0.5))
            yield from (forward(part, *how[0], **how[1])[0] for part in parts)

    def by_place(forward, cache):
        before = list(inspect.signature(forward.forward).parameters).index(CACHE) - 1
        return (*[None] * before, cache), {}

    with attach(model):
        want = [*forwards(by_place)]
        assert all(map(torch.equal, forwards(lambda _, cache: ((), {CACHE: cache})), want))
        (ids, mask), tokens = tiny_batch((0, 3)), generated(model)
        for name in NAMES:
            given = {"attention_mask": mask, name: Cache(model, **SETTINGS)}
            assert torch.equal(model.generate(ids, **given, **HOW), tokens)


@pytest.mark.always
def test_threads_attach_at_once(monkeypatch):
    num_threads = 4

    def slowly(model):
        time.sleep(0.01)  # while which the others have come as far, if they may
        return layout_of(model)

    monkeypatch.setattr("retain.hf.intercept.attach.layout_of", slowly)
    with attach(model := tiny_model("llama")):
        want, once = generated(model), everything_about(model)
    for _ in range(10):
        model = tiny_model("llama")
        before, barrier, handles = everything_about(model), threading.Barrier(num_threads), []

        def attach_one(model=model, barrier=barrier, handles=handles):
            barrier.wait()
            handles.append(attach(model))

        threads = [threading.Thread(target=attach_one) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert everything_about(model) == once and torch.equal(generated(model), want)
        for handle in handles[1:]:
            handle.undo()
        assert everything_about(model) == once
        handles[0].undo()
        assert everything_about(model) == before


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_a_config_that_points_elsewhere_says_where_and_attach_puts_it_back(name):
    """Before anything is read, so that a used cache goes on."""
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    attach(model)
    cache, once = Cache(model, **SETTINGS).prefill(ids, mask), everything_about(model)
    want = generated(model, cache.fork())
    model.set_attn_implementation(name)
    said = f"changed after retain.attach: its config says '{name}' now. Set .*retain.attach.model. again"
    for call in (
        lambda: generated(model, cache),
        lambda: model(ids[:, :1], **{CACHE: cache}),
        lambda: Cache(model, **SETTINGS).prefill(ids, mask),
    ):
        refused(said, call)
    if name != "eager":
        model.set_attn_implementation("sdpa")
    attach(model)
    assert torch.equal(generated(model, cache), want)
    assert model.config._attn_implementation == ("retain_eager" if name == "eager" else "retain_sdpa")
    assert everything_about(model)[0] == once[0]
    retain.detach(model)
    assert model.config._attn_implementation == ("eager" if name == "eager" else "sdpa")


def attends_alone(self, hidden_states, **kwargs):
    """Attention that never looks at transformers' registry."""
    return hidden_states, None


def test_a_forward_that_was_replaced_after_attach_is_named():
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    attach(model)
    want = generated(model)
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(attends_alone, attention)
    said = "layer 1 attended without.*replaced the forward of its LlamaAttention .*attends_alone"
    refused(said, generated, model)
    refused(said, Cache(model, **SETTINGS).prefill, ids, mask)
    del attention.forward
    assert torch.equal(generated(model), want)


def test_detached_and_attached_again():
    model = tiny_model("llama")
    before, handles = everything_about(model), [attach(model) for _ in range(3)]
    once, want = everything_about(model), generated(model)
    retain.detach(model.model)
    assert everything_about(model) == before and attachment_of(model) is None
    refused("this model is not attached.*call retain.attach", generated, model)
    handles[0].undo()
    new = attach(model)
    for handle in (*handles, *handles):
        handle.undo()
    assert everything_about(model) == once and torch.equal(generated(model), want)
    new.undo()
    assert everything_about(model) == before


@pytest.mark.parametrize("attached", ["inside", "wrapper"])
@pytest.mark.parametrize("detached", ["inside", "wrapper"])
def test_a_wrapper_of_peft_is_detached(attached, detached):
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    wrapped = peft.get_peft_model(model, config).eval()
    ids, mask = tiny_batch((0, 3))
    how = {"input_ids": ids, "attention_mask": mask, **HOW}
    wrapped.generate(**how)  # peft leaves a method of its own on the model
    before = everything_about(wrapped)
    handle = attach({"inside": model, "wrapper": wrapped}[attached])
    wrapped.generate(**how, **{CACHE: Cache(wrapped, **SETTINGS)})
    retain.detach({"inside": model, "wrapper": wrapped}[detached])
    handle.undo()
    assert everything_about(wrapped) == before and attachment_of(wrapped) is None

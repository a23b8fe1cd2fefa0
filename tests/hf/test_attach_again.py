"""A model is attached by threads at once, again after it was changed, and detached without a handle."""

import copy
import threading
import time
import types

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import retain
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import PREVIOUS, attachment_of
from retain.hf.model.decoder import describe
from retain.hf.version_names import CACHE
from tests.hf.test_attach import HOW, SETTINGS, everything_about, generated
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

REGISTRIES = (AttentionInterface, AttentionMaskInterface)


@pytest.mark.always
def test_threads_attach_at_once(monkeypatch):
    num_threads, broken = 4, []

    def describe_slowly(model):
        specs = describe(model)
        time.sleep(0.01)  # while which the others have come as far, if they may
        return specs

    monkeypatch.setattr("retain.hf.intercept.attach.describe", describe_slowly)
    with retain.attach(model := tiny_model("llama")):
        want, once = generated(model), everything_about(model)
    for _ in range(10):
        model = tiny_model("llama")
        before, barrier, handles = everything_about(model), threading.Barrier(num_threads), []

        def attach(model=model, barrier=barrier, handles=handles):
            barrier.wait()
            handles.append(retain.attach(model))

        threads = [threading.Thread(target=attach) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert everything_about(model) == once and torch.equal(generated(model), want)
        except (AssertionError, ValueError) as error:
            broken.append(error)
        for handle in handles[1:]:
            handle.undo()
        assert everything_about(model) == once
        handles[0].undo()
        assert everything_about(model) == before
    assert not broken


def without_hooks(model):
    model.model._forward_pre_hooks.clear()


def without_one_hook(model):
    model.model.layers[1].self_attn._forward_pre_hooks.popitem()


def another_module(model):
    layer = model.model.layers[0]
    layer.self_attn = copy.deepcopy(layer.self_attn)


def without_guard(model):
    del model.generate


def without_functions(model):
    for registry in REGISTRIES:
        for name in PREVIOUS.values():
            registry._global_mapping[name] = lambda *args, **kwargs: 1 / 0


def to_eager(model):
    model.set_attn_implementation("eager")


CHANGES = (without_hooks, without_one_hook, another_module, without_guard, without_functions, to_eager)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_attach_mends_what_was_changed_and_handles_stay_good(change):
    model = tiny_model("llama")
    before, first = everything_about(model), retain.attach(model)
    once, want = everything_about(model), generated(model)
    change(model)
    second = retain.attach(model)
    if change is to_eager:
        assert model.config._attn_implementation == "retain_eager"
        model.set_attn_implementation("retain_sdpa")
    assert everything_about(model) == once and torch.equal(generated(model), want)
    refused("prompt_lookup_num_tokens=2 asks", generated, model, None, prompt_lookup_num_tokens=2)
    second.undo()
    assert everything_about(model) == once and attachment_of(model) is not None
    first.undo()
    assert everything_about(model) == before


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_a_config_that_points_elsewhere_says_where_and_attach_puts_it_back(name):
    """Before anything is read, so that a used cache goes on."""
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    retain.attach(model)
    cache = Cache(model, **SETTINGS).prefill(ids, mask)
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
    retain.attach(model)
    assert torch.equal(generated(model, cache), want)


def attends_alone(self, hidden_states, cache=None, past_key_values=None, **kwargs):
    """Attention that never looks at transformers' registry."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries, keys, values = (
        project(hidden_states).view(shape).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    keys, values = (cache or past_key_values).update(keys, values, self.layer_idx)
    keys, values = (own.repeat_interleave(self.num_key_value_groups, dim=1) for own in (keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def test_a_forward_that_was_replaced_after_attach_is_named():
    model, (ids, mask) = tiny_model("llama"), tiny_batch((0, 3))
    retain.attach(model)
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
    before, handles = everything_about(model), [retain.attach(model) for _ in range(3)]
    once, want = everything_about(model), generated(model)
    retain.detach(model.model)
    assert everything_about(model) == before and attachment_of(model) is None
    refused("this model is not attached.*call retain.attach", generated, model)
    handles[0].undo()
    new = retain.attach(model)
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
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    ).eval()
    ids, mask = tiny_batch((0, 3))
    how = {"input_ids": ids, "attention_mask": mask, **HOW}
    wrapped.generate(**how)  # peft leaves a method of its own on the model
    before = everything_about(wrapped)
    handle = retain.attach({"inside": model, "wrapper": wrapped}[attached])
    wrapped.generate(**how, **{CACHE: Cache(wrapped, **SETTINGS)})
    retain.detach({"inside": model, "wrapper": wrapped}[detached])
    handle.undo()
    assert everything_about(wrapped) == before and attachment_of(wrapped) is None

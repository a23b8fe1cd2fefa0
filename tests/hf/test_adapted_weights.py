"""Adapters of peft that are not merged: scores read the weights that the model runs with, so what is kept is
what the merged model keeps."""

import copy
import warnings

import pytest
import torch
from torch import nn

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from tests.close import assert_close
from tests.tiny import tiny_batch, tiny_model

peft = pytest.importorskip("peft")
POLICIES = ("criticalkv", "learned")
MODULES = ["embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj"]
IDS, MASK = tiny_batch((0, 5), 120)


def lora(**settings):
    how = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.3, "init_lora_weights": False}
    modules = settings.pop("target_modules", MODULES)
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, **{**how, **settings})


def wrapped(model=None, names=("default",), **settings):
    model = tiny_model("llama") if model is None else model
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's adapted, of an embedding beside a head
        adapted = peft.get_peft_model(model, lora(**settings), adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, lora(**settings))
    return adapted.eval().requires_grad_(False)


def merged(adapted):
    """The model that the wrapper runs, without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(adapted).merge_and_unload()


def kept(model, policy="criticalkv", **settings):
    gates = {}
    if policy == "learned":
        adapted = retain.new_gates(model, "linear")
        for parameter in adapted.parameters():
            nn.init.constant_(parameter, 0.1)
            parameter.data.view(-1)[::3] = -0.2
        gates = {"gates": adapted, "seeds": [1, 2], "draw": {"share": 0.8}}
    settings = {"keep_ratio": 0.3, "protection": {"recent": 8}, **settings}
    with retain.attach(model):
        cache = Cache(model, policy, **gates, **settings).prefill(IDS, MASK)
    assert 0 < cache.entries_held < cache.report().total.entries_seen
    return [
        set(zip(store.rows_N().tolist(), store.positions_C[store.index_N()].tolist(), strict=True))
        for store in (layer.store for layer in cache.state.ragged)
    ]


KINDS = {"lora": {}, "dora": {"use_dora": True, "target_modules": MODULES[1:]}}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_the_merged_model_keeps(kind, policy):
    adapted = wrapped(**KINDS[kind])
    assert kept(adapted, policy) == kept(merged(adapted), policy)


def test_the_adapter_of_the_output_projection_alone_decides():
    """The control: keys, values and queries are as without it, and other entries are kept."""
    adapted = wrapped(target_modules=["o_proj"])
    want = kept(merged(adapted))
    assert kept(adapted) == want
    with adapted.disable_adapter():
        assert kept(adapted) == kept(tiny_model("llama")) != want


def test_the_state_at_the_time_of_the_eviction_counts():
    adapted = wrapped(names=("one", "two"))
    spec = describe(adapted)[0]
    with retain.attach(adapted):
        first = kept(adapted)
        assert first == kept(merged(adapted))
        adapted.set_adapter("two")
        second = kept(adapted)
        assert second == kept(merged(adapted)) != first
        adapted.base_model.set_adapter(["one", "two"])
        both = kept(adapted)
        assert both == kept(merged(adapted)) and both not in (first, second)
        adapted.set_adapter("one")
        adapted.base_model.merge_adapter()  # in place, behind the back of version counters
        assert_close(spec.output_weight_QDE, describe(merged(adapted))[0].output_weight_QDE)
        assert kept(adapted) == first


def test_a_module_to_save_is_read_where_it_is_active():
    adapted = wrapped(target_modules=["q_proj"], modules_to_save=["o_proj"])
    spec = describe(adapted)[1]
    nn.init.normal_(spec.output.modules_to_save["default"].weight)
    want = spec.output.modules_to_save["default"].weight.T.unflatten(0, (spec.num_heads, spec.head_dim))
    assert_close(spec.output_weight_QDE, want)
    with adapted.disable_adapter():
        assert_close(spec.output_weight_QDE, describe(tiny_model("llama"))[1].output_weight_QDE)

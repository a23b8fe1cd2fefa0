"""Quantised weights: asked of the module, and told apart by what is stored."""

import pytest
import torch
from torch import nn

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.hf.model.projection import dense_weight
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import FAMILIES, tiny_batch, tiny_model


class Int8Linear(nn.Module):
    """A linear layer of 8-bit numbers and one scale a row, as quantised modules are: no weight to look at."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.rows = []  # of each input that it was asked about

    def dense(self):
        return self.packed.to(self.scale.dtype) * self.scale

    def forward(self, x):
        self.rows.append(len(x))
        return nn.functional.linear(x, self.dense().to(x.dtype), self.bias)


def replaced(model, kind, make):
    """The model with every attention projection of a kind replaced by what is made of it."""
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", nn.Module())
        for name, module in list(attention.named_children()):
            if isinstance(module, kind):
                setattr(attention, name, make(module))
    return model


def quantised(family="qwen3", **how):
    return replaced(tiny_model(family, **how), nn.Linear, Int8Linear)


def unpacked(model):
    """The same model with plain weights that say what the packed ones do."""

    def plain(module):
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        linear.weight, linear.bias = nn.Parameter(module.dense(), requires_grad=False), module.bias
        return linear

    return replaced(model, Int8Linear, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dense_matrix_is_what_the_module_multiplies_by(family):
    for spec in describe(quantised(family)):
        dense = spec.output_weight_QDE
        assert dense.shape == (spec.num_heads, spec.head_dim, spec.hidden_size)
        assert_close(dense.flatten(0, 1).T, spec.output.dense())
        assert spec.dtype == dense.dtype == torch.float32 and spec.device == dense.device


def test_it_is_made_in_pieces_outside_of_inference_mode(monkeypatch):
    monkeypatch.setattr("retain.hf.model.projection.PIECE", 40)
    linear = Int8Linear(nn.Linear(96, 16))
    assert_close(dense_weight(linear, torch.float32).T, linear.dense())
    assert linear.rows == [1, 40, 40, 16]  # the bias, and three pieces
    with torch.inference_mode():
        linear.scale.mul_(2)
        dense = dense_weight(linear, torch.float32)
    assert not dense.is_inference()
    assert_close(dense.T, linear.dense())


@pytest.mark.parametrize("policy", ["defensive", "snapkv"])
def test_a_quantised_model_evicts_as_its_dense_twin(policy):
    ids, mask = tiny_batch((0, 5), 80)
    kept = []
    for model in (quantised(), unpacked(quantised())):
        with retain.attach(model):
            cache = Cache(model, policy=policy, keep_ratio=0.3, protection={"recent": 8}).prefill(ids, mask)
        kept.append([layer.store.positions_C[layer.store.index_N()] for layer in cache.layers])
        assert 0 < cache.entries_held < cache.report().total.entries_seen
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_quantised_models_are_told_apart_by_their_packed_bytes():
    known = fingerprint(quantised())
    assert known == fingerprint(quantised()) != fingerprint(tiny_model())
    other = quantised()
    other.model.layers[1].self_attn.k_proj.packed[0, 0] += 1
    assert fingerprint(other)["sha256"] != known["sha256"]
    assert fingerprint(unpacked(quantised()))["sha256"] != known["sha256"]


def test_what_cannot_be_asked_for_its_matrix_is_refused():
    model, away = tiny_model("llama"), quantised()
    model.model.layers[1].self_attn.o_proj = nn.Identity()
    refused("layer 1 .LlamaDecoderLayer.: .*o_proj takes None features", describe, model)
    away.model.layers[2].self_attn.o_proj.to("meta")
    refused("layer 2 .*o_proj.* meta device", describe, away)


def test_a_large_bias_rounds_no_weight_away():
    linear = nn.Linear(48, 40)
    nn.init.constant_(linear.bias, 4.0)
    module = Int8Linear(linear.bfloat16())
    dense = dense_weight(module, torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    assert (dense.T.float() - module.dense().float()).abs().max() < 2**-7 * module.dense().abs().max()

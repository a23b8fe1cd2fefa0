from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from retain.evidence import attention_probs
from retain.hf.intercept.attach import attach, attachment_of
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import base_model, describe, layout_of, rotary_of
from retain.hf.model.families import Kind, kinds_of
from retain.hf.model.identity import fingerprint
from tests.close import MODEL, assert_close
from tests.hf.masked import evicting
from tests.refused import refused
from tests.tiny import EAGER, FAMILIES, HEADS, UNTURNED, tiny_batch, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)
# Queries come out of the projection with a gate beside them.
GATED = ("qwen3_next", "qwen3_5")
# What divides the logits is not the head's width.
SCALING = {"granite": 0.2, "gemma2": 24**-0.5}


@pytest.mark.parametrize("family", FAMILIES)
def test_describe(family):
    model = tiny_model(family)
    specs = describe(model)
    assert [spec.layer_idx for spec in specs] == evicting(model)
    for spec in specs:
        attention = model.model.layers[spec.layer_idx].self_attn
        assert spec.module is attention
        assert (spec.num_heads, spec.num_kv_heads) == HEADS[family]
        assert spec.hidden_size == model.config.hidden_size
        assert spec.scaling == SCALING.get(family, spec.head_dim**-0.5)
        assert spec.output_weight_QDE.data_ptr() == attention.o_proj.weight.data_ptr()  # a view
        heads = torch.randn(5, spec.num_heads, spec.head_dim)
        want = torch.nn.functional.linear(heads.flatten(1), attention.o_proj.weight)
        assert (spec.sinks_Q is not None) is (family == "gpt_oss")
        assert (spec.device, spec.dtype) == (attention.o_proj.weight.device, torch.float32)
        assert_close(torch.einsum("nqd,qde->ne", heads, spec.output_weight_QDE), want, ops=MODEL)
    assert len(describe(model.model)) == len(specs)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@every_family
def test_evidence_is_what_attention_used(family, attn):
    """Attention recomputed from the evidence gives the module's real output, for every real token."""
    if attn == "sdpa" and family in EAGER:
        attn = None
    model = tiny_model(family, attn=attn)
    ids, mask = tiny_batch((0, 3, 11))
    outputs, inputs = {}, {}

    def remember(module, args, kwargs, output):
        outputs[module.layer_idx], inputs[module.layer_idx] = output[0], kwargs["hidden_states"]

    modules = {idx: model.model.layers[idx].self_attn for idx in evicting(model)}
    hooks = [module.register_forward_hook(remember, with_kwargs=True) for module in modules.values()]
    layers = observe(model, ids, mask)
    for hook in hooks:
        hook.remove()
    assert attachment_of(model) is None and [evidence.layer_idx for evidence in layers] == evicting(model)
    for evidence in layers:
        module = modules[evidence.layer_idx]
        # What has left the window is held by nobody, and was seen by earlier queries.
        probs = attention_probs(replace(evidence, held_BHT=None), 0, 40)
        values = evidence.values_BHTD.repeat_interleave(evidence.group, dim=1)
        heads = torch.einsum("bqst,bqtd->bqsd", probs, values)
        if family in GATED:  # not in the evidence: it depends on the query, and only takes away
            both = module.q_proj(evidence.hidden_BTE).unflatten(-1, (HEADS[family][0], -1))
            heads = heads * both.chunk(2, dim=-1)[1].transpose(1, 2).sigmoid()
        mixed = torch.einsum("bqsd,qde->bse", heads, evidence.output_weight_QDE)
        if module.o_proj.bias is not None:
            mixed = mixed + module.o_proj.bias
        real = mask.bool()
        assert_close(mixed[real], outputs[evidence.layer_idx][real], ops=MODEL)
        assert torch.equal(evidence.hidden_BTE, inputs[evidence.layer_idx])
        assert evidence.hidden_BTE.shape[-1] == model.config.hidden_size
        assert torch.equal(evidence.valid_BT, real)
        assert torch.equal(evidence.positions_BT[real], (mask.cumsum(-1) - 1)[real])
        assert not evidence.queries_BQSD.requires_grad and evidence.num_queries == evidence.num_seen == 40


def test_a_model_whose_layers_all_have_a_window_is_refused():
    for family in ("mistral", "phi3"):
        model = tiny_model(family, sliding_window=24)
        refused("entries could be evicted: all are sliding_attention", layout_of, model)
        refused("entries could be evicted: all are sliding_attention", attach, model)
        layout = layout_of(tiny_model(family, sliding_window=4096))  # all positions that the model has
        assert not layout.alone and len(layout.evicting) == len(layout.kinds)
    assert base_model(model) is model.model
    unbounded = SimpleNamespace(layer_types=["sliding_attention"] * 2, sliding_window=None)
    assert kinds_of(unbounded, 2) == [Kind("full_attention")] * 2
    mixed = layout_of(tiny_model("gemma3", sliding_window=4095))
    assert {left.window for left in mixed.alone.values()} == {4095}
    assert rotary_of(tiny_model("gemma3", sliding_window=None)) is None, "layers turn in two ways"


def test_layers_of_other_kinds_are_left_alone():
    mixed = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    for model, evicting_idx, kind, window in (
        (mixed, [0], "sliding_attention", 8),
        (tiny_model("qwen3_next"), [1, 3], "linear_attention", None),
    ):
        layout = layout_of(model)
        assert [spec.layer_idx for spec in layout.evicting] == evicting_idx
        assert sorted([*evicting_idx, *layout.alone]) == list(range(len(layout.kinds)))
        assert {(left.name, left.window) for left in layout.alone.values()} == {(kind, window)}
    known = fingerprint(tiny_model("qwen3_next"))
    assert (known["num_layers"], known["layers"]) == (2, "1,3")
    assert "layers" not in fingerprint(tiny_model("qwen3"))


def changed(family, where, name, value=None, **settings):
    """A tiny model with one attribute of its config, or of a layer's attention, set, or taken away."""
    model = tiny_model(family, **settings)
    part = model.config if where is None else model.model.layers[where].self_attn
    setattr(part, name, value) if value is not None else delattr(part, name)
    return model


IRREGULAR = {
    "LlamaForCausalLM is not supported: its model_type is 'someone_elses'. Supported: llama, qwen2": partial(
        changed, "llama", None, "model_type", "someone_elses"
    ),
    "layer 1 is of type chunked_attention, which is not understood": partial(
        changed, "llama", None, "layer_types", ["full_attention", "chunked_attention"]
    ),
    "none of its layers has attention whose entries could be evicted: all are linear": partial(
        tiny_model, "qwen3_next", layer_types=["linear_attention"] * 4
    ),
    "layer 2 .*Qwen3Attention has no `k_norm`": partial(changed, "qwen3", 2, "k_norm"),
    "layer 1 .LlamaDecoderLayer.: LlamaAttention has no `o_proj`": partial(changed, "llama", 1, "o_proj"),
    "32 features, no groups of 2 heads of width 12": partial(changed, "llama", 0, "head_dim", 12),
    "GPT2LMHeadModel is not supported: GPT2Model is no decoder of .*`layers`.*qwen3": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    ),
    "Linear is not supported: Linear is no decoder of transformers": partial(torch.nn.Linear, 2, 2),
}


@pytest.mark.parametrize("said", IRREGULAR)
def test_irregular_models_are_refused_by_the_name_of_what_is_missing(said):
    refused(said, describe, IRREGULAR[said]())


THETA = {"rope_theta": 10000.0, "factor": 4.0}
ROPE = {
    "default": {"rope_theta": 10000.0},
    "linear": THETA,
    "llama3": {**THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": THETA,
    "dynamic": THETA,
    "longrope": {**THETA, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
# Those that know the length of an original.
STRETCHED = ("llama3", "yarn", "longrope")


def roped(kind, **settings):
    original = {"original_max_position_embeddings": 64} if kind in STRETCHED else {}
    return tiny_model("llama", rope_parameters={"rope_type": kind, **ROPE[kind], **original}, **settings)


def _before_rope(model, evidence):
    """Queries that the module's real projection (and norm) makes of the attention input, `[B, Q, T, D]`."""
    attention = model.model.layers[evidence.layer_idx].self_attn
    Q, D = evidence.queries_BQSD.shape[1], evidence.queries_BQSD.shape[3]
    projected = getattr(attention, "qkv_proj", None) or attention.q_proj
    projected = projected(evidence.hidden_BTE)
    if hasattr(attention, "qkv_proj"):
        projected = projected[..., : Q * D]
    if model.config.model_type == "olmo2":  # one norm over all heads
        projected = attention.q_norm(projected)
    queries = projected.unflatten(-1, (Q, -1))[..., :D]
    if hasattr(attention, "q_norm") and model.config.model_type != "olmo2":
        queries = attention.q_norm(queries)
    return queries.transpose(1, 2)


def _check_unrotated(model, dtype=torch.float32):
    rotary = rotary_of(model)
    assert rotary is not None
    ids, mask = tiny_batch((0, 3, 11))
    real = mask.bool()[:, None, :, None]
    for evidence in observe(model, ids, mask):
        plain = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT)
        want = _before_rope(model, evidence).double()
        assert_close(plain.masked_fill(~real, 0), want.masked_fill(~real, 0), dtype=dtype, ops=MODEL)
        far = evidence.queries_BQSD[real.expand_as(want)] - want[real.expand_as(want)].float()
        assert far.abs().max() > 0.1  # turning them was something
    return rotary


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_turned_back_to_what_the_projection_made(family, dtype):
    if family in UNTURNED:
        assert rotary_of(tiny_model(family, dtype=dtype)) is None
        return
    rotary = _check_unrotated(tiny_model(family, dtype=dtype), dtype)
    assert rotary.inverse_frequencies_F.dtype == torch.float32
    assert (rotary.scaling == 1.0) is (family != "gpt_oss")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_embeddings_are_understood(kind):
    rotary = _check_unrotated(roped(kind))
    plain = rotary_of(roped("default"))
    assert not torch.allclose(rotary.inverse_frequencies_F, plain.inverse_frequencies_F)
    assert (rotary.scaling > 1) is (kind == "yarn")


def test_partly_turned_heads_are_understood():
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", rope_parameters=half)
    rotary = _check_unrotated(model)
    assert 2 * len(rotary.inverse_frequencies_F) == describe(model)[0].head_dim // 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_not_understood(kind):
    model = roped(kind, max_position_embeddings=256)
    before = model.model.rotary_emb.inv_freq.clone()
    assert rotary_of(model) is None
    assert torch.equal(model.model.rotary_emb.inv_freq, before)

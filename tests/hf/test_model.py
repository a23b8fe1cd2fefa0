import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from retain.evidence import attention_probs
from retain.hf.attach import handle_of
from retain.hf.model import base_model, describe, fingerprint, observe
from tests.close import MODEL, assert_close
from tests.tiny import FAMILIES, HEADS, tiny_batch, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_describe(family):
    model = tiny_model(family)
    specs = describe(model)
    assert len(specs) == model.config.num_hidden_layers
    for idx, spec in enumerate(specs):
        attention = model.model.layers[idx].self_attn
        assert spec.module is attention and spec.layer_idx == idx
        assert (spec.num_heads, spec.num_kv_heads) == HEADS[family]
        assert spec.hidden_size == model.config.hidden_size and spec.scaling == spec.head_dim**-0.5
        assert spec.output_weight_QDE.data_ptr() == attention.o_proj.weight.data_ptr()  # a view
        heads = torch.randn(5, spec.num_heads, spec.head_dim)
        want = attention.o_proj(heads.flatten(1))
        assert_close(torch.einsum("nqd,qde->ne", heads, spec.output_weight_QDE), want, ops=MODEL)
    assert len(describe(model.model)) == len(specs)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@every_family
def test_evidence_is_what_attention_used(family, attn):
    """Attention recomputed from the evidence gives the module's own output, for every real token."""
    model = tiny_model(family, attn=attn)
    ids, mask = tiny_batch((0, 3, 11))
    outputs, inputs = {}, {}

    def remember(module, args, kwargs, output):
        outputs[module.layer_idx], inputs[module.layer_idx] = output[0], kwargs["hidden_states"]

    hooks = [
        layer.self_attn.register_forward_hook(remember, with_kwargs=True) for layer in model.model.layers
    ]
    layers = observe(model, ids, mask)
    for hook in hooks:
        hook.remove()
    assert handle_of(model) is None and [evidence.layer_idx for evidence in layers] == list(
        range(len(layers))
    )
    for evidence in layers:
        probs = attention_probs(evidence, 0, 40)
        values = evidence.values_BHTD.repeat_interleave(evidence.group, dim=1)
        mixed = torch.einsum("bqst,bqtd,qde->bse", probs, values, evidence.output_weight_QDE)
        real = mask.bool()
        assert_close(mixed[real], outputs[evidence.layer_idx][real], ops=MODEL)
        assert torch.equal(evidence.hidden_BTE, inputs[evidence.layer_idx])
        norm = model.model.layers[evidence.layer_idx].input_layernorm.weight
        assert norm.shape[0] == evidence.hidden_BTE.shape[-1]
        assert torch.equal(evidence.token_ids_BT, ids) and torch.equal(evidence.valid_BT, real)
        assert torch.equal(evidence.positions_BT[real], (mask.cumsum(-1) - 1)[real])
        assert not evidence.queries_BQSD.requires_grad and evidence.num_queries == evidence.num_seen == 40


def test_padding_does_not_change_the_evidence():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((9,))
    padded, alone = observe(model, ids, mask), observe(model, ids[:, 9:])
    for a, b in zip(padded, alone, strict=True):
        assert_close(a.queries_BQSD[:, :, 9:], b.queries_BQSD, ops=MODEL)
        assert_close(a.hidden_BTE[:, 9:], b.hidden_BTE, ops=MODEL)


def test_fingerprint_tells_models_apart_and_survives_a_change_of_precision():
    model = tiny_model("qwen3")
    own = fingerprint(model)
    assert own == fingerprint(tiny_model("qwen3")) == fingerprint(tiny_model("qwen3").bfloat16())
    assert own["sha256"] != fingerprint(tiny_model("qwen3", seed=1))["sha256"]
    assert own != fingerprint(tiny_model("qwen2"))
    assert (own["model_type"], own["num_layers"], own["num_kv_heads"]) == ("qwen3", 3, 2)


def test_unsupported_architectures_are_named():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(
        ValueError, match="GPT2LMHeadModel is not supported: GPT2Model has no `layers`.*Qwen3"
    ):
        describe(gpt2)
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        describe(torch.nn.Linear(2, 2))
    model = tiny_model("llama")
    del model.model.layers[1].self_attn.o_proj
    with pytest.raises(ValueError, match="layer 1 .LlamaDecoderLayer.: LlamaAttention has no `o_proj`"):
        describe(model)


def test_offloaded_weights_are_named():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.to("meta")
    with pytest.raises(ValueError, match="layer 1 .LlamaDecoderLayer.: .*self_attn.o_proj.* meta device"):
        describe(model)


def test_sliding_windows_are_refused():
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    mistral = MistralForCausalLM(MistralConfig(**size, num_hidden_layers=1, vocab_size=32, sliding_window=8))
    with pytest.raises(ValueError, match="sliding window of 8 tokens"):
        describe(mistral)
    mixed = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="layer 1 .* has a sliding_attention layer"):
        describe(mixed)
    whole = MistralForCausalLM(MistralConfig(**size, num_hidden_layers=1, vocab_size=32, sliding_window=None))
    assert len(describe(whole)) == 1 and base_model(whole) is whole.model

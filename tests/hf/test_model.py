import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from retain.evidence import attention_probs
from retain.hf.attach import attached, handle_of
from retain.hf.model import base_model, describe, fingerprint, observe, rotary_of
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


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 64,
    },
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
}


def _before_rope(model, evidence):
    """Queries that the module's own projection (and norm) makes of the attention input, `[B, Q, T, D]`."""
    attention = describe(model)[evidence.layer_idx].module
    Q, D = evidence.queries_BQSD.shape[1], evidence.queries_BQSD.shape[3]
    if hasattr(attention, "qkv_proj"):
        projected = attention.qkv_proj(evidence.hidden_BTE)[..., : Q * D]
    else:
        projected = attention.q_proj(evidence.hidden_BTE)
    queries = projected.unflatten(-1, (Q, D))
    if hasattr(attention, "q_norm"):
        queries = attention.q_norm(queries)
    return queries.transpose(1, 2)


def _check_unrotated(model, dtype=torch.float32):
    rotary = rotary_of(model)
    assert rotary is not None
    ids, mask = tiny_batch((0, 3, 11))
    own = mask.bool()[:, None, :, None]
    for evidence in observe(model, ids, mask):
        plain = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT)
        want = _before_rope(model, evidence).double()
        assert_close(plain.masked_fill(~own, 0), want.masked_fill(~own, 0), dtype=dtype, ops=MODEL)
        far = evidence.queries_BQSD[own.expand_as(want)] - want[own.expand_as(want)].float()
        assert far.abs().max() > 0.1  # turning them was something
    return rotary


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_turned_back_to_what_the_projection_made(family, dtype):
    rotary = _check_unrotated(tiny_model(family, dtype=dtype), dtype)
    assert rotary.scaling == 1.0 and rotary.inverse_frequencies_F.dtype == torch.float32


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_embeddings_are_understood(kind):
    rotary = _check_unrotated(tiny_model("llama", rope_parameters=ROPE[kind]))
    plain = rotary_of(tiny_model("llama", rope_parameters=ROPE["default"]))
    assert not torch.allclose(rotary.inverse_frequencies_F, plain.inverse_frequencies_F)
    assert (rotary.scaling > 1) is (kind == "yarn")


def test_partly_turned_heads_are_understood():
    stable = StableLmForCausalLM(StableLmConfig(**SMALL, partial_rotary_factor=0.5)).eval()
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    phi = Phi3ForCausalLM(Phi3Config(**SMALL, rope_parameters=half, eos_token_id=1)).eval()
    for model in (stable, phi):
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and ("q_proj" in name or "qkv_proj" in name):
                torch.nn.init.normal_(weight, std=0.5)
        rotary = _check_unrotated(model.requires_grad_(False))
        assert 2 * len(rotary.inverse_frequencies_F) == describe(model)[0].head_dim // 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_not_understood(kind):
    model = tiny_model("llama", rope_parameters=ROPE[kind], max_position_embeddings=256)
    before = model.model.rotary_emb.inv_freq.clone()
    assert rotary_of(model) is None
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_what_is_not_of_the_half_convention_is_not_understood():
    glm = GlmForCausalLM(GlmConfig(**SMALL, head_dim=8, eos_token_id=1))
    cohere = CohereForCausalLM(CohereConfig(**SMALL, bos_token_id=1, eos_token_id=1))
    smol = SmolLM3ForCausalLM(SmolLM3Config(**SMALL, no_rope_layers=[1, 0], bos_token_id=1, eos_token_id=1))
    for model in (glm, cohere, smol):
        assert describe(model) and rotary_of(model) is None
    assert rotary_of(smol.model) is None


def test_what_cannot_be_seen_is_not_understood(monkeypatch):
    model = tiny_model("qwen3")
    modeling = "transformers.models.qwen3.modeling_qwen3"
    assert rotary_of(model) is not None and rotary_of(model.model) is not None
    with monkeypatch.context() as patch:
        patch.setattr(f"{modeling}.apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        assert rotary_of(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(f"{modeling}.Qwen3RotaryEmbedding.forward", lambda self, x, at, kind: None)
        assert rotary_of(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(f"{modeling}.Qwen3Attention.forward", lambda self, x: x)
        assert rotary_of(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(f"{modeling}.Qwen3Attention.forward", lambda self, **_: None)  # stores no keys
        assert rotary_of(model) is None
    model.model.rotary_emb.attention_scaling = 2.0
    assert rotary_of(model).scaling == 2.0
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    assert rotary_of(model) is None
    model.model.rotary_emb = None
    assert rotary_of(model) is None


def test_asking_for_the_rotary_embedding_leaves_the_model_alone():
    model = tiny_model("llama")
    names = [set(vars(module)) for module in model.modules()]
    ids, mask = tiny_batch((0, 3))
    before = model(ids, attention_mask=mask).logits
    with attached(model):
        assert rotary_of(model) is not None
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert [set(vars(module)) for module in model.modules()] == names

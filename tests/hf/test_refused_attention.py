"""Attention over latents, by an indexer or in two modules a layer is refused by name."""

import pytest
import torch
import transformers

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from tests.refused import refused
from tests.tiny import EXPERTS, VOCAB

LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
SPARSE = {**ROUTED, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4}
LATENTS = {
    "DeepseekV3": {**ROUTED, "first_k_dense_replace": 1},
    "MiniCPM3": {},
}


def made(name, attn="sdpa", **settings):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, **LATENT, **settings}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=attn)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", LATENTS)
def test_latent_attention_is_refused_by_name(name):
    model, said = made(name, **LATENTS[name]), f"layer . .*{name}.* has latent attention .MLA., which is not"
    refused(said, describe, model)
    refused(said, retain.attach, model)
    refused(said, Cache, model, "snapkv", keep_ratio=0.5)


INDEXED = "is of type (deepseek_sparse|indexed)_attention, whose queries .* an indexer picks"


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa", "HYV4", "AXK2"])
def test_attention_by_an_indexer_is_refused_by_name(name):
    model = made(name, "eager" if name == "HYV4" else "sdpa", **SPARSE)
    refused(f"layer 0 .{name}DecoderLayer. {INDEXED}", describe, model)


def test_two_attentions_a_layer_are_refused_by_name():
    model = made("LongcatFlash", **LONGCAT, zero_expert_num=2, moe_topk=2)
    refused(
        "layer 0 .LongcatFlashDecoderLayer.: it has 2 attention modules .LongcatFlashMLA.", describe, model
    )

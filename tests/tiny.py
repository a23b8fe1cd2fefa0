"""Tiny random models of real architectures, made on the spot: the models of every test.

Weights are drawn larger than at a real initialisation, so that attention is sharp and evicting an entry
visibly changes the logits. A test that passes here because nothing mattered would be worth nothing.

Yi is Llama to transformers, and needs no row of its own.
"""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import retain

VOCAB = 97
PAD = 0

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
SLIDING = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def _family(name: str, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Config class, model class, settings."""
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return config, getattr(transformers, f"{name}ForCausalLM"), settings


# Different depth, width, head width and group size.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": _family("Llama", head_dim=8),
    "qwen2": _family("Qwen2", num_hidden_layers=3, hidden_size=64),
    "qwen3": _family("Qwen3", num_hidden_layers=3, hidden_size=48, head_dim=16),
    "mistral": _family("Mistral", sliding_window=None),
    "phi3": _family("Phi3"),
    "gemma3": _family("Gemma3", **SLIDING, head_dim=16, query_pre_attn_scalar=16),
    "qwen3_moe": _family("Qwen3Moe", **EXPERTS, head_dim=8, num_experts=4),
    "mixtral": _family("Mixtral", **LOCAL),
    "gpt_oss": _family("GptOss", **SLIDING, **LOCAL, head_dim=8),
    "qwen3_next": _family(
        "Qwen3Next", **LINEAR, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16
    ),
    "qwen3_5": _family("Qwen3_5", **LINEAR),
    "gemma2": _family("Gemma2", **SLIDING, head_dim=16, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    "olmo2": _family("Olmo2"),
    "smollm3": _family("SmolLM3", num_hidden_layers=3, no_rope_layers=[1, 0, 1]),
    "granite": _family("Granite", attention_multiplier=0.2, embedding_multiplier=3.0),
    "cohere": _family("Cohere", use_qk_norm=True, logit_scale=1.0),
    "cohere2": _family("Cohere2", **SLIDING, logit_scale=1.0),
    "glm4": _family("Glm4", head_dim=8, attention_bias=True),
    "glm4_moe": _family(
        "Glm4Moe", **EXPERTS, head_dim=8, n_routed_experts=4, use_qk_norm=True, attention_bias=True
    ),
}
# Full attention in every layer, and either attention implementation.
PLAIN = ("llama", "qwen2", "qwen3")
HEADS = {**dict.fromkeys(FAMILIES, (4, 2)), "qwen3": (6, 2)}
# Attention that transformers has no SDPA for, or whose soft cap its SDPA leaves out.
EAGER = ("gpt_oss", "gemma2")
# Masks of the lowest number of float64 in a softmax of float32 give NaN where all is masked (transformers).
SINGLE = ("gemma2",)
# Rotary embeddings that turn neighbouring dimensions, or some layers only, which are not turned back.
UNTURNED = ("smollm3", "cohere", "cohere2", "glm4")
# Norms that multiply by 1 + weight.
SHIFTED = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")


def tiny_model(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn: str | None = None,
    **settings,
) -> PreTrainedModel:
    """A random model of one of `FAMILIES`, in eval mode and without gradients.

    Args:
        family: which architecture, of `FAMILIES`.
        dtype: weights' precision.
        seed: weights' seed.
        attn: attention implementation, `sdpa` or `eager`; None: `sdpa` where the family has it.
        **settings: anything of the config, e.g. `num_hidden_layers=4`, `hidden_size=64`.
    """
    config_class, model_class, base = FAMILIES[family]
    num_heads, num_kv_heads = HEADS[family]
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
            **base,
            **settings,
        },
        attn_implementation=attn or ("eager" if family in EAGER else "sdpa"),
        experts_implementation="eager",  # the others know no float64
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 2 and "experts" not in name:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
            elif weight.ndim == 3:  # of experts, of a convolution: some are stored the other way round
                torch.nn.init.normal_(weight, std=1.5 * min(weight.shape[1:]) ** -0.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.2)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(weight)
            elif "norm" in name:
                shift = 1.0 if family in SHIFTED and "linear_attn" not in name else 0.0
                torch.nn.init.uniform_(weight, 0.7 - shift, 1.3 - shift)
    return model.to(dtype).eval().requires_grad_(False)


def attached(family: str = "qwen3", **settings) -> PreTrainedModel:
    """`tiny_model`, attached for good: it is inert for any other cache."""
    model = tiny_model(family, **settings)
    retain.attach(model)
    return model


def tiny_batch(
    pads: tuple[int, ...] = (0,), num_tokens: int = 40, *, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids and their attention mask, `[len(pads), num_tokens]`, left-padded by `pads`."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, VOCAB, (len(pads), num_tokens), generator=generator)
    attention_mask = (torch.arange(num_tokens) >= torch.tensor(pads)[:, None]).long()
    return torch.where(attention_mask.bool(), input_ids, PAD), attention_mask

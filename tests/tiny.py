"""Tiny random models of three real architectures, made on the spot: the models of every test.

Weights are drawn larger than at a real initialisation, so that attention is sharp and evicting an entry
visibly changes the logits. A test that passes here because nothing mattered would be worth nothing.
"""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
PAD = 0

# name -> (config class, model class, settings): different depth, width, head width and group size.
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_hidden_layers": 3, "hidden_size": 64}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_hidden_layers": 3, "hidden_size": 48, "head_dim": 16}),
}
HEADS = {"llama": (4, 2), "qwen2": (4, 2), "qwen3": (6, 2)}


def tiny_model(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn: str = "sdpa",
    **settings,
) -> PreTrainedModel:
    """A random model of `llama`, `qwen2` or `qwen3`, in eval mode and without gradients.

    Args:
        family: which architecture.
        dtype: weights' precision.
        seed: weights' seed.
        attn: attention implementation, `sdpa` or `eager`.
        **settings: anything of the config, e.g. `num_hidden_layers=4`, `hidden_size=64`.
    """
    config_class, model_class, base = FAMILIES[family]
    num_heads, num_kv_heads = HEADS[family]
    config = config_class(
        **{
            "vocab_size": VOCAB,
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
        attn_implementation=attn,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.2)
            elif "norm" in name:
                torch.nn.init.uniform_(weight, 0.7, 1.3)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_batch(
    pads: tuple[int, ...] = (0,), num_tokens: int = 40, *, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids and their attention mask, `[len(pads), num_tokens]`, left-padded by `pads`."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, VOCAB, (len(pads), num_tokens), generator=generator)
    attention_mask = (torch.arange(num_tokens) >= torch.tensor(pads)[:, None]).long()
    return torch.where(attention_mask.bool(), input_ids, PAD), attention_mask

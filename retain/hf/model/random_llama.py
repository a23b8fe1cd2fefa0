"""Builds a random, frozen Llama of any shape, on which benchmarks of time and memory run.

It is made where it runs and as it is used, since a large one has no room to be made elsewhere, or in float32
first.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCABULARY = 1024


def random_llama(
    *,
    tokens: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> PreTrainedModel:
    """A model with random weights, in eval mode and without gradients.

    Args:
        tokens: of the longest text that it will read.
        layers: L.
        width: E.
        heads: Q, query heads, of width `width / heads`.
        kv_heads: H.
        intermediate: width of the feed-forward part.
        dtype: of the weights.
        device: where it is made.
        seed: of the weights; the global generator is left alone.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=max(2048, tokens),
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)

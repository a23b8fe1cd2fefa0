"""Loads the reference model, a stock `Qwen3ForCausalLM` of 1.4 million parameters that the package brings.

It was trained by this project until 2026-11-29 (MODEL_CARD.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from retain.reference.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

WEIGHTS = Path(__file__).parent / "weights" / "seed0.safetensors"


def config() -> Any:
    """The `Qwen3Config` of the reference model."""
    from transformers import Qwen3Config

    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": False,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return Qwen3Config(**fields)


def load_model(seed: int = 0) -> Qwen3ForCausalLM:
    """The reference model, float32, in eval mode.

    Args:
        seed: of its training: 0.
    """
    from transformers import Qwen3ForCausalLM

    if seed != 0:
        raise ValueError(f"no reference model of seed {seed}: there is reference:0 alone.")
    model = Qwen3ForCausalLM(config())
    model.load_state_dict({name: value.float() for name, value in load_file(WEIGHTS).items()}, strict=False)
    model.tie_weights()
    return model.eval().requires_grad_(False)

"""Builds a random, frozen Llama of any shape, where it runs, for benchmarks of time and memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from retain.process.benchmark import DTYPES, Settings

VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(Settings):
    """The shape of a random Llama, as the settings of a benchmark."""

    layers: Annotated[int, "layers of a random model"] = 4
    width: Annotated[int, "width of its hidden state"] = 512
    heads: Annotated[int, "query heads, of width `width / heads`"] = 8
    kv_heads: Annotated[int, "KV heads"] = 2
    intermediate: Annotated[int, "width of the feed-forward part"] = 1376

    def problems(self) -> Iterator[str]:
        heads = max(1, self.heads)
        if self.width % (2 * heads):
            yield f"width {self.width} is not {heads} heads of an even width: take a multiple of {2 * heads}"
        if heads % max(1, self.kv_heads):
            yield f"heads {heads} are not a multiple of kv_heads {self.kv_heads}"

    def described(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} query and {self.kv_heads} KV heads, "
            f"feed-forward {self.intermediate}, {self.dtype}"
        )


def random_llama(settings: LlamaSettings, tokens: int, **config: Any) -> PreTrainedModel:
    """A model with random weights, in eval mode and without gradients.

    Args:
        settings: shape, precision, device and seed; the global generator is left alone.
        tokens: of the longest text that it will read.
        config: of `LlamaConfig`, otherwise than here.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": settings.width,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.width // settings.heads,
        "max_position_embeddings": max(2048, tokens),
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(), torch.device(settings.device):
        torch.manual_seed(settings.seed)
        model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig(**{**shape, **config}), dtype=DTYPES[settings.dtype]
        )
    return model.eval().requires_grad_(False)

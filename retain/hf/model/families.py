"""Names the parts of each family of decoders, in a table without modelling code.

A family that is not in the table is refused. Yi, InternLM and many others are Llama to transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Family:
    """Names of the parts of an attention module, `self_attn` of a decoder layer.

    Args:
        inputs: projections of the attention input, or the fused one.
        output: projection of the heads' outputs.
        norms: of queries and keys, inside the attention.
        sinks: parameter with one extra logit per query head; None: there is none.
        halves: whether the rotary embedding turns the two halves of (a part of) each head, in every layer
            that evicts.
    """

    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    norms: tuple[str, ...] = ()
    sinks: str | None = None
    halves: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything that an attention module of this family must have."""
        parts = (*self.inputs, *self.norms, self.output, "layer_idx", "scaling", "head_dim")
        return (*parts, "num_key_value_groups", *([] if self.sinks is None else [self.sinks]))


REGULAR = Family()
NORMED = Family(norms=("q_norm", "k_norm"))
OTHERWISE_TURNED = Family(halves=False)
# `model_type` of the decoder's config -> what it calls its parts.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": REGULAR,
        "qwen2": REGULAR,
        "mistral": REGULAR,
        "mixtral": REGULAR,
        "phi3": Family(inputs=("qkv_proj",)),
        "qwen3": NORMED,
        "qwen3_moe": NORMED,
        "gemma2": REGULAR,
        "gemma3_text": NORMED,
        "gpt_oss": Family(sinks="sinks"),
        "olmo2": NORMED,
        "smollm3": OTHERWISE_TURNED,
        "granite": REGULAR,
        "cohere": OTHERWISE_TURNED,
        "cohere2": OTHERWISE_TURNED,
        "glm4": OTHERWISE_TURNED,
        "glm4_moe": REGULAR,
        "qwen3_next": NORMED,
        "qwen3_5_text": NORMED,
        "qwen3_5_moe_text": NORMED,
    }
)
SUPPORTED = f"Supported: {', '.join(FAMILIES)} (docs/families.md says how to add one)."
# Kinds of layers, in transformers' words. Any other is refused (so is attention through an indexer).
FULL = "full_attention"
SLIDING = "sliding_attention"
ALONE = (SLIDING, "linear_attention")
# Types of rotary embeddings whose frequencies do not change with the length.
FIXED = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class Kind:
    """Describes the attention of one layer of a model.

    Args:
        name: `full_attention`, `sliding_attention`, `linear_attention`, ..., as transformers says.
        window: tokens that a query sees, itself included; None for all.
    """

    name: str
    window: int | None = None


def kinds_of(config: Any, num_layers: int) -> list[Kind]:
    """The kind of every layer, read from the config as transformers reads it. A window that holds all
    positions of the model is none.
    """
    window, most = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if window is not None and most is not None and window >= most:
        window = None
    names = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING] * num_layers
    kinds = []
    for name in names[:num_layers]:
        name = FULL if name == SLIDING and window is None else name
        kinds.append(Kind(name, window if name == SLIDING else None))
    return kinds

"""Names the parts of each family of decoders, in a table without modelling code.

A family of the table must have every part that its row names, and a family that is not in the table is taken
to be regular only if nothing about its attention is unexplained (a further parameter is). Yi, SmolLM3,
InternLM and many others are Llama to transformers, or regular.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

SUPPORTED = (
    "Supported: decoders laid out like Llama, Qwen2, Qwen3, Mistral, Phi-3, Gemma-3, Mixtral, gpt-oss or "
    "Qwen3-Next, whose attention has a query, key, value (or fused) and output projection."
)


@dataclass(frozen=True)
class Family:
    """Which attribute is what.

    Args:
        attention: attention module of a decoder layer.
        inputs: projections of the attention input, or the fused one.
        output: projection of the heads' outputs.
        norms: of queries and keys, inside the attention.
        sinks: parameter with one extra logit per query head; None: there is none.
        gated: whether the heads' outputs are multiplied by a gate before the output projection, which comes
            out of the query projection with the queries.
    """

    attention: str = "self_attn"
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    norms: tuple[str, ...] = ()
    sinks: str | None = None
    gated: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything that an attention module of this family must have."""
        parts = (*self.inputs, *self.norms, self.output, "layer_idx", "scaling", "head_dim")
        return (*parts, "num_key_value_groups", *([] if self.sinks is None else [self.sinks]))

    def widths(self, queries: int, keys: int) -> dict[str, int]:
        """Features that each projection of the attention input gives: `queries` and `keys` of all heads."""
        each = (queries * (2 if self.gated else 1), keys, keys)
        return dict(zip(self.inputs, each if len(self.inputs) == 3 else (sum(each),), strict=True))


REGULAR = Family()
FUSED = Family(inputs=("qkv_proj",))
NORMED = Family(norms=("q_norm", "k_norm"))
# `model_type` of the decoder's config -> what it calls its parts.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": REGULAR,
        "qwen2": REGULAR,
        "mistral": REGULAR,
        "mixtral": REGULAR,
        "phi3": FUSED,
        "qwen3": NORMED,
        "qwen3_moe": NORMED,
        "gemma2": REGULAR,
        "gemma3_text": NORMED,
        "gpt_oss": Family(sinks="sinks"),
        "olmo2": NORMED,
        "smollm3": REGULAR,
        "granite": REGULAR,
        "cohere": REGULAR,
        "cohere2": REGULAR,
        "glm4": REGULAR,
        "glm4_moe": REGULAR,
        "qwen3_next": replace(NORMED, gated=True),
        "qwen3_5_text": replace(NORMED, gated=True),
        "qwen3_5_moe_text": replace(NORMED, gated=True),
    }
)
# Families whose rotary embedding turns the two halves of (a part of) each head, in every layer that evicts.
HALVES = FAMILIES.keys() - {"smollm3", "cohere", "cohere2", "glm4"}
# Kinds of layers, in transformers' words. Any other is refused (so is attention through an indexer).
FULL = "full_attention"
SLIDING = "sliding_attention"
ALONE = (SLIDING, "linear_attention")


def family_of(model_type: str, attention: nn.Module) -> Family:
    """The row of the table, or what a family that is not in it looks like.

    Raises:
        ValueError: a family that is not in the table, with a parameter that no row explains;
            latent attention; or several attentions a layer.
    """
    if isinstance(attention, nn.ModuleList):
        raise ValueError(f"it has {len(attention)} attention modules, and one a layer is supported")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if getattr(attention, "kv_lora_rank", None):
        raise ValueError(
            f"{type(attention).__name__} has latent attention (MLA), which is not supported: all heads read "
            "one latent a token"
        )
    if further := [name for name, _ in attention.named_parameters(recurse=False)]:
        raise ValueError(
            f"{type(attention).__name__} has a further parameter, `{'`, `'.join(further)}`, and nothing says "
            f"what it does to attention: add a row for {model_type!r} to retain.hf.model.families"
        )
    return FUSED if hasattr(attention, "qkv_proj") else REGULAR


@dataclass(frozen=True)
class Kind:
    """Describes what one layer of a model attends to.

    Args:
        name: `full_attention`, `sliding_attention`, `linear_attention`, ..., as transformers says.
        window: tokens that a query sees, itself included; None for all.
    """

    name: str
    window: int | None = None


def kinds_of(config: Any, num_layers: int) -> list[Kind]:
    """The kind of every layer, read from the config as transformers reads it.

    A window is one however long it is: no length that a config states keeps a sequence from outgrowing it.
    """
    window = getattr(config, "sliding_window", None)
    names = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING] * num_layers
    kinds = []
    for name in names[:num_layers]:
        unbounded = name == SLIDING and window is None
        kinds.append(Kind(FULL if unbounded else name, window if name == SLIDING else None))
    return kinds

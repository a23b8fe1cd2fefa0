"""Describes a model's layers to a cache: those that evict, and those that are left alone.

`retain.hf.model.decoder` makes a `Layout` of a model. Weights are read where they stand when they are asked
for, so that nothing made of a model goes stale when the model moves.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.hf.model.families import FAMILIES, FIXED, FULL, Family, Kind
from retain.hf.model.projection import dense_weight, plain_weight, stored


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """Describes an attention layer whose entries may be evicted.

    Args:
        family: what the attention module calls its parts.
        hidden_size: E, width of the attention input (and output).
        scaling: factor on the attention logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None: they stay.
        compute_dtype: precision in which a quantised weight is made dense.
    """

    layer_idx: int
    module: nn.Module
    family: Family
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    scaling: float
    soft_cap: float | None
    compute_dtype: torch.dtype

    @property
    def entry_width(self) -> int:
        """Numbers that an entry takes: its key and its value."""
        return 2 * self.head_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The layer's sizes by their letters, as gates are built from them."""
        return {"E": self.hidden_size, "H": self.num_kv_heads, "Q": self.num_heads, "D": self.head_dim}

    @property
    def output(self) -> nn.Module:
        return getattr(self.module, self.family.output)

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """Query, key and value projection, or the fused one."""
        return tuple(getattr(self.module, name) for name in self.family.inputs)

    @property
    def output_weight_QDE(self) -> Float[Tensor, "Q D E"]:
        """The output projection viewed per query head (`retain.hf.model.projection.dense_weight`).

        Gates of the heads' outputs (Qwen3-Next) are left out; they lie below 1, so norms are upper bounds.
        """
        return dense_weight(self.output, self.compute_dtype).unflatten(0, (self.num_heads, -1))

    @property
    def sinks_Q(self) -> Float[Tensor, " Q"] | None:
        """The extra logit of each query head in the softmax; None without."""
        sinks = None if self.family.sinks is None else getattr(self.module, self.family.sinks)
        return None if sinks is None else sinks.detach()

    def evidence(self, *, output: bool = True, **shown: Any) -> Evidence:
        """Evidence of this layer.

        Args:
            output: whether the output projection is looked at; else it is NaN without memory, since to make
                it may cost a matrix.
            **shown: the other fields.
        """
        nan = torch.full((), float("nan"), device=self.device, dtype=self.dtype)
        unread_QDE = nan.expand(self.num_heads, self.head_dim, self.hidden_size)
        return Evidence(
            layer_idx=self.layer_idx,
            output_weight_QDE=self.output_weight_QDE if output else unread_QDE,
            scaling=self.scaling,
            soft_cap=self.soft_cap,
            sinks_Q=self.sinks_Q,
            **shown,
        )

    @property
    def device(self) -> torch.device:
        """Device of the layer's output projection, and of its entries."""
        return stored(self.output)[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the layer's entries, autocast apart."""
        weight = plain_weight(self.output)
        return self.compute_dtype if weight is None else weight.dtype


@dataclass(frozen=True, eq=False)
class Layout:
    """All layers of a model: those that evict, in order, and by their index those that are left alone.

    Args:
        kinds: of all layers, in order.
        base: the decoder.
    """

    evicting: tuple[LayerSpec, ...]
    alone: dict[int, Kind]
    kinds: tuple[Kind, ...]
    base: Any = field(repr=False)

    def blank_layers(self) -> list[Any]:
        """New cache layers of transformers, one a layer; those of layers left alone are used."""
        return DynamicCache(config=self.base.config).layers if self.alone else []

    @cached_property
    def spec_of(self) -> dict[int, LayerSpec]:
        """Layers that evict, by their index."""
        return {spec.layer_idx: spec for spec in self.evicting}

    @cached_property
    def rotary(self) -> Rotary | None:
        """The rotary embedding of the evicting layers, looked at once; None where the model has none, where
        its frequencies change with the length, where layers turn in several ways, or in another than by
        halves of a head (`Family.halves`)."""
        config = self.base.config
        embedding, stated = (
            getattr(self.base, "rotary_emb", None),
            getattr(config, "rope_parameters", None) or {},
        )
        # A module with an embedding for each kind of layer (Gemma-3) names buffers and settings by the kind.
        by_kind = embedding is not None and not hasattr(embedding, "inv_freq")
        if by_kind:
            stated = stated.get(FULL) or {}
        prefix = f"{FULL}_" if by_kind else ""
        frequencies = getattr(embedding, f"{prefix}inv_freq", None)
        known = FAMILIES[config.model_type].halves and stated.get("rope_type", "default") in FIXED
        known = known and (bool(self.alone) or not by_kind)
        if not known or frequencies is None or frequencies.device.type == "meta":
            return None
        scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
        return Rotary(frequencies.detach().float().clone(), scaling)

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads of all layers that evict."""
        return sum(spec.num_kv_heads for spec in self.evicting)

"""Counts the parameters and dimensions of a model without loading its weights.

Parameters are counted on a model that transformers makes on the meta device, never from a formula of ours, so
that biases, norms, experts and tied weights are those of the architecture at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retain.gates import GateSet
from retain.gates.lookahead import LookaheadExtension, LookaheadGate
from retain.hf.intercept.lookahead_pass import adapted_modules
from retain.hf.model.decoder import base_model, layout_of


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that decide memory and time.

    Args:
        name: as the config has it.
        parameters: all of them, tied ones once.
        active: of those in the decoder's layers, the ones that one token meets (of experts, those chosen).
        largest_layer: parameters of the largest decoder layer.
        dtype_bytes: b, of weights and activations.
        num_layers: of the decoder.
        gated: L, attention layers that evict.
        E: width.
        F: width of the feed-forward part (of all experts that a token meets).
        Q: query heads of a layer that evicts, the first of them where they differ.
        H: its KV heads.
        D: its head width.
        V: vocabulary.
        positions: tokens that it takes at most; None: its config does not say.
    """

    name: str
    parameters: int
    active: int
    largest_layer: int
    dtype_bytes: int
    num_layers: int
    gated: int
    E: int
    F: int
    Q: int
    H: int
    D: int
    V: int
    positions: int | None = None


def model_shape(model: nn.Module, name: str) -> ModelShape:
    """Counts what a plan needs of a causal language model, loaded or on the meta device; `name` is for the
    table. ValueError: an architecture that is not supported, as `layout_of` says."""
    base, evicting = base_model(model), layout_of(model, on_meta=True).evicting
    text: Any = base.config
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    chosen = int(getattr(text, "num_experts_per_tok", None) or 0) if experts else 0
    layers: Any = base.layers
    sizes = [{path: parameter.numel() for path, parameter in layer.named_parameters()} for layer in layers]
    met = chosen / experts if experts else 1.0
    active = [sum(n * (met if ".experts." in path else 1.0) for path, n in own.items()) for own in sizes]
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0)
    dtype = next(parameter.dtype for parameter in layers.parameters() if parameter.is_floating_point())
    return ModelShape(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        active=sum(map(int, active)),
        largest_layer=max(sum(own.values()) for own in sizes),
        dtype_bytes=dtype.itemsize,
        num_layers=len(layers),
        gated=len(evicting),
        E=evicting[0].hidden_size,
        F=int(width or 0) * max(1, chosen),
        Q=evicting[0].num_heads,
        H=evicting[0].num_kv_heads,
        D=evicting[0].head_dim,
        V=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
    )


def lookahead_on_meta(model: nn.Module, settings: Mapping[str, Any]) -> GateSet:
    """Makes lookahead gates as `retain.hf.intercept.lookahead_pass.lookahead_gates` does, without numbers:
    the trained parameters can be counted on a model that is not loaded. `settings` are the family's."""
    last = layout_of(model, on_meta=True).evicting[-1]
    own = {name: value for name, value in settings.items() if name != "reduce"}
    modules = adapted_modules(base_model(model), last)
    E, H = last.hidden_size, last.num_kv_heads
    with torch.device("meta"):
        extension = LookaheadExtension(E=E, modules=modules, **own)
        return GateSet({last.layer_idx: LookaheadGate(E=E, H=H)}, extension=extension)

"""Counts the parameters and dimensions of a model without loading its weights.

Parameters are counted on a model that transformers makes on the meta device, never from a formula of ours, so
that biases, norms, experts and tied weights are those of the architecture at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from retain.gates import GateSet
from retain.gates.lookahead import LookaheadExtension, LookaheadGate
from retain.hf.intercept.lookahead_pass import adapted_modules
from retain.hf.model.decoder import base_model
from retain.hf.model.families import FULL, kinds_of
from retain.hf.model.named import reference_seed

Precision = Literal["auto", "float32", "bfloat16", "float16"]


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
        Q: query heads.
        H: KV heads.
        D: head width.
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
    table. ValueError: it is no decoder of transformers with `layers`."""
    base = base_model(model)
    text: Any = base.config
    kinds = [kind.name for kind in kinds_of(text, text.num_hidden_layers)]
    heads = int(text.num_attention_heads)
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
        gated=kinds.count(FULL) or len(kinds),  # where all layers have windows, those evict
        E=int(text.hidden_size),
        F=int(width or 0) * max(1, chosen),
        Q=heads,
        H=int(getattr(text, "num_key_value_heads", None) or heads),
        D=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        V=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
    )


def meta_model(
    name: str, *, dtype: Precision = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """Makes a model that is not loaded: its config is read, its weights are not, and take no memory;
    ValueError: the config cannot be read."""
    from transformers import AutoModelForCausalLM

    config = named_config(name, revision=revision, trust_remote_code=trust_remote_code)
    precision = precision_of(config) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=precision, trust_remote_code=trust_remote_code)


def named_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Reads the config of a model as transformers does; its weights are not looked at.

    Raises:
        ValueError: it cannot be read.
    """
    from transformers import AutoConfig

    if reference_seed(name) is not None:
        from retain.reference.model import config as reference_config

        return reference_config()
    try:
        return AutoConfig.from_pretrained(
            name, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r} cannot be loaded: {error} Pass a local folder, a hub name, or reference:0."
        ) from error


def precision_of(config: Any) -> torch.dtype:
    """Returns the precision that "auto" gives a model's weights when they are read."""
    return getattr(config.get_text_config(), "dtype", None) or torch.float32


def lookahead_on_meta(model: nn.Module, settings: Mapping[str, Any]) -> GateSet:
    """Makes lookahead gates as `retain.hf.intercept.lookahead_pass.lookahead_gates` does, without numbers:
    the trained parameters can be counted on a model that is not loaded. `settings` are the family's."""
    base, shape = base_model(model), model_shape(model, "")
    text: Any = base.config
    kinds = [kind.name for kind in kinds_of(text, text.num_hidden_layers)]
    last = max((idx for idx, name in enumerate(kinds) if name == FULL), default=len(kinds) - 1)
    layers: Any = base.layers
    attention = getattr(layers[last], "self_attn", None)
    behind = [getattr(attention, name, None) for name in ("o_proj", "v_proj")]
    own = {name: value for name, value in settings.items() if name not in ("targets", "reduce")}
    modules = adapted_modules(base, last, behind, settings.get("targets", "all"))
    with torch.device("meta"):
        extension = LookaheadExtension(E=shape.E, modules=modules, **own)
        return GateSet({last: LookaheadGate(E=shape.E, H=shape.H)}, extension=extension)

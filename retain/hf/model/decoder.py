"""Finds where a Hugging Face decoder keeps what eviction needs.

The decoder has `layers`, and is described by a row of `retain.hf.model.families`. An architecture that is not
understood is refused, naming the module that is missing: a half-understood one would give numbers that look
right.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from retain.attention.rotary import Rotary
from retain.hf.model.families import ALONE, FAMILIES, FULL, SUPPORTED, kinds_of
from retain.hf.model.layout import LayerSpec, Layout
from retain.hf.model.projection import input_width, stored


def base_model(model: nn.Module) -> PreTrainedModel:
    """The decoder without its language-model head: the module that has `layers`.

    Raises:
        ValueError: if there is none.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # a peft wrapper
    base = getattr(inner, "base_model", inner)
    if not isinstance(base, PreTrainedModel) or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} is not supported: {type(base).__name__} is no decoder of transformers "
            "with `layers`: pass an AutoModelForCausalLM (of a model that reads more than text, its text "
            f"decoder). {SUPPORTED}"
        )
    return base


def refuse_learned_prompt(model: Any) -> None:
    """Refuse (ValueError) a wrapper of peft with a learned prompt (prompt or prefix tuning) switched on."""
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) and not getattr(model, "_adapters_disabled", False):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(
            f"this model carries a learned prompt ({kind}), of which a retain.Cache knows nothing: use the "
            "model without it (model.get_base_model())."
        )


def describe(model: nn.Module) -> list[LayerSpec]:
    """The layers of a model that evict, in order (`layout_of`); `layer_idx` has gaps where others are.

    Raises:
        ValueError: unsupported architecture; says which module or setting stands in the way.
    """
    return list(layout_of(model).evicting)


def layout_of(model: nn.Module, *, on_meta: bool = False) -> Layout:
    """All layers of a model: those that evict, and those that are left alone.

    Full-attention layers evict; layers with a sliding window or linear attention are left alone.

    Args:
        model: a causal language model of transformers, or its decoder.
        on_meta: whether its weights may be missing (on the meta device).

    Raises:
        ValueError: unsupported architecture; says which module or setting stands in the way.
    """
    base = base_model(model)
    config: Any = base.config
    layers = list(base.layers)[: config.num_hidden_layers]  # behind them some keep layers for other purposes

    def check(holds: object, problem: str) -> None:
        if not holds:
            raise ValueError(f"{type(model).__name__} is not supported: {problem}. {SUPPORTED}")

    check(config.model_type in FAMILIES, f"its model_type is {config.model_type!r}")
    kinds = kinds_of(config, len(layers))
    for idx, kind in enumerate(kinds):
        check(kind.name in (FULL, *ALONE), f"layer {idx} is of type {kind.name}, which is not understood")
    found = ", ".join(sorted({kind.name for kind in kinds}))
    check(
        any(kind.name == FULL for kind in kinds),
        f"none of its layers has attention whose entries could be evicted: all are {found}, and left alone "
        "(layers with a window too, as those of Mistral-7B-v0.1 and Phi-3-mini-4k)",
    )
    evicting = [idx for idx, kind in enumerate(kinds) if kind.name == FULL]
    specs = tuple(_spec(base, idx, layers[idx], check, on_meta) for idx in evicting)
    alone = {idx: kinds[idx] for idx in range(len(kinds)) if idx not in evicting}
    return Layout(specs, alone, tuple(kinds), base)


def _spec(base: Any, idx: int, layer: Any, check: Callable[[object, str], None], on_meta: bool) -> LayerSpec:
    """Describes one layer that evicts, and checks that it has every part."""
    family = FAMILIES[base.config.model_type]
    attention: Any = getattr(layer, "self_attn", None)
    missing = [part for part in family.parts if not hasattr(attention, part)]
    where = f"layer {idx} ({type(layer).__name__}): {type(attention).__name__}"
    check(not missing, f"{where} has no `{'`, `'.join(missing)}`")
    output, first = getattr(attention, family.output), getattr(attention, family.inputs[0])
    if not on_meta and any(tensor.device.type == "meta" for tensor in stored(output)):
        raise ValueError(
            f"{where}: the weight of `{family.output}` is on the meta device (offloaded, or never loaded), "
            "and scores read it. Load the whole model onto devices that hold it."
        )
    width, D, group = input_width(output), attention.head_dim, attention.num_key_value_groups
    whole = width is not None and width % (D * group) == 0
    check(whole, f"{where}.{family.output} takes {width} features, no groups of {group} heads of width {D}")
    assert width is not None
    return LayerSpec(
        layer_idx=idx,
        module=attention,
        family=family,
        num_heads=width // D,
        num_kv_heads=width // D // group,
        head_dim=D,
        hidden_size=input_width(first) or base.config.hidden_size,
        scaling=float(attention.scaling),
        soft_cap=getattr(attention, "attn_logit_softcapping", None),
        compute_dtype=base.dtype,
    )


def rotary_of(model: nn.Module) -> Rotary | None:
    """The rotary embedding of a model's evicting layers (`Layout.rotary`).

    Raises:
        ValueError: unsupported architecture.
    """
    return layout_of(model).rotary

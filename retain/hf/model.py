"""Where a Hugging Face decoder keeps what eviction needs, who it is, and what its layers show.

In: a causal language model whose decoder has `layers`, each with a `self_attn` made of query, key, value and
output projections (Llama, Qwen2, Qwen3 and their relatives). Out: one `LayerSpec` per attention layer, a
fingerprint that tells two models apart, and the evidence of a whole sequence.

The one decision taken here: an architecture that is not understood is refused, naming the module that is
missing. A half-understood one would give numbers that look right.
"""

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from retain.evidence import Evidence
from retain.rotary import Rotary

NEXT_STEP = "Supported: decoders laid out like Llama, Qwen2 and Qwen3, with full attention in every layer."


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One attention layer of a model.

    Args:
        layer_idx: index of the layer in the model.
        module: its attention module.
        num_heads: Q, query heads.
        num_kv_heads: H, key-value heads.
        head_dim: D.
        hidden_size: E, width of the attention input (and output).
        scaling: factor on the attention logits.
        output_weight_QDE: the output projection viewed per query head; a view of the model's weight.
    """

    layer_idx: int
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    scaling: float
    output_weight_QDE: Float[Tensor, "Q D E"]


def base_model(model: nn.Module) -> PreTrainedModel:
    """The decoder without its language-model head: the module that has `layers`.

    Raises:
        ValueError: if there is none.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # a peft wrapper
    base = getattr(inner, "base_model", inner)
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: pass an AutoModelForCausalLM. {NEXT_STEP}"
        )
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} is not supported: {type(base).__name__} has no `layers`. {NEXT_STEP}"
        )
    return base


def describe(model: nn.Module) -> list[LayerSpec]:
    """The attention layers of a model, in order.

    Args:
        model: a causal language model of transformers, or its decoder.

    Returns:
        one spec per layer.

    Raises:
        ValueError: unsupported architecture; says which module or setting stands in the way.
    """
    base = base_model(model)
    config: Any = base.config
    kinds = getattr(config, "layer_types", None)
    specs = []
    layers: Any = base.layers
    for idx, layer in enumerate(layers):
        where = f"{type(model).__name__} is not supported: layer {idx} ({type(layer).__name__})"
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise ValueError(f"{where} has no `self_attn`. {NEXT_STEP}")
        fused = hasattr(attention, "qkv_proj")
        wanted = [*(["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]), "o_proj"]
        wanted += ["layer_idx", "head_dim", "scaling", "num_key_value_groups"]
        missing = [name for name in wanted if not hasattr(attention, name)]
        if missing:
            raise ValueError(
                f"{where}: {type(attention).__name__} has no `{'`, `'.join(missing)}`. {NEXT_STEP}"
            )
        kind = kinds[idx] if kinds else "full_attention"
        window = getattr(config, "sliding_window", None) if kinds is None else None
        if kind != "full_attention" or window is not None:
            what = f"{kind} layer" if kind != "full_attention" else f"sliding window of {window} tokens"
            raise ValueError(f"{where} has a {what}; eviction there is not implemented. {NEXT_STEP}")
        if getattr(attention, "sinks", None) is not None:
            raise ValueError(f"{where} has attention sinks (`sinks`), which are not implemented. {NEXT_STEP}")
        weight = getattr(attention.o_proj, "weight", None)
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(
                f"{where}: `o_proj` has no plain floating-point weight (quantised?). {NEXT_STEP}"
            )
        if weight.device.type == "meta":
            raise ValueError(
                f"{where}: the weight of `self_attn.o_proj` is on the meta device (offloaded to CPU or "
                "disk by accelerate, or never loaded), and scores read it. Load the model onto devices that "
                "hold all of it: a smaller model or dtype, or a device_map without 'cpu' and 'disk'."
            )
        num_heads = weight.shape[1] // attention.head_dim
        inputs = attention.qkv_proj if fused else attention.k_proj
        specs.append(
            LayerSpec(
                layer_idx=attention.layer_idx,
                module=attention,
                num_heads=num_heads,
                num_kv_heads=num_heads // attention.num_key_value_groups,
                head_dim=attention.head_dim,
                hidden_size=inputs.in_features,
                scaling=float(attention.scaling),
                output_weight_QDE=weight.detach().T.unflatten(0, (num_heads, attention.head_dim)),
            )
        )
    if [spec.layer_idx for spec in specs] != list(range(len(specs))):
        raise ValueError(
            f"{type(model).__name__} is not supported: its attention layers are numbered "
            f"{[spec.layer_idx for spec in specs]}, not 0 to {len(specs) - 1}. {NEXT_STEP}"
        )
    return specs


def rotary_of(model: nn.Module) -> Rotary | None:
    """The rotary embedding of a model, where it is one that `retain.rotary` can turn and turn back.

    Nothing is taken on trust. The frequencies found must give the module's own tables, near the beginning and
    far beyond the trained length (those of some kinds change with the length); and every attention module is
    asked for the keys of a few made-up tokens with the true tables and with those of position 0: the one must
    be the other, turned. Costs two key projections of four tokens a layer, so ask once a model.

    Args:
        model: a causal language model of transformers, or its decoder.

    Returns:
        None where the model has no rotary embedding, turns only some of its layers, or each in its own way,
        turns neighbouring dimensions (the interleaved convention), or where any of this cannot be seen.

    Raises:
        ValueError: unsupported architecture.
    """
    base: Any = base_model(model)
    specs = describe(model)
    embedding = getattr(base, "rotary_emb", None)
    frequencies = getattr(embedding, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.device.type == "meta":
        return None
    scaling = float(getattr(embedding, "attention_scaling", 1.0))
    rotary = Rotary(frequencies.detach().float().clone(), scaling)

    # A copy: asking some kinds about long sequences changes them. On the CPU, where products are exact.
    copied = copy.deepcopy(embedding).cpu()
    on_cpu = Rotary(rotary.inverse_frequencies_F.cpu(), scaling)
    trained = int(getattr(base.config, "max_position_embeddings", None) or 1)
    for positions in ([[0, 1, 2, 7]], [[3, 1, trained, 2 * trained]]):
        at = torch.tensor(positions)
        try:
            tables = copied(torch.zeros(1), at)
        except _CALLED_IN_ANOTHER_WAY:
            return None
        for own, ours in zip(tables, on_cpu.tables(at), strict=True):
            if own.shape != ours.shape or not torch.allclose(own.float(), ours, atol=1e-5):
                return None
    return rotary if all(_turns_keys(spec, rotary) for spec in specs) else None


# What a module raises that wants other arguments than those of Llama and its relatives.
_CALLED_IN_ANOTHER_WAY = (TypeError, AttributeError, ValueError, LookupError)


class _KeysSeen(Exception):
    """Carries the keys that an attention module was about to store; ends its forward there."""


class _KeyProbe:
    """Stands where an attention module expects a cache."""

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> None:
        raise _KeysSeen(key_states)


@torch.no_grad()
def _turns_keys(spec: LayerSpec, rotary: Rotary) -> bool:
    """Whether the layer's keys are those of position 0, turned by this embedding."""
    weight = spec.output_weight_QDE
    at = torch.tensor([[0, 1, 4, 19]], device=rotary.inverse_frequencies_F.device)
    tokens = torch.arange(4 * spec.hidden_size, device=weight.device).float()
    hidden = torch.sin(tokens**2).view(1, 4, spec.hidden_size).to(weight.dtype)
    seen = []
    for positions in (torch.zeros_like(at), at):
        tables = tuple(table.to(weight) for table in rotary.tables(positions))
        try:
            spec.module(
                hidden_states=hidden,
                position_embeddings=tables,
                attention_mask=None,
                past_key_values=_KeyProbe(),
            )
        except _KeysSeen as keys:
            seen.append(keys.args[0].to(at.device))
        except torch.OutOfMemoryError:
            raise
        except (*_CALLED_IN_ANOTHER_WAY, RuntimeError):  # shapes that do not fit are RuntimeErrors
            return False
    if len(seen) != 2 or seen[0].shape[-1] < 2 * len(rotary.inverse_frequencies_F):
        return False
    plain = rotary.unrotate(seen[0], torch.zeros_like(at))
    allowed = 16 * torch.finfo(weight.dtype).eps * float(plain.abs().max()) * max(1.0, rotary.scaling)
    return bool((rotary.rotate(plain, at) - seen[1]).abs().max() <= allowed)


def fingerprint(model: nn.Module) -> dict[str, str | int]:
    """Who a model is: its dimensions, and a hash over them and a sample of its weights.

    The sampled weights are rounded to bfloat16 first, so that loading a checkpoint in float32 or bfloat16
    gives the same fingerprint (float16 does not: it loses bfloat16's small numbers).

    Returns:
        a flat mapping for JSON: model_type, dimensions, `sha256`.
    """
    base, specs = base_model(model), describe(model)
    config: Any = base.config
    dims: dict[str, str | int] = {
        "model_type": config.model_type,
        "num_layers": len(specs),
        "hidden_size": specs[0].hidden_size,
        "num_heads": specs[0].num_heads,
        "num_kv_heads": specs[0].num_kv_heads,
        "head_dim": specs[0].head_dim,
        "vocab_size": config.vocab_size,
    }
    digest = hashlib.sha256(json.dumps(dims, sort_keys=True).encode())
    weights = [base.get_input_embeddings().weight]
    for spec in specs:
        projection = spec.module.qkv_proj if hasattr(spec.module, "qkv_proj") else spec.module.k_proj
        weights += [projection.weight, spec.module.o_proj.weight]
    for weight in weights:
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)][:1024]
        digest.update(sample.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return {**dims, "sha256": digest.hexdigest()}


def observe(
    model: nn.Module, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"] | None = None
) -> list[Evidence]:
    """What every layer shows over a whole sequence: one forward of the frozen decoder, without its head.

    Nothing is evicted and nothing stays on the model. Memory: queries, keys, values and attention inputs of
    all layers.

    Args:
        model: a causal language model; attached or not.
        input_ids: token ids, left-padded.
        attention_mask: 1 on tokens, 0 on padding; None: no padding.

    Returns:
        one `Evidence` per layer, with S == T queries.
    """
    from retain.hf.attach import attached
    from retain.hf.cache import Cache

    with attached(model):
        cache = Cache(model, policy=None)
        cache.prefill(input_ids, attention_mask, evict=False, hold_evidence=True)
    assert cache.evidence is not None
    return list(cache.evidence)

"""Counts what gates cost at inference, against the prefill that they ride on: FLOPs per token.

The share that is printed never flatters. A gate's FLOPs are counted while it runs (matrix products, as
`torch.utils.flop_counter` counts them), the model's are those of its weights alone, without attention and
without the head, and where the model is not at hand only its attention's projections are counted, and the
share is called an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from retain.gates.base import GateInputs, GateSet
from retain.hf.model.decoder import base_model
from retain.hf.model.named import reference_seed

# Tokens that a gate is run on to be counted; one that looks from entry to entry costs more a token on more.
TOKENS = 512


@dataclass(frozen=True)
class GateCost:
    """FLOPs a token.

    Args:
        gates: of all layers' gates together, a token; lookahead tokens apart.
        model: of the model's prefill, a token; None where nothing is known of it.
        of: what of the model was counted, in words.
        whole: whether that is all of its weights.
        lookahead: tokens that gates add behind every prompt.
        contextual: whether gates look from entry to entry, so that a token costs more in a longer prompt.
    """

    gates: float
    model: float | None
    of: str
    whole: bool
    lookahead: int = 0
    contextual: bool = False

    def share(self, num_tokens: int = 4096) -> float | None:
        """The gates' FLOPs over those of a prefill of `num_tokens`; lookahead tokens are read like others.

        `gates / model + lookahead / num_tokens`
        """
        return None if not self.model else self.gates / self.model + self.lookahead / num_tokens

    def __str__(self) -> str:
        own = f"gates {_count(self.gates)}FLOP a token (matrix products"
        own += f", in a prompt of {TOKENS} tokens; more in a longer one)" if self.contextual else ")"
        if (share := self.share()) is None:
            return f"{own}; of the model nothing is known: pass --model"
        text = f"inference overhead {'' if self.whole else 'at most '}{100 * share:.3g} % of prefill FLOPs: "
        text += f"{own}, prefill {_count(self.model or 0)}FLOP a token ({self.of})"
        if self.lookahead:
            part = f"{self.lookahead / 4096:.2%}"
            text += f", of it {self.lookahead} lookahead tokens behind a prompt of 4,096: {part}"
        return text


def cost_of(gates: GateSet, metadata: Mapping[str, Any], model: str | None = None) -> GateCost:
    """The cost of an artifact's gates.

    Args:
        gates: that were loaded from it.
        metadata: its JSON.
        model: name of the base model; None: the one that the artifact names, if that is at hand (a reference
            model or a local folder).

    Raises:
        ValueError: the model's config cannot be read, or is that of another model.
    """
    sizes = dict(metadata.get("fingerprint") or {})
    named = str(metadata.get("base_model") or "")
    if model is None and named and (reference_seed(named) is not None or Path(named).is_dir()):
        model = named
    if model is None:
        flops = projection_flops(sizes)
        of = (
            "attention's projections alone, since the artifact does not say how wide the MLP is: pass --model"
        )
    else:
        flops = weight_flops(model, sizes)
        of = f"the weights of {model}, head and attention's own products left out"
    lookahead = int(getattr(gates.extension, "num_tokens", 0))
    return GateCost(gate_flops(gates, sizes), flops, of, model is not None, lookahead, gates.contextual)


def gate_flops(gates: GateSet, sizes: Mapping[str, Any], num_tokens: int = TOKENS) -> float:
    """FLOPs a token of all gates, counted as they run on `num_tokens` tokens of noise.

    Args:
        sizes: the fingerprint's: hidden_size, num_heads, num_kv_heads, head_dim; an own size of a gate wins.
    """
    names = {"E": "hidden_size", "Q": "num_heads", "H": "num_kv_heads", "D": "head_dim"}
    known = {letter: sizes[name] for letter, name in names.items() if name in sizes}
    counted: dict[str, float] = {}
    total = 0.0
    for layer in gates.layers:
        dims = gates[layer].dims()
        key = repr(sorted(dims.items()))
        if key not in counted:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                gates[layer](_noise(gates[layer], {**known, **dims}, num_tokens, gates))
            counted[key] = counter.get_total_flops() / num_tokens
        total += counted[key]
    return total


def weight_flops(name: str, sizes: Mapping[str, Any]) -> float:
    """FLOPs a token of a model's layers, `2 x active parameters`: of experts those that a token meets.

    Args:
        name: `reference:<seed>`, a local folder, or a hub name; only its config is read.
        sizes: fingerprint of the gates' base model.

    Raises:
        ValueError: no config can be read, or it is of other sizes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if reference_seed(name) is not None:
        from retain.reference.model import config as reference_config

        config = reference_config()
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except Exception as error:  # a damaged file leads transformers to errors of any class
            raise ValueError(
                f"--model {name!r} has no config to count with: {error} Pass a local folder, a hub name, or "
                "reference:0."
            ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base: Any = base_model(model)
    text: Any = base.config
    _check_sizes(text, name, sizes)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    active = 0.0
    for layer in list(base.layers)[: text.num_hidden_layers]:
        for path, parameter in layer.named_parameters():
            met = chosen / experts if experts and chosen and ".experts." in path else 1.0
            active += parameter.numel() * met if parameter.dim() > 1 else 0.0
    return 2 * active


def projection_flops(sizes: Mapping[str, Any]) -> float | None:
    """FLOPs a token of attention's projections: `2 L (2 E Q D + 2 E H D)`; None where a size is not known."""
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    if any(not isinstance(sizes.get(name), int) for name in names):
        return None
    L, E, Q, H, D = (int(sizes[name]) for name in names)
    return 2.0 * L * (2 * E * Q * D + 2 * E * H * D)


def _check_sizes(config: Any, name: str, sizes: Mapping[str, Any]) -> None:
    """Refuses a model of other sizes than the fingerprint's, as far as both say them."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    for key, theirs in zip(("hidden_size", "num_heads", "num_kv_heads", "num_layers"), names, strict=True):
        own = getattr(config, theirs, None)
        # Where layers are named, others are left alone, and `num_layers` counts those that are named.
        known = isinstance(own, int) and not (key == "num_layers" and "layers" in sizes)
        if known and sizes.get(key, own) != own:
            raise ValueError(
                f"--model {name!r} is not what these gates were trained on: {key} is {own}, and {sizes[key]} "
                "in the artifact. Pass the gates' base model."
            )


def _noise(gate: Any, sizes: Mapping[str, Any], num_tokens: int, gates: GateSet) -> GateInputs:
    """Inputs of the gate's sizes."""
    E, H = sizes["E"], sizes["H"]
    Q, D = sizes.get("Q", H), sizes.get("D", 1)
    S = int(getattr(gates.extension, "num_tokens", 1))
    shapes = {
        **dict.fromkeys(("hidden_BTE", "stream_BTE"), (1, num_tokens, E)),
        **dict.fromkeys(("queries_BQTD", "queries_before_BQTD"), (1, Q, num_tokens, D)),
        **dict.fromkeys(("keys_BHTD", "keys_before_BHTD", "values_BHTD"), (1, H, num_tokens, D)),
        "lookahead_BQSD": (1, Q, S, D),
    }
    made: dict[str, Any] = {
        field: torch.randn(shape)
        for field, shape in shapes.items()
        if field.rpartition("_")[0] in gate.inputs
    }
    if "token_ids" in gate.inputs:
        made["token_ids_BT"] = torch.zeros(1, num_tokens, dtype=torch.int64)
    if "lookahead" in gate.inputs:
        made |= {"lookahead_keys_BHSD": torch.randn(1, H, S, D), "scaling": D**-0.5}
    return GateInputs(**made)


def _count(flops: float) -> str:
    """A count with its prefix."""
    scales = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, prefix = next((one for one in scales if flops >= one[0]), (1, ""))
    return f"{flops / scale:.3g} {prefix}"

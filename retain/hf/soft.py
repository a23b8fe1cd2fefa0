"""Soft gates: a frozen model whose entries fade instead of being evicted, for training gates end to end.

In: a model, a gate per evicting layer, a batch. Out: the model's own forward, in which every evicting layer
attends through `retain.kernels.gated_attention` with log-gates that the gates make of its attention input; so
a loss on the logits (or on the decoder's hidden states) differentiates to the gates' parameters, and to
nothing of the model. Memory is linear in the tokens: no mask of T x T is made for these layers. Layers that
are left alone attend as before.

The one decision taken here: a soft gate is *added to the logits*, outside of a protected recent window, as a
logarithm that is at most 0. Adding one number to all of a query's logits changes nothing, so the loss alone
does not see gates that all close alike. What pins them is what is not gated, the protected window and spared
entries, and a term on how much stays open, which belongs to the loss. Published: WG-KV (arXiv 2512.17452)
adds `log sigmoid(z)` and DMS (arXiv 2506.05345) `log sigmoid(-z)` outside of a window, TRIM-KV (arXiv
2512.03324) `(j - i) log sigmoid(z)` everywhere.

With gradient checkpointing, pass transformers `gradient_checkpointing_kwargs={"use_reentrant": False}`: the
re-entrant kind finds nothing of a frozen model that needs a gradient.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retain.gates import Gate, GateInputs, GateSet
from retain.hf.call import read_call
from retain.hf.families import FULL, kinds_of
from retain.hf.gates import gates_for
from retain.hf.layout import LayerSpec
from retain.hf.model import base_model, describe
from retain.kernels.gated_attention import gated_attention

__all__ = ["Soft", "SoftGated", "ToLogGate", "above", "logistic", "soft_gated"]

# What the model attends with outside, attached to `retain.Cache` or not.
PREVIOUS = ("sdpa", "eager", "retain_sdpa", "retain_eager")
# Keyword under which what is ours travels from the hooks to the attention function.
SOFT = "retain_soft"

ToLogGate = Callable[[Tensor, Gate], Tensor]


def logistic(output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
    """`log(r / (1 + r))` of an entry's risk `r`: `logsigmoid` of a gate whose unit is `log_risk`.

    An entry whose risk is one is half open. That one is a number like any other to a gate that was trained to
    regress risks, most of which lie far below: such a gate begins almost shut, and wants `above(threshold)`.
    A fresh gate is opened with `gate.start_at_(torch.full([H], 5.0))` (TRIM-KV starts at 18).

    Args:
        output_BHT: what the gate gave, in its own unit.
        gate: the gate, for its unit.

    Raises:
        ValueError: its unit is not a risk.
    """
    return functional.logsigmoid(_log_risk(output_BHT, gate))


def above(threshold: float, temperature: float = 1.0) -> ToLogGate:
    """`logsigmoid((log r - threshold) / temperature)`: half open where the risk is `exp(threshold)`.

    For gates that were trained to regress log-risk first: with the log-risk at which the budget would cut as
    the threshold, what would be kept is open, and what would go is not, in the order of the gate.

    Args:
        threshold: natural logarithm of a risk.
        temperature: log-risk over which a gate opens; smaller is harder.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"above: temperature={temperature} must be positive (1.0 is one unit of log-risk).")

    def to_log_gate(output_BHT: Tensor, gate: Gate) -> Tensor:
        return functional.logsigmoid((_log_risk(output_BHT, gate) - threshold) / temperature)

    return to_log_gate


def _log_risk(output_BHT: Tensor, gate: Gate) -> Tensor:
    """A gate's output as log-risk, float32 at least."""
    output_BHT = output_BHT.to(torch.promote_types(output_BHT.dtype, torch.float32))
    if gate.unit == "log_risk":
        return output_BHT
    if gate.unit == "risk":
        return output_BHT.clamp_min(torch.finfo(output_BHT.dtype).tiny).log()
    raise ValueError(
        f"a gate in units of {gate.unit!r} says no risk, and nothing follows for how far it is open: pass "
        "to_log_gate=, a function of (output_BHT, gate) that gives logarithms of at most 0."
    )


@dataclass(eq=False)
class Soft:
    """What the last forward inside of `soft_gated` made.

    Args:
        log_gates: log-gate of every evicting layer, `[B, H, T]`, 0 on spared entries, with their graph: for
            the term on how much stays open (with `decays`, logarithms of the decay per entry of distance).
        valid_BT: True on tokens, False on padding; None before the first forward.
    """

    log_gates: dict[int, Tensor] = field(default_factory=dict)
    valid_BT: Bool[Tensor, "B T"] | None = None


@dataclass(frozen=True, eq=False)
class _Pass:
    """One forward of the decoder: it travels in the arguments, so that what is computed again while the
    gradient is (gradient checkpointing) meets its own forward's."""

    exists_BT: Tensor | None
    spared_BHT: Tensor | None
    log_gates: dict[int, Tensor]


@dataclass(frozen=True, eq=False)
class _Step:
    """What one attention module's hook hands to the attention function."""

    log_gate_BHT: Tensor
    exists_BT: Tensor | None
    spec: LayerSpec
    protected: int
    decays: bool


@contextmanager
def soft_gated(
    model: nn.Module,
    gates: GateSet,
    *,
    protected: int,
    to_log_gate: ToLogGate = logistic,
    decays: bool = False,
    spared_BHT: Bool[Tensor, "B H T"] | Bool[Tensor, "B T"] | None = None,
) -> Iterator[Soft]:
    """Inside, forwards of the model (or of its decoder) over whole sequences attend through soft gates.

    With `phi = to_log_gate(gate(x_i))`, the logit of query `j` and entry `i` becomes

        l_ji + [j - i >= protected] phi_i               (gates)
        l_ji + [j - i >= protected] (j - i) phi_i       (decays: TRIM-KV, with protected = 0)

    and 0 in place of `phi` on spared entries. Hooks and the attention implementation are undone on the way
    out. Pass `attention_mask` where there is padding (on the left); what comes out at padding means nothing.
    No cache is used. `SoftGated` is the same as a module, which is what DDP wants.

    Args:
        model: a frozen causal language model of transformers that attends with `sdpa` or `eager`, attached or
            not.
        gates: a gate for each evicting layer.
        protected: entries of the recent window that is not gated, the query's own included.
        to_log_gate: `(output_BHT, gate) -> log_gate_BHT`, natural logarithms of at most 0: how far an entry
            is open, from what the gate says of it in its own unit.
        decays: whether that is a decay per entry of distance.
        spared_BHT: True on entries that stay as they are (structural protection: sinks, prefix, turns, ...),
            for all KV heads if it is `[B, T]`; it fits one batch, so that a `with` is entered for each.

    Yields:
        `Soft`, which is filled by every forward.

    Raises:
        ValueError: gates of other sizes, a model that is not frozen or attends in another way; in a forward,
            what cannot be gated: a cache, right padding, a mask that fits nothing, dropout.

    Example:
        >>> with soft_gated(model, gates, protected=128) as soft:  # doctest: +SKIP
        ...     logits = model(input_ids, attention_mask=mask).logits
        >>> open = torch.stack([phi.exp().mean() for phi in soft.log_gates.values()]).mean()  # doctest: +SKIP
        >>> (kl(full_logits, logits) + weight * (open - target).relu()).backward()  # doctest: +SKIP
    """
    hooks = _Hooks(model, gates, protected, to_log_gate, decays, spared_BHT)
    try:
        hooks.connect()
        yield hooks.soft
    finally:
        hooks.undo()


class SoftGated(nn.Module):
    """`soft_gated` as a module whose parameters are the gates' alone: what an optimiser, DDP and accelerate
    are given.

    Args:
        model: the frozen model; it is not registered, so it is in no state dict, and stays where it is.
        gates: trained in place.
        protected: and what follows: see `soft_gated`.
    """

    def __init__(
        self,
        model: nn.Module,
        gates: GateSet,
        *,
        protected: int,
        to_log_gate: ToLogGate = logistic,
        decays: bool = False,
    ):
        super().__init__()
        self.gates = gates
        self._model = (model,)
        self.settings: dict[str, Any] = {
            "protected": protected,
            "to_log_gate": to_log_gate,
            "decays": decays,
        }

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Tensor | None = None,
        *,
        spared_BHT: Tensor | None = None,
        **given: Any,
    ) -> tuple[Any, dict[int, Tensor]]:
        """The model's own output over the batch, and the log-gate of every evicting layer, `[B, H, T]`.

        Args:
            input_ids: token ids, left-padded.
            attention_mask: 1 on tokens, 0 on padding; None: no padding.
            spared_BHT: as in `soft_gated`.
            **given: further arguments of the model.
        """
        model = self._model[0]
        with soft_gated(model, self.gates, spared_BHT=spared_BHT, **self.settings) as soft:
            output = model(input_ids=input_ids, attention_mask=attention_mask, **given)
        return output, soft.log_gates


class _Hooks:
    """The hooks of one `with`, and how to undo them."""

    def __init__(
        self,
        model: nn.Module,
        gates: GateSet,
        protected: int,
        to_log_gate: ToLogGate,
        decays: bool,
        spared_BHT: Tensor | None,
    ):
        self.base = base_model(model)
        self.specs = describe(model)
        self.gates: GateSet = gates_for(model, gates)
        self.protected, self.to_log_gate, self.decays = protected, to_log_gate, decays
        self.spared_BHT = spared_BHT
        self.previous = str(self.base.config._attn_implementation)
        self.name = f"retain_soft_{self.previous}"
        self.arguments = list(inspect.signature(self.base.forward).parameters)
        self.soft = Soft()
        self.hooks: list[RemovableHandle] = []
        self._check(model)

    def _check(self, model: nn.Module) -> None:
        if self.previous not in PREVIOUS:
            raise ValueError(
                f"attention implementation {self.previous!r} cannot be gated softly: call "
                "model.set_attn_implementation('sdpa') (or 'eager') before, and leave one `with soft_gated` "
                "before the next."
            )
        own = {id(parameter) for parameter in self.gates.parameters()}
        wants = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in own
        ]
        if wants:
            raise ValueError(
                f"{len(wants)} parameters of the model want a gradient (the first is {wants[0]}), and soft "
                "gates are trained on a frozen one: call model.requires_grad_(False)."
            )
        if self.protected < 0:
            raise ValueError(f"protected={self.protected} must be at least 0 entries (0 = all are gated).")
        strange = {layer: self.gates[layer].inputs - {"hidden"} for layer in self.gates.layers}
        for layer, missing in strange.items():
            if missing:
                raise ValueError(
                    f"the gate of layer {layer} looks at {', '.join(sorted(missing))}, and here a gate is "
                    "shown the attention input (hidden) alone."
                )

    def connect(self) -> None:
        """Point the model to our attention, and put the hooks in place."""
        if self.name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(self.name, _attention_function(self.previous))
        if self.name not in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(self.name, _mask_function(self.previous))
        self.base.set_attn_implementation(self.name)
        self.hooks = [self.base.register_forward_pre_hook(self.before_model, with_kwargs=True)]
        for spec in self.specs:
            self.hooks.append(
                spec.module.register_forward_pre_hook(self.before_attention(spec), with_kwargs=True)
            )

    def undo(self) -> None:
        """Put the model back as it was."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.base.config._attn_implementation == self.name:
            self.base.set_attn_implementation(self.previous)

    def before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decoder pre-hook: reads the padding, and sends this forward's state along."""
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        if given.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values was given, and soft gates read whole sequences in one forward: leave it out."
            )
        call = read_call(
            None,
            None,
            _no_positions,
            input_ids=given.get("input_ids"),
            inputs_embeds=given.get("inputs_embeds"),
            attention_mask=given.get("attention_mask"),
            position_ids=given.get("position_ids"),
        )
        valid_BT, spared_BHT = call.mask_BT, self.spared_BHT
        if spared_BHT is not None:
            (B, T), shape = valid_BT.shape, tuple(spared_BHT.shape)
            fitting = {(B, T), *((B, spec.num_kv_heads, T) for spec in self.specs)}
            if shape not in fitting:
                raise ValueError(
                    f"spared_BHT is {shape}, and the batch is [{B}, {T}]: pass "
                    f"[{B}, {T}], or [{B}, H, {T}] with H = {self.specs[0].num_kv_heads} KV heads."
                )
            spared_BHT = spared_BHT[:, None] if spared_BHT.ndim == 2 else spared_BHT
        self.soft.log_gates, self.soft.valid_BT = {}, valid_BT
        exists_BT = None if call.valid_BS is None else valid_BT
        own = _Pass(exists_BT, spared_BHT, self.soft.log_gates)
        return (), {**given, "use_cache": False, SOFT: own}

    def before_attention(self, spec: LayerSpec) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """Pre-hook of one attention module: makes its log-gates from the attention input."""

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own: _Pass = kwargs[SOFT]
            hidden_BTE = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            gate = self.gates[spec.layer_idx]
            if gate.input_mean_E.device != hidden_BTE.device:
                gate.to(hidden_BTE.device)  # in place: the optimiser's parameters stay the same ones
            log_gate_BHT = self.to_log_gate(gate(GateInputs(hidden_BTE=hidden_BTE)), gate)
            if own.spared_BHT is not None:
                log_gate_BHT = log_gate_BHT.masked_fill(own.spared_BHT.to(log_gate_BHT.device), 0.0)
            own.log_gates.setdefault(spec.layer_idx, log_gate_BHT)
            step = _Step(log_gate_BHT, own.exists_BT, spec, self.protected, self.decays)
            return args, {**kwargs, SOFT: step}

        return hook


def _no_positions() -> Tensor:
    raise AssertionError("nothing was seen before")


def _attention_function(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def soft_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        step = kwargs.pop(SOFT, None)
        if not isinstance(step, _Step):
            eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            inner = eager if previous == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(previous, eager)
            return inner(module, query, key, value, attention_mask, **kwargs)
        return _gated(step, query, key, value, kwargs), None

    return soft_attention


def _gated(step: _Step, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Tensor:
    """One evicting layer's attention, `[B, S, Q, D]` as transformers takes it."""
    if given.get("dropout"):
        raise ValueError(
            f"layer {step.spec.layer_idx} drops out attention weights ({given['dropout']}), and soft gates "
            "are trained on a model that is used: call model.eval(), or set attention_dropout to 0."
        )
    scaling = given.get("scaling")
    exists_BT = None if step.exists_BT is None else step.exists_BT.to(query.device)
    out = gated_attention(
        query,
        key,
        value,
        None if step.decays else step.log_gate_BHT,
        step.log_gate_BHT if step.decays else None,
        scaling=step.spec.scaling if scaling is None else scaling,
        protected=step.protected,
        window=step.spec.window,
        exists_BT=exists_BT,
        soft_cap=given.get("softcap"),
        sinks_Q=step.spec.sinks_Q,
    )
    return out.transpose(1, 2).contiguous()


def _mask_function(previous: str) -> Callable[..., Tensor | None]:
    def soft_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        config = kwargs.get("config")
        if config is not None and not _is_needed(config, kwargs.get("local_size")):
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return soft_mask


def _is_needed(config: Any, local_size: int | None) -> bool:
    """Whether a mask is one that layers left alone attend with: those that evict have no use for any."""
    kinds = {kind.name for kind in kinds_of(config, config.num_hidden_layers)}
    return local_size is not None if FULL in kinds else "chunked_attention" in kinds

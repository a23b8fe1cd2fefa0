"""Soft gates: runs a frozen model whose entries fade instead of being evicted, to train gates end to end.

Every evicting layer attends through `retain.kernels.gated_attention` with log-gates that the gates make of
what they look at in that layer (attention input, residual stream, queries, keys and values before or after
RoPE, token ids); so a loss on the logits (or on the decoder's hidden states) differentiates to the gates'
parameters, and to nothing of the model. Memory is linear in the tokens: no mask of T x T is made for these
layers. Layers that are left alone attend as before.

A soft gate is added to the logits, outside of a protected recent window, as a logarithm that is at most 0.
Adding one number to all of a query's logits changes nothing, so the loss alone does not see gates that all
close alike. What pins them is what is not gated, the protected window and spared entries, and a term on how
much stays open, which belongs to the loss. Published: WG-KV (arXiv 2512.17452) adds `log sigmoid(z)` and DMS
(arXiv 2506.05345) `log sigmoid(-z)` outside of a window, TRIM-KV (arXiv 2512.03324) `(j - i) log sigmoid(z)`
everywhere.

With gradient checkpointing, pass transformers `gradient_checkpointing_kwargs={"use_reentrant": False}`: the
re-entrant kind finds nothing of a frozen model that needs a gradient. Layers are then computed again while
the backward runs, which must meet the gates: `SoftGated` sees to that wherever the backward is called; with
`soft_gated`, call it before the `with` is left.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from retain.gates import GateSet, inputs_of
from retain.hf.intercept.forward_call import Call, read_call
from retain.hf.intercept.interceptor import (
    PREVIOUS,
    STEP,
    configs_of,
    hidden_of,
    intercepted,
    point,
    point_back,
    register,
)
from retain.hf.model.decoder import base_model, describe, rotary_of
from retain.hf.model.families import FULL, kinds_of
from retain.hf.model.gates import gates_for
from retain.hf.model.layout import LayerSpec
from retain.hf.training.log_gate import ToLogGate, above, check_log_gate, logistic, own_form
from retain.kernels.gated_attention import gated_attention

__all__ = ["Soft", "SoftGated", "ToLogGate", "above", "logistic", "own_form", "soft_gated"]

# What the model attends with outside, attached to `retain.Cache` or not.
OUTSIDE = (*PREVIOUS, *PREVIOUS.values())
# What a pre-hook gives back: the arguments of the forward.
Hooked = tuple[tuple[Any, ...], dict[str, Any]]


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

    owner: "_Hooks"
    call: Call
    spared_BHT: Tensor | None
    log_gates: dict[int, Tensor]
    name: str
    stream_BTE: Tensor | None = None  # of the layer that runs now, where gates look at it

    @property
    def exists_BT(self) -> Tensor | None:
        """None where nothing is padding."""
        return None if self.call.valid_BS is None else self.call.mask_BT


@dataclass(frozen=True, eq=False)
class _Step:
    """What one attention module's hook hands to the attention function."""

    run: _Pass
    spec: LayerSpec
    hidden_BTE: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """One evicting layer's attention, `[B, S, Q, D]` as transformers takes it."""
        if given.get("dropout"):
            raise ValueError(
                f"layer {self.spec.layer_idx} drops out attention weights ({given['dropout']}), and soft "
                "gates are trained on a model that is used: call model.eval(), or set attention_dropout to 0."
            )
        scaling, hooks = given.get("scaling"), self.run.owner
        exists_BT = self.run.exists_BT
        exists_BT = None if exists_BT is None else exists_BT.to(query.device)
        log_gate_BHT = hooks.log_gate(self, query, key, value, given.get("softcap"))
        # As autocast would multiply: a rotation in float32 leaves queries and keys wider than values.
        dtype, kind = value.dtype, query.device.type
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        log_gate_BHT = log_gate_BHT.to(torch.promote_types(dtype, torch.float32))
        out = gated_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            None if hooks.decays else log_gate_BHT,
            log_gate_BHT if hooks.decays else None,
            scaling=self.spec.scaling if scaling is None else scaling,
            protected=hooks.protected,
            window=self.spec.window,
            exists_BT=exists_BT,
            soft_cap=given.get("softcap"),
            sinks_Q=self.spec.sinks_Q,
        )
        return out.transpose(1, 2).contiguous(), None


@contextmanager
def soft_gated(
    model: nn.Module,
    gates: GateSet,
    *,
    protected: int,
    to_log_gate: ToLogGate | None = None,
    decays: bool | None = None,
    spared_BHT: Bool[Tensor, "B H T"] | Bool[Tensor, "B T"] | None = None,
) -> Iterator[Soft]:
    """Inside, forwards of the model (or of its decoder) over whole sequences attend through soft gates.

    With `phi = to_log_gate(gate(i))`, the logit of query `j` and entry `i` becomes

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
            is open, from what the gate says of it in its own unit; None: as its family says it
            (`Gate.log_gate`).
        decays: whether that is a decay per entry of distance; None: as its family says (`Gate.ages`).
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
    hooks = _Hooks(model, gates, protected, to_log_gate, decays)
    try:
        hooks.connect()
        with hooks.gating(model, spared_BHT) as soft:
            yield soft
    finally:
        hooks.undo()


class SoftGated(nn.Module):
    """`soft_gated` as a module whose parameters are the gates' alone: what an optimiser, DDP and accelerate
    are given.

    Its hooks stay in the model from the first forward on, so that gradient checkpointing can compute a layer
    again whenever the backward runs. They do nothing in other forwards of the model (its own logits, say),
    and `close()`, the end of a `with`, or the end of this object take them out.

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
        to_log_gate: ToLogGate | None = None,
        decays: bool | None = None,
    ):
        super().__init__()
        self.gates = gates
        self._model = (model,)
        self.settings: dict[str, Any] = {"protected": protected, "to_log_gate": to_log_gate, "decays": decays}
        self._hooks: _Hooks | None = None

    def close(self) -> None:
        """Take the hooks out of the model; what was computed by gradient checkpointing and not yet
        differentiated cannot be any more. A further forward puts them back."""
        if self._hooks is not None:
            self._hooks.undo()
            self._hooks = None

    def __enter__(self) -> "SoftGated":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, what hooks are taken out with may be gone (so is `sys`, of this module).
        if not ending() and self.__dict__.get("_hooks") is not None:
            self.close()

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
        if self._hooks is None:
            hooks = _Hooks(model, self.gates, **self.settings)
            hooks.connect()
            self._hooks = hooks
        with self._hooks.gating(model, spared_BHT) as soft:
            output = model(input_ids=input_ids, attention_mask=attention_mask, **given)
        return output, soft.log_gates


class _Hooks:
    """Hooks in a model, which gate its forwards inside of `gating` and leave others alone."""

    def __init__(
        self,
        model: nn.Module,
        gates: GateSet,
        protected: int,
        to_log_gate: ToLogGate | None,
        decays: bool | None,
    ):
        self.base = base_model(model)
        self.specs = describe(model)
        self.gates: GateSet = gates_for(model, gates)
        self.protected = protected
        self.to_log_gate = own_form if to_log_gate is None else to_log_gate
        self.decays = self.gates.ages if decays is None else decays
        before = not self.gates.inputs.isdisjoint(("queries_before", "keys_before"))
        self.rotary = rotary_of(model) if before else None
        self.configs = configs_of(self.base)
        self.arguments = list(inspect.signature(self.base.forward).parameters)
        self.soft: Soft | None = None  # of the forwards that are gated now
        self.spared_BHT: Tensor | None = None
        self.checked = False
        self.before: list[tuple[Any, str]] = []  # what each of the configurations said outside
        self.again = False  # whether one layer is computed again, for the backward
        self.hooks: list[RemovableHandle] = []
        self._check(model)

    def _check(self, model: nn.Module) -> None:
        others = (getattr(hook, "__self__", None) for hook in self.base._forward_pre_hooks.values())
        if any(isinstance(other, _Hooks) and other.soft is not None for other in others):
            raise ValueError(
                "soft gates are at work in this model: leave one `with soft_gated` before the next."
            )
        previous = str(self.base.config._attn_implementation)
        if previous not in OUTSIDE:
            raise ValueError(
                f"attention implementation {previous!r} cannot be gated softly: call "
                "model.set_attn_implementation('sdpa') (or 'eager') before."
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
        if "lookahead" in self.gates.inputs:
            raise ValueError(
                f"gates of family {self.gates.family!r} look at lookahead tokens, which a batch that is "
                "gated softly does not have: train them with stage `lookahead`."
            )

    def connect(self) -> None:
        """Put the hooks in place."""
        register = self.base.register_forward_pre_hook
        self.hooks = [register(self.before_model, with_kwargs=True)]
        self.hooks.append(self.base.register_forward_hook(self.after_model, always_call=True))
        for spec in self.specs:
            if "stream" in self.gates.inputs:
                register = self.base.layers[spec.layer_idx].register_forward_pre_hook
                self.hooks.append(register(self.before_layer, with_kwargs=True))
            register = spec.module.register_forward_pre_hook
            self.hooks.append(register(self.before_attention(spec), with_kwargs=True))
            after = spec.module.register_forward_hook(self.after_attention, always_call=True)
            self.hooks.append(after)

    def undo(self) -> None:
        """Take them out."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    @contextmanager
    def gating(self, model: nn.Module, spared_BHT: Tensor | None) -> Iterator[Soft]:
        """Inside, forwards are gated."""
        self._check(model)
        self.soft, self.spared_BHT = Soft(), spared_BHT
        try:
            yield self.soft
        finally:
            self.soft = self.spared_BHT = None

    def _point(self, name: str) -> None:
        """Point the model to our attention: for as long as a forward runs, or one of its layers again."""
        self.before = point(self.configs, name, only=OUTSIDE)

    def _point_back(self) -> None:
        point_back(self.before)
        self.before = []

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
        """Decoder pre-hook: reads the padding, and sends this forward's state along."""
        if self.soft is None:
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        if given.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values was given, and soft gates read whole sequences in one forward: leave it out."
            )
        call = read_call(
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
        # Our attention and mask beside those of the model, under a name of theirs.
        previous = str(self.base.config._attn_implementation)
        name = f"retain_soft_{previous}"
        register(name, intercepted(previous), _mask_function(previous))
        own = _Pass(self, call, spared_BHT, self.soft.log_gates, name)
        self._point(name)
        return (), {**given, "use_cache": False, STEP: own}

    def after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Decoder hook, which runs after an error too."""
        self._point_back()

    def after_attention(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of an attention module: ends what a layer that is computed again began."""
        if self.again:
            self.again = False
            self._point_back()

    def before_attention(self, spec: LayerSpec) -> Callable[..., Hooked | None]:
        """Pre-hook of one attention module: hands its input to the attention function, which makes log-gates
        of it."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
            own = kwargs.get(STEP)
            if not isinstance(own, _Pass) or own.owner is not self:
                return None
            if not self.before:
                self.again = True
                self._point(own.name)
            return args, {**kwargs, STEP: _Step(own, spec, hidden_of(args, kwargs))}

        return hook

    def before_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
        """Pre-hook of a decoder layer, where gates look at the residual stream: sends it along."""
        own = kwargs.get(STEP)
        if not isinstance(own, _Pass) or own.owner is not self:
            return None
        return args, {**kwargs, STEP: replace(own, stream_BTE=hidden_of(args, kwargs))}

    def log_gate(
        self, step: _Step, query: Tensor, key: Tensor, value: Tensor, soft_cap: float | None
    ) -> Tensor:
        """One layer's log-gates, from what its gate looks at."""
        own, spec, device = step.run, step.spec, query.device
        gate = self.gates[spec.layer_idx]
        if gate.device != device:
            gate.to(device)  # in place: the optimiser's parameters stay the same ones
        ids_BT = own.call.token_ids_BS
        evidence = spec.evidence(
            scaling=None,
            soft_cap=soft_cap,
            output=False,  # no gate looks at it, and of a quantised model it would be made anew
            queries_BQSD=query,
            keys_BHTD=key,
            values_BHTD=value,
            positions_BT=own.call.positions_BS.to(device),
            valid_BT=own.call.mask_BT.to(device),
            hidden_BTE=step.hidden_BTE,
            token_ids_BT=None if ids_BT is None else ids_BT.to(device),
            rotary=self.rotary,
            stream_BTE=own.stream_BTE,
        )
        log_gate_BHT = self.to_log_gate(gate(inputs_of(evidence, gate)), gate)
        if not self.checked:
            shape = (len(query), spec.num_kv_heads, query.shape[2])
            check_log_gate(log_gate_BHT, shape, own.exists_BT, spec.layer_idx)
            self.checked = True
        if own.spared_BHT is not None:
            log_gate_BHT = log_gate_BHT.masked_fill(own.spared_BHT.to(log_gate_BHT.device), 0.0)
        own.log_gates.setdefault(spec.layer_idx, log_gate_BHT)
        return log_gate_BHT


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

"""Soft gates: runs a frozen model whose entries fade instead of being evicted, to train gates end to end.

Every evicting layer attends through `retain.kernels.gated_attention` with log-gates that the gates make of
what they look at in that layer (attention input, residual stream, queries, keys and values before or after
RoPE, token ids); so a loss on the logits (or on the decoder's hidden states) differentiates to the gates'
parameters, and to nothing of the model. Memory is linear in the tokens: no mask of T x T is made for these
layers. Layers that are left alone attend as before.

A soft gate is added to the logits, outside of a protected recent window, as a logarithm that is at most 0.
Adding one number to all of a query's logits changes nothing, so the loss alone does not see gates that all
close alike. Entries without a gate pin them (the protected window, `ungated_BHT`), and a term of the loss on
how much stays open. Published: WG-KV (arXiv 2512.17452) adds `log sigmoid(z)` and DMS
(arXiv 2506.05345) `log sigmoid(-z)` outside of a window, TRIM-KV (arXiv 2512.03324) `(j - i) log sigmoid(z)`
everywhere.

With gradient checkpointing, pass transformers `gradient_checkpointing_kwargs={"use_reentrant": False}`: the
re-entrant kind finds nothing of a frozen model that needs a gradient. Layers are then computed again while
the backward runs, and meet the gates of their forward.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from retain.gates import Gate, GateSet, inputs_of
from retain.hf.intercept.attach import cache_in
from retain.hf.intercept.forward_call import Call, read_call
from retain.hf.intercept.interceptor import (
    PREVIOUS,
    STEP,
    configs_of,
    hidden_of,
    intercepted,
    pointed_to,
    register,
)
from retain.hf.model.decoder import base_model, layout_of, rotary_of
from retain.hf.model.families import FULL, kinds_of
from retain.hf.model.gates import gates_for
from retain.hf.model.layout import LayerSpec
from retain.kernels.gated_attention import gated_attention

# What the model attends with outside, attached to `retain.Cache` or not.
OUTSIDE = (*PREVIOUS, *PREVIOUS.values())
# What a pre-hook gives back: the arguments of the forward.
Hooked = tuple[tuple[Any, ...], dict[str, Any]]
# From a gate's output and the gate to what soft attention adds: a logarithm, at most 0, where 0 is open.
ToLogGate = Callable[[Tensor, Gate], Tensor]


def published_log_gate(output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
    """The log-gate of the family's paper (`Gate.log_gate`), in float32 at least.

    Raises:
        ValueError: the family says no openness.
    """
    return gate.log_gate(output_BHT.to(torch.promote_types(output_BHT.dtype, torch.float32)))


class SoftGated(nn.Module):
    """A frozen model whose forwards over whole sequences attend through soft gates, as a module whose
    parameters are the gates' alone: what an optimiser, DDP and accelerate are given.

    With `phi = to_log_gate(gate(i))`, the logit of query `j` and entry `i` becomes

        l_ji + [j - i >= protected] phi_i               (gates)
        l_ji + [j - i >= protected] (j - i) phi_i       (gates that age: TRIM-KV, with protected = 0)

    and 0 in place of `phi` on ungated entries. Its hooks stay in the model from the first forward on, so that
    gradient checkpointing can compute a layer again whenever the backward runs. They do nothing in other
    forwards of the model (its logits, say), and `close()`, the end of a `with`, or the end of this object
    take them out.

    Args:
        model: a frozen causal language model of transformers (or its decoder) that attends with `sdpa` or
            `eager`, attached or not; it is not registered, so it is in no state dict, and stays where it is.
        gates: a gate for each evicting layer, trained in place.
        protected: entries of the recent window that is not gated, the query's included.
        to_log_gate: `(output_BHT, gate) -> log_gate_BHT`, natural logarithms of at most 0: how far an entry
            is open, from what the gate says of it in its unit; None: as its family says it.

    Raises:
        ValueError: in a forward: gates of other sizes, a model that is not frozen or attends in another way,
            a cache, right padding, a mask that fits nothing, dropout.

    Examples:
        >>> gated = SoftGated(model, gates, protected=128)  # doctest: +SKIP
        >>> output, log_gates = gated(input_ids, mask)  # doctest: +SKIP
        >>> open = torch.stack([phi.exp().mean() for phi in log_gates.values()]).mean()  # doctest: +SKIP
        >>> (kl(full_logits, output.logits) + weight * (open - target).relu()).backward()  # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, gates: GateSet, *, protected: int, to_log_gate: ToLogGate | None = None
    ):
        super().__init__()
        self.gates = gates
        self._model = (model,)
        self._settings: tuple[int, ToLogGate] = (protected, to_log_gate or published_log_gate)
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
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        *,
        ungated_BHT: Tensor | None = None,
        **given: Any,
    ) -> tuple[Any, dict[int, Tensor]]:
        """The model's output over the batch, and the log-gate of every evicting layer, `[B, H, T]`, 0 on
        ungated entries (of gates that age, the logarithm of the decay per entry of distance).

        Args:
            input_ids: token ids, left-padded; None: `inputs_embeds` is given.
            attention_mask: 1 on tokens, 0 on padding; None: no padding. What comes out at padding means
                nothing.
            ungated_BHT: True on entries that stay as they are (sinks, prefix, ...); `[B, T]` for all KV
                heads.
            **given: further arguments of the model.
        """
        (model,) = self._model
        if self._hooks is None:
            self._hooks = _Hooks(model, self.gates, *self._settings)
        log_gates: dict[int, Tensor] = {}
        self._hooks.active = log_gates
        self._hooks.ungated_BHT = ungated_BHT
        try:
            output = model(input_ids=input_ids, attention_mask=attention_mask, **given)
        finally:
            self._hooks.active = self._hooks.ungated_BHT = None
        return output, log_gates


@dataclass(frozen=True, eq=False)
class _Step:
    """State of a gated forward of the decoder, at a layer. It travels in the arguments, so that a layer that
    gradient checkpointing computes again meets the state of its forward."""

    owner: "_Hooks"
    call: Call
    ungated_BHT: Tensor | None
    log_gates: dict[int, Tensor]
    name: str
    spec: LayerSpec | None = None  # None in layers that are left alone
    hidden_BTE: Tensor | None = None
    stream_BTE: Tensor | None = None  # where gates look at it

    @property
    def exists_BT(self) -> Tensor | None:
        """None where nothing is padding."""
        return None if self.call.valid_BS is None else self.call.mask_BT

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in a layer; `[B, S, Q, D]` as transformers takes it."""
        spec, hooks, exists_BT = self.spec, self.owner, self.exists_BT
        if spec is None:
            return dense()
        if given.get("dropout"):
            raise ValueError(
                f"layer {spec.layer_idx} drops out attention weights ({given['dropout']}), and soft gates "
                "are trained on a model that is used: call model.eval(), or set attention_dropout to 0."
            )
        scaling, soft_cap = given.get("scaling"), given.get("softcap")
        log_gate_BHT = hooks.log_gate(self, spec, query, key, value, soft_cap)
        # As autocast would multiply: a rotation in float32 leaves queries and keys wider than values.
        dtype, kind = value.dtype, query.device.type
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        log_gate_BHT = log_gate_BHT.to(torch.promote_types(dtype, torch.float32))
        out = gated_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            None if hooks.gates.ages else log_gate_BHT,
            log_gate_BHT if hooks.gates.ages else None,
            scaling=spec.scaling if scaling is None else scaling,
            protected=hooks.protected,
            window=spec.window,
            exists_BT=None if exists_BT is None else exists_BT.to(query.device),
            soft_cap=soft_cap,
            sinks_Q=spec.sinks_Q,
        )
        return out.transpose(1, 2).contiguous(), None


class _Hooks:
    """Hooks in a model, which gate its forwards while something is `active` and leave others alone."""

    def __init__(self, model: nn.Module, gates: GateSet, protected: int, to_log_gate: ToLogGate):
        layout = layout_of(model)
        self.base, self.specs = base_model(model), list(layout.evicting)
        self.gates: GateSet = gates_for(model, gates)
        self.protected, self.to_log_gate = protected, to_log_gate
        before = not self.gates.inputs.isdisjoint(("queries_before", "keys_before"))
        self.rotary = rotary_of(model) if before else None
        self.configs = configs_of(self.base)
        self.arguments = list(inspect.signature(self.base.forward).parameters)
        self.active: dict[int, Tensor] | None = None  # log-gates of the forward that is gated now
        self.ungated_BHT: Tensor | None = None
        self.checked = False
        self.pointed: ExitStack | None = None  # while the configurations say our name
        self.again = False  # whether one layer is computed again, for the backward
        trained = {id(parameter) for parameter in self.gates.parameters()}
        wants = [
            name for name, each in model.named_parameters() if each.requires_grad and id(each) not in trained
        ]
        if wants:
            raise ValueError(
                f"{len(wants)} parameters of the model want a gradient (the first is {wants[0]}), and soft "
                "gates are trained on a frozen one: call model.requires_grad_(False)."
            )
        if protected < 0:
            raise ValueError(f"protected={protected} must be at least 0 entries (0 = all are gated).")
        if "lookahead" in self.gates.inputs:
            raise ValueError(
                f"gates of family {self.gates.family!r} look at lookahead tokens, which a batch that is "
                "gated softly does not have: train them with stage `lookahead`."
            )
        self.hooks: list[RemovableHandle] = [
            self.base.register_forward_pre_hook(self.before_model, with_kwargs=True),
            self.base.register_forward_hook(self.after_model, always_call=True),
        ]
        for spec in self.specs:
            if "stream" in self.gates.inputs:
                layer = self.base.layers[spec.layer_idx]
                self.hooks.append(layer.register_forward_pre_hook(self.before_layer, with_kwargs=True))
            before_attention = partial(self.before_attention, spec)
            self.hooks += [
                spec.module.register_forward_pre_hook(before_attention, with_kwargs=True),
                spec.module.register_forward_hook(self.after_attention, always_call=True),
            ]

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _point(self, name: str) -> None:
        """Point the model to our attention, while a forward runs, or one of its layers again."""
        self.pointed = ExitStack()
        self.pointed.enter_context(pointed_to(self.configs, name, only=OUTSIDE))

    def _point_back(self) -> None:
        if self.pointed is not None:
            self.pointed.close()
            self.pointed = None

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
        """Decoder pre-hook: reads the padding, and sends this forward's state along."""
        if self.active is None:
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        if cache_in(given) is not None:
            raise ValueError(
                "a cache was given, and soft gates read whole sequences in one forward: leave it out."
            )
        previous = str(self.base.config._attn_implementation)
        if previous not in OUTSIDE:
            raise ValueError(
                f"attention implementation {previous!r} cannot be gated softly: call "
                "model.set_attn_implementation('sdpa') (or 'eager') before."
            )
        read = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
        shown: dict[str, Any] = {name: given.get(name) for name in read}
        call = read_call(**shown)
        ungated_BHT = self.ungated_BHT
        if ungated_BHT is not None:
            (B, T), shape = call.mask_BT.shape, tuple(ungated_BHT.shape)
            if shape not in {(B, T), *((B, spec.num_kv_heads, T) for spec in self.specs)}:
                raise ValueError(
                    f"ungated_BHT is {shape}, and the batch is [{B}, {T}]: pass "
                    f"[{B}, {T}], or [{B}, H, {T}] with H = {self.specs[0].num_kv_heads} KV heads."
                )
            ungated_BHT = ungated_BHT[:, None] if ungated_BHT.ndim == 2 else ungated_BHT
        # Our attention and mask beside those of the model, under a name of theirs.
        name = f"retain_soft_{previous}"
        register(name, intercepted(previous), _mask_function(previous))
        step = _Step(self, call, ungated_BHT, self.active, name)
        self._point(name)
        return (), {**given, "use_cache": False, STEP: step}

    def after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Decoder hook, which runs after an error too."""
        self._point_back()

    def after_attention(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of an attention module: ends what a layer that is computed again began."""
        if self.again:
            self.again = False
            self._point_back()

    def before_attention(
        self, spec: LayerSpec, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Hooked | None:
        """Pre-hook of an attention module: sends its input along, of which log-gates are made."""
        step = kwargs.get(STEP)
        if not isinstance(step, _Step) or step.owner is not self:
            return None
        if self.pointed is None:
            self.again = True
            self._point(step.name)
        return args, {**kwargs, STEP: replace(step, spec=spec, hidden_BTE=hidden_of(args, kwargs))}

    def before_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
        """Pre-hook of a decoder layer, where gates look at the residual stream: sends it along."""
        step = kwargs.get(STEP)
        if not isinstance(step, _Step) or step.owner is not self:
            return None
        return args, {**kwargs, STEP: replace(step, stream_BTE=hidden_of(args, kwargs))}

    def log_gate(
        self, step: _Step, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, soft_cap: float | None
    ) -> Tensor:
        """Log-gates of a layer, from the inputs of its gate."""
        call, device, gate = step.call, query.device, self.gates[spec.layer_idx]
        if gate.device != device:
            gate.to(device)  # in place: the optimiser's parameters stay the same ones
        evidence = spec.evidence(
            scaling=None,
            soft_cap=soft_cap,
            output=False,  # no gate looks at it, and of a quantised model it would be made anew
            queries_BQSD=query,
            keys_BHTD=key,
            values_BHTD=value,
            positions_BT=call.positions_BS.to(device),
            valid_BT=call.mask_BT.to(device),
            hidden_BTE=step.hidden_BTE,
            token_ids_BT=None if call.token_ids_BS is None else call.token_ids_BS.to(device),
            rotary=self.rotary,
            stream_BTE=step.stream_BTE,
        )
        log_gate_BHT = self.to_log_gate(gate(inputs_of(evidence, gate)), gate)
        if not self.checked:  # of one layer, since it waits for the device
            shape = (len(query), spec.num_kv_heads, query.shape[2])
            _check_log_gate(log_gate_BHT, shape, step.exists_BT, spec.layer_idx)
            self.checked = True
        if step.ungated_BHT is not None:
            log_gate_BHT = log_gate_BHT.masked_fill(step.ungated_BHT.to(log_gate_BHT.device), 0.0)
        step.log_gates.setdefault(spec.layer_idx, log_gate_BHT)
        return log_gate_BHT


def _check_log_gate(given: Any, shape: tuple[int, int, int], exists_BT: Tensor | None, layer: int) -> None:
    """That `to_log_gate` gives logarithms of at most 0."""
    said = f"to_log_gate, in layer {layer}, gave"
    if not isinstance(given, Tensor) or tuple(given.shape) != shape or not given.is_floating_point():
        found = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{said} {found}: wanted floating point {shape}, that is [B, H, T].")
    known = given.detach()
    if exists_BT is not None:  # what a model makes of padding is nobody's concern
        known = known.masked_fill(~exists_BT[:, None].to(given.device), 0.0)
    largest = float(known.max()) if known.numel() else 0.0  # NaN if there is one
    if not largest <= 0:
        raise ValueError(
            f"{said} {largest:.4g}: wanted natural logarithms, of at most 0, of how far entries are open (an "
            "openness of 0 .. 1 is not one: return its log)."
        )


def _mask_function(previous: str) -> Callable[..., Tensor | None]:
    def soft_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        """Only masks with which layers that are left alone attend: those that evict have no use for any."""
        config = kwargs.get("config")
        if config is not None:
            kinds = {kind.name for kind in kinds_of(config, config.num_hidden_layers)}
            needed = kwargs.get("local_size") is not None if FULL in kinds else "chunked_attention" in kinds
            if not needed:
                return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return soft_mask

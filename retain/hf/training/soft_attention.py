"""Soft gates: runs a frozen model whose entries fade instead of being evicted, to train gates end to end.

Every evicting layer attends through `retain.kernels.gated_attention` with log-gates that the gates make of
what they look at in that layer (attention input, residual stream, queries, keys and values before or after
RoPE, token ids); so a loss on the logits (or on the decoder's hidden states) differentiates to the gates'
parameters, and to nothing of the model. Memory is linear in the tokens: no mask of T x T is made for these
layers. Layers that are left alone attend as before.

A soft gate is added to the logits, outside of a protected recent window, as a logarithm that is at most 0.
Adding one number to all of a query's logits changes nothing, so the loss alone does not see gates that all
close alike. Entries without a gate pin them (the protected window, `ungated_BT`), and a term of the loss on
how much stays open. Published: WG-KV (arXiv 2512.17452) adds `log sigmoid(z)` and DMS
(arXiv 2506.05345) `log sigmoid(-z)` outside of a window, TRIM-KV (arXiv 2512.03324) `(j - i) log sigmoid(z)`
everywhere.

With gradient checkpointing, pass transformers `gradient_checkpointing_kwargs={"use_reentrant": False}`: the
re-entrant kind finds nothing of a frozen model that needs a gradient. Layers are then computed again while
the backward runs, and meet the gates of their forward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retain.gates import Gate, GateSet, inputs_of
from retain.hf.intercept.attach import attach, cache_in
from retain.hf.intercept.forward_call import Call, read_call
from retain.hf.intercept.interceptor import STEP, check_pointed, hidden_of, masks_unmade
from retain.hf.model.decoder import base_model, layout_of, rotary_of
from retain.hf.model.layout import LayerSpec
from retain.kernels.gated_attention import gated_attention
from retain.models.named_gates import gates_for

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

    and 0 in place of `phi` on ungated entries. The model is attached, with hooks, until `close()` or the end
    of a `with`, so that gradient checkpointing can compute a layer again whenever the backward runs. Hooks do
    nothing in other forwards of the model. Attention weights are not dropped out.

    Args:
        model: a frozen causal language model of transformers (or its decoder) that attends with `sdpa` or
            `eager`, attached or not; it is not registered, so it is in no state dict, and stays where it is.
        gates: a gate for each evicting layer, trained in place.
        protected: entries of the recent window that is not gated, the query's included.
        to_log_gate: `(output_BHT, gate) -> log_gate_BHT`, natural logarithms of at most 0: how far an entry
            is open, from the gate's output in its unit; None: as its family says it.

    Raises:
        ValueError: gates of other sizes, a model that is not frozen or attends in another way; in a forward:
            a cache, right padding, a mask that fits nothing.

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
        self.gates: GateSet = gates_for(model, gates)
        self.protected, self.to_log_gate = protected, to_log_gate or published_log_gate
        base = base_model(model)
        self._frozen: tuple[Any, Any] = model, base  # a tuple, so that neither is a part of this module
        before = not self.gates.inputs.isdisjoint(("queries_before", "keys_before"))
        self.rotary = rotary_of(model) if before else None
        trained = {id(parameter) for parameter in self.gates.parameters()}
        wants = [name for name, x in model.named_parameters() if x.requires_grad and id(x) not in trained]
        if wants:
            raise ValueError(
                f"{len(wants)} parameters of the model want a gradient (the first is {wants[0]}), and soft "
                "gates are trained on a frozen one: call model.requires_grad_(False)."
            )
        layers, layout = cast(Any, base.layers), layout_of(model)
        self._masks = "full" if layout.alone else "all"  # that are not made
        self._attached = attach(model)
        self._handles: list[RemovableHandle] = []
        for spec in layout.evicting:
            hooked = [(spec.module, "hidden_BTE")]
            if "stream" in self.gates.inputs:
                hooked.append((layers[spec.layer_idx], "stream_BTE"))
            for part, name in hooked:
                hook = partial(self._hand_on, spec, name)
                self._handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks out of the model; layers of gradient checkpointing that were not yet differentiated
        cannot be any more, and forwards are not gated."""
        for handle in self._handles:
            handle.remove()
        self._attached.undo()

    def __enter__(self) -> "SoftGated":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        *,
        ungated_BT: Bool[Tensor, "B T"] | None = None,
        **given: Any,
    ) -> tuple[Any, dict[int, Tensor]]:
        """The model's output over the batch, and the log-gate of every evicting layer, `[B, H, T]`, 0 on
        ungated entries (of gates that age, the logarithm of the decay per entry of distance).

        Args:
            input_ids: token ids, left-padded; None: `inputs_embeds` is given.
            attention_mask: 1 on tokens, 0 on padding; None: no padding. The output at padding means nothing.
            ungated_BT: True on entries that stay as they are (sinks, prefix, ...).
            **given: further arguments of the model.
        """
        if cache_in(given) is not None:
            raise ValueError(
                "a cache was given, and soft gates read whole sequences in one forward: leave it out."
            )
        check_pointed(self._frozen[1])
        shown: dict[str, Any] = {name: given.get(name) for name in ("inputs_embeds", "position_ids")}
        shown |= {"input_ids": input_ids, "attention_mask": attention_mask}
        step = _Step(self, read_call(shown), ungated_BT, {})
        with masks_unmade(self._masks):
            output = self._frozen[0](**{**given, **shown, "use_cache": False, STEP: step})
        return output, step.log_gates

    def _hand_on(
        self, spec: LayerSpec, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Hooked | None:
        """Pre-hook of a decoder layer, and of its attention: sends its input along, of which log-gates are
        made."""
        step = kwargs.get(STEP)
        if not isinstance(step, _Step) or step.gated is not self:
            return None
        shown: dict[str, Any] = {name: hidden_of(args, kwargs)}
        return args, {**kwargs, STEP: replace(step, spec=spec, **shown)}


@dataclass(frozen=True, eq=False)
class _Step:
    """State of a gated forward of the decoder, at a layer. It travels in the arguments, so that a layer that
    gradient checkpointing computes again meets the state of its forward."""

    gated: SoftGated
    call: Call
    ungated_BT: Tensor | None
    log_gates: dict[int, Tensor]
    spec: LayerSpec | None = None  # None in layers that are left alone
    hidden_BTE: Tensor | None = None
    stream_BTE: Tensor | None = None  # where gates look at it

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in a layer; `[B, S, Q, D]` as transformers takes it."""
        spec, ages, call = self.spec, self.gated.gates.ages, self.call
        if spec is None:
            return dense()
        log_gate_BHT = self.log_gate(spec, query, key, value)
        # As autocast would multiply: a rotation in float32 leaves queries and keys wider than values.
        dtype, kind = value.dtype, query.device.type
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        log_gate_BHT = log_gate_BHT.to(torch.promote_types(dtype, torch.float32))
        out = gated_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            None if ages else log_gate_BHT,
            log_gate_BHT if ages else None,
            scaling=spec.scaling,
            protected=self.gated.protected,
            pads_B=None if call.valid_BS is None else (~call.mask_BT).sum(-1).to(query.device),
            soft_cap=spec.soft_cap,
            sinks_Q=spec.sinks_Q,
        )
        return out.transpose(1, 2).contiguous(), None

    def log_gate(self, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Log-gates of a layer, from the inputs of its gate."""
        call, device, gate = self.call, query.device, self.gated.gates[spec.layer_idx]
        if gate.device != device:
            gate.to(device)  # in place: the optimiser's parameters stay the same ones
        evidence = spec.evidence(
            output=False,  # no gate looks at it, and of a quantised model it would be made anew
            queries_BQSD=query,
            keys_BHTD=key,
            values_BHTD=value,
            positions_BT=call.positions_BS.to(device),
            valid_BT=call.mask_BT.to(device),
            hidden_BTE=self.hidden_BTE,
            rotary=self.gated.rotary,
            stream_BTE=self.stream_BTE,
        )
        log_gate_BHT = self.gated.to_log_gate(gate(inputs_of(evidence, gate)), gate)
        if self.ungated_BT is not None:
            log_gate_BHT = log_gate_BHT.masked_fill(self.ungated_BT[:, None].to(device), 0.0)
        self.log_gates.setdefault(spec.layer_idx, log_gate_BHT)
        return log_gate_BHT

"""Cases of gated attention: named shapes, inputs and rivals.

The forward and the backward are timed, to queries, keys, values and gates, as in training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.gated_attention import gated_attention
from retain.kernels.measure import Claim

# One after another: the output (of which the backward makes what a row subtracts), the weights, the logits'
# gradients, and the result.
ROUNDING, GRAPHED = (4, None), False
FREE = "SDPA, no gate"


@dataclass(frozen=True)
class Case:
    """A call.

    Args:
        batch, heads, group, entries, width: B, H, G, T and D.
        queries: S, the last of the entries; None: all of them.
        gate, decay, sinks: whether there are any.
        pads: padding on the left of each sequence; beyond the last, none.
        hidden: share of entries whose log-gate is -inf.
        silent: query heads, from the first on, whose sink is -inf.
        heads_last: tensors are views of `[B, T, heads, D]`, and gates of `[B, T, H]`.
        protected, soft_cap: as the op's.
    """

    batch: int = 1
    heads: int = 2
    group: int = 2
    entries: int = 50
    width: int = 64
    queries: int | None = None
    gate: bool = True
    decay: bool = False
    sinks: bool = False
    pads: tuple[int, ...] = ()
    hidden: float = 0.0
    silent: int = 0
    heads_last: bool = False
    protected: int = 8
    soft_cap: float | None = None

    @property
    def asked(self) -> int:
        """S."""
        return self.entries if self.queries is None else self.queries


ALL: dict[str, Any] = {"decay": True, "pads": (5,), "soft_cap": 3.0, "sinks": True}
CASES = {
    "one entry": Case(entries=1, sinks=True),
    "one entry, gated": Case(entries=1, protected=0, decay=True, sinks=True),
    "no gate": Case(gate=False, entries=45),
    "G = 1, odd lengths": Case(batch=2, group=1, heads=1, entries=67),
    "G = 8, all gated": Case(heads=1, group=8, entries=33, protected=0),
    "strided": Case(batch=2, entries=35, heads_last=True),
    "protected beyond all": Case(entries=40, protected=2**40),
    "whole blocks": Case(heads=1, entries=64, protected=16),
    "decay": Case(heads=1, gate=False, decay=True, protected=0),
    "gate and decay": Case(decay=True, heads_last=True, group=1),
    "the last queries": Case(batch=2, heads=1, entries=70, queries=19),
    "one query": Case(entries=49, queries=1),
    "left padding": Case(batch=3, heads=1, pads=(11, 45), entries=50),
    "a sequence of padding": Case(batch=2, heads=1, pads=(20,), entries=20, sinks=True),
    "soft cap": Case(soft_cap=2.0, entries=40),
    "a sink of nothing": Case(sinks=True, silent=2, hidden=1.0, protected=0, entries=40),
    "hidden entries": Case(hidden=0.4, protected=0, entries=45),
    "hidden but for a window": Case(hidden=1.0, protected=9, entries=70, heads=1),
    "everything": Case(batch=2, heads=1, entries=45, heads_last=True, **ALL),
    "D = 33": Case(heads=1, width=33, pads=(3,)),
    "D = 128": Case(heads=1, width=128, entries=60),
    "D = 256": Case(heads=1, width=256, entries=37),
}

# An 8B model's layer.
_LAYER = Case(heads=8, group=4, width=128, protected=512)
SPEED = {
    "cpu": {"2K": Case(heads=2, group=4, entries=2048, protected=128)},
    "cuda": {"4K": replace(_LAYER, entries=2**12), "32K": replace(_LAYER, entries=2**15)},
}
CLAIMS = [Claim("2K", FREE, 1.6), Claim("32K", FREE, 1.3)]  # a gate costs little
_WHOLE = Case(heads=1, group=4, entries=128)
_HALF, _FULL = torch.bfloat16, torch.float32
# Calls that are compiled ahead of time: every tile, and every switch of the code, of whole blocks and others.
BUILDS: list[tuple[torch.dtype, Case]] = [
    *((dtype, replace(_WHOLE, width=D)) for D in (64, 128, 256) for dtype in (_HALF, _FULL)),
    *((_HALF, replace(_WHOLE, width=D, decay=True)) for D in (64, 128, 256)),
    (_HALF, replace(_WHOLE, width=128, **ALL)),
    (_HALF, replace(_WHOLE, width=128, entries=100)),
    (_HALF, replace(_WHOLE, width=128, entries=100, pads=(5,))),
    (_HALF, replace(_WHOLE, width=33, entries=100, **ALL)),
    (torch.float16, replace(_WHOLE, width=80, pads=(5,))),
]

DIFFERENTIABLE = ("queries_BQSD", "keys_BHTD", "values_BHTD", "log_gate_BHT", "log_decay_BHT", "sinks_Q")


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op; gates and sinks in float32 (float64 for float64); all of them leaves."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    B, H, T, D = case.batch, case.heads, case.entries, case.width

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(like)

    def heads_of(number: int, length: int) -> Tensor:
        if case.heads_last:
            return normal(B, length, number, D).transpose(1, 2)
        return normal(B, number, length, D)

    def bias(scale: float) -> Tensor:
        made = normal(B, T, H, like=wide).abs().mul_(-scale).transpose(1, 2)
        return made if case.heads_last else made.contiguous()

    kwargs: dict[str, Any] = {
        "queries_BQSD": heads_of(H * case.group, case.asked).mul_(1.5),
        "keys_BHTD": heads_of(H, T),
        "values_BHTD": heads_of(H, T),
        "log_gate_BHT": bias(2.0) if case.gate else None,
        "log_decay_BHT": bias(0.05) if case.decay else None,
        "sinks_Q": normal(H * case.group, like=wide) if case.sinks else None,
    }
    if case.hidden and kwargs["log_gate_BHT"] is not None:
        dropped = torch.rand(B, H, T, generator=generator, device=device) < case.hidden
        kwargs["log_gate_BHT"] = kwargs["log_gate_BHT"].masked_fill(dropped, -math.inf)
    if case.silent:
        kwargs["sinks_Q"][: case.silent] = -math.inf
    for name in DIFFERENTIABLE:
        if kwargs[name] is not None:
            kwargs[name].requires_grad_()
    pads = torch.tensor([*case.pads, *[0] * (B - len(case.pads))], device=device) if case.pads else None
    return {
        **kwargs,
        "pads_B": pads,
        "scaling": D**-0.5,
        "protected": case.protected,
        "soft_cap": case.soft_cap,
    }


def run(case: Case, kwargs: dict[str, Any]) -> list[Tensor]:
    """The op: its output, and the gradients that a fixed gradient of the output makes."""
    out = gated_attention(**kwargs)
    return [out, *gradients(kwargs, out)]


def gradients(kwargs: dict[str, Any], out: Tensor, d_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of what is there of `DIFFERENTIABLE`, in its order, for one gradient of the output."""
    leaves = [kwargs[name] for name in DIFFERENTIABLE if kwargs[name] is not None]
    return torch.autograd.grad(
        out, leaves, _d_out(out.shape, out.dtype, out.device) if d_out is None else d_out
    )


@cache
def _d_out(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of the output: always the same, drawn in float32."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of attention without the gate."""
    queries, keys, values = (kwargs[name] for name in DIFFERENTIABLE[:3])
    d_out = _d_out(queries.shape, queries.dtype, queries.device)

    def free() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=kwargs["scaling"], enable_gqa=True
            )
        return torch.autograd.grad(out, (queries, keys, values), d_out)

    return {FREE: free}

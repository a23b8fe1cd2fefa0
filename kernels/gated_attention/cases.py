"""Cases of gated attention: named shapes, inputs, check and rivals.

The forward and the backward are timed, to queries, keys, values and gates, as in training.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retain.kernels import backend
from retain.kernels.gated_attention import gated_attention
from retain.kernels.measure import Claim, Cost, cast, wrong

# Logits that plain PyTorch may hold at once, where its error is asked for; beyond, only the floor is allowed.
PLAIN_CELLS = 2**24
# One after another: the output (of which the backward makes what a row subtracts), the weights, the logits'
# gradients, and the result.
ROUNDINGS = 4
DENSE = "SDPA, dense mask"
FREE = "SDPA, no gate"


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        batch: B.
        heads: H, KV heads.
        group: G.
        entries: T.
        queries: S, the last of the entries; None: all of them.
        width: D.
        gate: whether there is a log-gate.
        decay: whether there is a log-decay.
        protected: entries of the recent window that is not gated.
        window: of a query; None: all.
        pads: padding on the left of each sequence; beyond the last, none.
        holes: share of entries that do not exist, wherever they lie.
        soft_cap: of the logits.
        sinks: whether query heads have sinks.
        silent: query heads, from the first on, whose sink is -inf.
        hidden: share of entries whose log-gate is -inf.
        heads_last: tensors are views of `[B, T, heads, D]`, and gates of `[B, T, H]`.
    """

    batch: int = 1
    heads: int = 2
    group: int = 2
    entries: int = 50
    queries: int | None = None
    width: int = 64
    gate: bool = True
    decay: bool = False
    protected: int = 8
    window: int | None = None
    pads: tuple[int, ...] = ()
    holes: float = 0.0
    soft_cap: float | None = None
    sinks: bool = False
    silent: int = 0
    hidden: float = 0.0
    heads_last: bool = False

    @property
    def asked(self) -> int:
        """S."""
        return self.entries if self.queries is None else self.queries


CASES = {
    "one entry": Case(entries=1, sinks=True),
    "one entry, gated": Case(entries=1, protected=0, decay=True, sinks=True),
    "no gate": Case(gate=False, entries=45),
    "G = 1, odd lengths": Case(batch=2, group=1, heads=1, entries=67),
    "G = 8": Case(heads=1, group=8, entries=33),
    "strided": Case(batch=2, entries=35, heads_last=True),
    "all gated": Case(heads=1, protected=0),
    "protected beyond all": Case(entries=40, protected=1000),
    "whole blocks": Case(heads=1, entries=64, protected=16),
    "decay": Case(heads=1, gate=False, decay=True, protected=0),
    "gate and decay": Case(decay=True, heads_last=True, group=1),
    "the last queries": Case(batch=2, heads=1, entries=70, queries=19),
    "one query": Case(entries=49, queries=1),
    "left padding": Case(batch=3, heads=1, pads=(11, 45), entries=50),
    "a sequence of padding": Case(batch=2, heads=1, pads=(20,), entries=20, sinks=True),
    "window": Case(heads=1, entries=70, window=23),
    # Longer than a block of keys and one of queries in the interpreter, and ending on a block's first query.
    "long window": Case(heads=1, group=1, entries=90, window=50, width=16),
    "window inside of the protected": Case(entries=60, window=7, protected=9),
    "soft cap": Case(soft_cap=2.0, entries=40),
    "sinks": Case(sinks=True, entries=40),
    "a sink of nothing": Case(sinks=True, silent=2, hidden=1.0, protected=0, entries=40),
    "holes": Case(batch=2, heads=1, entries=70, holes=0.3, window=40),
    "hidden entries": Case(hidden=0.4, protected=0, entries=45),
    "everything": Case(
        batch=2,
        heads=1,
        entries=45,
        decay=True,
        window=31,
        pads=(5,),
        soft_cap=3.0,
        sinks=True,
        heads_last=True,
    ),
    "D = 16": Case(heads=1, width=16),
    "D = 33": Case(heads=1, width=33, pads=(3,)),
    "D = 80": Case(heads=1, width=80, entries=40),
    "D = 128": Case(heads=1, width=128, entries=60),
    "D = 256": Case(heads=1, width=256, entries=37),
}  # fmt: skip


def _long(entries: int) -> Case:
    """An 8B model's layer."""
    return Case(heads=8, group=4, entries=entries, width=128, protected=512)


SPEED = {
    "cpu": {
        "2K, D = 64": Case(heads=2, group=4, entries=2048, protected=128),
        "4K, D = 128": Case(heads=1, group=4, entries=4096, width=128, protected=128),
    },
    "cuda": {"4K": _long(2**12), "32K": _long(2**15), "128K": _long(2**17)},
}

CLAIMS = {
    "cuda": [
        Claim("a gate costs little", FREE, at_most=1.3, case="32K"),
        Claim("a gate costs little", FREE, at_most=1.3, case="128K"),
        Claim("memory is linear in T", extra_mb_at_most=2000, case="128K"),
    ],
    "cpu": [
        Claim("a blocked gate is no dearer than a dense mask", DENSE, at_most=1.0),
        Claim("a gate costs little", FREE, at_most=1.6),
        Claim("no T x T matrix", extra_mb_at_most=64),
    ],
}

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
    exists = None
    if case.pads:
        pads = torch.tensor([*case.pads, *[0] * (B - len(case.pads))], device=device)
        exists = torch.arange(T, device=device) >= pads[:, None]
    if case.holes:
        exists = torch.rand(B, T, generator=generator, device=device) >= case.holes
    return {
        **kwargs,
        "exists_BT": exists,
        "scaling": D**-0.5,
        "protected": case.protected,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }


def run(case: Case, kwargs: dict[str, Any]) -> list[Tensor]:
    """The op: its output, and the gradients that a fixed gradient of the output makes."""
    out = gated_attention(**kwargs)
    return [out, *gradients(kwargs, out)]


def gradients(kwargs: dict[str, Any], out: Tensor, d_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of everything differentiable, in the order of `DIFFERENTIABLE`, for one gradient of the output."""
    leaves = [kwargs[name] for name in DIFFERENTIABLE if kwargs[name] is not None]
    return torch.autograd.grad(
        out, leaves, _d_out(out.shape, out.dtype, out.device) if d_out is None else d_out
    )


@cache
def _d_out(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of the output: always the same, drawn in float32."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def plain(kwargs: dict[str, Any]) -> Tensor:
    """The formula, as one would write it in the inputs' precision, T x T logits and all."""
    queries, keys, values = (kwargs[name] for name in ("queries_BQSD", "keys_BHTD", "values_BHTD"))
    (B, Q, S, _), (H, T), dtype = queries.shape, keys.shape[1:3], queries.dtype
    logits = (queries @ keys.repeat_interleave(Q // H, 1).transpose(-1, -2)) * kwargs["scaling"]
    if kwargs["soft_cap"] is not None:
        logits = torch.tanh(logits / kwargs["soft_cap"]) * kwargs["soft_cap"]
    own = torch.arange(T - S, T, device=queries.device)[:, None]
    distance = own - torch.arange(T, device=queries.device)
    outside = distance >= kwargs["protected"]
    if kwargs["log_gate_BHT"] is not None:
        gate = kwargs["log_gate_BHT"].to(dtype).repeat_interleave(Q // H, 1)[:, :, None]
        logits = logits + torch.where(outside, gate, 0.0)
    if kwargs["log_decay_BHT"] is not None:
        decay = kwargs["log_decay_BHT"].to(dtype).repeat_interleave(Q // H, 1)[:, :, None]
        logits = logits + torch.where(outside, distance * decay, 0.0)
    seen = (distance >= 0).expand(B, 1, S, T)
    if kwargs["window"] is not None:
        seen = seen & (distance < kwargs["window"])
    if kwargs["exists_BT"] is not None:
        exists = kwargs["exists_BT"]
        seen = seen & exists[:, None, None] & exists[:, None, T - S :, None]
    logits = logits.masked_fill(~seen, -math.inf)
    if kwargs["sinks_Q"] is not None:
        sinks = kwargs["sinks_Q"].to(dtype).view(1, Q, 1, 1).expand(B, Q, S, 1)
        logits = torch.cat([logits, sinks.masked_fill(~seen.any(-1, keepdim=True), -math.inf)], -1)
    top = logits.amax(-1, keepdim=True).detach()
    weights = (logits - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    share = weights[..., :T] / total.masked_fill(total == 0, 1.0)
    return share @ values.repeat_interleave(Q // H, 1)


def seen_pairs(case: Case) -> int:
    """(query, key) pairs that one query head of one sequence sees, padding apart."""
    T, S, window = case.entries, case.asked, case.window or case.entries
    return sum(min(own + 1, window) for own in range(T - S, T))


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """Seven matrix products: two of the forward, five of the backward."""
    B, H, T, D = case.batch, case.heads, case.entries, case.width
    Q, S = H * case.group, case.asked
    flops = 14.0 * B * Q * D * seen_pairs(case)
    # Queries, output and its gradient, and the queries' gradient; keys and values and theirs.
    numbers = 4.0 * B * Q * S * D + 4.0 * B * H * T * D
    gates = 2.0 * (case.gate + case.decay) * B * H * T
    return Cost(flops, numbers * dtype.itemsize + gates * 4)


def check(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> str | None:
    """Compares each result of the op with the reference in float64."""
    kwargs = inputs(case, dtype, device, seed)
    names = ["output"]
    names += [f"gradient of {name}" for name in DIFFERENTIABLE if kwargs[name] is not None]
    with backend.using("reference"):
        wanted = run(case, cast(kwargs, torch.float64))
    rough: list[Tensor] | None = None
    if case.batch * case.heads * case.group * case.asked * case.entries <= PLAIN_CELLS:
        out = plain(kwargs)
        rough = [out, *gradients(kwargs, out)]
    # On a GPU it is the kernel that is checked, and nothing else in its place.
    on_gpu = torch.device(device).type == "cuda"
    with backend.using("triton") if on_gpu else contextlib.nullcontext():
        results = run(case, kwargs)
    for place, (name, found, reference) in enumerate(zip(names, results, wanted, strict=True)):
        beside = None if rough is None else rough[place]
        if (problem := wrong(found, reference, beside, dtype=dtype, ops=ROUNDINGS, what=name)) is not None:
            return problem
    return None


def rivals(case: Case, kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of what else there is: attention without the gate, and with it in other ways."""
    queries, keys, values = (kwargs[name] for name in DIFFERENTIABLE[:3])
    d_out = _d_out(queries.shape, queries.dtype, queries.device)
    scaling = kwargs["scaling"]

    def free() -> tuple[Tensor, ...]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
        return torch.autograd.grad(out, (queries, keys, values), d_out)

    found: dict[str, Callable[[], Any]] = {FREE: free}
    gate = kwargs["log_gate_BHT"]

    def dense() -> tuple[Tensor, ...]:
        place = torch.arange(case.entries, device=queries.device)
        distance = place[:, None] - place
        bias = torch.where(distance >= case.protected, gate[:, :, None], 0.0)
        bias = bias.masked_fill(distance < 0, -math.inf).to(queries.dtype).repeat_interleave(case.group, 1)
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
        )
        return torch.autograd.grad(out, (queries, keys, values, gate), d_out)

    if not queries.is_cuda or case.entries <= 2**12:
        found[DENSE] = dense
    return found

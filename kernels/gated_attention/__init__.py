"""Attention in which a gate makes entries fade instead of evicting them, with its gradient.

A log-gate per entry and KV head is added to the logits inside one online softmax, so that neither the
forward nor the backward ever holds a T x T matrix, and the gate costs one addition a logit.

The operation is always a registered one (`retain::gated_attention`), so that autograd, `torch.compile` and
`torch.library.opcheck` meet the same thing.
"""

from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.gated_attention import reference
from retain.kernels.gated_attention.reference import Bias, Settings

__all__ = ["gated_attention"]

# Numbers of a head that a tile may have.
MAX_WIDTH = 256


def gated_attention(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_BHTD: Float[Tensor, "B H T D"],
    values_BHTD: Float[Tensor, "B H T D"],
    log_gate_BHT: Float[Tensor, "B H T"] | None = None,
    log_decay_BHT: Float[Tensor, "B H T"] | None = None,
    *,
    scaling: float,
    protected: int = 0,
    pads_B: Int[Tensor, " B"] | None = None,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "B Q S D"]:
    """Causal attention with a log-gate on every key outside of a query's protected recent window.

    Query `s` sits at entry `j = T - S + s` and sees the entries `i <= j` that are no padding.
    Their logits are

        l_ji = cap(scaling q_j . k_i) + [j - i >= protected] (log_gate_i + (j - i) log_decay_i)

    with `cap(x) = soft_cap tanh(x / soft_cap)`, and the output is `sum_i softmax_i(l_j)_i v_i`; a sink adds
    `exp(sink)` to the softmax's denominator and nothing to the sum. The output of a query that is padding,
    or sees nothing, is zeros, and so are its gradients. Gradients pass to queries, keys, values, gate, decay
    and sinks, once (the backward has none of its own).

    Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs (TRIM-KV), arXiv 2512.03324: with
    `protected=0` and `log_decay = log beta` alone. Its formula and its FlexAttention kernel add
    `(j - i) log beta_i` to the logit, as here; its released eager path multiplies the logit by
    `beta_i ** (j - i)`, which is something else and is not offered. A gate outside of a protected window is
    the form of WG-KV (arXiv 2512.17452: window 256) and of DMS (arXiv 2506.05345: window 512, with
    `log_gate = logsigmoid(-decision)`).

    Args:
        queries_BQSD: after norm and rotation, any strides. `Q` is a multiple of `H`.
        keys_BHTD: likewise; `T >= S`.
        values_BHTD: likewise.
        log_gate_BHT: natural logarithm of each entry's gate, at most 0 as a rule, of any floating type; -inf
            hides an entry from all queries that it is not protected for, with a gradient of 0. None: 0.
        log_decay_BHT: natural logarithm of the factor by which an entry fades per entry of distance, finite.
            None: 0.
        scaling: factor on the products, usually `D ** -0.5`.
        protected: queries nearer than this are not gated: an entry's own query and the `protected - 1` after
            it see it as it is. 0: all are gated.
        pads_B: number of first entries of each sequence that are padding; None: there is none.
        soft_cap: bound on the logits before gate and decay; None: no bound.
        sinks_Q: one extra logit per query head (gpt-oss); None: none.

    Returns:
        the output, in the queries' precision and laid out as they are.

    Examples:
        >>> q = k = torch.zeros(1, 1, 3, 16)
        >>> v = torch.eye(3, 16)[None, None]
        >>> gate = torch.tensor([[[0.0, float("-inf"), 0.0]]])
        >>> gated_attention(q, k, v, gate, scaling=0.25, protected=1)[0, 0, :, :3].tolist()
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
    """
    bias = Bias(log_gate_BHT, log_decay_BHT, pads_B, sinks_Q)
    (B, Q, S, D), (H, T) = queries_BQSD.shape, keys_BHTD.shape[1:3]
    assert keys_BHTD.shape == values_BHTD.shape == (B, H, T, D) and Q % H == 0 and S <= T, keys_BHTD.shape
    wanted = ((B, H, T), (B, H, T), (B,), (Q,))
    for one, shape in zip(bias, wanted, strict=True):
        assert one is None or one.shape == shape, (one.shape, shape)
    assert protected >= 0 and (soft_cap is None or soft_cap > 0), (protected, soft_cap)
    cap = None if soft_cap is None else float(soft_cap)
    tensors = (queries_BQSD, keys_BHTD, values_BHTD, *bias)
    out_BQSD, _ = _gated_attention(*tensors, float(scaling), protected, cap)
    return cast(Tensor, out_BQSD)


@torch.library.custom_op("retain::gated_attention", mutates_args=())
def _gated_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_gate: Tensor | None,
    log_decay: Tensor | None,
    pads: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    protected: int,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """The output and every row's log-sum-exp, which the backward takes and has no gradient."""
    bias, settings = Bias(log_gate, log_decay, pads, sinks), Settings(scaling, protected, soft_cap)
    found: tuple[Tensor, Tensor] = _run("forward", queries, keys, values, bias=bias, settings=settings)
    return found


@_gated_attention.register_fake
def _(queries: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=dtype)


@torch.library.custom_op("retain::gated_attention_backward", mutates_args=())
def _gated_attention_backward(
    d_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    log_gate: Tensor | None,
    log_decay: Tensor | None,
    pads: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    protected: int,
    soft_cap: float | None,
    inner: bool,
) -> list[Tensor]:
    """Gradients of queries, keys and values (`inner`), gate, decay and sinks: of those that are there."""
    bias, settings = Bias(log_gate, log_decay, pads, sinks), Settings(scaling, protected, soft_cap)
    tensors = (queries, keys, values, out, lse, d_out)
    found = _run("backward", *tensors, bias=bias, settings=settings, inner=inner)
    return [gradient for gradient in found if gradient is not None]


@_gated_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors, inner = arguments[1:4] + arguments[6:8] + arguments[9:10], arguments[-1]
    wide = [torch.empty_like(tensor) for tensor in tensors[:3] if inner]
    return wide + [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in tensors[3:]
        if tensor is not None
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    # The backward may run on a thread that knows nothing of a path that is forced here.
    ctx.path = _path(*tensors)


def _backward(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    inner = any(ctx.needs_input_grad[:3])
    with backend.using(ctx.path):
        found = _gated_attention_backward(d_out, *tensors[:3], out, lse, *tensors[3:], *ctx.numbers, inner)
    log_gate, log_decay, _, sinks = tensors[3:]
    there = [inner] * 3 + [log_gate is not None, log_decay is not None, False, sinks is not None]
    each = iter(found)
    return *(next(each) if here else None for here in there), None, None, None


_gated_attention.register_autograd(_backward, setup_context=_setup)


@backend.without_autocast
def _run(
    what: Literal["forward", "backward"],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *others: Tensor | None,
    bias: Bias,
    settings: Settings,
    **how: bool,
) -> Any:
    """`forward` or `backward` of the module whose path a call takes."""
    module: Any = reference
    if _path(queries, keys, values, *bias) == "triton":
        from retain.kernels.gated_attention import launch

        module = launch
    return getattr(module, what)(queries, keys, values, *others, bias, settings, **how)


def _path(queries: Tensor, keys: Tensor, values: Tensor, *bias: Tensor | None) -> backend.Path:
    unsupported = None
    if queries.shape[-1] > MAX_WIDTH:
        unsupported = f"a head width of {queries.shape[-1]} is more than {MAX_WIDTH}"
    elif not queries.dtype == keys.dtype == values.dtype:
        unsupported = "queries, keys and values differ in precision"
    there = [given for given in bias if given is not None]
    return backend.path_for("gated_attention", queries, keys, values, *there, unsupported=unsupported)

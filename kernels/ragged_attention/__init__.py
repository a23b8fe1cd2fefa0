"""Attention of queries over rows of different length.

One layer's entries are a flat `[C, D]` store in which row `r = b * H + h` (one sequence and KV head) owns
the room `offsets[r] .. offsets[r + 1]`. Decoding is S = 1; chunks of a prompt and later turns are S many;
empty rows and very long ones go in one call. The entries that a query sees are a count, `seen_RS`, which
covers padding, gaps in the positions and causality at a row's end.

Keys and values may be held as codes of 8, 4 or 2 bits (`retain.kernels.codes`). A row whose entries lie in
several stores, each of its own precision, is attended store by store; `merged` puts the results together.

On CUDA a Triton kernel runs (`kernel`), elsewhere the plain definition (`reference`);
`retain.kernels.backend` logs which, once. The host knows the layout (`pages`), so the Triton path does not
wait for the device, and its first call cuts rows on the host; nor does the reference, while queries are few.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.codes import Codes
from retain.kernels.ragged_attention import reference
from retain.kernels.ragged_attention.pages import PAGE, Pages
from retain.kernels.ragged_attention.reference import Call, merged

__all__ = ["merged", "path_of", "ragged_attention"]

OP = "ragged_attention"
# Width of a head up to which a tile of it fits on a multiprocessor.
WIDEST = 256


@torch.compiler.disable(reason="a ragged store is attended between graphs")
def ragged_attention(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_CD: Float[Tensor, "C D"] | Codes,
    values_CD: Float[Tensor, "C V"] | Codes,
    offsets_R1: Int[Tensor, " R1"],
    seen_RS: Int[Tensor, "R S"],
    pages: Pages,
    *,
    scaling: float,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    log_weight_C: Float[Tensor, " C"] | None = None,
) -> tuple[Float[Tensor, "B Q S V"], Float[Tensor, "B Q S"]]:
    """Softmax attention of each query over the first `seen` entries of its row.

    `a_si = exp(l_si) / (exp(sink) + sum_{i < seen_s} exp(l_si))` and `out_s = sum_i a_si v_i`, with `l_si =
    cap(scaling * q_s . k_i) + log_weight_i`, and no `exp(sink)` without sinks. A query that sees nothing
    (padding) gives zeros. The softmax is float32 at least. Results do not change from run to run, neither the
    kernel's nor, on a CPU, the reference's; on CUDA the reference (wide heads, mixed precisions) adds pages
    up by atomic additions, unless `torch.use_deterministic_algorithms` is on.

    The split over keys and its combination are those of Flash-Decoding (Dao et al., 2023) on the online
    softmax of FlashAttention (arXiv 2205.14135); rows of different length as one batch are what the released
    code of AdaKV (arXiv 2407.11550) and DefensiveKV (arXiv 2510.13334) call a flattened cache.

    Args:
        queries_BQSD: after norm and RoPE; the G = Q / H query heads of a KV head are adjacent.
        keys_CD: the store's keys, of any strides; or codes, which stand for float32 numbers.
        values_CD: the store's values, as wide or not, or codes, of as many bits; those of unused room
            must be finite. Groups that codes name for unused room must exist.
        offsets_R1: int64, where each row's room begins and ends.
        seen_RS: entries that query `s` of each row may see, 0 .. lengths.
        scaling: factor on the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks_Q: one more logit per query head, which takes its share of the softmax and gives no value; -inf
            is no sink.
        pages: the layout of the store, which the offsets say on its device.
        log_weight_C: float32, added to the logits of each entry: the logarithm of what it counts, where it
            stands for several. None: each counts 1.

    Returns:
        the attention output, in the queries' precision; and `lse = log(exp(sink) + sum_{i < seen_s}
        exp(l_si))`, float32 (float64 for such queries), as `merged` takes it: -inf where nothing is seen and
        there is no sink.
    """
    (B, Q, S, D), (R, _), (C, _) = queries_BQSD.shape, seen_RS.shape, keys_CD.shape
    # Kernels do not check these lengths.
    assert R % B == 0 and Q % (R // B) == 0 and seen_RS.shape[1] == S > 0, (queries_BQSD.shape, seen_RS.shape)
    assert keys_CD.shape[1] == D and values_CD.shape[0] == C, (keys_CD.shape, values_CD.shape)
    assert offsets_R1.shape == (R + 1,) and len(pages.counts) == R and pages.num_pages * PAGE <= C, (R, C)
    assert sinks_Q is None or sinks_Q.shape == (Q,), sinks_Q.shape
    assert log_weight_C is None or log_weight_C.shape == (C,), log_weight_C.shape
    call = Call(
        *(queries_BQSD, keys_CD, values_CD, offsets_R1, seen_RS, sinks_Q, log_weight_C, pages),
        *(float(scaling), None if soft_cap is None else float(soft_cap)),
    )
    given = (queries_BQSD, keys_CD, values_CD, sinks_Q, log_weight_C)
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return _run(call)
    with torch.no_grad():
        out_BQSV, lse_BQS = _run(call)
    return _NoGradient.apply(out_BQSV, *wanted), _NoGradient.apply(lse_BQS, *wanted)


def path_of(keys_CD: Tensor | Codes, values_CD: Tensor | Codes) -> backend.Path:
    """The path of attention over such keys and values, with queries of their precision (codes have none).

    Args:
        keys_CD: of the store, or of any shape that ends in D.
        values_CD: the same.
    """
    stores = (keys_CD, values_CD)
    return backend.which(*_tensors(*stores), unsupported=_unsupported(*stores))


def _tensors(*given: Tensor | Codes) -> list[Tensor]:
    """Tensors that are read of these."""
    return [one for x in given for one in (x.tensors if isinstance(x, Codes) else (x,))]


def _unsupported(*given: Tensor | Codes) -> str | None:
    """The property of queries, keys and values that the kernel does not support."""
    wide = max(x.shape[-1] for x in given)
    if wide > WIDEST:
        return f"heads are {wide} wide, which is more than {WIDEST}"
    kinds = {x.dtype for x in given if isinstance(x, Tensor)}
    if len(kinds) > 1:
        named = sorted(map(backend.dtype_name, kinds))
        return f"queries, keys and values are of different precisions ({', '.join(named)})"
    return None


class _NoGradient(torch.autograd.Function):
    """Identity whose backward raises an error that says why there is no gradient."""

    @staticmethod
    def forward(ctx: Any, out_BQSV: Tensor, *wanted: Tensor | None) -> Tensor:
        return out_BQSV.view_as(out_BQSV)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError(
            "attention over a ragged store has no gradient, since what was evicted would have none: run the "
            "model under torch.no_grad(), or train it without a retain.Cache."
        )


@backend.without_autocast
def _run(call: Call) -> tuple[Tensor, Tensor]:
    """The result, by the path that is chosen here."""
    given = (call.queries_BQSD, call.keys_CD, call.values_CD)
    if backend.path_for(OP, *_tensors(*given), unsupported=_unsupported(*given)) == "reference":
        return reference.ragged_attention(call)
    from retain.kernels.ragged_attention import launch

    return launch.ragged_attention(call)

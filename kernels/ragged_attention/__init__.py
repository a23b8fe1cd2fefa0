"""Attention of queries over rows of different length.

One layer's entries are a flat `[C, D]` store in which row `r = b * H + h` (one sequence and KV head) owns
the room `offsets[r] .. offsets[r + 1]`. Decoding is S = 1; chunks of a prompt and later turns are S many;
empty rows and very long ones go in one call. The entries that a query sees are a count, `seen_RS`, which
covers padding, gaps in the positions and causality at a row's end; only a sliding window looks at positions.

On CUDA a Triton kernel runs (`kernel`), elsewhere the plain definition (`reference`);
`retain.kernels.backend` logs which, once. Where the layout (`pages`) is known, the Triton path does not wait
for the device, and its first call cuts rows on the host; nor does the reference, while queries are few.
Where it is not, offsets are read, which waits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.ragged_attention import reference
from retain.kernels.ragged_attention.pages import PAGE, Pages
from retain.kernels.ragged_attention.reference import Call

__all__ = ["path_of", "ragged_attention"]

OP = "ragged_attention"
# Width of a head up to which a tile of it fits on a multiprocessor.
WIDEST = 256


def ragged_attention(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_CD: Float[Tensor, "C D"],
    values_CD: Float[Tensor, "C V"],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
    seen_RS: Int[Tensor, "R S"],
    *,
    scaling: float,
    soft_cap: float | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    window: int | None = None,
    positions_C: Int[Tensor, " C"] | None = None,
    query_positions_BS: Int[Tensor, "B S"] | None = None,
    pages: Pages | None = None,
    log_weight_C: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, "B Q S V"]:
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
        keys_CD: the store's keys, of any strides.
        values_CD: the store's values, as wide or not; those of unused room must be finite.
        offsets_R1: int64, where each row's room begins and ends.
        lengths_R: entries held in each row; its length says how many rows there are.
        seen_RS: entries that query `s` of each row may see, 0 .. lengths.
        scaling: factor on the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks_Q: one more logit per query head, which takes its share of the softmax and gives no value; -inf
            is no sink.
        window: a query at position p sees positions above `p - window` only; needs both positions.
        positions_C: RoPE positions of the store's entries.
        query_positions_BS: RoPE positions of the queries.
        pages: the layout, if the caller knows it; else it is read from the offsets, which waits for the
            device. Rooms that are no whole pages are attended row by row by the reference.
        log_weight_C: float32, added to the logits of each entry: the logarithm of what it counts, where it
            stands for several. None: each counts 1.

    Returns:
        the attention output, in the queries' precision.

    Raises:
        ValueError: shapes or a layout that do not fit, a window without positions, or a cap or window that is
            no positive number.
    """
    call = Call(
        queries_BQSD, keys_CD, values_CD, offsets_R1, seen_RS, sinks_Q, positions_C, query_positions_BS,
        log_weight_C, pages, float(scaling), None if soft_cap is None else float(soft_cap), window,
    )  # fmt: skip
    _check(call, lengths_R.shape[0])
    if window is None:
        call = call._replace(positions_C=None, query_positions_BS=None)
    if torch.compiler.is_compiling():
        counts = None if pages is None else list(pages.counts)
        return _op(*call.tensors, counts, *call.numbers)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.tensors):
        with torch.no_grad():
            out_BQSV = _run(call)
        return _NoGradient.apply(out_BQSV, *call.tensors)
    return _run(call)


def path_of(keys_CD: Tensor, values_CD: Tensor) -> backend.Path:
    """The path of attention over such keys and values, with queries of their precision.

    Args:
        keys_CD: of the store, or of any shape that ends in D.
        values_CD: the same.
    """
    return backend.which(keys_CD, values_CD, unsupported=_unsupported(keys_CD, keys_CD, values_CD))


def _check(call: Call, R: int) -> None:
    keys_CD, values_CD, pages = call.keys_CD, call.values_CD, call.pages
    (B, Q, S, D), C, problems = call.queries_BQSD.shape, keys_CD.shape[0], []
    if not B or R % B or not R or Q % (R // B):
        problems.append(f"{R} rows are not {B} sequences x a number of KV heads that divides {Q} query heads")
    if call.offsets_R1.shape != (R + 1,):
        problems.append(f"offsets are {tuple(call.offsets_R1.shape)} for {R} rows, which need [{R + 1}]")
    if call.seen_RS.shape != (R, S) or not S:
        problems.append(f"seen is {tuple(call.seen_RS.shape)} for {R} rows and {S} queries, at least one")
    if keys_CD.ndim != 2 or values_CD.ndim != 2 or keys_CD.shape[0] != values_CD.shape[0]:
        problems.append(f"keys are {tuple(keys_CD.shape)} and values {tuple(values_CD.shape)}")
    elif keys_CD.shape[1] != D:
        problems.append(f"keys are {keys_CD.shape[1]} wide and queries {D}")
    # Kernels do not check these lengths.
    for name, one, shape in (
        ("sinks", call.sinks_Q, (Q,)),
        ("positions", call.positions_C, (C,)),
        ("query positions", call.query_positions_BS, (B, S)),
        ("log weights", call.log_weight_C, (C,)),
    ):
        if one is not None and one.shape != shape:
            problems.append(f"{name} are {tuple(one.shape)}, where {shape} are needed")
    if pages is not None and (len(pages.counts) != R or pages.num_pages * PAGE > C):
        problems.append(
            f"a layout of {len(pages.counts)} rows with {pages.num_pages * PAGE} entries for {R} rows and a "
            f"store of {C}"
        )
    if problems:
        raise ValueError(
            f"ragged attention of queries {tuple(call.queries_BQSD.shape)} [B, Q, S, D] got "
            f"{'; '.join(problems)}: pass keys and values [C, D], offsets [R + 1], lengths [R] and seen "
            "[R, S], with R = B x H rows; where given, sinks [Q], positions and log weights [C], query "
            "positions [B, S] and the pages of this very store."
        )
    if call.soft_cap is not None and not call.soft_cap > 0:
        raise ValueError(f"soft_cap is {call.soft_cap}: pass a positive number, or None for no cap.")
    if call.window is not None and call.window < 1:
        raise ValueError(f"window is {call.window}: pass at least 1 position, or None for no window.")
    if call.window is not None and (call.positions_C is None or call.query_positions_BS is None):
        raise ValueError(
            f"attention within a window of {call.window} got no positions: pass positions_C and "
            "query_positions_BS, or no window."
        )


def _unsupported(queries_BQSD: Tensor, keys_CD: Tensor, values_CD: Tensor) -> str | None:
    """The property of a call that the kernel does not support."""
    wide = max(keys_CD.shape[-1], values_CD.shape[-1])
    if wide > WIDEST:
        return f"heads are {wide} wide, which is more than {WIDEST}"
    kinds = {queries_BQSD.dtype, keys_CD.dtype, values_CD.dtype}
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
def _run(call: Call) -> Tensor:
    """The output, by the path that is chosen here."""
    tensors = (call.queries_BQSD, call.keys_CD, call.values_CD)
    run = reference.ragged_attention
    if backend.path_for(OP, *tensors, unsupported=_unsupported(*tensors)) == "triton":
        from retain.kernels.ragged_attention import launch

        run = launch.ragged_attention
    return run(call)


@lru_cache(maxsize=64)
def _laid_out(counts: tuple[int, ...], device: torch.device) -> Pages:
    """The layout of a compiled call, which only passes tensors and numbers.

    The last 64 are remembered for the life of the process, 16 bytes of tables on the device for each page and
    12 for each item: a model with more layers than that, all laid out differently, cuts rows at every call.
    `retain.Cache` attends outside of graphs and does not come here.
    """
    with torch.inference_mode(False):
        return Pages.of(counts, device)


# Compiled graphs call this, which chooses its path when it runs; otherwise `_run` is called as it is, which
# is quicker than the dispatcher.
@torch.library.custom_op("retain::ragged_attention", mutates_args=())
def _op(
    queries_BQSD: Tensor,
    keys_CD: Tensor,
    values_CD: Tensor,
    offsets_R1: Tensor,
    seen_RS: Tensor,
    sinks_Q: Tensor | None,
    positions_C: Tensor | None,
    query_positions_BS: Tensor | None,
    log_weight_C: Tensor | None,
    counts: Sequence[int] | None,
    scaling: float,
    soft_cap: float | None,
    window: int | None,
) -> Tensor:
    pages = None if counts is None else _laid_out(tuple(counts), keys_CD.device)
    call = Call(
        queries_BQSD, keys_CD, values_CD, offsets_R1, seen_RS, sinks_Q, positions_C, query_positions_BS,
        log_weight_C, pages, scaling, soft_cap, window,
    )  # fmt: skip
    return _run(call)


@_op.register_fake
def _op_shapes(queries_BQSD: Tensor, keys_CD: Tensor, values_CD: Tensor, *rest: Any) -> Tensor:
    B, Q, S, _ = queries_BQSD.shape
    return queries_BQSD.new_empty(B, S, Q, values_CD.shape[1]).transpose(1, 2)

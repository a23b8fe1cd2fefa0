"""Attends over the rows of a ragged store by a few dense calls, on a CPU.

Neighbouring rows of equal room and length are a *run*: one strided `[rows, length, D]` view of the store,
which PyTorch's attention reads without a copy. A policy with equal head budgets has one run or two (if a
total does not divide), one with a budget for each head about one run a head.
`retain.kernels.ragged_attention` is the definition; it is several times slower here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.ragged_attention.pages import PAGE, Pages

# Runs up to which each is a call of its own: a call costs some 20 us, a page of the op's batch 2.
MOST_RUNS = 64
# Elements of the mask of several queries, at most: it becomes as many float32.
MOST_MASKED = 1 << 22


@dataclass(eq=False)
class Run:
    """Neighbouring rows of equal room and equal length.

    Args:
        row: the first of them.
        keys: a view of the store, `[rows, 1, room, D]`.
        values: a view of the store, `[rows, 1, room, V]`.
        length: entries that each row holds.
        log_weight: a view of the store, `[rows, 1, 1, room]`: added to the logits; None: nothing is.
    """

    row: int
    keys: Float[Tensor, "rows 1 room D"]
    values: Float[Tensor, "rows 1 room V"]
    length: int
    log_weight: Float[Tensor, "rows 1 1 room"] | None = None


def find_runs(
    pages: Pages,
    keys_CD: Tensor,
    values_CD: Tensor,
    seen_RS: Int[Tensor, "R S"],
    num_queries: int,
    log_weight_C: Tensor | None = None,
) -> list[Run] | None:
    """Group the rows of a store into runs, by how much their last queries see; None if the op is faster.

    Args:
        pages, keys_CD, values_CD, log_weight_C: of the store.
        seen_RS: entries that each query sees.
        num_queries: query heads of a sequence.
    """
    (R, S), C = seen_RS.shape, PAGE * pages.num_pages
    if len(pages.counts) != R or keys_CD.shape[0] != C or values_CD.shape[0] != C:
        return None  # the op raises the error
    seen = seen_RS[:, -1].tolist()
    if S > 1 and (num_queries * S * max(seen, default=0) > MOST_MASKED or not bool(seen_RS.all())):
        return None
    rows = zip(range(R), accumulate(pages.counts, initial=0), pages.counts, seen, strict=False)
    found = [list(alike) for _, alike in groupby(rows, key=lambda row: row[2:])]
    if len(found) > MOST_RUNS:
        return None
    runs = []
    for alike in found:
        row, start, count, length = alike[0]
        places = slice(PAGE * start, PAGE * (start + len(alike) * count))
        keys, values = (
            column[places].view(len(alike), 1, PAGE * count, column.shape[1])
            for column in (keys_CD, values_CD)
        )
        weights = None
        if log_weight_C is not None:
            weights = log_weight_C[places].view(len(alike), 1, 1, PAGE * count)
        runs.append(Run(row, keys, values, length, weights))
    return runs


def fits(runs: Sequence[Run], queries_BQSD: Tensor) -> bool:
    """Whether dense calls can serve these queries: one precision, and no gradients, which a store does not
    have."""
    if not runs:
        return False
    keys, values = runs[0].keys, runs[0].values
    if not queries_BQSD.dtype == keys.dtype == values.dtype or queries_BQSD.shape[-1] != keys.shape[-1]:
        return False
    R = runs[-1].row + runs[-1].keys.shape[0]
    heads, rest = divmod(R, queries_BQSD.shape[0])
    if rest or queries_BQSD.shape[1] % heads:
        return False
    return not (torch.is_grad_enabled() and (queries_BQSD.requires_grad or keys.requires_grad))


def attend_runs(
    queries_BQSD: Float[Tensor, "B Q S D"], runs: Sequence[Run], seen_RS: Int[Tensor, "R S"], scaling: float
) -> Float[Tensor, "B Q S V"]:
    """Softmax attention of each query over what its row holds: one call a run.

    The G query heads of a row are G queries of it, so that no key is repeated.
    """
    B, Q, S, D = queries_BQSD.shape
    R = seen_RS.shape[0]
    group = B * Q // R
    queries_RMD = queries_BQSD.reshape(R, 1, group * S, D)
    outs = []
    for run in runs:
        rows, length, mask = run.keys.shape[0], run.length, None
        queries = queries_RMD if rows == R else queries_RMD.narrow(0, run.row, rows)
        if not length:  # padding, which sees nothing
            outs.append(queries.new_zeros(rows, 1, group * S, run.values.shape[-1]))
            continue
        if S > 1:
            mask = torch.arange(length) < seen_RS.narrow(0, run.row, rows)[:, None, :, None]
            mask = mask.repeat(1, 1, group, 1)
        if run.log_weight is not None:
            weights = run.log_weight.narrow(3, 0, length)
            if queries.dtype == torch.float64:
                weights = weights.double()
            mask = weights if mask is None else weights.where(mask, float("-inf"))
        keys, values = run.keys.narrow(2, 0, length), run.values.narrow(2, 0, length)
        outs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(B, Q, S, out.shape[-1])

"""Attends over the rows of a ragged store by a few dense calls, on a CPU.

Neighbouring rows with equal room and about equal length are a *run*: one strided `[rows, length, D]` view of
the store, which PyTorch's own attention reads without a copy. A policy that keeps as much of each head is one
run, a policy with a budget for each head has about one run a head. A mask hides what the shorter rows lack.
`retain.kernels.ragged_attention` is the definition; it takes several times as long here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.kernels.compact.reference import spans
from retain.kernels.ragged_attention.pages import PAGE, Pages

# Runs up to which each is a call of its own: a call costs some 20 us, a page of the op's batch 2.
MOST_RUNS = 64
# Entries by which the rows of a run may differ.
MOST_APART = PAGE
# Elements of the mask of several queries, at most: it becomes as many float32.
MOST_MASKED = 1 << 22


@dataclass(eq=False)
class Run:
    """Neighbouring rows with equal room.

    Args:
        row: the first of them.
        keys: a view of the store, `[rows, 1, room, D]`.
        values: a view of the store, `[rows, 1, room, V]`.
        fewest: entries that the shortest row holds.
        most: entries that the longest row holds.
        mask: float32 `[rows, 1, 1, room]`, 0 on entries and -inf behind them; None where rows are of equal
            length, or where the mask is made for a call.
    """

    row: int
    keys: Float[Tensor, "rows 1 room D"]
    values: Float[Tensor, "rows 1 room V"]
    fewest: int
    most: int
    mask: Float[Tensor, "rows 1 1 room"] | None = None


def find_runs(
    pages: Pages, keys_CD: Tensor, values_CD: Tensor, seen_RS: Int[Tensor, "R S"], num_queries: int
) -> list[Run] | None:
    """The rows of a store as runs, by what their last queries see; None where the op is the better way.

    Args:
        pages: the store's layout.
        keys_CD: its keys.
        values_CD: its values.
        seen_RS: entries that each query sees.
        num_queries: query heads of a sequence.
    """
    (R, S), C = seen_RS.shape, PAGE * pages.num_pages
    if len(pages.counts) != R or keys_CD.shape[0] != C or values_CD.shape[0] != C:
        return None  # the op says what is wrong
    seen = seen_RS[:, -1].tolist()
    if S > 1 and (num_queries * S * max(seen, default=0) > MOST_MASKED or not bool(seen_RS.all())):
        return None
    found: list[tuple[int, int, int, int, int, int]] = []
    for row, (start, count, length) in enumerate(
        zip(accumulate(pages.counts, initial=0), pages.counts, seen, strict=False)
    ):
        if found:
            first, rows, begin, room, fewest, most = found[-1]
            low, high = min(fewest, length), max(most, length)
            if room == PAGE * count and high - low <= MOST_APART and (low > 0 or high == 0):
                found[-1] = (first, rows + 1, begin, room, low, high)
                continue
        found.append((row, 1, PAGE * start, PAGE * count, length, length))
    if len(found) > MOST_RUNS:
        return None

    def view(column: Tensor, start: int, rows: int, room: int) -> Tensor:
        return column[start : start + rows * room].view(rows, 1, room, column.shape[1])

    return [
        Run(first, view(keys_CD, begin, rows, room), view(values_CD, begin, rows, room), fewest, most)
        for first, rows, begin, room, fewest, most in found
    ]


class Steps:
    """What one decoding step leaves known to the next: each row's next free slot, and the rows as runs.

    Args:
        pages: the store's layout.
        keys_CD: its keys.
        values_CD: its values.
        next_R: where each row's next entry goes.
        lengths_R: entries held by each row.
    """

    def __init__(self, pages: Pages, keys_CD: Tensor, values_CD: Tensor, next_R: Tensor, lengths_R: Tensor):
        self.next_R = next_R
        self.pending: list[Tensor] = []  # positions of the last entries, not yet written
        self.runs = find_runs(pages, keys_CD, values_CD, lengths_R[:, None], 1)
        self.mask_C: Tensor | None = None
        uneven = [run for run in self.runs or () if run.fewest < run.most]
        if uneven:
            starts_R = next_R - lengths_R
            self.mask_C = keys_CD.new_full((keys_CD.shape[0],), float("-inf"), dtype=torch.float32)
            self.mask_C[spans(starts_R, lengths_R)] = 0.0
            for run in uneven:
                rows, _, room, _ = run.keys.shape
                start = run.keys.storage_offset() // keys_CD.shape[1]
                run.mask = self.mask_C[start : start + rows * room].view(rows, 1, 1, room)

    def advance_(self, positions_B1: Tensor) -> None:
        """Every row holds one entry more, at this position of its sequence."""
        self.pending.append(positions_B1)
        if self.mask_C is not None:
            self.mask_C.index_fill_(0, self.next_R, 0.0)
        self.next_R += 1
        for run in self.runs or ():
            run.fewest += 1
            run.most += 1

    def write_positions_(self, positions_C: Int[Tensor, " C"], num_heads: int) -> None:
        """Write the positions of the entries that came since the last time."""
        if self.pending:
            new_BS, self.pending = torch.cat(self.pending, dim=1), []
            index_RS = self.next_R[:, None] + torch.arange(-new_BS.shape[1], 0)
            positions_C[index_RS] = new_BS.repeat_interleave(num_heads, 0).to(positions_C.dtype)


def fits(runs: Sequence[Run], queries_BQSD: Tensor) -> bool:
    """Whether dense calls can serve these queries: they compute in one precision and have gradients, which a
    store has not."""
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
        rows, most = run.keys.shape[0], run.most
        queries = queries_RMD if rows == R else queries_RMD.narrow(0, run.row, rows)
        if not most:  # padding, which sees nothing
            outs.append(queries.new_zeros(rows, 1, group * S, run.values.shape[-1]))
            continue
        mask = None
        if run.mask is not None:
            mask = run.mask.narrow(3, 0, most).to(queries.dtype)
        elif S > 1 or run.fewest < most:
            mask = torch.arange(most) < seen_RS.narrow(0, run.row, rows)[:, None, :, None]
            mask = mask.repeat(1, 1, group, 1) if S > 1 else mask
        keys, values = run.keys.narrow(2, 0, most), run.values.narrow(2, 0, most)
        outs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(B, Q, S, out.shape[-1])

"""Attention of a few queries over ragged rows: what decoding and question chunks run instead of dense
attention.

In: queries `[B, Q, S, D]`, and one layer's entries as a flat `[C, D]` store in which row `r` (one sequence
and KV head) owns the room `offsets[r] .. offsets[r + 1]` and holds `lengths[r]` entries at its beginning.
Out: `[B, Q, S, D]`.

The one decision taken here: rows whose rooms are equal and adjacent form a *block*, which is a plain `[rows,
room, D]` view of the store, so that the PyTorch path is a handful of batched matrix products and gathers no
key and no value; those in half precision are upcast a piece at a time, so that no copy of a whole store is
made. Who sees whom is a count (`seen_RS`): query `s` of a row sees the row's first `seen` entries, whatever
their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Upper bound on the elements of each temporary held at once (the logits; half-precision keys or values,
# upcast): 16 Mi, 64 MiB in float32. One row at least is taken, whatever its size.
MAX_LOGITS = 1 << 24


@dataclass(frozen=True)
class Block:
    """Consecutive stored rows with equal rooms.

    Args:
        row_start: first stored row.
        row_stop: one past the last stored row.
        entry_start: where the first row's room begins in the store.
        room: entries of room in each row.
        longest: upper bound on the entries held by a row, at most `room`.
    """

    row_start: int
    row_stop: int
    entry_start: int
    room: int
    longest: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    def grown(self, num_new: int) -> "Block":
        """The block after `num_new` entries came to each row."""
        return replace(self, longest=self.longest + num_new)

    def view(self, store_CD: Tensor, start: int = 0, stop: int | None = None) -> Float[Tensor, "R T D"]:
        """Rows `start..stop` of the block, cut to `longest`: a view of the store."""
        stop = self.num_rows if stop is None else stop
        rows = store_CD[self.entry_start + start * self.room : self.entry_start + stop * self.room]
        return rows.view(stop - start, self.room, store_CD.shape[-1])[:, : self.longest]


def blocks_of(offsets_R1: Int[Tensor, " R1"], lengths_R: Int[Tensor, " R"]) -> tuple[Block, ...]:
    """Blocks of a store of which only the offsets are known (reads them on the host once)."""
    offsets, lengths = offsets_R1.tolist(), lengths_R.tolist()
    blocks: list[Block] = []
    for row, length in enumerate(lengths):
        room = offsets[row + 1] - offsets[row]
        if blocks and blocks[-1].room == room:
            blocks[-1] = replace(blocks[-1], row_stop=row + 1, longest=max(blocks[-1].longest, length))
        else:
            blocks.append(Block(row, row + 1, offsets[row], room, length))
    return tuple(blocks)


def attend(
    queries_BQSD: Float[Tensor, "B Q S D"],
    keys_CD: Float[Tensor, "C D"],
    values_CD: Float[Tensor, "C D"],
    offsets_R1: Int[Tensor, " R1"],
    lengths_R: Int[Tensor, " R"],
    seen_RS: Int[Tensor, "R S"],
    *,
    scaling: float,
    soft_cap: float | None = None,
    order_R: Int[Tensor, " R"] | None = None,
    blocks: Sequence[Block] | None = None,
) -> Float[Tensor, "B Q S D"]:
    """Softmax attention of each query over the first `seen` entries of its row.

    `out_s = sum_{i < seen_s} softmax_i(cap(scaling * q_s . k_i)) v_i`; the softmax is float32 at least. A
    query that sees nothing (padding) gives zeros.

    Args:
        queries_BQSD: after norm and RoPE; the G = Q / H query heads of a KV head are adjacent.
        keys_CD: the store's keys.
        values_CD: the store's values; those of unused room must be finite.
        offsets_R1: int64, where each stored row's room begins and ends.
        lengths_R: entries held in each stored row.
        seen_RS: entries that query `s` of each stored row may see, 0 .. lengths.
        scaling: factor on the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        order_R: stored row `i` is row `order_R[i]` of `b * H + h`; None when rows are stored in that order.
        blocks: the layout, if the caller knows it; else it is read from the offsets, which costs a device
            sync.

    Returns:
        attention output, in the queries' precision.
    """
    B, Q, S, D = queries_BQSD.shape
    R = lengths_R.shape[0]
    assert (B * Q) % R == 0, f"{B} x {Q} query heads do not divide over {R} rows"
    group = B * Q // R
    blocks = blocks_of(offsets_R1, lengths_R) if blocks is None else blocks
    dtype = torch.promote_types(queries_BQSD.dtype, torch.float32)
    queries_RMD = queries_BQSD.reshape(R, group * S, D).to(dtype) * scaling
    if order_R is not None:
        queries_RMD = queries_RMD[order_R]
    out_RMD = queries_RMD.new_zeros(R, group * S, values_CD.shape[-1])
    # Elements per entry of the largest temporary: logits, or keys upcast to the queries' precision.
    widest = group * S if keys_CD.dtype == values_CD.dtype == dtype else max(group * S, D)
    for block in blocks:
        if block.longest == 0:
            continue
        entry_T = torch.arange(block.longest, device=seen_RS.device)
        step = max(1, MAX_LOGITS // (block.longest * widest))
        for start in range(0, block.num_rows, step):
            stop = min(start + step, block.num_rows)
            rows = slice(block.row_start + start, block.row_start + stop)
            logits = queries_RMD[rows] @ block.view(keys_CD, start, stop).to(dtype).transpose(-1, -2)
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            hidden_RST = entry_T >= seen_RS[rows, :, None]
            logits = logits.unflatten(1, (group, S)).masked_fill_(hidden_RST[:, None], float("-inf"))
            probs = torch.softmax(logits, dim=-1).flatten(1, 2)
            out_RMD[rows] = probs @ block.view(values_CD, start, stop).to(dtype)
    out_RGSD = out_RMD.unflatten(1, (group, S))
    # An all -inf row has a NaN softmax: a query that sees nothing gives zeros.
    out_RGSD = out_RGSD.masked_fill((seen_RS == 0)[:, None, :, None], 0.0)
    if order_R is not None:
        out_RGSD = torch.empty_like(out_RGSD).index_copy_(0, order_R, out_RGSD)
    return out_RGSD.reshape(B, Q, S, -1).to(queries_BQSD.dtype)

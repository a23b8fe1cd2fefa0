"""Lays the ragged rows of one layer out as dense `[B, H, T, ...]` tensors, so that they can be scored again.

A column is a token that *any* head of the layer still holds, or whose query is shown; a mask says which head
holds which column. `DenseView` translates between the store's order and columns, of which a later cut needs
`entries` alone.

Columns are in order of time and right-aligned, as in left-padded evidence: query `s` of `S` sits at column `T
- S + s` in every sequence. No loop over rows; the device is waited for once, for the widest sequence's number
of columns (and of queries).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class DenseView:
    """Dense columns of one layer's ragged rows.

    Args:
        token_BT: int64, index of each column's token among all tokens seen; 0 where there is none.
        valid_BT: False where a sequence has fewer columns than the widest.
        positions_BT: int64 RoPE position of each column.
        place_BT: int64, number of the sequence's own tokens before each column's, held or not.
        queried_BT: columns that are shown for their query's sake, held or not.
        held_BHT: which head holds which column.
        index_BHT: int64, where in the store the entry lies; 0 where the head does not hold it.
        entries: int32, row `b * H + h` and column of each entry, in the order in which they were given;
            values at them, such as a keep mask, are `dense_BHT.flatten(0, 1)[entries]`.
    """

    token_BT: Int[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    positions_BT: Int[Tensor, "B T"]
    place_BT: Int[Tensor, "B T"]
    queried_BT: Bool[Tensor, "B T"]
    held_BHT: Bool[Tensor, "B H T"]
    index_BHT: Int[Tensor, "B H T"]
    entries: tuple[Int[Tensor, " N"], Int[Tensor, " N"]]

    def gather(self, store_C: Tensor) -> Tensor:
        """Gather a column of the store, `[C, ...] -> [B, H, T, ...]`; undefined but at `held_BHT`."""
        if not store_C.shape[0]:
            return store_C.new_zeros(*self.index_BHT.shape, *store_C.shape[1:])
        return store_C[self.index_BHT]


def dense_view(
    positions_C: Int[Tensor, " C"],
    index_N: Int[Tensor, " N"],
    rows_N: Int[Tensor, " N"],
    num_heads: int,
    *,
    positions_BT: Int[Tensor, "B seen"],
    valid_BT: Bool[Tensor, "B seen"],
    num_queries: int,
) -> DenseView:
    """Compute the columns of a layer's rows.

    Args:
        positions_C: RoPE position of each place of the store.
        index_N: where in the store each entry lies.
        rows_N: row `b * H + h` of each entry. The order of the entries is free.
        num_heads: KV heads.
        positions_BT: RoPE position of every token seen, ascending over a sequence's own tokens.
        valid_BT: False on padding, which may stand between a sequence's tokens too.
        num_queries: the last tokens, which are columns in any case.
    """
    B, H, device = len(valid_BT), num_heads, valid_BT.device
    rows_N = rows_N.long()
    sequence_N = rows_N // H
    token_N = _tokens_at(positions_C[index_N].long(), sequence_N, positions_BT, valid_BT)

    seen = valid_BT.shape[1]
    queried_BT = valid_BT & (torch.arange(seen, device=device) >= seen - num_queries)
    shown_BT = queried_BT.clone()
    shown_BT[sequence_N, token_N] = True
    token_BT, column_valid_BT, column_BT = _to_the_right(shown_BT)
    T = token_BT.shape[1]
    column_N = column_BT[sequence_N, token_N]
    entry_N = rows_N * T + column_N
    index_BHT = index_N.new_zeros(B * H * T, dtype=torch.int64)
    index_BHT[entry_N] = index_N.long()
    held_BHT = torch.zeros(B * H * T, dtype=torch.bool, device=device)
    held_BHT[entry_N] = True
    none_BT = ~column_valid_BT
    return DenseView(
        token_BT=token_BT,
        valid_BT=column_valid_BT,
        positions_BT=positions_BT.long().gather(1, token_BT).masked_fill(none_BT, 0),
        place_BT=(valid_BT.cumsum(-1) - 1).gather(1, token_BT).masked_fill(none_BT, 0),
        queried_BT=queried_BT.gather(1, token_BT) & column_valid_BT,
        held_BHT=held_BHT.view(B, H, T),
        index_BHT=index_BHT.view(B, H, T),
        entries=(rows_N.int(), column_N.int()),
    )


def _tokens_at(
    position_N: Int[Tensor, " N"],
    sequence_N: Int[Tensor, " N"],
    positions_BT: Int[Tensor, "B seen"],
    valid_BT: Bool[Tensor, "B seen"],
) -> Int[Tensor, " N"]:
    """Index of the token of sequence `sequence_N` at position `position_N`."""
    B, seen = valid_BT.shape
    # Padding repeats the position before it, so that a first match is never padding; all sequences one behind
    # the other are one ascending row.
    sorted_BT = positions_BT.long().masked_fill(~valid_BT, -1).cummax(-1).values
    far = 2**32  # further than any two positions are apart
    first_B1 = torch.arange(B, device=valid_BT.device)[:, None]
    found_N = torch.searchsorted((sorted_BT + first_B1 * far).flatten(), position_N + sequence_N * far)
    return found_N - sequence_N * seen


def _to_the_right(
    chosen_BT: Bool[Tensor, "B T"],
) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"], Int[Tensor, "B T"]]:
    """Slots for the chosen tokens of each sequence, right-aligned, as many as the one with the most needs.

    Returns:
        the token of each slot (0: none), whether there is one, and the slot of each token (S: none).
    """
    B, seen = chosen_BT.shape
    rank_BT = chosen_BT.flip(-1).cumsum(-1).flip(-1)  # 1 for the last chosen token
    count_B1 = rank_BT[:, :1] if seen else rank_BT.new_zeros(B, 1)
    S = int(count_B1.max()) if B else 0
    # Slot S collects tokens without a slot.
    slot_BT = torch.where(chosen_BT, S - rank_BT, S)
    token_T = torch.arange(seen, device=chosen_BT.device)
    token_BS = token_T.new_zeros(B, S + 1).scatter_(1, slot_BT, token_T.expand(B, -1))[:, :S]
    return token_BS, torch.arange(S, device=chosen_BT.device) >= S - count_B1, slot_BT

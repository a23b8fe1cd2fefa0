"""The ragged store: exactly the kept entries of one attention layer, a different number for each (sequence,
KV head).

In: dense keys and values with a keep mask; later, new tokens. Out: a flat `[C, D]` store for keys and one for
values that `retain.attend` reads in place. Evicted entries are not masked, they are gone; padding never comes
in.

The one decision taken here: rooms. Rows are stored in blocks of equal room (`retain.attend.Block`). If giving
every row the longest row's room wastes under a quarter of what is needed, that is one block in natural order;
otherwise rows are sorted by length and cut into as few blocks as keep the waste under a quarter. So attention
never gathers, even when one batch mixes sequences that kept a tenth and sequences that kept everything. What
is held and what is allocated are reported apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.attend import Block

# Free entries given to each row when a store is made; allocated rooms may waste this share of what is needed.
SLACK = 32
WASTE = 0.25


def plan_rooms(lengths: Sequence[int], slack: int) -> tuple[list[int] | None, list[Block]]:
    """Lay rows out in few blocks of equal rooms, wasting at most a quarter of `length + slack`.

    Args:
        lengths: entries held by each row.
        slack: free entries that each row wants.

    Returns:
        the order of the rows in the store (None: as they come), and the blocks.

    Example:
        >>> plan_rooms([7, 8, 7], slack=2)
        (None, [Block(row_start=0, row_stop=3, entry_start=0, room=10, longest=8)])
        >>> order, blocks = plan_rooms([100, 10, 90, 12], slack=0)
        >>> order, [(block.num_rows, block.room) for block in blocks]
        ([0, 2, 3, 1], [(2, 100), (2, 12)])
    """
    if not lengths:
        return None, []
    longest, needed = max(lengths), sum(lengths) + slack * len(lengths)
    if len(lengths) * (longest + slack) <= (1 + WASTE) * needed:
        return None, [Block(0, len(lengths), 0, longest + slack, longest)]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    blocks, start, entry_start = [], 0, 0
    while start < len(order):
        longest, needed, stop = lengths[order[start]], 0, start
        room = longest + slack
        while stop < len(order):
            needed += lengths[order[stop]] + slack
            if (stop + 1 - start) * room > (1 + WASTE) * needed:
                break
            stop += 1
        blocks.append(Block(start, stop, entry_start, room, longest))
        entry_start += (stop - start) * room
        start = stop
    return order, blocks


class RaggedStore:
    """Keys, values and positions of the entries that one layer holds.

    Row `r = b * H + h`. `offsets_R1` (int64) and `lengths_R` (int32) describe the rows in *stored* order;
    `order_R` maps a stored row to its `r` (None when they are the same). Make one with `from_dense`; methods
    that end in `_` change it in place, all others leave it alone and share no memory with it.
    """

    def __init__(
        self,
        keys_ND: Float[Tensor, "N D"],
        values_ND: Float[Tensor, "N D"],
        positions_N: Int[Tensor, " N"],
        lengths_R: Int[Tensor, " R"],
        num_heads: int,
        slack: int = SLACK,
    ):
        """Lay out entries that come row after row (`lengths_R[r]` of row 0, of row 1, ...), in order of
        time."""
        self._allocate(lengths_R.tolist(), num_heads, slack, like=(keys_ND, values_ND, positions_N))
        self._fill_(self._index_N(), keys_ND, values_ND, positions_N)

    def _allocate(
        self, lengths: list[int], num_heads: int, slack: int, like: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Lay out rows of these lengths, with nothing in them yet."""
        order, blocks = plan_rooms(lengths, slack)
        keys, values, positions = like
        device = keys.device
        stored = range(len(lengths)) if order is None else order
        rooms = [block.room for block in blocks for _ in range(block.num_rows)]
        offsets_R1 = torch.tensor([0, *rooms], dtype=torch.int64).cumsum(0)
        capacity = int(offsets_R1[-1])
        self.num_heads = num_heads
        self.slack = slack
        self.blocks = tuple(blocks)
        self.order_R = None if order is None else torch.tensor(order, dtype=torch.int64, device=device)
        self.offsets_R1 = offsets_R1.to(device)
        self.lengths_R = torch.tensor([lengths[row] for row in stored], dtype=torch.int32, device=device)
        self.keys_CD = keys.new_empty(capacity, keys.shape[-1])
        # Zeros, not empty: a masked entry has weight 0, and 0 * NaN would still be NaN.
        self.values_CD = values.new_zeros(capacity, values.shape[-1])
        self.positions_C = positions.new_zeros(capacity)

    def _fill_(self, index_N: Tensor, keys_ND: Tensor, values_ND: Tensor, positions_N: Tensor) -> None:
        self.keys_CD.index_copy_(0, index_N, keys_ND.detach())
        self.values_CD.index_copy_(0, index_N, values_ND.detach())
        self.positions_C.index_copy_(0, index_N, positions_N)

    @classmethod
    def from_dense(
        cls,
        keys_BHTD: Float[Tensor, "B H T D"],
        values_BHTD: Float[Tensor, "B H T D"],
        positions_BT: Int[Tensor, "B T"],
        keep_BHT: Tensor,
        slack: int = SLACK,
    ) -> "RaggedStore":
        """Keep the entries of `keep_BHT`, in order of time; the rest is not copied.

        Raises:
            ValueError: if the keep mask has another shape or is not boolean.
        """
        B, H, T, _ = keys_BHTD.shape
        if keep_BHT.shape != (B, H, T) or keep_BHT.dtype != torch.bool:
            raise ValueError(
                f"keep mask is {keep_BHT.dtype} {tuple(keep_BHT.shape)}, but the layer holds {B} sequences x "
                f"{H} KV heads "
                f"x {T} entries: pass a bool tensor [{B}, {H}, {T}], True = kept."
            )
        b, h, t = keep_BHT.nonzero(as_tuple=True)
        return cls(
            keys_BHTD[b, h, t],
            values_BHTD[b, h, t],
            positions_BT[b, t],
            keep_BHT.sum(-1).flatten(),
            H,
            slack=slack,
        )

    @property
    def num_rows(self) -> int:
        return self.lengths_R.shape[0]

    @property
    def batch_size(self) -> int:
        return self.num_rows // self.num_heads

    @property
    def lengths_BH(self) -> Int[Tensor, "B H"]:
        """Entries held, per sequence and KV head (int64)."""
        return self._by_row(self.lengths_R).view(-1, self.num_heads)

    @property
    def entries_held(self) -> int:
        """N: entries held over all rows."""
        return int(self.lengths_R.sum())

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: its key and its value."""
        return sum(store.shape[-1] * store.element_size() for store in (self.keys_CD, self.values_CD))

    @property
    def bytes_held(self) -> int:
        """Bytes of the keys and values held, exactly: entries x bytes of an entry."""
        return self.entries_held * self.entry_bytes

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage behind the store: slack, unequal rooms, positions and row tables included."""
        tensors = [self.keys_CD, self.values_CD, self.positions_C, self.offsets_R1, self.lengths_R]
        if self.order_R is not None:
            tensors.append(self.order_R)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def flat(self) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"], Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Keys, values, positions and row `b * H + h` of every entry, row after row, in order of time."""
        index_N = self._index_N()
        return self.keys_CD[index_N], self.values_CD[index_N], self.positions_C[index_N], self._rows_N()

    def row(
        self, sequence: int, head: int
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"], Int[Tensor, " T"]]:
        """Keys, values and positions of one row (for looking at, not for speed)."""
        keys, values, positions, rows = self.flat()
        mine = rows == sequence * self.num_heads + head
        return keys[mine], values[mine], positions[mine]

    def append_(
        self,
        keys_BHSD: Float[Tensor, "B H S D"],
        values_BHSD: Float[Tensor, "B H S D"],
        positions_BS: Int[Tensor, "B S"],
        valid_BS: Bool[Tensor, "B S"] | None = None,
    ) -> Int[Tensor, "R S"]:
        """Add new tokens behind each row: O(new), amortised; the store is laid out anew when a room is full.

        Args:
            keys_BHSD: keys of the new tokens, after norm and RoPE.
            values_BHSD: their values.
            positions_BS: their RoPE positions.
            valid_BS: False on padding, which is not stored; None: all are real (and no device sync is
                needed).

        Returns:
            for each stored row and new token, how many entries of the row that token sees, itself included.
        """
        B, H, S, _ = keys_BHSD.shape
        if self.num_rows != B * H:
            raise ValueError(
                f"new keys are of {B} sequences x {H} KV heads, but the store holds {self.batch_size} x "
                f"{self.num_heads}: "
                "select or repeat the cache's sequences to match the batch."
            )
        if any(block.longest + S > block.room for block in self.blocks):
            self._grow_(S)
        keys_RSD, values_RSD = keys_BHSD.detach().flatten(0, 1), values_BHSD.detach().flatten(0, 1)
        positions_RS = positions_BS.repeat_interleave(H, dim=0)
        valid_RS = None if valid_BS is None else valid_BS.repeat_interleave(H, dim=0)
        if self.order_R is not None:
            keys_RSD, values_RSD = keys_RSD[self.order_R], values_RSD[self.order_R]
            positions_RS = positions_RS[self.order_R]
            valid_RS = None if valid_RS is None else valid_RS[self.order_R]
        held_R1 = self.lengths_R.to(torch.int64)[:, None]
        if valid_RS is None:
            rank_RS = torch.arange(1, S + 1, device=held_R1.device)
            added_R: Tensor | int = S
        else:
            rank_RS = valid_RS.cumsum(-1)
            added_R = rank_RS[:, -1].to(torch.int32)
        seen_RS = held_R1 + rank_RS
        index_RS = self.offsets_R1[:-1, None] + seen_RS - 1
        if valid_RS is None:
            index_N = index_RS.flatten()
            new = keys_RSD.flatten(0, 1), values_RSD.flatten(0, 1), positions_RS.flatten()
        else:
            index_N = index_RS[valid_RS]
            new = keys_RSD[valid_RS], values_RSD[valid_RS], positions_RS[valid_RS]
            seen_RS = seen_RS.masked_fill(~valid_RS, 0)
        for store, entries in zip((self.keys_CD, self.values_CD, self.positions_C), new, strict=True):
            store.index_copy_(0, index_N, entries)
        self.lengths_R += added_R
        self.blocks = tuple(block.grown(S) for block in self.blocks)
        return seen_RS

    def compact_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Evict in place: entries move to the front of their rows, rooms stay (their slack grows).

        Args:
            keep_N: True = kept, in the order of `flat()`.
        """
        index_N, lengths_R = self._kept(keep_N)
        entries = self.keys_CD[index_N], self.values_CD[index_N], self.positions_C[index_N]
        stored_R = lengths_R if self.order_R is None else lengths_R[self.order_R]
        self.lengths_R.copy_(stored_R)
        lengths = stored_R.tolist()
        self.blocks = tuple(
            replace(block, longest=max(lengths[block.row_start : block.row_stop])) for block in self.blocks
        )
        self._fill_(self._index_N(), *entries)

    def crop_(self, before_B: Int[Tensor, " B"]) -> None:
        """Forget, in each sequence, the entries at positions `>= before`, and give their bytes back."""
        positions_N = self.positions_C[self._index_N()]
        self.filter_(positions_N < before_B[self._rows_N() // self.num_heads])

    def drop_(self, gone_BP: Bool[Tensor, "B P"]) -> None:
        """Forget, in each sequence, the entries at these positions, and give their bytes back."""
        gone_BP, rows_N = gone_BP.to(self.positions_C.device), self._rows_N()
        self.filter_(~gone_BP[rows_N // self.num_heads, self.positions_C[self._index_N()]])

    def filter_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries (in the order of `flat()`) in a new store of their size plus slack."""
        index_N, lengths_R = self._kept(keep_N)
        entries = self.keys_CD[index_N], self.values_CD[index_N], self.positions_C[index_N]
        self.__dict__.update(RaggedStore(*entries, lengths_R, self.num_heads, self.slack).__dict__)

    def fork(self) -> "RaggedStore":
        """An independent copy."""
        return self._like({name: tensor.clone() for name, tensor in self._tensors().items()})

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "RaggedStore":
        """The sequences `idx`, in that order; an index may repeat (beams, `batch_repeat_interleave`)."""
        idx = idx.to(self.keys_CD.device)
        if self.order_R is None and len(self.blocks) == 1:
            # One block in natural order: a sequence is one contiguous slice of the store.
            span, heads = self.num_heads * self.blocks[0].room, self.num_heads
            tensors = {
                name: getattr(self, name).unflatten(0, (-1, span)).index_select(0, idx).flatten(0, 1)
                for name in ("keys_CD", "values_CD", "positions_C")
            }
            tensors["lengths_R"] = self.lengths_R.view(-1, heads).index_select(0, idx).flatten()
            num_rows = idx.shape[0] * heads
            offsets = torch.arange(num_rows + 1, device=idx.device) * self.blocks[0].room
            block = Block(0, num_rows, 0, self.blocks[0].room, self.blocks[0].longest)
            return self._like({**tensors, "offsets_R1": offsets}, blocks=(block,))
        rows = (idx[:, None] * self.num_heads + torch.arange(self.num_heads, device=idx.device)).flatten()
        lengths = self._by_row(self.lengths_R)[rows]
        starts = self._by_row(self.offsets_R1[:-1])[rows]
        index_N = _entries(starts, lengths)
        return RaggedStore(
            self.keys_CD[index_N],
            self.values_CD[index_N],
            self.positions_C[index_N],
            lengths,
            self.num_heads,
            slack=self.slack,
        )

    @classmethod
    def concat(cls, stores: Sequence["RaggedStore"], slack: int | None = None) -> "RaggedStore":
        """Stack stores of one layer along the batch; rows keep their own lengths.

        Args:
            stores: of the same layer.
            slack: free entries per row; default: the largest of the stores'.
        """
        first = stores[0]
        slack = max(store.slack for store in stores) if slack is None else slack
        lengths = torch.cat([store.lengths_BH.flatten() for store in stores]).tolist()
        both = object.__new__(cls)
        both._allocate(
            lengths, first.num_heads, slack, like=(first.keys_CD, first.values_CD, first.positions_C)
        )
        start, index_N = 0, both._index_N()
        for store in stores:  # one after another, so that one store's copy is in flight and not all
            from_N = store._index_N()
            to_N = index_N[start : start + from_N.shape[0]]
            both._fill_(to_N, store.keys_CD[from_N], store.values_CD[from_N], store.positions_C[from_N])
            start += from_N.shape[0]
        return both

    def _by_row(self, stored_R: Tensor) -> Int[Tensor, " R"]:
        """A per-row quantity, from stored order to `b * H + h`, as int64."""
        stored_R = stored_R.to(torch.int64)
        return (
            stored_R
            if self.order_R is None
            else torch.empty_like(stored_R).index_copy_(0, self.order_R, stored_R)
        )

    def _index_N(self) -> Int[Tensor, " N"]:
        """Where every entry lies in the store, row after row."""
        return _entries(self._by_row(self.offsets_R1[:-1]), self._by_row(self.lengths_R))

    def _rows_N(self) -> Int[Tensor, " N"]:
        """Row `b * H + h` of every entry, row after row."""
        return torch.repeat_interleave(self.lengths_BH.flatten())

    def _kept(self, keep_N: Bool[Tensor, " N"]) -> tuple[Int[Tensor, " kept"], Int[Tensor, " R"]]:
        """Where the entries to keep lie in the store, and how many each row has; nothing is copied."""
        lengths_R = torch.bincount(self._rows_N()[keep_N], minlength=self.num_rows)
        return self._index_N()[keep_N], lengths_R

    def _tensors(self) -> dict[str, Tensor]:
        names = ("keys_CD", "values_CD", "positions_C", "offsets_R1", "lengths_R")
        return {name: getattr(self, name) for name in names}

    def _like(self, tensors: dict[str, Tensor], **changes: Any) -> "RaggedStore":
        other = object.__new__(RaggedStore)
        other.__dict__.update({**self.__dict__, **tensors, **changes})
        return other

    def _grow_(self, num_new: int) -> None:
        """Lay the store out anew with room for `num_new` more, and a quarter of the rows' mean, so that cost
        amortises."""
        keys_ND, values_ND, positions_N, _ = self.flat()
        free = num_new + max(self.slack, keys_ND.shape[0] // (4 * max(1, self.num_rows)))
        lengths = self.lengths_BH.flatten()
        grown = RaggedStore(keys_ND, values_ND, positions_N, lengths, self.num_heads, slack=free)
        self.__dict__.update({**grown.__dict__, "slack": self.slack})


def _entries(starts_R: Int[Tensor, " R"], lengths_R: Int[Tensor, " R"]) -> Int[Tensor, " N"]:
    """`starts[r] .. starts[r] + lengths[r]` of every row, one after another."""
    ends_R = lengths_R.cumsum(0)
    rows_N = torch.repeat_interleave(lengths_R)
    within_N = torch.arange(rows_N.shape[0], device=rows_N.device) - (ends_R - lengths_R)[rows_N]
    return starts_R[rows_N] + within_N

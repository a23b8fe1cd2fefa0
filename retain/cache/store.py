"""Stores exactly the kept entries of one layer, a different number for each (sequence, KV head).

Keys and values are flat `[C, D]` columns that `retain.cache.attend` reads in place; *side columns* follow
their entries. Evicted entries are removed, not masked; padding is never stored.

Every row owns a room of whole pages (`retain.kernels.ragged_attention.pages`), in natural order, with some
free slots at its end for new tokens. When a row is full, or bytes are to be given back, the store is laid out
anew, one column after another, so that never more than one column exists twice. If memory runs out midway,
whoever changes a store refuses it from then on (`retain.hf.cache.state.State.changing`).

With a `Codec` keys and values are codes (`retain.cache.precision`), and an entry is encoded once. A store of
plain rows may have `packed` such entries, all of which came before its others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.cache.layout import Layout, bytes_of, copy_, count_free, normal_tensors, packing, spans
from retain.cache.precision import GROUPS, VALUE_SCALES, Codec, Precision
from retain.kernels.codes import Codes, decode
from retain.kernels.ragged_attention.pages import PAGE

# Columns of an entry itself, of which codes have the last two; all others are side columns.
ENTRY = ("keys", "values", "positions", VALUE_SCALES, GROUPS)
# The side column that attention adds to the logits of its entries, after a soft cap: float32.
LOG_WEIGHT = "log_weight"
# Free entries given to each row, at least, when a store is made.
SLACK = 32
# A full store grows by this share of its rows' mean length, or by its slack if that is more.
GROWTH = 1 / 48


class RaggedStore:
    """Keys, values, positions and side columns of one layer's entries.

    Row `r = b * H + h`; its room begins at `offsets_R1[r]` (int64), and it holds `lengths_R[r]` (int32)
    entries. Methods that end in `_` change the store in place, all others share no memory with it. Free slots
    hold finite numbers, and zeros in side columns.

    Args:
        layout: rooms of the rows.
        num_heads: H.
        slack: free entries given to each row, at least, when the store is laid out anew.
        columns: `[C, ...]` in these rooms: those of `ENTRY`, and side columns, such as a score or the mass of
            attention received.
        codec: how keys and values are held; None: as they are.
        key_scales_G2D: scales of each group of keys, where there is a codec.

    Attributes:
        precision: how entries are packed; None: they are not.
        packed: entries before these, as codes; None: there are none. Methods are of the plain ones where
            they do not say otherwise.
        pages: the row that each page belongs to.
        free: new tokens that surely fit into every row.
    """

    step_rows: Any  # for decoding steps on a CPU (`retain.cache.equal_rows`), made by who decodes them

    def __init__(
        self,
        layout: Layout,
        num_heads: int,
        slack: int,
        columns: Mapping[str, Tensor],
        codec: Codec | None = None,
        key_scales_G2D: Float[Tensor, "G 2 D"] | None = None,
    ):
        self.num_heads, self.slack, self.columns = num_heads, slack, {**columns}
        self.codec, self.key_scales_G2D = codec, key_scales_G2D
        self.precision: Precision | None = None
        self.packed: RaggedStore | None = None
        self._take_(layout)

    @classmethod
    @normal_tensors()
    def from_rows(
        cls,
        columns: Mapping[str, Tensor],
        lengths_R: Int[Tensor, " R"],
        num_heads: int,
        slack: int = SLACK,
        codec: Codec | None = None,
        key_scales_G2D: Float[Tensor, "G 2 D"] | None = None,
    ) -> "RaggedStore":
        """Lay out entries that come row after row (`lengths_R[r]` of row 0, of row 1, ...), in order of time.

        Args:
            columns: `[N, ...]`, else as above.
        """
        layout, placed = Layout.of(lengths_R, slack), {**columns}
        layout.fill_(placed, None)
        return cls(layout, num_heads, slack, placed, codec, key_scales_G2D)

    @classmethod
    @normal_tensors()
    def from_dense(
        cls,
        keys_BHTD: Float[Tensor, "B H T D"],
        values_BHTD: Float[Tensor, "B H T D"],
        positions_BT: Int[Tensor, "B T"],
        keep_BHT: Tensor,
        slack: int = SLACK,
        side: Mapping[str, Tensor] | None = None,
    ) -> "RaggedStore":
        """Keep the entries of `keep_BHT`, in order of time; the rest is not copied.

        Args:
            keys_BHTD, values_BHTD, positions_BT: of all tokens, keys after norm and RoPE.
            side: side columns, `[B, H, T]` or `[B, H, T, K]`.
        """
        B, H, T, _ = keys_BHTD.shape
        assert keep_BHT.shape == (B, H, T) and keep_BHT.dtype == torch.bool
        positions = positions_BT[:, None].expand(B, H, T).to(torch.int32)
        columns = {"keys": keys_BHTD, "values": values_BHTD, "positions": positions, **(side or {})}
        assert all(column.shape[:3] == (B, H, T) for column in columns.values())
        layout = Layout.of(keep_BHT.sum(-1).flatten(), slack)
        layout.fill_(columns, keep_BHT.nonzero(as_tuple=True))
        return cls(layout, H, slack, columns)

    @property
    def entries(self) -> dict[str, Tensor]:
        """The columns of entries themselves."""
        return {name: column for name, column in self.columns.items() if name in ENTRY}

    @property
    def side(self) -> dict[str, Tensor]:
        """The side columns."""
        return {name: column for name, column in self.columns.items() if name not in ENTRY}

    @property
    def keys_CD(self) -> Float[Tensor, "C D"]:
        return self.columns["keys"]

    @property
    def values_CD(self) -> Float[Tensor, "C D"]:
        return self.columns["values"]

    @property
    def positions_C(self) -> Int[Tensor, " C"]:
        """RoPE positions of the entries (int32; `flat` and `row` give int64)."""
        return self.columns["positions"]

    @property
    def num_places(self) -> int:
        """C: places of entries, free ones included."""
        return len(self.columns["positions"])

    @property
    def device(self) -> torch.device:
        return self.columns["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the keys, or of the numbers that codes stand for."""
        return self.keys_CD.dtype if self.codec is None else self.codec.dtype

    @property
    def codes(self) -> tuple[Codes, Codes]:
        """Keys and values of a store with a codec, as attention reads them."""
        codec, columns, table = self.codec, self.columns, self.key_scales_G2D
        assert codec is not None and table is not None
        bits, scales = codec.bits, columns[VALUE_SCALES]
        keys = Codes(columns["keys"], table, columns[GROUPS], bits, 1, codec.head_dim)
        return keys, Codes(columns["values"], scales, None, bits, codec.span, codec.value_dim)

    def decoded(self) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C V"]]:
        """Keys and values as numbers: of codes a copy, rounded once to the model's precision."""
        if self.codec is None:
            return self.keys_CD, self.values_CD
        keys, values = self.codes
        return decode(keys, torch.float32).to(self.dtype), decode(values, self.dtype)

    @property
    def parts(self) -> "list[RaggedStore]":
        """The packed entries, if there are some, and the plain ones."""
        return [self] if self.packed is None else [self.packed, self]

    @property
    def lengths_BH(self) -> Int[Tensor, "B H"]:
        """Entries held in all parts, per sequence and KV head (int64)."""
        lengths_R = self.lengths_R if self.packed is None else self.lengths_R + self.packed.lengths_R
        return lengths_R.to(torch.int64).view(-1, self.num_heads)

    @property
    def entries_held(self) -> int:
        """Entries held over all rows, in all parts."""
        return sum(int(part.lengths_R.sum()) for part in self.parts)

    @property
    def entry_bytes(self) -> int:
        """Bytes that attention reads of an entry, but for its log weight."""
        return _width(*(column for name, column in self.entries.items() if name != "positions"))

    @property
    def log_weight_C(self) -> Float[Tensor, " C"] | None:
        """Log weights, added to the logits of each entry; None: nothing is."""
        return self.columns.get(LOG_WEIGHT)

    @property
    def bytes_held(self) -> int:
        """Bytes that attention reads of all parts; scales that copies of a sequence share count once."""
        held = 0
        for part in self.parts:
            held += int(part.lengths_R.sum()) * (part.entry_bytes + part.log_weight_bytes)
            held += 0 if part.key_scales_G2D is None else part.key_scales_G2D.nbytes
        return held

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage of all parts: slack, positions, side columns and tables included."""
        return bytes_of([tensor for part in self.parts for tensor in part.storages()])

    @property
    def log_weight_bytes(self) -> int:
        return 0 if self.log_weight_C is None else self.log_weight_C.element_size()

    def storages(self) -> list[Tensor]:
        """All tensors that the plain entries, or the codes, are made of."""
        tables = [self.offsets_R1, self.lengths_R, *self.pages.tables()]
        tables += [] if self.key_scales_G2D is None else [self.key_scales_G2D]
        return [*tables, *self.columns.values()]

    def index_N(self) -> Int[Tensor, " N"]:
        """Where every entry lies in the store, row after row, in order of time."""
        return spans(self.offsets_R1[:-1], self.lengths_R)

    def rows_N(self) -> Int[Tensor, " N"]:
        """Row `b * H + h` of every entry, row after row."""
        return torch.repeat_interleave(self.lengths_R.to(torch.int64))

    def flat(self) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N V"], Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Keys, values, positions and row of every entry, row after row, in order of time; packed ones first,
        decoded."""
        found = []
        for part in self.parts:
            index_N = part.index_N()
            keys_CD, values_CD = part.decoded()
            positions_N = part.positions_C[index_N].to(torch.int64)
            found.append((keys_CD[index_N], values_CD[index_N], positions_N, part.rows_N()))
        keys_ND, values_NV, positions_N, row_N = (torch.cat(column) for column in zip(*found, strict=True))
        return keys_ND, values_NV, positions_N, row_N

    def append_(
        self,
        keys_BHSD: Float[Tensor, "B H S D"],
        values_BHSD: Float[Tensor, "B H S D"],
        positions_BS: Int[Tensor, "B S"],
        valid_BS: Bool[Tensor, "B S"] | None = None,
    ) -> Int[Tensor, "R S"]:
        """Add new tokens behind each row: O(new), amortised; the store is laid out anew when a row is full.

        Args:
            keys_BHSD, values_BHSD, positions_BS: of the new tokens, keys after norm and RoPE.
            valid_BS: False on padding, which is not stored; None: all are real.

        Returns:
            for each row and new token, how many entries of the row that token sees, itself included; 0 for
            padding. Side columns of the new entries are zeros until `set_side_`.
        """
        B, H, S, _ = keys_BHSD.shape
        if len(self.lengths_R) != B * H:
            held = f"{len(self.lengths_R) // self.num_heads} x {self.num_heads}"
            raise ValueError(
                f"new keys are of {B} sequences x {H} KV heads, but the store holds {held}: select or repeat "
                "the cache's sequences to match the batch."
            )
        if self.free < S:
            self.make_room_(S)
        held_R1 = self.lengths_R.to(torch.int64)[:, None]
        new = [keys_BHSD, values_BHSD, positions_BS[:, None].expand(B, H, S)]
        num_new: Tensor | int = S
        if valid_BS is None:
            seen_RS = held_R1 + torch.arange(1, S + 1, device=held_R1.device)
            index_RS = seen_RS + (self.offsets_R1[:-1, None] - 1)
        else:  # padding becomes zeros in the free slots behind, so that the device is not waited for
            valid_RS = valid_BS.repeat_interleave(H, 0)
            rank_RS, num_new = valid_RS.cumsum(-1), valid_RS.sum(-1)
            seen_RS = (held_R1 + rank_RS).masked_fill_(~valid_RS, 0)
            place_RS = torch.where(valid_RS, rank_RS, num_new[:, None] + (~valid_RS).cumsum(-1))
            index_RS = place_RS + (held_R1 + self.offsets_R1[:-1, None] - 1)
            real_BHS = valid_BS[:, None].expand(B, H, S)
            new = [one.masked_fill(~real_BHS[(...,) + (None,) * (one.ndim - 3)], 0) for one in new]
        for column, values in zip((self.keys_CD, self.values_CD, self.positions_C), new, strict=True):
            column.index_copy_(0, index_RS.flatten(), values.detach().flatten(0, 2).to(column.dtype))
        # Raised last: had a write failed, only free slots would have been written to.
        self.lengths_R += num_new
        self.step_rows = None
        self.free -= S
        return seen_RS

    def set_side_(self, name: str, values_BHS: Tensor, valid_BS: Bool[Tensor, "B S"]) -> None:
        """Write a side column, `[B, H, S]` or `[B, H, S, K]`, for the last S tokens of every row, which were
        appended with `valid_BS`; a new column is zeros elsewhere."""
        column = self.columns.get(name)
        if column is None:
            with normal_tensors():
                column = values_BHS.new_zeros(self.num_places, *values_BHS.shape[3:])
        index_RS, valid_RS = tail_index_RS(self, valid_BS)
        values_N = values_BHS.flatten(0, 2)[valid_RS.flatten()]
        column.index_copy_(0, index_RS[valid_RS], values_N.detach().to(column.dtype))
        self.columns[name] = column

    def write_side_(self, name: str, values_N: Tensor) -> None:
        """Write a side column for every entry, in the order of `index_N()`."""
        with normal_tensors():
            column = values_N.new_zeros(self.num_places, *values_N.shape[1:])
            self.columns[name] = column.index_copy_(0, self.index_N(), values_N)

    def compact_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries (in the order of `index_N()`) in place: those behind a row's first hole move
        forward, rooms stay (their slack grows)."""
        assert len(keep_N) == int(self.lengths_R.sum()) and keep_N.dtype == torch.bool
        from_N, to_N, freed, evicted_R = packing(keep_N, self.offsets_R1, self.lengths_R)
        for column in self.columns.values():
            copy_(column, to_N, column, (from_N,))
            # Zeros, not garbage: a masked entry has weight 0, and 0 x NaN would still be NaN.
            column.index_fill_(0, freed, 0)
        self.lengths_R -= evicted_R
        self.step_rows = None
        self.free = count_free(self.pages, self.lengths_R.tolist())
        self._forget_groups_()

    def filter_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries (in the order of `index_N()`) in rooms of their size plus slack."""
        assert len(keep_N) == int(self.lengths_R.sum()) and keep_N.dtype == torch.bool
        kept_R = torch.bincount(self.rows_N()[keep_N], minlength=len(self.lengths_R))
        self.lay_out_anew_(Layout.of(kept_R, self.slack), self.index_N()[keep_N])
        self._forget_groups_()

    def drop_side_(self) -> None:
        """Let go of side columns, but for log weights."""
        for part in self.parts:
            for name in {*part.side} - {LOG_WEIGHT}:
                del part.columns[name]

    def crop_(self, before_B: Int[Tensor, " B"]) -> None:
        """Forget, in each sequence and all parts, the entries at positions `>= before`, and give their bytes
        back."""
        before_R = before_B.to(self.device).repeat_interleave(self.num_heads)
        for part in self.parts:
            part.filter_(part.positions_C[part.index_N()] < before_R[part.rows_N()])
        if self.packed is not None and not self.packed.entries_held:
            self.packed = None

    @normal_tensors()
    def pack_(self) -> None:
        """Pack the plain entries but for the last `recent` of each row, where there is a precision.

        Raises:
            ValueError: numbers that float16 does not hold; nothing was changed.
        """
        if self.precision is None:
            return
        index_N, rows_N, old = self.index_N(), self.rows_N(), self.packed
        goes_N = (self.offsets_R1[:-1] + self.lengths_R)[rows_N] - index_N > self.precision.recent
        if not bool(goes_N.any()):
            return
        from_N, lengths_R = index_N[goes_N], torch.bincount(rows_N[goes_N], minlength=len(self.lengths_R))
        codec = Codec(self.precision.bits, self.keys_CD.shape[1], self.values_CD.shape[1], self.dtype)
        columns, table = codec.encode(self.keys_CD[from_N], self.values_CD[from_N], lengths_R)
        columns |= {name: self.columns[name][from_N] for name in ("positions", *self.side)}
        made = RaggedStore.from_rows(columns, lengths_R, self.num_heads, 0, codec, table)
        if old is not None:
            layout = Layout.of(old.lengths_R + made.lengths_R, 0)
            starts_R = layout.offsets_R1[:-1]
            old_N, made_N = spans(starts_R, old.lengths_R), spans(starts_R + old.lengths_R, made.lengths_R)
            made = gathered(layout, [(old, old.index_N(), old_N), (made, made.index_N(), made_N)], 0)
        self.filter_(~goes_N)
        self.packed = made

    @normal_tensors()
    def fork(self) -> "RaggedStore":
        """An independent copy."""
        layout = Layout(self.pages, self.offsets_R1.clone(), self.lengths_R.clone(), self.free)
        columns = {name: column.clone() for name, column in self.columns.items()}
        other = RaggedStore(layout, self.num_heads, self.slack, columns, self.codec, self.key_scales_G2D)
        other.precision = self.precision
        other.packed = None if self.packed is None else self.packed.fork()
        return other

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "RaggedStore":
        """The sequences `idx`, in that order; an index may repeat (beams, `batch_repeat_interleave`)."""
        idx, heads = idx.to(self.device), self.num_heads
        row_R = (idx[:, None] * heads + torch.arange(heads, device=self.device)).flatten()
        from_N = spans(self.offsets_R1[row_R], self.lengths_R[row_R])
        layout = Layout.of(self.lengths_R[row_R], self.slack)
        other = gathered(layout, [(self, from_N, layout.index_N())], self.slack)
        other._forget_groups_()
        other.precision = self.precision
        packed = None if self.packed is None else self.packed.select_batch(idx)
        other.packed = packed if packed is not None and packed.entries_held else None
        return other

    @normal_tensors()
    def lay_out_anew_(self, layout: Layout, from_N: Int[Tensor, " N"], moved: Collection[str] = ()) -> None:
        """Move these entries to new rooms; these columns were moved already. An old column is let go before
        the next new one is made."""
        layout.fill_(self.columns, (from_N,), moved)
        self._take_(layout)

    def _take_(self, layout: Layout) -> None:
        self.pages, self.offsets_R1 = layout.pages, layout.offsets_R1
        self.lengths_R, self.free = layout.lengths_R, layout.free
        self.step_rows = None

    @normal_tensors()
    def _forget_groups_(self) -> None:
        """Let go of scales whose entries all went."""
        if self.key_scales_G2D is None:
            return
        index_N = self.index_N()
        named, groups_N = self.columns[GROUPS][index_N].unique(return_inverse=True)
        if len(named) < len(self.key_scales_G2D):
            self.key_scales_G2D = self.key_scales_G2D[named.long()]
            self.columns[GROUPS].zero_().index_copy_(0, index_N, groups_N.to(torch.int32))

    def make_room_(self, num_new: int) -> None:
        """Make room for `num_new` more tokens in every row, and for some after them."""
        lengths = self.lengths_R.tolist()
        self.free = count_free(self.pages, lengths)  # it was a lower bound: padding was counted
        if self.free >= num_new:
            return
        more = max(self.slack, int(GROWTH * sum(lengths) / len(lengths)))
        self.lay_out_anew_(Layout.of(self.lengths_R, num_new + more), self.index_N())

    def came_(self, num: int) -> None:
        """Count so many entries of each row, which were written behind it."""
        self.lengths_R += num
        self.step_rows, self.free = None, count_free(self.pages, self.lengths_R.tolist())


def _width(*columns: Tensor) -> int:
    """Bytes of these columns an entry."""
    return sum(math.prod(column.shape[1:]) * column.element_size() for column in columns)


def tail_index_RS(
    store: RaggedStore, valid_BS: Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, "R S"], Bool[Tensor, "R S"]]:
    """Index of each row's last S tokens into the store (padding: that of the row's room), and which are
    real."""
    starts_R1 = store.offsets_R1[:-1, None]
    ends_R1 = starts_R1 + store.lengths_R[:, None]
    valid_RS = valid_BS.to(ends_R1.device).repeat_interleave(store.num_heads, dim=0)
    rank_RS = valid_RS.cumsum(-1)
    return torch.where(valid_RS, ends_R1 - rank_RS[:, -1:] + rank_RS - 1, starts_R1), valid_RS


@normal_tensors()
def gathered(layout: Layout, parts: Sequence[tuple[RaggedStore, Tensor, Tensor]], slack: int) -> RaggedStore:
    """A store of this layout, with entries of others of one kind: of each store those at the first index, at
    the second one, and zeros in columns that it has not. Nothing is encoded again."""
    first, columns = parts[0][0], {}
    likes = {name: column for store, _, _ in parts for name, column in store.columns.items()}
    for name, like in likes.items():
        columns[name] = like.new_zeros(layout.pages.num_pages * PAGE, *like.shape[1:])
        counted = 0
        for store, from_N, to_N in parts:
            if name in store.columns:
                copy_(columns[name], to_N, store.columns[name], (from_N,))
            if name == GROUPS and store.key_scales_G2D is not None:
                columns[name][to_N] += counted
                counted += len(store.key_scales_G2D)
    scales = [store.key_scales_G2D for store, _, _ in parts if store.key_scales_G2D is not None]
    table = torch.cat(scales) if scales else None
    return RaggedStore(layout, first.num_heads, slack, columns, first.codec, table)


def stacked(stores: Sequence[RaggedStore], slack: int) -> RaggedStore:
    """Stack stores of one layer along the batch; rows keep their lengths.

    Args:
        slack: free entries per plain row.

    Raises:
        ValueError: the bits in which they are packed differ.
    """
    coded = [store for store in stores if store.packed is not None]
    bits = {store.precision.bits for store in coded if store.precision is not None}
    if len(bits) > 1:
        raise ValueError(
            f"caches to stack hold entries in {' and '.join(map(str, sorted(bits)))} bits, and one cache "
            "holds them in one number of bits: stack those of one precision, beside those of none."
        )
    whole = _stacked(stores, stores, slack)
    if coded:
        whole.precision = coded[0].precision
        whole.packed = _stacked([store.packed for store in stores], stores, 0)
    return whole


def _stacked(parts: Sequence[RaggedStore | None], stores: Sequence[RaggedStore], slack: int) -> RaggedStore:
    """Stack a part of each store; None holds nothing."""
    lengths = [
        torch.zeros_like(store.lengths_R) if part is None else part.lengths_R
        for part, store in zip(parts, stores, strict=True)
    ]
    layout = Layout.of(torch.cat(lengths), slack)
    places = layout.index_N().split([int(lengths_R.sum()) for lengths_R in lengths])
    there = zip(parts, places, strict=True)
    return gathered(layout, [(part, part.index_N(), to_N) for part, to_N in there if part is not None], slack)

"""Stores entries of one layer in fewer bits, or their keys in fewer channels.

A `PackedStore` is a `RaggedStore` whose columns of keys and values are codes (`retain.kernels.codes`), with
what decodes them beside: scales of entries are columns too, and move with them; scales that entries share
(keys by channel) are a table, in which each entry names its group. An entry is quantised once: evictions move
its codes, and a group that nobody names any more is dropped from the table. Pruned channels, and the factors
by which channels of keys were balanced before they became codes, are tables of the rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.store import LOG_WEIGHT, RaggedStore, _filled, _Layout, normal_tensors
from retain.kernels.codes import Codes, decode, encode
from retain.kernels.compact.reference import copy_, spans
from retain.kernels.ragged_attention.pages import PAGE

# Columns that are no numbers of an entry: its scales, and the group that its key shares.
KEY_SCALES, VALUE_SCALES, GROUPS = "key_scales", "value_scales", "groups"
# Tables of rows.
CHANNELS, BALANCE = "channels", "balance"


@dataclass(frozen=True)
class Form:
    """How entries are held; stores of one form can be stacked.

    Args:
        bits: of a code; None: numbers as they are.
        by: whether scales of keys are of a channel over several entries (`channel`), or of an entry over
            several channels (`token`).
        group: entries, or channels, that share a scale of keys.
        span: channels that share a scale of values.
        width: channels of keys that are held.
        head_dim, value_dim: D and V, channels of keys and of values.
        balanced: whether keys were multiplied by a factor for each channel before they became codes.
        dtype: precision of the numbers that codes stand for.
    """

    bits: int | None
    by: str
    group: int
    span: int
    width: int
    head_dim: int
    value_dim: int
    balanced: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        parts = [] if self.bits is None else [f"{self.bits} bits"]
        parts += [f"{self.width} of {self.head_dim} channels"] if self.width < self.head_dim else []
        return ", ".join(parts)


class PackedStore(RaggedStore):
    """Entries of one layer in one form.

    Attributes:
        form: how they are held.
        tables: `key_scales` `[G, 2, D]` (keys by channel), `channels` `[R, K]` int16 (pruned keys: those that
            are held, ascending), `balance` `[R, D]` float32 (keys are held times this).
    """

    form: Form
    tables: dict[str, Tensor]

    @classmethod
    @normal_tensors()
    def encoded(
        cls,
        form: Form,
        keys_ND: Float[Tensor, "N D"],
        values_NV: Float[Tensor, "N V"],
        positions_N: Int[Tensor, " N"],
        lengths_R: Int[Tensor, " R"],
        num_heads: int,
        *,
        beside: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
    ) -> "PackedStore":
        """Encode entries that come row after row, in order of time.

        Args:
            beside: side columns `[N, ...]`.
            rows: `channels` and `balance`, where the form has them.

        Raises:
            ValueError: numbers that float16 does not hold.
        """
        lengths_R = lengths_R.to(torch.int64)
        row_N = torch.repeat_interleave(lengths_R)
        tables = dict(rows)
        if form.balanced:
            keys_ND = keys_ND.float() * rows[BALANCE][row_N]
        if form.width < form.head_dim:
            keys_ND = keys_ND.gather(1, rows[CHANNELS].long()[row_N])
        entries = {"keys": keys_ND, "values": values_NV, "positions": positions_N.to(torch.int32)}
        if form.bits is not None:
            values = encode(values_NV, form.bits, form.span)
            entries |= {"values": values.codes_CW, VALUE_SCALES: values.scales_G2N}
            if form.by == "channel":
                groups_N = groups_of(lengths_R, form.group)
                keys = encode(keys_ND, form.bits, 1, groups_N)
                tables[KEY_SCALES] = keys.scales_G2N
                entries[GROUPS] = groups_N.to(torch.int32)
            else:
                keys = encode(keys_ND, form.bits, form.group)
                entries[KEY_SCALES] = keys.scales_G2N
            entries["keys"] = keys.codes_CW
        return cls.of_columns(form, entries, lengths_R, num_heads, beside=beside, tables=tables)

    @classmethod
    @normal_tensors()
    def of_columns(
        cls,
        form: Form,
        entries: Mapping[str, Tensor],
        lengths_R: Int[Tensor, " R"],
        num_heads: int,
        *,
        beside: Mapping[str, Tensor],
        tables: Mapping[str, Tensor],
    ) -> "PackedStore":
        """Lay out what is in this form already, row after row.

        Args:
            entries: columns `[N, ...]`: `keys`, `values`, `positions`, and of codes `value_scales` and either
                `groups` or `key_scales`.
            beside: side columns `[N, ...]`.
            tables: as the attribute.
        """
        layout = _Layout.of(lengths_R, 0)
        store: PackedStore = object.__new__(cls)
        store.form, store.tables = form, {**tables}
        store._begin_(layout, num_heads, 0, entries, beside)
        index_N = layout.index_N()
        for columns, name in store._columns():
            columns[name] = _filled(layout, index_N, columns[name], None)
        return store

    @property
    def keys(self) -> Codes | Tensor:
        """What attention reads: codes, or numbers."""
        form, columns = self.form, self._held
        if form.bits is None:
            return columns["keys"]
        if form.by == "channel":
            groups, scales, span = columns[GROUPS], self.tables[KEY_SCALES], 1
        else:
            groups, scales, span = None, columns[KEY_SCALES], form.group
        return Codes(columns["keys"], scales, groups, form.bits, span, form.width)

    @property
    def values(self) -> Codes | Tensor:
        """What attention reads: codes, or numbers."""
        form, columns = self.form, self._held
        if form.bits is None:
            return columns["values"]
        scales = columns[VALUE_SCALES]
        return Codes(columns["values"], scales, None, form.bits, form.span, form.value_dim)

    @property
    def row_C(self) -> Int[Tensor, " C"]:
        """Row of each place."""
        return self.pages.row_pages.repeat_interleave(PAGE)

    def decoded(self) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C V"]]:
        """The keys and values that are held, rounded to the model's precision; channels that were pruned are
        zeros. A copy."""
        form = self.form
        keys, values = self.keys, self.values
        keys_CK = decode(keys, torch.float32) if isinstance(keys, Codes) else keys
        values_CV = decode(values, form.dtype) if isinstance(values, Codes) else values
        row_C = self.row_C
        if form.width < form.head_dim:
            whole = keys_CK.new_zeros(len(keys_CK), form.head_dim)
            keys_CK = whole.scatter_(1, self.tables[CHANNELS].long()[row_C], keys_CK)
        if form.balanced:
            keys_CK = keys_CK / self.tables[BALANCE][row_C]
        return keys_CK.to(form.dtype), values_CV

    def asked_by(self, queries_BQSD: Float[Tensor, "B Q S D"]) -> Float[Tensor, "B Q S K"]:
        """What queries ask of these keys: the channels that are held, divided by what keys were multiplied
        by."""
        form = self.form
        if form.width == form.head_dim and not form.balanced:
            return queries_BQSD
        B, Q, S, D = queries_BQSD.shape
        asked = queries_BQSD.reshape(self.num_rows, -1, S, D)
        if form.balanced:
            asked = (asked.float() / self.tables[BALANCE][:, None, None]).to(queries_BQSD.dtype)
        if form.width < form.head_dim:
            index = self.tables[CHANNELS].long()[:, None, None].expand(-1, asked.shape[1], S, -1)
            asked = asked.gather(-1, index)
        return asked.reshape(B, Q, S, -1)

    @property
    def bytes_B(self) -> Int[Tensor, " B"]:
        """Bytes of all that attention reads of the entries that each sequence holds: codes, scales, groups,
        and tables of the rows that hold some. A group that copies of a sequence share counts for each."""
        rows_B = (self.lengths_BH > 0).sum(-1)
        return self.lengths_BH.sum(-1) * self._each() + rows_B * self._of_a_row() + self._groups_B()

    @property
    def bytes_held(self) -> int:
        """The same, of all sequences; a group that copies share counts once."""
        rows = int((self.lengths_R > 0).sum())
        scales = sum(_size(table) for name, table in self.tables.items() if name == KEY_SCALES)
        return self.entries_held * self._each() + rows * self._of_a_row() + scales

    def _each(self) -> int:
        """Bytes that attention reads of an entry alone."""
        columns = [column for name, column in self._held.items() if name != "positions"]
        columns += [column for name, column in self.beside.items() if name == LOG_WEIGHT]
        return sum(math.prod(column.shape[1:]) * column.element_size() for column in columns)

    def _of_a_row(self) -> int:
        """Bytes of a row's tables."""
        return sum(_size(table[:1]) for name, table in self.tables.items() if name != KEY_SCALES)

    def _groups_B(self) -> Int[Tensor, " B"]:
        """Bytes of the scales of groups that the keys of each sequence name."""
        if GROUPS not in self._held:
            return torch.zeros_like(self.lengths_BH[:, 0])
        scales = self.tables[KEY_SCALES]
        sequence_N = self.rows_N() // self.num_heads
        pairs = (sequence_N * len(scales) + self._held[GROUPS][self.index_N()]).unique()
        counts_B = torch.bincount(pairs // max(1, len(scales)), minlength=len(self.lengths_BH))
        return counts_B * _size(scales[:1])

    def storages(self) -> list[Tensor]:
        return [*super().storages(), *self.tables.values()]

    def compact_(self, keep_N: Tensor) -> None:
        if keep_N.numel() and not bool(keep_N.any()):  # no room stays whose places would name a group
            return self.filter_(keep_N)
        super().compact_(keep_N)
        self._forget_groups_()

    def filter_(self, keep_N: Tensor) -> None:
        super().filter_(keep_N)
        self._forget_groups_()

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "PackedStore":
        other = super().select_batch(idx)
        H = self.num_heads
        rows = (
            idx.to(self.lengths_R.device)[:, None] * H + torch.arange(H, device=self.lengths_R.device)
        ).flatten()
        for name in {CHANNELS, BALANCE} & set(self.tables):
            other.tables[name] = self.tables[name][rows]
        other._forget_groups_()
        return other

    def _like(self, layout: _Layout) -> "PackedStore":
        other = super()._like(layout)
        other.form, other.tables = self.form, {**self.tables}
        return other

    @normal_tensors()
    def _forget_groups_(self) -> None:
        """Let go of scales whose entries all went."""
        if GROUPS not in self._held:
            return
        index_N = self.index_N()
        named, groups_N = self._held[GROUPS][index_N].unique(return_inverse=True)
        if len(named) < len(self.tables[KEY_SCALES]):
            self.tables[KEY_SCALES] = self.tables[KEY_SCALES][named.long()]
            self._held[GROUPS].zero_().index_copy_(0, index_N, groups_N.to(torch.int32))


def _size(table: Tensor) -> int:
    return table.numel() * table.element_size()


def groups_of(lengths_R: Int[Tensor, " R"], group: int) -> Int[Tensor, " N"]:
    """Group of each entry, row after row: `group` neighbours of a row share one, the last of a row may be
    fewer.

    Examples:
        >>> groups_of(torch.tensor([3, 0, 2]), 2).tolist()
        [0, 0, 1, 2, 2]
    """
    counts_R = (lengths_R + group - 1) // group
    firsts_R = counts_R.cumsum(0) - counts_R
    place_N = spans(torch.zeros_like(lengths_R), lengths_R)
    return firsts_R[torch.repeat_interleave(lengths_R)] + place_N // group


@normal_tensors()
def joined(stores: Sequence[PackedStore], *, stack: bool) -> PackedStore:
    """Several stores of one form in one.

    Args:
        stores: with the same side columns.
        stack: along the batch, each store's rows behind those of the one before; else row by row, each
            store's entries behind those of the one before, of the same rows and with the same tables of rows.
    """
    first = stores[0]
    if len(stores) == 1:
        return first
    lengths = [store.lengths_R.long() for store in stores]
    layout = _Layout.of(torch.cat(lengths) if stack else torch.stack(lengths).sum(0), 0)
    whole = first._like(layout)
    if stack:
        parts = list(layout.index_N().split([store.entries_held for store in stores]))
    else:
        before_KR = torch.stack(lengths).cumsum(0) - torch.stack(lengths)
        parts = [
            spans(layout.offsets_R1[:-1] + before_R, own_R)
            for before_R, own_R in zip(before_KR, lengths, strict=True)
        ]
    counted = 0
    for columns, name in whole._columns():
        columns[name] = columns[name].new_zeros(layout.pages.num_pages * PAGE, *columns[name].shape[1:])
    for store, index_N in zip(stores, parts, strict=True):
        for columns, name in whole._columns():
            source = (store.beside if columns is whole.beside else store._entries)[name]
            copy_(columns[name], index_N, source, (store.index_N(),))
        if GROUPS in whole._held:
            whole._held[GROUPS][index_N] += counted
            counted += len(store.tables[KEY_SCALES])
    for name in first.tables:
        if stack or name == KEY_SCALES:
            whole.tables[name] = torch.cat([store.tables[name] for store in stores])
    return whole

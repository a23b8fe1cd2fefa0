"""Stores entries of one layer in fewer bits.

A `PackedStore` is a `RaggedStore` whose columns of keys and values are codes (`retain.kernels.codes`), with
what decodes them beside: scales of values are columns too, and move with their entries; scales of keys, which
entries share by channel, are a table, in which each entry names its group. An entry is quantised once:
evictions move its codes, and a group that nobody names any more is dropped from the table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.store import LOG_WEIGHT, Layout, RaggedStore, _filled, normal_tensors
from retain.kernels.codes import Codes, decode, encode
from retain.kernels.compact.reference import copy_, spans
from retain.kernels.ragged_attention.pages import PAGE
from retain.precision import GROUP

# Columns that are no numbers of an entry: the scales of its value, and the group that its key shares.
VALUE_SCALES, GROUPS = "value_scales", "groups"


@dataclass(frozen=True)
class Form:
    """How entries are held; stores of one form can be stacked.

    Args:
        bits: of a code.
        head_dim, value_dim: D and V, channels of keys and of values.
        dtype: precision of the numbers that codes stand for.
    """

    bits: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Channels that share a scale of values."""
        return min(GROUP, self.value_dim)


class PackedStore(RaggedStore):
    """Entries of one layer in one form.

    Attributes:
        form: how they are held.
        key_scales_G2D: scales of each group of keys.
    """

    form: Form
    key_scales_G2D: Float[Tensor, "G 2 D"]

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
    ) -> "PackedStore":
        """Encode entries that come row after row, in order of time.

        Args:
            beside: side columns `[N, ...]`.

        Raises:
            ValueError: numbers that float16 does not hold.
        """
        lengths_R = lengths_R.to(torch.int64)
        groups_N = groups_of(lengths_R)
        values = encode(values_NV, form.bits, form.span)
        keys = encode(keys_ND, form.bits, 1, groups_N)
        entries = {
            "keys": keys.codes_CW,
            "values": values.codes_CW,
            "positions": positions_N.to(torch.int32),
            VALUE_SCALES: values.scales_G2N,
            GROUPS: groups_N.to(torch.int32),
        }
        return cls.of_columns(form, entries, lengths_R, num_heads, beside=beside, key_scales=keys.scales_G2N)

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
        key_scales: Float[Tensor, "G 2 D"],
    ) -> "PackedStore":
        """Lay out what is in this form already, row after row.

        Args:
            entries: columns `[N, ...]`: `keys`, `values`, `positions`, `value_scales` and `groups`.
            beside: side columns `[N, ...]`.
            key_scales: as the attribute.
        """
        layout = Layout.of(lengths_R, 0)
        store: PackedStore = object.__new__(cls)
        store.form, store.key_scales_G2D = form, key_scales
        store._begin_(layout, num_heads, 0, entries, beside)
        index_N = layout.index_N()
        for columns, name in store._columns():
            columns[name] = _filled(layout, index_N, columns[name], None)
        return store

    @property
    def keys(self) -> Codes:
        """What attention reads."""
        form, columns = self.form, self._held
        return Codes(columns["keys"], self.key_scales_G2D, columns[GROUPS], form.bits, 1, form.head_dim)

    @property
    def values(self) -> Codes:
        """What attention reads."""
        form, columns = self.form, self._held
        return Codes(columns["values"], columns[VALUE_SCALES], None, form.bits, form.span, form.value_dim)

    def decoded(self) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C V"]]:
        """The keys and values that are held, rounded to the model's precision: a copy."""
        dtype = self.form.dtype
        return decode(self.keys, torch.float32).to(dtype), decode(self.values, dtype)

    @property
    def bytes_B(self) -> Int[Tensor, " B"]:
        """Bytes of all that attention reads of the entries that each sequence holds: codes, scales and
        groups. A group that copies of a sequence share counts for each."""
        return self.lengths_BH.sum(-1) * self._each() + self._groups_B()

    @property
    def bytes_held(self) -> int:
        """The same, of all sequences; a group that copies share counts once."""
        return self.entries_held * self._each() + _size(self.key_scales_G2D)

    def _each(self) -> int:
        """Bytes that attention reads of an entry alone."""
        columns = [column for name, column in self._held.items() if name != "positions"]
        columns += [column for name, column in self.beside.items() if name == LOG_WEIGHT]
        return sum(math.prod(column.shape[1:]) * column.element_size() for column in columns)

    def _groups_B(self) -> Int[Tensor, " B"]:
        """Bytes of the scales of groups that the keys of each sequence name."""
        scales = self.key_scales_G2D
        sequence_N = self.rows_N() // self.num_heads
        pairs = (sequence_N * len(scales) + self._held[GROUPS][self.index_N()]).unique()
        counts_B = torch.bincount(pairs // max(1, len(scales)), minlength=len(self.lengths_BH))
        return counts_B * _size(scales[:1])

    def storages(self) -> list[Tensor]:
        return [*super().storages(), self.key_scales_G2D]

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
        other._forget_groups_()
        return other

    def _like(self, layout: Layout) -> "PackedStore":
        other = super()._like(layout)
        other.form, other.key_scales_G2D = self.form, self.key_scales_G2D
        return other

    @normal_tensors()
    def _forget_groups_(self) -> None:
        """Let go of scales whose entries all went."""
        index_N = self.index_N()
        named, groups_N = self._held[GROUPS][index_N].unique(return_inverse=True)
        if len(named) < len(self.key_scales_G2D):
            self.key_scales_G2D = self.key_scales_G2D[named.long()]
            self._held[GROUPS].zero_().index_copy_(0, index_N, groups_N.to(torch.int32))


def _size(table: Tensor) -> int:
    return table.numel() * table.element_size()


def groups_of(lengths_R: Int[Tensor, " R"]) -> Int[Tensor, " N"]:
    """Group of each entry, row after row: `GROUP` neighbours of a row share one, the last of a row may be
    fewer.

    Examples:
        >>> groups_of(torch.tensor([34, 0, 2])).tolist()[30:]
        [0, 0, 1, 1, 2, 2]
    """
    counts_R = (lengths_R + GROUP - 1) // GROUP
    firsts_R = counts_R.cumsum(0) - counts_R
    place_N = spans(torch.zeros_like(lengths_R), lengths_R)
    return firsts_R[torch.repeat_interleave(lengths_R)] + place_N // GROUP


@normal_tensors()
def joined(stores: Sequence[PackedStore], *, stack: bool) -> PackedStore:
    """Several stores of one form in one.

    Args:
        stores: with the same side columns.
        stack: along the batch, each store's rows behind those of the one before; else row by row, each
            store's entries behind those of the one before, of the same rows.
    """
    first = stores[0]
    if len(stores) == 1:
        return first
    lengths = [store.lengths_R.long() for store in stores]
    layout = Layout.of(torch.cat(lengths) if stack else torch.stack(lengths).sum(0), 0)
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
            source = (store.beside if columns is whole.beside else store._held)[name]
            copy_(columns[name], index_N, source, (store.index_N(),))
        whole._held[GROUPS][index_N] += counted
        counted += len(store.key_scales_G2D)
    whole.key_scales_G2D = torch.cat([store.key_scales_G2D for store in stores])
    return whole

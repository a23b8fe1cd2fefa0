"""The store of one layer: its newest entries as they are, the others as codes where a precision says so.

New tokens come into the plain rows; all that is packed came before them. The order of all entries is that of
the parts, packed ones first, and in each row after row.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.cache.layout import Layout, bytes_of, normal_tensors, spans
from retain.cache.precision import Codec, Precision
from retain.cache.store import LOG_WEIGHT, RaggedStore, gathered


class Store:
    """The entries that one layer holds.

    Attributes:
        plain: the newest, as they are.
        packed: the others, as codes; None: there are none.
        precision: how entries are packed; None: they are not.
    """

    def __init__(
        self, plain: RaggedStore, precision: Precision | None = None, packed: RaggedStore | None = None
    ):
        self.plain, self.precision = plain, precision
        self.packed = packed if packed is not None and packed.entries_held else None

    @property
    def parts(self) -> list[RaggedStore]:
        """Those that there are, in the order of entries."""
        return [self.plain] if self.packed is None else [self.packed, self.plain]

    def _joined(self, of: Callable[[RaggedStore], Tensor]) -> Tensor:
        found = [of(part) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def num_heads(self) -> int:
        return self.plain.num_heads

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    @property
    def lengths_R(self) -> Int[Tensor, " R"]:
        """Entries held in each row."""
        lengths_R = self.plain.lengths_R
        return lengths_R if self.packed is None else lengths_R + self.packed.lengths_R

    @property
    def lengths_BH(self) -> Int[Tensor, "B H"]:
        """Entries held, per sequence and KV head (int64)."""
        return self.lengths_R.to(torch.int64).view(-1, self.num_heads)

    @property
    def entries_held(self) -> int:
        return sum(part.entries_held for part in self.parts)

    @property
    def bytes_B(self) -> Int[Tensor, " B"]:
        """Bytes of all that attention reads of the entries that each sequence holds."""
        return torch.stack([part.bytes_B for part in self.parts]).sum(0)

    @property
    def bytes_held(self) -> int:
        """Bytes of all sequences; what copies of a sequence share counts once."""
        return sum(part.bytes_held for part in self.parts)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage: slack, positions, side columns and tables included."""
        return bytes_of([tensor for part in self.parts for tensor in part.storages()])

    @property
    def keys_CD(self) -> Float[Tensor, "C D"]:
        """Keys of all entries, decoded."""
        return self._joined(lambda part: part.decoded()[0])

    @property
    def values_CD(self) -> Float[Tensor, "C V"]:
        return self._joined(lambda part: part.decoded()[1])

    @property
    def positions_C(self) -> Int[Tensor, " C"]:
        return self._joined(lambda part: part.positions_C)

    @property
    def side(self) -> dict[str, Tensor]:
        """Side columns of all entries, to be read; both parts have the same."""
        found = [part.side for part in self.parts]
        return found[-1] if len(found) == 1 else {k: torch.cat([one[k] for one in found]) for k in found[-1]}

    @property
    def log_weight_C(self) -> Float[Tensor, " C"] | None:
        return self.side.get(LOG_WEIGHT)

    def index_N(self) -> Int[Tensor, " N"]:
        """Where every entry lies in the columns, part after part."""
        before = 0 if self.packed is None else self.packed.num_places
        return self._joined(lambda part: part.index_N() + (before if part is self.plain else 0))

    def rows_N(self) -> Int[Tensor, " N"]:
        """Row `b * H + h` of every entry, part after part."""
        return self._joined(RaggedStore.rows_N)

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values (decoded), positions and row of every entry, part after part."""
        keys, values, positions, rows = zip(*(part.flat() for part in self.parts), strict=True)
        return torch.cat(keys), torch.cat(values), torch.cat(positions), torch.cat(rows)

    def row(self, sequence: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values (decoded) and positions of one row, in order of time (for looking at)."""
        keys_ND, values_NV, positions_N, rows_N = self.flat()
        chosen_N = rows_N == sequence * self.num_heads + head
        return keys_ND[chosen_N], values_NV[chosen_N], positions_N[chosen_N]

    def set_side_(self, name: str, values_BHS: Tensor, valid_BS: Bool[Tensor, "B S"]) -> None:
        """Write a side column for the last S tokens of every row; a new column is zeros elsewhere."""
        self.plain.set_side_(name, values_BHS, valid_BS)
        if self.packed is not None and name not in self.packed.columns:
            shape = self.packed.num_places, *values_BHS.shape[3:]
            self.packed.columns[name] = values_BHS.new_zeros(shape)

    def write_side_(self, name: str, values_N: Tensor) -> None:
        """Write a side column for every entry, in the order of `index_N()`."""
        counts = [part.entries_held for part in self.parts]
        for part, values in zip(self.parts, values_N.split(counts), strict=True):
            part.write_side_(name, values)

    def drop_side_(self, *names: str) -> None:
        """Let go of side columns."""
        for part in self.parts:
            for name in names:
                part.columns.pop(name, None)

    def evict_(self, keep_N: Bool[Tensor, " N"], *, in_place: bool = False) -> None:
        """Keep some entries (in the order of `index_N()`), in rooms of their size plus slack; in place: rooms
        stay, and their slack grows."""
        assert keep_N.shape == (self.entries_held,) and keep_N.dtype == torch.bool
        evict_ = RaggedStore.compact_ if in_place else RaggedStore.filter_
        if self.packed is not None:
            packed_N, keep_N = keep_N.split([self.packed.entries_held, self.plain.entries_held])
            if bool(packed_N.any()):
                evict_(self.packed, packed_N)
            else:
                self.packed = None
        evict_(self.plain, keep_N)

    def pack_(self) -> None:
        """Pack the plain entries but for the last `recent` of each row, where there is a precision.

        Raises:
            ValueError: numbers that float16 does not hold; nothing was changed.
        """
        if self.precision is None:
            return
        plain, old = self.plain, self.packed
        behind_N = (plain.offsets_R1[:-1] + plain.lengths_R)[plain.rows_N()] - plain.index_N()
        goes_N = behind_N > self.precision.recent
        if not bool(goes_N.any()):
            return
        made = encoded(plain, self.precision.bits, goes_N)
        if old is not None:
            layout = Layout.of(old.lengths_R + made.lengths_R, 0)
            starts_R = layout.offsets_R1[:-1]
            old_N, made_N = spans(starts_R, old.lengths_R), spans(starts_R + old.lengths_R, made.lengths_R)
            made = gathered(layout, [(old, old.index_N(), old_N), (made, made.index_N(), made_N)], 0)
        plain.filter_(~goes_N)
        self.packed = made

    def fork(self) -> "Store":
        """An independent copy."""
        packed = None if self.packed is None else self.packed.fork()
        return Store(self.plain.fork(), self.precision, packed)

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "Store":
        """The sequences `idx`, in that order; an index may repeat."""
        packed = None if self.packed is None else self.packed.select_batch(idx)
        return Store(self.plain.select_batch(idx), self.precision, packed)

    def crop_(self, before_B: Int[Tensor, " B"]) -> None:
        """Forget, in each sequence, the entries at positions `>= before`, and give their bytes back."""
        before_N = before_B.to(self.device)[self.rows_N() // self.num_heads]
        self.evict_(self.positions_C[self.index_N()] < before_N)


@normal_tensors()
def encoded(plain: RaggedStore, bits: int, which_N: Bool[Tensor, " N"]) -> RaggedStore:
    """Encode these entries of a plain store.

    Raises:
        ValueError: numbers that float16 does not hold.
    """
    index_N, rows_N = plain.index_N()[which_N], plain.rows_N()[which_N]
    codec = Codec(bits, plain.keys_CD.shape[1], plain.values_CD.shape[1], plain.dtype)
    lengths_R = torch.bincount(rows_N, minlength=len(plain.lengths_R))
    columns, table = codec.encode(plain.keys_CD[index_N], plain.values_CD[index_N], lengths_R)
    columns |= {name: plain.columns[name][index_N] for name in ("positions", *plain.side)}
    return RaggedStore.from_rows(columns, lengths_R, plain.num_heads, 0, codec, table)


def stacked(stores: Sequence[Store], slack: int | None = None) -> Store:
    """Stack stores of one layer, of the same side columns, along the batch; rows keep their lengths.

    Args:
        slack: free entries per plain row; default: the largest of the stores'.

    Raises:
        ValueError: the bits in which they are packed differ.
    """
    bits = {store.packed.codec.bits for store in stores if store.packed is not None and store.packed.codec}
    if len(bits) > 1:
        raise ValueError(
            f"caches to stack hold entries in {' and '.join(map(str, sorted(bits)))} bits, and one cache "
            "holds them in one number of bits: stack those of one precision, beside those of none."
        )
    slack = max(store.plain.slack for store in stores) if slack is None else slack
    plain = _stacked([store.plain for store in stores], stores, slack)
    if not bits:
        return Store(plain)
    packed = _stacked([store.packed for store in stores], stores, 0)
    return Store(plain, next(store.precision for store in stores if store.packed is not None), packed)


def _stacked(parts: Sequence[RaggedStore | None], stores: Sequence[Store], slack: int) -> RaggedStore:
    """Stack a part of each store; None holds nothing."""
    lengths = [
        torch.zeros_like(store.plain.lengths_R) if part is None else part.lengths_R
        for part, store in zip(parts, stores, strict=True)
    ]
    layout = Layout.of(torch.cat(lengths), slack)
    places = layout.index_N().split([int(lengths_R.sum()) for lengths_R in lengths])
    there = zip(parts, places, strict=True)
    return gathered(layout, [(part, part.index_N(), to_N) for part, to_N in there if part is not None], slack)

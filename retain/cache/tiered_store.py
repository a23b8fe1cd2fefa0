"""Stores one layer's entries in two tiers: the last of each row as they are, the others packed
(`retain.cache.packed_store`).

New tokens always come into the plain tier, so what a query sees of it is a count as before; all that is
packed came before them. Where an order of all entries is needed, it is that of the tiers, packed ones first,
and in each row after row: masks and side columns over all entries go by `index_N()`.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.cache.packed_store import Form, PackedStore, joined
from retain.cache.store import LOG_WEIGHT, RaggedStore, bytes_of, normal_tensors, stacked
from retain.kernels import backend
from retain.precision import Precision


class TieredStore:
    """The entries that one layer holds, in tiers; what `retain.cache.store.RaggedStore` is for one.

    Attributes:
        plain: entries as they are, the newest.
        packed: the others; None: there are none.
        precision: how entries are packed.
    """

    def __init__(self, plain: RaggedStore, precision: Precision, packed: PackedStore | None = None):
        self.plain, self.precision = plain, precision
        self.packed = packed if packed is not None and packed.entries_held else None

    @property
    def tiers(self) -> list[RaggedStore]:
        """Those that there are, in the order of entries."""
        return [self.plain] if self.packed is None else [self.packed, self.plain]

    @property
    def num_heads(self) -> int:
        return self.plain.num_heads

    @property
    def num_rows(self) -> int:
        return self.plain.num_rows

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    @property
    def path(self) -> backend.Path:
        """The path of attention over the plain tier; the packed one takes the same."""
        return self.plain.path

    @property
    def num_places(self) -> int:
        """C: places of all tiers, free ones included."""
        return sum(tier.num_places for tier in self.tiers)

    @property
    def lengths_R(self) -> Int[Tensor, " R"]:
        """Entries held in each row, over all tiers."""
        return torch.stack([tier.lengths_R for tier in self.tiers]).sum(0, dtype=torch.int32)

    @property
    def lengths_BH(self) -> Int[Tensor, "B H"]:
        return self.lengths_R.to(torch.int64).view(-1, self.num_heads)

    @property
    def entries_held(self) -> int:
        return sum(tier.entries_held for tier in self.tiers)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry as it was: its key and its value."""
        return self.plain.entry_bytes

    @property
    def bytes_B(self) -> Int[Tensor, " B"]:
        """Bytes of all that attention reads of the entries that each sequence holds, of each in its tier."""
        return torch.stack([tier.bytes_B for tier in self.tiers]).sum(0)

    @property
    def bytes_held(self) -> int:
        """The same, of all sequences; what copies of a sequence share counts once."""
        return sum(tier.bytes_held for tier in self.tiers)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage behind the tiers."""
        return bytes_of([tensor for tier in self.tiers for tensor in tier.storages()])

    @property
    def keys_CD(self) -> Float[Tensor, "C D"]:
        """Keys of all tiers, decoded: a copy."""
        return torch.cat([tier.decoded()[0] for tier in self.tiers])

    @property
    def values_CD(self) -> Float[Tensor, "C V"]:
        """Values of all tiers, decoded: a copy."""
        return torch.cat([tier.decoded()[1] for tier in self.tiers])

    @property
    def positions_C(self) -> Int[Tensor, " C"]:
        return torch.cat([tier.positions_C for tier in self.tiers])

    @property
    def beside(self) -> Mapping[str, Tensor]:
        """Side columns of all tiers, copies: zeros where a tier has none. They are written by
        `set_beside_` and `write_beside_`."""
        names = dict.fromkeys(name for tier in self.tiers for name in tier.beside)
        return {name: torch.cat([_side(tier, name, self.tiers) for tier in self.tiers]) for name in names}

    @property
    def log_weight_C(self) -> Float[Tensor, " C"] | None:
        return self.beside.get(LOG_WEIGHT)

    def index_N(self) -> Int[Tensor, " N"]:
        """Where every entry lies in the columns, tier after tier."""
        before, parts = 0, []
        for tier in self.tiers:
            parts.append(tier.index_N() + before)
            before += tier.num_places
        return torch.cat(parts)

    def rows_N(self) -> Int[Tensor, " N"]:
        """Row `b * H + h` of every entry, tier after tier."""
        return torch.cat([tier.rows_N() for tier in self.tiers])

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values (decoded), positions and row of every entry, tier after tier."""
        parts = [tier.flat() for tier in self.tiers]
        keys, values, positions, rows = (torch.cat(own) for own in zip(*parts, strict=True))
        return keys, values, positions, rows

    def row(self, sequence: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values (decoded) and positions of one row, by position."""
        keys_ND, values_NV, positions_N, rows_N = self.flat()
        own = rows_N == sequence * self.num_heads + head
        order = positions_N[own].argsort(stable=True)
        return keys_ND[own][order], values_NV[own][order], positions_N[own][order]

    def append_(
        self, keys_BHSD: Tensor, values_BHSD: Tensor, positions_BS: Tensor, valid_BS: Tensor | None = None
    ) -> Int[Tensor, "R S"]:
        """Add new tokens behind each row of the plain tier; how many entries of that tier each sees."""
        return self.plain.append_(keys_BHSD, values_BHSD, positions_BS, valid_BS)

    def set_beside_(self, name: str, values_BHS: Tensor, valid_BS: Tensor | None = None) -> None:
        """Write a side column for the last S tokens of every row."""
        self.plain.set_beside_(name, values_BHS, valid_BS)

    def write_beside_(self, name: str, values_N: Tensor) -> None:
        """Write a side column for every entry, in the order of `index_N()`."""
        parts = values_N.split([tier.entries_held for tier in self.tiers])
        for tier, own_N in zip(self.tiers, parts, strict=True):
            tier.write_beside_(name, own_N)

    def forget_beside_(self, *names: str) -> None:
        """Let go of side columns."""
        for tier in self.tiers:
            tier.forget_beside_(*names)

    def compact_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Evict in place."""
        for tier, own_N in zip(self.tiers, self._parts(keep_N), strict=True):
            tier.compact_(own_N)
        self._forget_empty_()

    def filter_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries, in new tiers of their size."""
        for tier, own_N in zip(self.tiers, self._parts(keep_N), strict=True):
            tier.filter_(own_N)
        self._forget_empty_()

    def pack_(self) -> None:
        """Pack the entries of the plain tier but for the last `recent` of each row.

        Raises:
            ValueError: numbers that float16 does not hold; nothing was changed.
        """
        plain = self.plain
        ends_N = plain.lengths_R.long().repeat_interleave(plain.lengths_R)
        stays_N = ends_N - _places_N(plain) <= self.precision.recent
        if bool(stays_N.all()):
            return
        index_N, row_N = plain.index_N()[~stays_N], plain.rows_N()[~stays_N]
        beside = {name: column[index_N] for name, column in plain.beside.items()}
        old = self.packed
        if old is not None:
            names = [name for name in old.beside if name not in plain.beside]
            beside |= {name: _side(plain, name, self.tiers)[index_N] for name in names}
        packed = PackedStore.encoded(
            Form(self.precision.bits, plain.keys_CD.shape[1], plain.values_CD.shape[1], plain.dtype),
            plain.keys_CD[index_N],
            plain.values_CD[index_N],
            plain.positions_C[index_N],
            torch.bincount(row_N, minlength=self.num_rows),
            self.num_heads,
            beside=beside,
        )
        if old is not None:
            for name in set(packed.beside) - set(old.beside):
                like = packed.beside[name]
                old.beside[name] = like.new_zeros(old.num_places, *like.shape[1:])
            packed = joined([old, packed], stack=False)
        plain.filter_(stays_N)
        self.packed = packed

    def fork(self) -> "TieredStore":
        """An independent copy."""
        packed = None if self.packed is None else self.packed.fork()
        return TieredStore(self.plain.fork(), self.precision, packed)

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "TieredStore":
        """The sequences `idx`, in that order; an index may repeat."""
        packed = None if self.packed is None else self.packed.select_batch(idx)
        return TieredStore(self.plain.select_batch(idx), self.precision, packed)

    def _forget_empty_(self) -> None:
        """Let go of a packed tier that holds nothing."""
        if self.packed is not None and not self.packed.entries_held:
            self.packed = None

    def _parts(self, mask_N: Tensor) -> Sequence[Tensor]:
        """A mask of all entries, tier by tier."""
        if mask_N.shape != (self.entries_held,) or mask_N.dtype != torch.bool:
            raise ValueError(
                f"mask is {mask_N.dtype} {tuple(mask_N.shape)}, but the tiers hold {self.entries_held} "
                "entries: pass a bool tensor of one element an entry, in the order of index_N()."
            )
        return mask_N.split([tier.entries_held for tier in self.tiers])


Store = RaggedStore | TieredStore


def plain_of(store: Store) -> RaggedStore:
    """The tier that new tokens come into."""
    return store.plain if isinstance(store, TieredStore) else store


def log_weight_bytes_B(store: Store) -> Int[Tensor, " B"]:
    """Of the bytes that each sequence holds, those of what is added to logits."""
    tiers = store.tiers if isinstance(store, TieredStore) else [store]
    sizes = [tier.beside[LOG_WEIGHT].element_size() if LOG_WEIGHT in tier.beside else 0 for tier in tiers]
    return sum(
        (tier.lengths_BH.sum(-1) * size for tier, size in zip(tiers, sizes, strict=True)),
        torch.zeros_like(store.lengths_BH[:, 0]),
    )


def crop_(store: Store, before_B: Int[Tensor, " B"]) -> None:
    """Forget, in each sequence, the entries at positions `>= before`, and give their bytes back."""
    before_N = before_B.to(store.device)[store.rows_N() // store.num_heads]
    store.filter_(store.positions_C[store.index_N()] < before_N)


def drop_(store: Store, gone_BP: Bool[Tensor, "B P"]) -> None:
    """Forget, in each sequence, the entries at these positions, and give their bytes back."""
    positions_N = store.positions_C[store.index_N()].to(torch.int64)
    gone_BP = gone_BP.to(positions_N.device)
    store.filter_(~gone_BP[store.rows_N() // store.num_heads, positions_N])


def _places_N(store: RaggedStore) -> Int[Tensor, " N"]:
    """Place of every entry in its row."""
    return store.index_N() - store.offsets_R1[:-1][store.rows_N()]


def _side(tier: RaggedStore, name: str, tiers: Sequence[RaggedStore]) -> Tensor:
    """A side column; zeros where there is none."""
    if name in tier.beside:
        return tier.beside[name]
    like = next(own.beside[name] for own in tiers if name in own.beside)
    return like.new_zeros(tier.num_places, *like.shape[1:])


@normal_tensors()
def stacked_tiers(stores: Sequence[Store], slack: int | None = None) -> Store:
    """Stack stores of one layer along the batch, packed or not; nothing more is packed afterwards, since they
    may be packed by different settings.

    Args:
        stores: of the same layer, with the same side columns.
        slack: free entries per row of the plain tier; default: the largest of the stores'.

    Raises:
        ValueError: they are packed in different numbers of bits.
    """
    bits = {own.form.bits for own in map(codes_of, stores) if own is not None}
    if len(bits) > 1:
        raise ValueError(
            f"caches to stack hold entries in {' and '.join(map(str, sorted(bits)))} bits, and one cache "
            "holds them in one number of bits: stack those of one precision, beside those of none."
        )
    plain = stacked([plain_of(store) for store in stores], slack)
    packing = [store for store in stores if isinstance(store, TieredStore) and store.packed is not None]
    if not packing:
        return plain
    like = packing[0].packed
    assert like is not None
    parts = [codes_of(store) or _empty(like, store.num_rows) for store in stores]
    return TieredStore(plain, packing[0].precision, joined(parts, stack=True))


def codes_of(store: Store) -> PackedStore | None:
    """The tier of a store that is packed; None: nothing is."""
    return store.packed if isinstance(store, TieredStore) else None


def _empty(like: PackedStore, num_rows: int) -> PackedStore:
    """A store of a form, of so many rows, that holds nothing."""
    form = like.form
    keys_CD, values_CV = (
        torch.zeros(0, width, dtype=form.dtype, device=like.device)
        for width in (form.head_dim, form.value_dim)
    )
    return PackedStore.encoded(
        form,
        keys_CD,
        values_CV,
        like.positions_C[:0],
        torch.zeros(num_rows, dtype=torch.int64, device=like.device),
        like.num_heads,
        beside={name: column[:0] for name, column in like.beside.items()},
    )

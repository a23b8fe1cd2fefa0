"""Stores one layer's entries in tiers: some as they are, others packed (`retain.cache.packed_store`).

New tokens always come into the plain tier, so what a query sees of it is a count as before; all that is
packed came before them. Where an order of all entries is needed, it is that of the tiers, packed ones first,
and in each row after row: masks and side columns over all entries go by `index_N()`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.cache.packed_store import BALANCE, CHANNELS, Form, PackedStore, joined
from retain.cache.store import LOG_WEIGHT, RaggedStore, bytes_of, normal_tensors, stacked
from retain.kernels import backend
from retain.precision import Precision


class Rows(NamedTuple):
    """What a layer's queries said of how its keys are held (`retain.precision.balance_of`, `channels_of`).

    Args:
        balance_RD: factors of channels; None: 1.
        channels_RD: True on those of each row that are held; None: all.
    """

    balance_RD: Float[Tensor, "R D"] | None = None
    channels_RD: Bool[Tensor, "R D"] | None = None


class TieredStore:
    """The entries that one layer holds, in tiers; what `retain.cache.store.RaggedStore` is for one.

    Attributes:
        plain: entries as they are, the newest among them.
        packed: the others, a store a form.
        precision: how entries are packed.
        rows: what queries said of that.
    """

    def __init__(self, plain: RaggedStore, precision: Precision, rows: Rows):
        self.plain, self.precision, self.rows = plain, precision, rows
        self.packed: list[PackedStore] = []

    @property
    def tiers(self) -> list[RaggedStore]:
        """All of them, in the order of entries."""
        return [*self.packed, self.plain]

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
        """The path of attention over the plain tier; packed ones take the same."""
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
        """Bytes of all storage behind the tiers, and of what queries said, which packed tiers may share."""
        said = [table for table in self.rows if table is not None]
        held = [tensor for tier in self.tiers for tensor in tier.storages()]
        return bytes_of([*said, *held])

    @property
    def keys_CD(self) -> Float[Tensor, "C D"]:
        """Keys of all tiers, decoded: a copy."""
        return torch.cat([*(tier.decoded()[0] for tier in self.packed), self.plain.keys_CD])

    @property
    def values_CD(self) -> Float[Tensor, "C V"]:
        """Values of all tiers, decoded: a copy."""
        return torch.cat([*(tier.decoded()[1] for tier in self.packed), self.plain.values_CD])

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
        self.packed = [tier for tier in self.packed if tier.entries_held]

    def filter_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries, in new tiers of their size."""
        for tier, own_N in zip(self.tiers, self._parts(keep_N), strict=True):
            tier.filter_(own_N)
        self.packed = [tier for tier in self.packed if tier.entries_held]

    def pack_(self, full_N: Bool[Tensor, " N"] | None = None) -> None:
        """Pack entries of the plain tier.

        Args:
            full_N: entries that stay as they are, in the order of `index_N()`, or of the plain tier's alone;
                None: the last `recent` of each row.

        Raises:
            ValueError: numbers that float16 does not hold; nothing was changed.
        """
        plain = self.plain
        if full_N is None:
            ends_N = plain.lengths_R.long().repeat_interleave(plain.lengths_R)
            full_N = ends_N - _places_N(plain) <= self.precision.recent
        elif len(full_N) != plain.entries_held:
            full_N = self._parts(full_N)[-1]
        if bool(full_N.all()):
            return
        index_N, row_N = plain.index_N()[~full_N], plain.rows_N()[~full_N]
        names = [name for tier in self.packed for name in tier.beside if name not in plain.beside]
        beside = {name: column[index_N] for name, column in plain.beside.items()}
        beside |= {name: _side(plain, name, self.tiers)[index_N] for name in names}
        packed = list(self.packed)
        for form, rows, mask_R in self._forms():
            own_N = mask_R[row_N]
            if not bool(own_N.any()):
                continue
            lengths_R = torch.bincount(row_N[own_N], minlength=self.num_rows)
            new = PackedStore.encoded(
                form,
                plain.keys_CD[index_N[own_N]],
                plain.values_CD[index_N[own_N]],
                plain.positions_C[index_N[own_N]],
                lengths_R,
                self.num_heads,
                beside={name: side_N[own_N] for name, side_N in beside.items()},
                rows=rows,
            )
            alike = [number for number, tier in enumerate(packed) if tier.form == form]
            if not alike:
                packed.append(new)
                continue
            old = packed[alike[0]]
            for name in set(new.beside) - set(old.beside):
                old.beside[name] = new.beside[name].new_zeros(old.num_places, *new.beside[name].shape[1:])
            packed[alike[0]] = joined([old, new], stack=False)
        plain.filter_(full_N)
        self.packed = packed

    def fork(self) -> "TieredStore":
        """An independent copy."""
        return self._with(self.plain.fork(), [tier.fork() for tier in self.packed], self.rows)

    def select_batch(self, idx: Int[Tensor, " B2"]) -> "TieredStore":
        """The sequences `idx`, in that order; an index may repeat."""
        head_H = torch.arange(self.num_heads, device=self.device)
        rows_R = (idx.to(self.device)[:, None] * self.num_heads + head_H).flatten()
        own = Rows(*(None if table is None else table[rows_R] for table in self.rows))
        packed = [tier.select_batch(idx) for tier in self.packed]
        return self._with(self.plain.select_batch(idx), packed, own)

    def _with(self, plain: RaggedStore, packed: list[PackedStore], rows: Rows) -> "TieredStore":
        other = TieredStore(plain, self.precision, rows)
        other.packed = [tier for tier in packed if tier.entries_held]
        return other

    def _parts(self, mask_N: Tensor) -> Sequence[Tensor]:
        """A mask of all entries, tier by tier."""
        if mask_N.shape != (self.entries_held,) or mask_N.dtype != torch.bool:
            raise ValueError(
                f"mask is {mask_N.dtype} {tuple(mask_N.shape)}, but the tiers hold {self.entries_held} "
                "entries: pass a bool tensor of one element an entry, in the order of index_N()."
            )
        return mask_N.split([tier.entries_held for tier in self.tiers])

    def _forms(self) -> list[tuple[Form, dict[str, Tensor], Bool[Tensor, " R"]]]:
        """Each form that rows take: with its tables of rows, and which rows."""
        precision, plain, (balance_RD, channels_RD) = self.precision, self.plain, self.rows
        D, V = plain.keys_CD.shape[1], plain.values_CD.shape[1]
        rows: dict[str, Tensor] = {} if balance_RD is None else {BALANCE: balance_RD}
        width_R = torch.full((self.num_rows,), D, device=self.device)
        if channels_RD is not None:
            width_R = channels_RD.sum(-1)
        forms = []
        for width in width_R.unique().tolist():
            form = Form(
                bits=precision.bits,
                by=precision.keys,
                group=int(precision.group) if precision.keys == "channel" else precision.span(width),
                span=precision.span(V),
                width=width,
                head_dim=D,
                value_dim=V,
                balanced=balance_RD is not None,
                dtype=plain.dtype,
            )
            mask_R, own = width_R == width, dict(rows)
            if channels_RD is not None and width < D:
                held_RK = torch.zeros(self.num_rows, width, dtype=torch.int16, device=self.device)
                held_RK[mask_R] = channels_RD[mask_R].nonzero()[:, 1].view(-1, width).to(torch.int16)
                own[CHANNELS] = held_RK
            forms.append((form, own, mask_R))
        return forms


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


@dataclass(frozen=True, eq=False)
class Packing:
    """How a store that was just made is packed.

    Args:
        precision: the settings.
        rows: what the layer's queries said.
        full_BHT: entries that stay as they are; None: the last ones.
        now: False where entries may still go (a cascade over layers): it is packed later.
    """

    precision: Precision
    rows: Rows = Rows()
    full_BHT: Bool[Tensor, "B H T"] | None = None
    now: bool = True

    def applied(self, store: RaggedStore, keep_BHT: Bool[Tensor, "B H T"]) -> TieredStore:
        """The store in tiers, which holds these entries."""
        tiered = TieredStore(store, self.precision, self.rows)
        if self.now:
            tiered.pack_(None if self.full_BHT is None else self.full_BHT.to(keep_BHT.device)[keep_BHT])
        return tiered


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
    """Stack stores of one layer along the batch, whatever tiers they have; nothing more is packed
    afterwards, since they may be packed by different settings.

    Args:
        stores: of the same layer, with the same side columns.
        slack: free entries per row of the plain tier; default: the largest of the stores'.
    """
    plain = stacked([store.plain if isinstance(store, TieredStore) else store for store in stores], slack)
    tiered = [store for store in stores if isinstance(store, TieredStore)]
    if not any(store.packed for store in tiered):
        return plain
    whole = TieredStore(plain, tiered[0].precision, Rows())
    forms = dict.fromkeys(tier.form for store in tiered for tier in store.packed)
    for form in forms:
        parts = []
        for store in stores:
            own = store.packed if isinstance(store, TieredStore) else []
            found = [tier for tier in own if tier.form == form]
            parts.append(found[0] if found else None)
        like = next(part for part in parts if part is not None)
        filled = [
            _empty(like, store.num_rows) if part is None else part
            for part, store in zip(parts, stores, strict=True)
        ]
        whole.packed.append(joined(filled, stack=True))
    return whole


def _empty(like: PackedStore, num_rows: int) -> PackedStore:
    """A store of a form, of so many rows, that holds nothing."""
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
    form = like.form
    keys_CD, values_CV = (
        torch.zeros(0, width, dtype=form.dtype, device=like.device)
        for width in (form.head_dim, form.value_dim)
    )
    return PackedStore.encoded(
        like.form,
        keys_CD,
        values_CV,
        like.positions_C[:0],
        nothing,
        like.num_heads,
        beside={name: column[:0] for name, column in like.beside.items()},
        rows={
            name: table.new_ones(num_rows, *table.shape[1:])
            if name == BALANCE
            else table.new_zeros(num_rows, *table.shape[1:])
            for name, table in like.tables.items()
            if name in (CHANNELS, BALANCE)
        },
    )

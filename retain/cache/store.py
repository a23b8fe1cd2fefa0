"""Stores exactly the kept entries of one attention layer, a different number for each (sequence, KV head).

Keys and values are flat `[C, D]` tensors that `retain.cache.attend` reads in place; *side columns* follow
their entries. Evicted entries are removed, not masked; padding is never stored.

Every row owns a room of whole pages (`retain.kernels.ragged_attention.pages`), in natural order, with some
free slots at its end. New tokens go into free slots; an eviction in place moves only what lies behind each
row's first hole. When a row is full, or bytes are to be given back, the store is laid out anew, one column
after another, so that never more than one column exists twice. If memory runs out behind the first column
(the largest), there is no way back: the store then raises on every access. Bytes held and bytes allocated are
reported apart.

Nothing but `flat` and `decoded` reads what a column holds: entries in fewer bits are a store of the same
kind, with codes for columns (`retain.cache.packed_store`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.kernels.backend import Path
from retain.kernels.compact import append_, move_, planned
from retain.kernels.compact.reference import copy_, spans, write_
from retain.kernels.ragged_attention import path_of
from retain.kernels.ragged_attention.pages import PAGE, Pages, paged, pages_for

# The side column that attention adds to the logits of its entries, after a soft cap: float32.
LOG_WEIGHT = "log_weight"
# Free entries given to each row, at least, when a store is made.
SLACK = 32
# A full store grows by this share of its rows' mean length, or by its slack if that is more: laying it out
# anew costs a copy of it, so this divides a copy among that many tokens.
GROWTH = 1 / 48
# A store of the kind that a method was called of (`typing.Self` is nothing that beartype checks here).
Same = TypeVar("Same", bound="RaggedStore")


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Context for making tensors that can be written to after a caller's `inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():  # the first alone would turn gradients on
        yield


@dataclass(frozen=True, eq=False)
class Layout:
    """Rooms of the rows, each of whole pages, and how many entries each row holds."""

    pages: Pages
    offsets_R1: Int[Tensor, " R1"]
    lengths_R: Int[Tensor, " R"]
    free: int

    @classmethod
    def of(cls, lengths_R: Tensor, slack: int, least: Sequence[int] | None = None) -> "Layout":
        """Rooms for these lengths and slack, at least `least` pages each."""
        lengths = lengths_R.tolist()
        counts = [pages_for(length + slack) for length in lengths]
        if least is not None:
            counts = [max(pair) for pair in zip(counts, least, strict=True)]
        pages = Pages.of(counts, lengths_R.device)
        return cls(pages, pages.offsets(), lengths_R.to(torch.int32, copy=True), _count_free(pages, lengths))

    def index_N(self) -> Int[Tensor, " N"]:
        """Place of every entry, row after row."""
        return spans(self.offsets_R1[:-1], self.lengths_R)


class RaggedStore:
    """Keys, values, positions and side columns of the entries that one layer holds.

    Row `r = b * H + h`; its room begins at `offsets_R1[r]` (int64), and it holds `lengths_R[r]` (int32)
    entries. Methods that end in `_` change the store in place, all others leave it alone and share no memory
    with it (but `row`). Free slots hold finite numbers, and zeros in side columns. A method that fails leaves
    the store as it was, or, where that was no longer possible, empty: then every access raises a
    `ValueError`.

    Attributes:
        num_heads: H.
        slack: free entries given to each row, at least, when the store is laid out anew.
        beside: side columns `[C, ...]` by name, such as a score or the mass of attention received.
        pages: the row that each page belongs to.
        free: new tokens that surely fit into every row.
    """

    step_rows: Any  # for decoding steps on a CPU (`retain.cache.step_rows`), made by who decodes them

    @normal_tensors()
    def __init__(
        self,
        keys_ND: Float[Tensor, "N D"],
        values_ND: Float[Tensor, "N D"],
        positions_N: Int[Tensor, " N"],
        lengths_R: Int[Tensor, " R"],
        num_heads: int,
        slack: int = SLACK,
        beside: Mapping[str, Tensor] | None = None,
    ):
        """Lay out entries that come row after row (`lengths_R[r]` of row 0, of row 1, ...), in order of
        time; `beside[name]` is `[N, ...]`."""
        layout = Layout.of(lengths_R, slack)
        entries = {"keys": keys_ND, "values": values_ND, "positions": positions_N.to(torch.int32)}
        self._begin_(layout, num_heads, slack, entries, beside or {})
        index_N = layout.index_N()
        for columns, name in self._columns():
            columns[name] = _filled(layout, index_N, columns[name], None)

    @classmethod
    @normal_tensors()
    def from_dense(
        cls,
        keys_BHTD: Float[Tensor, "B H T D"],
        values_BHTD: Float[Tensor, "B H T D"],
        positions_BT: Int[Tensor, "B T"],
        keep_BHT: Tensor,
        slack: int = SLACK,
        beside: Mapping[str, Tensor] | None = None,
    ) -> "RaggedStore":
        """Keep the entries of `keep_BHT`, in order of time; the rest is not copied.

        Args:
            keys_BHTD, values_BHTD, positions_BT: of all tokens, keys after norm and RoPE.
            keep_BHT: True = kept.
            slack: free entries for each row, at least.
            beside: side columns, `[B, H, T]` or `[B, H, T, K]`.

        Raises:
            ValueError: the keep mask or a side column has another shape, or the mask is not boolean.
        """
        B, H, T, _ = keys_BHTD.shape
        if keep_BHT.shape != (B, H, T) or keep_BHT.dtype != torch.bool:
            raise ValueError(
                f"keep mask is {keep_BHT.dtype} {tuple(keep_BHT.shape)}, but the layer holds {B} sequences x "
                f"{H} KV heads x {T} entries: pass a bool tensor [{B}, {H}, {T}], True = kept."
            )
        for name, column in (beside or {}).items():
            if column.shape[:3] != (B, H, T):
                raise ValueError(
                    f"side column {name!r} is {tuple(column.shape)}, but the layer holds {B} sequences x {H} "
                    f"KV heads x {T} entries: pass [{B}, {H}, {T}] or [{B}, {H}, {T}, K]."
                )
        layout = Layout.of(keep_BHT.sum(-1).flatten(), slack)
        positions = positions_BT[:, None].expand(B, H, T).to(torch.int32)
        entries = {"keys": keys_BHTD, "values": values_BHTD, "positions": positions}
        store: RaggedStore = object.__new__(cls)
        store._begin_(layout, H, slack, entries, beside or {})
        index_N, where = layout.index_N(), keep_BHT.nonzero(as_tuple=True)
        for columns, name in store._columns():
            columns[name] = _filled(layout, index_N, columns[name], where)
        return store

    @property
    def columns(self) -> dict[str, Tensor]:
        """Keys, values and positions, and what decodes them, by name."""
        return self._held

    @property
    def keys_CD(self) -> Float[Tensor, "C D"]:
        return self._held["keys"]

    @property
    def values_CD(self) -> Float[Tensor, "C D"]:
        return self._held["values"]

    @property
    def positions_C(self) -> Int[Tensor, " C"]:
        """RoPE positions of the entries (int32; `flat` and `row` give int64)."""
        return self._held["positions"]

    @property
    def num_rows(self) -> int:
        return len(self.lengths_R)

    @property
    def num_places(self) -> int:
        """C: places of entries, free ones included."""
        return len(self._held["positions"])

    @property
    def device(self) -> torch.device:
        return self._held["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the keys."""
        return self.keys_CD.dtype

    @property
    def path(self) -> Path:
        """The path of attention over these entries."""
        return path_of(self.keys_CD, self.values_CD)

    def decoded(self) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C V"]]:
        """Keys and values as numbers."""
        return self.keys_CD, self.values_CD

    @property
    def lengths_BH(self) -> Int[Tensor, "B H"]:
        """Entries held, per sequence and KV head (int64)."""
        return self.lengths_R.to(torch.int64).view(-1, self.num_heads)

    @property
    def entries_held(self) -> int:
        """N: entries held over all rows."""
        return int(self.lengths_R.sum())

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: its key and its value."""
        columns = (self._held[name] for name in ("keys", "values"))
        return sum(column.shape[1] * column.element_size() for column in columns)

    @property
    def log_weight_C(self) -> Float[Tensor, " C"] | None:
        """What is added to the logits of each entry; None: nothing is."""
        return self.beside.get(LOG_WEIGHT)

    @property
    def bytes_B(self) -> Int[Tensor, " B"]:
        """Bytes of the keys and values that each sequence holds, and of what is added to their logits."""
        weight_C = self.log_weight_C
        beside = 0 if weight_C is None else weight_C.element_size()
        return self.lengths_BH.sum(-1) * (self.entry_bytes + beside)

    @property
    def bytes_held(self) -> int:
        """The same, of all sequences."""
        return int(self.bytes_B.sum())

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage behind the store: slack, positions, side columns and tables included."""
        return bytes_of(self.storages())

    def storages(self) -> list[Tensor]:
        """All tensors that the store is made of."""
        tables = (self.offsets_R1, self.lengths_R, *self.pages.tables())
        return [*tables, *(columns[name] for columns, name in self._columns())]

    def index_N(self) -> Int[Tensor, " N"]:
        """Where every entry lies in the store, row after row, in order of time."""
        return spans(self.offsets_R1[:-1], self.lengths_R)

    def rows_N(self) -> Int[Tensor, " N"]:
        """Row `b * H + h` of every entry, row after row."""
        return torch.repeat_interleave(self.lengths_R.to(torch.int64))

    def flat(self) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N V"], Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Keys, values, positions and row `b * H + h` of every entry, row after row, in order of time."""
        index_N = self.index_N()
        keys_CD, values_CD = self.decoded()
        positions_N = self.positions_C[index_N].to(torch.int64)
        return keys_CD[index_N], values_CD[index_N], positions_N, self.rows_N()

    def row(
        self, sequence: int, head: int
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"], Int[Tensor, " T"]]:
        """Keys, values and positions of one row (for looking at: keys and values are the store's own)."""
        row = sequence * self.num_heads + head
        start = int(self.offsets_R1[row])
        held = slice(start, start + int(self.lengths_R[row]))
        return self.keys_CD[held], self.values_CD[held], self.positions_C[held].to(torch.int64)

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
            valid_BS: False on padding, which is not stored; None: all are real (and the device is not waited
                for, as long as they are `free`).

        Returns:
            for each row and new token, how many entries of the row that token sees, itself included; 0 for
            padding. Side columns of the new entries are zeros until `set_beside_`.
        """
        B, H, S, _ = keys_BHSD.shape
        if self.num_rows != B * H:
            raise ValueError(
                f"new keys are of {B} sequences x {H} KV heads, but the store holds "
                f"{len(self.lengths_BH)} x {self.num_heads}: select or repeat the cache's sequences to match "
                "the batch."
            )
        if self.free < S:
            self.make_room_(S)
        positions_BHS = positions_BS[:, None].expand(B, H, S)
        new = (keys_BHSD, values_BHSD, positions_BHS)
        # It raises the lengths last: had a write failed, free slots would have been written to.
        seen_RS = append_(list(self._held.values()), new, self.offsets_R1, self.lengths_R, valid_BS)
        self.step_rows = None
        self.free -= S
        return seen_RS

    def set_beside_(self, name: str, values_BHS: Tensor, valid_BS: Bool[Tensor, "B S"] | None = None) -> None:
        """Write a side column for the last S tokens of every row; a new column is zeros elsewhere.

        Args:
            name: of the column.
            values_BHS: `[B, H, S]` or `[B, H, S, K]`.
            valid_BS: False on padding, as these tokens were appended with; None: all are real.

        Raises:
            ValueError: the values are of other rows, or not what the column holds.
        """
        B, H = self.lengths_BH.shape
        column = self.beside.get(name)
        wanted = values_BHS.shape[3:] if column is None else column.shape[1:]
        if values_BHS.shape[:2] != (B, H) or values_BHS.ndim < 3 or values_BHS.shape[3:] != wanted:
            raise ValueError(
                f"side column {name!r} got values {tuple(values_BHS.shape)}, but the store holds {B} "
                f"sequences x {H} KV heads with {tuple(wanted)} an entry: pass [{B}, {H}, S, "
                f"{', '.join(map(str, wanted))}]."
            )
        if column is None:
            with normal_tensors():
                column = values_BHS.new_zeros(self.num_places, *wanted)
        index_RS, valid_RS = tail_index_RS(self, values_BHS.shape[2] if valid_BS is None else valid_BS)
        write_([(column, values_BHS)], index_RS.flatten(), None if valid_BS is None else valid_RS)
        self.beside[name] = column

    def write_beside_(self, name: str, values_N: Tensor) -> None:
        """Write a side column for every entry, in the order of `flat()`."""
        with normal_tensors():
            column = values_N.new_zeros(self.num_places, *values_N.shape[1:])
            self.beside[name] = column.index_copy_(0, self.index_N(), values_N)

    def forget_beside_(self, *names: str) -> None:
        """Let go of side columns, where they are."""
        for name in names:
            self.beside.pop(name, None)

    def compact_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Evict in place: entries behind a row's first hole move forward, rooms stay (their slack grows).

        Args:
            keep_N: True = kept, in the order of `flat()`.
        """
        self._check(keep_N)
        columns = [columns[name] for columns, name in self._columns()]
        plan = planned(columns, keep_N, self.offsets_R1, self.lengths_R)
        with self.no_way_back():
            move_(plan)
            self.lengths_R.copy_(plan.kept_R)
            self.step_rows = None
            self.free = _count_free(self.pages, self.lengths_R.tolist())

    @normal_tensors()
    def filter_(self, keep_N: Bool[Tensor, " N"]) -> None:
        """Keep some entries (in the order of `flat()`) in a new store of their size plus slack."""
        self._check(keep_N)
        from_N = self.index_N()[keep_N]
        kept_R = torch.bincount(self.rows_N()[keep_N], minlength=self.num_rows)
        layout = Layout.of(kept_R, self.slack)
        index_N = layout.index_N()
        self._lay_out_anew_(layout, lambda column: _filled(layout, index_N, column, (from_N,)))

    @normal_tensors()
    def fork(self: Same) -> Same:
        """An independent copy."""
        other = self._like(Layout(self.pages, self.offsets_R1.clone(), self.lengths_R.clone(), self.free))
        for columns, name in other._columns():
            columns[name] = columns[name].clone()
        return other

    @normal_tensors()
    def select_batch(self: Same, idx: Int[Tensor, " B2"]) -> Same:
        """The sequences `idx`, in that order; an index may repeat (beams, `batch_repeat_interleave`)."""
        heads, device = self.num_heads, self.device
        rows = [sequence * heads + head for sequence in idx.tolist() for head in range(heads)]
        pages = Pages.of([self.pages.counts[row] for row in rows], device)
        lengths_R = self.lengths_R.view(-1, heads).index_select(0, idx.to(device)).flatten()
        other = self._like(Layout(pages, pages.offsets(), lengths_R, self.free))
        chosen = self.pages.of_rows(rows)
        for columns, name in other._columns():
            columns[name] = paged(columns[name]).index_select(0, chosen).flatten(0, 1)
        return other

    def _columns(self) -> list[tuple[dict[str, Tensor], str]]:
        """Every column, as the mapping that holds it and its name there."""
        return [(columns, name) for columns in (self._held, self.beside) for name in columns]

    def _take_(self, layout: Layout) -> None:
        """Adopt a layout; the caller moves the columns."""
        self.pages, self.offsets_R1 = layout.pages, layout.offsets_R1
        self.lengths_R, self.free = layout.lengths_R, layout.free
        self.step_rows = None

    def _lay_out_anew_(self, layout: Layout, moved: Callable[[Tensor], Tensor]) -> None:
        """Adopt a layout, with each column as `moved` gives it. An old column is let go before the next new
        one is made; if the first new one does not fit in memory, nothing was changed."""
        (columns, name), *others = self._columns()
        first = moved(columns[name])
        with self.no_way_back():
            columns[name] = first
            for columns, name in others:
                columns[name] = moved(columns[name])
            self._take_(layout)

    @contextmanager
    def no_way_back(self) -> Iterator[None]:
        """Context in which columns and layout do not match; an error inside drops all of them."""
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            raise

    if not TYPE_CHECKING:  # or else every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Refuse everything after `no_way_back`."""
            if name.startswith("__") or self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            raise ValueError(
                "the entries of this layer were being moved when that broke off (out of memory, or "
                "interrupted), so they are lost: reset() the cache, or go on with a fork() made before; a "
                "smaller batch, budget or chunk_size needs less memory."
            )

    def make_room_(self, num_new: int) -> None:
        """Make room for `num_new` more tokens in every row, and for some after them."""
        lengths = self.lengths_R.tolist()
        self.free = _count_free(self.pages, lengths)  # it was a lower bound: padding was counted
        if self.free >= num_new:
            return
        more = max(self.slack, int(GROWTH * sum(lengths) / len(lengths)))
        with normal_tensors():
            layout = Layout.of(self.lengths_R, num_new + more, self.pages.counts)
            room = torch.tensor(self.pages.counts, dtype=torch.int64, device=self.offsets_R1.device)
            to = spans(layout.offsets_R1[:-1] // PAGE, room)

            def grown(column: Tensor) -> Tensor:
                larger = column.new_zeros(layout.pages.num_pages * PAGE, *column.shape[1:])
                paged(larger).index_copy_(0, to, paged(column))
                return larger

            self._lay_out_anew_(layout, grown)

    def move_(self, name: str, column: Tensor, layout: Layout) -> None:
        """Let a column live in these places, which are zeros, of rows of this layout; `adopt_` comes next."""
        own = self._held if name in self._held else self.beside
        if name in own:
            copy_(column, layout.index_N(), own[name], (self.index_N(),))
        own[name] = column

    def adopt_(self, layout: Layout, moved: Collection[str]) -> None:
        """Go on in a layout to which these columns were moved; the others follow."""
        for columns, name in self._columns():
            if name not in moved:
                columns[name] = _filled(layout, layout.index_N(), columns[name], (self.index_N(),))
        self._take_(layout)

    def came_(self, real_B: Sequence[int]) -> None:
        """Count so many entries of each sequence, which were written behind its rows."""
        self.lengths_R += torch.tensor(real_B, device=self.device).repeat_interleave(self.num_heads)
        self.step_rows, self.free = None, _count_free(self.pages, self.lengths_R.tolist())

    def _like(self: Same, layout: Layout) -> Same:
        """A store of this layout that still shares its columns with this one."""
        store: Same = object.__new__(type(self))
        store._begin_(layout, self.num_heads, self.slack, self._held, self.beside)
        return store

    def _begin_(
        self,
        layout: Layout,
        num_heads: int,
        slack: int,
        entries: Mapping[str, Tensor],
        beside: Mapping[str, Tensor],
    ) -> None:
        """Set everything, with these columns as they are."""
        self.num_heads, self.slack = num_heads, slack
        self._held, self.beside = {**entries}, {**beside}
        self._take_(layout)

    def _check(self, keep_N: Tensor) -> None:
        if keep_N.shape != (self.entries_held,) or keep_N.dtype != torch.bool:
            raise ValueError(
                f"keep mask is {keep_N.dtype} {tuple(keep_N.shape)}, but the store holds {self.entries_held} "
                "entries: pass a bool tensor of one element an entry, in the order of flat(), True = kept."
            )


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind tensors, of each once; of a storage that others share, those of the parts
    that are seen here."""
    seen: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _, parts = seen.get(storage.data_ptr(), (0, 0))
        seen[storage.data_ptr()] = storage.nbytes(), parts + tensor.numel() * tensor.element_size()
    return sum(min(pair) for pair in seen.values())


def _count_free(pages: Pages, lengths: Sequence[int]) -> int:
    """Number of new tokens that fit into every room."""
    rooms = (PAGE * count for count in pages.counts)
    return min((room - length for room, length in zip(rooms, lengths, strict=True)), default=0)


def _filled(layout: Layout, index_N: Tensor, source: Tensor, where: tuple[Tensor, ...] | None) -> Tensor:
    """A column with the entries `source[where]` at `index_N`. Zeros elsewhere, not garbage: a masked entry
    has weight 0, and 0 x NaN would still be NaN."""
    column = source.new_zeros(layout.pages.num_pages * PAGE, *source.shape[len(where or (0,)) :])
    copy_(column, index_N, source, where)
    return column


def tail_index_RS(
    store: RaggedStore, tail: Bool[Tensor, "B S"] | int
) -> tuple[Int[Tensor, "R S"], Bool[Tensor, "R S"]]:
    """Places of the tokens that were appended last.

    Args:
        store: they were appended to.
        tail: which of the last S tokens are real (the `valid_BS` they were appended with); or S, if all are.

    Returns:
        the index of each row's last tokens into the store (padding: that of the row's room), and which are
        real.
    """
    starts_R1 = store.offsets_R1[:-1, None]
    ends_R1 = starts_R1 + store.lengths_R[:, None]
    if isinstance(tail, int):
        index_RS = ends_R1 + torch.arange(-tail, 0, device=ends_R1.device)
        return index_RS, torch.ones_like(index_RS, dtype=torch.bool)
    valid_RS = tail.to(ends_R1.device).repeat_interleave(store.num_heads, dim=0)
    rank_RS = valid_RS.cumsum(-1)
    return torch.where(valid_RS, ends_R1 - rank_RS[:, -1:] + rank_RS - 1, starts_R1), valid_RS


@normal_tensors()
def stacked(stores: Sequence[RaggedStore], slack: int | None = None) -> RaggedStore:
    """Stack stores of one layer along the batch; rows keep their own lengths.

    Args:
        stores: of the same layer, with the same side columns.
        slack: free entries per row; default: the largest of the stores'.

    Raises:
        ValueError: the side columns differ.
    """
    first = stores[0]
    if len({tuple(sorted(store.beside)) for store in stores}) != 1:
        raise ValueError(
            f"stores to stack have side columns {[sorted(store.beside) for store in stores]}: "
            "stack stores of one kind, or set the missing columns first."
        )
    slack = max(store.slack for store in stores) if slack is None else slack
    layout = Layout.of(torch.cat([store.lengths_R for store in stores]), slack)
    both = first._like(layout)
    both.slack = slack
    parts_N = layout.index_N().split([store.entries_held for store in stores])
    for columns, name in both._columns():
        columns[name] = columns[name].new_zeros(layout.pages.num_pages * PAGE, *columns[name].shape[1:])
        for store, index_N in zip(stores, parts_N, strict=True):
            source = (store.beside if columns is both.beside else store._held)[name]
            copy_(columns[name], index_N, source, (store.index_N(),))
    return both

"""One eviction: shows what a request's heads hold to the policy, and packs what stays.

Heads hold different entries once they were evicted from, so an entry is known by its page, its place in the
page and its place in the sequence. Side by side with a page's keys and values lie its entries' places, and
what the gates noted of them when they came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from retain.budget.statement import Budget
from retain.gates.base import GateSet
from retain.vllm.packing.decide import Layer, Shown, decide
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Packed
from retain.vllm.packing.tables import build_tables, packed_entries, page_numbers
from retain.vllm.settings import Rules


@runtime_checkable
class Asked(Protocol):
    """What a request asks for."""

    @property
    def length(self) -> int: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def seed(self) -> int: ...


class Memory:
    """Pages, and what lies beside each of their entries.

    Args:
        pages: the engine's.
        notes: whether gates note anything.
    """

    def __init__(self, pages: PageStore, *, notes: bool):
        self.pages, self.layout = pages, pages.layout
        shape, device = (len(pages.pages), pages.layout.page), pages.pages.device
        # Places of packed entries; those of others follow from where their page is.
        self.places_PE = torch.zeros(shape, dtype=torch.int32, device=device)
        self.noted_PE = torch.zeros(shape, device=device) if notes else None

    def note_(
        self, layer: Int[Tensor, ""], slots_N: Int64[Tensor, " N"], noted_NH: Float[Tensor, "N H"]
    ) -> None:
        """Note numbers of a layer's tokens.

        Args:
            layer: its place in the allocation.
            slots_N: `block * page + place in the block` of each token.
        """
        assert self.noted_PE is not None
        heads_H = torch.arange(self.layout.num_heads, device=slots_N.device)
        pages_NH = page_numbers(self.layout, slots_N[:, None] // self.layout.page, layer, heads_H)
        self.noted_PE[pages_NH, (slots_N % self.layout.page)[:, None]] = noted_NH

    def move_(self, source: "Entries", target_N: Int64[Tensor, " N"], entries_N: Int64[Tensor, " N"]) -> None:
        """Copy entries to other pages, all at once.

        Args:
            source: where they are.
            target_N: the page of each.
            entries_N: its place in the page.
        """
        noted_N = None if self.noted_PE is None else self.noted_PE[source.pages_N, source.entries_N]
        self.pages.put_(target_N, entries_N, *self.pages.read(source.pages_N, source.entries_N))
        self.places_PE[target_N, entries_N] = source.places_N.int()
        if self.noted_PE is not None and noted_N is not None:
            self.noted_PE[target_N, entries_N] = noted_N


@dataclass(frozen=True)
class Entries:
    """Entries of one layer, head after head, in order of time.

    Args:
        heads_N: head of each.
        pages_N, entries_N: where it is.
        places_N: in the sequence.
    """

    heads_N: Int64[Tensor, " N"]
    pages_N: Int64[Tensor, " N"]
    entries_N: Int64[Tensor, " N"]
    places_N: Int64[Tensor, " N"]

    def select(self, which_N: Tensor) -> "Entries":
        """Some of them."""
        return Entries(*(own[which_N] for own in vars(self).values()))


@dataclass(frozen=True)
class Row:
    """What a request holds at the moment of an eviction.

    Args:
        packed: blocks that hold packed pages.
        starts_P: pages that each head holds of them.
        blocks_B: its block table.
        seen: its tokens.
    """

    packed: Packed
    starts_P: Int[Tensor, " P"]
    blocks_B: Int64[Tensor, " blocks"]
    seen: int

    def entries(self, memory: Memory, places_L: Int64[Tensor, " L"]) -> list[Entries]:
        """Entries of each layer."""
        layout, device = memory.layout, self.blocks_B.device
        columns = torch.tensor([self.packed.columns or (0,)], device=device)
        tables = build_tables(
            layout,
            self.blocks_B[None],
            torch.tensor([self.seen], device=device),
            torch.tensor([self.packed.full], device=device),
            self.starts_P[None],
            columns,
            places_L,
        )
        packed_LH = self.starts_P.diff().view(layout.num_layers, layout.num_heads).long() * layout.page
        found = []
        for pages_HW, lengths_H, packed_H in zip(*tables, packed_LH, strict=True):
            index_M = torch.arange(int(lengths_H.max()), device=device)
            heads_N, at_N = (index_M < lengths_H[:, None]).nonzero(as_tuple=True)
            pages_N, entries_N = pages_HW[heads_N, at_N // layout.page].long(), at_N % layout.page
            later_N = self.packed.full * layout.page + at_N - packed_H[heads_N]
            old_N = memory.places_PE[pages_N, entries_N].long()
            places_N = torch.where(at_N < packed_H[heads_N], old_N, later_N)
            found.append(Entries(heads_N, pages_N, entries_N, places_N))
        return found


@dataclass(frozen=True)
class Outcome:
    """What an eviction left.

    Args:
        starts_P: pages that each head holds of the packed blocks.
        freed: entries that went.
        kept: entries that stayed, of each layer, the unfilled last page's included.
        num_heads: H.
    """

    starts_P: Int[Tensor, " P"]
    freed: int
    kept: list[Entries]
    num_heads: int

    def places(self) -> list[list[list[int]]]:
        """Places that each head of each layer keeps."""
        return [
            [own.places_N[own.heads_N == head].tolist() for head in range(self.num_heads)]
            for own in self.kept
        ]


@torch.no_grad()
def evict(
    rules: Rules,
    layers: Sequence[Layer],
    memory: Memory,
    row: Row,
    window_LQSD: Float[Tensor, "L Q S D"] | None,
    after: Packed,
    asked: Asked,
    gates: GateSet | None = None,
) -> Outcome:
    """Decide which entries of a request stay, and pack them.

    Args:
        rules: the policy.
        layers: those that evict.
        memory: their pages.
        row: what the request holds.
        window_LQSD: its last queries; None where the policy observes none.
        after: which blocks hold what stays.
        asked: budget and seed of the request.
        gates: of a learned policy.
    """
    layout, device = memory.layout, row.blocks_B.device
    places_L = torch.tensor(memory.pages.places, device=device)
    entries = row.entries(memory, places_L)
    keeps = decide(
        rules,
        layers,
        partial(_show, memory, entries, window_LQSD),
        seen=row.seen,
        asked=asked,
        gates=gates,
    )
    kept = [own.select(keep_N) for own, keep_N in zip(entries, keeps, strict=True)]
    full = [own.select(own.places_N < after.full * layout.page) for own in kept]
    counts = [torch.bincount(own.heads_N, minlength=layout.num_heads) for own in full]
    counts_P = torch.cat(counts)
    total = int(counts_P.sum())
    assert not (counts_P % layout.page).any(), "heads keep whole pages"
    assert total == len(after.columns) * layout.per_block * layout.page, "what stays is what was announced"
    blocks_K = row.blocks_B[torch.tensor(after.columns, device=device)]
    all_of = Entries(*(torch.cat(parts) for parts in zip(*(vars(own).values() for own in full), strict=True)))
    memory.move_(all_of, *packed_entries(layout, blocks_K, total))
    starts_P = torch.zeros_like(row.starts_P)
    starts_P[1:] = (counts_P // layout.page).cumsum(0)
    freed = sum(len(own.places_N) for own in entries) - sum(len(own.places_N) for own in kept)
    return Outcome(starts_P, freed, kept, layout.num_heads)


def _show(
    memory: Memory, entries: Sequence[Entries], window_LQSD: Tensor | None, place: int
) -> tuple[Shown, Entries]:
    """What a layer holds, on columns: the places that any of its heads holds."""
    own, pages = entries[place], memory.pages
    H = memory.layout.num_heads
    # The last entry, of the unfilled page or a protected one, is held by every head.
    shown_T = torch.zeros(int(own.places_N.max()) + 1, dtype=torch.bool, device=own.places_N.device)
    shown_T[own.places_N] = True
    if window_LQSD is not None:
        shown_T[-window_LQSD.shape[2] :] = True  # where the queries stand, whether or not they are held
    tokens_C = shown_T.nonzero()[:, 0]
    column_N = (shown_T.cumsum(0) - 1)[own.places_N]
    keys_ND, values_ND = pages.read(own.pages_N, own.entries_N)
    held_HC = torch.zeros(H, len(tokens_C), dtype=torch.bool, device=tokens_C.device)
    held_HC[own.heads_N, column_N] = True

    def spread(values_N: Tensor) -> Tensor:
        out = values_N.new_zeros(1, H, len(tokens_C), *values_N.shape[1:])
        out[0, own.heads_N, column_N] = values_N
        return out

    noted = None if memory.noted_PE is None else spread(memory.noted_PE[own.pages_N, own.entries_N])
    queries = None if window_LQSD is None else window_LQSD[place][None]
    shown = Shown(spread(keys_ND), spread(values_ND), queries, noted, held_HC[None], tokens_C[None], column_N)
    return shown, own

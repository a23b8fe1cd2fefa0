"""Turns a budget of bytes read into pages that a query of each layer reads.

A budget states what a step of one sequence may read of what the cache holds, everything counted: the layers
that are read whole, the index that is read to choose, and keys and values of what is chosen. With n tokens
seen, H_l KV heads and e_l bytes of a key and value: `keep_ratio * sum_l n H_l e_l`, or `min(tokens_per_head,
n) * sum_l H_l e_l`, or `bytes`. What whole layers leave is split over the others in proportion to `H_l e_l`;
of a head's share its index is paid first, and the rest buys whole pages, rounded down. So a step reads at
most what is stated, and less than a page a head below it.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from retain.budget.largest_remainder import exact
from retain.budget.statement import Budget
from retain.reading.settings import Reading


@dataclass(frozen=True)
class ReadLayer:
    """A layer, as far as its bytes go.

    Args:
        layer_idx: in the model.
        num_heads: H, KV heads.
        head_dim: D.
        number_bytes: of one number of a key.
    """

    layer_idx: int
    num_heads: int
    head_dim: int
    number_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of a key and its value."""
        return 2 * self.head_dim * self.number_bytes


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A policy that reads, with its budget.

    Args:
        policy: a `retain.presets.Policy` with `reading`.
        budget: of one step of one sequence.
        layers: those with full attention, in order.
        short_tokens: a sequence of at most so many tokens is read whole where the budget holds less than what
            is always read; 0: that is an error.
        width: RoPE pairs of a head; 0 where they are not looked at.
    """

    policy: Any
    budget: Budget
    layers: tuple[ReadLayer, ...]
    short_tokens: int = 0
    width: int = 0

    @cached_property
    def reading(self) -> Reading:
        """The policy's own settings."""
        reading: Reading = self.policy.reading
        return reading

    @property
    def num_pairs(self) -> int:
        """RoPE pairs of a head that `fasa` looks at."""
        return max(1, round(self.reading.pairs * self.width)) if self.width else 0

    def whole(self, place: int) -> bool:
        """Whether a layer, by its place among these, is read whole."""
        return place < self.reading.whole_layers

    def full_bytes(self, num_seen: int) -> int:
        """Bytes of all keys and values that a sequence has seen."""
        return num_seen * sum(self._token_bytes)

    @cached_property
    def _token_bytes(self) -> tuple[int, int]:
        """Bytes of a token in the layers that are read whole, and in the others."""
        parts = [own.num_heads * own.entry_bytes for own in self.layers]
        whole = self.reading.whole_layers
        return sum(parts[:whole]), sum(parts[whole:])

    def stated_bytes(self, num_seen: int) -> Fraction:
        """Bytes that a step may read of a sequence."""
        budget, full = self.budget, self.full_bytes(num_seen)
        for ratio in (budget.keep_ratio, budget.byte_ratio):
            if ratio is not None:
                return exact(ratio) * full
        if budget.tokens_per_head is not None:
            return Fraction(self.full_bytes(min(int(budget.tokens_per_head), num_seen)))
        return Fraction(min(int(budget.bytes or 0), full))

    def room_of(self, place: int, num_seen: int) -> Fraction:
        """Bytes that a head of a layer may read of a sequence, before its index is paid."""
        whole, others = self._token_bytes
        return (self.stated_bytes(num_seen) - whole * num_seen) * self.layers[place].entry_bytes / others

    def index_bytes(self, place: int, num_seen: int) -> int:
        """Bytes of a head's index that are read to choose, at most."""
        own, layer = self.reading, self.layers[place]
        width = layer.head_dim * layer.number_bytes
        if own.by == "quest":
            return num_seen // own.page * 2 * width
        if own.by == "fasa":
            return num_seen * 2 * self.num_pairs * layer.number_bytes
        if own.by == "mpcache":
            coarse = self.coarse_of(place, num_seen)
            fine = min(num_seen // own.page, coarse * own.coarse_page // own.page)
            return (num_seen // own.coarse_page + fine) * width
        return 0

    def coarse_of(self, place: int, num_seen: int) -> int:
        """Coarse clusters of a head in which fine ones are looked at: those that are always read, and of the
        others the stated share of those that are full, or as many as the budget could fill."""
        own = self.reading
        full, there = num_seen // own.coarse_page, -(-num_seen // own.coarse_page)
        entries = max(0, int(self.room_of(place, num_seen) // self.layers[place].entry_bytes))
        wanted = max(int(own.coarse_share * full), -(-entries // own.coarse_page))
        return min(there, wanted + len(forced_pages(num_seen, own.coarse_page, own.sinks, own.recent)))

    @cached_property
    def _pages(self) -> dict[int, tuple[int | None, ...]]:
        """What `pages_of` found, by tokens seen."""
        return {}

    def pages_of(self, num_seen: int) -> tuple[int | None, ...]:
        """Pages that a query reads of each head, layer by layer; None where the layer is read whole.

        Args:
            num_seen: tokens that the query sees, itself included.

        Raises:
            ValueError: the budget holds less than what is always read.
        """
        if num_seen not in self._pages:
            self._pages[num_seen] = self._count_pages(num_seen)
        return self._pages[num_seen]

    def _count_pages(self, num_seen: int) -> tuple[int | None, ...]:
        own = self.reading
        if self.stated_bytes(num_seen) >= self.full_bytes(num_seen):
            return (None,) * len(self.layers)
        least = len(forced_pages(num_seen, own.page, own.sinks, own.recent))
        there, tail = -(-num_seen // own.page), (num_seen - 1) % own.page + 1
        found: list[int | None] = [None] * len(self.layers)
        for place in range(own.whole_layers, len(self.layers)):
            room, size = self.room_of(place, num_seen), self.layers[place].entry_bytes
            entries = (room - self.index_bytes(place, num_seen)) // size if room > 0 else 0
            # The last page is always read, and may be unfilled.
            pages = 1 + int((entries - tail) // own.page)
            if pages < least:
                if num_seen <= self.short_tokens:
                    return (None,) * len(self.layers)
                raise ValueError(self._too_little(place, num_seen, least))
            found[place] = None if pages >= there else pages
        return tuple(found)

    def _too_little(self, place: int, num_seen: int, least: int) -> str:
        stated, full, own = self.stated_bytes(num_seen), self.full_bytes(num_seen), self.reading
        layer, room = self.layers[place], float(self.room_of(place, num_seen))
        says = (
            f"policy {self.policy.name!r} may read {int(stated)} bytes of a sequence of {num_seen} tokens "
            f"({float(stated / full):.3g} of all)"
        )
        if room <= 0:
            whole = self._token_bytes[0] * num_seen
            return (
                f"{says}, and layers that are read whole ({own.whole_layers}) take {whole} bytes: state "
                "more, or fewer reading.whole_layers."
            )
        return (
            f"{says}, which leaves {room:.0f} bytes for a head of layer {layer.layer_idx}; its index takes "
            f"{self.index_bytes(place, num_seen)} of them, and {least} pages of {own.page} entries of "
            f"{layer.entry_bytes} bytes are always read: state more, or a smaller index (a larger "
            "reading.page, a smaller reading.pairs), or fewer reading.whole_layers."
        )


def forced_pages(num_seen: int, page: int, sinks: int, recent: int) -> set[int]:
    """Pages that are always read: those of the first `sinks` and the last `recent` tokens."""
    first = range(-(-min(sinks, num_seen) // page))
    last = range(max(0, num_seen - recent) // page, -(-num_seen // page))
    return {*first, *last}

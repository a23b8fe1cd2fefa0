"""Budgets: how many entries each sequence may keep, over all layers, in whole entries.

In: what the user states (a ratio, tokens per head, or bytes), the lengths of the sequences, and what a
layer's entries are. Out: integers whose sum is exact. The decision taken here: every policy is given the
same total, the sum over layers of what equal budgets would keep, so that policies compare at equal memory
whatever they share it between; and every share is a rational number until it is rounded once
(`retain/apportion.py`): 0.2 of 100 is 20, where `int(100 * (1 - 0.8))` is 19. How a total is spread over
layers and heads is `retain/allocation.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from retain.apportion import apportion, exact

Scope = Literal["head", "layer", "model"]
SCOPES: tuple[Scope, ...] = ("head", "layer", "model")


@dataclass(frozen=True)
class Budget:
    """How much is kept. Exactly one of the first four is stated.

    Args:
        keep_ratio: kept / seen, in (0, 1].
        tokens_per_head: entries per KV head, at least 1 (capped at what a sequence has).
        bytes: of keys and values, per sequence, over all layers that evict.
        bytes_total: of keys and values, of the whole batch, split over its sequences by their lengths.
        scope: `head` gives every head the same, `layer` lets the heads of a layer share by score, `model` the
            heads of all layers; None leaves it to the policy.
    """

    keep_ratio: float | None = None
    tokens_per_head: int | None = None
    bytes: int | None = None
    bytes_total: int | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        names = ("keep_ratio", "tokens_per_head", "bytes", "bytes_total")
        stated = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(stated) != 1:
            given = ", ".join(f"{name}={value}" for name, value in stated.items()) or "none"
            raise ValueError(
                f"a budget is stated once, as {', '.join(names[:-1])} or {names[-1]}; got {given}."
            )
        for name, value in stated.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} is a number; got {value!r}.")
        if self.keep_ratio is not None and not 0 < self.keep_ratio <= 1:
            raise ValueError(
                f"keep_ratio is kept / seen, above 0 and at most 1; got {self.keep_ratio} "
                "(to remove 80 %, pass keep_ratio=0.2)."
            )
        for name in names[1:]:
            value = stated.get(name)
            if value is not None and (value < 1 or value != int(value)):
                raise ValueError(f"{name} is a whole number of at least 1; got {value}.")
        if self.scope not in (None, *SCOPES):
            raise ValueError(f"a budget's scope is 'head', 'layer' or 'model'; got {self.scope!r}.")


@dataclass(frozen=True)
class LayerShape:
    """What an entry of a layer is.

    Args:
        num_heads: H, KV heads.
        entry_bytes: bytes of one key and value.
    """

    num_heads: int
    entry_bytes: int


@dataclass(frozen=True)
class Totals:
    """What each sequence of a batch may hold.

    Args:
        lengths_B: tokens seen by each sequence, padding apart.
        heads_L: H of each layer that evicts.
        equal_BL: entries of each layer under equal budgets.
    """

    lengths_B: tuple[int, ...]
    heads_L: tuple[int, ...]
    equal_BL: tuple[tuple[int, ...], ...]

    @property
    def total_B(self) -> list[int]:
        """Entries of each sequence, over all layers."""
        return [sum(row) for row in self.equal_BL]

    @property
    def per_head_B(self) -> list[Fraction]:
        """Mean budget of a head of each sequence, exact: what fractions of a budget are fractions of."""
        return [Fraction(total, sum(self.heads_L)) for total in self.total_B]

    @property
    def capacity_BL(self) -> list[list[int]]:
        """Entries that exist in each layer."""
        return [[length * heads for heads in self.heads_L] for length in self.lengths_B]


def spread(budget: Budget, lengths_B: Sequence[int], layers: Sequence[LayerShape]) -> Totals:
    """Entries of each sequence and layer when all heads get the same.

    With `n_b` the length of sequence b and `H_l` the heads of layer l: `round(keep_ratio * n_b * H_l)` with
    halves rounded up, or `min(tokens_per_head, n_b) * H_l`, or for bytes `floor(bytes / entry_bytes)` entries
    over all layers, split evenly by largest remainder (by bytes, where layers' entries differ in size); never
    more than `n_b * H_l`. All in exact arithmetic.

    Args:
        budget: what was stated.
        lengths_B: tokens seen by each sequence, padding apart.
        layers: those that evict, in order.

    Raises:
        ValueError: if a layer of a sequence would get fewer entries than heads: no head may be empty.
    """
    entry_bytes = layers[0].entry_bytes
    bytes_B = _bytes_of(budget, lengths_B, entry_bytes)
    equal_BL = []
    for row, length in enumerate(lengths_B):
        if budget.keep_ratio is not None:
            share = exact(budget.keep_ratio) * length
            equal = [math.floor(share * layer.num_heads + Fraction(1, 2)) for layer in layers]
        elif budget.tokens_per_head is not None:
            equal = [int(budget.tokens_per_head) * layer.num_heads for layer in layers]
        elif len({layer.entry_bytes for layer in layers}) == 1:
            heads = [Fraction(layer.num_heads) for layer in layers]
            equal = apportion(bytes_B[row] // entry_bytes, heads)
        else:
            size = sum(layer.num_heads * layer.entry_bytes for layer in layers)
            equal = [bytes_B[row] * layer.num_heads // size for layer in layers]
        equal = [min(own, length * layer.num_heads) for own, layer in zip(equal, layers, strict=True)]
        for idx, (own, layer) in enumerate(zip(equal, layers, strict=True)):
            if length and own < layer.num_heads:
                least = sum(other.num_heads * other.entry_bytes for other in layers)
                raise ValueError(
                    f"sequence {row} of {length} tokens gets {own} entries for the {layer.num_heads} KV "
                    f"heads of layer {idx}, and no head may be empty: state at least one entry a head "
                    f"(keep_ratio {1 / length:.3g}, tokens_per_head 1, or {least} bytes a sequence)."
                )
        equal_BL.append(tuple(equal))
    heads_L = tuple(layer.num_heads for layer in layers)
    return Totals(tuple(lengths_B), heads_L, tuple(equal_BL))


def _bytes_of(budget: Budget, lengths_B: Sequence[int], entry_bytes: int) -> list[int]:
    """Bytes of each sequence: as stated, or the batch's, split by length in whole entries."""
    if budget.bytes_total is not None:
        weights = [Fraction(length) for length in lengths_B]
        return [share * entry_bytes for share in apportion(budget.bytes_total // entry_bytes, weights)]
    return [int(budget.bytes or 0)] * len(lengths_B)

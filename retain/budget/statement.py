"""Turns a stated budget (ratio, tokens per head, or bytes) into whole entries per sequence and layer.

Every policy gets the same total, the sum over layers of what equal budgets would keep, so that policies
compare at equal memory however they share it. 0.2 of 100 is 20, where `int(100 * (1 - 0.8))` is 19. A ratio
refers to the tokens seen (or announced), and a budget is never more than what is still held. A threshold
states no budget: the scores decide how much is kept (`retain.attention.ranking.admit`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from retain.budget.largest_remainder import exact, largest_remainder
from retain.shapes import LayerShape


@dataclass(frozen=True)
class Budget:
    """A stated budget. Exactly one field is given.

    Args:
        keep_ratio: kept / seen, in (0, 1].
        tokens_per_head: entries per KV head, at least 1 (capped at what a sequence has).
        bytes: of keys and values, per sequence, over all layers that evict.
        byte_ratio: bytes held / bytes of all that was seen, in (0, 1]: as many whole entries as fit.
        threshold: no budget: entries that score below it go, however many are left
            (`retain.attention.ranking.admit`); in the unit of the policy's score, any finite number.
    """

    keep_ratio: float | None = None
    tokens_per_head: int | None = None
    bytes: int | None = None
    byte_ratio: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        names = [*vars(self)]
        stated = {name: value for name, value in vars(self).items() if value is not None}
        if len(stated) != 1:
            given = ", ".join(f"{name}={value}" for name, value in stated.items()) or "none"
            raise ValueError(
                f"a budget is stated once, as {', '.join(names[:-1])} or {names[-1]}; got {given}."
            )
        ((name, value),) = stated.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ValueError(f"{name} is a number; got {value!r}.")
        if name in ("keep_ratio", "byte_ratio") and not 0 < value <= 1:
            part = "kept / seen" if name == "keep_ratio" else "bytes held / bytes of all that was seen"
            raise ValueError(
                f"{name} is {part}, above 0 and at most 1; got {value} (to remove 80 %, pass {name}=0.2)."
            )
        if name in ("tokens_per_head", "bytes") and (value < 1 or value != int(value)):
            raise ValueError(f"{name} is a whole number of at least 1; got {value}.")


@dataclass(frozen=True)
class Totals:
    """Entries that each sequence of a batch may hold.

    Args:
        lengths_B: as in `retain.evidence.Stock`.
        heads_L: H of each layer that evicts.
        equal_BL: entries of each layer under equal budgets, as stated: at most `length * H`, whether or not
            they are still there.
        held_BL: entries that are still there.
        whole_B: which sequences are short and held whole, since the stated budget is too little for them.
    """

    lengths_B: tuple[int, ...]
    heads_L: tuple[int, ...]
    equal_BL: tuple[tuple[int, ...], ...]
    held_BL: tuple[tuple[int, ...], ...]
    whole_B: tuple[bool, ...]

    @property
    def per_head_B(self) -> tuple[Fraction, ...]:
        """Stated entries of a head in the mean over layers, exact, to which fractions of a budget refer."""
        return tuple(Fraction(stated, sum(self.heads_L)) for stated in self.stated_B)

    @property
    def stated_B(self) -> list[int]:
        """Entries of each sequence, over all layers, as stated."""
        return [sum(row) for row in self.equal_BL]

    @property
    def total_B(self) -> list[int]:
        """Entries that each sequence keeps where layers share: as stated, or all that there are."""
        return [*map(min, self.stated_B, map(sum, self.held_BL))]

    def hold_whole(self, rows: Sequence[int]) -> "Totals":
        """Hold these sequences whole too."""
        equal_BL, whole_B = [*self.equal_BL], [*self.whole_B]
        for row in rows:
            equal_BL[row] = tuple(self.lengths_B[row] * heads for heads in self.heads_L)
            whole_B[row] = True
        return replace(self, equal_BL=tuple(equal_BL), whole_B=tuple(whole_B))


def spread(
    budget: Budget,
    lengths_B: Sequence[int],
    layers: Sequence[LayerShape],
    held_BL: Sequence[Sequence[int]] | None = None,
    *,
    short_tokens: int = 0,
) -> Totals:
    """Entries of each sequence and layer under equal budgets.

    With `n_b` the length of sequence b and `H_l` the heads of layer l: `round(keep_ratio * n_b * H_l)` with
    halves rounded up, or `min(tokens_per_head, n_b) * H_l`, or for bytes `floor(bytes / entry_bytes)` entries
    over all layers, split evenly by largest remainder (by bytes, where layers' entries differ in size); never
    more than `n_b * H_l`. A byte ratio states `floor(byte_ratio * n_b * sum_l H_l * entry_bytes)` bytes. All
    is kept where all of it fits. Else `metadata_bytes` are paid for: as many entries are kept as fit into the
    bytes of those that are stated. Where entries are held in fewer bytes, bytes pay what an entry takes in
    the mean and, once, what every head takes apart from its entries; ratios and tokens count entries. All in
    exact arithmetic. A threshold states nothing: what exists is the bound.

    Args:
        budget: as stated.
        lengths_B: as in `retain.evidence.Stock`.
        layers: those that evict, in order.
        held_BL: entries that each layer of each sequence still holds; None for all, `n_b * H_l`.
        short_tokens: sequences of at most so many tokens are held whole rather than refused.

    Raises:
        ValueError: if a layer that has entries to keep would get fewer than heads: no head may be empty.
    """
    heads_L = tuple(layer.num_heads for layer in layers)
    all_BL = tuple(tuple(length * heads for heads in heads_L) for length in lengths_B)
    held_BL = all_BL if held_BL is None else tuple(map(tuple, held_BL))
    equal_BL: list[tuple[int, ...]] = []
    short = []
    for row, (length, held) in enumerate(zip(lengths_B, held_BL, strict=True)):
        assert len(held) == len(layers), "one count for each layer that evicts, in order"
        equal = held if budget.threshold is not None else _stated(budget, length, layers)
        for idx, (entries, layer) in enumerate(zip(equal, layers, strict=True)):
            if entries < min(held[idx], layer.num_heads):
                if length <= short_tokens:
                    short.append(row)
                    break
                raise ValueError(
                    f"sequence {row} of {length} tokens gets {entries} entries for the {layer.num_heads} KV "
                    f"heads of layer {idx}, and no head may be empty: state more than is protected, and at "
                    "the very least one entry a head."
                )
        equal_BL.append(equal)
    whole_B = (False,) * len(lengths_B)
    return Totals(tuple(lengths_B), heads_L, tuple(equal_BL), held_BL, whole_B).hold_whole(short)


def _stated(budget: Budget, length: int, layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """Entries of each layer of a sequence, at most those that there were."""
    heads_L = [layer.num_heads for layer in layers]
    most_L = [length * heads for heads in heads_L]
    if budget.keep_ratio is not None or budget.tokens_per_head is not None:
        tokens = int(budget.tokens_per_head or 0)
        entries_L = [tokens * heads for heads in heads_L]
        if budget.keep_ratio is not None:
            entries_L = [math.floor(exact(budget.keep_ratio) * most + Fraction(1, 2)) for most in most_L]
        fits = all(entries >= most for entries, most in zip(entries_L, most_L, strict=True))
        if not fits and any(entries_L) and any(layer.metadata_bytes for layer in layers):
            # As many as fit into the bytes of these, with what attention reads with each.
            shares = [
                Fraction(entries * layer.entry_bytes, layer.entry_bytes + layer.metadata_bytes)
                for entries, layer in zip(entries_L, layers, strict=True)
            ]
            entries_L = largest_remainder(math.floor(sum(shares)), shares)
        return tuple(map(min, entries_L, most_L))
    size = int(budget.bytes or 0)
    if budget.byte_ratio is not None:
        all_bytes = sum(layer.num_heads * layer.entry_bytes for layer in layers) * length
        size = math.floor(exact(budget.byte_ratio) * all_bytes)
    paid_L = [layer.paid_bytes for layer in layers]
    # Nothing is read with entries where all are kept.
    whole = sum(
        layer.bytes_of(most) - most * layer.metadata_bytes for most, layer in zip(most_L, layers, strict=True)
    )
    if size >= whole:
        return tuple(most_L)
    left = max(Fraction(0), size - sum(layer.num_heads * layer.head_bytes for layer in layers))
    if len({*paid_L}) == 1:
        entries_L = largest_remainder(int(left // paid_L[0]), [Fraction(heads) for heads in heads_L])
    else:
        total = sum(heads * paid for heads, paid in zip(heads_L, paid_L, strict=True))
        entries_L = [int(left * heads // total) for heads in heads_L]
    return tuple(map(min, entries_L, most_L))

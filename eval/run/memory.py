"""Counts what a cache holds, and checks that policies of one budget hold equally much.

Equal memory is checked, not assumed: a cache holds exactly what its budget states of the tokens seen at the
last eviction, plus the tokens since; and policies of one budget that have seen equally much of a context hold
equally many entries and bytes of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from retain.budget.statement import Budget, LayerShape, spread
from retain.eval.config import budget_for
from retain.hf.cache.cache import Cache
from retain.presets import Policy

# Where something stands with an entry for attention (merged weights), a budget in bytes is rounded to
# entries: 2 % are half an entry of each of 4 layers at 25 entries a layer.
ROUNDED = 0.02
# Where entries are packed, a group of them may not be full in any head: bytes are less by up to this share.
PACKED = 0.1


@dataclass(frozen=True)
class Held:
    """Entries and bytes that a cache holds of a sequence, and of all that the sequence has seen, over all
    layers that evict and their KV heads."""

    entries_held: int
    entries_seen: int
    bytes_held: int
    bytes_seen: int


def held_of(cache: Cache) -> list[Held]:
    """Counts what a cache holds of each sequence. While it is held densely, bytes are by share of entries."""
    total = cache.report().total
    held_B, seen_B = _counts(cache)
    stores = cache.state.stores
    heads = _heads(cache)
    entries, seen = int(held_B.sum()), int(seen_B.sum()) * heads
    bytes_B = [total.bytes_held * held // entries for held in held_B.tolist()]
    if len(stores) == len(cache.state.specs):
        each = [(store.bytes_B - cache.state.unused_bytes_B(store)).cpu() for store in stores]
        bytes_B = torch.stack(each).sum(0).tolist()
    return [
        Held(held, length * heads, bytes_held, total.bytes_full * length * heads // seen)
        for held, length, bytes_held in zip(held_B.tolist(), seen_B.tolist(), bytes_B, strict=True)
    ]


def check_budget(cache: Cache, name: str, budget: Budget, policies_B: Sequence[Policy]) -> None:
    """Checks that every sequence holds what the budget states of the tokens seen at the last eviction, and
    the tokens since; before any eviction, all.

    Args:
        cache: Of sequences under one budget.
        name: What the message calls it.
        budget: As the config states it.
        policies_B: Policy of each sequence.

    Raises:
        RuntimeError: It holds another number of entries.
    """
    held_B, seen_B = _counts(cache)
    heads, wanted_B = _heads(cache), seen_B * _heads(cache)
    since = cache.num_seen - cache.state.evicted_at if cache.evictions else 0
    if cache.evictions:
        size = cache.state.element_size
        shapes = [
            LayerShape(spec.num_kv_heads, spec.entry_width * size, element_size=size)
            for spec in cache.state.specs
        ]
        for place, (length, policy) in enumerate(zip((seen_B - since).tolist(), policies_B, strict=True)):
            layers = [policy.shape_held(shape) for shape in shapes]
            (stated,) = spread(budget_for(budget, policy), [length], layers).total_B
            wanted_B[place] = stated + since * heads
    if not torch.equal(held_B, wanted_B):
        raise RuntimeError(
            f"{name} holds {held_B.tolist()} entries where the budget and the {since} tokens since the last "
            f"of {cache.evictions} evictions are {wanted_B.tolist()}"
        )
    regime = cache.state.regime
    if "decode" in regime.parts and cache.evictions and since >= regime.every:
        raise RuntimeError(
            f"{name}: {since} tokens have come since the last eviction, and entries go every {regime.every}"
        )


def check_equal_bytes(
    lines: Sequence[Mapping[str, Any]], policies: Mapping[tuple[str, str], Policy | None]
) -> None:
    """Checks that lines of one budget which have seen equally much of an item hold equally much of it: as
    many entries and bytes, or if something stands with the entries of one, as many bytes but for rounding. A
    policy that holds entries in fewer bytes holds no more bytes than the budget states, and no less but for
    rounding, unless it holds everything.

    Args:
        lines: Of the table.
        policies: By policy and protection of a line.

    Raises:
        RuntimeError: They do not.
    """
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    exact: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for line in lines:
        policy = policies.get((line["policy"], line["protection"]))
        entries, held = line["entries_held"], line["bytes_held"]
        if policy is not None and policy.precision is not None:
            stated = line["keep_ratio"] * line["bytes_seen"]
            least = 0.0 if entries == line["entries_seen"] else (1 - PACKED) * stated
            if not least <= held <= stated:
                raise RuntimeError(
                    f"unequal memory at {_place(line)}: {line['policy']} holds {held} bytes, of "
                    f"{stated:.0f} that the budget states"
                )
            continue
        columns = ("budget", "when", "question", "task", "seed", "item", "entries_seen")
        place = tuple(line[column] for column in columns)
        like = exact.setdefault((*place, policy.metadata_bytes if policy else 0), line)
        equal = (entries, held) == (like["entries_held"], like["bytes_held"])
        other = first.setdefault(place, line) if equal else like
        if not equal or abs(held - other["bytes_held"]) > ROUNDED * other["bytes_held"]:
            raise RuntimeError(
                f"unequal memory at {_place(line)}: {line['policy']} holds {entries} entries and {held} "
                f"bytes, {other['policy']} {other['entries_held']} and {other['bytes_held']}"
            )


def positions_held(cache: Cache, place: int) -> list[list[Tensor]]:
    """Returns the positions of the entries that a sequence holds, by layer and head."""
    found = []
    for layer, spec in zip(cache.state.ragged, cache.state.specs, strict=True):
        if layer.store is None:
            every = cache.state.positions_BT[place][cache.state.valid_BT[place]]
            found.append([every] * spec.num_kv_heads)
            continue
        positions_N, rows_N = layer.store.positions_C[layer.store.index_N()], layer.store.rows_N()
        first = place * spec.num_kv_heads
        found.append([positions_N[rows_N == first + head] for head in range(spec.num_kv_heads)])
    return found


def _counts(cache: Cache) -> tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]:
    """Entries that each sequence holds, and tokens that it has seen."""
    table = cache.budgets()
    return table.held_BLH.sum((1, 2)), table.seen_B


def _heads(cache: Cache) -> int:
    return sum(int(spec.num_kv_heads) for spec in cache.state.specs)


def _place(line: Mapping[str, Any]) -> str:
    return f"{line['budget']}, {line['when']}, item {line['item']} of {line['task']} (seed {line['seed']})"

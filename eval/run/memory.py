"""Counts what a cache holds, and checks that policies of one budget hold equally much.

Equal memory is checked, not assumed: a cache holds exactly what its budget states of the tokens seen at the
last eviction, plus the tokens since; and policies of one budget that have seen equally much of a context hold
equally many entries and bytes of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from retain.budget.statement import Budget, spread
from retain.eval.config import Candidate, budget_for, budget_label
from retain.hf.cache.cache import Cache
from retain.presets import Policy
from retain.shapes import LayerShape

# Where something stands with an entry for attention (merged weights), a budget in bytes is rounded to
# entries: 2 % are half an entry of each of 4 layers at 25 entries a layer.
ROUNDED = 0.02
# Where entries are packed, a group of them may not be full in any head: bytes are less by up to this share.
PACKED = 0.1


def held_of(
    cache: Cache, candidate: Candidate, budget: Budget, policies: Mapping[Candidate, Policy]
) -> dict[str, Any]:
    """Counts entries and bytes that the cache of one sequence holds and has seen, over all layers that evict
    and their KV heads.

    Raises:
        RuntimeError: It holds another number of entries than the budget states of the tokens seen at the last
            eviction, and the tokens since; or before any eviction, not all.
    """
    total, state = cache.report().total, cache.state
    name, wanted, since = f"{candidate.label} at {budget_label(budget)}", total.entries_seen, 0
    if cache.evictions:
        policy, size = policies[candidate], state.element_size
        since = cache.num_seen - state.evicted_at
        shapes = [
            LayerShape(spec.num_kv_heads, spec.entry_width * size, element_size=size) for spec in state.specs
        ]
        layers = [policy.shape_held(shape) for shape in shapes]
        (stated,) = spread(budget_for(budget, policy), [cache.num_seen - since], layers).total_B
        wanted = stated + since * sum(spec.num_kv_heads for spec in state.specs)
    if total.entries_held != wanted:
        raise RuntimeError(
            f"{name} holds {total.entries_held} entries where the budget and the {since} tokens since the "
            f"last of {cache.evictions} evictions are {wanted}"
        )
    if "decode" in state.when.parts and cache.evictions and since >= state.when.every:
        raise RuntimeError(
            f"{name}: {since} tokens have come since the last eviction, and entries go every "
            f"{state.when.every}"
        )
    return {
        "entries_held": total.entries_held,
        "entries_seen": total.entries_seen,
        "bytes_held": total.bytes_held,
        "bytes_seen": total.bytes_full,
    }


def check_equal_bytes(lines: Sequence[Mapping[str, Any]], policies: Mapping[Candidate, Policy]) -> None:
    """Checks that lines of one budget which have seen equally much of an item hold equally much of it: as
    many entries and bytes, or if something stands with the entries of one, as many bytes but for rounding. A
    policy that holds entries in fewer bytes holds no more bytes than the budget states, and no less but for
    rounding, unless it holds everything.

    Raises:
        RuntimeError: They do not.
    """
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    exact: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for line in lines:
        policy = policies.get(Candidate(line["policy"], line["protection"]))
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


def positions_held(cache: Cache) -> list[Tensor]:
    """Returns the positions of the entries that the cache of one sequence holds, a tensor for each layer and
    head."""
    found = []
    for layer, spec in zip(cache.state.ragged, cache.state.specs, strict=True):
        if (store := layer.store) is None:
            found += [cache.state.positions_BT[0]] * spec.num_kv_heads
            continue
        positions_N, rows_N = store.positions_C[store.index_N()], store.rows_N()
        found += [positions_N[rows_N == head] for head in range(spec.num_kv_heads)]
    return found


def _place(line: Mapping[str, Any]) -> str:
    return f"{line['budget']}, {line['when']}, item {line['item']} of {line['task']} (seed {line['seed']})"

"""Counts what a cache holds, and checks that policies of one budget hold equally much.

Equal memory is checked, not assumed: a cache holds exactly the entries that its budget states of the tokens
seen at the last eviction, plus the tokens since, and as many bytes as plain entries under that budget take.
"""

from collections.abc import Mapping
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
        RuntimeError: It holds other entries than the budget states of the tokens seen at the last eviction,
            and the tokens since; or other bytes than as many plain ones, but for rounding where something
            stands with entries or they are packed; or before any eviction, not all.
    """
    total, state = cache.report().total, cache.state
    wanted = plain = total.entries_seen
    policy, size, since = policies.get(candidate), state.element_size, 0
    lacks = exceeds = ROUNDED if policy is not None and policy.metadata_bytes else 0.0
    # Packed entries may all fit, and nothing is evicted.
    if policy is not None and (cache.evictions or policy.precision is not None):
        seen = state.evicted_at if cache.evictions else cache.num_seen
        since, heads = cache.num_seen - seen, sum(spec.num_kv_heads for spec in state.specs)
        shapes = [
            LayerShape(spec.num_kv_heads, spec.entry_width * size, element_size=size) for spec in state.specs
        ]
        held = [policy.shape_held(shape) for shape in shapes]
        wanted = spread(budget_for(budget, policy), [seen], held).total_B[0] + since * heads
        plain = spread(budget, [seen], shapes).total_B[0] + since * heads
        if policy.precision is not None:
            lacks, exceeds = PACKED if wanted < total.entries_seen else 1.0, 0.0
    name = f"{candidate.label} at {budget_label(budget)}"
    if total.entries_held != wanted:
        raise RuntimeError(
            f"{name} holds {total.entries_held} entries where the budget and the {since} tokens since the "
            f"last of {cache.evictions} evictions are {wanted}"
        )
    stated = plain * total.bytes_full / total.entries_seen
    if not (1 - lacks) * stated <= total.bytes_held <= (1 + exceeds) * stated:
        raise RuntimeError(
            f"unequal memory: {name} holds {total.bytes_held} bytes, where {plain} entries take {stated:.0f}"
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

"""Computes the bytes of a model's cache, full and evicted, without weights and without a token."""

import math
from dataclasses import dataclass

from retain.budget.statement import Budget, spread
from retain.hf.model.layout import Layout
from retain.presets import Policy
from retain.shapes import LayerShape


@dataclass(frozen=True)
class Footprint:
    """Bytes of one sequence.

    Args:
        tokens: that were read.
        full: of layers that evict, in transformers' cache.
        kept: of the same layers after one eviction, side columns included.
        alone: of layers that are left alone; None: one has a recurrent state, whose size is not computed.
    """

    tokens: int
    full: int
    kept: int
    alone: int | None


def footprint(layout: Layout, tokens: int, *, policy: Policy, keep_ratio: float) -> Footprint:
    """Computes the bytes of a cache of `tokens` tokens.

    A window of W tokens leaves W - 1 entries that a later query can see.

    Args:
        layout: a model's layers.
        tokens: of one sequence.
        policy: whose side columns count.
        keep_ratio: kept / seen.

    Raises:
        ValueError: a budget that leaves a head empty.
    """
    plain = [
        LayerShape(
            spec.num_kv_heads, spec.entry_width * spec.dtype.itemsize, element_size=spec.dtype.itemsize
        )
        for spec in layout.evicting
    ]
    shapes = [policy.shape_held(shape) for shape in plain]
    (entries_L,) = spread(Budget(keep_ratio=keep_ratio), [tokens], shapes).equal_BL
    full = kept = 0
    for whole, shape, entries in zip(plain, shapes, entries_L, strict=True):
        most = tokens * whole.num_heads
        full += most * whole.entry_bytes
        # Where nothing was evicted, there are no side columns.
        if entries >= most and policy.precision is None:
            kept += most * shape.entry_bytes
        else:
            kept += math.ceil(shape.bytes_of(entries))
    windows = [left.window for left in layout.alone.values()]
    # Heads of layers with a window are as those of full attention, in all families.
    width = plain[0].num_heads * plain[0].entry_bytes
    seen = [min(tokens, window - 1) for window in windows if window is not None]
    alone = sum(seen) * width if len(seen) == len(windows) else None
    return Footprint(tokens, full, kept, alone)

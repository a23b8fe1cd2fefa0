"""Computes what a model's cache takes, full and evicted, without weights and without a token.

Of a model on the meta device (`retain.models.unloaded`). The full side is not a formula: the layers of
transformers' own cache are filled, on the meta device too, and say what they hold, so that windows and
recurrent states count as they are. The kept side is the budget statement's own arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from retain.budget.statement import Budget, LayerShape, spread
from retain.hf.model.decoder import base_model
from retain.hf.model.families import FAMILIES, REGULAR
from retain.hf.model.layout import LayerSpec, Layout
from retain.hf.model.pass_through_layers import held_bytes
from retain.hf.model.projection import input_width
from retain.hf.version_names import STATES
from retain.presets import Policy

# Kinds of layers that hold nothing.
EMPTY = ("mlp", "moe", "dummy")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one sequence.

    Args:
        tokens: that were read.
        full: of layers that evict, in transformers' own cache.
        kept: of the same layers after one eviction, with what stands beside entries.
        alone: of layers that are left alone; None: of a kind whose state is not known before it runs.
    """

    tokens: int
    full: int
    kept: int
    alone: int | None


def footprint(
    model: nn.Module, layout: Layout, tokens: int, *, policy: Policy, keep_ratio: float
) -> Footprint:
    """What a cache of `tokens` tokens takes.

    A window of W tokens leaves W - 1 entries that a later query can see. Where layers that evict have one, no
    more than these are kept, however large the budget.

    Args:
        model: a causal language model on the meta device.
        layout: its layers.
        tokens: of one sequence.
        policy: whose bytes beside entries count.
        keep_ratio: kept / seen.

    Raises:
        ValueError: a budget that leaves a head empty.
    """
    held = _held(model, layout, tokens)
    alone = [held[idx] for idx in layout.alone]
    return Footprint(
        tokens=tokens,
        full=sum(held[spec.layer_idx] or 0 for spec in layout.evicting),
        kept=_kept(layout.evicting, tokens, policy, keep_ratio),
        alone=None if None in alone else sum(own or 0 for own in alone),
    )


def _kept(specs: Sequence[LayerSpec], tokens: int, policy: Policy, keep_ratio: float) -> int:
    """Bytes of what a budget keeps; sharing it between layers changes their parts, not the sum."""
    shapes = [
        policy.shape_held(
            LayerShape(
                spec.num_kv_heads,
                spec.entry_width * spec.dtype.itemsize,
                element_size=spec.dtype.itemsize,
            )
        )
        for spec in specs
    ]
    (entries_L,) = spread(Budget(keep_ratio=keep_ratio), [tokens], shapes).equal_BL
    kept = 0
    for spec, shape, entries in zip(specs, shapes, entries_L, strict=True):
        seen = tokens if spec.window is None else min(tokens, spec.window - 1)
        most = seen * shape.num_heads
        # Where nothing went but what no query can see, nothing stands beside what is left.
        if entries >= most and policy.precision is None:
            kept += most * shape.entry_bytes
        else:
            kept += math.ceil(shape.bytes_of(min(entries, most)))
    return kept


def _held(model: nn.Module, layout: Layout, tokens: int) -> list[int | None]:
    """Bytes that each layer of transformers' own cache holds after so many tokens."""
    base = base_model(model)
    layers: Any = base.layers
    cache = DynamicCache(config=base.config)
    family = FAMILIES.get(base.config.model_type, REGULAR)
    known: dict[Any, int] = {}  # layers alike hold the same
    held: list[int | None] = []
    for idx, own in enumerate(cache.layers[: layout.num_layers]):
        attention = getattr(layers[idx], family.attention, None)
        mixer = getattr(layers[idx], "linear_attn", None)
        if attention is not None:
            D = attention.head_dim
            width = input_width(getattr(attention, family.output)) or 0
            shape = (1, width // D // attention.num_key_value_groups, tokens, D)
            like: Any = (type(own), getattr(own, "sliding_window", None), shape)
            if like not in known:
                entries = torch.empty(shape, dtype=base.dtype, device="meta")
                own.update(entries, entries)
                known[like] = held_bytes(own)
            held.append(known[like])
        elif mixer is not None:
            # Its state has one size, whatever was read.
            like = tuple(one.shape for one in mixer.parameters())
            if like not in known:
                hidden = torch.empty(1, 2, base.config.hidden_size, dtype=base.dtype, device="meta")
                mixer(hidden, attention_mask=None, **{STATES: cache})
                known[like] = held_bytes(own)
            held.append(known[like])
        else:
            nothing = idx in layout.alone and layout.alone[idx].kind in EMPTY
            held.append(0 if nothing else None)
    return held

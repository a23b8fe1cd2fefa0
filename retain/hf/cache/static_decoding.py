"""Decodes in one graph: while `generate` compiles, the layers of a cache are static rows.

transformers compiles the decoding step of a cache that says `is_compileable`. Ours is that once the first
forward of a `generate` was read: its layers are laid out in a pool (`retain.cache.static_rows`), and hooks,
masks and Python between a query and its attention fall away. `leave` counts what came, and the cache goes on
as before.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from retain.cache.static_rows import StaticRows, pool_of, rounded
from retain.cache.store import RaggedStore
from retain.hf.cache.layer import Layer
from retain.hf.cache.state import State
from retain.hf.model.families import SLIDING
from retain.kernels.decode_step import build, path_of
from retain.kernels.ragged_attention.pages import PAGE

# Tokens to come for which rows are given places at once, at most.
MOST_ROOM = 1024


def refused(state: State) -> str | None:
    """Why a cache decodes as written, in words; None: it may be static."""
    bound = state.bound_policy
    if kinds := {left.kind for left in state.layout.alone.values()} - {SLIDING}:
        return f"the model has layers of another kind ({', '.join(sorted(kinds))})"
    if bound.precision is not None or any(store.packed is not None for store in state.stores):
        return "entries are held in fewer bits"
    wants = bound.wants
    if _evicts_while_decoding(state) and (wants.learned or wants.running or wants.queries is None):
        return "it is evicted from while it decodes, by what every step shows"
    if "chunked" in state.regime.parts and not bound.keeps_all and wants.queries != 0:
        return "later reads are evicted from by the queries of steps too"
    return None


def unlike(state: State) -> str | None:
    """Why the layers of a cache that has read its prompt share no pool, in words; None: they may."""
    alone = [state.layers[idx] for idx in state.layout.alone]
    own = [layer.dense()[0] if layer.store is None else layer.store.plain.keys_CD for layer in state.ragged]
    kinds = {(one.shape[-1], one.dtype, one.device) for one in [*own, *(layer.keys for layer in alone)]}
    return "its layers differ in width, precision or device" if len(kinds) > 1 else None


def _evicts_while_decoding(state: State) -> bool:
    return "decode" in state.regime.parts and not state.bound_policy.keeps_all


def steps_unseen(state: State, most: int) -> int:
    """Steps of which nothing need be seen, at most so many: an eviction while it decodes looks at the last
    queries, which steps as written show it."""
    if not _evicts_while_decoding(state):
        return most
    assert isinstance(state.bound_policy.wants.queries, int)
    came = state.num_seen - (state.moments or [0])[-1]
    return min(most, state.regime.every - came - max(1, state.bound_policy.wants.queries))


def _windowed(layer: Any, state: State) -> RaggedStore:
    """A layer of transformers with a sliding window, as a store."""
    held = layer.keys.shape[2]
    valid_BT, positions_BT = (own[:, own.shape[1] - held :] for own in (state.valid_BT, state.positions_BT))
    keep_BHT = valid_BT.to(layer.keys.device)[:, None].expand(layer.keys.shape[:3])
    return RaggedStore.from_dense(layer.keys, layer.values, positions_BT.to(layer.keys.device), keep_BHT)


def _put_back(layer: Any, store: RaggedStore, came: int) -> None:
    """The same layer of transformers, with the last tokens of a store in its window, padding before them."""
    keys_ND, values_ND, _, row_N = store.flat()
    layer.cumulative_length += came
    B, H = store.lengths_BH.shape
    held = min(layer.cumulative_length, layer.sliding_window - 1)
    lengths_R = store.lengths_R.long()
    place_N = held - lengths_R[row_N] + torch.arange(len(row_N), device=row_N.device)
    place_N -= (lengths_R.cumsum(0) - lengths_R)[row_N]
    inside_N = place_N >= 0
    for name, column_ND in (("keys", keys_ND), ("values", values_ND)):
        dense = column_ND.new_zeros(B * H, held, column_ND.shape[1])
        dense[row_N[inside_N], place_N[inside_N]] = column_ND[inside_N]
        setattr(layer, name, dense.view(B, H, held, -1))


class StaticDecoding:
    """A cache whose layers are static rows.

    Args:
        state: of the cache, whose prompt was read.
        room: tokens that may come.
        before: tokens that this `generate` has sampled and read before.
    """

    def __init__(self, state: State, room: int, before: int):
        self.state, self.room, self.before = state, max(1, min(room, MOST_ROOM)), before
        for layer in state.ragged:
            if layer.store is None:
                layer.store = state.cut_dense(layer, None, state.valid_BT, state.positions_BT)
        assert state.history is not None
        self.windowed = {idx: state.layers[idx] for idx in state.layout.alone}
        stores: list[Any] = [store.plain for store in state.stores]
        stores += [_windowed(layer, state) for layer in self.windowed.values()]
        if stores[0].device.type == "cpu":
            build.load()
        last_B = state.history.last_B
        with state.changing():
            self.pool, offsets = pool_of(stores, self.room, state.num_seen, last_B)
        work: list[tuple[Tensor | None, ...]] = [(None, None, None, None)] * len(stores)
        if path_of(self.pool.keys_PD, self.pool.values_PV) == "triton":
            from retain.kernels.decode_step.launch import tables

            rooms = [[PAGE * count for count in store.pages.counts] for store in stores]
            group = max(spec.num_heads // spec.num_kv_heads for spec in state.specs)
            width = self.pool.values_PV.shape[1]
            work = [own.tensors() for own in tables(rooms, group, width, stores[0].device, rounded)]
        specs: dict[int, tuple[float | None, int | None]]
        specs = {spec.layer_idx: (spec.scaling, spec.window) for spec in state.specs}
        specs |= {idx: (None, layer.sliding_window) for idx, layer in self.windowed.items()}
        self.stores = dict(zip(specs, stores, strict=True))
        for (idx, (scaling, window)), offsets_R1, own in zip(specs.items(), offsets, work, strict=True):
            base_R = self.stores[idx].lengths_R.clone()
            rows = StaticRows(self.pool, offsets_R1, base_R, idx == 0, scaling, window, own)
            if idx in self.windowed:
                state.layers[idx] = Layer(window)
                state.layers[idx].is_sliding = True
            state.layers[idx].static = rows
        for tensor in self._tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _tensors(self) -> list[Tensor]:
        rows = [layer.static for layer in self.state.layers]
        tables = (one for own in rows for one in (own.offsets_R1, own.base_R, *own.work))
        return [*self.pool.tensors(), *(one for one in tables if one is not None)]

    def is_full(self, sampled: int) -> bool:
        """Whether the next step finds no place, once a `generate` has sampled so many tokens, of which the
        last is still to be read."""
        return sampled - 1 - self.before >= self.room

    @property
    def came(self) -> int:
        """Tokens that were decoded (asks the device)."""
        return int(self.pool.clock_1)

    def leave(self, ids_BN: Int[Tensor, "B N"] | None) -> None:
        """The cache goes on as before, and has seen what was decoded.

        Args:
            ids_BN: of the tokens that came, or more; None: they are not known.
        """
        state, came = self.state, self.came
        state.layers[:] = [self.windowed.get(idx, layer) for idx, layer in enumerate(state.layers)]
        for layer in state.ragged:
            layer.static = None
            layer.recent.queries = []  # of tokens before those that came
        if not came:
            return
        history = state.history
        assert history is not None
        last_B = history.last_B
        steps_N = torch.arange(1, came + 1, device=last_B.device)
        positions_BN = last_B[:, None] + steps_N
        with state.changing():
            for store in self.stores.values():
                store.came_([came] * len(last_B))
            for idx, layer in self.windowed.items():
                _put_back(layer, self.stores[idx], came)
            history.came_(positions_BN, None if ids_BN is None else ids_BN[:, :came])
            for layer in state.ragged:
                layer.seen = state.num_seen

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

from retain.cache.layout import normal_tensors
from retain.cache.precision import GROUP
from retain.cache.static_rows import Pool, StaticRows, packed_of, pools_of, rounded
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.hf.cache.layer import MOST_UNNOTED, Layer
from retain.hf.cache.state import State
from retain.hf.model.families import SLIDING
from retain.hf.model.layout import LayerSpec
from retain.kernels.decode_step import build, path_of

# Tokens to come for which rows are given places at once, at most.
MOST_ROOM = 1024
# Layers of a pool: a column of them is two full layers at most.
TOGETHER = 4


def refused(state: State) -> str | None:
    """Why a cache decodes as written, in words; None: it may be static."""
    if kinds := {left.kind for left in state.layout.alone.values()} - {SLIDING}:
        return f"the model has layers of another kind ({', '.join(sorted(kinds))})"
    return None


def unlike(state: State) -> str | None:
    """Why the layers of a cache that has read its prompt share no pool, in words; None: they may."""
    stores = [layer.store for layer in state.ragged]
    if len({store is not None and store.packed is not None for store in stores}) > 1:
        return "some of its layers hold entries in fewer bits, and others none yet"
    own = [layer.dense()[0] if layer.store is None else layer.store.plain.keys_CD for layer in state.ragged]
    own += [state.layers[idx].keys for idx in state.layout.alone]
    kinds = {(one.shape[-1], one.dtype, one.device) for one in own}
    return "its layers differ in width, precision or device" if len(kinds) > 1 else None


def _looked_at(state: State) -> list[str]:
    """What later evictions look at of tokens that are decoded, by the names of `Recent`."""
    wants = state.bound_policy.wants
    if state.bound_policy.keeps_all or not state.regime.again:
        return []
    asked = wants.queries != 0 or wants.running or wants.entry_queries
    return ["queries"] * asked + [name for name in ("hidden", "stream") if name in wants.inputs]


def steps_unseen(state: State, most: int) -> int:
    """Steps until one as written is due, at most so many: behind it an eviction runs, entries are packed, or
    what later evictions want to know is noted."""
    evicts = not state.bound_policy.keeps_all
    if evicts and "decode" in state.regime.parts:
        most = min(most, state.regime.every - 1 - (state.num_seen - (state.moments or [0])[-1]))
    if evicts and state.regime.again:
        most = min(most, MOST_UNNOTED - 1 - (state.num_seen - state.noted))
    elif state.bound_policy.precision is not None:
        most = min(most, GROUP - 1 - (state.num_seen - state.packed_at))
    return most


def _together(state: State) -> int:
    """Layers that share a pool, of which a column exists twice while it is filled: a few, so that this is two
    full layers at most; all, where what a layer keeps depends on others, since then only their sum repeats.
    """
    policy = state.bound_policy.policy
    alike = state.bound_policy.keeps_all or policy is not None and not policy.crosses_layers
    return TOGETHER if alike else len(state.layers)


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


def _columns_of(store: Any) -> list[Tensor | None]:
    """What a store holds, by which one that was laid out anew is told."""
    columns = [*store.plain.entries.values(), store.plain.log_weight_C]
    codes = store.packed
    return columns if codes is None else [*columns, *codes.entries.values(), codes.key_scales_G2D]


@normal_tensors()
def _to_show(state: State, spec: LayerSpec) -> dict[str, Tensor]:
    """Room for what later evictions look at of the tokens that come, of one layer."""
    store = state.layers[spec.layer_idx].store
    shape, shown = (MOST_UNNOTED, state.batch_size), {}
    for name in _looked_at(state):
        width = (spec.num_heads, spec.head_dim) if name == "queries" else (spec.hidden_size,)
        shown[name] = torch.zeros(*shape, *width, dtype=store.dtype, device=store.device)
    return shown


class StaticDecoding:
    """A cache whose layers are static rows.

    Args:
        state: of the cache, whose prompt was read.
        room: tokens that may come in all.
    """

    def __init__(self, state: State, room: int):
        self.state = state
        for layer in state.ragged:
            if layer.store is None:
                layer.store = state.cut_dense(layer, None, state.valid_BT, state.positions_BT)
        assert state.history is not None
        self.windowed = {idx: state.layers[idx] for idx in state.layout.alone}
        stores: list[Any] = [store.plain for store in state.stores]
        stores += [_windowed(layer, state) for layer in self.windowed.values()]
        coded: list[Any] = [store.packed for store in state.stores]
        weighted = any(part is not None and part.log_weight_C is not None for part in (*stores, *coded))
        if stores[0].device.type == "cpu":
            build.load()
        room = max(1, min(room, MOST_ROOM))
        with state.changing():
            together = _together(state)
            places = pools_of(stores, self._until_written(room), weighted, together)
            packed: list[Any] = packed_of(coded, room, weighted, together) if coded[0] is not None else []
        with normal_tensors():
            clock_1, seen_1 = torch.zeros(2, 1, dtype=torch.int64, device=stores[0].device)
            last_B = torch.zeros(state.batch_size, dtype=torch.int64, device=stores[0].device)
        pools = {
            id(own): Pool(
                own["keys"], own["values"], own["positions"], clock_1, seen_1, last_B, own.get(LOG_WEIGHT)
            )
            for own, _ in places
        }
        self.pool = pools[id(places[0][0])]
        specs: dict[int, tuple[float | None, int | None]]
        specs = {spec.layer_idx: (spec.scaling, spec.window) for spec in state.specs}
        specs |= {idx: (None, layer.sliding_window) for idx, layer in self.windowed.items()}
        self.stores = dict(zip(specs, stores, strict=True))
        self.columns = [_columns_of(store) for store in state.stores]
        self.rows: dict[int, StaticRows] = {}
        for (idx, (scaling, window)), (columns, offsets_R1) in zip(specs.items(), places, strict=True):
            base_R = self.stores[idx].lengths_R.clone()
            pool = pools[id(columns)]
            self.rows[idx] = StaticRows(pool, offsets_R1, base_R, idx == 0, scaling, window)
        for spec, own, part in zip(state.specs, packed, coded, strict=False):
            rows = self.rows[spec.layer_idx]
            rows.packed, rows.bits, rows.span = own, part.codec.bits, part.codec.span
        for spec in state.specs:
            self.rows[spec.layer_idx].shown = _to_show(state, spec)
        if path_of(self.pool.keys_PD, self.pool.values_PV) == "triton":
            self._plan_work()
        for tensor in self._tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _plan_work(self) -> None:
        """Cut the work of each layer for a GPU."""
        from retain.kernels.decode_step.launch import tables

        rooms = [
            [offsets_R1.diff().tolist() for offsets_R1 in (*rows.packed[6:7], rows.offsets_R1)]
            for rows in self.rows.values()
        ]
        group = max(spec.num_heads // spec.num_kv_heads for spec in self.state.specs)
        work = tables(rooms, group, self.pool.values_PV.shape[1], self.pool.keys_PD.device, rounded)
        for rows, own in zip(self.rows.values(), work, strict=True):
            rows.work = own.tensors()

    def _until_written(self, room: int) -> int:
        """Tokens by which rows grow, of so many to come, until they are laid out anew or evicted from."""
        state, evicts = self.state, not self.state.bound_policy.keeps_all
        if evicts and "decode" in state.regime.parts:
            room = min(room, state.regime.every)
        if state.bound_policy.precision is not None:
            # Packed entries leave these rows. As many whatever is to come, so that the size stays.
            room = MOST_UNNOTED + GROUP if evicts and state.regime.again else GROUP
        return room

    def enter(self, steps: int, before: int) -> None:
        """Let steps run in the graph.

        Args:
            steps: that may run until `leave`.
            before: tokens that this `generate` has sampled and read before.
        """
        state, pool = self.state, self.pool
        self.before, self.room = before, min(steps, *(store.free for store in self.stores.values()))
        assert state.history is not None
        with normal_tensors():
            pool.clock_1.zero_()
            pool.seen_1.fill_(state.num_seen)
            pool.last_B.copy_(state.history.last_B)
            for idx, rows in self.rows.items():
                rows.base_R.copy_(self.stores[idx].lengths_R)
                if rows.packed:
                    rows.packed[7].copy_(state.layers[idx].store.packed.lengths_R)
        for idx, layer in self.windowed.items():
            state.layers[idx] = Layer(layer.sliding_window)
            state.layers[idx].is_sliding = True
        for idx, rows in self.rows.items():
            state.layers[idx].static = rows

    def is_whole(self) -> bool:
        """Whether the layers still live in the pool, with a free place in each row, so that it can be entered
        again."""
        now = [_columns_of(store) for store in self.state.stores]
        same = [[*map(id, columns)] for columns in now] == [[*map(id, columns)] for columns in self.columns]
        return not self.windowed and same and all(store.free for store in self.stores.values())

    def _tensors(self) -> list[Tensor]:
        return [tensor for rows in self.rows.values() for tensor in (*rows.pool.tensors(), *rows.tensors())]

    def is_full(self, sampled: int) -> bool:
        """Whether the next step is not one of the graph, once a `generate` has sampled so many tokens, of
        which the last is still to be read."""
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
        if not came:
            return
        for layer, spec in zip(state.ragged, state.specs, strict=True):
            for name, column in self.rows[spec.layer_idx].shown.items():
                # Heads before tokens; attention inputs have none.
                axes = (1, 2, 0, 3) if name == "queries" else (1, 0, 2)
                getattr(layer.recent, name).append(column[:came].permute(axes).contiguous())
        history = state.history
        assert history is not None
        last_B = history.last_B
        steps_N = torch.arange(1, came + 1, device=last_B.device)
        positions_BN = last_B[:, None] + steps_N
        with state.changing():
            for store in self.stores.values():
                store.came_(came)
            for idx, layer in self.windowed.items():
                _put_back(layer, self.stores[idx], came)
            history.came_(positions_BN, None if ids_BN is None else ids_BN[:, :came])
            for layer in state.ragged:
                layer.seen = state.num_seen

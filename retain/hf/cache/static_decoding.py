"""Decodes in one graph: while `generate` compiles, the layers of a cache are static rows.

transformers compiles the decoding step of a cache that says `is_compileable`. Ours is that once the first
forward of a `generate` was read: its layers are laid out in a pool (`retain.cache.static_rows`), and hooks,
masks and Python between a query and its attention fall away. `leave` counts what came, and the cache goes on
as before.
"""

from typing import Any

import torch
from torch import Tensor

from retain.cache.layout import normal_tensors
from retain.cache.precision import GROUP
from retain.cache.static_rows import Pool, StaticRows, packed_of, pools_of, rounded
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.hf.cache.layer import MOST_RECENT, Layer
from retain.hf.cache.state import State
from retain.hf.model.families import SLIDING
from retain.hf.model.layout import LayerSpec
from retain.kernels.decode_step import build, path_of

# Tokens to come for which rows are given places at once, at most.
MOST_ROOM = 1024
# Layers of a pool, of which a column exists twice while it is filled: that is two full layers at most.
TOGETHER = 4


def refused(state: State) -> str | None:
    """The reason why a cache decodes as written; None: it may be static."""
    if kinds := {left.name for left in state.layout.alone.values()} - {SLIDING}:
        return f"the model has layers of another kind ({', '.join(sorted(kinds))})"
    return None


def unlike(state: State) -> str | None:
    """The reason why the layers of a cache that has read its prompt share no pool; None: they may."""
    stores = [layer.store for layer in state.ragged]
    if len({store is not None and store.packed is not None for store in stores}) > 1:
        return "some of its layers hold entries in fewer bits, and others none yet"
    keys = [layer.dense()[0] if layer.store is None else layer.store.keys_CD for layer in state.ragged]
    keys += [state.layers[idx].keys for idx in state.layout.alone]
    kinds = {(one.shape[-1], one.dtype, one.device) for one in keys}
    return "its layers differ in width, precision or device" if len(kinds) > 1 else None


def steps_unseen(state: State, most: int) -> int:
    """Steps, at most so many, until a step as written is due, behind which an eviction runs, entries are
    packed, or metadata is stored."""
    if state.evicts_again:
        most = min(most, MOST_RECENT - 1 - (state.num_seen - state.recorded))
        if "decode" in state.when.parts:
            most = min(most, state.when.every - 1 - (state.num_seen - state.last_due))
    elif state.bound_policy.precision is not None:
        most = min(most, GROUP - 1 - (state.num_seen - state.packed_at))
    return most


def _windowed(layer: Any, state: State) -> RaggedStore:
    """A layer of transformers with a sliding window, as a store."""
    held = layer.keys.shape[2]
    valid_BT, positions_BT = (
        x_BT[:, x_BT.shape[1] - held :] for x_BT in (state.valid_BT, state.positions_BT)
    )
    keep_BHT = valid_BT.to(layer.keys.device)[:, None].expand(layer.keys.shape[:3])
    return RaggedStore.from_dense(layer.keys, layer.values, positions_BT.to(layer.keys.device), keep_BHT)


def _put_back(layer: Any, store: RaggedStore, came: int) -> None:
    """Fill a layer of transformers with the last tokens of a store in its window, padding before them."""
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
    """The columns of a store, which are others once it was laid out anew."""
    columns = [*store.entries.values(), store.log_weight_C]
    if store.packed is not None:
        columns += [*store.packed.entries.values(), store.packed.key_scales_G2D]
    return columns


@normal_tensors()
def _to_show(state: State, spec: LayerSpec) -> dict[str, Tensor]:
    """Room for the tensors of a layer's decoded tokens that later evictions read, by kind."""
    store, wants = state.layers[spec.layer_idx].store, state.bound_policy.wants
    kinds = []
    if state.evicts_again:
        kinds += ["queries"] * bool(wants.queries != 0 or wants.running or wants.entry_queries)
        kinds += [kind for kind in ("hidden", "stream") if kind in wants.inputs]
    shown = {}
    for kind in kinds:
        width = (spec.num_heads, spec.head_dim) if kind == "queries" else (spec.hidden_size,)
        shape = MOST_RECENT, state.batch_size, *width
        shown[kind] = torch.zeros(shape, dtype=store.dtype, device=store.device)
    return shown


class StaticDecoding:
    """The layers of a cache as static rows.

    Args:
        state: of the cache, whose prompt was read.
        room: tokens that may come in all.
    """

    def __init__(self, state: State, room: int):
        self.state = state
        state.hold_ragged()
        self.windowed = {idx: state.layers[idx] for idx in state.layout.alone}
        stores: list[Any] = state.stores
        stores += [_windowed(layer, state) for layer in self.windowed.values()]
        coded: list[Any] = [store.packed for store in state.stores if store.packed is not None]
        weighted = any(part.log_weight_C is not None for part in (*stores, *coded))
        device, room = stores[0].device, max(1, min(room, MOST_ROOM))
        if device.type == "cpu":
            build.load()
        policy, plain_room = state.bound_policy.policy, room
        if state.bound_policy.precision is not None:  # packed entries leave these rows
            plain_room = GROUP
        elif state.evicts_again and "decode" in state.when.parts:
            plain_room = min(room, state.when.every)
        # Where layers compete for entries, only the sum of all layers repeats from prompt to prompt.
        alike = state.bound_policy.keeps_all or policy is not None and not policy.crosses_layers
        together = TOGETHER if alike else len(state.layers)
        with state.changing():
            places = pools_of(stores, plain_room, weighted, together)
            packed: list[Any] = packed_of(coded, room, weighted, together) if coded else []
        with normal_tensors():
            clock_1, seen_1 = torch.zeros(2, 1, dtype=torch.int64, device=device)
            last_B = torch.zeros(state.batch_size, dtype=torch.int64, device=device)
        pools = {
            id(held): Pool(
                held["keys"], held["values"], held["positions"], clock_1, seen_1, last_B, held.get(LOG_WEIGHT)
            )
            for held, _ in places
        }
        self.pool = pools[id(places[0][0])]
        specs: dict[int, tuple[float | None, int | None]]
        specs = {spec.layer_idx: (spec.scaling, None) for spec in state.specs}
        specs |= {idx: (None, layer.sliding_window) for idx, layer in self.windowed.items()}
        self.stores = dict(zip(specs, stores, strict=True))
        self.rows: dict[int, StaticRows] = {}
        for (idx, (scaling, window)), (columns, offsets_R1) in zip(specs.items(), places, strict=True):
            base_R = self.stores[idx].lengths_R.clone()
            pool = pools[id(columns)]
            self.rows[idx] = StaticRows(pool, offsets_R1, base_R, idx == 0, scaling, window)
        for spec, codes, part in zip(state.specs, packed, coded, strict=False):
            rows = self.rows[spec.layer_idx]
            rows.packed, rows.bits, rows.span = codes, part.codec.bits, part.codec.span
        for spec in state.specs:
            self.rows[spec.layer_idx].shown = _to_show(state, spec)
        self.columns = [_columns_of(store) for store in state.stores]
        if path_of(self.pool.keys_PD, self.pool.values_PV) == "triton":
            self._plan_work()
        for rows in self.rows.values():
            for tensor in (*rows.pool.tensors(), *rows.tensors()):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _plan_work(self) -> None:
        """Cut the work of each layer for a GPU."""
        from retain.kernels.decode_step.launch import tables

        rooms = [
            [offsets_R1.diff().tolist() for offsets_R1 in (*rows.packed[5:6], rows.offsets_R1)]
            for rows in self.rows.values()
        ]
        group = max(spec.num_heads // spec.num_kv_heads for spec in self.state.specs)
        work = tables(rooms, group, self.pool.values_PV.shape[1], self.pool.keys_PD.device, rounded)
        for rows, tensors in zip(self.rows.values(), work, strict=True):
            rows.work = tensors

    def enter(self, steps: int, before: int) -> None:
        """Let steps run in the graph.

        Args:
            steps: that may run until `leave`.
            before: tokens that this `generate` has sampled and read before.
        """
        state, pool = self.state, self.pool
        self.before, self.room = before, min(steps, *(store.free for store in self.stores.values()))
        with normal_tensors():
            pool.clock_1.zero_()
            pool.seen_1.fill_(state.num_seen)
            pool.last_B.copy_(state.history.last_B)
            for idx, rows in self.rows.items():
                rows.base_R.copy_(self.stores[idx].lengths_R)
                if rows.packed:
                    rows.packed[6].copy_(state.layers[idx].store.packed.lengths_R)
        for idx in self.windowed:
            state.layers[idx] = Layer(state)
            state.layers[idx].is_sliding = True
        for idx, rows in self.rows.items():
            state.layers[idx].static = rows

    def is_whole(self) -> bool:
        """True if the layers still live in the pool, with a free place in each row, so that it can be entered
        again."""
        now = [[*map(id, _columns_of(store))] for store in self.state.stores]
        same = now == [[*map(id, columns)] for columns in self.columns]
        return not self.windowed and same and all(store.free for store in self.stores.values())

    def is_full(self, sampled: int) -> bool:
        """True if the next step is not one of the graph, once a `generate` has sampled so many tokens, of
        which the last is still to be read."""
        return sampled - 1 - self.before >= self.room

    def leave(self) -> int:
        """Count the decoded tokens as seen; the cache goes on as before. Returns their number (asks the
        device)."""
        state, history, came = self.state, self.state.history, int(self.pool.clock_1)
        state.layers[:] = [self.windowed.get(idx, layer) for idx, layer in enumerate(state.layers)]
        for layer in state.ragged:
            layer.static = None
        if not came:
            return 0
        with state.changing():
            for layer, spec in zip(state.ragged, state.specs, strict=True):
                for kind, column in self.rows[spec.layer_idx].shown.items():
                    # Heads before tokens; attention inputs have none.
                    axes = (1, 2, 0, 3) if kind == "queries" else (1, 0, 2)
                    layer.recent.add(kind, column[:came].permute(axes).contiguous())
            for store in self.stores.values():
                store.came_(came)
            for idx, layer in self.windowed.items():
                _put_back(layer, self.stores[idx], came)
            state.history = history.after_decoding(came)
        return came

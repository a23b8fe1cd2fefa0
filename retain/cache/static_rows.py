"""Static rows: after an eviction, layers in fixed rooms of one pool, so that a decoding step is one graph.

A store gives its rows new rooms in the pool, with places for the tokens to come, and goes on as a view of it.
Each layer's op writes one place a row, and one clock says for all layers how many came
(`retain.kernels.decode_step`). Sizes of pools are rounded, so that other prompts meet shapes that a graph has
seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.cache.layout import Layout, bytes_of, copy_, normal_tensors
from retain.cache.precision import GROUP, GROUPS, VALUE_SCALES
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.kernels.ragged_attention.pages import PAGE

# A pool has 8, 9, ... or 15 times a power of two places.
STEPS = 8
# Groups that a table of scales has room for, at least.
FEWEST = 64


def rounded(places: int) -> int:
    """The next size of a pool."""
    unit = 1 << max(0, (places - 1).bit_length() - STEPS.bit_length() + 1)
    return -(-places // unit) * unit


@dataclass(eq=False)
class Pool:
    """Places that layers of a device and a kind share.

    Args:
        keys_PD, values_PV, positions_P: their places.
        clock_1: int64, tokens that were decoded since the rows were laid out.
        seen_1: int64, tokens seen until then, padding included.
        last_B: int64, the position of each sequence's last token then.
        log_weight_P: float32, added to the logits of entries; None: nothing is.
    """

    keys_PD: Float[Tensor, "P D"]
    values_PV: Float[Tensor, "P V"]
    positions_P: Int[Tensor, " P"]
    clock_1: Int[Tensor, " 1"]
    seen_1: Int[Tensor, " 1"]
    last_B: Int[Tensor, " B"]
    log_weight_P: Float[Tensor, " P"] | None

    def tensors(self) -> list[Tensor]:
        return [one for one in vars(self).values() if one is not None]


# Columns of a pool, and where the rooms of a store begin and end there.
Placed = tuple[dict[str, Tensor], Int[Tensor, " R1"]]


@dataclass(eq=False)
class StaticRows:
    """The rows of one layer in a pool, and the attention over them.

    Args:
        offsets_R1: int64, where each row's room begins and ends in the pool.
        base_R: int32, entries of each row when the clock stood at 0.
        leads: whether this layer, the first, advances the clock.
        scaling: of its logits, where the model does not say.
        window: tokens that its queries see; None for all.
        work: on a GPU, its part of `retain.kernels.decode_step.launch.tables`.
        shown: what a later eviction looks at of the tokens that come, `[S, ...]` each: `queries`, and what
            attention gets (`hidden`, `stream`).
        packed, bits, span: entries before these, as codes, as `retain.kernels.decode_step` takes them.
    """

    pool: Pool
    offsets_R1: Int[Tensor, " R1"]
    base_R: Int[Tensor, " R"]
    leads: bool
    scaling: float | None = None
    window: int | None = None
    work: tuple[Tensor | None, ...] = (None, None, None, None)
    shown: dict[str, Tensor] = field(default_factory=dict)
    packed: list[Tensor] = field(default_factory=list)
    bits: int = 0
    span: int = 1

    def tensors(self) -> list[Tensor]:
        held = (self.offsets_R1, self.base_R, *self.work, *self.shown.values(), *self.packed)
        return [one for one in held if one is not None]

    def show(self, name: str, x_BSE: Tensor) -> None:
        """Keep an input of the attention that comes, if it is to be looked at."""
        if name in self.shown:
            at_1 = self.pool.clock_1 if self.leads else self.pool.clock_1 - 1
            self.shown[name].index_copy_(0, at_1, x_BSE.transpose(0, 1))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Callable[[], Any], given: Any
    ) -> tuple[Tensor, None]:
        """Append the token and attend: as `retain.hf.intercept.interceptor.Step.attend` is called."""
        pool = self.pool
        if self.leads:
            pool.clock_1.add_(1)
        if "queries" in self.shown:
            self.shown["queries"].index_copy_(0, pool.clock_1 - 1, query.permute(2, 0, 1, 3))
        places = pool.keys_PD, pool.values_PV, pool.positions_P
        rows = self.offsets_R1, self.base_R, pool.clock_1, pool.last_B, pool.log_weight_P
        scaling = self.scaling if given.get("scaling") is None else given["scaling"]
        how = given.get("s_aux"), scaling, given.get("softcap") or 0.0, self.window or 0
        packed = self.packed, self.bits, self.span
        out_B1QV = torch.ops.retain.decode_step(query, key, value, *places, *rows, *how, *self.work, *packed)
        return out_B1QV, None


@normal_tensors()
def pools_of(stores: Sequence[RaggedStore], room: int, weighted: bool, together: int) -> list[Placed]:
    """Lay stores out in pools, column by column, so that no more than one column of a pool exists twice.

    Args:
        stores: of one device and kind; they go on as views of the pools.
        room: tokens to come, for each row.
        weighted: something is added to the logits of some entries.
        together: layers of a pool.

    Returns:
        for each store, its pool's columns, and where its rooms begin and end there.
    """
    parts = [stores[first : first + together] for first in range(0, len(stores), together)]
    return [placed for part in parts for placed in _pool_of(part, room, weighted)]


def _pool_of(stores: Sequence[RaggedStore], room: int, weighted: bool) -> list[Placed]:
    layouts = [Layout.of(store.lengths_R, room) for store in stores]
    starts = [0, *accumulate(PAGE * layout.pages.num_pages for layout in layouts)]
    like = stores[0].entries
    if weighted:
        like[LOG_WEIGHT] = torch.zeros(0, device=stores[0].device)
    columns = {}
    for name, column in like.items():
        columns[name] = column.new_zeros(rounded(starts[-1]), *column.shape[1:])
        for store, layout, (start, stop) in zip(stores, layouts, pairwise(starts), strict=True):
            view = columns[name][start:stop]
            if name in store.columns:
                copy_(view, layout.index_N(), store.columns[name], (store.index_N(),))
            store.columns[name] = view
    for store, layout in zip(stores, layouts, strict=True):
        store.lay_out_anew_(layout, store.index_N(), moved=columns)
    return [(columns, store.offsets_R1 + start) for store, start in zip(stores, starts, strict=False)]


@normal_tensors()
def packed_of(stores: Sequence[RaggedStore], room: int, weighted: bool, together: int) -> list[list[Tensor]]:
    """Lay stores of codes out in pools, with places for all tokens to come, so that its size stays as they
    are packed; and the scales of their keys in tables of one size.

    Args:
        stores, room, weighted, together: as for `pools_of`.

    Returns:
        of each store, as `retain.kernels.decode_step` takes them.
    """
    places = pools_of(stores, room, weighted, together)
    more = len(stores[0].lengths_R) * -(-room // GROUP)
    scales = [store.key_scales_G2D for store in stores if store.key_scales_G2D is not None]
    most = rounded(max(FEWEST, max(map(len, scales)) + more))
    table = scales[0].new_zeros(len(stores), most, *scales[0].shape[1:])
    found = []
    for store, held_G2D, room_G2D, (columns, offsets_R1) in zip(stores, scales, table, places, strict=True):
        room_G2D[: len(held_G2D)] = held_G2D
        store.key_scales_G2D = room_G2D[: len(held_G2D)]
        parts = [columns[name] for name in ("keys", "values", VALUE_SCALES, GROUPS)]
        parts += [room_G2D, offsets_R1, store.lengths_R.to(torch.int32, copy=True)]
        found.append([*parts, columns[LOG_WEIGHT]] if weighted else parts)
    return found


def spare_bytes(stores: Sequence[RaggedStore]) -> int:
    """Bytes of the storages behind stores that none of them lives in."""
    parts = [part.storages() for store in stores for part in store.parts]
    storages = [tensor.untyped_storage() for part in parts for tensor in part]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return max(0, sum(sizes.values()) - sum(map(bytes_of, parts)))

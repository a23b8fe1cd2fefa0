"""Reports what a cache holds and what it freed, per layer, as a table.

`bytes_held` counts the keys and values of held entries exactly, and what attention reads beside them; what
the storage really takes (slack, unequal rooms, positions) is `bytes_allocated`, and stands beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad

from retain.cache.static_rows import spare_bytes
from retain.evidence import Evidence
from retain.hf.cache.engine import Engine
from retain.hf.cache.state import State
from retain.hf.intercept.interceptor import InterceptedCache
from retain.hf.model import pass_through_layers
from retain.kernels.ragged_attention import path_of

# A table of more heads than these shows their range and not each of them.
WIDEST = 16
# Names of the paths of attention.
CALLED = {"triton": "Triton kernels over ragged rows", "reference": "plain PyTorch over ragged rows"}


@dataclass(frozen=True)
class BudgetTable:
    """Entries that each layer and head holds, as a table of one row a layer; a batch shows the mean of its
    sequences.

    Args:
        held_BLH: per sequence, layer and KV head.
        seen_B: tokens that each sequence has seen.
        policy: name of the policy.
    """

    held_BLH: Int64[Tensor, "B L H"]
    seen_B: Int64[Tensor, " B"]
    policy: str = ""

    @property
    def share_LH(self) -> Tensor:
        """Share of what was seen that each head holds, mean over the sequences."""
        return (self.held_BLH / self.seen_B.clamp_min(1)[:, None, None]).mean(0)

    def __str__(self) -> str:
        B, _, H = self.held_BLH.shape
        each = H <= WIDEST
        held_LH = self.held_BLH.double().mean(0)
        names = [f"head {h}" for h in range(H)] if each else ["least", "most"]
        head = f"{'':>9} {'all':>10} {'of seen':>8} " + " ".join(f"{name:>8}" for name in names)
        title = f"entries held, policy {self.policy}" + (f", mean of {B} sequences" if B > 1 else "")
        lines = [title, head]
        shares = self.share_LH
        for idx, row in enumerate(held_LH):
            cells = row.tolist() if each else [float(row.min()), float(row.max())]
            numbers = " ".join(f"{cell:>8,.0f}" for cell in cells)
            lines.append(
                f"{f'layer {idx}':>9} {float(row.sum()):>10,.0f} {float(shares[idx].mean()):>8.1%} {numbers}"
            )
        total = float(held_LH.sum())
        lines.append(f"{'total':>9} {total:>10,.0f} {float(shares.mean()):>8.1%}")
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerReport:
    """One layer, or the total of all.

    Args:
        name: `layer 0`, ..., `total`.
        entries_seen: (sequence, KV head, token) triples seen, padding apart.
        entries_held: of those, held now.
        bytes_full: bytes of keys and values of all entries seen.
        bytes_held: bytes of keys and values held, and of log weights beside them.
        bytes_allocated: bytes of all storage behind them.
    """

    name: str
    entries_seen: int
    entries_held: int
    bytes_full: int
    bytes_held: int
    bytes_allocated: int

    @property
    def entries_evicted(self) -> int:
        return self.entries_seen - self.entries_held


@dataclass(frozen=True)
class LeftAloneReport:
    """One layer that no policy evicts from: its attention has a window, or a recurrent state is all it has.

    Args:
        name: `layer 0`, ...
        kind: what transformers calls the layer.
        window: tokens that it looks back on; None without a window.
        bytes_held: bytes of its keys and values, or of its states.
        bytes_allocated: bytes of the storage behind them.
    """

    name: str
    kind: str
    window: int | None
    bytes_held: int
    bytes_allocated: int


@dataclass(frozen=True)
class Report:
    """A cache at one moment. Its `str` is a table, with one row for neighbouring layers that hold the same.

    Args:
        policy: name of the policy that evicted.
        path: how attention over ragged rows is computed for what is held, in words.
        layers: one row a layer that evicts.
        total: their sum.
        alone: layers that are left alone.
        evictions: moments at which entries went.
        held_whole: short sequences that are held whole, since the policy cannot evict from them within its
            budget (`Cache`'s `short`).
        gates: where the gates that scored came from; None: no gates did.
        decoded: how the last `generate` that was to compile its steps ran, in words; None: there was none.
    """

    policy: str
    path: str
    layers: tuple[LayerReport, ...]
    total: LayerReport
    alone: tuple[LeftAloneReport, ...] = ()
    evictions: int = 0
    held_whole: tuple[int, ...] = ()
    gates: str | None = None
    decoded: str | None = None

    def __str__(self) -> str:
        rows = [*_folded(self.layers), ("total", self.total)]
        alone = [*_folded(self.alone)]
        wide = max(9, *(len(name) for name, _ in [*rows, *alone]))
        entries = f"{'seen':>10} {'held':>10} {'evicted':>10}"
        head = f"{'':>{wide}} {entries} {'held':>10} {'of full':>8} {'allocated':>10}"
        times = "once" if self.evictions == 1 else f"{self.evictions} times"
        lines = [f"policy {self.policy}, evicted {times}; attention: {self.path}", head]
        if self.gates is not None:
            lines.insert(1, f"gates: {self.gates}")
        if self.decoded is not None:
            lines.insert(-1, f"decoded: {self.decoded}")
        for name, row in rows:
            share = row.bytes_held / row.bytes_full if row.bytes_full else 1.0
            lines.append(
                f"{name:>{wide}} {row.entries_seen:>10,} {row.entries_held:>10,} {row.entries_evicted:>10,} "
                f"{_mib(row.bytes_held):>10} {share:>8.1%} {_mib(row.bytes_allocated):>10}"
            )
        for name, left in alone:
            kind = left.kind if left.window is None else f"{left.kind} of {left.window:,} tokens"
            lines.append(f"{name:>{wide}} left alone: {kind}, {_mib(left.bytes_held)} held")
        if self.held_whole:
            whole = ", ".join(map(str, self.held_whole))
            lines.append(f"    short sequences held whole, more than their budget: {whole}")
        return "\n".join(lines)


def _folded(rows: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Rows with their names; neighbours that differ by name alone are one, whose numbers are each layer's."""
    for _, equal in groupby(rows, key=lambda row: astuple(row)[1:]):
        own = [*equal]
        first, last = (int(row.name.removeprefix("layer ")) for row in (own[0], own[-1]))
        count = "" if last - first + 1 == len(own) else f"{len(own)} of "
        yield own[0].name if len(own) == 1 else f"{count}layers {first}-{last}, each", own[0]


def total_of(rows: Sequence[LayerReport]) -> LayerReport:
    """The sum of all layers."""
    names = ("entries_seen", "entries_held", "bytes_full", "bytes_held", "bytes_allocated")
    return LayerReport("total", *(sum(getattr(row, name) for row in rows) for name in names))


def _mib(num_bytes: int | float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"


class ReportingCache(InterceptedCache):
    """The side of `retain.Cache` that says what it has seen and holds."""

    state: State
    engine: Engine

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return self.state.num_seen

    @property
    def evidence(self) -> list[Evidence] | None:
        """What each layer showed, where a prefill was told to hold it."""
        return self.state.evidence

    @property
    def evictions(self) -> int:
        """Times that entries went."""
        return self.state.evictions

    def __repr__(self) -> str:
        name, state = f"retain.Cache: policy {self.state.bound_policy.name}", self.state
        if state.broken:
            return f"{name}, broken off: reset() it"
        if not state.num_seen:
            return f"{name}, empty"
        total = self.report().total
        entries = f"{total.entries_held:,} of {total.entries_seen:,} entries"
        return f"{name}, {state.num_seen:,} tokens seen, {entries} and {_mib(total.bytes_held)} held"

    def report(self) -> Report:
        """Entries and bytes seen, held and allocated, per layer and in total; `str` of it is a table."""
        state = self.state
        tokens = 0 if state.history is None else sum(state.history.lengths_B)
        rows, alone, paths = [], [], []
        for spec, layer in zip(state.specs, state.ragged, strict=True):
            seen = tokens * spec.num_kv_heads
            beside = layer.recent.num_bytes
            if layer.store is not None:
                held, allocated = layer.store.entries_held, layer.store.bytes_allocated
                entry = layer.store.plain.entry_bytes
                num_bytes = layer.store.bytes_held - int(state.unused_bytes_B(layer.store).sum())
                plain = layer.store.plain
                paths.append(CALLED[path_of(plain.keys_CD, plain.values_CD)])
            elif layer.keys is not None:
                dense = layer.dense()
                held, allocated = seen, sum(tensor.untyped_storage().nbytes() for tensor in dense)
                entry = sum(tensor.shape[-1] * tensor.element_size() for tensor in dense)
                num_bytes = held * entry
                paths.append(CALLED[path_of(*dense)])
            else:
                held = allocated = entry = num_bytes = 0
            name = f"layer {spec.layer_idx}"
            rows.append(LayerReport(name, seen, held, seen * entry, num_bytes, allocated + beside))
        if rows:  # what a pool has beside the layers in it
            first = rows[0]
            rows[0] = replace(first, bytes_allocated=first.bytes_allocated + spare_bytes(state.stores))
        for left in state.layout.alone.values():
            own = self.layers[left.layer_idx]
            held, allocated = pass_through_layers.held_bytes(own), pass_through_layers.allocated_bytes(own)
            alone.append(LeftAloneReport(f"layer {left.layer_idx}", left.kind, left.window, held, allocated))
        # How attention over what is held is computed; of every layer, where they differ.
        path = "; ".join(dict.fromkeys(paths)) or "nothing is held yet"
        bound, whole = state.bound_policy, tuple(state.held_whole)
        parts = tuple(rows), total_of(rows), tuple(alone)
        return Report(bound.name, path, *parts, self.evictions, whole, bound.gates_source, state.decoded)

    def budgets(self) -> BudgetTable:
        """Entries that each sequence, layer and KV head holds; `print` shows a table.

        Raises:
            ValueError: nothing was read yet.
        """
        if not self.num_seen:
            raise ValueError("nothing was read yet, so nothing is held: prefill or generate first.")
        seen_B = self.state.valid_BT.sum(-1).cpu()
        heads = [spec.num_kv_heads for spec in self.state.specs]
        held = [layer.held_BH(seen_B, own) for layer, own in zip(self.state.ragged, heads, strict=True)]
        held = [pad(own_BH, (0, max(heads) - own_BH.shape[1])) for own_BH in held]
        return BudgetTable(torch.stack(held, dim=1), seen_B, self.state.bound_policy.name)

    def bytes_held(self) -> int:
        """Bytes of the keys and values held, over all layers that evict."""
        return self.report().total.bytes_held

    def bytes_allocated(self) -> int:
        """Bytes of all storage behind them: slack, positions, and what stands beside entries included."""
        return self.report().total.bytes_allocated

    def bytes_full(self) -> int:
        """Bytes of keys and values had nothing been evicted, padding apart."""
        return self.report().total.bytes_full

    @property
    def entries_held(self) -> int:
        return self.report().total.entries_held

    @property
    def entries_seen(self) -> int:
        return self.report().total.entries_seen

    @property
    def entries_evicted(self) -> int:
        return self.report().total.entries_evicted

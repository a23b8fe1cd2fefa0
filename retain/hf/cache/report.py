"""Reports what a cache holds and what it freed, per layer, as a table.

`bytes_held` counts the keys and values of held entries exactly, and the log weights that attention reads with
them; the storage behind them (slack, unequal rooms, positions, metadata) is `bytes_allocated`.
"""

from dataclasses import dataclass, fields, replace

from retain.cache.static_rows import spare_bytes
from retain.hf.cache.state import State
from retain.hf.model import pass_through_layers
from retain.kernels.ragged_attention import path_of

# Names of the paths of attention.
CALLED = {"triton": "Triton kernels over ragged rows", "reference": "plain PyTorch over ragged rows"}


@dataclass(frozen=True)
class LayerReport:
    """Report of a layer that evicts, or the total of all.

    Args:
        name: `layer 0`, ..., `total`.
        entries_seen: (sequence, KV head, token) triples seen, padding apart.
        entries_held: of those, held now.
        bytes_full: bytes of keys and values of all entries seen.
        bytes_held: bytes of keys and values held, and of their log weights.
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

    def __str__(self) -> str:
        share = self.bytes_held / self.bytes_full if self.bytes_full else 1.0
        counts = f"{self.entries_seen:>10,} {self.entries_held:>10,} {self.entries_evicted:>10,}"
        return f"{counts} {_mib(self.bytes_held):>10} {share:>8.1%} {_mib(self.bytes_allocated):>10}"


@dataclass(frozen=True)
class LeftAloneReport:
    """Report of a layer that no policy evicts from, with a window or a recurrent state.

    Args:
        name: `layer 0`, ...
        kind: as transformers calls the layer.
        window: tokens that it looks back on; None without a window.
        bytes_held: bytes of its keys and values, or of its states.
    """

    name: str
    kind: str
    window: int | None
    bytes_held: int

    def __str__(self) -> str:
        kind = self.kind if self.window is None else f"{self.kind} of {self.window:,} tokens"
        return f"left alone: {kind}, {_mib(self.bytes_held)} held"


@dataclass(frozen=True)
class Report:
    """The contents of a cache. Its `str` is a table, one row a layer.

    Args:
        policy: name of the policy that evicted.
        path: how attention over ragged rows is computed for what is held, in words.
        layers: one row a layer that evicts.
        total: their sum.
        alone: layers that are left alone.
        evictions: times that entries were evicted.
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
        times = "once" if self.evictions == 1 else f"{self.evictions} times"
        lines = [f"policy {self.policy}, evicted {times}; attention: {self.path}"]
        lines += [f"gates: {self.gates}"] * (self.gates is not None)
        lines += [f"decoded: {self.decoded}"] * (self.decoded is not None)
        lines.append(
            f"{'':>9} {'seen':>10} {'held':>10} {'evicted':>10} {'held':>10} {'of full':>8} {'allocated':>10}"
        )
        rows: list[LayerReport | LeftAloneReport] = [*self.layers, self.total, *self.alone]
        lines += [f"{row.name:>9} {row}" for row in rows]
        if self.held_whole:
            whole = ", ".join(map(str, self.held_whole))
            lines.append(f"    short sequences held whole, more than their budget: {whole}")
        return "\n".join(lines)


def _mib(num_bytes: int | float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"


def report_of(state: State) -> Report:
    """The entries and bytes that a conversation has seen, holds and allocates."""
    reports, alone, paths = [], [], []
    lengths_B = state.history.lengths_B
    for spec, layer in zip(state.specs, state.ragged, strict=True):
        seen, held, allocated, entry, num_bytes = sum(lengths_B) * spec.num_kv_heads, 0, 0, 0, 0
        if layer.store is not None:
            store = layer.store
            held, allocated, entry = store.entries_held, store.bytes_allocated, store.entry_bytes
            # Of a sequence whose entries are all there, log weights are stored for others of its batch alone.
            rows = zip(store.lengths_BH.sum(-1).tolist(), lengths_B, strict=True)
            whole = sum(count for count, length in rows if count == length * spec.num_kv_heads)
            num_bytes = store.bytes_held - whole * store.log_weight_bytes
            paths.append(CALLED[path_of(store.keys_CD, store.values_CD)])
        elif layer.keys is not None:
            dense = layer.dense()
            held, allocated = seen, sum(tensor.untyped_storage().nbytes() for tensor in dense)
            entry = sum(tensor.shape[-1] * tensor.element_size() for tensor in dense)
            num_bytes = held * entry
            paths.append(CALLED[path_of(*dense)])
        allocated += layer.recent.num_bytes
        reports.append(LayerReport(f"layer {spec.layer_idx}", seen, held, seen * entry, num_bytes, allocated))
    # Places of a pool that belong to no layer.
    spare = reports[0].bytes_allocated + spare_bytes(state.stores)
    reports[0] = replace(reports[0], bytes_allocated=spare)
    for idx, left in state.layout.alone.items():
        held = sum(tensor.nbytes for tensor in pass_through_layers.tensors_of(state.layers[idx]).values())
        alone.append(LeftAloneReport(f"layer {idx}", left.name, left.window, held))
    names = [one.name for one in fields(LayerReport)][1:]
    total = LayerReport("total", *(sum(getattr(row, name) for row in reports) for name in names))
    return Report(
        policy=state.bound_policy.name,
        path="; ".join(dict.fromkeys(paths)) or "nothing is held yet",
        layers=tuple(reports),
        total=total,
        alone=tuple(alone),
        evictions=state.evictions,
        held_whole=tuple(state.held_whole),
        gates=state.bound_policy.gates_source,
        decoded=state.decoded,
    )

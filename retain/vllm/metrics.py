"""Counts evictions, in the engine's metrics (`/metrics` of its server)."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "evictions": "Prompts that were evicted from; again if a request is computed anew.",
    "evictions_failed": "Evictions whose policy could not decide; the last entries were kept.",
    "blocks_freed": "Blocks that went back to the pool while their request was running.",
    "requests_in_full": "Requests served in full: asked for so, too short, or with room for all of it.",
    "requests_refused": "Requests served in full because their budget cannot hold what is protected.",
}


class EvictionStats(KVConnectorStats):
    """Counts since the last report."""

    def count(self, **counts: int) -> None:
        """Add to counters."""
        self.data.update(Counter(self.data) + Counter(counts))

    def aggregate(self, other: KVConnectorStats) -> "EvictionStats":
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class EvictionMetrics(KVConnectorPromMetrics):
    """The counters, as Prometheus reads them."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.counters = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(f"vllm:retain_{name}", text, self._labelnames)
            self.counters[name] = create_metric_per_engine(counter, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self.counters[name][engine_idx].inc(count)

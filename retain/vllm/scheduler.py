"""Frees the blocks of evicted prompts, on the scheduler's side.

They are freed once the scheduler has processed the step that evicted: by then every worker has packed the
kept entries into the first of the blocks.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from retain.vllm.packing.worker import Arrival


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Spec of the layers that evict; a full one in all else."""


class EvictingManager(FullAttentionManager):
    """Blocks of the layers that evict.

    Attributes:
        asked: request id -> the request, of those that are evicted from (the connector's).
        num_freed: blocks freed that were not counted yet.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.asked: dict[str, Arrival] = {}
        self.num_freed = 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks that an eviction emptied; only steps that are processed count."""
        asked = self.asked.get(request_id)
        if asked is not None and processed_computed_tokens >= asked.length:
            before = self.block_pool.get_num_free_blocks()
            self._remove_blocks_in_range(request_id, asked.kept, asked.length // self.block_size)
            self.num_freed += self.block_pool.get_num_free_blocks() - before

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Blocks that are rewritten carry no hash; those of requests that are served in full do."""
        if request.request_id not in self.asked:
            super().cache_blocks(request, *args, **kwargs)

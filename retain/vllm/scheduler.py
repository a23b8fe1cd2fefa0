"""Frees the blocks of evicted prompts, on the scheduler's side.

`retain.vllm.packing.progress` says which blocks an eviction frees. They are freed once the scheduler has
processed the step that evicted: by then every worker has packed the kept entries into the other blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from retain.vllm.packing.progress import Progress


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Spec of the layers that evict; a full one in all else."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> "EvictingSpec":
        """The same spec, for layers that evict."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)})

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> "EvictingSpec":
        """The spec for all layers of a group."""
        return cls.of(FullAttentionSpec.merge(list(specs)))


class EvictingManager(FullAttentionManager):
    """Blocks of the layers that evict.

    Attributes:
        progress: request id -> how far it has come, of requests that are evicted from (the connector's).
        num_freed: blocks freed that were not counted yet.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.progress: dict[str, Progress] = {}
        self.num_freed = 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks that an eviction emptied; only steps that are processed count."""
        progress = self.progress.get(request_id)
        blocks = self.req_to_blocks.get(request_id)
        if progress is None or not blocks:
            return
        freed = []
        for place in progress.free(processed_computed_tokens):
            freed.append(blocks[place])
            blocks[place] = self._null_block
        if freed:
            self.block_pool.free_blocks(reversed(freed))
            self.num_freed += len(freed)

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Blocks that are rewritten carry no hash; those of requests that are served in full do."""
        if request.request_id not in self.progress:
            super().cache_blocks(request, *args, **kwargs)

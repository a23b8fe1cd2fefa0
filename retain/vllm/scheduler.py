"""Frees the blocks of evicted prompts, on the scheduler's side.

How many blocks of a prompt stay follows from its length and budget (`retain.vllm.settings.Rules.cut`), so
that no worker has to say anything. Blocks go once a step that computed the whole prompt is settled: by then
every worker has packed what stays into the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from retain.vllm.settings import Cut


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Spec of the layers that evict; a full one in all else."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> "EvictingSpec":
        """The same spec, for layers that evict."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)})

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> "EvictingSpec":
        """One spec for all layers of a group."""
        return cls.of(FullAttentionSpec.merge(list(specs)))


class EvictingManager(FullAttentionManager):
    """Blocks of the layers that evict.

    Attributes:
        cuts: request id -> how much of its prompt stays, of requests that are evicted from; the connector's.
        num_freed: blocks freed so far.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cuts: dict[str, Cut] = {}
        self.num_freed = 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks of a prompt that was evicted from; only steps that are settled count."""
        cut = self.cuts.get(request_id)
        if cut is None or processed_computed_tokens < cut.length:
            return
        before = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, cut.kept, cut.full)
        self.num_freed += self.block_pool.get_num_free_blocks() - before

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Blocks that are rewritten carry no hash; those of requests that are served in full do."""
        if request.request_id not in self.cuts:
            super().cache_blocks(request, *args, **kwargs)


def register_spec() -> None:
    """Tell the engine which manager serves the spec."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)

"""Frees the blocks of evicted prompts, on the scheduler's side.

How many blocks of a prompt stay follows from its length and budget (`retain.vllm.settings.Rules.cut`), so
that no worker has to say anything. Blocks go once a step that computed the whole prompt is settled: by then
every worker has packed what stays into the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from retain.vllm.documents import Documents
from retain.vllm.settings import Cut


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Spec of the layers that evict; a full one in all else."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> Self:
        """The same spec, for layers that evict."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)})

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Self:
        """One spec for all layers of a group."""
        return cls.of(FullAttentionSpec.merge(list(specs)))


class EvictingManager(FullAttentionManager):
    """Blocks of the layers that evict.

    Attributes:
        cuts: request id -> how much of its prompt, or of the document that it begins with, stays, of requests
            that are evicted from; the connector's.
        documents: shared ones; None where there are none.
        num_freed: blocks freed so far.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cuts: dict[str, Cut] = {}
        self.documents: Documents | None = None
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
        if self.documents is not None and request_id in self.req_to_blocks:
            self.documents.settle(request_id, self.req_to_blocks[request_id])

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """Blocks that a request takes from the free ones; unused documents make room for them."""
        count = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        if self.documents is None:
            return count
        admitted = request_id in self.num_cached_block
        return self.documents.blocks_needed(request_id, count, admitted=admitted)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """The first blocks of a request that uses a document are the document's."""
        assert self.documents is not None, "nothing else comes from the connector"
        held, full = self.documents.take(request_id)
        blocks = self.req_to_blocks[request_id]
        assert not blocks, "a document begins a prompt"
        blocks.extend([*held, *[self._null_block] * (full - len(held))])

    def free(self, request_id: str) -> None:
        """Give a request's blocks back; a document that it was the last to use may go too."""
        super().free(request_id)
        if self.documents is not None:
            self.documents.trim()

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Blocks that are rewritten carry no hash; those of requests that are served in full do."""
        if request.request_id not in self.cuts:
            super().cache_blocks(request, *args, **kwargs)


def register_spec() -> None:
    """Tell the engine which manager serves the spec."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)

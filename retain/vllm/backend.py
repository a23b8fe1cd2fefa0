"""Attends over the pages of evicted prompts, on a CPU: the engine's kernel, on tables of `retain`.

A (request, KV head) is shown to the kernel as a sequence with one KV head (`retain.vllm.packing.tables`). A
step without an evicted request runs as the engine runs it.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Int, Int64
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from retain.vllm.check import CONNECTOR, MODULES
from retain.vllm.packing.tables import build_tables
from retain.vllm.packing.worker import Worker
from retain.vllm.scheduler import EvictingSpec
from retain.vllm.settings import settings_from


def worker_here() -> Worker | None:
    """The worker of this process; None before its memory is there, and in an engine that evicts nothing."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return getattr(group, "worker", None)


@dataclass
class EvictingMetadata(CPUAttentionMetadata):
    """Metadata of a step with evicted requests.

    Args:
        tables: of each layer: block table, lengths, and what the kernel's scheduler made of them.
        virtual_NH: place of each (token, KV head) among the virtual sequences.
        virtual_starts: where the tokens of each virtual sequence begin.
    """

    tables: list[tuple[Tensor, Tensor, Any]] | None = None
    virtual_NH: Int64[Tensor, "N H"] | None = None
    virtual_starts: Int[Tensor, " starts"] | None = None


class EvictingBuilder(CPUAttentionMetadataBuilder):
    """Builds a step's tables."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        worker = worker_here()
        if worker is None or not worker.parts or not isinstance(self.kv_cache_spec, EvictingSpec):
            return base
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        packed = worker.read_batch(common.block_table_tensor, starts, common.seq_lens)
        if packed is None:
            return base
        given = {each.name: getattr(base, each.name) for each in fields(CPUAttentionMetadata)}
        # Virtual sequences of the step, for every layer.
        layout, group = worker.layout, self.num_heads // worker.layout.num_heads
        starts_R1, H = common.query_start_loc.long(), layout.num_heads
        counts_R = starts_R1.diff()
        rows_N = torch.repeat_interleave(torch.arange(len(counts_R)), counts_R)
        inside_N = torch.arange(len(rows_N)) - starts_R1[rows_N]
        virtual_NH = (starts_R1[rows_N] * H + inside_N)[:, None] + torch.arange(H) * counts_R[rows_N][:, None]
        virtual_starts = torch.zeros(len(counts_R) * H + 1, dtype=torch.int32)
        virtual_starts[1:] = counts_R.repeat_interleave(H).cumsum(0)
        rows = common.block_table_tensor, common.seq_lens, *packed
        tables = build_tables(layout, *rows, worker.places_L)
        layers = []
        for pages_NW, lengths_N in zip(*tables, strict=True):
            scheduled = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(lengths_N),
                num_heads=group,
                num_kv_heads=1,
                head_dim=self.head_dim,
                seq_lens=lengths_N,
                dtype=self.dtype,
                query_start_loc=virtual_starts,
                causal=True,
                sliding_window_size=-1,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            layers.append((pages_NW.contiguous(), lengths_N, scheduled))
        return EvictingMetadata(**given, tables=layers, virtual_NH=virtual_NH, virtual_starts=virtual_starts)


class EvictingImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        asked = settings_from(config.additional_config) is not None
        EvictingCPUBackend.evicts = asked
        known = getattr(config.kv_transfer_config, "kv_connector", None) == CONNECTOR
        if asked and not (known and self.sinks is None and self.alibi_slopes is None):
            raise ValueError(
                f"{config.model_config.architecture} is not an architecture that retain serves "
                f"({', '.join(MODULES)}), or it has sink logits or ALiBi: take model_impl='transformers', or "
                "leave 'retain' out."
            )

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, **scales: Any,
    ) -> Tensor:  # fmt: skip
        worker = worker_here()
        place = None if worker is None else worker.order.get(layer.layer_name)
        if worker is not None and place is not None and attn_metadata is not None:
            N = attn_metadata.num_actual_tokens
            worker.observe_(place, query[:N])
            if isinstance(attn_metadata, EvictingMetadata):
                self._attend(worker, place, query[:N], attn_metadata, output[:N])
                return output
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)

    def _attend(
        self, worker: Worker, place: int, query_NQD: Tensor, metadata: EvictingMetadata, output_NQD: Tensor
    ) -> None:
        """Attend, each KV head of each request as one sequence."""
        assert metadata.tables is not None and metadata.virtual_NH is not None
        N, Q, D = query_NQD.shape
        H, pages = worker.layout.num_heads, worker.pages
        table, lengths, scheduled = metadata.tables[place]
        virtual_M = metadata.virtual_NH.flatten()
        queries = torch.empty(N * H, Q // H, D, dtype=query_NQD.dtype)
        queries[virtual_M] = query_NQD.reshape(N * H, Q // H, D)
        out = torch.empty_like(queries)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=pages.keys,
            value_cache=pages.values,
            output=out,
            query_start_loc=metadata.virtual_starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=scheduled,
            s_aux=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        output_NQD.copy_(out[virtual_M].view(N, Q, D))


class EvictingCPUBackend(CPUAttentionBackend):
    """The CPU backend, with layers that evict where the engine asks for it."""

    # Whether the engine whose layers were made last in this process evicts: specs are asked for once layers
    # are there, without the engine that they are for.
    evicts: ClassVar[bool] = False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return EvictingSpec.of(spec) if cls.evicts and type(spec) is FullAttentionSpec else spec

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return EvictingImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return EvictingBuilder

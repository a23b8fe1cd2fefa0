"""Attends over the pages of evicted prompts, on a CPU: the engine's backend, on tables of `retain`.

A (request, KV head) is shown to it as a sequence with one KV head (`retain.vllm.packing.pages`). A step
without an evicted request runs as the engine runs it.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor
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
from retain.vllm.packing.pages import build_tables
from retain.vllm.packing.worker import Worker
from retain.vllm.scheduler import EvictingSpec
from retain.vllm.settings import settings_from


def worker_here() -> Worker | None:
    """The worker of this process; None before its memory is there, and in an engine that evicts nothing."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return getattr(group, "worker", None)


@dataclass(kw_only=True)
class EvictingMetadata(CPUAttentionMetadata):
    """Metadata of a step with evicted requests.

    Args:
        layers: name of a layer -> metadata of its virtual sequences.
        order_M: the (token, KV head) pairs of the step, sequence by virtual sequence.
    """

    layers: dict[str, CPUAttentionMetadata]
    order_M: Int64[Tensor, " M"]


class EvictingBuilder(CPUAttentionMetadataBuilder):
    """Builds a step's tables."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        worker, common = worker_here(), common_attn_metadata
        if worker is None or not worker.parts or not isinstance(self.kv_cache_spec, EvictingSpec):
            return base
        rows = common.block_table_tensor, common.seq_lens
        packed = worker.read_batch(rows[0], common.query_start_loc_cpu.tolist(), rows[1])
        if packed is None:
            return base
        H, counts_R = self.num_kv_heads, common.query_start_loc.diff()
        rows_N = torch.arange(len(counts_R)).repeat_interleave(counts_R)
        order_M = (rows_N[:, None] * H + torch.arange(H)).flatten().argsort(stable=True)
        starts_N1 = torch.nn.functional.pad(counts_R.repeat_interleave(H).cumsum(0), (1, 0)).int()
        alone = copy(self)
        alone.num_heads, alone.num_kv_heads = self.num_heads // H, 1
        layers = {}
        for name, pages_NW, lengths_N in zip(
            worker.layers, *build_tables(worker.layout, *rows, *packed), strict=True
        ):
            sequences = replace(
                common,
                num_reqs=len(lengths_N),
                num_actual_tokens=len(order_M),
                query_start_loc=starts_N1,
                query_start_loc_cpu=starts_N1,
                seq_lens=lengths_N,
                block_table_tensor=pages_NW,
            )
            layers[name] = CPUAttentionMetadataBuilder.build(alone, 0, sequences)
        return EvictingMetadata(**vars(base), layers=layers, order_M=order_M)


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
        if worker is not None and attn_metadata is not None:
            worker.observe_(layer.layer_name, query[: attn_metadata.num_actual_tokens])
        if worker is None or not isinstance(attn_metadata, EvictingMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        # Each KV head of each request is one sequence.
        order_M, (_, Q, D) = attn_metadata.order_M, query.shape
        shape = len(order_M), Q // self.num_kv_heads, D
        queries = query[: attn_metadata.num_actual_tokens].reshape(shape)[order_M]
        found = torch.empty_like(queries)
        metadata = attn_metadata.layers[layer.layer_name]
        super().forward(layer, queries, key, value, worker.pages.cache, metadata, found, **scales)
        output[: attn_metadata.num_actual_tokens].view(shape)[order_M] = found
        return output


class EvictingCPUBackend(CPUAttentionBackend):
    """The CPU backend, with layers that evict where the engine asks for it."""

    # Whether the engine whose layers were made last in this process evicts: specs are asked for once layers
    # are there, without the engine that they are for.
    evicts: ClassVar[bool] = False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return EvictingSpec(**vars(spec)) if cls.evicts and type(spec) is FullAttentionSpec else spec

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return EvictingImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return EvictingBuilder

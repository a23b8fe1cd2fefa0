"""Joins the scheduler and the workers of an engine: a KV connector that moves nothing out of the engine.

On the scheduler's side it reads what a request asks for, keeps evicted requests away from the prefix cache,
and says of each step which requests are evicted from. On a worker's side it holds the `Worker`, tells it of
each step before its tables are built, and lets it evict after the forward pass.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from retain.attention.head_weights import check_weights
from retain.capability import check_gates, refuse
from retain.evidence import Evidence
from retain.gates.artifact import check_fingerprint, load_gates
from retain.gates.base import GateSet
from retain.gates.hub import fetch
from retain.process.fingerprint import fingerprint_of
from retain.shapes import LayerShape
from retain.vllm.metrics import EvictionMetrics, EvictionStats
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.worker import Arrival, Part, Worker
from retain.vllm.scheduler import EvictingManager, EvictingSpec
from retain.vllm.settings import Rules, budget_of, settings_from

# Below vLLM's logger, whose messages a server prints.
logger = init_logger("vllm.retain")


@dataclass
class Step(KVConnectorMetadata):
    """A step, as the scheduler tells it to the workers."""

    finished: set[str]
    parts: list[Part] = field(default_factory=list)


class RetainConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector, in either role."""

    manager: EvictingManager

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_from(vllm_config.additional_config)
        assert settings is not None, "retain.vllm.check adds the connector where settings are"
        self.settings = settings
        groups = kv_cache_config.kv_cache_groups
        evicting = [group for group in groups if isinstance(group.kv_cache_spec, EvictingSpec)]
        if len(evicting) != 1:
            raise ValueError(
                f"the engine has {len(evicting)} groups of layers with full attention, and one is wanted: "
                "this model cannot be served with eviction yet."
            )
        self.names, spec, self.alone = evicting[0].layer_names, evicting[0].kv_cache_spec, len(groups) == 1
        shape = LayerShape(spec.num_kv_heads, 2 * spec.head_size * spec.dtype.itemsize)
        self.rules = Rules(settings.load_policy(), spec.block_size, (shape,) * len(self.names))
        if role is KVConnectorRole.SCHEDULER:
            name = "tokens_per_head" if settings.keep_ratio is None else "keep_ratio"
            what = f"policy {settings.policy}, {name} {getattr(settings, name)}, in blocks of "
            what += f"{spec.block_size} entries, in {len(self.names)} layers of {spec.num_kv_heads} KV heads"
            logger.info("retain evicts entries of prompts: %s.", what)
        self.stats = EvictionStats()
        self.worker: Worker | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to another engine."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        (self.manager,) = (one for one in managers if isinstance(one, EvictingManager))

    def on_new_request(self, request: Request) -> None:
        """Decide whether a request is evicted from; one whose options do not fit is served in full."""
        params, length = request.sampling_params, request.num_prompt_tokens
        try:
            budget = budget_of(self.settings, params and params.extra_args)
            kept = self.rules.kept(length, budget)
        except ValueError as error:
            self.stats.count(requests_refused=1)
            logger.warning_once("A request is served in full, without eviction: %s", error)
            return
        if params is None or request.prompt_token_ids is None or kept == length // self.rules.page:
            self.stats.count(requests_in_full=1)
            return
        asked = self.manager.asked
        asked[request.request_id] = Arrival(request.request_id, length, kept, budget, params.seed or 0)
        # Blocks that other requests read are never rewritten.
        request.skip_reading_prefix_cache = True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step = Step(set(scheduler_output.finished_req_ids))
        cached = scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            if (asked := self.manager.asked.get(request_id)) is None:
                continue
            start, stop = computed[request_id], computed[request_id] + count
            last = self.manager.req_to_blocks[request_id][(stop - 1) // self.rules.page]
            step.parts.append(Part(asked, last.block_id, start, stop))
        self.stats.count(blocks_freed=self.manager.num_freed)
        self.manager.num_freed = 0
        return step

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.manager.asked.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """The memory is there: check it, and make the worker."""
        attention = get_layers_from_vllm_config(self._vllm_config, Attention, self.names)
        E, layers = self._vllm_config.model_config.get_hidden_size(), {}
        for name in self.names:
            module, cache = attention[name], kv_caches[name]
            Q, H, D = module.num_heads, module.num_kv_heads, module.head_size
            layers[name] = Evidence(
                layer_idx=extract_layer_index(name),
                queries_BQSD=cache.new_zeros(1, Q, 0, D),
                keys_BHTD=cache.new_zeros(1, H, 0, D),
                values_BHTD=cache.new_zeros(1, H, 0, D),
                output_weight_QDE=getattr(module, "retain_output_QDE", cache.new_zeros(()).expand(Q, D, E)),
                scaling=module.impl.scale,
                positions_BT=torch.zeros(1, 0, dtype=torch.int64),
                valid_BT=torch.zeros(1, 0, dtype=torch.bool),
                soft_cap=module.impl.logits_soft_cap or None,
            )
        indices, module = [layer.layer_idx for layer in layers.values()], attention[self.names[0]]
        assert indices == sorted(indices), f"layers of a group come in order, and here are {indices}"
        if (weights := self.rules.policy.weights) is not None:
            check_weights(weights, [shape.num_heads for shape in self.rules.shapes], indices)

        def write(keys: Tensor, values: Tensor, cache: Tensor) -> None:
            slots = torch.arange(len(keys), dtype=torch.int64, device=cache.device)
            module.impl.do_kv_cache_update(module, keys, values, cache, slots)

        pages = PageStore([kv_caches[name] for name in self.names], write)
        gates = self._gates(indices, getattr(module, "retain_samples", {}))
        self.worker = Worker(self.rules, layers, pages, gates)

    def _gates(self, indices: list[int], samples: dict[str, bytes]) -> GateSet | None:
        """The gates, checked against the engine's model by samples of its weights.

        Args:
            indices: of the layers that evict.
            samples: of all weights of the checkpoint.

        Raises:
            ValueError: they are of another model, or of a family that cannot be served.
        """
        if self.settings.gates is None:
            return None
        gates, model = load_gates(fetch(self.settings.gates)), self._vllm_config.model_config
        dims = {
            "model_type": model.hf_text_config.model_type,
            "num_layers": len(indices),
            "hidden_size": model.get_hidden_size(),
            "num_heads": model.model_arch_config.total_num_attention_heads,
            "num_kv_heads": model.get_total_num_kv_heads(),
            "head_dim": model.get_head_size(),
            "vocab_size": model.hf_text_config.vocab_size,
        }
        dims |= {} if self.alone else {"layers": ",".join(map(str, indices))}
        # The name of its embeddings shows a decoder's prefix; transformers reads no inv_freq of a checkpoint.
        embeddings = "embed_tokens.weight"
        prefixes = [name.removesuffix(embeddings) for name in samples if name.endswith(embeddings)]
        decoder = {
            name.removeprefix(prefix): sample
            for prefix in prefixes
            for name, sample in samples.items()
            if name.startswith(prefix) and not name.endswith("inv_freq")
        }
        known, allowed = fingerprint_of(dims, decoder), self.settings.allow_other_weights
        check_fingerprint(gates.metadata, known, self.settings.gates, allow_other_weights=allowed)
        refuse(self.rules.policy, ["vllm"], gates=gates)
        check_gates(self.rules.policy, self.settings.budget, gates)
        return gates

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first call of a step: before its tables are built."""
        if self.worker is not None:
            self.worker.begin(kv_connector_metadata.parts, kv_connector_metadata.finished)

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is loaded or saved."""

    start_load_kv = wait_for_layer_load = save_kv_layer = update_state_after_alloc = nothing

    def wait_for_save(self) -> None:
        """The last call of a step: after its forward pass."""
        if self.worker is not None:
            self.stats.count(**self.worker.evict())

    def get_kv_connector_stats(self) -> EvictionStats:
        stats, self.stats = self.stats, EvictionStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EvictionStats:
        return EvictionStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> EvictionMetrics:
        return EvictionMetrics(*args)

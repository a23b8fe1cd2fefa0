"""Checks an engine's configuration before it starts, and adds the connector to one that is to evict.

An engine that cannot be served with eviction is refused, with the reasons, rather than started with a full
cache. Options of a request are checked where requests are taken in, so that a server answers with status 400.
"""

from typing import Any

import vllm
from torch import Tensor
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor

from retain.vllm.settings import Settings, budget_of, settings_from

# The release of vLLM that the tests were run with.
TESTED = "0.32."

CONNECTOR = "RetainConnector"
OPTIONS_CHECK = "retain.vllm.check:OptionsCheck"

# Architecture -> its module in vLLM.
MODULES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "TransformersForCausalLM": "transformers",
}


def check_of(earlier: type[VerifyAndUpdateConfig] | None) -> type[VerifyAndUpdateConfig]:
    """The check of an architecture, after the one that vLLM has for it."""
    base = earlier or VerifyAndUpdateConfig

    class Check(base):  # type: ignore[misc, valid-type]
        @classmethod
        def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
            base.verify_and_update_config(vllm_config)
            if settings_from(vllm_config.additional_config) is not None:
                prepare_(vllm_config)

    return Check


def prepare_(config: VllmConfig) -> None:
    """Refuse an engine that cannot evict, and add the connector.

    Raises:
        ValueError: with all reasons.
    """
    transfer = config.kv_transfer_config
    problems = {
        f"vLLM {vllm.__version__} was not tested, {TESTED}* was": not vllm.__version__.startswith(TESTED),
        "no GPU backend exists yet, a CPU is wanted (docs/serving.md)": not current_platform.is_cpu(),
        f"it quantises its cache (kv_cache_dtype {config.cache_config.cache_dtype!r}): take 'auto'": (
            config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32")
        ),
        "speculative decoding was not tested: leave it out": config.speculative_config is not None,
        "tensor, pipeline and context parallelism are not served: take sizes of 1": any(
            getattr(config.parallel_config, f"{kind}_parallel_size") > 1
            for kind in ("tensor", "pipeline", "decode_context", "prefill_context")
        ),
        "the V2 model runner was not tested: set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
        "another KV connector is configured: take one of the two": (
            transfer is not None and transfer.kv_connector != CONNECTOR
        ),
    }
    if found := [problem for problem, holds in problems.items() if holds]:
        raise ValueError(f"this engine cannot evict: {'; '.join(found)}. Or leave 'retain' out.")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR, kv_connector_module_path="retain.vllm.connector", kv_role="kv_both"
    )
    there = config.model_config.logits_processors or []
    config.model_config.logits_processors = [*there, *({OPTIONS_CHECK} - {*there})]


class OptionsCheck(LogitsProcessor):
    """Refuses options that do not fit before their request reaches the engine.

    A custom logits processor is what vLLM asks about a request's parameters in the process that takes
    requests in; the rest of it does nothing. Whether a budget holds what is protected depends on the engine's
    settings and is seen later (`RetainConnector.on_new_request`).
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        budget_of(Settings(keep_ratio=1.0), sampling_params.extra_args)

    def __init__(self, *args: Any):
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        return

    def apply(self, logits: Tensor) -> Tensor:
        return logits

"""Registers the plug-in with vLLM: called in every process of an engine, before its configuration is read."""


def register() -> None:
    """Entry point `vllm.general_plugins`. The check is registered whatever the version, since it is what
    refuses one that was not tested; the rest only where it is known to work."""
    from vllm import ModelRegistry, __version__
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from retain.vllm.check import MODULES, TESTED, check_of

    for architecture in MODULES:
        MODELS_CONFIG_MAP[architecture] = check_of(MODELS_CONFIG_MAP.get(architecture))
    if not __version__.startswith(TESTED):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from retain.vllm.scheduler import EvictingManager, EvictingSpec

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)
    for architecture in MODULES:
        ModelRegistry.register_model(architecture, f"retain.vllm.models:{architecture}")
    # A CPU always picks this member.
    register_backend(AttentionBackendEnum.CPU_ATTN, "retain.vllm.backend.EvictingCPUBackend")

"""vLLM's OpenAI server with the reference model, and what the plug-in counts there."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retain.vllm.demo import free_port, running

# Entries of a block, and bytes of the whole pool: 128 blocks, 4,096 tokens of the reference model.
BLOCK, POOL_BYTES = 32, 16 << 20


@contextmanager
def serving(
    model: Path, settings: Mapping[str, Any], log: Path, *more: str, python: str = sys.executable
) -> Iterator[str]:
    """Run the server while the body runs.

    Args:
        model: folder.
        settings: of the plug-in.
        log: what the server prints.
        *more: further arguments of the server.
        python: interpreter of the environment that has vLLM.

    Yields:
        its address.
    """
    port = free_port()
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", str(model), "--served-model-name", "reference"]
    words += ["--additional-config", json.dumps({"retain": dict(settings)})]
    # vLLM's Qwen3 has no place for the biases of this model's output projections.
    words += ["--model-impl", "transformers", "--dtype", "float32", "--enforce-eager"]
    words += ["--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(POOL_BYTES)]
    words += ["--max-model-len", "2048", "--max-num-batched-tokens", "2048", *more]
    fixed = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    fixed["VLLM_LOGGING_LEVEL"] = "INFO"
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **fixed}
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    url = f"http://127.0.0.1:{port}"
    with running(words, url, log, env=environ):
        yield url


def counters(metrics: Mapping[str, float]) -> dict[str, int]:
    """The counters of the plug-in, of `retain.vllm.demo.read_metrics`."""
    start, end = "vllm:retain_", "_total"
    names = [name for name in metrics if name.startswith(start) and name.endswith(end)]
    return {name[len(start) : -len(end)]: int(metrics[name]) for name in names}

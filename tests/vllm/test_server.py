"""vLLM's OpenAI server with the plug-in, over HTTP: what clients get, and what the counters say."""

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from retain.vllm.demo import free_port, read_metrics, running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
# Entries of a block, and bytes of the whole pool: 128 blocks, 4,096 tokens of the reference model.
BLOCK, POOL_BYTES = 32, 16 << 20
# Prompts of 15 full pages, and of less than one.
LONG, SHORT = list(range(5, 505)), list(range(5, 25))
KEPT = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def client(reference: str, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with eviction; it prints to the log."""
    template, port = tmp_path_factory.mktemp("chat") / "chat.jinja", free_port()
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = {"retain": {"policy": "snapkv", "keep_ratio": 0.2}}
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", reference]
    words += ["--chat-template", str(template), "--additional-config", json.dumps(settings)]
    # vLLM's Qwen3 has no place for the biases of this model's output projections.
    words += f"--port {port} --kv-cache-memory-bytes {POOL_BYTES} --block-size {BLOCK}".split()
    words += ["--host", "127.0.0.1", "--served-model-name", "reference", "--model-impl", "transformers"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    fixed = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **fixed, "VLLM_LOGGING_LEVEL": "INFO"}
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    url = f"http://127.0.0.1:{port}"
    with running(words, url, log, environ), httpx.Client(base_url=url, timeout=120) as client:
        yield client


def counters(metrics: dict[str, float]) -> dict[str, int]:
    """The counters of the plug-in."""
    found = {re.fullmatch("vllm:retain_(.*)_total", name): int(count) for name, count in metrics.items()}
    return {match[1]: count for match, count in found.items() if match}


@contextmanager
def counted(client: httpx.Client) -> Iterator[dict[str, int]]:
    """Increments of the counters while the body runs; filled in at its end."""

    def read() -> dict[str, int]:
        for _ in range(50):
            time.sleep(0.1)
            metrics = read_metrics(client)
            if not metrics["vllm:kv_cache_usage_perc"] and not metrics["vllm:num_requests_running"]:
                return counters(metrics)
        pytest.fail("blocks are held and no request is there")

    before, grown = read(), dict[str, int]()
    yield grown
    grown |= {name: count - before[name] for name, count in read().items() if count > before[name]}


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json={**body, **fields})


def freed(kept: int, requests: int = 1) -> dict[str, int]:
    """Counts of long prompts of which so many pages a head stay."""
    return {"evictions": requests, "blocks_freed": requests * (len(LONG) // BLOCK - kept)}


def test_the_log_says_what_is_evicted_and_counters_grow_by_what_is_freed(client, log) -> None:
    said = "retain evicts entries of prompts: policy snapkv, keep_ratio 0.2, in blocks of 32 entries, in 4"
    assert log.read_text().count(said) == 1
    for more, grown in (
        ({}, freed(KEPT)),
        ({"vllm_xargs": {"retain.keep_ratio": 0.4}}, freed(6)),
        ({"n": 3, "temperature": 1.0, "seed": 1}, freed(KEPT, requests=3)),
        ({"vllm_xargs": {"retain.keep_ratio": 1.0}}, {"requests_in_full": 1}),
        ({"prompt": SHORT}, {"requests_in_full": 1}),
        ({"vllm_xargs": {"retain.tokens_per_head": 1}}, {"requests_refused": 1}),
    ):
        with counted(client) as counts:
            assert complete(client, **more).is_success
        assert counts == grown
    assert "A request is served in full, without eviction: sequence 0 has a budget of" in log.read_text()


def test_a_request_that_is_given_up_leaves_nothing(client) -> None:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 1400, "ignore_eos": True, "stream": True}
    with counted(client) as counts, client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    assert counts == freed(KEPT)


def test_the_blocks_of_the_page_run(client) -> None:
    """Both clients: what they ask for is what is freed."""
    scope = {"url": str(client.base_url), "model": "reference", "prompt": LONG, "text": "import os\n" * 300}
    (fenced,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with counted(client) as counts:
        exec(fenced, scope)
    assert counts == freed(6) and scope["answer"] and scope["refused"].status_code == 400
    assert scope["refused"].json()["error"]["message"].startswith("options of the request do not fit: ")
    (indented,) = re.findall(r"\n((?:    from openai.*\n)(?:    .*\n|\n(?=    ))*)", PAGE)
    with counted(client) as counts:
        exec(textwrap.dedent(indented), scope)
    assert counts["blocks_freed"] > 0 and isinstance(scope["answer"], str)

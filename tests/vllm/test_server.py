"""vLLM's OpenAI server with the plug-in, over HTTP: what clients get, and what the counters say."""

import json
import os
import re
import shutil
import subprocess
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


@contextmanager
def serving(model: Path, settings: dict[str, Any], log: Path, *more: str) -> Iterator[str]:
    """Run the server of a model's folder, with settings of the plug-in and further arguments, while the body
    runs; it prints to the log. Yields its address."""
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    words += ["--model", str(model), "--served-model-name", "reference"]
    words += ["--additional-config", json.dumps({"retain": settings})]
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


def counters(metrics: dict[str, float]) -> dict[str, int]:
    """The counters of the plug-in, of `retain.vllm.demo.read_metrics`."""
    start, end = "vllm:retain_", "_total"
    names = [name for name in metrics if name.startswith(start) and name.endswith(end)]
    return {name[len(start) : -len(end)]: int(metrics[name]) for name in names}


@pytest.fixture(scope="module")
def model(reference: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(reference, tmp_path_factory.mktemp("model") / "reference"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def client(model: Path, log: Path) -> Iterator[httpx.Client]:
    template = model / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = {"policy": "snapkv", "keep_ratio": 0.2}
    with (
        serving(model, settings, log, "--chat-template", str(template)) as url,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        yield client


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


def text_of(reply: httpx.Response) -> str:
    assert reply.is_success, reply.text
    return str(reply.json()["choices"][0]["text"])


def freed(kept: int, requests: int = 1) -> dict[str, int]:
    """Counts of long prompts of which so many pages a head stay; there are 8 heads of 32 entries a page."""
    blocks = requests * (len(LONG) // BLOCK - kept)
    return {"evictions": requests, "blocks_freed": blocks, "entries_freed": blocks * 8 * BLOCK}


def test_the_log_says_what_is_evicted_and_counters_grow_by_what_is_freed(client, log) -> None:
    said = "retain evicts entries of prompts: policy snapkv, keep_ratio 0.2, in blocks of 32 entries, in 4"
    assert log.read_text().count(said) == 1
    for options, grown in (({}, freed(KEPT)), ({"retain.keep_ratio": 0.4}, freed(6))):
        with counted(client) as counts:
            complete(client, vllm_xargs=options)
        assert counts == grown
    with counted(client) as counts:
        complete(client, vllm_xargs={"retain.off": 1})
        complete(client, prompt=SHORT)
    assert counts == {"requests_in_full": 2}
    line = r'vllm:retain_blocks_freed_total\{engine="0",model_name="reference"\} \d+'
    assert re.search(line, client.get("/metrics").text)


def test_a_budget_below_what_is_protected_is_served_in_full_and_counted(client, log) -> None:
    with counted(client) as counts:
        answer = text_of(complete(client, vllm_xargs={"retain.tokens_per_head": 1}))
    assert counts == {"requests_refused": 1}
    assert answer == text_of(complete(client, vllm_xargs={"retain.off": 1}))
    assert "A request is served in full, without eviction: sequence 0 has a budget of" in log.read_text()


def test_an_option_that_does_not_fit_is_answered_with_400(client) -> None:
    with counted(client) as counts:
        reply = complete(client, vllm_xargs={"retain.keepratio": 0.3})
    assert reply.status_code == 400 and counts == {}
    said = reply.json()["error"]["message"]
    assert re.match(r"(?s)options of the request do not fit: .*did you mean 'keep_ratio'", said)
    assert client.get("/health").is_success and text_of(complete(client))


def test_streams_several_answers_and_requests_that_are_given_up(client) -> None:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    with client.stream("POST", "/v1/completions", json=body) as reply:
        parts = re.findall(r'"text":(".*?[^\\]"|"")', "".join(reply.iter_text()))
    assert "".join(map(json.loads, parts)) == text_of(complete(client, max_tokens=64)) and len(parts) > 1
    with counted(client) as counts:
        several = complete(client, n=3, temperature=1.0, seed=1).json()["choices"]
    assert len(several) == 3 and counts == freed(KEPT, requests=3)
    given_up = {**body, "max_tokens": 1400}
    with counted(client) as counts, client.stream("POST", "/v1/completions", json=given_up) as reply:
        next(reply.iter_lines())
    assert counts == freed(KEPT)


def test_the_blocks_of_the_page_run(client) -> None:
    """Both clients: what they ask for is what is freed."""
    scope = {"url": str(client.base_url), "model": "reference", "prompt": LONG, "text": "import os\n" * 300}
    (fenced,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with counted(client) as counts:
        exec(fenced, scope)
    assert counts == freed(6) and scope["answer"] and scope["refused"].status_code == 400
    (indented,) = re.findall(r"\n((?:    from openai.*\n)(?:    .*\n|\n(?=    ))*)", PAGE)
    with counted(client) as counts:
        exec(textwrap.dedent(indented), scope)
    assert counts["blocks_freed"] > 0 and isinstance(scope["answer"], str)


def test_the_block_through_python_runs(model, tmp_path) -> None:
    """In a process of its own, which vLLM changes."""
    (block,) = re.findall(r"\n((?:    from vllm.*\n)(?:    .*\n|\n(?=    ))*)", PAGE)
    lines = f"""\
if __name__ == "__main__":
    name, prompts = {str(model)!r}, ["import os\\n" * 300, "import re\\n" * 300]
    engine = dict(model_impl="transformers", dtype="float32", enforce_eager=True, block_size=32)
    engine |= dict(kv_cache_memory_bytes=16 << 20, max_model_len=2048, disable_log_stats=False)
{block}
    counts = {{one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}}
    assert counts["vllm:retain_evictions"] == 2 and counts["vllm:retain_blocks_freed"] > 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
"""
    (tmp_path / "block.py").write_text(lines)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, tmp_path / "block.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

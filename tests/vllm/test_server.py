"""vLLM's OpenAI server with the plug-in, over HTTP: what clients get, and what the counters say."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from retain.vllm.demo import read_metrics
from tests.vllm.server import BLOCK, counters, serving

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
# Prompts of 15 full pages, and of less than one.
LONG, SHORT = list(range(5, 505)), list(range(5, 25))
KEPT = 3


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


class Counted:
    """What the counters grow by while the body runs.

    Attributes:
        counts: of those that grew.
    """

    def __init__(self, client: httpx.Client):
        self.client = client

    def _read(self) -> dict[str, int]:
        for _ in range(50):
            time.sleep(0.1)
            metrics = read_metrics(self.client)
            if not metrics["vllm:kv_cache_usage_perc"] and not metrics["vllm:num_requests_running"]:
                return counters(metrics)
        pytest.fail("blocks are held and no request is there")

    def __enter__(self) -> "Counted":
        self.before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        grown = {name: count - self.before[name] for name, count in self._read().items()}
        self.counts = {name: count for name, count in grown.items() if count}


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json={**body, **fields})


def text_of(reply: httpx.Response) -> str:
    assert reply.is_success, reply.text
    return str(reply.json()["choices"][0]["text"])


def freed(kept: int, requests: int = 1) -> dict[str, int]:
    """Counts of long prompts of which so many pages a head stay; there are 8 heads of 32 entries a page."""
    blocks = requests * (len(LONG) // BLOCK - kept)
    return {
        "evictions": requests,
        "blocks_freed": blocks,
        "entries_freed": blocks * 8 * BLOCK,
    }


def test_the_log_says_what_is_evicted(client, log) -> None:
    said = "retain evicts entries of prompts: policy snapkv, keep_ratio 0.2, in blocks of 32 entries, in 4"
    assert log.read_text().count(said) == 1


def test_counters_grow_by_what_each_request_frees(client) -> None:
    with Counted(client) as default:
        complete(client)
    assert default.counts == freed(KEPT)
    with Counted(client) as own:
        complete(client, vllm_xargs={"retain.keep_ratio": 0.4})
    assert own.counts == freed(6)
    with Counted(client) as full:
        complete(client, vllm_xargs={"retain.off": 1})
        complete(client, vllm_xargs={"retain.off": True})
        complete(client, prompt=SHORT)
    assert full.counts == {"requests_in_full": 3}
    line = r'vllm:retain_blocks_freed_total\{engine="0",model_name="reference"\} \d+'
    assert re.search(line, client.get("/metrics").text)


def test_a_budget_below_what_is_protected_is_served_in_full_and_counted(client, log) -> None:
    with Counted(client) as counted:
        answer = text_of(complete(client, vllm_xargs={"retain.tokens_per_head": 1}))
    assert counted.counts == {"requests_refused": 1}
    assert answer == text_of(complete(client, vllm_xargs={"retain.off": 1}))
    assert "A request is served in full, without eviction: sequence 0 has a budget of" in log.read_text()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("keep_ratio", 7, "keep_ratio is kept / seen, above 0 and at most 1; got 7"),
        ("keepratio", 0.3, r"unknown key 'retain.keepratio' \(did you mean 'keep_ratio'\?\)"),
        ("off", "maybe", "retain.off: input should be a valid boolean, got 'maybe'"),
    ],
)
def test_an_option_that_does_not_fit_is_answered_with_400(client, option, value, message) -> None:
    with Counted(client) as counted:
        reply = complete(client, vllm_xargs={f"retain.{option}": value})
    assert reply.status_code == 400 and counted.counts == {}
    said = reply.json()["error"]["message"]
    assert re.match(f"(?s)options of the request do not fit: .*{message}", said)
    assert client.get("/health").is_success and text_of(complete(client))


def test_clients_get_all_that_they_do_otherwise(client) -> None:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        parts = re.findall(r'"text":(".*?[^\\]"|"")', "".join(reply.iter_text()))
    assert "".join(map(json.loads, parts)) == text_of(complete(client, max_tokens=64)) and len(parts) > 1
    whole = text_of(complete(client))
    with Counted(client) as counted:
        several = complete(client, n=3, temperature=1.0, seed=1).json()["choices"]
    assert len(several) == 3 and counted.counts == freed(KEPT, requests=3)
    logprobs = complete(client, logprobs=2).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 6 and "".join(logprobs["tokens"]) == whole
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    stop = logprobs["tokens"][3]
    stopped = complete(client, stop=[stop]).json()["choices"][0]
    assert stopped["text"] == whole[: whole.index(stop)] and stopped["finish_reason"] == "stop"


def test_a_request_that_is_given_up_leaves_no_block(client) -> None:
    body = {"model": "reference", "prompt": LONG, "max_tokens": 1400, "ignore_eos": True, "stream": True}
    with Counted(client) as counted, client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    assert counted.counts == freed(KEPT)


def test_the_blocks_of_the_page_run(client) -> None:
    """Both clients: what they ask for is what is freed."""
    scope = {"url": str(client.base_url), "model": "reference", "prompt": LONG, "text": "import os\n" * 300}
    (fenced,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with Counted(client) as counted:
        exec(fenced, scope)
    assert counted.counts == freed(6) and scope["answer"]
    assert scope["refused"].status_code == 400
    (indented,) = re.findall(r"\n((?:    from openai.*\n)(?:    .*\n|\n(?=    ))*)", PAGE)
    with Counted(client) as counted:
        exec(textwrap.dedent(indented), scope)
    assert counted.counts["blocks_freed"] > 0 and isinstance(scope["answer"], str)


def test_the_block_through_python_runs(model, tmp_path) -> None:
    """In a process of its own, which vLLM changes."""
    (block,) = re.findall(r"\n((?:    from vllm.*\n)(?:    .*\n|\n(?=    ))*)", PAGE)
    setup = f"""
        if __name__ == "__main__":
            name, prompts = {str(model)!r}, ["import os\\n" * 300, "import re\\n" * 300]
            engine = dict(model_impl="transformers", dtype="float32", enforce_eager=True, block_size=32)
            engine |= dict(kv_cache_memory_bytes=16 << 20, max_model_len=2048, disable_log_stats=False)
        """
    ask = """
            from vllm.exceptions import VLLMValidationError

            print([len(output.outputs[0].token_ids) for output in outputs])
            counts = {one.name: one.value for one in llm.get_metrics() if "retain" in one.name}
            print(counts["vllm:retain_evictions"], counts["vllm:retain_blocks_freed"])
            try:
                llm.generate(prompts[0], SamplingParams(extra_args={"retain.keepratio": 0.4}))
            except VLLMValidationError as error:
                print(error)
        """
    script = tmp_path / "block.py"
    indented = textwrap.indent(textwrap.dedent(block), "    ")
    script.write_text(textwrap.dedent(setup) + indented + textwrap.indent(textwrap.dedent(ask), "    "))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, answers, counts, refused = done.stdout.strip().splitlines()
    assert answers == "[8, 8]" and counts.startswith("2 ") and int(counts.split()[1]) > 0
    assert "unknown key 'retain.keepratio'" in refused

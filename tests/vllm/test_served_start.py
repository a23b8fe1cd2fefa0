"""The six commands of docs/start.md, from an installation to a served answer, as they stand there.

The hub is on the loopback address and has a small model and a few documents under the names of the page.
`make test-vllm` runs it: the last two need vLLM.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from retain.reference import load_tokenizer
from retain.vllm import demo
from tests.hub.content import files, parquet, texts, tiny_llama
from tests.hub.server import Hub
from tests.vllm.server import counters

ROOT = Path(__file__).resolve().parents[2]
(BLOCK,) = re.findall(r"## From nothing.*?```bash\n(.*?)```", (ROOT / "docs/start.md").read_text(), re.DOTALL)
COMMANDS = BLOCK.splitlines()
NAME, DATA = "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceFW/fineweb-edu"
CARD = b"""---
configs:
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This checkout, with `runs` and `results` of its own."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", "results"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a user whose hub has the model and the data set."""
    folder = tmp_path_factory.mktemp("hub")
    # vLLM's kernel for CPUs takes no narrower heads.
    tiny_llama(hidden_size=64, head_dim=32).save_pretrained(folder / "model")
    load_tokenizer().save_pretrained(folder / "model")
    with Hub() as hub:
        hub.commit("models", NAME, files(folder / "model"))
        rows = parquet(texts(400, words=500))
        hub.commit("datasets", DATA, {"README.md": CARD, "sample/10BT/000_00000.parquet": rows})
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "RETAIN_", "VLLM_"))
        }
        for name in ("PYTHONPATH", "TRITON_INTERPRET", "MAKEFLAGS"):
            own.pop(name, None)
        yield {**own, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}


def test_six_commands_lead_from_nothing_to_a_served_answer(checkout, environment) -> None:
    assert len(COMMANDS) == 6

    def run(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    *before, serve, ask = COMMANDS
    said = [run(command) for command in before]
    record = json.loads((checkout / "runs/laptop/gates.json").read_text())
    assert record["base_model"] == NAME and record["data"]["path"] == DATA
    for policy in ("gate", "merge", "snapkv"):
        assert policy in said[3]

    port = str(demo.free_port())
    url, log = f"http://127.0.0.1:{port}", checkout / "server.log"
    with demo.running(["bash", "-c", serve], url, log, cwd=checkout, env={**environment, "PORT": port}):
        answer = json.loads(run(ask.replace("8000", port)))
        with httpx.Client(base_url=url, trust_env=False) as client:
            counted = counters(demo.read_metrics(client))
    assert answer["model"] == NAME and answer["usage"]["completion_tokens"] > 0
    assert counted["evictions"] == 1 and counted["entries_freed"] > answer["usage"]["prompt_tokens"]
    assert "retain evicts entries of prompts: policy fused, keep_ratio 0.2" in log.read_text()

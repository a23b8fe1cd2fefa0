"""Thousands of requests leave nothing behind, and a pool holds more of them at once."""

import gc
import os
import random

import psutil

from tests.vllm.engine import Run
from tests.vllm.test_served_policies import BLOCK

# So little is protected that prompts of two pages are evicted from.
SMALL = ["protection.sinks=1", "protection.minimum=0", "protection.recent=4"]
SMALL += ["protection.prefix_fraction=0", "protection.suffix_fraction=0"]
COUNT = int(os.environ.get("RETAIN_VLLM_REQUESTS", 10_000))


def test_nothing_is_left_of_ten_thousand_requests(engines, reference):
    """Of random length, some untouched, some aborted: no block, no entry of a table, no memory."""
    retain = {"policy": "snapkv", "keep_ratio": 0.3, "overrides": [*SMALL, "observed_settings.window=4"]}
    # Small steps, of few sizes: libraries of the engine keep something for every size, with or without us.
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 160 * BLOCK, "max_num_batched_tokens": 128}
    run = Run(engines.get(reference, retain, **settings))
    draw, process = random.Random(0), psutil.Process()
    sent, grown, aborted, evicted = 0, 0, 0, 0
    while sent < COUNT or run.engine.has_unfinished_requests():
        while sent < COUNT and len(run.scheduler.requests) < 40:
            prompt = [draw.randint(5, 3000) for _ in range(draw.randint(1, 160))]
            off = {"extra_args": {"retain.off": True}} if draw.random() < 0.2 else {}
            run.add(f"r{sent}", prompt, draw.randint(2, 6), **off)
            sent += 1
            if sent == COUNT // 2:
                gc.collect()
                grown = process.memory_info().rss
        if draw.random() < 0.2:
            one = draw.choice(list(run.scheduler.requests))
            run.abort(one.rpartition("-")[0])
            aborted += 1
        run.step()
        evicted += len(run.kept)
        for known in (run.answers, run.outputs, run.kept):
            known.clear()
    gc.collect()
    grown = process.memory_info().rss - grown
    run.add("last", [5, 6, 7], 1)
    run.finish()
    print(
        f"{COUNT} requests, {aborted} aborted, {evicted} evicted from, {run.steps} steps, "
        f"{len(run.preempted)} preempted, memory grew by {grown / 2**20:.1f} MiB in the second half"
    )
    assert not any(run.leftovers().values()), run.leftovers()
    assert evicted > COUNT // 4 and aborted > COUNT // 50
    assert grown < 16 * 2**20

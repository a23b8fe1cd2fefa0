"""Serves a load of requests in an engine's process, step by step, and counts: the engine's side of `engine`.

The requests come at once, as many as there are; what an engine cannot take waits. Steps, requests at once and
blocks are read off the engine's own scheduler and pool behind every step. Where stages are clocked, the
plug-in's functions are, without the clocked functions that they call; what is left is vLLM's and the model's.
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.eval.run.engine import as_asked, here
from retain.eval.speed.stages import Part, staged

# `eviction`: scores, budget, selection and packing behind a prompt. `tables`: block tables of virtual
# sequences. `scheduling`: what the engine's kernel makes of them, a call for each layer. `rows`: which row
# of a batch is which request. `gates`: gates on the tokens of prompts. `windows`: copies of queries.
# `attention`: of steps with evicted requests, all of it.
EVICTION, ATTENTION = "eviction", "attention"
STAGES = (EVICTION, "tables", "scheduling", "rows", "gates", "windows", ATTENTION)


@dataclass(frozen=True)
class Load:
    """Requests that come at once.

    Attributes:
        prompts: Token ids.
        new_tokens: That each generates.
        extra: Extra arguments of each.
        clocks: Whether the stages of the plug-in are clocked, which takes time itself.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    extra: Mapping[str, Any]
    clocks: bool = False


_names = itertools.count()


def life(load: Load) -> dict[str, float]:
    """Serve a load to its end, in an engine that has nothing else to do.

    Returns:
        `wall_s`, `tokens_per_s`, `steps`, `step_ms`; `ttft_s`, the median over requests of the time until the
        first token, waiting included; requests `at_once` (mean over steps) and `most_at_once`; blocks
        `held_a_request` (mean over steps and running requests) and `most_held`; `preempted`; milliseconds by
        stage, if they are clocked.
    """
    with staged(_parts() if load.clocks else ()) as stages:
        return _serve(load) | {f"{name}_ms": ms for name, ms in stages.items()}


def _serve(load: Load) -> dict[str, float]:
    engine = here["llm"].llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    sampling = {"max_tokens": load.new_tokens, "extra_args": dict(load.extra)}
    asked = [as_asked(prompt, **sampling) for prompt in load.prompts]
    began = time.perf_counter()
    for prompt, params in asked:
        engine.add_request(str(next(_names)), prompt, params)
    first: dict[str, float] = {}
    running: list[int] = []
    held: list[int] = []
    tokens, preempted = 0, dict[str, int]()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        running.append(len(scheduler.running) + sum(output.finished for output in outputs))
        held.append(free - pool.get_num_free_blocks())
        preempted |= {name: request.num_preemptions for name, request in scheduler.requests.items()}
        for output in outputs:
            first.setdefault(output.request_id, time.perf_counter() - began)
            tokens += len(output.outputs[0].token_ids) * output.finished
    wall = time.perf_counter() - began
    assert len(first) == len(load.prompts) and free == pool.get_num_free_blocks()
    return {
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "steps": float(len(running)),
        "step_ms": 1e3 * wall / len(running),
        "ttft_s": statistics.median(first.values()),
        "at_once": statistics.fmean(running),
        "most_at_once": float(max(running)),
        "held_a_request": sum(held) / sum(running),
        "most_held": float(max(held)),
        "preempted": float(sum(preempted.values())),
    }


def _parts() -> list[Part]:
    """The plug-in's functions that are clocked: (owner, name, stage)."""
    from retain.vllm import backend
    from retain.vllm.packing.worker import Worker

    return [
        (Worker, "evict", EVICTION),
        (Worker, "read_batch", "rows"),
        (Worker, "note_", "gates"),
        (Worker, "capture_", "windows"),
        (backend, "build_tables", "tables"),
        (backend.EvictingBuilder, "_virtual", "scheduling"),
        (backend.EvictingImpl, "_attend", ATTENTION),
    ]

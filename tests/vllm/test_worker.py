"""A worker's requests, without an engine: what heads read through their tables after any order of steps."""

import random
from dataclasses import replace

import pytest

from retain.budget.statement import Budget
from retain.gates import build_gates
from retain.policy import candidates_of, score_entries
from retain.shapes import LayerShape
from retain.vllm.packing.pages import Layout
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.packing.worker import Worker, with_tokens
from retain.vllm.settings import Rules
from tests.evictions import small
from tests.naive import random_evidence
from tests.vllm.engine import places_of
from tests.vllm.memory import SERVED, Steps, make_store

PAGE = 4
BUDGET = Budget(keep_ratio=0.4)
CHUNKS = ((50,), (7,) * 10, (36, 3, 1), (38, 1, 1, 1), (1,) * 45)


def make_steps(name: str, num_layers: int = 2, num_heads: int = 2) -> Steps:
    """An empty memory with a worker: 2 query heads a KV head, windows of 4 queries."""
    policy, shape = small(name, ""), LayerShape(num_heads, 24)
    layers = {
        f"layers.{2 * place}": replace(
            random_evidence((0,), num_tokens=0, num_heads=num_heads, seed=place), layer_idx=2 * place
        )
        for place in range(num_layers)
    }
    dims = {layer.layer_idx: {"E": 5, "H": num_heads} for layer in layers.values()}
    gates = build_gates("linear", dims) if policy.learned else None
    store = make_store(Layout(num_layers, 60, num_heads, PAGE), 3)
    return Steps(Worker(Rules(policy, PAGE, [shape] * num_layers), layers, store, gates))


def wanted(steps: Steps, request_id: str) -> list[list[list[int]]]:
    """Places that each head of each layer keeps of a prompt, decided from all its tensors."""
    request, worker, given = steps.requests[request_id], steps.worker, steps.requests[request_id].arrival
    T, rules = given.length, worker.rules
    plan, candidates = rules.plan(T, given.budget), []
    for place, layer in enumerate(worker.layers.values()):
        shown = with_tokens(
            layer,
            request.keys_LHTD[place][None, :, :T],
            request.values_LHTD[place][None, :, :T],
            queries_BQSD=request.queries_LQTD[place][None, :, :T],
            hidden_BTE=request.hidden_TE[None, :T],
        )
        learned = worker.gates.score(shown) if worker.gates else None
        score = score_entries(rules.policy, shown, learned=learned, seeds_B=[given.seed])
        candidates.append(candidates_of(plan, score))
    return places_of([mask[0] for mask in keep_pages(plan, candidates, PAGE)])


def forget(steps: Steps) -> None:
    """All requests end: nothing of them is left, and all blocks are free."""
    for request_id in list(steps.requests):
        steps.finish(request_id)
    steps.worker.begin([], steps.finished)
    assert not steps.worker.prompts and not steps.worker.starts
    assert len(steps.pool) == len(set(steps.pool)) == steps.layout.num_blocks - 1


@pytest.mark.parametrize(
    ("name", "length", "chunks"),
    [(name, 39 + (i + j) % 3, CHUNKS[(2 * i + j) % 5]) for i, name in enumerate(SERVED) for j in range(2)],
)
def test_heads_read_what_stays_of_a_prompt_and_then_its_answer(name, length, chunks):
    """Windows of 4 queries begin in one chunk and end in a later one."""
    steps = make_steps(name)
    steps.add("a", length, BUDGET, seed=length)
    for chunk in (*chunks, length):
        if count := min(chunk, length - steps.requests["a"].done):
            steps.step({"a": count})
    assert steps.counts["evictions"] == 1 and steps.kept["a"] == wanted(steps, "a")
    for _ in range(2 * PAGE + 1):
        steps.step({"a": 1})
    freed = length // PAGE - steps.worker.rules.kept(length, BUDGET)
    assert steps.requests["a"].blocks.count(0) == freed > 0
    forget(steps)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_steps_preemptions_and_aborts(seed):
    """Evicted, being read and untouched requests in one step, in an order that changes."""
    draw, begun = random.Random(seed), 0
    steps = make_steps(draw.choice(["snapkv", "knorm", "learned"]), draw.randint(1, 3), draw.randint(1, 3))
    for _ in range(40):
        if len(steps.requests) < 3 and draw.random() < 0.6:
            begun += 1
            given = BUDGET if draw.random() < 0.8 else None
            steps.add(f"r{begun}", draw.randint(1, 45), given, seed=begun)
        if draw.random() < 0.1 and steps.requests:
            steps.finish(draw.choice(list(steps.requests)))
        if draw.random() < 0.1 and steps.requests:
            steps.preempt(draw.choice(list(steps.requests)))
        counts = {}
        for request_id in draw.sample(list(steps.requests), len(steps.requests)):
            request = steps.requests[request_id]
            left = request.keys_LHTD.shape[2] - request.done
            ahead = max(1, (request.arrival.length if request.arrival else 45) - request.done)
            if left > 12:
                more = ahead if draw.random() < 0.7 else ahead + 9
                counts[request_id] = min(draw.randint(1, more), left)
        if counts:
            steps.step(counts)
    assert steps.counts["evictions"] > 0
    forget(steps)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "learned"])
def test_a_request_that_cannot_be_scored_keeps_its_last_entries_and_stops_no_other(name, caplog):
    steps = make_steps(name)
    for request_id, length in (("bad", 41), ("good", 38)):
        steps.add(request_id, length, BUDGET, seed=length)
    steps.requests["bad"].queries_LQTD.fill_(float("nan"))
    steps.step({"bad": 41, "good": 38})
    assert steps.counts == {"evictions": 2, "evictions_failed": 1}
    assert "could not decide what to keep of request bad" in caplog.text and "NaN" in caplog.text
    assert steps.kept["good"] == wanted(steps, "good")
    pages = steps.worker.rules.kept(41, BUDGET)
    for head in (head for layer in steps.kept["bad"] for head in layer):
        assert head == list(range(41 - pages * PAGE - 41 % PAGE, 41))
    for _ in range(2 * PAGE + 1):
        steps.step({"bad": 1, "good": 1})
    assert steps.counts["evictions_failed"] == 1
    forget(steps)

"""A worker's requests, without an engine: what heads read through their tables after any order of steps."""

import random
from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.gates import build_gates
from retain.policy import candidates_of, score_entries
from retain.shapes import LayerShape
from retain.vllm.packing.tables import Layout
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.packing.worker import Arrival, Worker, with_tokens
from retain.vllm.settings import Rules
from tests.evictions import small
from tests.naive import random_evidence
from tests.vllm.engine import places_of
from tests.vllm.memory import SERVED, Steps, make_store

PAGE = 4
LAYOUT = Layout(2, 60, 2, PAGE)
BUDGET = Budget(keep_ratio=0.4)
CHUNKS = ((50,), (7,) * 10, (36, 3, 1), (38, 1, 1, 1), (1,) * 45)


def make_steps(name: str) -> Steps:
    """An empty memory with a worker: 2 query heads a KV head, windows of 4 queries."""
    policy = small(name, "")
    layers = {
        f"layers.{idx}": replace(random_evidence((0,), num_tokens=0, seed=idx), layer_idx=idx)
        for idx in (0, 2)
    }
    gates = build_gates("linear", {idx: {"E": 5, "H": 2} for idx in (0, 2)}) if policy.learned else None
    rules = Rules(policy, PAGE, [LayerShape(2, 24)] * 2)
    return Steps(Worker(rules, layers, make_store(LAYOUT, 3), gates))


def arrival(steps: Steps, request_id: str, length: int, seed: int = 0) -> Arrival:
    return Arrival(request_id, length, steps.worker.rules.kept(length, BUDGET), BUDGET, seed)


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


def check(steps: Steps, request_id: str) -> None:
    """Each head reads its kept entries and then all later ones, and nothing else."""
    request = steps.requests[request_id]
    seen, kept = steps.kept[request_id] if request.evicted else (0, None)
    for place, heads in enumerate(steps.held(request_id)):
        for h, (keys, values) in enumerate(heads):
            before = kept[place][h] if kept is not None else []
            assert before == sorted(set(before))
            positions = before + list(range(seen, request.done))
            assert torch.equal(keys, request.keys_LHTD[place, h, positions])
            assert torch.equal(values, request.values_LHTD[place, h, positions])


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
    steps.add("a", length, arrival(steps, "a", length, seed=3), seed=length)
    for chunk in chunks:
        count = min(chunk, length - steps.requests["a"].done)
        if count:
            steps.step({"a": count})
    if steps.requests["a"].done < length:
        steps.step({"a": length - steps.requests["a"].done})
    assert steps.counts["evictions"] == 1 and steps.kept["a"] == (length, wanted(steps, "a"))
    for _ in range(2 * PAGE + 1):
        check(steps, "a")
        steps.step({"a": 1})
    freed = length // PAGE - steps.worker.rules.kept(length, BUDGET)
    assert steps.requests["a"].blocks.count(0) == freed > 0
    forget(steps)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_steps_preemptions_and_aborts(seed):
    """Evicted, being read and untouched requests in one step, in an order that changes."""
    draw, begun = random.Random(seed), 0
    steps = make_steps(draw.choice(["snapkv", "knorm", "learned"]))
    for _ in range(40):
        if len(steps.requests) < 3 and draw.random() < 0.6:
            begun += 1
            request_id, length = f"r{begun}", draw.randint(1, 45)
            given = arrival(steps, request_id, length, seed=draw.randint(0, 9))
            steps.add(request_id, length, given if draw.random() < 0.8 else None, seed=begun)
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
        for request_id, request in steps.requests.items():
            if request.done:
                check(steps, request_id)
    assert steps.counts["evictions"] > 0
    forget(steps)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "learned"])
def test_a_request_that_cannot_be_scored_keeps_its_last_entries_and_stops_no_other(name, caplog):
    steps = make_steps(name)
    for request_id, length in (("bad", 41), ("good", 38)):
        given = arrival(steps, request_id, length, seed=3)
        steps.add(request_id, length, given, seed=length)
    steps.requests["bad"].queries_LQTD.fill_(float("nan"))
    steps.step({"bad": 41, "good": 38})
    assert steps.counts["evictions"] == 2 and steps.counts["evictions_failed"] == 1
    assert "could not decide what to keep of request bad" in caplog.text and "NaN" in caplog.text
    assert steps.kept["good"] == (38, wanted(steps, "good"))
    pages = steps.worker.rules.kept(41, BUDGET)
    for head in (head for layer in steps.kept["bad"][1] for head in layer):
        assert head == list(range(41 - pages * PAGE - 41 % PAGE, 41))
    for _ in range(2 * PAGE + 1):
        check(steps, "bad")
        check(steps, "good")
        steps.step({"bad": 1, "good": 1})
    assert steps.counts["evictions_failed"] == 1
    forget(steps)

"""A worker's requests, without an engine: what heads read through their tables after any order of steps."""

import random
from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.evidence import Evidence
from retain.gates import build_gates
from retain.policy import load_policy
from retain.vllm.decide import Layer, Shown, decide
from retain.vllm.settings import Rules
from retain.vllm.tables import Layout
from retain.vllm.worker import Arrival, Worker
from tests.vllm.memory import Steps, make_store

PAGE = 4
LAYOUT = Layout(2, 60, 2, PAGE)
SMALL = ("protection.sinks=1", "protection.minimum=1", "protection.recent=2")
BUDGET = Budget(keep_ratio=0.3, page=PAGE)


def make_steps(name: str = "snapkv", layout: Layout = LAYOUT) -> Steps:
    """An empty memory with a worker: 2 query heads a KV head, windows of 5 queries."""
    overrides = [*SMALL, "observed_settings.window=5"] if name in ("snapkv", "adakv", "fused") else SMALL
    policy = load_policy(name, overrides)
    heads_L = (layout.num_heads,) * layout.num_layers
    layers = [
        Layer(2 * place, 2 * layout.num_heads, 0.5, output_weight_QDE=torch.randn(4, 3, 7), all_heads=2)
        for place in range(layout.num_layers)
    ]
    gates = None
    if policy.learned:
        gates = build_gates("linear", {layer.layer_idx: {"E": 5, "H": 2} for layer in layers})
    rules = Rules(policy, layout.page, heads_L, 24)
    names = [f"layers.{layer.layer_idx}" for layer in layers]
    return Steps(Worker(rules, layers, names, make_store(layout, 3), gates))


def arrival(steps: Steps, request_id: str, length: int, seed: int = 0, budget: Budget = BUDGET) -> Arrival:
    return Arrival(request_id, steps.worker.rules.cut(length, budget), budget, seed)


def wanted(steps: Steps, request_id: str) -> list:
    """Keep masks of a request's prompt, decided from all its tensors."""
    own, worker = steps.requests[request_id], steps.worker
    T, gates = own.arrival.cut.length, worker.gates

    def show(place: int) -> Shown:
        window = max(1, worker.rules.window)
        shown = Shown(
            own.keys_LHTD[place][None, :, :T],
            own.values_LHTD[place][None, :, :T],
            own.queries_LQTD[place][None, :, T - window : T],
        )
        if gates is None:
            return shown
        layer = Evidence(
            layer_idx=worker.layers[place].layer_idx,
            queries_BQSD=shown.queries_BQSD,
            keys_BHTD=shown.keys_BHTD,
            values_BHTD=shown.values_BHTD,
            output_weight_QDE=torch.zeros(4, 3, 5),
            scaling=0.5,
            positions_BT=torch.arange(T)[None],
            valid_BT=torch.ones(1, T, dtype=torch.bool),
            hidden_BTE=own.hidden_TE[None, :T],
        )
        return replace(shown, noted_BHT=gates.noted(layer))

    given = own.arrival
    return decide(
        worker.rules, worker.layers, show, length=T, budget=given.budget, seed=given.seed, gates=gates
    )


def check(steps: Steps, request_id: str) -> None:
    """Each head reads its kept entries and then all later ones, and nothing else."""
    own = steps.requests[request_id]
    evicted = own.arrival is not None and own.done >= own.arrival.cut.length
    masks = wanted(steps, request_id) if evicted else None
    for place, heads in enumerate(steps.held(request_id)):
        for h, (keys, values) in enumerate(heads):
            positions = list(range(own.done))
            if masks is not None:
                T = own.arrival.cut.length
                positions = masks[place][0, h].nonzero()[:, 0].tolist() + positions[T:]
            assert torch.equal(keys, own.keys_LHTD[place, h, positions])
            assert torch.equal(values, own.values_LHTD[place, h, positions])


def forget(steps: Steps) -> None:
    """All requests end: nothing of them is left, and all blocks are free."""
    for request_id in list(steps.requests):
        steps.finish(request_id)
    steps.worker.begin([], [], steps.finished)
    known = steps.worker.requests
    assert not known.rows and not known.arrivals and not steps.worker.windows and not steps.worker.positions
    assert not known.row_of_block.any()
    assert len(steps.pool) == len(set(steps.pool)) == steps.layout.num_blocks - 1


@pytest.mark.parametrize("name", ["snapkv", "adakv", "random", "fused"])
@pytest.mark.parametrize("length", [39, 40, 41])
@pytest.mark.parametrize("chunks", [[50], [7] * 10, [36, 3, 1], [38, 1, 1, 1], [1] * 45])
def test_heads_read_what_stays_of_a_prompt_and_then_its_answer(name, length, chunks):
    """Whatever its chunks are: windows of 5 queries begin in one and end in a later one."""
    steps = make_steps(name)
    steps.add("a", length, arrival(steps, "a", length, seed=3), seed=length)
    for chunk in chunks:
        count = min(chunk, length - steps.requests["a"].done)
        if count:
            steps.step({"a": count})
    if steps.requests["a"].done < length:
        steps.step({"a": length - steps.requests["a"].done})
    assert steps.worker.prompts == 1
    for _ in range(2 * PAGE + 1):
        check(steps, "a")
        steps.step({"a": 1})
    cut = steps.requests["a"].arrival.cut
    assert steps.requests["a"].blocks.count(0) == cut.full - cut.kept > 0
    assert steps.worker.entries_freed == (cut.full - cut.kept) * PAGE * 4
    forget(steps)


def test_a_prompt_whose_end_comes_with_its_answer_is_evicted_from_alone():
    """As after a preemption: the answer so far is computed with the prompt, and is no part of it."""
    steps = make_steps()
    steps.add("a", 41, arrival(steps, "a", 41), seed=1)
    steps.step({"a": 41})
    for _ in range(9):
        steps.step({"a": 1})
    check(steps, "a")
    before = steps.held("a")
    for chunks in ([50], [20, 30], [40, 10], [41, 9]):
        steps.preempt("a")
        for chunk in chunks:
            steps.step({"a": chunk})
        check(steps, "a")
        for one, again in zip(sum(before, []), sum(steps.held("a"), []), strict=True):
            assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    assert steps.worker.prompts == 5
    forget(steps)


def test_a_request_that_is_preempted_inside_its_prompt_begins_anew():
    steps = make_steps()
    steps.add("a", 41, arrival(steps, "a", 41), seed=1)
    steps.step({"a": 38})
    steps.preempt("a")
    steps.add("b", 30, None, seed=2)
    steps.step({"b": 30, "a": 25})
    steps.step({"a": 16, "b": 1})
    check(steps, "a")
    check(steps, "b")
    forget(steps)


def test_requests_of_one_step_are_told_apart():
    """Evicted, being read and untouched ones together, in an order that changes."""
    steps = make_steps()
    steps.add("evicted", 40, arrival(steps, "evicted", 40), seed=1)
    steps.add("other", 33, arrival(steps, "other", 33, budget=Budget(keep_ratio=0.6, page=PAGE)), seed=2)
    steps.add("whole", 25, None, seed=3)
    steps.add("reading", 45, arrival(steps, "reading", 45), seed=4)
    steps.step({"whole": 25, "evicted": 40})
    steps.step({"evicted": 1, "reading": 20, "other": 33, "whole": 1})
    for _ in range(3):
        steps.step({"other": 1, "whole": 1, "reading": 7, "evicted": 1})
        for request_id in steps.requests:
            check(steps, request_id)
    steps.step({"whole": 2, "reading": 4})
    for request_id in steps.requests:
        check(steps, request_id)
    forget(steps)


def test_blocks_go_from_one_request_to_the_next():
    """A block is written last by one request, then another, and no row is taken for the first's."""
    steps = make_steps()
    for turn in range(6):
        request_id, length = f"r{turn}", 37 + turn
        steps.add(request_id, length, arrival(steps, request_id, length) if turn % 3 else None, seed=turn)
        steps.step({request_id: length})
        steps.step({request_id: 1})
        check(steps, request_id)
        if turn:
            check(steps, f"r{turn - 1}")
            steps.finish(f"r{turn - 1}")
    forget(steps)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_steps_preemptions_and_aborts(seed):
    draw = random.Random(seed)
    steps = make_steps(draw.choice(["snapkv", "knorm", "fused"]))
    begun = 0
    for _ in range(40):
        if len(steps.requests) < 3 and draw.random() < 0.6:
            begun += 1
            request_id, length = f"r{begun}", draw.randint(1, 45)
            own = arrival(steps, request_id, length, seed=draw.randint(0, 9))
            evicts = own.cut.evicts and draw.random() < 0.8
            steps.add(request_id, length, own if evicts else None, seed=begun)
        if draw.random() < 0.1 and steps.requests:
            steps.finish(draw.choice(list(steps.requests)))
        if draw.random() < 0.1 and steps.requests:
            steps.preempt(draw.choice(list(steps.requests)))
        counts = {}
        for request_id in draw.sample(list(steps.requests), len(steps.requests)):
            own = steps.requests[request_id]
            T = own.arrival.cut.length if own.arrival is not None else 45
            ahead = max(1, T - own.done)
            if own.done + 12 < own.keys_LHTD.shape[2]:
                counts[request_id] = draw.randint(1, ahead if draw.random() < 0.7 else ahead + 9)
                counts[request_id] = min(counts[request_id], own.keys_LHTD.shape[2] - own.done)
        if counts:
            steps.step(counts)
        for request_id, own in steps.requests.items():
            if own.done:
                check(steps, request_id)
    assert steps.worker.prompts > 0
    forget(steps)


def test_an_unfinished_prompt_that_is_aborted_leaves_nothing():
    steps = make_steps()
    steps.add("a", 40, arrival(steps, "a", 40), seed=1)
    steps.step({"a": 37})
    assert set(steps.worker.windows) == {"a"}
    forget(steps)
    assert steps.worker.prompts == 0


def test_rows_are_used_again():
    steps = make_steps()
    for turn in range(9):
        steps.add(f"r{turn}", 20, arrival(steps, f"r{turn}", 20), seed=turn)
        steps.step({f"r{turn}": 20})
        if turn >= 2:
            steps.finish(f"r{turn - 2}")
    assert len(steps.worker.requests.full_S) == 4
    forget(steps)


def test_positions_that_stayed_are_remembered_on_request():
    steps = make_steps()
    own = arrival(steps, "a", 40)
    steps.add("a", 40, Arrival("a", own.cut, own.budget, own.seed, keep_positions=True), seed=1)
    steps.step({"a": 40})
    kept = torch.cat(wanted(steps, "a"))[:, :, :40].nonzero()[:, 2]
    assert torch.equal(steps.worker.positions["a"], kept)
    forget(steps)

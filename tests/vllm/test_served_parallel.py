"""Tensor parallelism over two processes: each rank evicts from its own heads.

Policies that give every head the same number keep what one process keeps. Where heads share a budget, those
of a rank share its part of it.
"""

import pytest

from retain.policy import load_policy
from tests.vllm.engine import PAGE, Run, seen_by_rank, watch_rank
from tests.vllm.test_served_policies import COUNT, NEW, POLICIES, PROMPTS, case_of, check_all, settings_of

PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def are_single(name: str) -> bool:
    """Whether what a head keeps depends on no other: TOVA's score is a mean over the heads of a layer, and
    where layers share, the heads of one divide its pages."""
    own = POLICIES[name]
    policy = load_policy(own["policy"])
    alone = policy.scope == "head" and policy.allocation.layers == "uniform" and policy.observed != "tova"
    return alone and not own.get("overrides")


# With more prompts than ordinarily, all policies.
SINGLE = ["snapkv", "random", "criticalkv", "linear-head", "decay-head"]
SHARED = ["adakv", "fused-mlp"]
if COUNT != 8:
    # Gates that look at all heads are refused (tests/vllm/test_settings.py).
    asked = [name for name in POLICIES if not name.startswith("qkv")]
    SINGLE = [name for name in asked if are_single(name)]
    SHARED = [name for name in asked if not are_single(name)]


def through_two_ranks(engines, reference, retain) -> tuple[Run, list]:
    """All prompts through an engine of two ranks, and what each rank kept."""
    llm = engines.get(reference, retain, **PARALLEL)
    assert llm.collective_rpc(watch_rank) == [True, True]
    run = Run(llm)
    for i, prompt in enumerate(PROMPTS):
        run.add(str(i), prompt, NEW)
    run.finish()
    return run, llm.collective_rpc(seen_by_rank)


@pytest.mark.parametrize("name", SINGLE)
def test_policies_of_single_heads_keep_what_one_process_keeps(oracle, engines, reference, new_gates, name):
    retain = settings_of(name, reference, new_gates)
    run, ranks = through_two_ranks(engines, reference, retain)
    assert set(ranks[0]) == set(ranks[1]) and ranks[0]
    for request_id, first in ranks[0].items():
        ((seen, here),), ((_, there),) = first.items(), ranks[1][request_id].items()
        run.kept[request_id] = {seen: [one + other for one, other in zip(here, there, strict=True)]}
    check_all(run, oracle, [case_of(reference, retain, prompt) for prompt in PROMPTS], f"{name} of 2 ranks")


@pytest.mark.parametrize("name", SHARED)
def test_heads_that_share_a_budget_share_that_of_their_rank(oracle, engines, reference, new_gates, name):
    retain = settings_of(name, reference, new_gates)
    run, ranks = through_two_ranks(engines, reference, retain)
    assert run.held == 0 and set(ranks[0]) == set(ranks[1]) and ranks[0]
    for request_id, first in ranks[0].items():
        ((seen, here),), ((_, there),) = first.items(), ranks[1][request_id].items()
        run.kept[request_id] = {seen: [one + other for one, other in zip(here, there, strict=True)]}
        kept = run.scheduler.connector.rules.kept(seen, run.scheduler.connector.settings.budget)
        for own in (here, there):
            assert sum(len(head) for layer in own for head in layer) == 4 * (kept * PAGE + seen % PAGE)
    cases = [case_of(reference, retain, prompt, ranks=2) for prompt in PROMPTS]
    check_all(run, oracle, cases, f"{name} of 2 ranks")

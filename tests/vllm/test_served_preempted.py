"""Requests that lose their blocks while they answer.

vLLM then computes the prompt and the answer so far anew, in one go: entries of the answer come from the full
prompt, and only then the prompt is evicted from. So does the oracle, at the same numbers of tokens.
"""

import pytest

from tests.vllm.engine import Run
from tests.vllm.prompts import write_prompts
from tests.vllm.test_served_policies import BLOCK, COUNT, POLICIES, case_of, check_all, settings_of

# Enough for some requests to outgrow a pool of 44 blocks; of 200, fewer tokens do.
NEW = 110 if COUNT == 8 else 64
# With more prompts than ordinarily, all policies.
NAMES = ["snapkv", "random", "adakv", "criticalkv", "linear-head", "decay-model", "qkv-head", "fused-mlp"]
NAMES = NAMES if COUNT == 8 else list(POLICIES)
PROMPTS = [
    prompt[-(270 + 17 * (i % 8)) :] for i, prompt in enumerate(write_prompts(COUNT, seed=3, shortest=500))
]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_computed_anew_from_the_full_prompt(oracle, engines, reference, new_gates, name):
    retain = settings_of(name, reference, new_gates)
    settings = {"kv_cache_memory_bytes": 44 * BLOCK, "max_model_len": 1024, "enable_prefix_caching": False}
    run = Run(engines.get(reference, retain, **settings))
    for i, prompt in enumerate(PROMPTS):
        run.add(str(i), prompt, NEW)
    run.finish()
    again = run.again
    cases = [
        case_of(reference, retain, prompt, NEW, again=[n for n in again.get(str(i), []) if n])
        for i, prompt in enumerate(PROMPTS)
    ]
    print(f"{name}: {sum(any(own) for own in again.values())} requests lost their blocks while they answered")
    assert sum(any(own) for own in again.values()) >= 2, "the pool is too large: nothing was preempted"
    check_all(run, oracle, cases, f"{name} preempted")
    assert run.held == 0

"""An engine whose own cache is in 8 bits: tokens and kept entries are those of `retain.Cache` over a model
whose keys and values are rounded alike. Its kernels are stood in for (`tests.vllm.float8`)."""

import pytest
import torch

from retain.budget.statement import Budget
from tests.vllm.engine import PAGE, Run
from tests.vllm.float8 import SCALES, kernels_of_float8
from tests.vllm.test_served_policies import MODES, PROMPTS, RATIO, case_of, check_all, settings_of

FEW = PROMPTS[:4]
NEW = 8
# Noise of 1e-7 moves a number beside a step of the codes by a whole step, an eighth of it or a quarter.
CLOSE = 5e-3


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    with kernels_of_float8():
        yield


@pytest.mark.parametrize(
    ("name", "mode", "kv_cache_dtype"),
    [
        ("snapkv", "oneshot", "fp8"),
        ("criticalkv", "odd", "fp8_e5m2"),
        ("fused-mlp", "chunked", "fp8"),
        ("linear-model", "oneshot", "fp8_e5m2"),
    ],
)
def test_tokens_and_entries_are_those_of_a_rounded_cache(
    oracle, engines, reference, new_gates, name, mode, kv_cache_dtype
):
    retain = settings_of(name, reference, new_gates)
    run = Run(engines.get(reference, retain, kv_cache_dtype=kv_cache_dtype, **MODES[mode]))
    pages = run.worker.memory.pages
    assert pages.pages.element_size() == 1 and pages.float8.scales_L2 == (SCALES,) * 4
    rounded = {"kv_cache_dtype": kv_cache_dtype, "scales": SCALES}
    for i, prompt in enumerate(FEW):
        run.add(str(i), prompt, NEW)
    run.finish()
    assert set(run.kept) == {"0", "1", "2"}
    cases = [case_of(reference, retain, prompt, NEW, rounded=rounded) for prompt in FEW]
    check_all(run, oracle, cases, f"{name} {mode} {kv_cache_dtype}", CLOSE)


def test_a_model_in_bfloat16_keeps_its_budget(engines, reference, new_gates):
    """No oracle: `retain.Cache` of the tests is in float32."""
    retain = settings_of("criticalkv", reference, new_gates)
    run = Run(engines.get(reference, retain, kv_cache_dtype="fp8", dtype="bfloat16"))
    assert run.worker.memory.pages.dtype == torch.bfloat16
    run.add("0", FEW[0], NEW)
    run.finish()
    (kept,) = run.kept["0"].values()
    blocks = run.worker.rules.kept(len(FEW[0]), Budget(keep_ratio=RATIO, page=PAGE))
    assert sum(len(head) // PAGE for layer in kept for head in layer) == 4 * 2 * blocks
    assert blocks < len(FEW[0]) // PAGE
    assert run.worker.counts["evictions_failed"] == 0 and len(run.answers["0"]) == NEW

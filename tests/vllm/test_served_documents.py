"""Prompts that begin with a document that was compressed for all of them: tokens, and what each head keeps of
the document, are those of `retain.Cache` that reads the document, is cut, and goes on with the rest.
"""

import pytest

from tests.vllm.engine import PAGE, Run
from tests.vllm.prompts import write_prompts
from tests.vllm.test_served_policies import COUNT, NEW, POLICIES, case_of, check_all, settings_of

# With more prompts than ordinarily, all policies.
NAMES = ["lava", "linear-model", "fused-mlp"] if COUNT == 8 else list(POLICIES)
DOCUMENTS = [
    prompt[:-20] for prompt in write_prompts(max(2, COUNT // 20), seed=11, shortest=700, longest=1100)
]
RESTS = [
    prompt[-(40 + 5 * (i % 40)) :] for i, prompt in enumerate(write_prompts(COUNT, seed=12, shortest=300))
]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_share_a_document(oracle, engines, reference, new_gates, name):
    retain = settings_of(name, reference, new_gates)
    run = Run(engines.get(reference, retain))
    held = {}
    for number, document in enumerate(DOCUMENTS):
        run.add(f"document {number}", document, 1, extra_args={"retain.document": True})
        run.finish()
        held[number] = run.kept.pop(f"document {number}")
    shared = run.held
    cases = []
    for i, rest in enumerate(RESTS):
        document = DOCUMENTS[i % len(DOCUMENTS)]
        prompt = document + rest
        run.add(str(i), prompt, NEW)
        # The document is its full pages; nothing else is evicted.
        whole = len(document) // PAGE * PAGE
        cases.append(case_of(reference, retain, prompt, document=whole))
    run.finish()
    assert not run.kept and run.held == shared, "requests evict nothing, and leave nothing"
    run.kept = {str(i): held[i % len(DOCUMENTS)] for i in range(len(RESTS))}
    run.free -= shared
    check_all(run, oracle, cases, f"{name} behind a document")
    assert run.scheduler.connector.reset_cache()

"""Every policy in every mode of an engine: greedy tokens and kept entries are those of `retain.Cache`.

Where the oracle's margin between its first two tokens is below `CLOSE`, either may come; such prompts are
counted, and printed with `-s`.
"""

import os
from typing import Any

import pytest

from tests.vllm.engine import PAGE, Run
from tests.vllm.oracle import Oracle
from tests.vllm.prompts import write_prompts

COUNT = int(os.environ.get("RETAIN_VLLM_PROMPTS", 8))
NEW = 24
CLOSE = 1e-4
RATIO = 0.25

# Policy -> overrides and gates.
POLICIES: dict[str, dict[str, Any]] = {
    **{
        name: {"policy": name}
        for name in (
            *("snapkv", "tova", "keydiff", "knorm", "lagkv", "criticalkv", "ada_criticalkv", "defensivekv"),
            *(
                "layer_defensivekv",
                "lava",
                "adakv",
                "recency",
                "pyramidkv",
                "random",
                "cake",
                "vatp",
                "quest_evict",
            ),
        )
    },
    **{
        f"{family}-head": {"policy": "gate", "gates": family}
        for family in ("linear", "mlp", "lowrank", "decay")
    },
    "qkv-head": {"policy": "gate", "gates": "qkv-after"},
    "linear-layer": {"policy": "gate", "gates": "linear", "overrides": ["scope=layer"]},
    "linear-model": {"policy": "gate", "gates": "linear", "overrides": ["scope=model"]},
    "mlp-model": {"policy": "gate", "gates": "mlp", "overrides": ["scope=model"]},
    "decay-model": {"policy": "gate", "gates": "decay", "overrides": ["scope=model"]},
    "qkv-layer": {"policy": "gate", "gates": "qkv-before", "overrides": ["scope=layer"]},
    "fused-linear": {"policy": "fused", "gates": "linear"},
    "fused-mlp": {"policy": "fused", "gates": "mlp"},
}

# A block of the reference model: keys and values of a page, 4 layers, 2 heads, 64 numbers, float32.
BLOCK = 2 * 4 * 2 * PAGE * 64 * 4
MODES: dict[str, dict[str, Any]] = {
    "oneshot": {},
    "chunked": {"max_num_batched_tokens": 128},
    "odd": {"max_num_batched_tokens": 97},
    "async": {"async_scheduling": True},
    "waiting": {"kv_cache_memory_bytes": 52 * BLOCK, "max_model_len": 50 * PAGE},
}


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of the reference tasks; of a few, the last tokens: whole pages, one more or less, few."""
    prompts = write_prompts(count)
    for place, length in enumerate((16 * PAGE, 9 * PAGE + 1, 8 * PAGE - 1 + 3 * PAGE, PAGE - 3)):
        longest = max(prompts[place % 4 :: 4], key=len)
        prompts[place] = longest[-length:]
    return prompts


PROMPTS = make_prompts(COUNT)


def settings_of(name: str, reference: str, new_gates) -> dict[str, Any]:
    """Settings of the plug-in for a policy."""
    own = dict(POLICIES[name], keep_ratio=RATIO)
    if "gates" in own:
        family, _, rope = own["gates"].partition("-")
        own["gates"] = new_gates(reference, family, **({"rope": rope, "F": 32} if rope else {}))
    return own


def case_of(
    model: str, retain: dict[str, Any] | None, prompt: list[int], new: int = NEW, **more
) -> dict[str, Any]:
    """The oracle's case of a request."""
    return {"model": model, "cache": retain, "prompt": prompt, "new": new, **more}


def differing(run: Run, request_id: str, wanted: dict[str, Any], what: str) -> list[list[int]]:
    """Layer, head and place of entries that one side keeps and the other does not."""
    kept = run.kept.get(request_id, {})
    if not kept:
        lengths = {len(head) for layer in wanted["kept"] for head in layer}
        assert lengths == {wanted["length"]}, f"{what}: the oracle evicts, and the engine does not"
        return []
    (places,) = kept.values()
    assert [len(layer) for layer in places] == [len(layer) for layer in wanted["kept"]]
    return [
        [layer, head, place]
        for layer, (ours, theirs) in enumerate(zip(places, wanted["kept"], strict=True))
        for head, (own, other) in enumerate(zip(ours, theirs, strict=True))
        for place in sorted(set(own) ^ set(other))
    ]


def check(run: Run, request_id: str, wanted: dict[str, Any], what: str, close: float = CLOSE) -> str | None:
    """The tokens of an answer, and its kept entries; says where it left the oracle's at a margin below
    `close`."""
    assert not (differ := differing(run, request_id, wanted, what)), f"{what}: other entries: {differ}"
    got = run.answers[request_id]
    pairs = enumerate(zip(got, wanted["tokens"], strict=True))
    first = next((place for place, (own, theirs) in pairs if own != theirs), None)
    if first is None:
        return None
    margin = wanted["margins"][first]
    assert margin < close, f"{what}: token {first} is {got[first]}, not {wanted['tokens'][first]} ({margin})"
    return f"{what}: another token at {first}, margin {margin:.1e}"


def check_entries(oracle: Oracle, case: dict[str, Any], differ: list[list[int]], what: str) -> str:
    """Entries that differ are kept or not by noise in what the oracle ranks them by."""
    found = oracle.ask_one({**case, "new": 0, "entries": differ})
    assert all(found["fragile"]), f"{what}: other entries: {differ}, fragile {found['fragile']}"
    return f"{what}: other entries {differ}, which noise of 1e-5 moves too"


def check_all(run: Run, oracle: Oracle, cases: list[dict[str, Any]], what: str, close: float = CLOSE) -> None:
    """Requests `0`, `1`, ... are answered as the oracle answers the cases; close ones are counted."""
    lines = []
    for i, (case, wanted) in enumerate(zip(cases, oracle.ask(cases), strict=True)):
        name = f"{what}, prompt {i}"
        differ = differing(run, str(i), wanted, name)
        if differ:
            lines.append(check_entries(oracle, case, differ, name))
        elif line := check(run, str(i), wanted, name, close):
            lines.append(line)
    print("\n".join(lines), end="\n" * bool(lines))
    number = f"{len(lines)} with a margin below {close}"
    print(f"{what}: {len(cases)} prompts, {len(run.kept)} evicted from, {number}")
    assert run.held == 0


# Ordinarily each policy is asked in one shot and in one of the other modes; with more prompts, in all.
CASES = [(name, mode) for name in POLICIES for mode in MODES]
if COUNT == 8:
    OTHERS = [mode for mode in MODES if mode != "oneshot"]
    CASES = [(name, mode) for i, name in enumerate(POLICIES) for mode in ("oneshot", OTHERS[i % len(OTHERS)])]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_and_entries_are_those_of_the_cache(oracle, engines, reference, new_gates, name, mode):
    retain = settings_of(name, reference, new_gates)
    cases = [case_of(reference, retain, prompt) for prompt in PROMPTS]
    run = Run(engines.get(reference, retain, **MODES[mode]))
    for i, prompt in enumerate(PROMPTS):
        run.add(str(i), prompt, NEW)
    run.finish()
    check_all(run, oracle, cases, f"{name} {mode}")
    # Nothing goes of the shortest, and something of those that are longer than what is protected.
    assert "3" not in run.kept and {"0", "1", "2"} <= set(run.kept)
    if mode == "waiting":
        assert run.most_running < len(PROMPTS)

"""The table of what goes with what: what it refuses is refused before any forward, and all else runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import retain
from retain.capability import problems
from retain.gates import GATES
from retain.hf.cache.cache import Cache
from retain.hf.intercept.press import press_score
from retain.hf.version_names import CACHE
from retain.presets import load_policy, policies
from retain.protection import Protection
from retain.scores import SCORES
from tests.evictions import policy_of
from tests.hf.test_press import NormPress
from tests.tiny import attached, tiny_batch

FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)
BITS = {"bits": 4, "recent": 4}
MERGE = load_policy("merge").correction
# Gates whose number for an entry depends on others.
AROUND = ("gates context", "gates lookahead", "gates dms next")
METHODS = (
    *(f"score {name}" for name in SCORES),
    *(f"gates {family}" for family in GATES),
    *("gates dms next", "scorer", "merge", "bits", "merge bits", "bits bytes"),
)
REFUSED = {
    "again": (*AROUND, "scorer", "bits", "merge bits", "bits bytes"),
    "chunks": (*AROUND, "scorer", "merge bits"),
    "padding": (),
}


def asked(model: torch.nn.Module, method: str) -> dict[str, Any]:
    """Arguments of `Cache` for this method."""
    kind, _, name = method.partition(" ")
    budget = {"byte_ratio": 0.15} if method == "bits bytes" else {"keep_ratio": 0.4}
    if kind == "score":
        return {"policy": policy_of("one", name, protection=FEW), **budget}
    if kind == "gates":
        family, _, following = name.partition(" ")
        gates = retain.new_gates(model, family, **({"decides": "next"} if following else {}))
        return {"policy": policy_of("one", learned=True, protection=FEW), "gates": gates, **budget}
    how = {"policy": policy_of("one", "knorm", protection=FEW), **budget}
    if kind == "scorer":
        how["observed"] = press_score(model, NormPress())
    if "merge" in method:
        how["correction"] = MERGE
    if "bits" in method:
        how["precision"] = BITS
    return how


def read(method: str, use: str, cache_of: Callable[..., Cache] = Cache) -> tuple[Cache, Any]:
    """A cache that has read a prompt of 60 tokens in this use, and what it was given."""
    model = attached("llama")
    ids, mask = tiny_batch((0, 9) if use == "padding" else (0,), 60)
    how = {**asked(model, method), "when": "prefill+decode" if use == "again" else "prefill", "every": 2}
    cache = cache_of(model, **how, seeds=[0] * len(ids))
    cache.prefill(ids, mask, chunk_size=16 if use == "chunks" else None)
    return cache, (ids, mask)


@pytest.mark.parametrize("use", REFUSED)
def test_what_the_table_says_is_refused_before_anything_is_read(use: str) -> None:
    for method in REFUSED[use]:
        made: list[Cache] = []

        def recorded(*given: Any, made: list[Cache] = made, **how: Any) -> Cache:
            made.append(Cache(*given, **how))
            return made[-1]

        with pytest.raises(ValueError, match="^policy 'one' cannot: .* and .*: .*(take|state|read)"):
            read(method, use, recorded)
        assert all(cache.num_seen == 0 for cache in made), (method, use)


@pytest.mark.parametrize("method", METHODS)
def test_all_else_runs(method: str) -> None:
    for use in REFUSED:
        if method in REFUSED[use]:
            continue
        cache, (ids, mask) = read(method, use)
        before = cache.evictions
        assert before == 1 and 0 < cache.entries_held < cache.report().total.entries_seen, use
        whole = torch.cat([ids, ids[:, :1]], 1), torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        given = {"input_ids": whole[0], "attention_mask": whole[1], CACHE: cache}
        cache.model.generate(**given, max_new_tokens=4, min_new_tokens=4)
        assert (cache.evictions > before) == (use == "again")


def test_presets_that_turn_queries_back() -> None:
    refused = {each.name for each in policies() if problems(each, ("unknown_rope",))}
    assert refused == {"expected_attention", "triattention"}


def test_presets_that_vllm_can_serve() -> None:
    refused = {each.name for each in policies() if problems(load_policy(each.name), ("vllm",))}
    assert refused == {
        *("expected_attention", "h2o", "keyformer", "kivi", "lazy_eviction", "lru", "merge", "triattention"),
    }


def test_gates_that_vllm_can_ask() -> None:
    model, policy = attached("llama"), policy_of("one", learned=True)
    refused = {use: set() for use in ("vllm", "unknown_rope")}
    for family in GATES:
        gates = retain.new_gates(model, family)
        for use, families in refused.items():
            if problems(policy, {use}, gates=gates):
                families.add(family)
    assert refused["unknown_rope"] == {"qkv", "admission"}
    assert refused["vllm"] == {"context", "lookahead", "dms", "qkv", "admission"}

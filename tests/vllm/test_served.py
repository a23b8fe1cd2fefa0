"""Engines of vLLM with the plug-in: greedy tokens and kept entries are those of `retain.Cache` (`oracle.py`).

Where the oracle's margin between its first two tokens is below `CLOSE`, either may come.
"""

import random
from typing import Any

import pytest
import torch

from retain.policy import load_policy
from retain.reference.documents import Writer
from retain.reference.items import write_item
from tests.refused import refused
from tests.vllm.engine import PAGE, Run
from tests.vllm.memory import SERVED
from tests.vllm.oracle import Oracle

NEW = 24
CLOSE = 1e-4
# A block of the reference model: keys and values of a page, 4 layers, 2 heads, 64 numbers, float32.
BLOCK = 2 * 4 * 2 * PAGE * 64 * 4
SNAPKV = {"policy": "snapkv", "keep_ratio": 0.25}
FULL = {"extra_args": {"retain.keep_ratio": 1.0}}

# Name -> settings of the plug-in, `gates` by family.
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in SERVED if not load_policy(name).learned},
    **{name: {"policy": "gate", "gates": name} for name in ("linear", "mlp", "lowrank", "decay")},
    "linear-layer": {"policy": "gate", "gates": "linear", "overrides": ["scope=layer"]},
    "decay-model": {"policy": "gate", "gates": "decay", "overrides": ["scope=model"]},
    "learned-linear": {"policy": "learned", "gates": "linear"},
    "learned-mlp": {"policy": "learned", "gates": "mlp"},
}
MODES: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 128},
    "odd": {"max_num_batched_tokens": 97},
    "waiting": {"kv_cache_memory_bytes": 52 * BLOCK, "max_model_len": 50 * PAGE},
}
# Each policy in one shot and in one of the other modes.
CASES = [(name, mode) for i, name in enumerate(POLICIES) for mode in ("oneshot", [*MODES][i % len(MODES)])]


def write_prompts(seed: int, shortest: int = 100) -> list[list[int]]:
    """Eight contexts of the reference model's tasks, of random length, each with its question."""
    draw, tasks = random.Random(seed), ("single", "multikey", "lists", "tracing")
    items = [
        write_item(Writer("eval", 1000 * seed + place), tasks[place % 4], draw.randint(shortest, 1500))
        for place in range(8)
    ]
    return [[*map(int, context), *map(int, question.ids)] for context, question in items]


PROMPTS = write_prompts(0)
# Whole pages, one token more or less, and less than a page.
LONGEST = max(PROMPTS, key=len)
for place, length in enumerate((16 * PAGE, 9 * PAGE + 1, 11 * PAGE - 1, PAGE - 3)):
    PROMPTS[place] = LONGEST[-length:]


def settings_of(name: str, model: str, new_gates) -> dict[str, Any]:
    """Settings of the plug-in for a policy."""
    settings = dict(POLICIES[name], keep_ratio=0.25)
    if "gates" in settings:
        settings["gates"] = new_gates(model, settings["gates"])
    return settings


def case_of(model: str, retain: dict | None, prompt: list[int], new: int = NEW) -> dict:
    """The oracle's case of a request."""
    return {"model": model, "cache": retain, "prompt": prompt, "new": new}


def differing(run: Run, request_id: str, wanted: dict[str, Any], what: str) -> list[list[int]]:
    """Layer, head and place of entries that one side keeps and the other does not."""
    places = run.kept.get(request_id)
    if places is None:
        lengths = {len(head) for layer in wanted["kept"] for head in layer}
        assert lengths == {wanted["length"]}, f"{what}: the oracle evicts, and the engine does not"
        return []
    assert [len(layer) for layer in places] == [len(layer) for layer in wanted["kept"]]
    return [
        [layer, head, place]
        for layer, (ours, theirs) in enumerate(zip(places, wanted["kept"], strict=True))
        for head, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for place in sorted(set(one) ^ set(other))
    ]


def check(run: Run, oracle: Oracle, request_id: str, case: dict[str, Any], what: str) -> None:
    """A request keeps the oracle's entries, but for those that noise moves, and then gives its tokens, up to
    the first at a margin below `CLOSE`."""
    wanted, what = oracle.ask(case), f"{what}, request {request_id}"
    if differ := differing(run, request_id, wanted, what):
        fragile = oracle.ask({**case, "new": 0, "entries": differ})["fragile"]
        assert all(fragile), f"{what}: other entries: {differ}, fragile {fragile}"
        return
    got, tokens = run.answers[request_id], wanted["tokens"]
    first = next((i for i, pair in enumerate(zip(got, tokens, strict=True)) if pair[0] != pair[1]), None)
    margin = 0.0 if first is None else wanted["margins"][first]
    assert margin < CLOSE, f"{what}: token {first} is {got[first]}, not {tokens[first]} ({margin})"


def check_all(run: Run, oracle: Oracle, cases: list[dict[str, Any]], what: str) -> None:
    """Requests `0`, `1`, ... are answered as the oracle answers the cases."""
    for i, case in enumerate(cases):
        check(run, oracle, str(i), case, what)
    assert run.held == 0


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_and_entries_are_those_of_the_cache(oracle, engines, reference, new_gates, name, mode):
    retain = settings_of(name, reference, new_gates)
    run = Run(engines.get(reference, retain, **MODES.get(mode, {})))
    run.answer(PROMPTS, NEW)
    check_all(run, oracle, [case_of(reference, retain, prompt) for prompt in PROMPTS], f"{name} {mode}")
    # Nothing goes of the shortest, and something of those that are longer than what is protected.
    assert "3" not in run.kept and {"0", "1", "2"} <= set(run.kept)
    assert mode != "waiting" or run.most_running < len(PROMPTS)


@pytest.mark.parametrize("name", ["snapkv", "random", "decay-model", "learned-mlp"])
def test_a_preempted_request_is_evicted_from_again(oracle, engines, reference, new_gates, name):
    """vLLM computes the prompt and the answer so far anew, in one go."""
    retain = settings_of(name, reference, new_gates)
    settings = {"kv_cache_memory_bytes": 44 * BLOCK, "max_model_len": 1024, "enable_prefix_caching": False}
    run = Run(engines.get(reference, retain, **settings))
    prompts = [prompt[-(270 + 17 * i) :] for i, prompt in enumerate(write_prompts(3, shortest=500))]
    run.answer(prompts, 110)
    assert len(run.preempted) >= 2, "the pool is too large: nothing was preempted"
    for i, prompt in enumerate(prompts):
        assert len(run.answers[str(i)]) == 110
        wanted = oracle.ask(case := case_of(reference, retain, prompt, 0))
        differ = differing(run, str(i), wanted, name)
        assert not differ or all(oracle.ask({**case, "entries": differ})["fragile"])
    run.check_empty()


@pytest.fixture
def run(engines, reference) -> Run:
    """An engine that evicts, whose prefix cache is empty."""
    run = Run(engines.get(reference, SNAPKV, enable_prefix_caching=True, max_num_batched_tokens=1024))
    assert run.engine.reset_prefix_cache()
    return run


def test_a_keep_ratio_of_one_is_the_plain_engine(engines, reference):
    plain = Run(engines.get(reference, None))
    assert plain.scheduler.connector is None
    plain.answer(PROMPTS, NEW)
    run = Run(engines.get(reference, SNAPKV))
    run.answer(PROMPTS, NEW, **FULL)
    assert run.answers == plain.answers and not run.kept
    assert (run.steps, run.most_held) == (plain.steps, plain.most_held)
    run.check_empty()


def test_untouched_requests_share_prefixes_and_evicted_ones_never(run, oracle, reference):
    """The same prompts three times, both ways in turn: no evicted block is ever read as a prefix."""
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            run.add(f"{turn}.{i}", prompt, NEW, **(FULL if (turn + i) % 2 else {}))
            if i == 3:
                run.step()
                run.step()
        run.finish()
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            untouched, name = (turn + i) % 2, f"{turn}.{i}"
            check(run, oracle, name, case_of(reference, None if untouched else SNAPKV, prompt), "shared")
            if i == 3:  # less than a page: shared like any other
                continue
            # Of the untouched ones, those of even number come in the second turn only.
            again = untouched and turn == 2
            assert (run.outputs[name].num_cached_tokens or 0) == again * ((len(prompt) - 1) // PAGE * PAGE)
    run.check_empty()


def test_each_request_has_its_budget(run, oracle, reference):
    options = [{"keep_ratio": ratio} for ratio in (0.15, 0.3, 0.5, 0.9, 1.0)]
    options += [{"tokens_per_head": number} for number in (64, 128, 1000)]
    cases = []
    for i, option in enumerate(options):
        prompt = LONGEST[-700 - 9 * i :]
        run.add(str(i), prompt, NEW, extra_args={f"retain.{name}": value for name, value in option.items()})
        cases.append(case_of(reference, {"policy": "snapkv", **option}, prompt))
    run.finish()
    check_all(run, oracle, cases, "budgets")
    run.check_empty()


def test_nothing_is_left_of_thousands_of_requests(engines, reference):
    """Some untouched, some aborted; so little is protected that prompts of two pages are evicted from."""
    overrides = [f"protection.{name}=0" for name in ("minimum", "prefix_fraction", "suffix_fraction")]
    overrides += ["protection.sinks=1", "protection.recent=4", "observed_settings.window=4"]
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 160 * BLOCK, "max_num_batched_tokens": 128}
    retain = {"policy": "snapkv", "keep_ratio": 0.3, "overrides": overrides}
    run, draw, sent = Run(engines.get(reference, retain, **settings)), random.Random(0), 0
    while sent < 3000 or run.engine.has_unfinished_requests():
        while sent < 3000 and len(run.scheduler.requests) < 40:
            prompt = [draw.randint(5, 3000) for _ in range(draw.randint(1, 160))]
            run.add(f"r{sent}", prompt, draw.randint(2, 6), **(FULL if draw.random() < 0.2 else {}))
            sent += 1
        if draw.random() < 0.2:
            run.engine.abort_request([draw.choice(list(run.scheduler.requests)).rpartition("-")[0]])
        run.step()
    assert len(run.kept) > 750
    run.check_empty()


# GQA of 1, 4 and 8; a bias of q, k and v; a sliding window in some layers.
SHAPES = {
    "llama-1": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}),
    "llama-4": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}),
    "llama-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "qwen2": ("qwen2", {"hidden_size": 128}),
    "mistral": ("mistral", {"head_dim": 64}),
    "gemma3": ("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
}


@pytest.fixture(scope="module")
def models(oracle, tmp_path_factory) -> dict[str, str]:
    """Folders of tiny models."""
    made = {}
    for name, (family, shape) in SHAPES.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        given = {"hidden_size": 96, "tie_word_embeddings": True, **shape}
        oracle.ask({"make": "tiny", "family": family, "settings": given, "folder": made[name]})
    return made


@pytest.mark.parametrize("impl", ["vllm", "transformers"])
@pytest.mark.parametrize("policy", ["snapkv", "learned-mlp", "criticalkv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_other_shapes(oracle, engines, models, new_gates, shape, policy, impl):
    model = models[shape]
    retain = settings_of(policy, model, new_gates) | {"keep_ratio": 0.3}
    settings = {"model_impl": impl, "skip_tokenizer_init": True, "max_num_batched_tokens": 200}
    run = Run(engines.get(model, retain, **settings))
    # Random tokens: what repeats itself gives equal scores.
    draw = torch.Generator().manual_seed(0)
    lengths = (20, 260, 288, 333, 401, 512)
    prompts = [torch.randint(2, 97, (length,), generator=draw).tolist() for length in lengths]
    run.answer(prompts, 12, detokenize=False)
    assert len(run.kept) >= 4
    check_all(run, oracle, [case_of(model, retain, prompt, 12) for prompt in prompts], f"{shape} {impl}")


@pytest.mark.parametrize(
    ("retain", "settings", "says"),
    [
        ({"policy": "h2o", "keep_ratio": 0.2}, {}, "take 'snapkv'"),
        (SNAPKV, {"kv_cache_dtype": "fp8"}, "quantises its cache .kv_cache_dtype 'fp8'.: take 'auto'"),
        (SNAPKV, {"pipeline_parallel_size": 2}, "tensor, pipeline and context"),
        (
            SNAPKV,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative decoding was not tested",
        ),
        ({"policy": "gate", "gates": "llama-4 linear"}, {}, "another model .*model_type 'llama' -> 'qwen3'"),
        (
            {"policy": "gate", "gates": "reference dms"},
            {},
            "'dms' and vLLM's engine: the engine shows hidden",
        ),
    ],
    ids=["cannot", "fp8", "pipeline", "speculative", "other gates", "stream"],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    engines, reference, models, new_gates, retain, settings, says
):
    if "gates" in retain:
        name, family = retain["gates"].split()
        gates = new_gates({**models, "reference": reference}[name], family)
        retain = {**retain, "gates": gates, "keep_ratio": 0.2}
    refused(f"(?s){says}", engines.get, reference, retain, **settings)
    engines.stop()

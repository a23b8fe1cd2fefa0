"""Requests of every kind in one engine: options, prefix caching, several answers, stops, logprobs, aborts."""

import pytest

from tests.vllm.engine import PAGE, Run
from tests.vllm.test_served_policies import BLOCK, NEW, PROMPTS, case_of, check, check_all

SNAPKV = {"policy": "snapkv", "keep_ratio": 0.25}
OFF = {"extra_args": {"retain.off": True}}


@pytest.fixture
def run(engines, reference) -> Run:
    """An engine that evicts, whose prefix cache is empty."""
    run = Run(engines.get(reference, SNAPKV, enable_prefix_caching=True, max_num_batched_tokens=1024))
    assert run.engine.reset_prefix_cache()
    return run


@pytest.fixture(scope="module")
def evicted(oracle, reference) -> list:
    return oracle.ask([case_of(reference, SNAPKV, prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def whole(oracle, reference) -> list:
    return oracle.ask([case_of(reference, None, prompt) for prompt in PROMPTS])


def nothing_is_left(run: Run) -> None:
    """The workers hear of the last requests in a later step."""
    run.add("last", [5, 6, 7], 1)
    run.finish()
    assert not any(run.leftovers().values()), run.leftovers()


@pytest.mark.parametrize("how", ["setting", "option"])
def test_a_keep_ratio_of_one_is_the_plain_engine(engines, reference, how):
    plain = Run(engines.get(reference, None))
    for i, prompt in enumerate(PROMPTS):
        plain.add(str(i), prompt, NEW)
    plain.finish()
    run = Run(engines.get(reference, {**SNAPKV, "keep_ratio": 1.0 if how == "setting" else 0.25}))
    option = {} if how == "setting" else {"extra_args": {"retain.keep_ratio": 1.0}}
    for i, prompt in enumerate(PROMPTS):
        run.add(str(i), prompt, NEW, **option)
    run.finish()
    assert run.answers == plain.answers and not run.kept
    assert (run.steps, run.most_held) == (plain.steps, plain.most_held)
    nothing_is_left(run)


def test_untouched_requests_share_prefixes_and_evicted_ones_never(run, evicted, whole):
    """The same prompts three times, both ways in turn: no evicted block is ever read as a prefix."""
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            run.add(f"{turn}.{i}", prompt, NEW, **(OFF if (turn + i) % 2 else {}))
            if i == 3:
                run.step()
                run.step()
        run.finish()
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            untouched, name = (turn + i) % 2, f"{turn}.{i}"
            assert not check(run, name, (whole if untouched else evicted)[i], name)
            if evicted[i]["kept"] == whole[i]["kept"]:  # too short: shared like any other
                continue
            # Of the untouched ones, those of even number come in the second turn only.
            again = untouched and turn == 2
            assert (run.outputs[name].num_cached_tokens or 0) == again * ((len(prompt) - 1) // PAGE * PAGE)
    nothing_is_left(run)


def test_each_request_has_a_budget_of_its_own(run, oracle, reference):
    options = [
        *({"keep_ratio": ratio} for ratio in (0.15, 0.3, 0.5, 0.9, 1.0)),
        *({"tokens_per_head": number} for number in (64, 128, 1000)),
    ]
    prompts = [max(PROMPTS, key=len)[-700 - 9 * i :] for i in range(len(options))]
    cases = [
        case_of(reference, {"policy": "snapkv", **own}, prompt)
        for own, prompt in zip(options, prompts, strict=True)
    ]
    for i, (own, prompt) in enumerate(zip(options, prompts, strict=True)):
        run.add(str(i), prompt, NEW, extra_args={f"retain.{name}": value for name, value in own.items()})
    run.finish()
    check_all(run, oracle, cases, "budgets")
    nothing_is_left(run)


def test_lengths_about_a_page(run, oracle, reference):
    longest = max(PROMPTS, key=len)
    lengths = [
        1,
        2,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        *(8 * PAGE + i for i in (-1, 0, 1)),
        *(9 * PAGE + i for i in (-1, 0, 1)),
    ]
    prompts = [longest[-length:] for length in lengths]
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt, PAGE + 2)
    run.finish()
    check_all(run, oracle, [case_of(reference, SNAPKV, own, PAGE + 2) for own in prompts], "lengths")
    nothing_is_left(run)


def test_all_of_several_answers_evict_and_are_those_of_single_requests(engines, reference):
    """vLLM asks the i-th of n answers under the request's seed + i.

    Not in chunks: there, its runner on a CPU fails on every request with a seed (`set_offset`).
    """
    from vllm.sampling_params import RequestOutputKind

    run = Run(engines.get(reference, SNAPKV, enable_chunked_prefill=False))
    prompts = [PROMPTS[i] for i in (0, 1, 4)]
    for i, prompt in enumerate(prompts):
        final = {"output_kind": RequestOutputKind.FINAL_ONLY}
        run.add(f"n{i}", prompt, NEW, n=3, temperature=0.8, seed=100 + 10 * i, **final)
        for child in range(3):
            run.add(f"s{i}.{child}", prompt, NEW, temperature=0.8, seed=100 + 10 * i + child)
    run.finish()
    for i in range(len(prompts)):
        several = [list(one.token_ids) for one in sorted(run.outputs[f"n{i}"].outputs, key=lambda o: o.index)]
        assert several == [run.answers[f"s{i}.{child}"] for child in range(3)]
        kept = [run.kept[f"{child}_n{i}"] for child in range(3)]
        assert kept[0] and all(one == kept[0] for one in kept)
    nothing_is_left(run)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborts_in_every_phase(engines, reference, evicted, asynchronous):
    """Waiting, inside a prompt, in the step after which a prompt is evicted from, and while decoding."""
    settings = {"max_num_batched_tokens": 128, "kv_cache_memory_bytes": 70 * BLOCK}
    run = Run(engines.get(reference, SNAPKV, async_scheduling=asynchronous, **settings))
    ends = -(-len(PROMPTS[0]) // 128)
    for steps in (0, 1, ends - 1, ends, ends + 1, ends + 2, ends + 5):
        for i, prompt in enumerate(PROMPTS):
            run.add(f"{steps}.{i}", prompt, NEW)
        for _ in range(steps):
            run.step()
        run.abort(*(f"{steps}.{i}" for i in (0, 2, 4, 6)))
        run.finish()
        assert run.held == 0
        for i in (1, 3, 5, 7):
            assert not check(run, f"{steps}.{i}", evicted[i], f"{steps} {i}")
        assert f"{steps}.6" not in run.answers
    nothing_is_left(run)

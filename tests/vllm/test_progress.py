"""Evictions of a request, step by step, against a plain list of what each block of its table holds."""

import random

import pytest

from retain.vllm.packing.progress import Packed, Progress


def kept_of(ratio: float, page: int):
    return lambda seen: -(-int(ratio * seen) // page)


@pytest.mark.parametrize("every", [None, 5, 16])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_places_and_freed_blocks_are_those_of_a_plain_table(
    every: int | None, chunked: bool, ratio: float
) -> None:
    rng = random.Random(0)
    for _ in range(50):
        page, length = 4, rng.randint(1, 60)
        progress = Progress(length, page, kept_of(ratio, page), every=every, chunked=chunked)
        held: list[int] = []  # places of blocks that hold full pages, in order
        start, moment, full_before = 0, None, 0
        while start < length + 40:
            stop = min(start + rng.randint(1, 20), length) if start < length else start + 1
            eviction = progress.step(start, stop)
            due = chunked if stop < length else moment is None or bool(every and stop - moment >= every)
            seen = stop
            if stop >= length and (moment is None or (every and stop - moment >= every)):
                moment = stop
            full = seen // page
            places = [*held, *range(full_before, full)]
            kept = min(kept_of(ratio, page)(seen), len(places))
            if due and kept < len(places):
                assert eviction is not None
                assert eviction.seen == seen and eviction.after == Packed(tuple(places[:kept]), full)
                assert eviction.freed == tuple(places[kept:]) and not {*eviction.freed} & {*places[:kept]}
                held, full_before = places[:kept], full
            else:
                assert eviction is None
            assert progress.packed == Packed(tuple(held), full_before)
            start = stop


def test_a_preempted_request_begins_anew() -> None:
    progress = Progress(40, 4, kept_of(0.5, 4))
    first = progress.step(0, 40)
    assert first is not None and first.seen == 40 and progress.evictions == [first]
    progress.settled = 1
    # The prompt and nine tokens of its answer are computed again at once: it is evicted from as before.
    again = progress.step(0, 49)
    assert again == first and progress.evictions == [again] and progress.settled == 0
    assert progress.step(49, 50) is None


def test_with_every_a_recomputed_answer_is_evicted_from_with_its_prompt() -> None:
    progress = Progress(40, 4, kept_of(0.5, 4), every=8)
    eviction = progress.step(0, 49)
    assert eviction is not None and eviction.seen == 49
    assert progress.step(49, 56) is None  # seven tokens later
    assert progress.step(56, 57) is not None


@pytest.mark.parametrize(
    ("start", "stop", "settings", "wanted"),
    [
        (0, 30, {}, 32),  # of a prompt of 40, the last 8
        (0, 40, {}, 32),
        (36, 40, {}, 36),
        (0, 30, {"chunked": True}, 22),
        (0, 49, {"every": 8}, 41),
    ],
)
def test_first_query_that_an_eviction_may_observe(start, stop, settings, wanted) -> None:
    progress = Progress(40, 4, kept_of(0.5, 4), **settings)
    assert progress.observed(start, stop, window=8) == wanted


def test_no_query_is_observed_once_the_prompt_is_over() -> None:
    progress = Progress(40, 4, kept_of(0.5, 4))
    progress.step(0, 40)
    assert progress.observed(40, 41, window=8) == 41
    assert progress.observed(0, 43, window=8) == 32  # again, after a preemption

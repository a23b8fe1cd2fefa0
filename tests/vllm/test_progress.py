"""The eviction of a request, step by step, and the blocks that it frees."""

import random

from retain.budget.statement import Budget
from retain.vllm.packing.progress import Arrival, Progress


def progress_of(length: int) -> Progress:
    """Of a request of pages of four, half of which stay."""
    return Progress(Arrival("a", length, length // 8, Budget(keep_ratio=0.5), 0), length // 4)


def test_a_prompt_is_evicted_from_once_in_the_step_of_its_last_token() -> None:
    rng = random.Random(0)
    for _ in range(50):
        length = rng.randint(1, 60)
        progress = progress_of(length)
        start, settled = 0, 0
        while start < length + 40:
            stop = min(start + rng.randint(1, 20), length) if start < length else start + 1
            assert progress.step(start, stop) == (stop == length)
            assert progress.evicted == (stop >= length)
            # The scheduler plans ahead: the step is not over yet.
            assert stop > length or list(progress.settle(start)) == []
            freed = list(progress.settle(stop))
            assert freed == (list(range(length // 8, length // 4)) if stop == length else [])
            settled += stop == length
            start = stop
        assert settled == 1 and list(progress.settle(start)) == []


def test_a_preempted_request_begins_anew() -> None:
    progress = progress_of(40)
    assert progress.step(0, 40) and list(progress.settle(40)) == [5, 6, 7, 8, 9]
    # The prompt and nine tokens of its answer are computed again at once: it is evicted from as before.
    assert progress.step(0, 49)
    assert list(progress.settle(39)) == [] and list(progress.settle(49)) == [5, 6, 7, 8, 9]
    assert not progress.step(49, 50) and list(progress.settle(50)) == []


def test_a_request_that_is_preempted_inside_its_prompt_has_freed_nothing() -> None:
    progress = progress_of(40)
    assert not progress.step(0, 30) and list(progress.settle(30)) == []
    assert not progress.step(0, 20) and progress.step(20, 40)
    assert list(progress.settle(40)) == [5, 6, 7, 8, 9]

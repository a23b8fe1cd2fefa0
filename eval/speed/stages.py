"""Times the stages of a run: functions that are clocked while it lasts, each without those that it calls.

The device is waited for at every boundary. That makes the whole slower on a GPU, so a share is one of a run
that was clocked, and times that are reported for themselves are taken without.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from retain.process.timing import timed

# (owner, name of its function, stage).
Part = tuple[Any, str, str]


@contextmanager
def staged(parts: Sequence[Part]) -> Iterator[dict[str, float]]:
    """Time the stages of everything inside.

    `ms[stage] = sum over its calls of (duration - durations of the staged calls inside)`.

    Yields:
        milliseconds by stage, which grow.
    """
    taken = {stage: 0.0 for _, _, stage in parts}
    inside = [0.0]  # of each open call: milliseconds of the staged calls in it

    def clocked(run: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            result, ms = timed(partial(run, *args, **kwargs))
            taken[stage] += ms - inside.pop()
            inside[-1] += ms
            return result

        return wrapper

    with ExitStack() as stack:
        for owner, name, stage in parts:
            stack.enter_context(patch.object(owner, name, clocked(vars(owner)[name], stage)))
        yield taken

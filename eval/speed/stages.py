"""The stages of a prefill, clocked apart: what of it is scoring, and what is evicting.

In: a device. Out: seconds of each stage, for whatever prefills run inside `staged`. The one decision taken
here: a stage is what its function takes without the stages that it calls, and the device is waited for at
every boundary. That makes the whole slower on a GPU, so a share is one of a prefill that was clocked in this
way, and times that are reported for themselves are taken without it.

    scoring   the policy's score of a layer, gates and running statistics included, and lookahead tokens
    eviction  budgets, protection, selection, and cutting layers to what is kept. A cache that keeps
              everything has some too: it lays out what it holds
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retain.hf.cache import engine
from retain.hf.cache.bound_policy import BoundPolicy
from retain.hf.cache.eviction_request import EvictionRequest, LayerByLayer
from retain.hf.cache.state import State
from retain.process.stopwatch import synchronise

SCORING, EVICTION = "scoring", "eviction"
# Who does what: (owner, name of its function, stage).
PARTS: tuple[tuple[Any, str, str], ...] = (
    (EvictionRequest, "score", SCORING),
    (EvictionRequest, "noted", SCORING),
    (EvictionRequest, "counted", SCORING),
    (engine, "look_ahead", SCORING),
    (BoundPolicy, "begin", EVICTION),
    (LayerByLayer, "add", EVICTION),
    (engine, "shrink", EVICTION),
    (State, "cut_dense", EVICTION),
)


@contextmanager
def staged(device: str) -> Iterator[dict[str, float]]:
    """Clock the stages of every prefill inside.

    `seconds[stage] = sum over its calls of (duration - durations of the staged calls inside)`.

    Args:
        device: that is waited for at the boundaries.

    Yields:
        seconds by stage, which grow.
    """
    seconds = {SCORING: 0.0, EVICTION: 0.0}
    inside = [0.0]  # of each open call: seconds of the staged calls in it

    def clocked(run: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronise(device)
            start = time.perf_counter()
            inside.append(0.0)
            try:
                return run(*args, **kwargs)
            finally:
                synchronise(device)
                taken = time.perf_counter() - start
                seconds[stage] += taken - inside.pop()
                inside[-1] += taken

        return wrapper

    before = [(owner, name, vars(owner)[name]) for owner, name, _ in PARTS]
    try:
        for owner, name, stage in PARTS:
            setattr(owner, name, clocked(vars(owner)[name], stage))
        yield seconds
    finally:
        for owner, name, run in before:
            setattr(owner, name, run)

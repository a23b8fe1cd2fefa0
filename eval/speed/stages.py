"""Times the stages of a prefill apart: scoring and evicting.

A stage is its functions' time without the stages that they call, and the device is waited for at every
boundary. That makes the whole slower on a GPU, so a share is one of a prefill that was timed in this way, and
times that are reported for themselves are taken without it.

    scoring   the policy's score of a layer, gates and running statistics included, and lookahead tokens
    eviction  budgets, protection, selection, and cutting layers to what is kept. A cache that keeps
              everything has some too: it lays out what it holds
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from retain.hf.cache import engine
from retain.hf.cache.bound_policy import BoundPolicy
from retain.hf.cache.eviction_request import EvictionRequest, LayerByLayer
from retain.hf.cache.state import State
from retain.process.timing import timed

SCORING, EVICTION = "scoring", "eviction"
# (owner, name of its function, stage).
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
def staged() -> Iterator[dict[str, float]]:
    """Time the stages of every prefill inside.

    `ms[stage] = sum over its calls of (duration - durations of the staged calls inside)`.

    Yields:
        milliseconds by stage, which grow.
    """
    taken = {SCORING: 0.0, EVICTION: 0.0}
    inside = [0.0]  # of each open call: milliseconds of the staged calls in it

    def clocked(run: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            result, ms = timed(functools.partial(run, *args, **kwargs))
            taken[stage] += ms - inside.pop()
            inside[-1] += ms
            return result

        return wrapper

    with ExitStack() as stack:
        for owner, name, stage in PARTS:
            stack.enter_context(patch.object(owner, name, clocked(vars(owner)[name], stage)))
        yield taken

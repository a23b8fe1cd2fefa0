"""Runs parts of work in threads that each compute alone: one worker a core instead of one operation on all
cores.

Many small operations are better spread over cores whole. Cut into pieces, each of them waits for its slowest
piece, which on a machine that others use too is a thread that has been put aside.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

Part = TypeVar("Part")

# Seconds until threads that do not begin are given up.
_PATIENCE = 30.0

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0
# So many threads could not be started: they are not asked for again.
_too_many: int | None = None


def spread(work: Callable[[Part], None], parts: Sequence[Part]) -> None:
    """Do each part in a thread of its own that computes alone; one after another where that cannot be.

    What PyTorch keeps for each thread holds in the workers too: whether inference mode is on. Gradients are
    not recorded. Modes that look at every operation exist in the calling thread only: under one, and where no
    thread can be started, the parts are done in it.

    Args:
        work: what to do.
        parts: with what.
    """
    watched = _get_current_dispatch_mode() is not None or _len_torch_function_stack() > 0
    pool = None if watched else _workers(len(parts))
    if pool is None:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()

    def alone(part: Part) -> None:
        # Leaving inference mode switches gradients on: they are switched off inside.
        with torch.inference_mode(inference), torch.no_grad():
            work(part)

    list(pool.map(alone, parts))


def _workers(number: int) -> ThreadPoolExecutor | None:
    """The process's one pool, of so many threads at least; None if they cannot be started."""
    global _pool, _size, _too_many
    with _lock:
        if _pool is None or _size < number:
            grown = _begun(number) if _too_many is None or number < _too_many else None
            if grown is None:
                _too_many = min(number, _too_many or number)
                return None
            # The threads of the smaller one end with its last call.
            _pool, _size = grown, number
        return _pool


def _begun(number: int) -> ThreadPoolExecutor | None:
    """A pool whose threads all run, each with one thread to compute with."""
    before, together = torch.get_num_threads(), Barrier(number + 1, timeout=_PATIENCE)

    def begin() -> None:
        # A thread takes the process's default when it is first asked, and would then forget what it was told.
        torch.get_num_threads()
        together.wait()
        torch.set_num_threads(1)
        together.wait()

    pool = ThreadPoolExecutor(number, "attention_stats")
    try:
        for _ in range(number):
            pool.submit(begin)
        together.wait()
        together.wait()
    except (RuntimeError, BrokenBarrierError):
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        return None
    finally:
        # What a thread sets is also the default of threads to come: for the moment between the two meetings
        # it was 1.
        torch.set_num_threads(before)
    return pool


def _forget() -> None:
    """In a forked process: threads do not survive it, and the lock may have been anybody's."""
    global _lock, _pool, _size, _too_many
    _lock, _pool, _size, _too_many = Lock(), None, 0, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

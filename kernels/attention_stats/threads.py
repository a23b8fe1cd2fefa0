"""Threads that each compute alone: one worker a core instead of one operation on all cores.

In: how many. Out: a pool whose threads run every PyTorch operation on themselves. The one decision taken
here: many small operations are better spread over cores whole. Cut into pieces, each of them waits for its
slowest piece, which on a machine that others use too is a thread that has been put aside.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock

import torch

_lock = Lock()


def workers(number: int) -> ThreadPoolExecutor:
    """The pool of so many workers, made once a process; gradients are recorded in them unless told otherwise.

    Args:
        number: of workers.
    """
    with _lock:
        return _pool(os.getpid(), number)


@lru_cache
def _pool(process: int, number: int) -> ThreadPoolExecutor:
    """Of this process: threads do not survive a fork."""
    before, begun = torch.get_num_threads(), Barrier(number + 1)
    pool = ThreadPoolExecutor(number, "attention_stats", initializer=_alone)
    for _ in range(number):
        pool.submit(begun.wait)
    begun.wait()
    # What is set is a thread's own number, and also the default of threads that are still to come.
    torch.set_num_threads(before)
    return pool


def _alone() -> None:
    # A thread takes the default when it is first asked, and would then forget what it was told.
    torch.get_num_threads()
    torch.set_num_threads(1)

"""attention_stats on a CPU: heads are spread over threads that each compute alone, and little is held."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from retain.kernels import attention_stats as op
from retain.kernels.attention_stats import attention_stats, reference, threads
from retain.kernels.attention_stats.cases import CASES, Case, inputs, run
from retain.kernels.measure import extra_bytes
from tests.kernels.test_attention_stats import assert_right

MB = 10**6


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [2, 3])
def test_heads_are_spread_over_workers(name, number):
    """If there are enough of them; a worker computes alone, and the caller keeps its threads."""
    kwargs = inputs(CASES[name], torch.float32, "cpu")
    torch.set_num_threads(number)
    walk = reference._Walk(_call_of(kwargs))
    found = [attention_stats(**kwargs, chunk=chunk) for chunk in (None, 7, 7)]
    assert torch.get_num_threads() == number
    pairs = CASES[name].batch * CASES[name].kv_heads
    assert walk.workers == (min(number, pairs) if 2 * min(number, pairs) > number else 1)
    for one in found:
        assert_right(one, kwargs)
    assert all(torch.equal(getattr(found[1], each), getattr(found[2], each)) for each in kwargs["wanted"])


@pytest.fixture
def no_pool(monkeypatch):
    """No worker was started yet."""
    for name, value in (("_pool", None), ("_size", 0), ("_too_many", None), ("_PATIENCE", 0.2)):
        monkeypatch.setattr(threads, name, value)


def test_workers_compute_alone_and_are_kept(no_pool, monkeypatch):
    monkeypatch.setattr(threads, "_PATIENCE", 30.0)
    torch.set_num_threads(2)
    pool = threads._workers(2)
    assert threads._workers(2) is pool
    assert list(pool.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
    # The one pool there is grows.
    larger = threads._workers(3)
    assert larger is not pool
    assert threads._workers(2) is threads._workers(3) is larger
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 2


class _Refuses(ThreadPoolExecutor):
    """The second thread cannot be started."""

    def submit(self, *given):
        if self._threads:
            raise RuntimeError("can't start new thread")
        return super().submit(*given)


class _Forgets(ThreadPoolExecutor):
    """A thread is never heard of again."""

    def submit(self, *given):
        return Future() if self._threads else super().submit(*given)


@pytest.mark.parametrize("broken", [_Refuses, _Forgets])
def test_without_threads_the_caller_does_it(broken, no_pool, monkeypatch):
    made = []
    monkeypatch.setattr(threads, "ThreadPoolExecutor", lambda *given: made.append(given) or broken(*given))
    kwargs = inputs(CASES["plain"], torch.float32, "cpu")
    torch.set_num_threads(2)
    assert_right(attention_stats(**kwargs), kwargs)
    assert threads._pool is None
    assert torch.get_num_threads() == 2
    # Nobody waits a second time for threads that did not come.
    assert_right(attention_stats(**kwargs), kwargs)
    assert len(made) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own():
    """Also if another thread was making some at that moment."""
    with threads._lock:
        child = os.fork()
        if not child:
            os._exit(0 if threads._workers(2) is not None else 1)
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_what_breaks_in_a_worker_is_heard(monkeypatch):
    monkeypatch.setattr(reference._Walk, "fold", lambda walk, rows: torch.zeros(2) + torch.zeros(3))
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="must match the size"):
        attention_stats(**inputs(CASES["plain"], torch.float32, "cpu"))


def _call_of(kwargs):
    """Arguments of the reference."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_run", lambda call: calls.append(call) or {})
        attention_stats(**kwargs)
    return calls[0]


def held(case, kwargs, number, monkeypatch):
    """Bytes beyond inputs and outputs with so many threads, at most.

    What other threads take is not seen. So the workers' parts are done here, one after another: blocks of all
    of them exist from the start, and what else one needs may be needed by all at once.
    """
    blocks = [0]

    def one_after_another(work, walks):
        blocks[:] = [walk.block.nbytes + walk.scratch.nbytes for walk in walks]
        torch.set_num_threads(1)
        for walk in walks:
            work(walk)

    monkeypatch.setattr(reference, "spread", one_after_another)
    torch.set_num_threads(number)
    extra = extra_bytes(lambda: run(case, kwargs), torch.device("cpu"))
    assert extra >= sum(blocks)
    return extra + (len(blocks) - 1) * (extra - sum(blocks))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_holds_little_at_any_length(dtype, number, monkeypatch):
    """128K entries, whose keys alone are 67 MB a head in float32: also they are made a tile at a time."""
    size = {"kv_heads": number, "group_size": 8, "entries": 2**17, "num_queries": 16, "width": 128}
    case = Case(**size, wanted=("max", "lse"))
    kwargs = inputs(case, dtype, "cpu")
    assert held(case, kwargs, number, monkeypatch) <= 64 * MB

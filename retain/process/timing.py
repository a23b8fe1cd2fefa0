"""Times the cases of a benchmark: warmed up, in turn, each beside its neighbour, without garbage collection.

A cost is a ratio of neighbours. A case and the one that it is held against run one after the other, which of
them comes first alternates, the cases take turns in an order that rotates, and a ratio is the median over
rounds of ratios within a round. So a machine that drifts, or that others use too, moves both alike.

`torch.utils.benchmark` does not fit: its `Timer` repeats one statement several times in a row, without turns
and neighbours, and importing it needs setuptools, which the core does not bring.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from tqdm import tqdm

X = TypeVar("X")
# Times of one run, by quantity.
Times = Mapping[str, float]


def timer() -> float:
    """Seconds, once the device in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(run: Callable[[], X]) -> tuple[X, float]:
    """The result of a call, and the milliseconds that it took until the device was done."""
    start = timer()
    result = run()
    return result, 1e3 * (timer() - start)


@contextmanager
def quiet(threads: int, device: str = "cpu") -> Iterator[None]:
    """So many threads, one device, no gradients and no garbage collection; afterwards as before.

    Objects of before are frozen, so that a collection between two runs looks at what is new alone.
    """
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with torch.no_grad(), torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
            yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


class GivenUp(RuntimeError):
    """A case cannot go on: says why. The others do."""


@dataclass(eq=False, kw_only=True)
class Case:
    """One of the cases of a benchmark, and the times of its runs.

    Args:
        call: one run: times by quantity. A subclass overrides `run` instead.
        beside: the neighbour that runs next to it in each round.
        runs: round and times of each run that counts.
        pairs: times of each run that had a neighbour, and the neighbour's.
        failed: why it was given up; empty: it was not.
    """

    call: Callable[[], Times] = dict
    beside: "Case | None" = None
    runs: list[tuple[int, Times]] = field(default_factory=list)
    pairs: list[tuple[Times, Times]] = field(default_factory=list)
    failed: str = ""

    def run(self) -> Times:
        """One run."""
        return self.call()

    def attempt(self) -> Times | None:
        """One run, once the garbage of the one before is gone; None: it has failed, now or earlier."""
        gc.collect()
        try:
            return None if self.failed else self.run()
        except torch.OutOfMemoryError:
            self.failed = "out of memory"
        except GivenUp as error:
            self.failed = str(error)
        return None

    def times(self, quantity: str) -> list[float]:
        """Times of its runs."""
        return [times[quantity] for _, times in self.runs]

    def over(self, other: "Case", quantity: str) -> list[float]:
        """Its ratios to another case: to its neighbour's run next to it, or to a run of the same round."""
        if other is self.beside:
            return [own[quantity] / its[quantity] for own, its in self.pairs]
        its = {} if other.failed else dict(other.runs)
        return [own[quantity] / its[turn][quantity] for turn, own in self.runs if turn in its]


def interleave(
    cases: Sequence[Case], *, rounds: int, warmup: int, after_round: Callable[[], Any] | None = None
) -> None:
    """Run all cases in turn, in an order that rotates.

    Args:
        cases: those that stand beside others run as their neighbours only.
        rounds: that count.
        warmup: rounds before them that do not.
        after_round: called behind each.
    """
    turns = [case for case in cases if not any(other.beside is case for other in cases)]
    for turn in tqdm(range(-warmup, rounds), desc=f"{len(cases)} cases", unit="round", leave=False):
        start = turn % max(1, len(turns))
        for case in (*turns[start:], *turns[:start]):
            order = (case.beside, case) if turn % 2 else (case, case.beside)
            found = {one: one.attempt() for one in order if one is not None and not case.failed}
            taken = {one: times for one, times in found.items() if times is not None}
            if turn >= 0:
                for one, times in taken.items():
                    one.runs.append((turn, times))
                if case in taken and case.beside in taken:
                    case.pairs.append((taken[case], taken[case.beside]))
        if after_round is not None:
            after_round()


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, 5th, 20th, 80th and 95th percentile, and all values; None of fewer than two."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    percentiles = {f"p{5 * (k + 1)}": cuts[k] for k in (0, 3, 15, 18)}
    return {"median": statistics.median(values), **percentiles, "all": list(values)}

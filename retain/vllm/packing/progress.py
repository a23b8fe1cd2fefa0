"""Follows one request through the steps of an engine: when entries are evicted, and which blocks that frees.

All of it follows from the request's lengths and budget, so that the scheduler knows it when it plans a step,
and no worker has to say anything.

A request's block table goes by position. An eviction at `s` tokens packs what stays of the `s // page` full
pages a head into the first of the blocks that hold them; the others are free. So blocks hold packed pages at
some places of the table (`Packed.columns`), nothing up to the last eviction's full pages, and one page of
every head behind them. Evictions come when the prompt has been read, in chunks of a prompt where that is
asked for (`chunked`), and every so many tokens while an answer is decoded (`every`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Packed:
    """Blocks that hold packed pages.

    Args:
        columns: their places in the block table; none before the first eviction.
        full: full pages a head that had been seen at the last eviction; later blocks are as ever.
    """

    columns: tuple[int, ...] = ()
    full: int = 0

    def places(self, full: int) -> tuple[int, ...]:
        """Places of all blocks that hold full pages, when so many a head have been seen."""
        return (*self.columns, *range(self.full, full))


@dataclass(frozen=True)
class Eviction:
    """One eviction.

    Args:
        seen: tokens of the request at that moment.
        before, after: what is packed.
        freed: places of blocks that are free afterwards.
    """

    seen: int
    before: Packed
    after: Packed
    freed: tuple[int, ...]


@dataclass
class Progress:
    """A request's evictions.

    Args:
        length: tokens of its prompt.
        page: entries of a block.
        kept_of: tokens seen -> pages a head that its budget keeps of the full ones, in the mean.
        every: tokens between evictions while an answer is decoded; None: none.
        chunked: whether each chunk of the prompt is evicted from.
    """

    length: int
    page: int
    kept_of: Callable[[int], int]
    every: int | None = None
    chunked: bool = False
    packed: Packed = field(init=False)
    evictions: list[Eviction] = field(init=False)
    settled: int = field(init=False)  # evictions whose blocks were freed

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.packed, self.evictions, self.settled = Packed(), [], 0
        self.moment: int | None = None

    def step(self, start: int, stop: int) -> Eviction | None:
        """The eviction at the end of a step.

        After a preemption the prompt and the answer so far are computed at once. Then the prompt is evicted
        from as before; with `every`, both are, as they are by then.

        Args:
            start, stop: tokens computed before and after it. One that begins anew was preempted.
        """
        if start == 0:
            self._begin()
        if stop < self.length:
            return self._evict(stop) if self.chunked else None
        if self.moment is None:
            return self._evict(self.length if self.every is None else stop)
        if self.every is not None and stop - self.moment >= self.every:
            return self._evict(stop)
        return None

    def is_over(self, start: int) -> bool:
        """Whether nothing more goes, so that nobody has to look at the tokens of a step.

        Args:
            start: tokens computed before that step, which is still to be told to `step`.
        """
        return self.moment is not None and self.every is None and start != 0

    def observed(self, start: int, stop: int, window: int) -> int:
        """First token of the next step whose query an eviction may observe; its end if there is none.

        Args:
            start, stop: tokens computed before and after that step, which is still to be told to `step`.
            window: last queries that an eviction observes.
        """
        if self.is_over(start):
            return stop
        if self.chunked or self.every is not None:
            return max(start, stop - window)
        return max(start, self.length - window)

    def _evict(self, seen: int) -> Eviction | None:
        """Pack what stays, if anything goes."""
        if seen >= self.length:
            self.moment = seen
        full = seen // self.page
        places = self.packed.places(full)
        kept = min(self.kept_of(seen), len(places))
        if kept == len(places):
            return None
        eviction = Eviction(seen, self.packed, Packed(places[:kept], full), places[kept:])
        self.evictions.append(eviction)
        self.packed = eviction.after
        return eviction

"""Follows one request through the steps of an engine: when its prompt is evicted from, and which blocks that
frees.

All of it follows from the request's length and budget, so that the scheduler knows it when it plans a step,
and no worker has to say anything.

A request's block table goes by position. The step that computes the last token of a prompt ends with its
eviction: what stays of the prompt's `full` full pages a head is packed into the first `kept` blocks, and the
others of these pages are free. Later blocks are as ever, one page of every head.
"""

from dataclasses import dataclass

from retain.budget.statement import Budget


@dataclass(frozen=True)
class Arrival:
    """A request that is evicted from.

    Args:
        request_id: its id.
        length: tokens of its prompt.
        kept: pages a head, in the mean, that stay of its full ones.
        budget: what it may keep.
        seed: of the draw.
    """

    request_id: str
    length: int
    kept: int
    budget: Budget
    seed: int


@dataclass
class Progress:
    """How far a request has come whose prompt has `full` full pages a head: whether a planned step evicts
    from it, and whether its blocks were freed."""

    asked: Arrival
    full: int
    evicted: bool = False
    freed: bool = False

    def step(self, start: int, stop: int) -> bool:
        """Follow a step over tokens `start` to `stop`; True if the request is evicted from at its end.

        One that begins anew was preempted: the prompt and the answer so far are computed at once, and the
        prompt is evicted from as before.
        """
        if start == 0:
            self.evicted = self.freed = False
        due = not self.evicted and stop >= self.asked.length
        self.evicted |= due
        return due

    def free(self, computed: int) -> range:
        """Places of the blocks that are free once so many tokens are computed; each is given once."""
        if self.freed or not self.evicted or computed < self.asked.length:
            return range(0)
        self.freed = True
        return range(self.asked.kept, self.full)

"""Accompanies a running `generate`: counts the tokens that it samples, and enters and leaves the graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from retain.hf.cache.state import State
from retain.hf.cache.static_decoding import StaticDecoding, refused, steps_unseen, unlike


class Generation:
    """The side of a cache that hears from `generate`."""

    def __init__(self) -> None:
        self.static: StaticDecoding | None = None  # while steps are one graph
        self.as_written = False  # torch.compile was told to run what it compiled as written
        self.forget()

    def forget(self) -> None:
        """Forget the last `generate`."""
        # Tokens that may come, where the steps are to be compiled, and whether transformers has asked for it.
        self.room: int | None = None
        self.asked = False
        self.sampled = self.in_graph = self.began = 0  # `began`: tokens seen when the first was sampled
        self.rows: StaticDecoding | None = None  # the last rows in a pool of this `generate`

    @contextmanager
    def running(self, state: State, room: int | None = None) -> Iterator[Callable[[], None]]:
        """While the `generate` of an attached model runs; gives a function to call behind each sampled token.

        Args:
            state: of the cache.
            room: tokens that may come, where steps are to be compiled; 0: beams come; None: they are not.
        """
        self.forget()
        if room is not None:
            why = refused(state) if room else "beams select among sequences at each step"
            self.room, state.decoded = (None, f"as written: {why}") if why else (room, None)

        def hear() -> None:
            self.sampled += 1
            if self.static is not None and self.static.is_full(self.sampled):
                self.decode_as_written(state)
                self.decode_static(state)
            if self.room is not None:
                self._run_as_written(self.static is None)

        try:
            yield hear
        finally:
            self.decode_as_written(state)
            self._run_as_written(False)
            self.forget()

    def _run_as_written(self, on: bool) -> None:
        """While rows are not static, what transformers has compiled runs as written."""
        if on != self.as_written:
            torch.compiler.set_stance("force_eager" if on else "default")
            self.as_written = on

    def compiles(self) -> bool:
        """True if transformers may compile a step. It asks first of all, before the prompt is read, whether
        to compile the steps behind it; then of each forward, whose masks are ours until rows are static."""
        if self.static is not None:
            return True
        first, self.asked = self.room is not None and not self.asked, True
        return first

    def decode_static(self, state: State) -> None:
        """Decode in one graph from here on, if steps are to be compiled."""
        if self.room is None:
            return
        if not self.sampled:
            self.began = state.num_seen
        read = state.num_seen - self.began
        if (steps := steps_unseen(state, self.room - read)) < 1:
            return
        if (why := unlike(state)) is not None:
            state.decoded = f"as written: {why}"
            return
        if self.rows is None or not self.rows.is_whole():
            self.rows = StaticDecoding(state, self.room - read)
        self.static = self.rows
        self.static.enter(steps, read)

    def decode_as_written(self, state: State) -> None:
        """Leave the graph."""
        static, self.static = self.static, None
        if static is None:
            return
        self.in_graph += static.leave()
        state.decoded = f"{self.in_graph} tokens in one graph"

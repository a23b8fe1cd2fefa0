"""Holds a corpus in memory, and draws the documents of each step.

They are a pure function of (seed, step), so a resumed run reads on without any state.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from retain.train.data.document import Document, tokens_digest

KIND = "in memory"


@dataclass(frozen=True)
class Corpus:
    """All documents at once.

    Args:
        train: what is trained on.
        held_out: what is never trained on, for the numbers that are reported.
        batch_documents: documents of a step, over all processes.
        seed: of the order.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    batch_documents: int = 1
    seed: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.train)

    def documents_of(self, step: int) -> list[Document]:
        """What step `step` (from 0) reads, over all processes: a new shuffle each time through the corpus."""
        count = len(self.train)
        places = range(step * self.batch_documents, (step + 1) * self.batch_documents)
        epochs = range(places[0] // count, places[-1] // count + 1)
        order = {epoch: np.random.default_rng([self.seed, 3, epoch]).permutation(count) for epoch in epochs}
        return [self.train[order[place // count][place % count]] for place in places]

    def state(self) -> dict[str, Any]:
        """Nothing has to be kept: a step needs no history."""
        return {"kind": KIND}

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Accept the state of a corpus in memory.

        Raises:
            ValueError: the state of a stream.
        """
        if state.get("kind") != KIND:
            raise ValueError(wrong_kind(state, KIND))

    def describe(self) -> str:
        """SHA-256 of all tokens of both sides, in order."""
        sides = tokens_digest(self.train) + tokens_digest(self.held_out)
        return hashlib.sha256(sides.encode()).hexdigest()


def wrong_kind(state: Mapping[str, Any], wanted: str) -> str:
    """The error for a checkpoint of another kind of corpus."""
    return (
        f"the checkpoint is of a corpus that is {state.get('kind', 'not named')!r}, and this run's is "
        f"{wanted!r}: set data.streaming as it was, or start again with overwrite=true."
    )

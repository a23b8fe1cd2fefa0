"""Defines the base class of the stages of training, and means over layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.gates import GateInputs, GateSet
from retain.train.data.document import Document
from retain.train.objectives.overlap import head_overlaps

StageName = Literal["local", "end_to_end", "lookahead"]
# Stands for the step in what is drawn for held-out documents: always the same pairs.
HELD_OUT_STEP = 2**40


class Stage(ABC):
    """An objective: adds the gradients of documents to the gates' parameters, and reports numbers of each.

    `fields` are the names of a document's numbers, `loss` first; `gates` are trained in place.
    """

    def __init__(self, gates: GateSet, fields: tuple[str, ...]):
        self.gates, self.fields = gates, fields

    @abstractmethod
    def prepare_(self, documents: Sequence[Document]) -> None:
        """Sets, before the first step, what starts from data, alike on every process."""

    @abstractmethod
    def rows_of(self, documents: Sequence[Document], step: int, scale: float | None) -> list[dict[str, Any]]:
        """Returns the numbers of each document. With a scale, the gradient of `scale` times the documents'
        summed loss is added to the parameters'; without, documents are held out."""


class Tally:
    """The layers' numbers of each document, summed on the device and read once, at the end: a layer does not
    wait for the one before it."""

    def __init__(self, documents: int) -> None:
        self._sums: list[dict[str, Any]] = [{} for _ in range(documents)]

    def add_(
        self,
        row: int,
        found: Mapping[str, Tensor | float],
        output_HT: Float[Tensor, "H T"],
        target_HT: Float[Tensor, "H T"],
        reached_HT: Bool[Tensor, "H T"],
    ) -> None:
        """Counts one layer of one document (its place is `row`): a number per name, and how far the output
        finds the target, in the mean over heads (`head_overlaps`)."""
        sums, overlap = self._sums[row], head_overlaps(output_HT.detach(), target_HT, reached_HT).mean()
        for name, value in (*found.items(), ("overlap", overlap)):
            if isinstance(value, Tensor) and name in sums:
                # Where the first layer is: layers may lie on several devices, and the host waits for none.
                value = value.to(sums[name].device, non_blocking=True)
            sums[name] = sums[name] + value if name in sums else value

    def means(self, layers: int) -> list[dict[str, Any]]:
        """Returns per document the means over so many layers."""
        return [{name: float(value) / layers for name, value in sums.items()} for sums in self._sums]


def joined(parts: Sequence[GateInputs]) -> GateInputs:
    """Entries of several documents in one row."""
    along = {"hidden_BTE": 1, "stream_BTE": 1, "valid_BT": 1}
    names = [name for name in vars(parts[0]) if isinstance(getattr(parts[0], name), Tensor)]
    joint: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], dim=along.get(name, 2)) for name in names
    }
    return GateInputs(**joint)

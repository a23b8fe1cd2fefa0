"""Trains every gate on its own layer's target while the frozen model runs.

A layer's gate runs forward and backward as soon as that layer's attention is seen. Nothing of a layer is
kept, no graph leads through the model, and memory does not grow with the number of layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.gates import GateInputs, GateSet, inputs_of
from retain.train.data.branches import readings_of
from retain.train.data.document import Document
from retain.train.objectives.case import LossSettings
from retain.train.objectives.losses import local_losses, total_loss
from retain.train.objectives.overlap import baselines_of
from retain.train.objectives.targets import (
    Example,
    TargetSettings,
    layer_target,
)
from retain.train.stage import Stage, Tally, joined
from retain.train.teacher import Frozen, View, walk

# Entries of a layer from which input statistics are made, and the fewest documents that they come from (where
# the first step has as many): one long document is not what all are like.
PREPARED_ENTRIES, PREPARED_DOCUMENTS = 8192, 4


def teacher_examples(
    gates: GateSet,
    frozen: Frozen,
    target: TargetSettings,
    documents: Sequence[Document],
    visit: Callable[[list[Example]], None],
) -> None:
    """Shows examples out of the frozen model, layers ascending; `visit` gets those of a layer, or (models
    that are read a document at a time) of a layer and one document."""
    readings = readings_of(documents, target, frozen)

    def see(views: list[View]) -> None:
        examples = []
        for view in views:
            target_HT, reached_HT = layer_target(view, target)
            inputs = inputs_of(view.document, gates[view.layer_idx])
            examples.append(Example(view.layer_idx, view.row, view.key, inputs, target_HT, reached_HT, view))
        visit(examples)

    walk(frozen, readings, see, wanted=gates.inputs)


class LayerLocal(Stage):
    """Objective of the layer-local stage: this target, by these terms, with pairs drawn from this seed."""

    def __init__(
        self, gates: GateSet, frozen: Frozen, target: TargetSettings, loss: LossSettings, *, seed: int
    ):
        super().__init__(gates, ("loss", *loss.terms, "overlap"))
        self.target, self.loss, self.seed = target, loss, seed
        self.examples = partial(teacher_examples, gates, frozen, target)

    @torch.no_grad()
    def prepare_(self, documents: Sequence[Document]) -> None:
        """Sets every gate's input statistics, target floor and output bias; each gate moves to its layer.

        Every process does the same on the same documents: the first whose tokens are `PREPARED_ENTRIES` or
        more, `PREPARED_DOCUMENTS` at least.

        Raises:
            ValueError: a layer of which no entry is reached, or of which the targets or the inputs are such
                that a gate cannot start from them.
        """
        found: dict[int, list[tuple[GateInputs, Tensor]]] = {}
        documents = _enough(documents)
        share = max(1, PREPARED_ENTRIES // len(documents))

        def see(examples: list[Example]) -> None:
            for example in examples:
                entries = example.reached_HT.any(0).nonzero()[:, 0]
                # Evenly spread, where a document is longer than is needed.
                entries = entries[:: -(-len(entries) // share) or 1]
                risk_HN = example.target_HT[:, entries].masked_fill(
                    ~example.reached_HT[:, entries], torch.nan
                )
                inputs = example.inputs.entries(entries)
                found.setdefault(example.layer_idx, []).append((inputs, risk_HN))

        for document in documents:
            self.examples([document], see)
        for layer, parts in found.items():
            gate = self.gates[layer]
            risk_HN = torch.cat([risk_HN for _, risk_HN in parts], dim=1).double()
            if bool(risk_HN.isnan().all(1).any()):
                raise ValueError(
                    f"layer {layer}: no query of target.sources=[{', '.join(self.target.sources)}] reaches "
                    f"any entry of {len(documents)} document(s), so that there is nothing to learn: they are "
                    f"no longer than target.horizon={self.target.horizon}. Lower target.horizon, or add a "
                    "source that every document has (repeat, continuation)."
                )
            inputs = joined([inputs for inputs, _ in parts])
            counted_BT = torch.ones((1, risk_HN.shape[1]), dtype=torch.bool, device=risk_HN.device)
            floor_H = torch.zeros(len(risk_HN), dtype=torch.float64, device=risk_HN.device)
            if gate.unit == "log_risk":
                floor_H = self.target.floor * risk_HN.nanmean(1)
                risk_HN = (risk_HN + floor_H[:, None]).log()
            gate.to(risk_HN.device)
            gate.prepare_(inputs, counted_BT, floor_H.float(), risk_HN.nanmean(1).float())
            if strange := [name for name, value in gate.state_dict().items() if not value.isfinite().all()]:
                raise ValueError(
                    f"layer {layer}: the gate would start from numbers that are not finite ("
                    f"{', '.join(strange)}): the model's activations overflow (load it with dtype=float32), "
                    "or nothing pays some head's entries anything."
                )

    def rows_of(
        self, documents: Sequence[Document], step: int, scale: float | None, *, baselines: bool = False
    ) -> list[dict[str, Any]]:
        layers = len(self.gates.layers)
        tally = Tally(len(documents))

        def see(examples: list[Example]) -> None:
            for example in examples:
                gate = self.gates[example.layer_idx]
                key = (self.seed, step, example.key, example.layer_idx)
                with torch.set_grad_enabled(scale is not None):
                    output_HT = gate(example.inputs)[0]
                    known = (output_HT, gate, example.target_HT, example.reached_HT, example.view)
                    terms = local_losses(*known, self.loss, key, horizon=self.target.horizon)
                    loss = total_loss(terms, self.loss)
                    if scale is not None:
                        (loss * (scale / layers)).backward()
                terms = {"loss": loss, **terms}
                found: dict[str, Any] = {name: value.detach() for name, value in terms.items()}
                found |= baselines_of(example, self.seed) if baselines else {}
                place, compared = (example.row, example.layer_idx), (example.target_HT, example.reached_HT)
                tally.add_(*place, found, output_HT, *compared)

        self.examples(documents, see)
        return tally.means(layers, heads=scale is None)


def _enough(documents: Sequence[Document]) -> Sequence[Document]:
    """The first documents that give as many entries as are looked at."""
    tokens = 0
    for number, document in enumerate(documents, start=1):
        tokens += len(document.context_ids)
        if tokens >= PREPARED_ENTRIES and number >= PREPARED_DOCUMENTS:
            return documents[:number]
    return documents

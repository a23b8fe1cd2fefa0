"""Trains every gate on its own layer's target while the frozen model runs.

A layer's gate runs forward and backward as soon as that layer's attention is seen. Nothing of a layer is
kept, no graph leads through the model, and memory does not grow with the number of layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from retain.gates import GateInputs, GateSet, inputs_of
from retain.train.data.branches import readings_of
from retain.train.data.document import Document
from retain.train.objectives.case import Case, LossSettings
from retain.train.objectives.losses import local_losses, total_loss
from retain.train.objectives.overlap import baseline_overlaps
from retain.train.objectives.targets import TargetSettings, layer_target
from retain.train.stage import Stage, Tally, joined
from retain.train.teacher import Frozen, View, walk

# Entries of a layer from which input statistics are made, and the fewest documents that they come from (where
# the first step has as many): one long document is not what all are like.
PREPARED_ENTRIES, PREPARED_DOCUMENTS = 8192, 4
# A view, the gate's inputs, the target, and where it is defined.
Example = tuple[View, GateInputs, Tensor, Tensor]


class LayerLocal(Stage):
    """Objective of the layer-local stage: this target, by these terms, with pairs drawn from this seed."""

    def __init__(
        self, gates: GateSet, frozen: Frozen, target: TargetSettings, loss: LossSettings, *, seed: int
    ):
        super().__init__(gates, ("loss", *loss.terms, "overlap"))
        self.frozen, self.target, self.loss, self.seed = frozen, target, loss, seed

    def examples(self, documents: Sequence[Document], visit: Callable[[list[Example]], None]) -> None:
        """Shows examples out of the frozen model, layers ascending; `visit` gets those of a layer, or (models
        that are read a document at a time) of a layer and one document."""

        def see(views: list[View]) -> None:
            inputs = (inputs_of(view.document, self.gates[view.layer_idx]) for view in views)
            targets = (layer_target(view, self.target) for view in views)
            visit([(view, x, *y) for view, x, y in zip(views, inputs, targets, strict=True)])

        walk(self.frozen, readings_of(documents, self.target, self.frozen), see, wanted=self.gates.inputs)

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
        seen = enumerate(accumulate(len(document.context_ids) for document in documents), start=1)
        enough = (n for n, tokens in seen if tokens >= PREPARED_ENTRIES and n >= PREPARED_DOCUMENTS)
        documents = documents[: next(enough, None)]
        share = max(1, PREPARED_ENTRIES // len(documents))

        def see(examples: list[Example]) -> None:
            for view, inputs, target_HT, reached_HT in examples:
                entries = reached_HT.any(0).nonzero()[:, 0]
                # Evenly spread, where a document is longer than is needed.
                entries = entries[:: -(-len(entries) // share) or 1]
                risk_HN = target_HT[:, entries].masked_fill(~reached_HT[:, entries], torch.nan)
                found.setdefault(view.layer_idx, []).append((inputs.entries(entries), risk_HN))

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

    def rows_of(self, documents: Sequence[Document], step: int, scale: float | None) -> list[dict[str, Any]]:
        layers = len(self.gates.layers)
        tally = Tally(len(documents))

        def see(examples: list[Example]) -> None:
            for view, inputs, target_HT, reached_HT in examples:
                gate, key = self.gates[view.layer_idx], (self.seed, step, view.key, view.layer_idx)
                with torch.set_grad_enabled(scale is not None):
                    output_HT = gate(inputs)[0]
                    output_BHT = output_HT.to(torch.promote_types(output_HT.dtype, torch.float32))[None]
                    known = (target_HT[None], reached_HT[None], gate, self.loss, key, view)
                    terms = local_losses(Case(output_BHT, *known, self.target.horizon))
                    loss = total_loss(terms, self.loss)
                    if scale is not None:
                        (loss * (scale / layers)).backward()
                terms = {"loss": loss, **terms}
                found: dict[str, Any] = {name: value.detach() for name, value in terms.items()}
                if scale is None:
                    keyed, shown = (self.seed, view.key, view.layer_idx), view.document
                    values = shown.values_BHTD, shown.output_weight_QDE
                    found |= baseline_overlaps(*values, target_HT, reached_HT, keyed)
                tally.add_(view.row, found, output_HT, target_HT, reached_HT)

        self.examples(documents, see)
        return tally.means(layers)

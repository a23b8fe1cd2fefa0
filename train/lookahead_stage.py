"""Trains lookahead tokens, which stand behind a document and predict the attention of its answer.

LookaheadKV (arXiv 2603.10899). Teacher and student query the same cache: the document is read once without a
gradient, the answer runs behind it (the target), then the lookahead tokens do (the prediction), and only
their path has a gradient. Memory is linear in the document's length: its keys and values, and one layer's
rows of attention at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retain.gates import GateInputs, GateSet
from retain.gates.lookahead import LookaheadExtension
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import Asked, lookahead_embeds, run_behind
from retain.hf.model.decoder import base_model
from retain.train.data.branches import readings_of
from retain.train.data.document import Document, Reading
from retain.train.objectives.overlap import baseline_overlaps
from retain.train.objectives.targets import TargetSettings
from retain.train.stage import Stage, Tally
from retain.train.teacher import Frozen


class Lookahead(Stage):
    """Objective of the lookahead stage.

    `loss = mean over layers and KV heads of KL(s || s^)`: `s` is the mean attention that the answer's tokens
    pay to each of the document's entries, `s^` what the lookahead tokens do (`LookaheadGate`), both
    normalised over the document. Of several answers (`target.sources`: the data's own, `appendix`; the
    model's, `continuation`; the document again, `repeat`) `s` is the mean by their weights.

    Raises:
        ValueError: sources that come behind no document.
    """

    def __init__(self, gates: GateSet, frozen: Frozen, target: TargetSettings, *, seed: int):
        if "own" in target.sources:
            raise ValueError(
                f"target.sources={target.sources}: lookahead tokens learn what comes behind a whole document "
                "looks at, and its own tokens do not: set target.sources to {continuation: 1.0}, as the "
                "paper does, or take appendix or repeat."
            )
        super().__init__(gates, ("loss", "overlap"))
        self.frozen, self.target, self.seed = frozen, target, seed
        assert isinstance(gates.extension, LookaheadExtension), "retain.train.recipe refuses other families"
        self.extension = gates.extension

    def prepare_(self, documents: Sequence[Document]) -> None:
        """Nothing starts from data: tokens begin as embeddings, adapters at zero."""

    def rows_of(self, documents: Sequence[Document], step: int, scale: float | None) -> list[dict[str, Any]]:
        readings = readings_of(documents, self.target, self.frozen)
        return [self._run(reading, scale) for reading in readings]

    def _run(self, reading: Reading, scale: float | None) -> dict[str, Any]:
        """Reads one document: loss, overlap, and the gradient if there is a scale."""
        model = self.frozen.model
        with attach(model):
            with torch.no_grad():
                cache = Cache(model, policy=None)
                ids_BT = torch.tensor([reading.document.context_ids], device=self._embedding.weight.device)
                cache.prefill(ids_BT, evict=False)
                targets = self._targets(reading, cache)
            with torch.set_grad_enabled(scale is not None), self.extension.extend(base_model(model)):
                asked = self._behind(cache, lookahead_embeds(model, self.extension, 1))
                # Inside, where the adapters are, since checkpointed layers run again on the way back.
                return self._compare(cache, asked, targets, scale, reading.document.key)

    @property
    def _embedding(self) -> Any:
        return base_model(self.frozen.model).get_input_embeddings()

    def _behind(self, cache: Cache, embeds: Tensor) -> dict[int, Asked]:
        """Queries and keys of tokens behind the document, per layer."""
        where = cache.state.valid_BT, cache.state.positions_BT
        return run_behind(self.frozen.model, cache.engine.read_only(), embeds, *where)

    def _targets(self, reading: Reading, cache: Cache) -> dict[int, Float[Tensor, "H T"]]:
        """Normalised attention of the answers, per layer."""
        embedding = self._embedding
        totals: dict[int, Tensor] = {}
        for branch in reading.branches:
            embeds = embedding(torch.tensor([branch.ids], device=embedding.weight.device))
            for layer, asked in self._behind(cache, embeds).items():
                share_HT = self.target.sources[branch.source] * self._shares(cache, layer, asked)
                totals[layer] = totals[layer] + share_HT if layer in totals else share_HT
        return {layer: normalised(total_HT) for layer, total_HT in totals.items()}

    def _shares(self, cache: Cache, layer: int, asked: Asked) -> Float[Tensor, "H T"]:
        """The layer's gate applied to tokens behind the document, normalised."""
        held, spec = cache.layers[layer], cache.state.layout.spec_of[layer]
        inputs = GateInputs(
            keys_BHTD=held.dense()[0],
            lookahead_BQSD=asked.queries_BQSD,
            lookahead_keys_BHSD=asked.keys_BHSD,
            scaling=spec.scaling,
            soft_cap=spec.soft_cap,
            sinks_Q=spec.sinks_Q,
        )
        return normalised(self.gates[layer](inputs)[0])

    def _compare(
        self, cache: Cache, asked: dict[int, Asked], targets: dict[int, Tensor], scale: float | None, key: int
    ) -> dict[str, Any]:
        """Loss and overlap over all layers (without a `scale` also overlaps that cost no training), and the
        gradient: a layer's rows of attention are gone before the next one's are made, and then one way back
        leads through the model."""
        tally, layers = Tally(1), self.gates.layers
        behind: list[tuple[Tensor, Tensor | None]] = []  # ends in the model, their gradients
        for layer in layers:
            cut = Asked(*(end.detach().requires_grad_(scale is not None) for end in asked[layer]))
            score_HT, target_HT = self._shares(cache, layer, cut), targets[layer]
            reached_HT = torch.ones_like(score_HT, dtype=torch.bool)
            loss = divergence(target_HT, score_HT)
            found: dict[str, Any] = {"loss": loss.detach()}
            if scale is None:
                values_BHTD, spec = cache.layers[layer].dense()[1], cache.state.layout.spec_of[layer]
                known = (values_BHTD, spec.output_weight_QDE, target_HT, reached_HT)
                found |= baseline_overlaps(*known, (self.seed, key, layer))
            else:
                (loss * (scale / len(layers))).backward()
                behind += zip(asked[layer], (one.grad for one in cut), strict=True)
            tally.add_(0, found, score_HT, target_HT, reached_HT)
        ends = [(end, grad) for end, grad in behind if end.requires_grad and grad is not None]
        if ends:
            torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        return tally.means(len(layers))[0]


def normalised(score_HT: Float[Tensor, "H T"]) -> Float[Tensor, "H T"]:
    """Each head's numbers, over their sum."""
    tiny = torch.finfo(score_HT.dtype).tiny
    return score_HT / score_HT.sum(-1, keepdim=True).clamp_min(tiny)


def divergence(target_HT: Float[Tensor, "H T"], score_HT: Float[Tensor, "H T"]) -> Float[Tensor, ""]:
    """`mean_h sum_i s_hi (log s_hi - log s^_hi)`: KL(target || score), of two distributions a head.

    Where the target is zero, nothing is counted; a score of zero is taken for the smallest number.
    """
    tiny = torch.finfo(score_HT.dtype).tiny
    log_ratio_HT = target_HT.clamp_min(tiny).log() - score_HT.clamp_min(tiny).log()
    return (target_HT * log_ratio_HT).sum(-1).mean()

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
from retain.gates.lookahead import LookaheadExtension, LookaheadGate
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

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimiser trains."""
        return list(self.extension.parameters())

    def prepare_(self, documents: Sequence[Document]) -> None:
        """Nothing starts from data: tokens begin as embeddings, adapters at zero."""

    def rows_of(
        self, documents: Sequence[Document], step: int, scale: float | None, *, baselines: bool = False
    ) -> list[dict[str, Any]]:
        readings = readings_of(documents, self.target, self.frozen)
        return [self._run(reading, scale, baselines) for reading in readings]

    def _run(self, reading: Reading, scale: float | None, baselines: bool = False) -> dict[str, Any]:
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
                return self._compare(cache, asked, targets, scale, reading.key if baselines else None)

    @property
    def _embedding(self) -> Any:
        return base_model(self.frozen.model).get_input_embeddings()

    def _behind(self, cache: Cache, embeds: Tensor) -> dict[int, Asked]:
        """Queries and keys of tokens behind the document, per layer."""
        state = cache.state
        return run_behind(
            self.frozen.model, cache.engine.read_only(), embeds, state.valid_BT, state.positions_BT
        )

    def _targets(self, reading: Reading, cache: Cache) -> dict[int, Float[Tensor, "H T"]]:
        """Normalised attention of the answers, per layer."""
        embedding = self._embedding
        totals: dict[int, Tensor] = {}
        for branch in reading.branches:
            embeds = embedding(torch.tensor([branch.ids], device=embedding.weight.device))
            for layer, asked in self._behind(cache, embeds).items():
                share_HT = self.target.sources[branch.source] * normalised(self._score(cache, layer, asked))
                totals[layer] = totals[layer] + share_HT if layer in totals else share_HT
        return {layer: normalised(total_HT) for layer, total_HT in totals.items()}

    def _score(self, cache: Cache, layer: int, asked: Asked) -> Float[Tensor, "H T"]:
        """The layer's gate applied to tokens behind the document."""
        gate, spec, held = self.gates[layer], cache.state.layout.spec_of[layer], cache.layers[layer]
        assert isinstance(gate, LookaheadGate)
        inputs = GateInputs(
            keys_BHTD=held.dense()[0],
            lookahead_BQSD=asked.queries_BQSD,
            lookahead_keys_BHSD=asked.keys_BHSD,
            scaling=spec.scaling,
            soft_cap=spec.soft_cap,
            sinks_Q=spec.sinks_Q,
        )
        return gate(inputs)[0]

    def _compare(
        self,
        cache: Cache,
        asked: dict[int, Asked],
        targets: dict[int, Tensor],
        scale: float | None,
        key: int | None,
    ) -> dict[str, Any]:
        """Loss and overlap over all layers (with a document's `key` also overlaps that cost no training), and
        the gradient: a layer's rows of attention are gone before the next one's are made, and then one way
        back leads through the model."""
        tally = Tally(1)
        behind: list[tuple[Tensor, Tensor]] = []  # ends in the model, their gradients
        for layer in self.gates.layers:
            ends = (asked[layer].queries_BQSD, asked[layer].keys_BHSD)
            cut = Asked(*(end.detach().requires_grad_(scale is not None) for end in ends))
            score_HT = normalised(self._score(cache, layer, cut))
            loss = divergence(targets[layer], score_HT)
            if scale is not None:
                (loss * (scale / len(self.gates.layers))).backward()
                got = zip(ends, (cut.queries_BQSD.grad, cut.keys_BHSD.grad), strict=True)
                behind += [(end, grad) for end, grad in got if end.requires_grad and grad is not None]
            reached_HT = torch.ones_like(score_HT, dtype=torch.bool)
            found: dict[str, Any] = {"loss": loss.detach()}
            if key is not None:
                values_BHTD, spec = cache.layers[layer].dense()[1], cache.state.layout.spec_of[layer]
                known = (values_BHTD, spec.output_weight_QDE, targets[layer], reached_HT)
                found |= baseline_overlaps(*known, (self.seed, key, layer))
            tally.add_(0, layer, found, score_HT, targets[layer], reached_HT)
        if behind:
            torch.autograd.backward([end for end, _ in behind], [grad for _, grad in behind])
        return tally.means(len(self.gates.layers), heads=scale is None)[0]


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

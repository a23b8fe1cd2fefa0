"""Reads a whole sequence and returns the evidence of every layer, with nothing evicted."""

from collections.abc import Collection
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from retain.evidence import Evidence
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import look_ahead


@torch.no_grad()
def observe(
    model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"] | None = None,
    *,
    wanted: Collection[str] = (),
    ahead: GateSet | None = None,
) -> list[Evidence]:
    """Records every layer over a whole sequence: one forward of the frozen decoder, without its head.

    Nothing is evicted and nothing stays on the model. Memory: queries, keys, values and attention inputs of
    all layers that evict.

    Args:
        model: a causal language model; attached or not.
        input_ids: token ids, left-padded.
        attention_mask: 1 on tokens, 0 on padding; None: no padding.
        wanted: inputs of gates (`GateSet.inputs`); of it `stream`, the residual stream, is held only where it
            is named here.
        ahead: gates whose lookahead tokens run behind the sequence, for their queries.

    Returns:
        one `Evidence` per layer that evicts, with S == T queries.
    """
    with attach(model):
        cache = Cache(model, policy=None)
        cache.prefill(input_ids, attention_mask, evict=False, hold_evidence=True, wanted=wanted)
        assert cache.evidence is not None
        # Nothing goes, so entries that have left a sliding window by the end are shown like all others.
        evidence = [replace(layer, held_BHT=None) for layer in cache.evidence]
        return evidence if ahead is None else look_ahead(model, ahead, cache.engine.read_only(), evidence)

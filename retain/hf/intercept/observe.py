"""Reads a whole sequence and returns what every layer shows, with nothing evicted."""

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


def observe(
    model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"] | None = None,
    *,
    wanted: Collection[str] = (),
) -> list[Evidence]:
    """Records every layer over a whole sequence: one forward of the frozen decoder, without its head.

    Nothing is evicted and nothing stays on the model. Memory: queries, keys, values and attention inputs of
    all layers that evict.

    Args:
        model: a causal language model; attached or not.
        input_ids: token ids, left-padded.
        attention_mask: 1 on tokens, 0 on padding; None: no padding.
        wanted: what gates look at (`GateSet.inputs`); of it `stream`, the residual stream, is held only where
            it is named here.

    Returns:
        one `Evidence` per layer that evicts, with S == T queries.
    """
    with attach(model):
        cache = Cache(model, policy=None)
        cache.prefill(input_ids, attention_mask, evict=False, hold_evidence=True, wanted=wanted)
    assert cache.evidence is not None
    # Nothing goes, so what has left a sliding window by the end is shown like all else.
    return [replace(layer, held_BHT=None) for layer in cache.evidence]


@torch.no_grad()
def observe_ahead(
    model: nn.Module,
    gates: GateSet,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"] | None = None,
) -> list[Evidence]:
    """Records a whole prompt in the same way, with the queries of the gates' lookahead tokens."""
    with attach(model):
        cache = Cache(model, policy=None)
        cache.prefill(input_ids, attention_mask, evict=False, hold_evidence=True)
        assert cache.evidence is not None
        return look_ahead(model, gates, cache.engine.read_only(), cache.evidence)

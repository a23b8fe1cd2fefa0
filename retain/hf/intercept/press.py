"""Scores entries by an object in the calling convention of the field's main library, a "press".

That is any object with a `score(module, hidden_states, keys, values, attentions, kwargs)` method that returns
`[batch, KV heads, entries]`, higher = keep. Selection, budgets and protection treat its score like any other.
Presses know nothing of padding, so each is called on one sequence at a time, without its padding.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from retain.evidence import UNITS, Evidence, Score, attention_probs, masked_score
from retain.hf.model.decoder import base_model, layout_of
from retain.process.registry import check_choice


def press_score(
    model: nn.Module, press: Any, *, unit: str = "rank", attentions: bool = False
) -> Callable[[Evidence], Score]:
    """A press as a score.

    `score[b, :, i] = press.score(module, hidden_b, keys_b, values_b, attentions_b, kwargs_b)[0, :, i]`, with
    sequence b alone and without padding. `module` is the layer's attention module; for the time of the call
    it has the decoder's `rotary_emb`, which some presses read from it. `kwargs` holds `hidden_states`,
    `position_embeddings` (cosine and sine, in the model's precision), `position_ids`, `cache_position`,
    `attention_mask` and `past_key_values` (both None). Presses run without gradients, and nothing but the
    score is taken of them.

    Args:
        model: the causal language model that the evidence comes from.
        unit: what its numbers are; `rank` (nothing but their order inside a head) unless you know better.
        attentions: whether it reads attention weights. They are computed whole, `[1, Q, T, T]` in float32:
            for short contexts.

    Returns:
        `evidence -> Score`; its values in float32, infinities at the ends of float32's range.

    Raises:
        ValueError: no `score` method or no such unit; when called, if heads hold different entries already,
            if the evidence lacks the attention input (or a query, with `attentions`), or if the press returns
            anything but one number an entry and KV head.
    """
    name = type(press).__name__
    if not callable(getattr(press, "score", None)):
        raise ValueError(
            f"{name} has no `score` method: pass an object with score(module, hidden_states, keys, values, "
            "attentions, kwargs) -> [batch, KV heads, entries]."
        )
    check_choice("unit", unit, UNITS)
    modules = {spec.layer_idx: spec.module for spec in layout_of(model).evicting}
    embedding = getattr(base_model(model), "rotary_emb", None)

    @torch.no_grad()
    def score(evidence: Evidence) -> Score:
        layer = f"of layer {evidence.layer_idx}"
        if not evidence.exists_BHT.equal(evidence.valid_BT[:, None].expand_as(evidence.exists_BHT)):
            raise ValueError(
                f"{name} scores keys that all heads hold, and heads {layer} hold different entries already: "
                "evict once, after the prompt (regime='prefill'), or use a score of retain.scores."
            )
        if evidence.hidden_BTE is None:
            raise ValueError(f"{name} reads the attention input {layer}, and this evidence holds none.")
        if attentions and evidence.num_queries != evidence.num_seen:
            raise ValueError(
                f"{name} reads the attention of every query, and the evidence {layer} holds the last "
                f"{evidence.num_queries} of {evidence.num_seen}: record all queries at prefill."
            )
        module = modules[evidence.layer_idx]
        values_BHT = torch.zeros(evidence.keys_BHTD.shape[:3], device=evidence.keys_BHTD.device)
        with ExitStack() as undo:
            if embedding is not None and not hasattr(module, "rotary_emb"):
                module.rotary_emb = embedding
                undo.callback(delattr, module, "rotary_emb")
            for row, real_T in enumerate(evidence.valid_BT):
                if real_T.any():
                    values_BHT[row, :, real_T] = _score_one(evidence, row, real_T, module)
        return masked_score(values_BHT, evidence.valid_BT, unit)

    def _score_one(evidence: Evidence, row: int, real_T: Bool[Tensor, " T"], module: nn.Module) -> Tensor:
        """The press on one sequence alone: `[H, n]`, finite."""
        one = evidence.select_batch(slice(row, row + 1))
        assert one.hidden_BTE is not None
        hidden, positions = one.hidden_BTE[:, real_T], one.positions_BT[:, real_T]
        keys, values = one.keys_BHTD[:, :, real_T], one.values_BHTD[:, :, real_T]
        paid = attention_probs(one, 0, one.num_queries)[:, :, real_T][..., real_T] if attentions else None
        kwargs = {
            "hidden_states": hidden,
            "position_embeddings": None if embedding is None else embedding(hidden, positions),
            "position_ids": positions,
            "cache_position": torch.arange(keys.shape[2], device=keys.device),
            "attention_mask": None,
            "past_key_values": None,
        }
        got, want = press.score(module, hidden, keys, values, paid, kwargs), (1, *keys.shape[1:3])
        if not isinstance(got, Tensor) or got.shape != want or bool(got.isnan().any()):
            what = f"{list(got.shape)}, maybe with NaN" if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(
                f"{name}.score returned {what} for layer {evidence.layer_idx}; wanted a tensor {list(want)} "
                "without NaN: one number an entry and KV head, higher = keep."
            )
        limit = torch.finfo(torch.float32).max
        return got[0].to(keys.device).float().clamp(-limit, limit)

    score.__name__ = name
    return score

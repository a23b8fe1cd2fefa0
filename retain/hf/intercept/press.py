"""Scores entries by an object in the calling convention of kvpress, a "press".

That is any object with a `score(module, hidden_states, keys, values, attentions, kwargs)` method that returns
`[batch, KV heads, entries]`, higher = keep. Selection, budgets and protection treat its score like any other.
Presses know nothing of padding, so each is called on one sequence at a time, without its padding.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from retain.evidence import UNITS, Evidence, Score, masked_score
from retain.hf.model.decoder import base_model, layout_of
from retain.process.registry import check_choice


def press_score(model: nn.Module, press: Any, *, unit: str = "rank") -> Callable[[Evidence], Score]:
    """A press as a score.

    `score[b, :, i] = press.score(module, hidden_b, keys_b, values_b, None, kwargs_b)[0, :, i]`, with sequence
    b alone and without padding. `module` is the layer's attention module; for the time of the call it has the
    decoder's `rotary_emb`, which some presses read from it. `kwargs` holds `hidden_states`,
    `position_embeddings` (cosine and sine, in the model's precision), `position_ids` and `cache_position`.
    Attention weights are not computed.

    Args:
        model: the causal language model that the evidence comes from.
        unit: of its numbers; `rank` (nothing but their order inside a head) unless you know better.

    Returns:
        `evidence -> Score`; its values in float32, infinities at the ends of float32's range.

    Raises:
        ValueError: no `score` method or no such unit; when called, if heads hold different entries already,
            or if the press returns anything but one number an entry and KV head.
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
        assert evidence.hidden_BTE is not None
        if not evidence.exists_BHT.equal(evidence.valid_BT[:, None].expand_as(evidence.exists_BHT)):
            raise ValueError(
                f"{name} scores keys that all heads hold, and heads of layer {evidence.layer_idx} hold "
                "different entries already: evict once, after the prompt (when='prefill')."
            )
        module = modules[evidence.layer_idx]
        values_BHT = torch.zeros(evidence.keys_BHTD.shape[:3], device=evidence.keys_BHTD.device)
        with ExitStack() as undo:
            if embedding is not None and not hasattr(module, "rotary_emb"):
                module.rotary_emb = embedding
                undo.callback(delattr, module, "rotary_emb")
            for row, real_T in enumerate(evidence.valid_BT):
                if not real_T.any():
                    continue
                hidden, at = evidence.hidden_BTE[row, real_T][None], evidence.positions_BT[row, real_T][None]
                keys, values = (x[row, :, real_T][None] for x in (evidence.keys_BHTD, evidence.values_BHTD))
                kwargs = {
                    "hidden_states": hidden,
                    "position_embeddings": None if embedding is None else embedding(hidden, at),
                    "position_ids": at,
                    "cache_position": torch.arange(keys.shape[2], device=keys.device),
                }
                got, want = press.score(module, hidden, keys, values, None, kwargs), (1, *keys.shape[1:3])
                if got.shape != want or bool(got.isnan().any()):
                    raise ValueError(
                        f"{name}.score returned {list(got.shape)}, maybe with NaN, for layer "
                        f"{evidence.layer_idx}; wanted a tensor "
                        f"{list(want)} without NaN: one number an entry and KV head, higher = keep."
                    )
                limit = torch.finfo(torch.float32).max
                values_BHT[row, :, real_T] = got[0].to(keys.device).float().clamp(-limit, limit)
        return masked_score(values_BHT, evidence.valid_BT, unit)

    score.__name__ = name
    return score

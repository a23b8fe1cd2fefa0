"""Finds the rotary embedding of a model, where `retain.attention.rotary` can turn it back.

Families that turn halves of a head's dimensions, in every layer that evicts, are known
(`retain.hf.model.families`). The frequencies found must give the module's tables, near the beginning
and far beyond the trained length: those of some kinds change with the length.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.hf.model.families import FAMILIES, FULL
from retain.hf.model.layout import Layout


def rotary_of(embedding: Any, config: Any, layout: Layout) -> Rotary | None:
    """The embedding of a model's layers that evict, by the decoder's rotary module; None: it is not known to
    be one for all of them, or of the half convention."""
    if not FAMILIES[config.model_type].halves or embedding is None:
        return None
    # A module with one embedding for each kind of layer (Gemma-3) names buffers and calls by the kind.
    kind = None
    if not hasattr(embedding, "inv_freq"):
        if not layout.alone:  # layers of two kinds evict
            return None
        kind = FULL
    prefix = "" if kind is None else f"{kind}_"
    frequencies = getattr(embedding, f"{prefix}inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.device.type == "meta":
        return None
    scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    # A copy: asking some kinds about long sequences changes them. On the CPU, where products are exact.
    copied, on_cpu = copy.deepcopy(embedding).cpu(), Rotary(frequencies.detach().float().cpu(), scaling)
    trained = int(getattr(config, "max_position_embeddings", None) or 1)
    for positions in ([[0, 1, 2, 7]], [[3, 1, trained, 2 * trained]]):
        at = torch.tensor(positions)
        # Of text, all three are the same.
        asked = at.expand(3, *at.shape) if hasattr(embedding, "mrope_section") else at
        tables = copied(torch.zeros(1), asked, *([] if kind is None else [kind]))
        for table, ours in zip(tables, on_cpu.tables(at), strict=True):
            if 2 * table.shape[-1] == ours.shape[-1]:  # gpt-oss does not write each number twice
                table = torch.cat([table, table], dim=-1)
            if table.shape != ours.shape or not torch.allclose(table.float(), ours, atol=1e-5):
                return None
    return Rotary(frequencies.detach().float().clone(), scaling)

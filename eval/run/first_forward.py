"""Reads the first forward on a context once, and shows it to the cache of every cell.

No token of a first forward (a context, or its first chunk) depends on what a cache keeps: it attends densely
to what it reads. So one forward is run, and each cache is given it layer by layer, through the calls that
an attached model makes. It comes out as from its own `prefill`, to the bit; tests compare. Queries and
attention inputs are held while the cells are measured. A model with layers that are left to transformers
reads for every cell.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import base_model, layout_of
from retain.hf.version_names import CACHE


@dataclass(frozen=True)
class FirstForward:
    """Contexts that are read together, and the evidence of their first forward.

    Attributes:
        ids_BT, mask_BT: The contexts, left-padded, and which of their tokens are real.
        chunk: Tokens a forward; None: all at once.
        evidence: Of the first forward, every layer; None where each cache reads for itself.
    """

    ids_BT: Int[Tensor, "B T"]
    mask_BT: Int[Tensor, "B T"]
    chunk: int | None
    evidence: Sequence[Evidence] | None

    def into(self, cache: Cache) -> Cache:
        """Fills a new cache with the contexts, as `cache.prefill` does, and returns it."""
        if self.evidence is None:
            return cache.prefill(self.ids_BT, self.mask_BT, chunk_size=self.chunk)
        width, total = self.evidence[0].num_seen, self.ids_BT.shape[1]
        # Of each sequence's own tokens, as `Cache.prefill` counts them.
        positions_BT = (self.mask_BT.long().cumsum(-1) - 1).masked_fill(self.mask_BT == 0, 0)
        if width < total:
            cache.state.announce(total, self.mask_BT)
        with torch.no_grad():
            first = (side[:, :width] for side in (self.ids_BT, self.mask_BT, positions_BT))
            show(cache, self.evidence, *first)
            for start in range(width, total, width):
                stop = min(start + width, total)
                base_model(cache.model)(
                    input_ids=self.ids_BT[:, start:stop],
                    attention_mask=self.mask_BT[:, :stop],
                    position_ids=positions_BT[:, start:stop],
                    **{CACHE: cache},
                    use_cache=True,
                )
        return cache


def read_first_forward(
    model: Any,
    ids_BT: Int[Tensor, "B T"],
    mask_BT: Int[Tensor, "B T"],
    *,
    chunk: int | None = None,
    wanted: Collection[str] = (),
) -> FirstForward:
    """Reads contexts, or their first chunks, for caches that are still to come.

    Args:
        chunk: Tokens a forward; None: all at once.
        wanted: What the gates of these caches look at, over all sets.
    """
    if layout_of(model).alone:
        return FirstForward(ids_BT, mask_BT, chunk, None)
    width = min(chunk or ids_BT.shape[1], ids_BT.shape[1])
    cache = Cache(model, policy=None)
    cache.prefill(ids_BT[:, :width], mask_BT[:, :width], evict=False, hold_evidence=True, wanted=wanted)
    return FirstForward(ids_BT, mask_BT, chunk, cache.evidence)


def show(
    cache: Cache,
    shown: Sequence[Evidence],
    ids_BS: Int[Tensor, "B S"],
    mask_BS: Int[Tensor, "B S"],
    positions_BS: Int[Tensor, "B S"],
) -> None:
    """Tells an empty cache of a forward that has run: what the hooks of an attached model would have."""
    engine = cache.engine
    inputs = {"input_ids": ids_BS, "attention_mask": mask_BS, "position_ids": positions_BS}
    engine.begin(base_model(cache.model), inputs, shown[0].rotary)
    for layer in shown:
        assert layer.hidden_BTE is not None
        if engine.reads_stream and layer.stream_BTE is not None:
            engine.show_stream(layer.layer_idx, layer.stream_BTE)
        step = engine.expect(layer.layer_idx, layer.hidden_BTE)
        entries = (layer.queries_BQSD, layer.keys_BHTD, layer.values_BHTD)
        cache.update(*entries[1:], layer.layer_idx)
        how: dict[str, Any] = {"scaling": layer.scaling, "soft_cap": layer.soft_cap}
        # The layer's output was needed by the next one alone: a tensor of its shape stands for it.
        engine.attention(step, *entries, partial(_no_output, layer.queries_BQSD), **how)
    engine.finish()


def _no_output(queries_BQSD: Tensor) -> tuple[Tensor, None]:
    return queries_BQSD, None

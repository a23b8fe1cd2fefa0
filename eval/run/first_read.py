"""The first forward on a context, read once and shown to every cell's cache.

In: what a cache reads first: a context, or its first chunk. Out: caches that have read it, each under its own
policy and budget. No token of a first forward depends on what a cache keeps: it attends densely to what it
reads, so one model reads it once, and every cache is told, layer by layer, through the same calls that an
attached model makes, what it would have been told.

The one decision taken here: what is shown is what was computed, not computed again, so that a cache comes out
as it would have from its own `prefill`, to the bit (tests compare). The price is memory: queries and
attention inputs of the first forward are held while its cells are measured, as the shared prefill holds them.
A layer that is left to transformers would have to be told in its own way: a model that has such layers reads
for every cell.
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


@dataclass(frozen=True)
class FirstRead:
    """Contexts that are read together, and what their first forward came to.

    Attributes:
        ids_BT, mask_BT: The contexts, left-padded, and which of their tokens are real.
        chunk: Tokens a forward; None: all at once.
        shown: Of the first forward, every layer; None where each cache reads for itself.
    """

    ids_BT: Int[Tensor, "B T"]
    mask_BT: Int[Tensor, "B T"]
    chunk: int | None
    shown: Sequence[Evidence] | None

    def into(self, cache: Cache) -> Cache:
        """Have a new cache read the contexts, as `cache.prefill` does.

        Returns:
            That cache.
        """
        if self.shown is None:
            return cache.prefill(self.ids_BT, self.mask_BT, chunk_size=self.chunk)
        width, total = self.shown[0].num_seen, self.ids_BT.shape[1]
        positions_BT = _positions(self.mask_BT)
        if width < total:
            cache.state.announce(total, self.mask_BT)
        with torch.no_grad():
            show(cache, self.shown, self.ids_BT[:, :width], self.mask_BT[:, :width], positions_BT[:, :width])
            for start in range(width, total, width):
                stop = min(start + width, total)
                base_model(cache.model)(
                    input_ids=self.ids_BT[:, start:stop],
                    attention_mask=self.mask_BT[:, :stop],
                    position_ids=positions_BT[:, start:stop],
                    past_key_values=cache,
                    use_cache=True,
                )
        return cache


def read_first(
    model: Any,
    ids_BT: Int[Tensor, "B T"],
    mask_BT: Int[Tensor, "B T"],
    *,
    chunk: int | None = None,
    wanted: Collection[str] = (),
) -> FirstRead:
    """Read contexts, or their first chunks, for caches that are still to come.

    Args:
        model: Attached.
        ids_BT, mask_BT: As in `FirstRead`.
        chunk: Tokens a forward; None: all at once.
        wanted: What the gates of these caches look at, of all sets together.
    """
    if layout_of(model).alone:
        return FirstRead(ids_BT, mask_BT, chunk, None)
    width = min(chunk or ids_BT.shape[1], ids_BT.shape[1])
    cache = Cache(model, policy=None)
    cache.prefill(ids_BT[:, :width], mask_BT[:, :width], evict=False, hold_evidence=True, wanted=wanted)
    return FirstRead(ids_BT, mask_BT, chunk, cache.evidence)


def show(
    cache: Cache,
    shown: Sequence[Evidence],
    ids_BS: Int[Tensor, "B S"],
    mask_BS: Int[Tensor, "B S"],
    positions_BS: Int[Tensor, "B S"],
) -> None:
    """Tell an empty cache of a forward that has run: what the hooks of an attached model would have."""
    engine = cache.engine
    given = {"input_ids": ids_BS, "attention_mask": mask_BS, "position_ids": positions_BS}
    engine.begin(base_model(cache.model), given, shown[0].rotary)
    for layer in shown:
        assert layer.hidden_BTE is not None
        if engine.reads_stream and layer.stream_BTE is not None:
            engine.show_stream(layer.layer_idx, layer.stream_BTE)
        step = engine.expect(layer.layer_idx, layer.hidden_BTE)
        queries, keys, values = layer.queries_BQSD, layer.keys_BHTD, layer.values_BHTD
        cache.update(keys, values, layer.layer_idx)
        # What the layer gave was needed by the next one alone, which has been told.
        engine.attention(
            step,
            *(queries, keys, values),
            partial(_as_given, queries),
            scaling=layer.scaling,
            soft_cap=layer.soft_cap,
        )
    engine.finish()


def _positions(mask_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Of each sequence's own tokens, as `Cache.prefill` counts them."""
    return (mask_BT.long().cumsum(-1) - 1).masked_fill(mask_BT == 0, 0)


def _as_given(queries: Tensor) -> tuple[Tensor, None]:
    """What a layer's own attention would have come to, where nobody reads it: something of its shape."""
    return queries, None

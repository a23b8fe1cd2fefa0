"""The interface between a model's hooks and a cache that stands before its attention.

`retain.hf.intercept.attach` calls an `Interceptor` and knows nothing else of a cache. `retain.Cache` holds
one that evicts, `retain.hf.intercept.lookahead_pass.ReadCache` is one that only reads. torch.compile breaks
its graphs at the functions of this module, and leaves alone what they call: what is held changes from token
to token, and a graph of it would be compiled for each. Attention modules read their own number between two
breaks, so one graph a layer is compiled of those: of a model with more layers than
`torch._dynamo.config.recompile_limit` (8), the others run as written.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache

from retain.attention.rotary import Rotary
from retain.cache.dense_view import tokens_last
from retain.hf.intercept.attention_names import AttentionStep

outside_graphs = torch.compiler.disable(reason="retain.Cache runs outside of graphs")


@dataclass(frozen=True, eq=False)
class Step(AttentionStep):
    """What travels from an attention module's hook to the attention function.

    Args:
        interceptor: whose attention it is.
        layer_idx: index of the layer in the model.
        hidden_BSE: attention input, after the input layer norm.
        stream_BSE: the same before that norm; None when nobody asked for it.
    """

    interceptor: "Interceptor"
    layer_idx: int
    hidden_BSE: Tensor
    stream_BSE: Tensor | None = None

    def left_padded(self, valid_BS: Bool[Tensor, "B S"]) -> "Step":
        """The same with all padding before its sequences' tokens."""
        own = self.stream_BSE
        stream_BSE = None if own is None else tokens_last(own, valid_BS.to(own.device))
        hidden_BSE = tokens_last(self.hidden_BSE, valid_BS.to(self.hidden_BSE.device))
        return replace(self, hidden_BSE=hidden_BSE, stream_BSE=stream_BSE)

    @outside_graphs
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Callable[[], Any], given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        return self.interceptor.attention(
            self, query, key, value, dense, scaling=given.get("scaling"), soft_cap=given.get("softcap")
        )


class Interceptor:
    """Receives what a model's hooks see of a forward, and computes the attention of layers that evict."""

    @property
    def reads_stream(self) -> bool:
        """Whether decoder layers are asked for their residual stream."""
        return False

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included."""
        raise NotImplementedError

    def begin(self, decoder: nn.Module, given: Mapping[str, Any], rotary: Rotary | None = None) -> None:
        """Prepare for a forward of a decoder.

        Args:
            decoder: that is called.
            given: its arguments by name.
            rotary: its rotary embedding, where it is understood.
        """

    def show_stream(self, layer_idx: int, stream_BSE: Tensor) -> None:
        """Receive a layer's residual stream, if `reads_stream`."""

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Receive an attention module's input before it runs."""
        return Step(self, layer_idx, hidden_BSE)

    def attention(
        self,
        step: Step,
        queries_BQSD: Tensor,
        keys_BHSD: Tensor,
        values_BHSD: Tensor,
        dense: Callable[[], tuple[Tensor, Tensor | None]],
        *,
        scaling: float | None,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention; `dense` runs what the model would have run."""
        raise NotImplementedError

    def finish(self) -> None:
        """End a forward that went through."""

    def check_ids(self, ids: Any, attention_mask: Any) -> None:
        """Refuse what `generate` is asked to go on from, if that is not what was read.

        Raises:
            ValueError: ids that leave out what was read, or are others; or a broken cache.
        """

    def generating(
        self, width: int | None, attention_mask: Tensor | None
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        """Accompany a `generate`; gives a function that is to hear which sequences have ended.

        Args:
            width: tokens, padding included, of a prompt that it reads in chunks; None: at once.
            attention_mask: of that prompt.
        """
        raise NotImplementedError


class InterceptedCache(TransformersCache):
    """A cache of transformers' kind that an attached model shows its attention to."""

    engine: Interceptor

    # Models call it themselves, with a layer's number, for each of which a graph would be compiled.
    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

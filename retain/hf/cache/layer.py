"""A layer of `retain.Cache` that evicts, as transformers sees it.

Lengths and mask sizes are those of a cache from which nothing was evicted. `update` stores nothing but a
prefill's dense tensors and returns what it was given; the attention function, which knows the padding, does
the rest.
"""

import copy
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from retain.attention.recent import Recent
from retain.cache.equal_rows import StepRows
from retain.cache.static_rows import StaticRows
from retain.cache.store import RaggedStore

# Decoded tokens whose queries and attention inputs are held before their metadata is stored, at most.
MOST_RECENT = 128


class Layer(CacheLayerMixin):
    """A layer: nothing, dense keys and values (a prefill that was not evicted), or a ragged store.

    Args:
        state: of the cache (`retain.hf.cache.state.State`).
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False  # keeps assisted decoding away: its prefill holds speculative tokens

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.store: RaggedStore | None = None
        self.static: StaticRows | None = None  # while steps are decoded in one graph
        self.quick: StepRows | None = None  # of a step that appends and attends in one call
        self.recent = Recent()
        self.stream_BSE: Tensor | None = None  # from the decoder layer's hook to its attention's, no longer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.static is not None:
            return key_states, value_states
        if self.state.call is None:
            raise ValueError(
                "this model is not attached, so the cache would not be used: call retain.attach(model) first."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.state.num_seen == 0:
            self.hold(key_states, value_states)
        return key_states, value_states

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold a prefill's dense keys and values."""
        self.keys, self.values = keys.detach(), values.detach()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Only the new tokens' square is ever looked at: the past is ragged, and needs no mask.
        # While steps run in one graph, no number may differ from prompt to prompt.
        return query_length, self.state.num_seen if self.static is None else 1

    def get_seq_length(self) -> Any:
        if self.static is not None:
            return self.static.pool.seen_1 + self.static.pool.clock_1
        return self.state.num_seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a prefill that was not evicted."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def fork(self, state: Any) -> "Layer":
        """A copy for another cache: of a store a copy, dense tensors (never changed in place) are shared."""
        other = copy.copy(self)
        other.state = state
        other.store = None if self.store is None else self.store.fork()
        other.recent = self.recent.fork()
        return other

    def select_batch(self, idx: Int[Tensor, " N"]) -> None:
        """Keep the sequences `idx`, in that order."""
        self.recent = self.recent.select_batch(idx)
        if self.store is not None:
            self.store = self.store.select_batch(idx)
        elif self.keys is not None and self.values is not None:
            self.hold(*(tensor.index_select(0, idx.to(tensor.device)) for tensor in self.dense()))

"""One evicting layer of `retain.Cache`, as transformers sees it.

Lengths and mask sizes are those of a cache from which nothing was evicted. `update` stores nothing but a
prefill's dense tensors and returns what it was given; the attention function, which knows the padding, does
the rest. Queries and attention inputs of the last tokens (`Recent`) are kept until an eviction has looked at
them: a decoding step only puts references in a list, so that what an eviction costs is paid when it happens.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from retain.cache.equal_rows import StepRows
from retain.cache.layer_store import Store
from retain.cache.static_rows import StaticRows

# Decoded tokens whose queries and attention inputs are held before they are looked at, where no eviction is
# due.
MOST_UNNOTED = 128


def joined(chunks: list[Tensor], dim: int = 1) -> Tensor:
    """Tokens that came in several forwards, in one tensor; a view where they came at once."""
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


@dataclass(eq=False)
class Recent:
    """Of one layer; the last token seen is the last of each list.

    Args:
        queries: `[B, Q, s, D]` a forward, after norm and RoPE.
        hidden: `[B, s, E]` a forward, attention inputs.
        stream: `[B, s, E]` a forward, the residual stream before them.
    """

    queries: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)

    @property
    def num_queries(self) -> int:
        """Tokens whose queries are held."""
        return sum(chunk.shape[2] for chunk in self.queries)

    def last_queries(self, num_tokens: int) -> Float[Tensor, "B Q s D"]:
        """Queries of the last tokens; a view where they came at once."""
        assert 0 < num_tokens <= self.num_queries, (
            f"{num_tokens} queries were asked for, {self.num_queries} held"
        )
        whole = joined(self.queries, 2)
        return whole[:, :, whole.shape[2] - num_tokens :]

    def keep_queries(self, num_tokens: int) -> None:
        """Let go of all queries but those of the last tokens."""
        if num_tokens == 0:
            self.queries = []
        elif num_tokens < self.num_queries:
            self.queries = [self.last_queries(num_tokens).clone()]  # a view would hold what it is a view of

    def cut(self, num_tokens: int) -> "Recent":
        """The same without the last `num_tokens` tokens."""

        def left(chunks: list[Tensor], dim: int) -> list[Tensor]:
            whole = joined(chunks, dim) if chunks else None
            kept = 0 if whole is None else max(0, whole.shape[dim] - num_tokens)
            return [] if whole is None else [whole.narrow(dim, 0, kept).clone()]

        return Recent(left(self.queries, 2), left(self.hidden, 1), left(self.stream, 1))

    def fork(self) -> "Recent":
        """The same, to go on apart: no tensor here is changed in place."""
        return Recent(list(self.queries), list(self.hidden), list(self.stream))

    def select_batch(self, idx: Int[Tensor, " N"]) -> "Recent":
        """Of some of the sequences; chunks are joined, since beams ask for this at every step."""

        def chosen(chunks: list[Tensor], dim: int) -> list[Tensor]:
            if len(chunks) > 1:
                chunks[:] = [joined(chunks, dim)]
            return [chunk.index_select(0, idx.to(chunk.device)) for chunk in chunks]

        return Recent(chosen(self.queries, 2), chosen(self.hidden, 1), chosen(self.stream, 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages behind what is held here."""
        held = (*self.queries, *self.hidden, *self.stream)
        storages = {chunk.untyped_storage().data_ptr(): chunk.untyped_storage().nbytes() for chunk in held}
        return sum(storages.values())


class Layer(CacheLayerMixin):
    """One layer: nothing, dense keys and values (a prefill that was not evicted), or a ragged store, with
    what the last tokens showed.

    Args:
        window: a query sees only the last `window` entries, itself included; None for all.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False  # keeps assisted decoding away: its prefill holds speculative tokens

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.store: Store | None = None
        self.static: StaticRows | None = None  # while steps are decoded in one graph
        self.quick: StepRows | None = None  # of a step that appends and attends in one call
        self.recent = Recent()
        self.stream_BSE: Tensor | None = None  # from the decoder layer's hook to its attention's, no longer
        self.seen = 0
        self.expected = False
        # As the model's attention was last called.
        self.scaling: float | None = None
        self.soft_cap: float | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.static is not None:
            return key_states, value_states
        if not self.expected:
            raise ValueError(
                "this model is not attached, so the cache would not be used: call retain.attach(model) first."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.seen == 0:
            self.hold(key_states, value_states)
        return key_states, value_states

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold a prefill's dense keys and values."""
        self.keys, self.values = keys.detach(), values.detach()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Only the new tokens' square is ever looked at: the past is ragged, and needs no mask.
        # While steps run in one graph, no number may differ from prompt to prompt.
        return query_length, self.seen if self.static is None else 1

    def get_seq_length(self) -> Any:
        if self.static is not None:
            return self.static.pool.seen_1 + self.static.pool.clock_1
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a prefill that was not evicted."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def check(self, keep_BHT: Tensor | None) -> None:
        """Refuse a keep mask that is not one of the dense entries.

        Raises:
            ValueError: another shape or type.
        """
        B, H, T = self.dense()[0].shape[:3]
        if keep_BHT is not None and (keep_BHT.shape != (B, H, T) or keep_BHT.dtype != torch.bool):
            raise ValueError(
                f"keep mask is {keep_BHT.dtype} {tuple(keep_BHT.shape)}, but the layer holds {B} sequences x "
                f"{H} KV heads x {T} entries: pass a bool tensor [{B}, {H}, {T}], True = kept."
            )

    def held_BH(self, seen_B: Int[Tensor, " B"], num_heads: int) -> Int[Tensor, "B H"]:
        """Entries that each sequence and KV head holds, on the CPU: all that were seen, where none went."""
        if self.store is None:
            return seen_B[:, None].expand(-1, num_heads)
        return self.store.lengths_BH.cpu().long()

    def fork(self) -> "Layer":
        """A layer that can go its own way: a store is copied, dense tensors (never changed in place) are
        shared."""
        other = copy.copy(self)
        other.store = None if self.store is None else self.store.fork()
        other.recent = self.recent.fork()
        return other

    def select_batch(self, idx: Int[Tensor, " N"]) -> None:
        self.recent = self.recent.select_batch(idx)
        if self.store is not None:
            self.store = self.store.select_batch(idx)
        elif self.keys is not None and self.values is not None:
            self.hold(*(tensor.index_select(0, idx.to(tensor.device)) for tensor in self.dense()))

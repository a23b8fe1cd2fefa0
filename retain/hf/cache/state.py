"""The state of a conversation: the tokens that a cache has seen, the entries that it holds, its settings.

A change that breaks off midway (no memory left) leaves a state that refuses every further use.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.attention.recent import Recent
from retain.cache.precision import Precision
from retain.cache.store import RaggedStore, stacked
from retain.correction.cuts import correct_, cut_
from retain.correction.merge import Merge
from retain.eviction import Arriving, BoundPolicy, When
from retain.evidence import Evidence, Stock
from retain.hf.cache.layer import Layer
from retain.hf.intercept.forward_call import Call
from retain.hf.model import pass_through_layers
from retain.hf.model.layout import Layout
from retain.protection import pinned_mask


@dataclass(frozen=True, eq=False)
class History:
    """All tokens of a batch, padding included.

    Args:
        valid_BT: True on real tokens.
        positions_BT: int64 RoPE positions.
        last_B: position of the last real token of each sequence, -1 where there is none yet.
    """

    valid_BT: Bool[Tensor, "B T"]
    positions_BT: Int[Tensor, "B T"]
    last_B: Int[Tensor, " B"]

    @classmethod
    def of(cls, call: Call) -> "History":
        """The history after the first call."""
        return cls(call.mask_BT, call.positions_BS, _last(call.mask_BT, call.positions_BS))

    def after(self, call: Call) -> "History":
        """The history once this call has gone through."""
        last_B = call.positions_BS[:, -1]
        if call.valid_BS is not None:
            last_B = torch.maximum(_last(call.valid_BS, call.positions_BS), self.last_B.to(last_B.device))
        return History(call.mask_BT, self._then(call.positions_BS), last_B)

    def after_decoding(self, came: int) -> "History":
        """The history after `came` tokens that were decoded in a graph."""
        positions_BN = self.last_B[:, None] + torch.arange(1, came + 1, device=self.last_B.device)
        valid_BT = torch.cat([self.valid_BT, self.valid_BT.new_ones(positions_BN.shape)], dim=1)
        return History(valid_BT, self._then(positions_BN), self.last_B + came)

    def _then(self, positions_BS: Tensor) -> Tensor:
        return torch.cat([self.positions_BT, positions_BS.to(self.positions_BT.device)], dim=1)

    @property
    def num_seen(self) -> int:
        return self.valid_BT.shape[1]

    @property
    def batch_size(self) -> int:
        return self.valid_BT.shape[0]

    @cached_property
    def lengths_B(self) -> list[int]:
        """Real tokens of each sequence (asks the device once)."""
        return self.valid_BT.sum(-1).tolist()

    def select_batch(self, idx: Int[Tensor, " N"]) -> "History":
        """The sequences `idx`, in that order."""
        idx = idx.to(self.valid_BT.device)
        return History(self.valid_BT[idx], self.positions_BT[idx], self.last_B[idx])

    def cut(self, length: int) -> "History":
        """The first `length` tokens."""
        valid_BT, positions_BT = self.valid_BT[:, :length], self.positions_BT[:, :length]
        return History(valid_BT, positions_BT, _last(valid_BT, positions_BT))


def _last(valid_BT: Bool[Tensor, "B T"], positions_BT: Int[Tensor, "B T"]) -> Int[Tensor, " B"]:
    return positions_BT.masked_fill(~valid_BT, -1).amax(1)


class State:
    """State of a `retain.Cache`; `retain.hf.cache.engine.Engine` changes it during forwards.

    Args:
        layout: the model's layers.
        bound: decides what is kept.
        when: decides when.
        seeds, pinned: as the user stated them.
    """

    def __init__(
        self,
        layout: Layout,
        bound: BoundPolicy,
        when: When,
        *,
        seeds: Sequence[int] | None,
        pinned: Any,
    ):
        self.layout, self.specs = layout, layout.evicting
        self.bound_policy, self.when = bound, when
        # As stated; a prompt that `generate` repeats has them repeated, until a reset.
        self.stated: tuple[Sequence[int] | None, Any] = (seeds, pinned)
        self.layers: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything that was read."""
        layout = self.layout
        # In place: transformers' side of the cache holds the same list.
        blank = layout.blank_layers()
        self.layers[:] = [
            blank[idx] if idx in layout.alone else Layer(self) for idx in range(len(layout.kinds))
        ]
        self.seeds, self.pinned = self.stated
        none = torch.zeros(0, 0, dtype=torch.int64)
        self.history = History(none.bool(), none, none.flatten())
        self.first_ids_BT: Int[Tensor, "B P"] | None = None  # of the first forward; None: embeddings, a file
        self.evidence: list[Evidence] | None = None
        self.call: Call | None = None  # the forward that runs
        # Padding of the whole prompt, while it is read in chunks.
        self.prompt_mask_BT: Bool[Tensor, "B T"] | None = None
        self.prompt_read = False  # all of the first prompt
        self.last_due = 0  # tokens seen at the last eviction that was due, or at the prompt's end
        self.recorded = 0  # tokens of which layers have stored the metadata that later evictions read
        self.broken = False  # a change broke off midway
        self.evictions = 0  # times that entries were evicted
        self.evicted_at = 0  # tokens seen at the last of them
        self.packed_at = 0  # tokens seen when entries were last packed, where precision says so
        self.decoded: str | None = None  # how a `generate` that was to compile its steps ran
        self.held_whole: list[int] = []  # short sequences that the last eviction left whole

    @property
    def ragged(self) -> list[Layer]:
        """The layers that evict, in the order of `specs`; the others are transformers'."""
        return [self.layers[spec.layer_idx] for spec in self.specs]

    @property
    def stores(self) -> list[RaggedStore]:
        """The stores of layers that have been cut, in the order of `specs`."""
        return [layer.store for layer in self.ragged if layer.store is not None]

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return self.history.num_seen

    @property
    def batch_size(self) -> int:
        return self.history.batch_size

    @property
    def valid_BT(self) -> Bool[Tensor, "B T"]:
        """True on the real tokens among those seen."""
        return self.history.valid_BT

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """RoPE position of every token seen."""
        return self.history.positions_BT

    @property
    def element_size(self) -> int:
        """Bytes of a number of the entries, as far as it is known."""
        return (self.stores or self.specs)[0].dtype.itemsize

    @property
    def prompt_width(self) -> int:
        """Tokens of a prompt that is read in chunks, padding included; 0: it is read at once."""
        return 0 if self.prompt_mask_BT is None else self.prompt_mask_BT.shape[1]

    @property
    def evicts_again(self) -> bool:
        """True if it evicts after the first prompt too."""
        return self.when.again and not self.bound_policy.keeps_all

    def is_read(self, call: Call) -> bool:
        """True if a call is part of a prompt or a turn, rather than a decoding step."""
        return call.is_prefill or not self.prompt_read or call.positions_BS.shape[1] > 1

    def num_queries(self, history: History) -> int:
        """The number of last tokens whose queries a later eviction reads: of padding before all none."""
        queries = self.bound_policy.wants.queries
        queries = history.num_seen - self.last_due if queries is None else queries
        return min(queries, max(history.lengths_B))

    def due(self, call: Call) -> bool:
        """True if an eviction is due after this call."""
        if self.bound_policy.keeps_all:
            return False
        seen = call.mask_BT.shape[1]
        ends = not self.prompt_read and seen >= self.prompt_width
        tokens = seen - self.last_due if self.prompt_read else 0
        return self.when.due(read=self.is_read(call), prompt_ends=ends, tokens=tokens)

    def check_whole(self) -> None:
        """Refuse to go on after a forward or a change that broke off.

        Raises:
            ValueError: it did.
        """
        if self.broken or self.call is not None:
            raise ValueError(
                "an earlier forward or change broke off and left this cache half-updated: make a new one, or "
                "reset() it."
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While layers are changed between forwards: an error in here leaves the cache refused."""
        self.broken = True
        yield
        self.broken = False

    def held_BL(self) -> tuple[tuple[int, ...], ...]:
        """Entries that each sequence holds in each layer, in one transfer."""
        counts = [store.lengths_BH.sum(-1) for store in self.stores]
        held = torch.stack([count.to(counts[0].device) for count in counts], dim=1)
        return tuple(tuple(row) for row in held.tolist())

    def arriving(self, valid_BT: Bool[Tensor, "B T"], stock: Stock | None = None) -> Arriving:
        """The batch as an eviction is told of it before a layer is scored; pinned spans count each sequence's
        real tokens of the first prompt."""
        pinned_BT = None
        if self.pinned is not None:
            pinned_BT = pinned_mask(self.pinned, self.with_prompt(valid_BT))[:, : valid_BT.shape[1]]
        return Arriving(valid_BT, self.element_size, stock, self.seeds, pinned_BT)

    def with_prompt(self, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B whole"]:
        """Padding of the tokens seen, and of those of the prompt that are still to come."""
        seen = valid_BT.shape[1]
        if self.prompt_mask_BT is None or self.prompt_width <= seen:
            return valid_BT
        return torch.cat([valid_BT, self.prompt_mask_BT[:, seen:].to(valid_BT.device)], dim=1)

    def cut_dense(
        self,
        layer: Layer,
        keep_BHT: Tensor | None = None,
        metadata: dict[str, Tensor] | None = None,
        correction: Merge | None = None,
        precision: Precision | None = None,
        pack: bool = True,
    ) -> RaggedStore:
        """Cut a layer's dense keys and values to a store, corrected and packed, and free them.

        Args:
            keep_BHT: None keeps all but padding.
            metadata: columns `[B, H, T, ...]` that are stored with the entries.
            precision: of the entries that stay; None: as they are.
            pack: False where entries may still be evicted, so that they are packed later.
        """
        keys, values = layer.dense()
        if not self.num_seen:  # while the first forward runs
            assert self.call is not None
            valid_BT, positions_BT = self.call.mask_BT, self.call.positions_BS
        else:
            valid_BT, positions_BT = self.valid_BT, self.positions_BT
        exists_BHT = valid_BT.to(keys.device)[:, None].expand(keys.shape[:3])
        correction = None if keep_BHT is None else correction
        keep_BHT = exists_BHT if keep_BHT is None else keep_BHT.to(keys.device) & exists_BHT
        positions_BT = positions_BT.to(keys.device)
        store = RaggedStore.from_dense(keys, values, positions_BT, keep_BHT, side=metadata)
        if correction is not None:
            correct_(store, keys, values, exists_BHT, keep_BHT, correction)
        store.precision = precision
        if pack:
            store.pack_()
        layer.keys = layer.values = None
        return store

    def hold_ragged(self) -> None:
        """Move layers that still hold a prompt densely to stores, which keep all of it."""
        for layer in self.ragged:
            if layer.store is None:
                layer.store = self.cut_dense(layer)

    def cut_all(
        self,
        keep: Sequence[Tensor],
        correction: Merge | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Cut all dense layers by keep masks, each of which is checked before the first layer is cut.

        Raises:
            ValueError: a mask of another shape or type.
        """
        for layer, keep_BHT in zip(self.ragged, keep, strict=True):
            B, H, T = shape = layer.dense()[0].shape[:3]
            if keep_BHT.shape != shape or keep_BHT.dtype != torch.bool:
                raise ValueError(
                    f"keep mask is {keep_BHT.dtype} {tuple(keep_BHT.shape)}, but the layer holds {B} "
                    f"sequences x {H} KV heads x {T} entries: pass a bool tensor [{B}, {H}, {T}]."
                )
        self.evidence = None  # it shares the dense tensors, which each layer frees in turn
        with self.changing():
            for layer, keep_BHT in zip(self.ragged, keep, strict=True):
                layer.store = self.cut_dense(layer, keep_BHT, correction=correction, precision=precision)
        self.packed_at = self.num_seen
        self.count_eviction(sum(self.history.lengths_B) * self.layout.num_kv_heads)

    def count_eviction(self, held_before: int) -> None:
        """Count an eviction, if any entry was evicted."""
        if sum(map(sum, self.held_BL())) < held_before:
            self.evictions, self.evicted_at = self.evictions + 1, self.num_seen

    def end_prompt(self) -> None:
        """Free what only an eviction from the first prompt reads."""
        self.prompt_read, self.prompt_mask_BT = True, None
        if not self.when.again:
            for layer in self.ragged:
                layer.recent = Recent()
                if layer.store is not None:
                    layer.store.drop_side_()
        for idx in self.layout.alone:
            pass_through_layers.trim_(self.layers[idx])

    def shrink(self, lower: Sequence[Tensor | None], rows: list[int] | None) -> None:
        """Evict from lower layers what a cascade no longer keeps, one layer at a time.

        Args:
            lower: keep masks over the entries of these sequences; None keeps a layer.
            rows: the sequences; None for all.
        """
        for store, keep_N in zip(self.stores, lower, strict=False):
            if keep_N is None:
                continue
            keep_N = keep_N.to(store.device)
            if rows is not None and len(rows) < len(store.lengths_BH):
                inside_B = torch.zeros(len(store.lengths_BH), dtype=torch.bool, device=keep_N.device)
                inside_B[rows] = True
                inside_N = inside_B[store.rows_N() // store.num_heads]
                keep_N = torch.ones_like(inside_N).masked_scatter_(inside_N, keep_N)
            cut_(store, keep_N, self.bound_policy.correction)

    def fork(self) -> "State":
        """A copy. Of a dense prefill nothing is copied until a fork evicts."""
        other, alone = copy.copy(self), self.layout.alone
        other.layers = [
            copy.deepcopy(layer) if idx in alone else layer.fork(other)
            for idx, layer in enumerate(self.layers)
        ]
        other.evidence = None if self.evidence is None else list(self.evidence)
        return other

    def select_batch(self, indices: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        rows = indices.tolist()
        with self.changing():
            for idx in self.layout.alone:
                self.layers[idx].reorder_cache(indices)
            for layer in self.ragged:
                layer.select_batch(indices)
            if self.evidence is not None:
                self.evidence = [evidence.select_batch(indices) for evidence in self.evidence]
            if self.seeds is not None:
                self.seeds = [self.seeds[row] for row in rows]
            if self.pinned is not None:
                self.pinned = [self.pinned[row] for row in rows]
            self.held_whole = [place for place, row in enumerate(rows) if row in self.held_whole]
            self.history = self.history.select_batch(indices)
            if self.first_ids_BT is not None:
                self.first_ids_BT = self.first_ids_BT[indices.to(self.first_ids_BT.device)]

    def cannot_crop(self, length: int) -> str | None:
        """The reason why the conversation cannot go back to a length; None if it can."""
        if length < self.evicted_at:
            return f"entries were evicted when it had seen {self.evicted_at}"
        if not self.prompt_read:
            return "the first prompt is still being read"
        if self.evicts_again:
            wants, recent = self.bound_policy.wants, self.ragged[0].recent
            if wants.running:
                return "statistics of all queries are kept, the last ones' among them"
            if length < self.last_due:
                return f"an eviction was due when it had seen {self.last_due}"
            left = max(0, recent.num_tokens("queries") - (self.num_seen - length))
            if left < self.num_queries(self.history.cut(length)):
                return "later evictions read queries from before it, which are freed"
        if any(left.window is None or self.num_seen >= left.window for left in self.layout.alone.values()):
            return "a layer with a recurrent state, or whose sliding window is full, cannot forget tokens"
        return None

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`; `cannot_crop` was asked."""
        cut, forgotten = self.history.cut(length), self.num_seen - length
        with self.changing():
            for left in (self.layers[idx] for idx in self.layout.alone):
                left.crop(-forgotten)
                pass_through_layers.trim_(left)
            for layer in self.ragged:
                layer.recent.forget(forgotten)
                if layer.store is not None:
                    layer.store.crop_(cut.last_B + 1)
                else:
                    layer.hold(*(tensor[:, :, :length].clone() for tensor in layer.dense()))
            self.evidence, self.history = None, cut
            self.first_ids_BT = None if self.first_ids_BT is None else self.first_ids_BT[:, :length]
        for name in ("packed_at", "last_due", "recorded"):
            setattr(self, name, min(getattr(self, name), length))


def concat(parts: Sequence[State], slack: int) -> State:
    """Stack conversations along the batch, which have all seen equally many tokens; the parts are used up.

    Args:
        parts: of one model.
        slack: free entries per row for new tokens.
    """
    bound = BoundPolicy(" + ".join(sorted({part.bound_policy.name for part in parts})))
    whole = State(parts[0].layout, bound, When(), seeds=None, pinned=None)
    for part in parts:
        part.hold_ragged()
        for store in part.stores:
            store.drop_side_()
    for idx in whole.layout.alone:
        whole.layers[idx] = pass_through_layers.concat([part.layers[idx] for part in parts])
    for number, spec in enumerate(whole.specs):
        layer = whole.layers[spec.layer_idx]
        layer.store = stacked([part.stores[number] for part in parts], slack)
    names = ("valid_BT", "positions_BT", "last_B")
    whole.history = History(*(torch.cat([getattr(part.history, name) for part in parts]) for name in names))
    whole.prompt_read = True
    whole.last_due = whole.recorded = whole.num_seen
    whole.evictions = max(part.evictions for part in parts)
    whole.evicted_at = max(part.evicted_at for part in parts)
    row = 0
    for part in parts:
        whole.held_whole += [row + place for place in part.held_whole]
        row += part.batch_size
    return whole

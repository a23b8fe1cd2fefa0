"""The state of a conversation: what a cache has seen, token by token, what it holds, what it was asked for.

A change that breaks off midway (no memory left) leaves a state that says so at its next use, and never one
that goes on with half of its layers cut.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from retain.budget.statement import Stock
from retain.cache.dense_view import last_tokens
from retain.cache.layer_store import Store
from retain.cache.precision import Precision
from retain.cache.store import RaggedStore
from retain.correction.cuts import correct_
from retain.correction.merge import Merge
from retain.eviction import Arriving, BoundPolicy
from retain.evidence import Evidence, in_reach
from retain.hf.cache.layer import Layer
from retain.hf.cache.regime import Regime
from retain.hf.intercept.forward_call import Call
from retain.hf.model import pass_through_layers
from retain.hf.model.layout import Layout
from retain.protection import pinned_mask


@dataclass(eq=False)
class History:
    """All tokens of a batch, padding included: which are padding, their positions, their ids.

    Chunks are kept as they came and joined when asked for, so that a decoding step copies nothing.

    Args:
        valid_BT: True on real tokens.
        position_chunks: int64 RoPE positions `[B, S]` of each call.
        id_chunks: token ids of each call; None once a call passed embeddings.
        last_B: position of the last real token of each sequence, -1 where there is none yet.
    """

    valid_BT: Bool[Tensor, "B T"]
    position_chunks: list[Tensor]
    id_chunks: list[Tensor] | None
    last_B: Int[Tensor, " B"]

    _lengths_B: list[int] | None = field(default=None, repr=False)
    _first_of_last: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, call: Call) -> "History":
        """What the first call shows."""
        last_B = _last(call.mask_BT, call.positions_BS)
        ids = None if call.token_ids_BS is None else [call.token_ids_BS]
        return cls(call.mask_BT, [call.positions_BS], ids, last_B)

    def add_(self, call: Call) -> None:
        """Another call has gone through."""
        last_B = call.positions_BS[:, -1]
        if call.valid_BS is not None:
            last_B = torch.maximum(_last(call.valid_BS, call.positions_BS), self.last_B.to(last_B.device))
        if self.id_chunks is not None and call.token_ids_BS is not None:
            self.id_chunks.append(call.token_ids_BS)
        else:
            self.id_chunks = None
        self.position_chunks.append(call.positions_BS)
        self.valid_BT, self.last_B, self._lengths_B = call.mask_BT, last_B, None
        self._first_of_last = {}

    def came_(self, positions_BN: Int[Tensor, "B N"], ids_BN: Int[Tensor, "B N"] | None) -> None:
        """Tokens were decoded."""
        self.valid_BT = torch.cat([self.valid_BT, self.valid_BT.new_ones(positions_BN.shape)], dim=1)
        self.position_chunks.append(positions_BN)
        self.last_B = self.last_B + positions_BN.shape[1]
        self.id_chunks = None if self.id_chunks is None or ids_BN is None else [*self.id_chunks, ids_BN]
        self._lengths_B, self._first_of_last = None, {}

    def after(self, call: Call) -> "History":
        """The same once this call has gone through."""
        other = self.fork()
        other.add_(call)
        return other

    @property
    def num_seen(self) -> int:
        return self.valid_BT.shape[1]

    @property
    def batch_size(self) -> int:
        return self.valid_BT.shape[0]

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """RoPE position of every token."""
        if len(self.position_chunks) > 1:
            self.position_chunks = [torch.cat(self.position_chunks, dim=1)]
        return self.position_chunks[0]

    @property
    def token_ids_BT(self) -> Int[Tensor, "B T"] | None:
        """Every token's id; None if a caller ever passed embeddings."""
        if self.id_chunks is None:
            return None
        if len(self.id_chunks) > 1:
            self.id_chunks = [torch.cat(self.id_chunks, dim=1)]
        return self.id_chunks[0]

    @property
    def lengths_B(self) -> list[int]:
        """Real tokens of each sequence (asks the device once)."""
        if self._lengths_B is None:
            self._lengths_B = self.valid_BT.sum(-1).tolist()
        return self._lengths_B

    def first_of_last(self, num_tokens: int) -> int:
        """The first token that is among the last `num_tokens` of some sequence (asks the device once)."""
        if num_tokens not in self._first_of_last:
            self._first_of_last[num_tokens] = int(last_tokens(self.valid_BT, num_tokens).min())
        return self._first_of_last[num_tokens]

    def fork(self) -> "History":
        """The same, to go on apart."""
        ids = None if self.id_chunks is None else list(self.id_chunks)
        return History(self.valid_BT, list(self.position_chunks), ids, self.last_B)

    def select_batch(self, idx: Int[Tensor, " N"]) -> "History":
        idx = idx.to(self.valid_BT.device)
        ids = None if self.token_ids_BT is None else [self.token_ids_BT[idx]]
        return History(self.valid_BT[idx], [self.positions_BT[idx]], ids, self.last_B[idx])

    def cut(self, length: int) -> "History":
        """The first `length` tokens."""
        valid_BT, positions_BT = self.valid_BT[:, :length], self.positions_BT[:, :length]
        ids = None if self.token_ids_BT is None else [self.token_ids_BT[:, :length]]
        return History(valid_BT, [positions_BT], ids, _last(valid_BT, positions_BT))

    def without(self, forgotten_BT: Bool[Tensor, "B P"]) -> "History":
        """The same, with these tokens declared padding."""
        valid_BT = self.valid_BT & ~forgotten_BT
        ids = None if self.id_chunks is None else list(self.id_chunks)
        last_B = _last(valid_BT, self.positions_BT)
        return History(valid_BT, list(self.position_chunks), ids, last_B)

    @classmethod
    def concat(cls, parts: "list[History]") -> "History":
        """Stacked along the batch; all of one length."""
        ids = [part.token_ids_BT for part in parts]
        known = [own for own in ids if own is not None]
        return cls(
            torch.cat([part.valid_BT for part in parts]),
            [torch.cat([part.positions_BT for part in parts])],
            [torch.cat(known)] if len(known) == len(parts) else None,
            torch.cat([part.last_B for part in parts]),
        )


def _last(valid_BT: Bool[Tensor, "B T"], positions_BT: Int[Tensor, "B T"]) -> Int[Tensor, " B"]:
    return positions_BT.masked_fill(~valid_BT, -1).amax(1)


class State:
    """What a `retain.Cache` has seen and holds; `retain.hf.cache.engine.Engine` changes it during forwards.

    Args:
        layout: the model's layers.
        bound: what is kept.
        regime: when.
        slack: free entries per row that an evicted layer is given for new tokens.
        seeds, pinned: as the user stated them.
    """

    def __init__(
        self,
        layout: Layout,
        bound: BoundPolicy,
        regime: Regime,
        *,
        slack: int,
        seeds: Sequence[int] | None,
        pinned: Any,
    ):
        self.layout, self.specs, self.slack = layout, layout.evicting, slack
        # As stated; what holds now (a later `evict` may name another rule) is forgotten by a reset.
        self.stated: tuple[BoundPolicy, Regime, Sequence[int] | None, Any] = (bound, regime, seeds, pinned)
        self.layers: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        layout = self.layout
        # In place: transformers' side of the cache holds the same list.
        self.layers[:] = [
            pass_through_layers.empty_layer(layout.alone[idx])
            if idx in layout.alone
            else Layer(layout.spec_of[idx].window)
            for idx in range(layout.num_layers)
        ]
        self.bound_policy, self.regime, self.seeds, self.pinned = self.stated
        self.history: History | None = None
        self.evidence: list[Evidence] | None = None
        self.call: Call | None = None  # the forward that runs
        # Of the model, when it began to fill this (`retain.hf.model.identity.marks_of`).
        self.marks: Any = None
        # Tokens of the prompt that is being read, padding included, where it comes in chunks; and its
        # padding.
        self.width: int | None = None
        self.announced_BT: Bool[Tensor, "B T"] | None = None
        # Own tokens of each sequence's first prompt, once it was read.
        self.prompt_B: list[int] | None = None
        # Tokens seen at each eviction that was due, and when the first prompt ended; none before the last at
        # which something went.
        self.moments: list[int] = []
        self.noted = 0  # tokens of which the layers have noted what later evictions want
        self.decodes = False  # the last forward was a decoding step
        self.broken = False  # a change broke off midway
        self.evictions = 0  # moments at which something went
        self.evicted_at = 0  # tokens seen at the last of them
        self.packed_at = 0  # tokens seen when entries were last packed, where precision says so
        self.decoded: str | None = None  # how a `generate` that was to compile its steps ran
        self.held_whole: list[int] = []  # short sequences that the last of its policy's moments left whole

    @property
    def ragged(self) -> list[Layer]:
        """The layers that evict, in the order of `specs`; the others are transformers'."""
        return [self.layers[spec.layer_idx] for spec in self.specs]

    @property
    def pass_through(self) -> list[Any]:
        """Cache layers of transformers, where the model has layers that are left alone."""
        return [self.layers[idx] for idx in self.layout.alone]

    @property
    def stores(self) -> list[Store]:
        """The stores of layers that have been cut, in the order of `specs`."""
        return [layer.store for layer in self.ragged if layer.store is not None]

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return 0 if self.history is None else self.history.num_seen

    @property
    def batch_size(self) -> int:
        return 0 if self.history is None else self.history.batch_size

    @property
    def valid_BT(self) -> Bool[Tensor, "B T"]:
        """True on the real tokens among those seen."""
        assert self.history is not None, "nothing was seen yet"
        return self.history.valid_BT

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """RoPE position of every token seen."""
        assert self.history is not None, "nothing was seen yet"
        return self.history.positions_BT

    @property
    def element_size(self) -> int:
        """Bytes of a number of the entries, as far as it is known."""
        stores = self.stores
        return stores[0].dtype.itemsize if stores else self.specs[0].dtype.itemsize

    def is_read(self, call: Call) -> bool:
        """Whether a call is part of a prompt."""
        return call.is_prefill or self.prompt_B is None or call.positions_BS.shape[1] > 1

    def due(self, call: Call) -> bool:
        """Whether an eviction is due after this call."""
        if self.bound_policy.keeps_all:
            return False
        seen = call.mask_BT.shape[1]
        ends = self.prompt_B is None and seen >= (self.width or 0)
        tokens = 0 if self.prompt_B is None else seen - (self.moments or [0])[-1]
        return self.regime.due(read=self.is_read(call), prompt_ends=ends, tokens=tokens)

    def check_whole(self) -> None:
        """Refuse to go on with what an earlier error left half-changed.

        Raises:
            ValueError: a change broke off midway, or a forward that was not the first.
        """
        if self.broken or self.call is not None and self.num_seen:
            raise ValueError(
                "an earlier forward or change broke off and left this cache half-updated: make a new one, or "
                "reset() it."
            )

    def check_marks(self, marks: tuple[Any, Any]) -> None:
        """Refuse to go on with entries that the model, as it is now, would not have made.

        Raises:
            ValueError: adapters were switched, or weights written to, since it began to fill this.
        """
        if self.marks in (None, marks):
            return
        what = "weights were written to" if self.marks[0] == marks[0] else "adapters were switched"
        raise ValueError(
            f"the model's {what} since this cache began to read, so that its entries are not those of the "
            "model as it is now: go on with the model as it was, or reset() the cache and read again."
        )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While layers are changed one after another: what breaks off in here leaves the cache refused."""
        self.broken = True
        yield
        self.broken = False

    def announce(self, width: int | None, attention_mask: Tensor | None = None) -> None:
        """Say how many tokens the prompt has that is about to be read in chunks.

        Args:
            width: padding included; None: no such prompt is to come.
            attention_mask: which of them are real; None: behind a sequence's first token none is padding.
        """
        self.width = width
        known = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self.announced_BT = attention_mask.bool() if known and attention_mask is not None else None

    def unused_bytes_B(self, store: Store) -> Int[Tensor, " B"]:
        """Of the bytes that each sequence holds in a layer, those that stand there for others of its batch
        alone: nothing went of it, and what is added to its logits is zero."""
        seen_B = torch.tensor(self.history.lengths_B if self.history else [], device=store.device)
        held_B = store.lengths_BH.sum(-1)
        return held_B * (held_B == seen_B * store.num_heads) * store.plain.log_weight_bytes

    def held_BL(self) -> tuple[tuple[int, ...], ...]:
        """Entries that each sequence holds in each layer, in one transfer."""
        counts = [store.lengths_BH.sum(-1) for store in self.stores]
        held = torch.stack([count.to(counts[0].device) for count in counts], dim=1)
        return tuple(tuple(row) for row in held.tolist())

    def arriving(self, valid_BT: Bool[Tensor, "B T"], stock: Stock | None = None) -> Arriving:
        """What is known of these tokens before a layer is scored; pinned spans count each sequence's own
        tokens of the first prompt."""
        pinned_BT = None
        if self.pinned is not None:
            pinned_BT = pinned_mask(self.pinned, self.known(valid_BT))[:, : valid_BT.shape[1]]
        return Arriving(valid_BT, self.element_size, stock, self.seeds, pinned_BT)

    def known(self, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B whole"]:
        """Padding of the tokens seen and of those that are announced."""
        B, seen = valid_BT.shape
        known_BT = self.announced_BT
        if known_BT is not None and known_BT.shape[1] > seen and B % known_BT.shape[0] == 0:
            # `generate` may have repeated the prompts.
            later_BT = known_BT[:, seen:].repeat_interleave(B // known_BT.shape[0], dim=0)
            return torch.cat([valid_BT, later_BT.to(valid_BT.device)], dim=1)
        to_come = max(0, (self.width or 0) - valid_BT.shape[1])
        return torch.cat([valid_BT, valid_BT.new_ones(valid_BT.shape[0], to_come)], dim=1)

    def cut_dense(
        self,
        layer: Layer,
        keep_BHT: Tensor | None,
        valid_BT: Tensor,
        positions_BT: Tensor,
        beside: dict[str, Tensor] | None = None,
        correction: Merge | None = None,
        precision: Precision | None = None,
        pack: bool = True,
    ) -> Store:
        """A layer's dense keys and values, cut to a store, corrected, packed, and let go; None keeps all but
        padding. What has left the layer's window goes with whatever goes, and nothing makes up for it.

        Args:
            precision: how what stays is packed; None: it is not.
            pack: False where entries may still go, so that it is packed later.
        """
        layer.check(keep_BHT)
        keys, values = layer.dense()
        if keep_BHT is not None and layer.window is not None:
            valid_BT = in_reach(layer.window, valid_BT, positions_BT)
        exists_BHT = valid_BT.to(keys.device)[:, None].expand(keys.shape[:3])
        correction = None if keep_BHT is None else correction
        keep_BHT = exists_BHT if keep_BHT is None else keep_BHT.to(keys.device) & exists_BHT
        positions_BT = positions_BT.to(keys.device)
        plain = RaggedStore.from_dense(keys, values, positions_BT, keep_BHT, self.slack, side=beside)
        if correction is not None:
            correct_(plain, keys, values, exists_BHT, keep_BHT, correction)
        store = Store(plain, precision)
        if pack:
            store.pack_()
        layer.keys = layer.values = None
        return store

    def fork(self) -> "State":
        """A copy that goes its own way. Of a dense prefill nothing is copied until a fork evicts."""
        other, alone = copy.copy(self), self.layout.alone
        other.layers = [
            pass_through_layers.fork(layer) if idx in alone else layer.fork()
            for idx, layer in enumerate(self.layers)
        ]
        other.evidence = None if self.evidence is None else list(self.evidence)
        other.history = None if self.history is None else self.history.fork()
        other.moments, other.held_whole = list(self.moments), list(self.held_whole)
        return other

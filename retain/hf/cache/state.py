"""The state of a conversation: what a cache has seen, what it holds, what it was asked for.

In: a model's layout, a rule, a regime. Out: what forwards (`retain.hf.cache.engine`) and users
(`retain.hf.cache.cache`) read and change. The one decision taken here: a change that breaks off midway (no
memory left) leaves a cache that says so at its next use, and never one that goes on with half of its layers
cut.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from retain.cache.dense_view import tokens_last
from retain.cache.store import RaggedStore
from retain.evidence import Evidence
from retain.hf.cache.batch_context import Given
from retain.hf.cache.bound_policy import Eviction, Rule
from retain.hf.cache.history import History
from retain.hf.cache.layer import Layer
from retain.hf.cache.mask_checks import Doubt
from retain.hf.cache.pass_through_layers import foreign_layer
from retain.hf.cache.regime import Regime
from retain.hf.intercept.attention_names import PREVIOUS
from retain.hf.intercept.forward_call import Call
from retain.hf.model.decoder import base_model
from retain.hf.model.layout import LayerSpec, Layout
from retain.protection import pinned_mask


class Conversation(TransformersCache):
    """The state of `retain.Cache`, which see.

    Args:
        layout: the model's layers.
        rule: what is kept.
        regime: when.
        slack: free entries per row that an evicted layer is given for new tokens.
        seeds, pinned: as the user stated them.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        regime: Regime,
        *,
        slack: int,
        seeds: Sequence[int] | None,
        pinned: Any,
    ):
        super().__init__(layers=_new_layers(layout))
        self.layout = layout
        self._spec_of = {spec.layer_idx: spec for spec in layout.evicting}
        self.slack = slack
        self._given = (rule, regime, seeds, pinned)
        self._evict_at_prefill, self._hold_evidence = True, False
        self._recorded: frozenset[str] = frozenset()  # what held evidence shows beyond the usual
        self._generates = False
        self._forget()

    def _forget(self) -> None:
        self.rule, self.regime, self.seeds, self._pins = self._given
        self.history: History | None = None
        self.evidence: list[Evidence] | None = None
        self._call: Call | None = None
        self._next: History | None = None  # what will have been seen once the call is over, if somebody asked
        self._from = (-1, 0)  # tokens seen, and the first token whose query a later eviction wants
        self._eviction: Eviction | None = None
        self._held: list[Evidence] = []  # of a prompt behind which lookahead tokens are still to ask
        # Tokens of the prompt that is being read, padding included, where it comes in chunks; and its
        # padding.
        self._width: int | None = None
        self._announced_BT: Bool[Tensor, "B T"] | None = None
        # Own tokens of each sequence's first prompt, once it was read.
        self._prompt_B: list[int] | None = None
        # Tokens seen at each moment, and when the first prompt ended; none before the last at which something
        # went.
        self._moments: list[int] = []
        self._noted = 0  # tokens of which the layers have noted what later evictions want
        self._expected: int | None = None  # the layer whose attention is about to run
        # Sequences that `generate` has ended, and those of which the next token is padding behind the end.
        self._ended_B: Bool[Tensor, " B"] | None = None
        self._filled_B: Bool[Tensor, " B"] | None = None
        self._gaps = False  # in a dense layer padding stands before all tokens, and came behind some of them
        self._opens = False  # a `generate` has begun, and its first forward is to come
        self._steps = False  # the forward before was a decoding step, and nothing came between
        self._doubts: list[Doubt] = []  # of decoding steps that nobody has waited for
        self._broken = False  # a change broke off midway
        self.evictions = 0  # moments at which something went
        self.evicted_at = 0  # tokens seen at the last of them
        self.held_whole: list[int] = []  # short sequences that the last of its policy's moments left whole

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The layers that evict."""
        return self.layout.evicting

    @property
    def ragged(self) -> list[Layer]:
        """The cache's own layers, in the order of `specs`; the others are transformers'."""
        return [self.layers[spec.layer_idx] for spec in self.specs]

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return 0 if self.history is None else self.history.num_seen

    def check_whole(self) -> None:
        """Refuse to go on with what an earlier error left half-changed.

        Raises:
            ValueError: a change broke off midway, or a forward that was not the first; or a decoding step
                is found to have been wrong.
        """
        self._settle(wait=True)
        if self._broken or self._call is not None and self.num_seen:
            raise ValueError(
                "an earlier forward or change broke off and left this cache half-updated: make a new one, or "
                "reset() it."
            )

    def _settle(self, *, wait: bool) -> None:
        """Look at what was asked of decoding steps (`retain.hf.cache.mask_checks`), as far as the answers are
        there."""
        while self._doubts and (wait or self._doubts[0].arrived):
            try:
                self._doubts.pop(0).settle()
            except ValueError:
                self._broken, self._doubts = True, []
                raise

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While layers are changed one after another: what breaks off in here leaves the cache refused."""
        self._broken, self._steps = True, False
        yield
        self._broken = False

    def announce(self, width: int | None, attention_mask: Tensor | None = None) -> None:
        """Say how many tokens the prompt has that is about to be read in chunks.

        Args:
            width: padding included; None: no such prompt is to come.
            attention_mask: which of them are real; None: behind a sequence's first token none is padding.
        """
        self._width = width
        known = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self._announced_BT = attention_mask.bool() if known and attention_mask is not None else None

    @contextmanager
    def generating(self, width: int | None, attention_mask: Tensor | None = None) -> Iterator[None]:
        """While the `generate` of an attached model runs.

        Args:
            width: tokens, padding included, of a prompt that it reads in chunks; None: at once.
            attention_mask: of that prompt.
        """
        before, self._generates = self._generates, True
        self._ended_B, self._filled_B, self._steps, self._opens = None, None, False, True
        if width is not None:
            self.announce(width, attention_mask)
        try:
            yield
            self._settle(wait=True)
        finally:
            self._steps = self._opens = False
            self._generates, self._ended_B, self._filled_B = before, None, None
            if width is not None:
                self.announce(None)

    def hear_ends(self, ended_B: Bool[Tensor, " B"]) -> None:
        """Hear which sequences have ended with the token that `generate` has just sampled.

        Beam search asks about candidates, of which there are more than sequences, and fills nothing. A single
        sequence ends with `generate`.
        """
        if self.history is not None and len(ended_B) == self.history.batch_size > 1:
            self._ended_B = ended_B if self._ended_B is None else self._ended_B | ended_B

    def _as_meant(
        self, tokens: Tensor | None, attention_mask: Tensor | None, *, waits: bool
    ) -> Tensor | None:
        """The mask of a call, with what `generate` put behind sequences that have ended as the padding that
        it is. Its own mask calls that tokens; or it passes none where no prompt was padded (as transformers
        5.23 does).

        Args:
            tokens: of the call, ids or embeddings.
            attention_mask: as the call has it.
            waits: the device may be waited for.
        """
        past, filled_B, opens = self.history, self._filled_B, self._opens
        self._filled_B, self._opens = self._ended_B, False
        if past is None or tokens is None:
            return attention_mask
        if opens and attention_mask is None:
            return past.valid_BT.new_ones(past.batch_size, past.num_seen + tokens.shape[1])
        if filled_B is None or tokens.shape[1] != 1:
            return attention_mask
        if self.layout.alone:  # transformers' own layers take it for tokens, and all layers go by one mask
            return attention_mask
        if waits and not bool(filled_B.any()):
            return attention_mask
        real_BT = torch.cat([past.valid_BT, ~filled_B[:, None].to(past.valid_BT.device)], dim=1)
        if attention_mask is None:
            return real_BT
        fits = isinstance(attention_mask, Tensor) and attention_mask.shape == real_BT.shape
        return attention_mask.bool() & real_BT.to(attention_mask.device) if fits else attention_mask

    @property
    def _is_user_defined(self) -> bool:
        """What transformers' `generate` notes of a cache that it was given, before its first forward."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        if not self._generates:
            if base_model(self.model).config._attn_implementation not in PREVIOUS.values():
                raise ValueError(
                    "this model is not attached, so the cache would not be used: call retain.attach(model) "
                    "first."
                )
            raise ValueError(
                "generate was not called through the model that was attached, so what cannot work on this "
                "cache, and the length of a prompt that comes in chunks, would go unseen: retain.attach the "
                "causal language model itself (not its decoder), and call its own generate."
            )

    @property
    def _moment_at(self) -> int:
        """Tokens seen at the last moment, or when the first prompt ended; 0 before."""
        return self._moments[-1] if self._moments else 0

    def _count(self, held_before: int) -> None:
        """Count an eviction, if anything went."""
        if sum(map(sum, self._held_BL())) < held_before:
            self.evictions, self.evicted_at = self.evictions + 1, self.num_seen

    @property
    def _foreign(self) -> list[Any]:
        """Cache layers of transformers, where the model has layers that are left alone."""
        return [self.layers[idx] for idx in self.layout.alone]

    def _stores(self) -> list[RaggedStore]:
        return [layer.store for layer in self.ragged if layer.store is not None]

    def _held_BL(self) -> tuple[tuple[int, ...], ...]:
        """Entries that each sequence holds in each layer, in one transfer."""
        counts = [store.lengths_BH.sum(-1) for store in self._stores()]
        held = torch.stack([count.to(counts[0].device) for count in counts], dim=1)
        return tuple(tuple(row) for row in held.tolist())

    def _stated_lengths(self, history: History) -> list[int]:
        """Tokens that a ratio is a ratio of: those seen, or those of the whole prompt while it is being
        read."""
        if self._prompt_B is not None or (self._width or 0) <= history.num_seen:
            return history.lengths_B
        return self._known(history.valid_BT).sum(-1).tolist()

    @property
    def _element_size(self) -> int:
        """Bytes of a number of the entries, as far as it is known."""
        stores = self._stores()
        return stores[0].keys_CD.element_size() if stores else self.specs[0].dtype.itemsize

    def _batch_given(self, valid_BT: Bool[Tensor, "B T"]) -> Given:
        return Given(self.seeds, self._pinned_of(valid_BT))

    def _pinned_of(self, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
        """Pinned spans, counted in each sequence's own tokens of the first prompt, over the tokens seen."""
        if self._pins is None:
            return None
        return pinned_mask(self._pins, self._known(valid_BT))[:, : valid_BT.shape[1]]

    def _known(self, valid_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B whole"]:
        """Padding of the tokens seen and of those that are announced."""
        B, seen = valid_BT.shape
        known_BT = self._announced_BT
        if known_BT is not None and known_BT.shape[1] > seen and B % known_BT.shape[0] == 0:
            # `generate` may have repeated the prompts.
            later_BT = known_BT[:, seen:].repeat_interleave(B // known_BT.shape[0], dim=0)
            return torch.cat([valid_BT, later_BT.to(valid_BT.device)], dim=1)
        to_come = max(0, (self._width or 0) - valid_BT.shape[1])
        return torch.cat([valid_BT, valid_BT.new_ones(valid_BT.shape[0], to_come)], dim=1)

    def _cut_dense(
        self,
        layer: Layer,
        keep_BHT: Tensor | None,
        valid_BT: Tensor,
        positions_BT: Tensor,
        beside: dict[str, Tensor] | None = None,
    ) -> RaggedStore:
        """A layer's dense keys and values, cut to a store and let go; None keeps all but padding."""
        layer.check(keep_BHT)
        keys, values = layer.dense()
        if self._gaps:
            positions_BT, valid_BT = tokens_last(positions_BT, valid_BT), tokens_last(valid_BT, valid_BT)
        valid_BHT = valid_BT.to(keys.device)[:, None].expand(keys.shape[:3])
        keep_BHT = valid_BHT if keep_BHT is None else keep_BHT.to(keys.device) & valid_BHT
        store = RaggedStore.from_dense(
            keys, values, positions_BT.to(keys.device), keep_BHT, self.slack, beside=beside
        )
        layer.keys = layer.values = None
        return store

    def _drop(self, forgotten_BT: Bool[Tensor, "B P"]) -> None:
        """Let go of entries that the mask has since declared padding (pads that `generate` put behind a
        finished row)."""
        assert self.history is not None
        positions_BT = self.positions_BT
        gone_BP = forgotten_BT.new_zeros(forgotten_BT.shape[0], int(positions_BT.max()) + 1)
        b, t = forgotten_BT.nonzero(as_tuple=True)
        gone_BP[b, positions_BT[b, t]] = True
        with self.changing():
            for store in self._stores():
                store.drop_(gone_BP)
            self.history, self._from = self.history.without(forgotten_BT), (-1, 0)

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
    def token_ids_BT(self) -> Int[Tensor, "B T"] | None:
        """Every token seen; None if a caller ever passed embeddings."""
        return None if self.history is None else self.history.token_ids_BT

    def reset(self) -> None:
        """Forget everything; the cache may be filled again.

        Also what decoding steps were asked and has not been answered (`retain.hf.cache.mask_checks`): that
        the last of them was wrong is not said any more.
        """
        self.layers = _new_layers(self.layout)
        self._forget()


def _new_layers(layout: Layout) -> list[Any]:
    """An empty layer each: ours where entries are evicted, transformers' own elsewhere."""
    alone = layout.alone
    return [foreign_layer(alone[idx]) if idx in alone else Layer() for idx in range(layout.num_layers)]

"""What a cache does during a forward: append, attend, and evict at the moments of its regime.

In: the hooks of an attached model (`retain.hf.attach`): before the decoder, at each attention layer, after
the decoder. Out: attention outputs, and stores cut to what the rule keeps. The first forward on an empty
cache attends densely, and each layer is cut before the next one runs, so the peak is what is held plus one
layer. Later forwards append to the ragged rows and attend over them; when an eviction is due
(`retain.hf.regime`), every layer is looked at after the forward (`retain.hf.later`), and all are cut by one
decision.

The one decision taken here: a later eviction sees all layers before it cuts the first. So budgets that cross
layers are as exact as at the first eviction; the price is that a chunk is held in all layers until its
forward ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from retain.attend import attend
from retain.budget import Stock
from retain.cache import RaggedStore
from retain.columns import last_tokens
from retain.evidence import Evidence
from retain.hf.call import Call, Step, read_call
from retain.hf.foreign import foreign_layer, trim_
from retain.hf.given import Arriving, Given, pins_of, seeds_of
from retain.hf.history import History
from retain.hf.later import beside_of, evidence_of, expire_, intact_tokens, note_
from retain.hf.layer import Layer
from retain.hf.layout import LayerSpec, Layout
from retain.hf.recent import Recent
from retain.hf.regime import Regime
from retain.hf.rule import Eviction, Rule
from retain.pages import PAGE
from retain.protection import pinned_mask
from retain.rotary import Rotary

# Decoded tokens whose queries and attention inputs are held before they are looked at, where no eviction is
# due.
MOST_UNNOTED = 128


class Engine(TransformersCache):
    """The forward's side of `retain.Cache`, which see.

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
        # Tokens of the prompt that is being read, padding included, where it comes in chunks; and its
        # padding.
        self._width: int | None = None
        self._announced_BT: Bool[Tensor, "B T"] | None = None
        self._prompt_B: list[int] | None = (
            None  # own tokens of each sequence's first prompt, once it was read
        )
        # Tokens seen at each moment, and when the first prompt ended; none before the last at which something
        # went.
        self._moments: list[int] = []
        self._noted = 0  # tokens of which the layers have noted what later evictions want
        self.evictions = 0  # moments at which something went
        self.evicted_at = 0  # tokens seen at the last of them

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
        if width is not None:
            self.announce(width, attention_mask)
        try:
            yield
        finally:
            self._generates = before
            if width is not None:
                self.announce(None)

    @property
    def _is_user_defined(self) -> bool:
        """What transformers' `generate` notes of a cache that it was given, before its first forward."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        if not self._generates:
            raise ValueError(
                "generate was not called through the model that was attached, so what cannot work on this "
                "cache, and the length of a prompt that comes in chunks, would go unseen: retain.attach the "
                "causal language model itself (not its decoder), and call its own generate."
            )

    @property
    def _looks_again(self) -> bool:
        """Whether what comes now may be asked for by an eviction after this forward."""
        if self.rule.keeps_all or not self._evict_at_prefill:
            return False
        return self.regime.again or self._prompt_B is None and not self._whole

    @property
    def _whole(self) -> bool:
        """Whether this forward is a whole first prompt, cut layer by layer while it runs."""
        call = self._call
        assert call is not None
        width = call.mask_BT.shape[1]
        windows = [spec.window for spec in self.specs if spec.window is not None]
        return call.is_prefill and width >= (self._width or 0) and all(width < window for window in windows)

    @property
    def _evicts_prompt(self) -> bool:
        """Whether it evicts when the first prompt has been read, at the latest."""
        return self.regime.due(read=True, prompt_ends=True, tokens=0)

    def begin(
        self,
        *,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        rotary: Rotary | None = None,
    ) -> None:
        """Before the decoder runs: note what it was given (`retain.hf.call` says what is refused)."""
        if self._call is not None:
            if self.num_seen:
                raise ValueError(
                    "an earlier forward broke off and left this cache half-updated: make a new one."
                )
            announced = self._width, self._announced_BT
            self.reset()
            self._width, self._announced_BT = announced
        past = self.history
        call = read_call(
            None if past is None else past.valid_BT,
            None if past is None else past.last_B,
            lambda: self.positions_BT,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            rotary=rotary,
            width=self._width,
        )
        self._rotary = call.rotary
        if call.is_prefill:
            self.seeds = seeds_of(self.seeds, call.mask_BT.shape[0])
            self._pins = pins_of(self._pins, call.mask_BT.shape[0])
        self.evidence = [] if call.is_prefill and self._hold_evidence else None
        if call.forgotten_BT is not None:
            self._drop(call.forgotten_BT)
        self._call, self._next = call, None
        if call.is_prefill:
            try:
                self._begin_prompt(call)
            except ValueError:
                self._call = None
                raise

    def _begin_prompt(self, call: Call) -> None:
        """Start the eviction of a first prompt, or at least find what is wrong with it before it is read."""
        given = self._batch_given(call.mask_BT)
        if not self._evict_at_prefill:
            return
        if self._whole and self._due(call):
            arriving = Arriving(call.mask_BT, call.token_ids_BS, self._element_size)
            self._eviction = self.rule.begin(given, arriving)
        elif self._width is not None and self._evicts_prompt:
            self.rule.check_chunks()
            if self.rule.reads_tokens:  # ids that are still to come
                return
            whole_BT = self._known(call.mask_BT)
            self.rule.begin(self._batch_given(whole_BT), Arriving(whole_BT, None, self._element_size))

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Before an evicting layer's attention module runs."""
        if self._call is None:
            raise ValueError(
                "an attention layer was called outside a forward of its decoder: call the model, not its "
                "layers, and retain.attach the model that you call."
            )
        self._check_all_ran()
        self.layers[layer_idx].expected = True
        return Step(self, layer_idx, hidden_BSE)

    def _check_all_ran(self) -> None:
        if any(layer.expected for layer in self.ragged):
            raise ValueError(
                "the model's attention implementation was changed after retain.attach: undo the handle, "
                "change it, and attach again."
            )

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
        """One layer's attention; `dense` is what the model would have run, and runs on an empty cache."""
        layer, call = self.layers[step.layer_idx], self._call
        spec = self._spec_of[step.layer_idx]
        assert call is not None
        layer.expected = False
        layer.scaling, layer.soft_cap = spec.scaling if scaling is None else scaling, soft_cap
        if call.is_prefill:
            output = dense()
            self._first(layer, spec, step, queries_BQSD, keys_BHSD, values_BHSD)
            return output
        if layer.store is None:  # a prefill that was not evicted goes on with everything
            layer.store = self._cut_dense(layer, None, self.valid_BT, self.positions_BT)
        store, device = layer.store, keys_BHSD.device
        positions_BS = call.positions_BS.to(device)
        valid_BS = None if call.valid_BS is None else call.valid_BS.to(device)
        seen_RS = store.append_(keys_BHSD, values_BHSD, positions_BS, valid_BS)
        out_BQSD = attend(
            queries_BQSD,
            store.keys_CD,
            store.values_CD,
            store.offsets_R1,
            store.lengths_R,
            seen_RS,
            scaling=layer.scaling,
            soft_cap=soft_cap,
            sinks_Q=spec.sinks_Q,
            window=spec.window,
            positions_C=None if spec.window is None else store.positions_C,
            query_positions_BS=None if spec.window is None else positions_BS,
            pages=store.pages,
        )
        if self._looks_again:
            layer.recent.queries.append(queries_BQSD.detach())
            if self.rule.wants.learned:
                layer.recent.hidden.append(step.hidden_BSE.detach())
            if self._is_read(call):
                self._note(layer, spec, self._after(call))
        return out_BQSD.transpose(1, 2).contiguous(), None

    def _first(
        self,
        layer: Layer,
        spec: LayerSpec,
        step: Step,
        queries_BQSD: Tensor,
        keys_BHSD: Tensor,
        values_BHSD: Tensor,
    ) -> None:
        """An empty layer has attended to its first tokens: cut it, or hold what it has."""
        call, device = self._call, keys_BHSD.device
        assert call is not None and layer.scaling is not None
        evidence = Evidence(
            layer_idx=step.layer_idx,
            queries_BQSD=queries_BQSD.detach(),
            keys_BHTD=keys_BHSD.detach(),
            values_BHTD=values_BHSD.detach(),
            output_weight_QDE=spec.output_weight_QDE,
            scaling=layer.scaling,
            positions_BT=call.positions_BS.to(device),
            valid_BT=call.mask_BT.to(device),
            hidden_BTE=step.hidden_BSE.detach().to(device),
            token_ids_BT=None if call.token_ids_BS is None else call.token_ids_BS.to(device),
            soft_cap=layer.soft_cap,
            window=spec.window,
            sinks_Q=spec.sinks_Q,
            rotary=call.rotary,
        )
        if not self._evict_at_prefill:
            if self.evidence is not None:
                self.evidence.append(evidence)
            return
        again, keep_BHT = self._looks_again, None
        if again:
            evidence = self.rule.noted(evidence)
            evidence = self.rule.counted(evidence)
            layer.recent.queries = [evidence.queries_BQSD]
            layer.recent.keep_queries(call.mask_BT.shape[1] - self._queries_from(self._after(call)))
        if self._eviction is not None:
            keep_BHT, lower = self._eviction.add(evidence)
            self._shrink(lower, self._eviction.rows)
        beside = beside_of(evidence) if again else None
        layer.store = self._cut_dense(layer, keep_BHT, evidence.valid_BT, evidence.positions_BT, beside)

    def finish(self) -> None:
        """After the decoder ran: its tokens are seen now, and what is due is evicted."""
        call = self._call
        assert call is not None
        self._check_all_ran()
        whole, looks_again, due = self._whole, self._looks_again, self._due(call)
        read, cut = self._is_read(call), self._eviction is not None
        if self._next is None and self.history is not None:
            self.history.add_(call)
        else:
            self.history = self._after(call)
        self._call = self._next = self._eviction = None
        ends = self._prompt_B is None and self.num_seen >= (self._width or 0)
        for layer in self.ragged:
            layer.seen = self.num_seen
        if looks_again:
            if read:
                self._noted = self.num_seen  # each layer has noted its own while it ran
            elif due or self.num_seen - self._noted >= MOST_UNNOTED:
                for layer, spec in zip(self.ragged, self.specs, strict=True):
                    self._note(layer, spec, self.history)
                self._noted = self.num_seen
        if cut:
            heads = sum(spec.num_kv_heads for spec in self.specs)
            self._count(heads * sum(self.history.lengths_B))
        if due and not (call.is_prefill and whole) and self._evict_at_prefill:
            self._evict_again(release=read)
        if due or ends:
            self._moments = [seen for seen in self._moments if seen >= self.evicted_at] + [self.num_seen]
        if looks_again and read:
            for layer in self.ragged:
                if self.evicted_at == self.num_seen:
                    layer.recent.marks = {}
                layer.recent.mark(self.num_seen)
        if ends:
            self._prompt_B, self._width = list(self.history.lengths_B), None
            self._announced_BT = None
            if not self.regime.again:
                for layer in self.ragged:  # nobody will ask again
                    layer.recent = Recent()
                    if layer.store is not None:
                        layer.store.beside.clear()
            for layer in self._foreign:
                trim_(layer)

    @property
    def _moment_at(self) -> int:
        """Tokens seen at the last moment, or when the first prompt ended; 0 before."""
        return self._moments[-1] if self._moments else 0

    def _is_read(self, call: Call) -> bool:
        """Whether a call is part of a prompt."""
        return call.is_prefill or self._prompt_B is None or call.positions_BS.shape[1] > 1

    def _due(self, call: Call) -> bool:
        """Whether an eviction is due after this call."""
        if self.rule.keeps_all:
            return False
        seen = call.mask_BT.shape[1]
        ends = self._prompt_B is None and seen >= (self._width or 0)
        tokens = 0 if self._prompt_B is None else seen - self._moment_at
        return self.regime.due(read=self._is_read(call), prompt_ends=ends, tokens=tokens)

    def _after(self, call: Call) -> History:
        """What will have been seen once this call has gone through."""
        if self._next is None:
            self._next = History.of(call) if self.history is None else self.history.after(call)
        return self._next

    def _queries_from(self, history: History) -> int:
        """The first token whose query a later eviction wants."""
        queries = self.rule.wants.queries
        if queries is None:
            return self._moment_at
        if self._from[0] != history.num_seen:  # asked of every layer, answered once
            self._from = (history.num_seen, int(last_tokens(history.valid_BT, queries).min()))
        return self._from[1]

    def _note(self, layer: Layer, spec: LayerSpec, history: History) -> None:
        """Note what later evictions want of a layer's last tokens, and let go of what they were made from."""
        num_tokens = history.num_seen - self._noted
        note_(layer, spec, self.rule, history, self._rotary, num_tokens=num_tokens)
        layer.recent.keep_queries(history.num_seen - self._queries_from(history))

    def _evict_again(self, *, release: bool) -> None:
        """Cut every layer back to the budget.

        Args:
            release: give the bytes back (after a read), or leave the room for what comes (while decoding,
                unless that is far more than what comes until the next eviction).
        """
        history, layers = self.history, self.ragged
        assert history is not None
        held_before = sum(store.entries_held for store in self._stores())
        if not held_before:  # so far all sequences are padding
            return
        for layer, spec in zip(layers, self.specs, strict=True):
            if spec.window is not None and layer.store is not None:
                expire_(layer.store, spec.window, history.last_B)
        stock = Stock(
            held_BL=self._held_BL(),
            lengths_B=tuple(self._stated_lengths(history)),
            intact_BT=intact_tokens(layers, history),
            prompt_lengths_B=None if self._prompt_B is None else tuple(self._prompt_B),
        )
        call = Arriving(history.valid_BT, history.token_ids_BT, self._element_size, stock)
        wanted = self._queries_from(history)
        first = max(wanted, history.num_seen - layers[0].recent.num_queries)
        spared = self._without_queries(history, first) if first > wanted else []
        moment = self.rule.again(self._batch_given(history.valid_BT), call, stock, spared)
        if moment is not None and not moment.idle:
            num_queries, where = history.num_seen - first, []
            for layer, spec in zip(layers, self.specs, strict=True):
                evidence, columns = evidence_of(
                    layer,
                    spec,
                    history,
                    self._rotary,
                    num_queries=num_queries,
                    each=self.rule.wants.queries,
                )
                moment.look(evidence, columns.token_BT)
                where.append(columns)
                del evidence  # one layer's copy at a time
            for store, columns, keep_BHT in zip(self._stores(), where, moment.keeps(), strict=True):
                keep_N = columns.select(keep_BHT.to(store.keys_CD.device) & columns.held_BHT)
                spare = store.num_rows * (self.slack + self.regime.every + PAGE)
                if release or store.capacity > int(keep_N.sum()) + spare:
                    store.filter_(keep_N)
                else:
                    store.compact_(keep_N)
        self._count(held_before)

    def _without_queries(self, history: History, first: int) -> list[int]:
        """Sequences that have fewer queries from a token on than the policy wants to look at.

        So it is behind the pads of a finished row, once a mask says that they were pads, and behind a crop:
        they are decided on again when enough tokens have come.
        """
        wanted = self.rule.wants.queries or 1
        shown_B = history.valid_BT[:, first:].sum(-1).tolist()
        return [row for row, shown in enumerate(shown_B) if shown < min(wanted, history.lengths_B[row])]

    def _count(self, held_before: int) -> None:
        """Count an eviction, if anything went."""
        if sum(store.entries_held for store in self._stores()) < held_before:
            self.evictions, self.evicted_at = self.evictions + 1, self.num_seen

    @property
    def _foreign(self) -> list[Any]:
        """Cache layers of transformers, where the model has layers that are left alone."""
        return [self.layers[idx] for idx in self.layout.alone]

    def _stores(self) -> list[RaggedStore]:
        return [layer.store for layer in self.ragged if layer.store is not None]

    def _held_BL(self) -> tuple[tuple[int, ...], ...]:
        """Entries that each sequence holds in each layer, in one transfer."""
        held = torch.stack([store.lengths_BH.sum(-1).cpu() for store in self._stores()], dim=1)
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
        valid_BHT = valid_BT.to(keys.device)[:, None].expand(keys.shape[:3])
        keep_BHT = valid_BHT if keep_BHT is None else keep_BHT.to(keys.device) & valid_BHT
        store = RaggedStore.from_dense(
            keys, values, positions_BT.to(keys.device), keep_BHT, self.slack, beside=beside
        )
        layer.keys = layer.values = None
        return store

    def _shrink(self, lower: Sequence[Tensor | None], rows: list[int] | None) -> None:
        """Lower layers let go of what a cascade no longer keeps, one layer at a time.

        Args:
            lower: what each keeps, of the entries of these sequences.
            rows: the sequences; None for all.
        """
        for store, keep_N in zip(self._stores(), lower, strict=False):
            if keep_N is None:
                continue
            keep_N = keep_N.to(store.keys_CD.device)
            if rows is not None and len(rows) < store.batch_size:
                inside_B = torch.zeros(store.batch_size, dtype=torch.bool, device=keep_N.device)
                inside_B[rows] = True
                inside_N = inside_B[store.rows_N() // store.num_heads]
                keep_N = torch.ones_like(inside_N).masked_scatter_(inside_N, keep_N)
            store.filter_(keep_N)

    def _drop(self, forgotten_BT: Bool[Tensor, "B P"]) -> None:
        """Let go of entries that the mask has since declared padding (pads that `generate` put behind a
        finished row)."""
        assert self.history is not None
        positions_BT = self.positions_BT
        gone_BP = forgotten_BT.new_zeros(forgotten_BT.shape[0], int(positions_BT.max()) + 1)
        b, t = forgotten_BT.nonzero(as_tuple=True)
        gone_BP[b, positions_BT[b, t]] = True
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
        """Forget everything; the cache may be filled again."""
        self.layers = _new_layers(self.layout)
        self._forget()


def _new_layers(layout: Layout) -> list[Any]:
    """An empty layer each: ours where entries are evicted, transformers' own elsewhere."""
    alone = layout.alone
    return [foreign_layer(alone[idx]) if idx in alone else Layer() for idx in range(layout.num_layers)]

"""What a cache does during a forward: append, attend, and evict at the moments of its regime.

In: the hooks of an attached model (`retain.hf.intercept.attach`): before the decoder, at each attention
layer, after the decoder. Out: attention outputs, and stores cut to what the rule keeps. The first forward on
an empty cache attends densely, and each layer is cut before the next one runs, so the peak is what is held
plus one layer. Later forwards append to the ragged rows and attend over them; when an eviction is due
(`retain.hf.cache.regime`), every layer is looked at after the forward (`retain.hf.cache.later_evidence`), and
all are cut by one decision.

The one decision taken here: a later eviction sees all layers before it cuts the first. So budgets that cross
layers are as exact as at the first eviction; the price is that a chunk is held in all layers until its
forward ends.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.capacity import CapacityError
from retain.budget.statement import Stock
from retain.cache.attend import attend
from retain.cache.dense_view import align_last, last_tokens
from retain.evidence import Evidence
from retain.hf.cache.batch_context import Arriving, pins_of, seeds_of
from retain.hf.cache.bound_policy import Eviction, Moment
from retain.hf.cache.capacity_guard import Guarded
from retain.hf.cache.eviction_request import Again
from retain.hf.cache.history import History
from retain.hf.cache.later_evidence import beside_of, evidence_of, expire_, intact_tokens, note_, remembered
from retain.hf.cache.layer import Layer
from retain.hf.cache.pass_through_layers import refuse_padding, thaw_, trim_
from retain.hf.cache.recent_queries import Recent
from retain.hf.intercept.forward_call import Call, Step, read_call
from retain.hf.intercept.lookahead_pass import ReadCache, look_ahead
from retain.hf.model.layout import LayerSpec
from retain.kernels.backend import without_autocast
from retain.kernels.ragged_attention import path_of
from retain.kernels.ragged_attention.pages import PAGE

# Decoded tokens whose queries and attention inputs are held before they are looked at, where no eviction is
# due.
MOST_UNNOTED = 128


class Engine(Guarded):
    """The forward's side of `retain.Cache`, which see."""

    model: torch.nn.Module

    @property
    def _looks_again(self) -> bool:
        """Whether what comes now may be asked for by an eviction after this forward."""
        if self.rule.keeps_all or not self._evict_at_prefill:
            return False
        return self.regime.again or self._prompt_B is None and not self._whole

    @property
    def reads_stream(self) -> bool:
        """Whether decoder layers are asked for their residual stream."""
        return "stream" in self.rule.inputs or "stream" in self._recorded

    @property
    def _whole(self) -> bool:
        """Whether this forward is a whole first prompt, cut layer by layer while it runs."""
        call = self._call
        assert call is not None
        width = call.mask_BT.shape[1]
        return call.is_prefill and width >= (self._width or 0) and all(width < own for own in self._windows)

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
        """Before the decoder runs: note what it was given (`retain.hf.intercept.forward_call` says what is
        refused)."""
        if self._call is not None or self._broken:
            if self.num_seen:
                self._broken = True
                self.check_whole()
            told = self._width, self._announced_BT, self._opens
            self.reset()
            self._width, self._announced_BT, self._opens = told
        tokens = input_ids if input_ids is not None else inputs_embeds
        another = self._is_another_step(tokens)
        later = another and self._kernels_run
        self._settle(wait=not later)
        for layer in self._foreign:
            thaw_(layer)
        past = self.history
        attention_mask = self._as_meant(tokens, attention_mask, waits=not self._kernels_run)
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
            another=another,
            later=later,
            alone=bool(self.layout.alone),
        )
        if call.doubt is not None:
            self._doubts.append(call.doubt)
        self._rotary = call.rotary
        if call.is_prefill:
            self.seeds = seeds_of(self.seeds, call.mask_BT.shape[0])
            self._pins = pins_of(self._pins, call.mask_BT.shape[0])
        begun_BT = None if past is None else past.valid_BT
        refuse_padding(
            self.layout.alone, call.valid_BS, call.forgotten_BT, begun_BT, waits=call.doubt is None
        )
        self.evidence = [] if call.is_prefill and self._hold_evidence else None
        if call.forgotten_BT is not None:
            self._drop(call.forgotten_BT)
        self._call, self._next = call, None
        try:
            if call.is_prefill:
                self._gaps = call.gaps
                self._begin_prompt(call.left_padded())
            elif self._is_read(call) and self._due(call) and self._prompt_B is not None:
                self._check_turn(call)
        except ValueError:
            self._call = None
            raise

    def _is_another_step(self, tokens: Tensor | None) -> bool:
        """Whether what comes is a decoding step after another one. The mask of the first after anything else
        may take back what `generate` filled up with; that of a later one may not."""
        return self._steps and tokens is not None and tokens.shape[1] == 1

    @property
    def _kernels_run(self) -> bool:
        """Whether attention over what is held takes kernels: no step after another is waited for there."""
        store = self.ragged[0].store
        return store is not None and path_of(store.keys_CD, store.values_CD) == "triton"

    def _begin_prompt(self, call: Call) -> None:
        """Start the eviction of a first prompt, or at least find what is wrong with it before it is read."""
        given = self._batch_given(call.mask_BT)
        if not self._evict_at_prefill:
            return
        if self.rule.looks_ahead and not self._whole:
            raise ValueError(
                "lookahead gates ask behind a whole prompt at once, and this one comes in chunks, or reaches "
                "beyond the sliding window in which the model's layers evict: read it in one forward (no "
                "chunk_size), or take gates of another family."
            )
        if self._whole and self._due(call):
            arriving = Arriving(call.mask_BT, call.token_ids_BS, self._element_size)
            self._eviction = self.rule.begin(given, arriving)
            self._watch()
        elif self._width is not None and self._evicts_prompt:
            self.rule.check_chunks()
            if self.rule.reads_tokens:  # ids that are still to come
                return
            whole_BT = self._known(call.mask_BT)
            self.rule.begin(self._batch_given(whole_BT), Arriving(whole_BT, None, self._element_size))
        elif not self._evicts_prompt and not self.rule.reads_tokens:
            # The first moment is far; what the budget must hold by then can be seen from here.
            known_BT = self._known(call.mask_BT)
            if any(known_BT.shape[1] + self.regime.every >= own for own in self._windows):
                return
            later_BT = torch.cat([known_BT, known_BT.new_ones(len(known_BT), self.regime.every)], dim=1)
            self.rule.begin(self._batch_given(later_BT), Arriving(later_BT, None, self._element_size))

    def _check_turn(self, call: Call) -> None:
        """Find a budget that cannot hold what is protected before a later turn is read."""
        reached = any(call.mask_BT.shape[1] >= own for own in self._windows)
        if reached or any(layer.store is None for layer in self.ragged):
            return
        past, history = self.history, self._after(call)
        assert past is not None
        new_BS = history.valid_BT[:, past.num_seen :]
        new_B = [now - before for now, before in zip(history.lengths_B, past.lengths_B, strict=True)]
        held_BL = tuple(
            tuple(held + new * spec.num_kv_heads for held, spec in zip(row, self.specs, strict=True))
            for row, new in zip(self._held_BL(), new_B, strict=True)
        )
        intact_BT = torch.cat([intact_tokens(self.ragged, past).to(new_BS.device), new_BS], dim=1)
        stock = Stock(held_BL, tuple(history.lengths_B), intact_BT, tuple(self._prompt_B or ()))
        arriving = Arriving(history.valid_BT, history.token_ids_BT, self._element_size, stock)
        self.rule.again(self._batch_given(history.valid_BT), arriving, stock)

    @property
    def _windows(self) -> list[int]:
        """Windows of the layers that evict."""
        return [spec.window for spec in self.specs if spec.window is not None]

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Before an evicting layer's attention module runs."""
        if self._call is None:
            raise ValueError(
                "an attention layer was called outside a forward of its decoder: call the model, not its "
                "layers, and retain.attach the model that you call."
            )
        self._check_ran()
        self._expected = layer_idx
        layer = self.layers[layer_idx]
        layer.expected = True
        stream_BSE, layer.stream_BSE = layer.stream_BSE, None
        return Step(self, layer_idx, hidden_BSE, stream_BSE)

    def _check_ran(self) -> None:
        if self._expected is not None:
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
        layer.expected, self._expected = False, None
        layer.scaling, layer.soft_cap = spec.scaling if scaling is None else scaling, soft_cap
        if call.is_prefill:
            output = dense()
            self._first(layer, spec, step, queries_BQSD, keys_BHSD, values_BHSD)
            return output
        return self._attend(layer, spec, step, queries_BQSD, keys_BHSD, values_BHSD), None

    @without_autocast
    def _attend(
        self,
        layer: Layer,
        spec: LayerSpec,
        step: Step,
        queries_BQSD: Tensor,
        keys_BHSD: Tensor,
        values_BHSD: Tensor,
    ) -> Tensor:
        """A layer that holds entries takes in the new tokens, and their queries attend to all of them."""
        call = self._call
        assert call is not None and layer.scaling is not None
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
            soft_cap=layer.soft_cap,
            sinks_Q=spec.sinks_Q,
            window=spec.window,
            positions_C=None if spec.window is None else store.positions_C,
            query_positions_BS=None if spec.window is None else positions_BS,
            pages=store.pages,
            runs=store.runs,
        )
        if self._looks_again:
            wants = self.rule.wants
            if wants.queries != 0 or wants.running or wants.own_queries:
                layer.recent.queries.append(queries_BQSD.detach())
            if "hidden" in wants.inputs:
                layer.recent.hidden.append(step.hidden_BSE.detach())
            if "stream" in wants.inputs and step.stream_BSE is not None:
                layer.recent.stream.append(step.stream_BSE.detach())
            if self._is_read(call):
                self._note(layer, spec, self._after(call))
        return out_BQSD.transpose(1, 2).contiguous()

    @without_autocast
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
        recent_BQSD, shown = queries_BQSD.detach(), call.left_padded()
        if call.gaps:
            step = step.left_padded(call.mask_BT.to(device))
            queries_BQSD, keys_BHSD, values_BHSD = (
                align_last(own, call.mask_BT.to(device), own.shape[2])
                for own in (queries_BQSD, keys_BHSD, values_BHSD)
            )
            layer.keys, layer.values = keys_BHSD.detach(), values_BHSD.detach()
        evidence = Evidence(
            layer_idx=step.layer_idx,
            queries_BQSD=queries_BQSD.detach(),
            keys_BHTD=keys_BHSD.detach(),
            values_BHTD=values_BHSD.detach(),
            output_weight_QDE=spec.output_weight_if(self.rule.reads_output or not self._evict_at_prefill),
            scaling=layer.scaling,
            positions_BT=shown.positions_BS.to(device),
            valid_BT=shown.mask_BT.to(device),
            hidden_BTE=step.hidden_BSE.detach().to(device),
            token_ids_BT=None if shown.token_ids_BS is None else shown.token_ids_BS.to(device),
            soft_cap=layer.soft_cap,
            window=spec.window,
            sinks_Q=spec.sinks_Q,
            rotary=call.rotary,
            stream_BTE=None if step.stream_BSE is None else step.stream_BSE.detach().to(device),
        )
        if not self._evict_at_prefill:
            if self.evidence is not None:
                self.evidence.append(evidence)
            return
        again, keep_BHT = self._looks_again, None
        if again:
            evidence = self.rule.noted(evidence)
            evidence = self.rule.counted(evidence)
            layer.recent.queries = [recent_BQSD]
            self._keep_queries(layer, self._after(call))
        self._measure(evidence)
        if self._eviction is not None and self.rule.looks_ahead and self._eviction.rows:
            self._held.append(remembered(evidence, self.rule))
            return
        if self._holds_back:
            self._hold_back(evidence, again)
            return
        if self._eviction is not None:
            keep_BHT, lower = self._eviction.add(evidence)
            self._shrink(lower, self._eviction.rows)
        beside = beside_of(evidence) if again else None
        layer.store = self._cut_dense(layer, keep_BHT, evidence.valid_BT, evidence.positions_BT, beside)

    def finish(self) -> None:
        """After the decoder ran: its tokens are seen now, and what is due is evicted.

        Raises:
            ValueError: something is due, and a decoding step that nobody waited for was wrong: nothing is
                decided by a mask that was not looked at.
        """
        call = self._call
        assert call is not None
        self._check_ran()
        if self._held:
            self._evict_ahead()
        if self._moment is not None:
            self._cut_held_back()
        looks_again, due, read, cut = self._looks_again, self._due(call), self._is_read(call), self._eviction
        if self._next is None and self.history is not None:
            self.history.add_(call)
        else:
            self.history = self._after(call)
        ends = self._prompt_B is None and self.num_seen >= (self._width or 0)
        for layer in self.ragged:
            layer.seen = self.num_seen
        if looks_again:
            if read:
                self._noted = self.num_seen  # each layer has noted its own while it ran
            elif due or self.num_seen - self._noted >= MOST_UNNOTED:
                self._settle(wait=True)
                for layer, spec in zip(self.ragged, self.specs, strict=True):
                    self._note(layer, spec, self.history)
                self._noted = self.num_seen
        if cut is not None:
            heads = sum(spec.num_kv_heads for spec in self.specs)
            self._count(heads * sum(self.history.lengths_B))
            self._weigh(cut)
            self._note_whole(cut)
        elif due and self._evict_at_prefill:
            self._settle(wait=True)
            self._evict_again(release=read)
        self._note_moment(
            moment=due or ends, marks=looks_again and read and (ends or self._prompt_B is not None)
        )
        if ends:
            self._end_prompt()
        self._call = self._next = self._eviction = None
        self._steps = not read
        self._say()

    @torch.no_grad()
    def _evict_ahead(self) -> None:
        """Cut all layers, which hold the first prompt whole, by what lookahead tokens ask behind it."""
        request, eviction = self.rule.request, self._eviction
        assert request is not None and eviction is not None
        held, self._held = look_ahead(self.model, request.gates, self.read_only(), self._held), []
        self._cut_ahead(eviction, held)

    @without_autocast
    def _cut_ahead(self, eviction: Eviction, held: list[Evidence]) -> None:
        """Cut layer after layer, letting go of what each has shown."""
        for layer in self.ragged:
            evidence = held.pop(0)
            if self._holds_back:
                self._hold_back(evidence, False)
                continue
            keep_BHT, lower = eviction.add(evidence)
            self._shrink(lower, eviction.rows)
            layer.store = self._cut_dense(layer, keep_BHT, evidence.valid_BT, evidence.positions_BT)

    def read_only(self) -> ReadCache:
        """The prompt that is held whole, for tokens that are run behind it and forgotten."""
        held = {spec.layer_idx: layer.dense() for spec, layer in zip(self.specs, self.ragged, strict=True)}
        return ReadCache(self.layout, held, {idx: self.layers[idx] for idx in self.layout.alone})

    def _note_moment(self, *, moment: bool, marks: bool) -> None:
        """Remember where a crop may go back to."""
        if moment:
            self._moments = [seen for seen in self._moments if seen >= self.evicted_at] + [self.num_seen]
        if marks and self.rule.wants.queries:
            for layer in self.ragged:
                if self.evicted_at == self.num_seen:
                    layer.recent.marks = {}
                layer.recent.mark(self.num_seen)

    def _end_prompt(self) -> None:
        """The first prompt was read."""
        assert self.history is not None
        self._prompt_B, self._width = list(self.history.lengths_B), None
        self._announced_BT = None
        if not self.regime.again:
            for layer in self.ragged:  # nobody will ask again
                layer.recent = Recent()
                if layer.store is not None:
                    layer.store.beside.clear()
        for layer in self._foreign:
            trim_(layer)

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

    @without_autocast
    def _note(self, layer: Layer, spec: LayerSpec, history: History) -> None:
        """Note what later evictions want of a layer's last tokens, and let go of what they were made from."""
        num_tokens = history.num_seen - self._noted
        note_(layer, spec, self.rule, history, self._rotary, num_tokens=num_tokens)
        self._keep_queries(layer, history)

    def _keep_queries(self, layer: Layer, history: History) -> None:
        """Let go of the queries that no later eviction looks at; and of those far behind, where a sequence
        has none of the last tokens (it is spared until it has)."""
        wanted = history.num_seen - self._queries_from(history)
        queries = self.rule.wants.queries
        layer.recent.keep_queries(wanted if queries is None else min(wanted, queries + MOST_UNNOTED))

    @without_autocast
    def _evict_again(self, *, release: bool) -> None:
        """Cut every layer back to the budget.

        Args:
            release: give the bytes back (after a read), or leave the room for what comes (while decoding,
                unless that is far more than what comes until the next eviction).
        """
        history, layers = self.history, self.ragged
        assert history is not None
        held_before = sum(map(sum, self._held_BL()))
        if not held_before:  # so far all sequences are padding
            return
        with self.changing():
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
        first = wanted
        if self.rule.wants.queries != 0:
            first = max(wanted, history.num_seen - layers[0].recent.num_queries)
        spared = self._without_queries(history, first) if first > wanted else []
        try:
            moment = self.rule.again(self._batch_given(history.valid_BT), call, stock, spared)
        except ValueError as error:
            self._refused = error  # of a short sequence, say, that has grown too long to be held whole
            return
        try:
            self._note_whole(moment)
            if isinstance(moment, Again):
                moment.guard = self.guard
            if moment is not None and not moment.idle:
                self._cut_again(moment, history, first, release)
        except CapacityError as error:
            self._refused = error  # raised once all is in order: nothing went
        finally:
            if not self._broken:
                self._count(held_before)

    def _cut_again(self, moment: Moment, history: History, first: int, release: bool) -> None:
        """Show every layer to a moment, and then cut them all."""
        where, wants = [], self.rule.wants
        for layer, spec in zip(self.ragged, self.specs, strict=True):
            evidence, columns = evidence_of(
                layer,
                spec,
                history,
                self._rotary,
                num_queries=history.num_seen - first,
                each=wants.queries,
                keys=wants.keys,
                values=wants.values,
                output_weight=self.rule.reads_output,
            )
            moment.look(evidence, columns.token_BT)
            where.append(columns.where())
            del evidence, columns  # one layer's copy at a time
        keeps = moment.keeps()
        self._weigh(moment)
        with self.changing():
            for store, entries, keep_BHT in zip(self._stores(), where, keeps, strict=True):
                keep_N = entries.select(keep_BHT.to(store.keys_CD.device))
                spare = store.num_rows * (self.slack + self.regime.every + PAGE)
                if release or store.capacity > int(keep_N.sum()) + spare:
                    store.filter_(keep_N)
                else:
                    store.compact_(keep_N)

    def _without_queries(self, history: History, first: int) -> list[int]:
        """Sequences that have fewer queries from a token on than the policy wants to look at.

        So it is behind the pads of a finished row, once a mask says that they were pads, and behind a crop:
        they are decided on again when enough tokens have come.
        """
        wanted = self.rule.wants.queries or 1
        shown_B = history.valid_BT[:, first:].sum(-1).tolist()
        return [row for row, shown in enumerate(shown_B) if shown < min(wanted, history.lengths_B[row])]

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

"""What a cache does during a forward: append, attend, and evict when its regime says so.

The first forward on an empty cache attends densely, and each layer is cut before the next one runs, so the
peak is what is held plus one layer, or one and a half where layers share a budget
(`retain.budget.cascade.LEFT_OVER`). Later forwards append to the ragged rows and attend over them; when an
eviction is due (`retain.hf.cache.regime`), every layer is looked at after the forward
(`retain.hf.cache.later_evidence`), and all are cut by one decision. So budgets that cross layers are as exact
as at the first eviction; the price is that a chunk is held in all layers until its forward ends.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.statement import Stock
from retain.cache.attend import attend_store
from retain.cache.equal_rows import StepRows, step_rows_of
from retain.correction.cuts import cut_
from retain.eviction import Eviction
from retain.evidence import Evidence
from retain.hf.cache.batch_context import pins_of, seeds_of
from retain.hf.cache.changes import count_eviction, drop, end_prompt, shrink
from retain.hf.cache.generation import Generation, check_ids
from retain.hf.cache.later_evidence import (
    beside_of,
    evidence_of,
    expire_,
    intact_tokens,
    note_,
    remembered,
    stock_in_reach,
    without_expired,
    without_queries,
)
from retain.hf.cache.layer import MOST_UNNOTED, Layer
from retain.hf.cache.packing import pack, packs_now
from retain.hf.cache.state import History, State
from retain.hf.intercept.forward_call import Call, read_call
from retain.hf.intercept.interceptor import Step, check_pointed, refuse_unasked
from retain.hf.intercept.lookahead_pass import ReadCache, look_ahead
from retain.hf.model.decoder import base_model
from retain.hf.model.identity import marks_of
from retain.hf.model.layout import LayerSpec
from retain.hf.model.pass_through_layers import refuse_padding
from retain.hf.version_names import CHECKPOINTING
from retain.kernels.backend import without_autocast
from retain.kernels.ragged_attention.pages import PAGE


class Engine:
    """The side of `retain.Cache` that runs during a forward.

    Args:
        model: whose forwards they are.
        state: of the cache; it changes it.
    """

    def __init__(self, model: torch.nn.Module, state: State):
        self.model, self.state = model, state
        self.generation = Generation()
        self.evict_at_prefill, self.hold_evidence = True, False
        self.recorded: frozenset[str] = frozenset()  # what held evidence shows beyond the usual
        self._rotary: Rotary | None = None
        self.refused: ValueError | None = None  # why a later eviction did not happen; raised in the end
        self._forget()

    def _forget(self) -> None:
        """Forget what is of one forward."""
        self._next: History | None = None  # what will have been seen once the call is over, if somebody asked
        self._eviction: Eviction | None = None
        self._unscored: list[Evidence] = []  # of a prompt behind which lookahead tokens are still to ask
        self._waiting: list[dict[str, Tensor] | None] = []  # of layers that are cut with the others
        self._expected: int | None = None  # the layer whose attention is about to run
        self.is_quick = False

    def reset(self) -> None:
        """Forget everything; the state may be filled again."""
        self.state.reset()
        self.refused = None
        self.generation.forget()
        self._forget()

    def fork(self, state: State) -> "Engine":
        """The same for a copy of the cache. Whoever generates, it is not the copy."""
        other = copy.copy(self)
        other.state = state
        other.generation = Generation()
        return other

    @property
    def num_seen(self) -> int:
        return self.state.num_seen

    @property
    def _looks_again(self) -> bool:
        """Whether what comes now may be asked for by an eviction after this forward."""
        state = self.state
        if state.bound_policy.keeps_all or not self.evict_at_prefill:
            return False
        return state.regime.again or state.prompt_B is None and not self._reads_whole_prompt

    @property
    def _reads_whole_prompt(self) -> bool:
        """Whether this forward is a whole first prompt, cut layer by layer while it runs."""
        call, state = self.state.call, self.state
        assert call is not None
        return call.is_prefill and (state.width or 0) <= call.mask_BT.shape[1]

    @property
    def reads_stream(self) -> bool:
        """Whether decoder layers are asked for their residual stream."""
        return "stream" in self.state.bound_policy.inputs or "stream" in self.recorded

    def begin(self, decoder: torch.nn.Module, given: Mapping[str, Any], rotary: Rotary | None = None) -> None:
        """Note what the decoder was given (`retain.hf.intercept.forward_call` says what is refused)."""
        state = self.state
        if base_model(self.model) is not decoder:
            raise ValueError(
                "this retain.Cache was made for another model than the one that is called: make one with "
                "retain.Cache(model, ...) for each model."
            )
        check_pointed(decoder)
        if decoder.training and getattr(decoder, f"is_{CHECKPOINTING}", False):
            raise ValueError(
                "this model is in training mode with gradient checkpointing, where transformers takes "
                "the cache away from its layers: call model.eval() (or "
                f"model.{CHECKPOINTING}_disable()) before a forward with a retain.Cache."
            )
        if state.call is not None or state.broken:
            if state.num_seen:
                state.broken = True
                state.check_whole()
            announced = state.width, state.announced_BT
            self.reset()
            state.width, state.announced_BT = announced
        input_ids, inputs_embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = input_ids if input_ids is not None else inputs_embeds
        decodes = state.prompt_B is not None and tokens is not None and tokens.shape[1:2] == (1,)
        if not decodes or not state.decodes:
            marks = marks_of(decoder)
            state.check_marks(marks)
            state.marks = marks
        past = state.history
        call = read_call(
            None if past is None else past.valid_BT,
            None if past is None else past.last_B,
            lambda: state.positions_BT,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=given.get("attention_mask"),
            position_ids=given.get("position_ids"),
            rotary=rotary,
            width=state.width,
            reads_prompt=state.prompt_B is None,
        )
        self._rotary = call.rotary
        if call.is_prefill:
            state.seeds = seeds_of(state.seeds, call.mask_BT.shape[0])
            state.pinned = pins_of(state.pinned, call.mask_BT.shape[0])
        if state.layout.alone:
            begun_BT = None if past is None else past.valid_BT
            refuse_padding(state.layout.alone, call, begun_BT)
        state.evidence = [] if call.is_prefill and self.hold_evidence else None
        if call.forgotten_BT is not None:
            drop(state, call.forgotten_BT)
        state.call, self._next = call, None
        if (rows := self._quick_rows(call)) is not None:
            self._begin_quick(rows, call.positions_BS[:, 0].contiguous())
        try:
            if call.is_prefill:
                self._begin_prompt(call)
            elif state.is_read(call) and state.due(call) and state.prompt_B is not None:
                self._check_turn(call)
        except ValueError:
            state.call = None
            raise

    def _quick_rows(self, call: Call) -> list[StepRows] | None:
        """The rows of all layers, if the step is one that on a CPU appends and attends in one call a layer:
        nothing is padded, differentiated or cast, and no eviction asks for attention inputs."""
        state, wants = self.state, self.state.bound_policy.wants
        if state.is_read(call) or call.valid_BS is not None or torch.is_grad_enabled():
            return None
        if torch.is_autocast_enabled("cpu") or self._looks_again and {"hidden", "stream"} & {*wants.inputs}:
            return None
        found = []
        for layer, spec in zip(state.ragged, state.specs, strict=True):
            if layer.store is None or layer.store.packed is not None or layer.scaling is None:
                return None
            if layer.store.precision is not None:
                return None
            store = layer.store.plain
            if store.free < 1:
                store.make_room_(1)
            if store.step_rows is None:
                how: dict[str, Any] = {
                    "scaling": layer.scaling,
                    "soft_cap": layer.soft_cap,
                    "window": spec.window,
                }
                store.step_rows = step_rows_of(store, **how, sinks=spec.sinks_Q is not None)
            if store.step_rows is None:
                return None
            found.append(store.step_rows)
        return found

    def _begin_quick(self, rows: list[StepRows], positions_B: Tensor) -> None:
        """Tell the layers of a step where its token stands."""
        wants, positions = self.state.bound_policy.wants, {}
        looks = self._looks_again and (wants.queries != 0 or wants.running or wants.entry_queries)
        for layer, spec, own in zip(self.state.ragged, self.state.specs, rows, strict=True):
            H = spec.num_kv_heads
            if H not in positions:
                positions[H] = positions_B.repeat_interleave(H).to(torch.int32)
            layer.quick, own.positions_R, own.last_B = own, positions[H], positions_B
            own.queries = layer.recent.queries if looks else None
            layer.store.plain.free -= 1
        self.is_quick = True

    def _begin_prompt(self, call: Call) -> None:
        """Start the eviction of a first prompt, or at least find what is wrong with it before it is read."""
        state, bound = self.state, self.state.bound_policy
        state.arriving(call.mask_BT)  # refuses pinned spans that are none
        if not self.evict_at_prefill:
            return
        stock = stock_in_reach(state.specs, call.mask_BT, call.positions_BS)
        chunks, beyond = not self._reads_whole_prompt, stock is not None
        bound.refuse(*(("chunks",) if chunks else ()), *(("window",) if beyond else ()))
        if self._reads_whole_prompt and state.due(call):
            self._eviction = self._planned(call.mask_BT, stock)
            self._waiting = []
        elif state.width is not None and state.regime.evicts_prompt:
            self._planned(state.known(call.mask_BT))
        elif not state.regime.evicts_prompt:
            # The first moment is far; what the budget must hold by then can be seen from here.
            known_BT, every = state.known(call.mask_BT), state.regime.every
            if known_BT.shape[1] + every < state.layout.shortest_window:
                self._planned(torch.cat([known_BT, known_BT.new_ones(len(known_BT), every)], dim=1))

    def _planned(self, valid_BT: Tensor, stock: Stock | None = None) -> Eviction | None:
        """An eviction layer by layer of these tokens; refuses what cannot be."""
        return self.state.bound_policy.begin(self.state.arriving(valid_BT, stock))

    def _check_turn(self, call: Call) -> None:
        """Find a budget that cannot hold what is protected before a later turn is read."""
        state = self.state
        reached = call.mask_BT.shape[1] >= state.layout.shortest_window
        if reached or any(layer.store is None for layer in state.ragged):
            return
        past, history = state.history, self._after(call)
        assert past is not None
        new_BS = history.valid_BT[:, past.num_seen :]
        new_B = [now - before for now, before in zip(history.lengths_B, past.lengths_B, strict=True)]
        held_BL = tuple(
            tuple(held + new * spec.num_kv_heads for held, spec in zip(row, state.specs, strict=True))
            for row, new in zip(state.held_BL(), new_B, strict=True)
        )
        intact_BT = torch.cat([intact_tokens(state.ragged, past).to(new_BS.device), new_BS], dim=1)
        stock = Stock(held_BL, tuple(history.lengths_B), intact_BT)
        state.bound_policy.begin(state.arriving(history.valid_BT, stock), joint=True)

    def check_ids(self, ids: Any, attention_mask: Any, inputs_embeds: Any = None) -> None:
        check_ids(self.state, ids, attention_mask, inputs_embeds)

    def generating(
        self, width: int | None, attention_mask: Tensor | None, room: int | None = None
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        return self.generation.running(self.state, width, attention_mask, room)

    @property
    def is_static(self) -> bool:
        return self.generation.static is not None

    def show_stream(self, layer_idx: int, stream_BSE: Tensor) -> None:
        self.state.layers[layer_idx].stream_BSE = stream_BSE

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Before an evicting layer's attention module runs."""
        state = self.state
        if state.call is None:
            raise ValueError(
                "an attention layer was called outside a forward of its decoder: call the model, not its "
                "layers, and retain.attach the model that you call."
            )
        self._check_ran()
        self._expected = layer_idx
        layer = state.layers[layer_idx]
        layer.expected = True
        stream_BSE, layer.stream_BSE = layer.stream_BSE, None
        return Step(self, layer_idx, hidden_BSE, stream_BSE)

    def _check_ran(self) -> None:
        if self._expected is not None:
            check_pointed(base_model(self.model))
            refuse_unasked(self.state.layout.spec_of[self._expected].module, self._expected)

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
        state = self.state
        layer, spec = state.layers[step.layer_idx], state.layout.spec_of[step.layer_idx]
        assert state.call is not None
        layer.expected, self._expected = False, None
        layer.scaling, layer.soft_cap = spec.scaling if scaling is None else scaling, soft_cap
        if state.call.is_prefill:
            output = dense()
            self._first(step, queries_BQSD, keys_BHSD, values_BHSD)
            return output
        return self._attend(step, queries_BQSD, keys_BHSD, values_BHSD), None

    @without_autocast
    def _attend(self, step: Step, queries_BQSD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor) -> Tensor:
        """A layer that holds entries takes in the new tokens, and their queries attend to all of them."""
        state, call = self.state, self.state.call
        layer, spec = state.layers[step.layer_idx], state.layout.spec_of[step.layer_idx]
        assert call is not None and layer.scaling is not None
        if self.is_quick:  # in a model that is compiled
            assert layer.quick is not None
            return layer.quick.attend(queries_BQSD, keys_BHSD, values_BHSD, None, {"s_aux": spec.sinks_Q})[0]
        if layer.store is None:  # a prefill that was not evicted goes on with everything
            layer.store = state.cut_dense(layer, None, state.valid_BT, state.positions_BT)
        store, device = layer.store, keys_BHSD.device
        positions_BS = call.positions_BS.to(device)
        valid_BS = None if call.valid_BS is None else call.valid_BS.to(device)
        seen_RS = store.plain.append_(keys_BHSD, values_BHSD, positions_BS, valid_BS)
        out_BQSD = attend_store(
            store,
            queries_BQSD,
            seen_RS,
            scaling=layer.scaling,
            soft_cap=layer.soft_cap,
            sinks_Q=spec.sinks_Q,
            window=spec.window,
            query_positions_BS=None if spec.window is None else positions_BS,
        )
        if self._looks_again:
            wants = state.bound_policy.wants
            if wants.queries != 0 or wants.running or wants.entry_queries:
                layer.recent.queries.append(queries_BQSD.detach())
            if "hidden" in wants.inputs:
                layer.recent.hidden.append(step.hidden_BSE.detach())
            if "stream" in wants.inputs and step.stream_BSE is not None:
                layer.recent.stream.append(step.stream_BSE.detach())
            if state.is_read(call):
                self._note(layer, spec, self._after(call))
        return out_BQSD.transpose(1, 2).contiguous()

    @without_autocast
    def _first(self, step: Step, queries_BQSD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor) -> None:
        """An empty layer has attended to its first tokens: cut it, or hold what it has."""
        state, call, device = self.state, self.state.call, keys_BHSD.device
        layer, spec = state.layers[step.layer_idx], state.layout.spec_of[step.layer_idx]
        assert call is not None
        reads_output = state.bound_policy.reads_output or not self.evict_at_prefill
        evidence = spec.evidence(
            scaling=layer.scaling,
            soft_cap=layer.soft_cap,
            output=reads_output,
            queries_BQSD=queries_BQSD.detach(),
            keys_BHTD=keys_BHSD.detach(),
            values_BHTD=values_BHSD.detach(),
            positions_BT=call.positions_BS.to(device),
            valid_BT=call.mask_BT.to(device),
            hidden_BTE=step.hidden_BSE.detach().to(device),
            token_ids_BT=None if call.token_ids_BS is None else call.token_ids_BS.to(device),
            rotary=call.rotary,
            stream_BTE=None if step.stream_BSE is None else step.stream_BSE.detach().to(device),
        )
        if self._looks_again:
            evidence = state.bound_policy.with_metadata(evidence)
            evidence = state.bound_policy.counted(evidence)
            layer.recent.queries = [queries_BQSD.detach()]
            self._keep_queries(layer, self._after(call))
        if self._reads_whole_prompt:
            evidence = without_expired(evidence, state.bound_policy)
        if not self.evict_at_prefill:
            if state.evidence is not None:
                state.evidence.append(evidence)
            return
        if self._eviction is not None:
            # Keys may not be in the weights' precision; then other sequences may be decided on.
            self._eviction.measure(evidence.keys_BHTD.element_size())
        if self._eviction is not None and state.bound_policy.looks_ahead and self._eviction.rows:
            self._unscored.append(remembered(evidence, state.bound_policy))
            return
        self._cut(layer, evidence)

    def _cut(self, layer: Layer, evidence: Evidence) -> None:
        """Cut a layer of the first prompt, and those before it again; or leave all whole until all came."""
        state, eviction, keep_BHT = self.state, self._eviction, None
        bound, call = state.bound_policy, state.call
        assert call is not None
        beside = beside_of(evidence) if self._looks_again else None
        if eviction is not None:
            keep_BHT = eviction.look(evidence)
            if eviction.joint:
                self._waiting.append(beside)
                return
            shrink(state, eviction.lower, eviction.rows)
        where, now = (evidence.valid_BT, evidence.positions_BT), packs_now(state, eviction, call)
        layer.store = state.cut_dense(
            layer, keep_BHT, *where, beside, bound.correction, bound.precision, pack=now
        )

    def finish(self) -> None:
        """After the decoder ran: its tokens are seen now, and what is due is evicted."""
        state = self.state
        call = state.call
        assert call is not None
        self._check_ran()
        if self._unscored:
            self._evict_ahead()
        if self._waiting:
            self._cut_waiting(call)
        due, read = state.due(call), state.is_read(call)
        looks_again, cut = self._looks_again, self._eviction
        if self._next is None and state.history is not None:
            state.history.add_(call)
        else:
            state.history = self._after(call)
        ends = state.prompt_B is None and state.num_seen >= (state.width or 0)
        for layer in state.ragged:
            layer.seen = state.num_seen
        if looks_again:
            if read:
                state.noted = state.num_seen  # each layer has noted its own while it ran
            elif due or state.num_seen - state.noted >= MOST_UNNOTED:
                for layer, spec in zip(state.ragged, state.specs, strict=True):
                    self._note(layer, spec, state.history)
                state.noted = state.num_seen
        if cut is not None:
            count_eviction(state, state.layout.num_kv_heads * sum(state.history.lengths_B))
            state.held_whole = [*cut.held_whole]
        elif due and self.evict_at_prefill:
            self._evict_again(release=read)
        pack(state, read=read)
        if due or ends:
            state.moments = [seen for seen in state.moments if seen >= state.evicted_at] + [state.num_seen]
        if ends:
            end_prompt(state)
        state.call = self._next = self._eviction = None
        state.decodes, self.is_quick = not read, False
        refused, self.refused = self.refused, None
        if refused is not None:  # now that all is in order
            raise refused
        if state.prompt_B is not None:
            self.generation.decode_static(state)

    def _cut_waiting(self, call: Call) -> None:
        """Cut all layers of a first prompt, which were decided on together."""
        state, bound, waiting = self.state, self.state.bound_policy, self._waiting
        assert self._eviction is not None
        self._waiting = []
        for layer, keep_BHT, beside in zip(state.ragged, self._eviction.finish(), waiting, strict=True):
            where = call.mask_BT, call.positions_BS
            layer.store = state.cut_dense(layer, keep_BHT, *where, beside, bound.correction, bound.precision)

    @torch.no_grad()
    def _evict_ahead(self) -> None:
        """Cut all layers, which hold the first prompt whole, by what lookahead tokens ask behind it."""
        gates = self.state.bound_policy.gates
        held, self._unscored = look_ahead(self.model, gates, self.read_only(), self._unscored), []
        self._cut_ahead(held)

    @without_autocast
    def _cut_ahead(self, held: list[Evidence]) -> None:
        """Cut layer after layer, letting go of what each has shown."""
        for layer in self.state.ragged:
            self._cut(layer, held.pop(0))

    def read_only(self) -> ReadCache:
        """The prompt that is held whole, for tokens that are run behind it and forgotten."""
        return ReadCache([layer.dense() for layer in self.state.ragged])

    def _after(self, call: Call) -> History:
        """What will have been seen once this call has gone through."""
        state = self.state
        if self._next is None:
            self._next = History.of(call) if state.history is None else state.history.after(call)
        return self._next

    def _queries_from(self, history: History) -> int:
        """The first token whose query a later eviction wants."""
        queries = self.state.bound_policy.wants.queries
        return (self.state.moments or [0])[-1] if queries is None else history.first_of_last(queries)

    @without_autocast
    def _note(self, layer: Layer, spec: LayerSpec, history: History) -> None:
        """Note what later evictions want of a layer's last tokens, and let go of what they were made from."""
        state = self.state
        num_tokens = history.num_seen - state.noted
        note_(layer, spec, state.bound_policy, history, self._rotary, num_tokens=num_tokens)
        self._keep_queries(layer, history)

    def _keep_queries(self, layer: Layer, history: History) -> None:
        """Let go of the queries that no later eviction looks at; and of those far behind, where a sequence
        has none of the last tokens (it is spared until it has)."""
        wanted = history.num_seen - self._queries_from(history)
        queries = self.state.bound_policy.wants.queries
        layer.recent.keep_queries(wanted if queries is None else min(wanted, queries + MOST_UNNOTED))

    @without_autocast
    def _evict_again(self, *, release: bool) -> None:
        """Cut every layer back to the budget.

        Args:
            release: give the bytes back (after a read), or leave the room for what comes (while decoding,
                unless that is far more than what comes until the next eviction).
        """
        state = self.state
        history, layers = state.history, state.ragged
        assert history is not None
        held_before = sum(map(sum, state.held_BL()))
        if not held_before:  # so far all sequences are padding
            return
        with state.changing():
            for layer, spec in zip(layers, state.specs, strict=True):
                if spec.window is not None and layer.store is not None:
                    expire_(layer.store, spec.window, history.last_B)
        whole = state.prompt_B is not None or (state.width or 0) <= history.num_seen
        stock = Stock(
            held_BL=state.held_BL(),
            # A ratio is one of what was seen, or of the whole prompt while that is being read.
            lengths_B=tuple(history.lengths_B if whole else state.known(history.valid_BT).sum(-1).tolist()),
            intact_BT=intact_tokens(layers, history),
        )
        wanted = self._queries_from(history)
        first = wanted
        if state.bound_policy.wants.queries != 0:
            first = max(wanted, history.num_seen - layers[0].recent.num_queries)
        spared = without_queries(history, first, state.bound_policy.wants.queries) if first > wanted else []
        try:
            arriving = state.arriving(history.valid_BT, stock)
            step = state.bound_policy.begin(arriving, joint=True, kept_rows=spared)
        except ValueError as error:
            # A short sequence, say, has grown too long to be held whole.
            self.refused = error
            return
        try:
            state.held_whole = [] if step is None else [*step.held_whole]
            if step is not None and not step.idle:
                self._cut_again(step, history, first, release)
        finally:
            if not state.broken:
                count_eviction(state, held_before)

    def _cut_again(self, step: Eviction, history: History, first: int, release: bool) -> None:
        """Show every layer to a step, and then cut them all."""
        state = self.state
        where, wants = [], state.bound_policy.wants
        for layer, spec in zip(state.ragged, state.specs, strict=True):
            evidence, columns = evidence_of(
                layer,
                spec,
                history,
                self._rotary,
                num_queries=history.num_seen - first,
                each=wants.queries,
                keys=wants.keys,
                values=wants.values,
                output_weight=state.bound_policy.reads_output,
            )
            step.look(evidence, columns.token_BT)
            where.append(columns.entries)
            del evidence, columns  # one layer's copy at a time
        keeps = step.finish()
        with state.changing():
            for store, entries, keep_BHT in zip(state.stores, where, keeps, strict=True):
                keep_N = keep_BHT.to(store.device).flatten(0, 1)[entries]
                spare = len(store.lengths_R) * (state.slack + state.regime.every + PAGE)
                in_place = (
                    not release and sum(part.num_places for part in store.parts) <= int(keep_N.sum()) + spare
                )
                cut_(store, keep_N, state.bound_policy.correction, in_place=in_place)

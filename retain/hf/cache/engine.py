"""The work of a cache during a forward: append, attend, and evict when it is time.

The first forward on an empty cache attends densely, and each layer is cut before the next one runs, so the
peak is what is held plus one layer, or one and a half where layers share a budget
(`retain.budget.cascade.LEFT_OVER`). Later forwards append to the ragged rows and attend over them; when an
eviction is due (`retain.eviction.When`), every layer is looked at after the forward
(`retain.hf.cache.later_evidence`), and all are cut by one decision. So budgets that cross layers are as exact
as at the first eviction; the price is that a chunk is held in all layers until its forward ends.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from retain.cache.attend import attend_store
from retain.cache.equal_rows import StepRows, step_rows_of
from retain.cache.precision import GROUP
from retain.cache.store import SLACK
from retain.correction.cuts import cut_
from retain.eviction import Eviction
from retain.evidence import Evidence, Stock
from retain.hf.cache.generation import Generation
from retain.hf.cache.later_evidence import (
    evidence_of,
    intact_tokens,
    metadata_of,
    store_metadata_,
    without_inputs,
)
from retain.hf.cache.layer import MOST_RECENT, Layer
from retain.hf.cache.state import History, State
from retain.hf.intercept.forward_call import Call, read_call
from retain.hf.intercept.interceptor import Step, check_pointed
from retain.hf.intercept.lookahead_pass import ReadCache, look_ahead
from retain.hf.model.decoder import base_model
from retain.hf.model.layout import LayerSpec
from retain.kernels.backend import without_autocast
from retain.kernels.ragged_attention.pages import PAGE
from retain.protection import one_per_sequence, pins_per_sequence


class Engine:
    """The side of `retain.Cache` that runs during a forward.

    Args:
        model: whose forwards they are.
        state: of the cache; it changes it.
    """

    _next: History  # once the forward is over

    def __init__(self, model: torch.nn.Module, state: State):
        self.model, self.state = model, state
        self.generation = Generation()
        self.evict_at_prefill, self.hold_evidence = True, False
        self.recorded: frozenset[str] = frozenset()  # inputs of gates that held evidence shows
        self._forget()

    def _forget(self) -> None:
        """Forget what belongs to one forward."""
        self._eviction: Eviction | None = None
        self._unscored: list[Evidence] = []  # of layers that wait for lookahead tokens
        self._waiting: list[dict[str, Tensor] | None] = []  # metadata of layers that are cut with the others
        self._to_attend: set[int] = set()  # layers whose attention is to come
        self.is_quick = self._reads_whole = False  # the latter: a whole first prompt, cut layer by layer

    def reset(self) -> None:
        """Forget everything; the state may be filled again."""
        self.state.reset()
        self.generation.forget()
        self._forget()

    @property
    def _looks_again(self) -> bool:
        """True if an eviction after this forward may read what comes now."""
        state, evicts = self.state, self.evict_at_prefill and not self.state.bound_policy.keeps_all
        return evicts and (state.when.again or not state.prompt_read and not self._reads_whole)

    @property
    def _holds_queries(self) -> bool:
        """True if later evictions read queries of tokens, or gates the query of each."""
        wants = self.state.bound_policy.wants
        return self._looks_again and (wants.queries != 0 or wants.running or wants.entry_queries)

    @property
    def reads_stream(self) -> bool:
        """True if decoder layers are asked for their residual stream."""
        return "stream" in self.state.bound_policy.inputs or "stream" in self.recorded

    def begin(self, decoder: torch.nn.Module, given: Mapping[str, Any]) -> None:
        """Check the arguments of a forward (`retain.hf.intercept.forward_call`), and prepare for it."""
        state = self.state
        if base_model(self.model) is not decoder:
            raise ValueError(
                "this retain.Cache was made for another model than the one that is called: make one with "
                "retain.Cache(model, ...) for each model."
            )
        check_pointed(decoder)
        state.check_whole()
        past = state.history
        call = read_call(
            given,
            *((past.valid_BT, past.last_B) if past.num_seen else ()),
            width=state.prompt_width,
            reads_prompt=not state.prompt_read,
        )
        if call.is_prefill:
            state.first_ids_BT = given.get("input_ids")
            state.seeds = one_per_sequence(state.seeds, call.mask_BT.shape[0], "seeds")
            state.pinned = pins_per_sequence(state.pinned, call.mask_BT.shape[0])
        if state.prompt_read and call.valid_BS is not None and (state.layout.alone or state.evicts_again):
            kinds = sorted({left.name for left in state.layout.alone.values()})
            takers = [f"later evictions (when={state.when.name!r})"] * state.evicts_again
            takers += [f"layers left to transformers ({', '.join(kinds)})"] * bool(kinds)
            raise ValueError(
                f"padding behind tokens, which {' and '.join(takers)} take for tokens: read turns of "
                "different lengths in separate caches (batch_select_indices)."
            )
        self._forget()
        self._next = past.after(call) if past.num_seen else History.of(call)
        self._reads_whole = call.is_prefill and state.prompt_width <= self._next.num_seen
        if call.is_prefill:
            self._begin_prompt(call)
        state.evidence = [] if call.is_prefill and self.hold_evidence else None
        state.call = call
        if (rows := self._quick_rows(call)) is not None:
            self._begin_quick(rows, call.positions_BS[:, 0].contiguous())
        else:
            self._to_attend = {*state.layout.spec_of}

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
            if layer.store is None or layer.store.precision is not None:
                return None
            store = layer.store
            if store.free < 1:
                store.make_room_(1)
            if store.step_rows is None:
                store.step_rows = step_rows_of(store, spec.scaling, spec.soft_cap, spec.sinks_Q is not None)
            if store.step_rows is None:
                return None
            found.append(store.step_rows)
        return found

    def _begin_quick(self, rows: list[StepRows], positions_B: Tensor) -> None:
        """Tell the layers of a step the positions of their tokens."""
        positions: dict[int, Tensor] = {}
        for layer, spec, step in zip(self.state.ragged, self.state.specs, rows, strict=True):
            H = spec.num_kv_heads
            if H not in positions:
                positions[H] = positions_B.repeat_interleave(H).to(torch.int32)
            layer.quick, step.positions_R, step.last_B = step, positions[H], positions_B
            step.queries = layer.recent.chunks["queries"] if self._holds_queries else None
            layer.store.free -= 1
        self.is_quick = True

    def _begin_prompt(self, call: Call) -> None:
        """Start the eviction of a first prompt, and find what is wrong with it before it is read."""
        state, bound = self.state, self.state.bound_policy
        state.arriving(call.mask_BT)  # refuses pinned spans that are none
        if not self.evict_at_prefill:
            return
        if not self._reads_whole:
            bound.refuse("chunks")
        elif state.due(call):
            self._eviction = bound.begin(state.arriving(call.mask_BT))
            return
        if state.when.evicts_prompt:
            bound.begin(state.arriving(state.with_prompt(call.mask_BT)))  # refuses what cannot be

    def check_ids(self, ids: Any, attention_mask: Any, inputs_embeds: Any = None) -> None:
        """Refuse (ValueError) ids or embeddings that leave out what the cache has read, or begin otherwise:
        `generate` wants all, and reads what is new. Ids alone that a mask over both comes with are taken, as
        transformers does."""
        self.state.check_whole()
        given, seen = ids if inputs_embeds is None else inputs_embeds, self.state.num_seen
        if not isinstance(given, Tensor):
            return
        if given is ids and getattr(attention_mask, "shape", (0,))[-1] == seen + ids.shape[1]:
            return
        name, first_BT = "input_ids" if given is ids else "inputs_embeds", self.state.first_ids_BT
        if given.shape[1] <= seen:
            wrong = f"{name} has {given.shape[1]} tokens a row, and this cache has read {seen}"
        elif given is ids and first_BT is not None and first_BT.shape[0] == ids.shape[0]:
            differs_BT = ids[:, : first_BT.shape[1]].to(first_BT.device) != first_BT
            valid_BT = self.state.valid_BT[:, : first_BT.shape[1]].to(first_BT.device)
            if not bool((differs_BT & valid_BT).any()):
                return
            wrong = f"{name} does not begin with the tokens that this cache has read"
        else:
            return
        raise ValueError(
            f"{wrong}: pass generate those that were read and those that come (torch.cat([context_ids, "
            "question_ids], dim=1)); it reads only the new ones."
        )

    @property
    def is_static(self) -> bool:
        return self.generation.static is not None

    def show_stream(self, layer_idx: int, stream_BSE: Tensor) -> None:
        self.state.layers[layer_idx].stream_BSE = stream_BSE

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Prepare for the attention module of a layer that evicts."""
        layer = self.state.layers[layer_idx]
        stream_BSE, layer.stream_BSE = layer.stream_BSE, None
        return Step(self, layer_idx, hidden_BSE, stream_BSE)

    def attention(
        self,
        step: Step,
        queries_BQSD: Tensor,
        keys_BHSD: Tensor,
        values_BHSD: Tensor,
        dense: Callable[[], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in one layer; `dense` is what the model would have run, and runs on an empty cache."""
        assert self.state.call is not None
        self._to_attend.discard(step.layer_idx)
        if self.state.call.is_prefill:
            output = dense()
            self._first(step, queries_BQSD, keys_BHSD, values_BHSD)
            return output
        return self._attend(step, queries_BQSD, keys_BHSD, values_BHSD), None

    @without_autocast
    def _attend(self, step: Step, queries_BQSD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor) -> Tensor:
        """Append the new tokens to a layer that holds entries, and attend to all of them."""
        state, call = self.state, self.state.call
        layer, spec = state.layers[step.layer_idx], state.layout.spec_of[step.layer_idx]
        assert call is not None
        if self.is_quick:  # in a model that is compiled
            assert layer.quick is not None
            return layer.quick.attend(queries_BQSD, keys_BHSD, values_BHSD, None, {"s_aux": spec.sinks_Q})[0]
        if layer.store is None:  # a prefill that was not evicted goes on with everything
            layer.store = state.cut_dense(layer)
        store, device = layer.store, keys_BHSD.device
        positions_BS = call.positions_BS.to(device)
        valid_BS = None if call.valid_BS is None else call.valid_BS.to(device)
        seen_RS = store.append_(keys_BHSD, values_BHSD, positions_BS, valid_BS)
        how: dict[str, Any] = {"scaling": spec.scaling, "soft_cap": spec.soft_cap, "sinks_Q": spec.sinks_Q}
        out_BQSD = attend_store(store, queries_BQSD, seen_RS, **how)
        if self._looks_again:
            wants = state.bound_policy.wants
            if self._holds_queries:
                layer.recent.add("queries", queries_BQSD.detach())
            if "hidden" in wants.inputs:
                layer.recent.add("hidden", step.hidden_BSE.detach())
            if "stream" in wants.inputs and step.stream_BSE is not None:
                layer.recent.add("stream", step.stream_BSE.detach())
            if state.is_read(call):
                self._store_metadata(layer, spec, self._next)
        return out_BQSD.transpose(1, 2).contiguous()

    @without_autocast
    def _first(self, step: Step, queries_BQSD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor) -> None:
        """Cut an empty layer that has attended to its first tokens, or hold what it has."""
        state, call, device = self.state, self.state.call, keys_BHSD.device
        layer, spec = state.layers[step.layer_idx], state.layout.spec_of[step.layer_idx]
        assert call is not None
        bound, eviction = state.bound_policy, self._eviction
        evidence = spec.evidence(
            output=bound.reads_output or not self.evict_at_prefill,
            queries_BQSD=queries_BQSD.detach(),
            keys_BHTD=keys_BHSD.detach(),
            values_BHTD=values_BHSD.detach(),
            positions_BT=call.positions_BS.to(device),
            valid_BT=call.mask_BT.to(device),
            hidden_BTE=step.hidden_BSE.detach().to(device),
            rotary=state.layout.rotary,
            stream_BTE=None if step.stream_BSE is None else step.stream_BSE.detach().to(device),
        )
        if self._looks_again:
            evidence = bound.counted(bound.with_metadata(evidence))
            layer.recent.add("queries", queries_BQSD.detach())
            layer.recent.keep("queries", state.num_queries(self._next))
        if not self.evict_at_prefill:
            if state.evidence is not None:
                state.evidence.append(evidence)
            return
        if eviction is not None:
            # Keys may not be in the weights' precision; then other sequences may be decided on.
            eviction.measure(evidence.keys_BHTD.element_size())
            if bound.looks_ahead and eviction.rows:
                self._unscored.append(without_inputs(evidence, bound))
                return
        self._cut(layer, evidence)

    def _cut(self, layer: Layer, evidence: Evidence) -> None:
        """Cut a layer of the first prompt, and those below it again; or hold all until the last has come."""
        state, eviction, keep_BHT = self.state, self._eviction, None
        bound = state.bound_policy
        metadata = metadata_of(evidence) if self._looks_again else None
        pack = bound.keeps_all
        if eviction is not None:
            keep_BHT = eviction.look(evidence)
            if eviction.joint:
                self._waiting.append(metadata)
                return
            state.shrink(eviction.lower, eviction.rows)
            pack = not eviction.crosses_layers
        layer.store = state.cut_dense(layer, keep_BHT, metadata, bound.correction, bound.precision, pack=pack)

    def finish(self) -> None:
        """Count the tokens of a forward that went through as seen, and evict if that is due."""
        state = self.state
        call = state.call
        assert call is not None
        if self._to_attend:
            idx = min(self._to_attend)
            module = state.layout.spec_of[idx].module
            raise ValueError(
                f"layer {idx} attended without transformers' registry of attention functions, to which the "
                "model's config points: activations are checkpointed in training mode (call model.eval()), "
                f"or something replaced the forward of its {type(module).__name__} "
                f"({module.forward!r:.120}). Take it away, and reset() the cache."
            )
        if self._unscored:
            self._evict_ahead()
        if self._waiting:  # layers of a first prompt that were decided on together
            assert self._eviction is not None
            for layer, keep_BHT, metadata in zip(
                state.ragged, self._eviction.finish(), self._waiting, strict=True
            ):
                how = state.bound_policy.correction, state.bound_policy.precision
                layer.store = state.cut_dense(layer, keep_BHT, metadata, *how)
        due, read, problem = state.due(call), state.is_read(call), None
        state.history = self._next
        ends = not state.prompt_read and state.num_seen >= state.prompt_width
        if self._looks_again:
            if read:
                state.recorded = state.num_seen  # each layer has stored its metadata while it ran
            elif due or state.num_seen - state.recorded >= MOST_RECENT:
                for layer, spec in zip(state.ragged, state.specs, strict=True):
                    self._store_metadata(layer, spec, state.history)
                state.recorded = state.num_seen
        if self._eviction is not None:
            state.count_eviction(state.layout.num_kv_heads * sum(state.history.lengths_B))
            state.held_whole = [*self._eviction.held_whole]
        elif due and self.evict_at_prefill:
            problem = self._evict_again(release=read)
        if due or ends:
            state.last_due = state.num_seen
        if ends:
            state.end_prompt()
        self._pack(read)
        state.call = self._eviction = None
        self.is_quick = False
        if problem is not None:  # now that all is in order
            raise problem
        if state.prompt_read:
            self.generation.decode_static(state)

    def _pack(self, read: bool) -> None:
        """Pack all but the last entries of each row, where a precision says so: once nothing of the prompt
        will be evicted, then after each read, and while decoding whenever a group has come."""
        state = self.state
        later = not state.prompt_read and not state.bound_policy.keeps_all
        if state.bound_policy.precision is None or later:
            return
        if read or state.num_seen - state.packed_at >= GROUP:
            for store in state.stores:
                store.pack_()
            state.packed_at = state.num_seen

    @torch.no_grad()
    def _evict_ahead(self) -> None:
        """Cut all layers, which hold the first prompt whole, by the queries of lookahead tokens behind it."""
        gates = self.state.bound_policy.gates
        assert gates is not None
        shown, self._unscored = look_ahead(self.model, gates, self.read_only(), self._unscored), []
        self._cut_ahead(shown)

    @without_autocast
    def _cut_ahead(self, shown: list[Evidence]) -> None:
        for layer in self.state.ragged:
            self._cut(layer, shown.pop(0))  # one layer's evidence is freed after the other

    def read_only(self) -> ReadCache:
        """The prompt that is held whole, for tokens that are run behind it and forgotten."""
        return ReadCache([layer.dense() for layer in self.state.ragged])

    @without_autocast
    def _store_metadata(self, layer: Layer, spec: LayerSpec, history: History) -> None:
        """Store what later evictions read of a layer's last tokens, and free what it was made from."""
        state = self.state
        num_tokens = history.num_seen - state.recorded
        store_metadata_(layer, spec, state.bound_policy, history, state.layout.rotary, num_tokens=num_tokens)
        layer.recent.keep("queries", state.num_queries(history))

    @without_autocast
    def _evict_again(self, *, release: bool) -> ValueError | None:
        """Cut every layer back to the budget.

        Args:
            release: give the bytes back (after a read), or leave the room for what comes (while decoding,
                unless that is far more than what comes until the next eviction).

        Returns:
            the reason why it cannot be done (a short sequence has grown too long to be held whole); nothing
            was changed then.
        """
        state = self.state
        history, layers = state.history, state.ragged
        held_BL = state.held_BL()
        held_before = sum(map(sum, held_BL))
        if not held_before:  # so far all sequences are padding
            return None
        # A ratio is one of what was seen, or of the whole prompt while that is being read.
        stock = Stock(
            held_BL=held_BL,
            lengths_B=tuple(state.with_prompt(history.valid_BT).sum(-1).tolist()),
            intact_BT=intact_tokens(layers, history),
        )
        try:
            step = state.bound_policy.begin(state.arriving(history.valid_BT, stock), joint=True)
        except ValueError as error:
            return error
        state.held_whole = [] if step is None else [*step.held_whole]
        if step is not None and not step.idle:
            self._cut_again(step, history, release)
        state.count_eviction(held_before)
        return None

    def _cut_again(self, step: Eviction, history: History, release: bool) -> None:
        """Show every layer to an eviction, and then cut them all."""
        state = self.state
        where, wants = [], state.bound_policy.wants
        for layer, spec in zip(state.ragged, state.specs, strict=True):
            evidence, columns = evidence_of(
                layer,
                spec,
                history,
                state.layout.rotary,
                num_queries=state.num_queries(history),
                keys=wants.keys,
                values=wants.values,
                output_weight=state.bound_policy.reads_output,
            )
            step.look(evidence, columns.token_BT)
            where.append(columns.entries)
            del evidence, columns  # one layer's copy at a time
        for store, entries, keep_BHT in zip(state.stores, where, step.finish(), strict=True):
            keep_N = keep_BHT.to(store.device).flatten(0, 1)[entries]
            spare = len(store.lengths_R) * (SLACK + state.when.every + PAGE)
            in_place = not release and store.num_places <= int(keep_N.sum()) + spare
            cut_(store, keep_N, state.bound_policy.correction, in_place=in_place)

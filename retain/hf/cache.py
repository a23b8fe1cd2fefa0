"""The cache that `model.generate` is given: it evicts as it is filled, and holds exactly what was kept.

In: a forward on an attached model. The first one on an empty cache is the prefill: each layer attends
densely, shows its evidence, and is cut to its kept entries before the next layer runs, so the peak is what is
held plus one layer. Every later forward, of one token or of a left-padded chunk, appends to the ragged rows
and attends over them.

The one decision taken here: length means tokens *seen*. Positions, masks and slicing follow it as if nothing
had been evicted; what is held shows only in `report()` and `bytes_held()`. All state of a conversation is
here, none on the model.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache as TransformersCache

from retain.attend import attend
from retain.budget_table import BudgetTable
from retain.cache import SLACK, RaggedStore
from retain.evidence import Evidence
from retain.hf.call import Call, Step, read_call
from retain.hf.given import Arriving, Given, pinned_of, seeds_of
from retain.hf.layer import Layer
from retain.hf.model import base_model, describe
from retain.hf.report import LayerReport, Report, total_of
from retain.hf.rule import Eviction, Rule, make_rule
from retain.rotary import Rotary

PATH = "plain PyTorch over ragged rows"


class Cache(TransformersCache):
    """A KV cache that keeps, of each (sequence, layer, KV head), the entries that a policy chose.

    Args:
        model: the model it is for; `retain.attach(model)` it before use.
        policy: a preset (`retain.policies()`), a path to a YAML, a `Policy`, a function `evidence ->
            keep_BHT`, or None to keep everything until `evict` is called.
        keep_ratio: kept / seen, in (0, 1]. State exactly one budget.
        tokens_per_head: entries per KV head.
        bytes: bytes of keys and values per sequence, over all layers.
        bytes_total: bytes of keys and values of the whole batch, split by the sequences' lengths.
        gates: for learned policies: a path, a hub id, or loaded gates.
        seeds: for policies that draw: one per sequence, or per prompt where `generate` repeats them.
        pinned: spans `(start, stop)` of tokens that are never evicted, counted without padding: one list for
            all sequences, or one list per sequence (per prompt, where `generate` repeats them).
        tokenizer: whose chat template shows where turns begin, for `protection={"turns": True}`.
        slack: free entries per row that an evicted layer is given for new tokens.
        **overrides: fields of the policy to replace, e.g. `fusion="log_linear"`; a section is merged into the
            policy's, e.g. `protection={"recent": 8}`; `observed` may be a function `evidence -> Score`
            (`retain.hf.press` makes one of a foreign scorer).

    Example:
        >>> cache = retain.Cache(model, policy="snapkv", keep_ratio=0.2)  # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Any = "fused",
        *,
        keep_ratio: float | None = None,
        tokens_per_head: int | None = None,
        bytes: int | None = None,
        bytes_total: int | None = None,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        tokenizer: Any = None,
        slack: int = SLACK,
        **overrides: Any,
    ):
        self.specs = describe(model)
        super().__init__(layers=[Layer() for _ in self.specs])
        self.model = model
        self.rule = make_rule(
            model,
            policy,
            layers=self.specs,
            budget=_stated(keep_ratio, tokens_per_head, bytes, bytes_total),
            gates=gates,
            tokenizer=tokenizer,
            pinned=pinned,
            overrides=overrides,
        )
        self._given_rule, self._given_seeds, self._given_pinned = self.rule, seeds, pinned
        self.slack = slack
        self._evict_at_prefill, self._hold_evidence = True, False
        self._forget()

    def _forget(self) -> None:
        self.rule, self.seeds = self._given_rule, self._given_seeds
        self._pinned_BT: Bool[Tensor, "B T"] | None = None
        self.evidence: list[Evidence] | None = None
        self._valid_BT: Bool[Tensor, "B T"] | None = None
        # Chunks [B, S], joined when asked for, so that a decode step copies none.
        self._positions: list[Tensor] = []
        self._last_B: Int[Tensor, " B"] | None = None
        self._call: Call | None = None
        self._eviction: Eviction | None = None

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
            self.reset()
        call = read_call(
            self._valid_BT,
            self._last_B,
            lambda: self.positions_BT,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            rotary=rotary,
        )
        if call.is_prefill:
            self.seeds = seeds_of(self.seeds, call.mask_BT.shape[0])
            self._pinned_BT = pinned_of(self._given_pinned, call.mask_BT)
            if self._evict_at_prefill and self.rule.begin is not None:
                size = self.specs[0].output_weight_QDE.element_size()
                given = Given(self.seeds, self._pinned_BT)
                self._eviction = self.rule.begin(given, Arriving(call.mask_BT, call.token_ids_BS, size))
        self.evidence = [] if call.is_prefill and self._hold_evidence else None
        if call.forgotten_BT is not None:
            self._drop(call.forgotten_BT)
        self._call = call

    def expect(self, layer_idx: int, hidden_BSE: Tensor) -> Step:
        """Before a layer's attention module runs."""
        if self._call is None:
            raise ValueError(
                "an attention layer was called outside a forward of its decoder: call the model, not its "
                "layers, and "
                "retain.attach the model that you call."
            )
        self._check_all_ran()
        self.layers[layer_idx].expected = True
        return Step(self, layer_idx, hidden_BSE)

    def _check_all_ran(self) -> None:
        if any(layer.expected for layer in self.layers):
            raise ValueError(
                "the model's attention implementation was changed after retain.attach: undo the handle, "
                "change it, and "
                "attach again."
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
        """One layer's attention; `dense` is what the model would have run, and runs at the prefill."""
        layer, call, spec = self.layers[step.layer_idx], self._call, self.specs[step.layer_idx]
        assert call is not None
        layer.expected = False
        scaling = spec.scaling if scaling is None else scaling
        device = keys_BHSD.device
        if call.is_prefill:
            output = dense()
            evidence = Evidence(
                layer_idx=step.layer_idx,
                queries_BQSD=queries_BQSD.detach(),
                keys_BHTD=keys_BHSD.detach(),
                values_BHTD=values_BHSD.detach(),
                output_weight_QDE=spec.output_weight_QDE,
                scaling=scaling,
                positions_BT=call.positions_BS.to(device),
                valid_BT=call.mask_BT.to(device),
                hidden_BTE=step.hidden_BSE.detach().to(device),
                token_ids_BT=None if call.token_ids_BS is None else call.token_ids_BS.to(device),
                soft_cap=soft_cap,
                rotary=call.rotary,
            )
            if self._evict_at_prefill:
                keep_BHT = None
                if self._eviction is not None:
                    keep_BHT, lower = self._eviction.add(evidence)
                    self._shrink(lower)
                layer.store = self._store(layer, keep_BHT, evidence.valid_BT, evidence.positions_BT)
            elif self.evidence is not None:
                self.evidence.append(evidence)
            return output
        if layer.store is None:  # a prefill that was not evicted goes on with everything
            layer.store = self._store(layer, None, self.valid_BT, self.positions_BT)
        store = layer.store
        valid_BS = None if call.valid_BS is None else call.valid_BS.to(device)
        seen_RS = store.append_(keys_BHSD, values_BHSD, call.positions_BS.to(device), valid_BS)
        out_BQSD = attend(
            queries_BQSD,
            store.keys_CD,
            store.values_CD,
            store.offsets_R1,
            store.lengths_R,
            seen_RS,
            scaling=scaling,
            soft_cap=soft_cap,
            order_R=store.order_R,
            blocks=store.blocks,
        )
        return out_BQSD.transpose(1, 2).contiguous(), None

    def finish(self) -> None:
        """After the decoder ran: its tokens are seen now."""
        call = self._call
        assert call is not None
        self._check_all_ran()
        self._call = self._eviction = None
        last_B = call.positions_BS[:, -1]
        if call.valid_BS is not None and self._last_B is not None:
            # Pads stand on the left, so only a sequence without a single new token has one in the last
            # column.
            last_B = torch.where(call.valid_BS[:, -1], last_B, self._last_B.to(last_B.device))
        self._note(call.mask_BT, [*self._positions, call.positions_BS], last_B)

    def _note(self, valid_BT: Tensor, positions: list[Tensor], last_B: Tensor | None = None) -> None:
        """What was seen; without `last_B` it is found."""
        self._valid_BT, self._positions = valid_BT, positions
        self._last_B = self.positions_BT.masked_fill(~valid_BT, -1).amax(1) if last_B is None else last_B
        for layer in self.layers:
            layer.seen = valid_BT.shape[1]

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"] | None = None,
        *,
        evict: bool = True,
        hold_evidence: bool = False,
    ) -> "Cache":
        """Read a context without generating: one forward of the decoder, without its head.

        Positions count a sequence's own tokens, as `model.generate` counts them, so `generate` may continue.

        Args:
            input_ids: token ids, left-padded.
            attention_mask: 1 on tokens, 0 on padding; None: no padding.
            evict: cut each layer as it is filled. False holds everything, for `evict` or `evict_with` later.
            hold_evidence: keep `self.evidence` (queries and attention inputs too), which `evict` needs. Only
                with `evict=False`: what evidence shows cannot be freed.

        Returns:
            this cache.
        """
        if hold_evidence and evict:
            raise ValueError(
                "hold_evidence=True holds all keys and values, so nothing would be freed: pass evict=False "
                "too."
            )
        if self.num_seen:
            raise ValueError(
                f"the cache has already seen {self.num_seen} tokens: make a new one, or reset() it."
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        self._evict_at_prefill, self._hold_evidence = evict, hold_evidence
        try:
            base_model(self.model)(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self,
                use_cache=True,
            )
        except BaseException:
            self.reset()  # what was filled so far is let go: memory may be why it failed
            raise
        finally:
            self._evict_at_prefill, self._hold_evidence = True, False
        return self

    def evict(
        self,
        policy: Any = None,
        *,
        keep_ratio: float | None = None,
        tokens_per_head: int | None = None,
        bytes: int | None = None,
        bytes_total: int | None = None,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        tokenizer: Any = None,
        **overrides: Any,
    ) -> "Cache":
        """Evict what a `prefill(evict=False, hold_evidence=True)` held, by the cache's own policy or the one
        given here.

        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: the request cannot be met; the cache is as it was, and may be asked again.
        """
        if self.evidence is None:
            raise ValueError(
                "there is no evidence to decide on: prefill with evict=False, hold_evidence=True."
            )
        budget = _stated(keep_ratio, tokens_per_head, bytes, bytes_total)
        rule = self.rule
        if policy is not None:
            rule = make_rule(
                self.model,
                policy,
                layers=self.specs,
                budget=budget,
                gates=gates,
                tokenizer=tokenizer,
                pinned=pinned,
                overrides=overrides,
            )
        elif overrides or any(value is not None for value in (*budget.values(), gates, tokenizer)):
            raise ValueError(
                "a budget, gates or policy settings were given without a policy: name the policy too."
            )
        chosen = self.seeds if seeds is None else seeds_of(seeds, self.batch_size)
        pinned_BT = self._pinned_BT if pinned is None else pinned_of(pinned, self.valid_BT)
        given = Given(chosen, pinned_BT)
        keep: Sequence[Tensor | None] = [None] * len(self.evidence)
        if rule.decide is not None:
            keep = rule.decide(self.evidence, given)
        self._cut(keep)
        self.rule, self.seeds = rule, chosen
        return self

    def evict_with(self, keep: Sequence[Tensor]) -> "Cache":
        """Evict what a `prefill(evict=False)` held, by keep masks `[B, H, T]`, one per layer.

        Padding is never kept.

        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: a mask does not fit; the cache is as it was.
        """
        if any(layer.keys is None for layer in self.layers):
            raise ValueError(
                "nothing is held densely, so nothing can be chosen from: prefill with evict=False."
            )
        if len(keep) != len(self.layers):
            raise ValueError(
                f"got {len(keep)} keep masks for {len(self.layers)} layers: pass one [B, H, T] per layer."
            )
        self._cut(keep)
        return self

    def _cut(self, keep: Sequence[Tensor | None]) -> None:
        """Cut all dense layers; every mask is checked before the first is."""
        for layer, keep_BHT in zip(self.layers, keep, strict=True):
            layer.check(keep_BHT)
        self.evidence = None  # it shares the dense tensors, which each layer lets go in turn
        for layer, keep_BHT in zip(self.layers, keep, strict=True):
            layer.store = self._store(layer, keep_BHT, self.valid_BT, self.positions_BT)

    def _store(
        self, layer: Layer, keep_BHT: Tensor | None, valid_BT: Tensor, positions_BT: Tensor
    ) -> RaggedStore:
        """A layer's dense keys and values, cut to a store and let go; None keeps all but padding."""
        layer.check(keep_BHT)
        keys, values = layer.dense()
        valid_BHT = valid_BT.to(keys.device)[:, None].expand(keys.shape[:3])
        keep_BHT = valid_BHT if keep_BHT is None else keep_BHT.to(keys.device) & valid_BHT
        store = RaggedStore.from_dense(keys, values, positions_BT.to(keys.device), keep_BHT, self.slack)
        layer.keys = layer.values = None
        return store

    def _shrink(self, lower: Sequence[Tensor | None]) -> None:
        """Lower layers let go of what a cascade no longer keeps, one layer at a time."""
        for layer, keep_N in zip(self.layers, lower, strict=False):
            if keep_N is not None:
                assert layer.store is not None
                layer.store.filter_(keep_N.to(layer.store.keys_CD.device))

    def _drop(self, forgotten_BT: Bool[Tensor, "B T"]) -> None:
        """Let go of entries that the mask has since declared padding (pads that `generate` put behind a
        finished row)."""
        positions_BT = self.positions_BT
        gone_BP = forgotten_BT.new_zeros(forgotten_BT.shape[0], int(positions_BT.max()) + 1)
        b, t = forgotten_BT.nonzero(as_tuple=True)
        gone_BP[b, positions_BT[b, t]] = True
        for layer in self.layers:
            if layer.store is not None:
                layer.store.drop_(gone_BP)
        self._note(self.valid_BT & ~forgotten_BT, self._positions)

    def fork(self) -> "Cache":
        """A copy that goes its own way. Of a dense prefill nothing is copied until a fork evicts."""
        other = copy.copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        other.evidence = None if self.evidence is None else list(self.evidence)
        other._positions = list(self._positions)
        return other

    def __deepcopy__(self, memo: dict) -> "Cache":
        return self.fork()

    @classmethod
    def concat(cls, caches: Sequence["Cache"], *, slack: int | None = None) -> "Cache":
        """Stack caches along the batch, so that contexts cut by different policies and ratios decode as one
        batch.

        Args:
            caches: of one model, all having seen equally many tokens, padding included.
            slack: free entries per row for new tokens (a question and its answer, if known); default: theirs.

        Returns:
            a new cache; the given ones are left alone.
        """
        if not caches:
            raise ValueError("concat needs at least one cache.")
        seen = sorted({cache.num_seen for cache in caches})
        if len(seen) != 1 or not seen[0]:
            raise ValueError(
                f"caches to concat have seen {seen} tokens: left-pad their contexts to one width first."
            )
        if any(cache.model is not caches[0].model for cache in caches):
            raise ValueError("caches to concat belong to different models.")
        parts = []
        for cache in caches:
            if any(layer.store is None for layer in cache.layers):
                cache = cache.fork()
                for layer in cache.layers:
                    if layer.store is None:
                        layer.store = cache._store(layer, None, cache.valid_BT, cache.positions_BT)
            parts.append(cache)
        other = copy.copy(parts[0])
        other.layers = [copy.copy(layer) for layer in other.layers]
        other.evidence, other.seeds, other._given_seeds = None, None, None
        other._pinned_BT = other._given_pinned = None
        other.rule = other._given_rule = Rule(" + ".join(sorted({cache.rule.name for cache in caches})))
        for idx, layer in enumerate(other.layers):
            stores = [part.layers[idx].store for part in parts]
            layer.store = RaggedStore.concat([store for store in stores if store is not None], slack)
        other._note(
            torch.cat([part.valid_BT for part in parts]), [torch.cat([part.positions_BT for part in parts])]
        )
        return other

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens: keep the first `num_tokens` seen, or remove `-num_tokens` of them.

        What was evicted stays evicted; the bytes of what is forgotten are given back.
        """
        num_tokens = int(num_tokens)
        length = num_tokens if num_tokens >= 0 else max(0, self.num_seen + num_tokens)
        if length >= self.num_seen:
            return
        if length == 0:
            self.reset()
            return
        self.evidence = None
        self._note(self.valid_BT[:, :length], [self.positions_BT[:, :length]])
        for layer in self.layers:
            if layer.store is not None:
                layer.store.crop_(self._last_B.to(layer.store.positions_C.device) + 1)
            else:
                layer.keys, layer.values = (tensor[:, :, :length].clone() for tensor in layer.dense())

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        if not self.num_seen:
            return
        for layer in self.layers:
            layer.select_batch(indices)
        if self.evidence is not None:
            self.evidence = [evidence.select_batch(indices) for evidence in self.evidence]
        if self.seeds is not None:
            self.seeds = [self.seeds[idx] for idx in indices.tolist()]
        if self._pinned_BT is not None:
            self._pinned_BT = self._pinned_BT[indices.to(self._pinned_BT.device)]
        indices = indices.to(self.valid_BT.device)
        self._note(self.valid_BT[indices], [self.positions_BT[indices]])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as `generate` expects for beams and several returned sequences."""
        if self.num_seen:
            sequences = torch.arange(self.batch_size, device=self.valid_BT.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forget everything; the cache may be filled again."""
        self.layers = [Layer() for _ in self.specs]
        self._forget()

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return 0 if self._valid_BT is None else self._valid_BT.shape[1]

    @property
    def batch_size(self) -> int:
        return 0 if self._valid_BT is None else self._valid_BT.shape[0]

    @property
    def valid_BT(self) -> Bool[Tensor, "B T"]:
        """True on the real tokens among those seen."""
        assert self._valid_BT is not None, "nothing was seen yet"
        return self._valid_BT

    @property
    def positions_BT(self) -> Int[Tensor, "B T"]:
        """RoPE position of every token seen."""
        if len(self._positions) > 1:
            self._positions = [torch.cat(self._positions, dim=1)]
        return self._positions[0]

    def report(self) -> Report:
        """Entries and bytes seen, held and allocated, per layer and in total; `str` of it is a table."""
        tokens = 0 if self._valid_BT is None else int(self._valid_BT.sum())
        rows = []
        for spec, layer in zip(self.specs, self.layers, strict=True):
            seen = tokens * spec.num_kv_heads
            if layer.store is not None:
                held, allocated = layer.store.entries_held, layer.store.bytes_allocated
                entry = layer.store.entry_bytes
            elif layer.keys is not None:
                dense = layer.dense()
                held, allocated = seen, sum(tensor.untyped_storage().nbytes() for tensor in dense)
                entry = sum(tensor.shape[-1] * tensor.element_size() for tensor in dense)
            else:
                held = allocated = entry = 0
            rows.append(
                LayerReport(f"layer {spec.layer_idx}", seen, held, seen * entry, held * entry, allocated)
            )
        return Report(self.rule.name, PATH, tuple(rows), total_of(rows))

    def budgets(self) -> BudgetTable:
        """Entries that each sequence, layer and KV head holds; `print` shows a table."""
        if not self.num_seen:
            raise ValueError("nothing was read yet, so nothing is held: prefill or generate first.")
        seen_B = self.valid_BT.sum(-1).cpu()
        heads = [spec.num_kv_heads for spec in self.specs]
        held = [layer.held_BH(seen_B, own) for layer, own in zip(self.layers, heads, strict=True)]
        held = [pad(own_BH, (0, max(heads) - own_BH.shape[1])) for own_BH in held]
        return BudgetTable(torch.stack(held, dim=1), seen_B, self.rule.name)

    def bytes_held(self) -> int:
        """Bytes of the keys and values held, over all layers."""
        return self.report().total.bytes_held

    def bytes_allocated(self) -> int:
        """Bytes of all storage behind them: slack, unequal rooms and positions included."""
        return self.report().total.bytes_allocated

    def bytes_full(self) -> int:
        """Bytes of keys and values had nothing been evicted, padding apart."""
        return self.report().total.bytes_full

    @property
    def entries_held(self) -> int:
        return self.report().total.entries_held

    @property
    def entries_seen(self) -> int:
        return self.report().total.entries_seen

    @property
    def entries_evicted(self) -> int:
        return self.report().total.entries_evicted


def _stated(*amounts: int | float | None) -> dict[str, int | float | None]:
    """A budget as `retain.budget.Budget` takes it; None is not stated."""
    return dict(zip(("keep_ratio", "tokens_per_head", "bytes", "bytes_total"), amounts, strict=True))

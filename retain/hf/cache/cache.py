"""The cache that `model.generate` is given: it evicts as it is filled, and holds exactly what was kept.

The first forward on an empty cache is the prefill: each layer attends densely, shows its evidence, and is cut
to its kept entries before the next layer runs, so the peak is what is held plus one layer. Later forwards
append to the ragged rows and attend over them; when the regime says so (`retain.hf.cache.regime`), all layers
are cut back to the budget (`retain.hf.cache.later_evidence`). Layers without full attention keep a cache
layer of transformers.

Length means tokens *seen*: positions, masks and slicing follow it as if nothing had been evicted; only
`report()` and `bytes_held()` show what is held. All state of a conversation is here, none on the model.
"""

import copy
import os
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, SupportsFloat, SupportsInt

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import pad

from retain.budget.table import BudgetTable
from retain.cache.store import SLACK, RaggedStore
from retain.config import plain_numbers
from retain.evidence import Evidence
from retain.hf.cache import pass_through_layers as foreign
from retain.hf.cache import saving
from retain.hf.cache.batch_context import (
    Given,
    check_wanted,
    pinned_of,
    prompt_from,
    seeds_from,
    seeds_of,
    slack_from,
    whole,
)
from retain.hf.cache.bound_policy import Rule, make_rule, short_limit
from retain.hf.cache.capacity_guard import AUTO, OWN, make_guard
from retain.hf.cache.engine import Engine
from retain.hf.cache.history import History
from retain.hf.cache.recent_queries import Recent
from retain.hf.cache.regime import Regime
from retain.hf.cache.report import Report, report_of
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.hf.model.decoder import base_model, layout_of, learned_prompt, refuse_prefix
from retain.protection import spans_by_sequence


class Cache(Engine):
    """A KV cache that keeps, of each (sequence, layer, KV head), the entries that a policy chose.

    Args:
        model: the model it is for; `retain.attach(model)` it before use.
        policy: a preset (`retain.policies()`), a path to a YAML, a `Policy`, a function `evidence ->
            keep_BHT`, or None to keep everything until `evict` is called.
        keep_ratio: kept / seen, in (0, 1]. State exactly one budget.
        tokens_per_head: entries per KV head.
        bytes: bytes of keys and values per sequence, over all layers that evict.
        bytes_total: bytes of keys and values of the whole batch, split by the sequences' lengths.
        threshold: in place of a budget: what scores below it goes, once it is protected no longer
            (admission).
        regime: when to evict: `prefill` (once, when the first prompt was read), `chunked` (after every read:
            each chunk of a prompt, each later turn), `decode` (every so many tokens, once the first prompt is
            over), `prefill+decode`, `chunked+decode`.
        every: tokens between evictions, for `decode`.
        gates: for learned policies: a path, a hub id, or loaded gates. Lookahead gates bring adapters of
            their own for the modules that they adapt, and take none beside them: merge yours first
            (`model.merge_and_unload()`).
        seeds: for policies that draw: one per sequence, or per prompt where `generate` repeats them.
        pinned: spans `(start, stop)` of tokens of the first prompt that are never evicted, counted without
            padding: one list for all sequences, or one list per sequence (per prompt, where `generate`
                repeats them).
        tokenizer: whose chat template shows where turns begin, for `protection={"turns": True}`.
        slack: free entries per row that an evicted layer is given for new tokens.
        capacity: where the budget is too small for what this context holds (`retain.budget.capacity`):
        `warn`;
            `raise` a `CapacityError` before anything goes; `keep` as much more as is needed (both hold the
            whole first prompt until all layers have come); a `Guard` with a limit of its own; None for
            nothing. `auto` warns where the gates are stored with a limit and the policy is such as that was
            read off for (scope `model`, fusion `sum`, `max` or `learned`).
        short: a sequence of at most `short_tokens` tokens whose budget cannot hold what is protected, or that
            is shorter than the policy's window, is held whole, as `report()` says (`keep`), or refused as a
            longer one is (`raise`: for comparisons at equal memory).
        **overrides: fields of the policy to replace, e.g. `fusion="log_linear"`; a section is merged into the
            policy's, e.g. `protection={"recent": 8}`; `observed` may be a function `evidence -> Score`
            (`retain.hf.intercept.press` makes one of a foreign scorer).

    A mask may take back tokens that were seen, such as those that `generate` fills a finished sequence up
    with: at a turn, and at the first decoding step after a prompt, a turn or a `generate`. Where kernels run,
    a later step is not waited for: a mask or positions that were wrong there are refused some tokens late.

    Example:
        >>> cache = retain.Cache(model, policy="snapkv", keep_ratio=0.2)  # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Any = "fused",
        *,
        keep_ratio: SupportsFloat | None = None,
        tokens_per_head: SupportsFloat | None = None,
        bytes: SupportsFloat | None = None,
        bytes_total: SupportsFloat | None = None,
        threshold: SupportsFloat | None = None,
        regime: str = "prefill",
        every: SupportsInt = 32,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        tokenizer: Any = None,
        slack: int = SLACK,
        capacity: Any = AUTO,
        short: str = "keep",
        short_tokens: int = 256,
        **overrides: Any,
    ):
        refuse_prefix(model)
        layout = layout_of(model)
        rule = make_rule(
            model,
            policy,
            layers=layout.evicting,
            budget=_stated(keep_ratio, tokens_per_head, bytes, bytes_total, threshold),
            gates=gates,
            tokenizer=tokenizer,
            pinned=pinned,
            overrides=overrides,
            short_tokens=short_limit(short, short_tokens),
        )
        own = Regime(regime, plain_numbers(every))
        rule.check(own)
        self.model, self._given_short = model, (short, short_tokens)
        self._given_guard = (capacity, make_guard(capacity, rule))
        slack, seeds = slack_from(slack), seeds_from(seeds)
        super().__init__(layout, rule, own, slack=slack, seeds=seeds, pinned=pinned)

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"] | None = None,
        *,
        chunk_size: int | None = None,
        evict: bool = True,
        hold_evidence: bool = False,
        wanted: Collection[str] = (),
    ) -> "Cache":
        """Read a context without generating: forwards of the decoder, without its head.

        Positions count a sequence's own tokens, as `model.generate` counts them, so `generate` may continue.

        Args:
            input_ids: token ids, left-padded.
            attention_mask: 1 on tokens, 0 on padding; None: no padding.
            chunk_size: tokens a forward; None: all at once. In the regime `chunked` the budget (a ratio is
                one of the whole context) is enforced after each; in the others the context is evicted from
                when it was read.
            evict: cut each layer as it is filled. False holds everything, for `evict` or `evict_with` later.
            hold_evidence: keep `self.evidence` (queries and attention inputs too), which `evict` needs. Only
                with `evict=False`: what evidence shows cannot be freed.
            wanted: what gates that are no part of this cache look at (`GateSet.inputs`): of it `stream`, the
                residual stream, is only held where it is named.

        Returns:
            this cache.

        Raises:
            ValueError: ids or a mask that are none, settings that do not go together, unknown names in
                `wanted`, or a cache that has seen tokens; nothing was read then.
        """
        if chunk_size is not None:
            chunk_size = whole(chunk_size, "chunk_size", "tokens a forward", 1)
        self._check_prefill(chunk_size, evict, hold_evidence)
        check_wanted(wanted, hold_evidence)
        vocabulary = base_model(self.model).config.get_text_config().vocab_size
        input_ids, mask = prompt_from(input_ids, attention_mask, vocabulary)
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        self._evict_at_prefill, self._hold_evidence = evict, hold_evidence
        self._recorded = frozenset(wanted)
        total = input_ids.shape[1]
        if chunk_size is not None and chunk_size < total:
            self.announce(total, mask)
        try:
            for start in range(0, total, chunk_size or total):
                stop = min(start + (chunk_size or total), total)
                base_model(self.model)(
                    input_ids=input_ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=self,
                    use_cache=True,
                )
        except BaseException:
            self.reset()  # what was filled so far is let go: memory may be why it failed
            raise
        finally:
            self._evict_at_prefill, self._hold_evidence = True, False
            self._recorded = frozenset()
        return self

    def _check_prefill(self, chunk_size: int | None, evict: bool, hold_evidence: bool) -> None:
        if hold_evidence and evict:
            raise ValueError(
                "hold_evidence=True holds all keys and values, so nothing would be freed: pass "
                "evict=False too."
            )
        if not evict and self.regime.again and not self.rule.keeps_all:
            raise ValueError(
                f"evict=False leaves the eviction to you, and regime {self.regime.name!r} evicts by itself "
                "later: make the cache with regime='prefill', or let it evict."
            )
        if chunk_size is not None and not evict:
            raise ValueError(f"chunk_size is {chunk_size} with evict={evict}: pass evict=True.")
        if (kind := learned_prompt(self.model)) is not None:
            raise ValueError(
                f"this model carries a learned prompt of peft ({kind}), which prefill would leave out, since "
                "it reads with the decoder alone: call model.generate(...), which puts the prompt first."
            )
        if self.num_seen:
            raise ValueError(
                f"the cache has already seen {self.num_seen} tokens: make a new one, or reset() it."
            )

    def evict(
        self,
        policy: Any = None,
        *,
        keep_ratio: SupportsFloat | None = None,
        tokens_per_head: SupportsFloat | None = None,
        bytes: SupportsFloat | None = None,
        bytes_total: SupportsFloat | None = None,
        threshold: SupportsFloat | None = None,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        tokenizer: Any = None,
        capacity: Any = OWN,
        **overrides: Any,
    ) -> "Cache":
        """Evict what a `prefill(evict=False, hold_evidence=True)` held, by the cache's own policy or the one
        given here, which stays until `reset()`.

        Args:
            capacity: as the cache takes it; `own`: what the cache was made with, also for a policy that is
                named here. The others too are as the cache takes them.

        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: the request cannot be met (or, a `CapacityError`, not be afforded); the cache is as it
                was, and may be asked again.
        """
        if self.evidence is None:
            raise ValueError(
                "there is no evidence to decide on: prefill with evict=False, hold_evidence=True."
            )
        budget = _stated(keep_ratio, tokens_per_head, bytes, bytes_total, threshold)
        rule, guard = self.rule, self.guard
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
                short_tokens=short_limit(*self._given_short),
            )
        elif overrides or any(value is not None for value in (*budget.values(), gates, tokenizer)):
            raise ValueError(
                "a budget, gates or policy settings were given without a policy: name the policy too."
            )
        if isinstance(capacity, str) and capacity == OWN:
            guard = guard if policy is None else make_guard(self._given_guard[0], rule)
        else:
            guard = make_guard(capacity, rule)
        chosen = self.seeds if seeds is None else seeds_of(seeds_from(seeds), self.batch_size)
        evidence: Sequence[Evidence] = self.evidence
        pinned_BT = pinned_of(self._pins if pinned is None else pinned, evidence[0].valid_BT)
        if rule.looks_ahead and rule.request is not None:
            from retain.hf.intercept.attach import attach  # which knows this class

            with torch.no_grad(), attach(self.model):
                evidence = look_ahead(self.model, rule.request.gates, self.read_only(), self.evidence)
        keep = self._decide(rule, guard, evidence, Given(chosen, pinned_BT))
        del evidence
        self._cut([None] * len(self.evidence) if keep is None else keep)
        self.rule, self.guard, self.seeds = rule, guard, chosen
        self._say()
        return self

    def evict_with(self, keep: Sequence[Tensor]) -> "Cache":
        """Evict what a `prefill(evict=False)` held, by keep masks `[B, H, T]`, one per layer, of the tokens
        as evidence shows them: padding first, which is never kept.

        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: a mask does not fit; the cache is as it was.
        """
        if any(layer.keys is None for layer in self.ragged):
            raise ValueError(
                "nothing is held densely, so nothing can be chosen from: prefill with evict=False."
            )
        if len(keep) != len(self.specs):
            raise ValueError(
                f"got {len(keep)} keep masks for {len(self.specs)} layers: pass one [B, H, T] per layer that "
                "evicts."
            )
        self._cut(keep)
        return self

    def _cut(self, keep: Sequence[Tensor | None]) -> None:
        """Cut all dense layers; every mask is checked before the first is."""
        for layer, keep_BHT in zip(self.ragged, keep, strict=True):
            layer.check(keep_BHT)
        self.evidence = None  # it shares the dense tensors, which each layer lets go in turn
        with self.changing():
            for layer, keep_BHT in zip(self.ragged, keep, strict=True):
                layer.store = self._cut_dense(layer, keep_BHT, self.valid_BT, self.positions_BT)
        if self.history is not None:
            self._count(sum(self.history.lengths_B) * sum(spec.num_kv_heads for spec in self.specs))

    def fork(self) -> "Cache":
        """A copy that goes its own way. Of a dense prefill nothing is copied until a fork evicts."""
        self.check_whole()
        other = copy.copy(self)
        alone = self.layout.alone
        other.layers = [
            foreign.fork(layer) if idx in alone else layer.fork() for idx, layer in enumerate(self.layers)
        ]
        other.evidence = None if self.evidence is None else list(self.evidence)
        other.history = None if self.history is None else self.history.fork()
        other._moments, other.held_whole = list(self._moments), list(self.held_whole)
        # Whoever generates, it is not the copy.
        other._generates, other._ended_B, other._filled_B = False, None, None
        other._doubts, other._steps, other._opens = [], False, False
        return other

    def __deepcopy__(self, memo: dict) -> "Cache":
        return self.fork()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the conversation to one `.safetensors` file (`retain.hf.cache.saving`), beside an older one
        until it is whole.

        Returns:
            the path.

        Raises:
            ValueError: nothing was read yet, or it is held densely (evict first); nothing was written.
        """
        self.check_whole()
        return saving.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        gates: Any = None,
        tokenizer: Any = None,
        policy: Any = None,
    ) -> "Cache":
        """Read a conversation back that `save` wrote, policy, budget and regime with it. It goes on exactly.

        Args:
            path: of the file.
            model: that it was saved from, in the same precision; entries go to their layers' devices.
            gates: that the policy takes, if it is a learned one.
            tokenizer: whose chat template shows where turns begin, if the policy protects them.
            policy: the function that the policy (or its `observed`) was: a file cannot hold one.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it is truncated, corrupt, of a newer schema, of another model or precision, or gates
                or a function are missing.

        Example:
            >>> cache.save("context.safetensors")  # doctest: +SKIP
            >>> cache = retain.Cache.load("context.safetensors", model)  # doctest: +SKIP
        """
        return saving.load(cls, path, model, gates=gates, tokenizer=tokenizer, policy=policy)

    @classmethod
    def concat(cls, caches: Sequence["Cache"], *, slack: int | None = None) -> "Cache":
        """Stack caches along the batch, so that contexts cut by different policies and ratios decode as one
        batch.

        Args:
            caches: of one model, all having seen equally many tokens, padding included.
            slack: free entries per row for new tokens (a question and its answer, if known); default: theirs.

        Returns:
            a new cache, which evicts no more; the given ones are left alone.
        """
        if not caches:
            raise ValueError("concat needs at least one cache.")
        slack = None if slack is None else slack_from(slack)
        seen = sorted({cache.num_seen for cache in caches})
        if len(seen) != 1 or not seen[0]:
            raise ValueError(
                f"caches to concat have seen {seen} tokens: left-pad their contexts to one width first."
            )
        if any(cache.model is not caches[0].model for cache in caches):
            raise ValueError("caches to concat belong to different models.")
        parts = [cache.fork() for cache in caches]
        for part in parts:
            for layer in part.ragged:
                if layer.store is None:
                    layer.store = part._cut_dense(layer, None, part.valid_BT, part.positions_BT)
                layer.store.beside.clear()
        other = parts[0].fork()
        other._given = (Rule(" + ".join(sorted({cache.rule.name for cache in caches}))), Regime(), None, None)
        other.rule, other.regime, other.seeds, other._pins = other._given
        other._given_guard = (None, None)
        other.guard = other.capacity = other.evidence = None
        for idx, layer in enumerate(other.layers):
            if idx in other.layout.alone:
                other.layers[idx] = foreign.concat([part.layers[idx] for part in parts])
                continue
            stores = [part.layers[idx].store for part in parts]
            layer.store, layer.recent = RaggedStore.concat(stores, slack), Recent()
        other.history = History.concat([part.history for part in parts if part.history is not None])
        other._prompt_B = list(other.history.lengths_B)
        other._moments, other._noted = [other.num_seen], other.num_seen
        other.evictions = max(part.evictions for part in parts)
        other.evicted_at = max(part.evicted_at for part in parts)
        sizes = [0, *accumulate(part.batch_size for part in parts)]
        other.held_whole = [
            size + row for size, part in zip(sizes, parts, strict=False) for row in part.held_whole
        ]
        return other

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens: keep the first `num_tokens` seen, or remove `-num_tokens` of them.

        The cache is then as if they had never come; their bytes are given back. To keep none is to
        `reset()`.

        Raises:
            ValueError: something was evicted since, or cannot be undone: nothing was changed.
        """
        num_tokens = int(num_tokens)
        length = num_tokens if num_tokens >= 0 else max(0, self.num_seen + num_tokens)
        if length >= self.num_seen:
            return
        if length == 0:
            self.reset()
            return
        assert self.history is not None
        self.check_whole()
        removed, cut = self.num_seen - length, self.history.cut(length)
        if reason := self._cannot_crop(length, cut):
            raise ValueError(
                f"the cache has seen {self.num_seen} tokens and cannot go back to {length}: {reason}. fork() "
                "the cache before it reads or decodes what may have to be forgotten."
            )
        with self.changing():
            for layer in self.ragged if self._gaps else ():  # a column there is not the token of that number
                if layer.store is None:
                    layer.store = self._cut_dense(layer, None, self.valid_BT, self.positions_BT)
            self.evidence, self.history, self._from = None, cut, (-1, 0)
            for layer in self._foreign:
                foreign.crop(layer, removed)
            for layer in self.ragged:
                layer.seen, layer.recent = length, layer.recent.cut(removed, length)
                if layer.store is not None:
                    layer.store.crop_(cut.last_B.to(layer.store.positions_C.device) + 1)
                else:
                    layer.keys, layer.values = (tensor[:, :, :length].clone() for tensor in layer.dense())
        self._noted = min(self._noted, length)
        self._moments = [seen for seen in self._moments if seen <= length] or [length]
        if self._prompt_B is not None:
            self._prompt_B = [min(own, left) for own, left in zip(self._prompt_B, cut.lengths_B, strict=True)]

    def _cannot_crop(self, length: int, cut: History) -> str | None:
        """Why the cache cannot go back to a length; None if it can."""
        removed, wants = self.num_seen - length, self.rule.wants
        if length < self.evicted_at:
            return f"entries were evicted when it had seen {self.evicted_at}, and those are gone"
        if any(not foreign.can_crop(layer, removed) for layer in self._foreign):
            return "a layer with a sliding window or a recurrent state has let go of what it had then"
        if not self.regime.again or self.rule.keeps_all:
            return None
        if wants.running and self._noted > length:
            return "the running statistics that its policy keeps count the queries since"
        recent, moments = self.ragged[0].recent, [seen for seen in self._moments if seen <= length]
        wanted = (moments or [0])[-1] if wants.queries is None else self._queries_from(cut)
        exact = length in recent.marks and wants.queries is not None
        if wants.queries != 0 and not exact and self.num_seen - recent.num_queries > wanted:
            return "queries that its policy looks at are not held that far back"
        return None

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        if self.history is None:
            return
        self.check_whole()
        if (known_BT := self._announced_BT) is not None and self.batch_size % len(known_BT) == 0:
            known_BT = known_BT.repeat_interleave(self.batch_size // len(known_BT), dim=0)
            self._announced_BT = known_BT[indices.to(known_BT.device)]
        with self.changing():
            for layer in self._foreign:
                foreign.select_batch(layer, indices)
            for layer in self.ragged:
                layer.select_batch(indices)
        if self.evidence is not None:
            self.evidence = [evidence.select_batch(indices) for evidence in self.evidence]
        rows = indices.tolist()
        if self.seeds is not None:
            self.seeds = [self.seeds[row] for row in rows]
        if self._pins is not None and spans_by_sequence(self._pins) is not None:
            self._pins = [self._pins[row] for row in rows]
        if self._prompt_B is not None:
            self._prompt_B = [self._prompt_B[row] for row in rows]
        self.held_whole = [new for new, row in enumerate(rows) if row in self.held_whole]
        for name in ("_ended_B", "_filled_B"):
            if (told_B := getattr(self, name)) is not None:
                setattr(self, name, told_B[indices.to(told_B.device)])
        if self.capacity is not None:
            self.capacity = self.capacity.select_batch(rows)
        self.history, self._from = self.history.select_batch(indices), (-1, 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as `generate` expects for beams and several returned sequences."""
        if self.num_seen:
            sequences = torch.arange(self.batch_size, device=self.valid_BT.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)

    @property
    def batch_size(self) -> int:
        return 0 if self.history is None else self.history.batch_size

    def report(self) -> Report:
        """Entries and bytes seen, held and allocated, per layer and in total; `str` of it is a table.

        Raises:
            ValueError: a decoding step that nobody waited for was wrong, which is said once.
        """
        self._settle(wait=True)
        return report_of(self)

    def budgets(self) -> BudgetTable:
        """Entries that each sequence, layer and KV head holds; `print` shows a table.

        Raises:
            ValueError: nothing was read yet; or a decoding step that nobody waited for was wrong, which is
                said once.
        """
        self._settle(wait=True)
        if not self.num_seen:
            raise ValueError("nothing was read yet, so nothing is held: prefill or generate first.")
        seen_B = self.valid_BT.sum(-1).cpu()
        heads = [spec.num_kv_heads for spec in self.specs]
        held = [layer.held_BH(seen_B, own) for layer, own in zip(self.ragged, heads, strict=True)]
        held = [pad(own_BH, (0, max(heads) - own_BH.shape[1])) for own_BH in held]
        return BudgetTable(torch.stack(held, dim=1), seen_B, self.rule.name)

    def bytes_held(self) -> int:
        """Bytes of the keys and values held, over all layers that evict."""
        return self.report().total.bytes_held

    def bytes_allocated(self) -> int:
        """Bytes of all storage behind them: slack, positions, and what stands beside entries included."""
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


def _stated(*amounts: SupportsFloat | None) -> dict[str, int | float | None]:
    """A budget as `retain.budget.statement.Budget` takes it; None is not stated."""
    names = ("keep_ratio", "tokens_per_head", "bytes", "bytes_total", "threshold")
    return dict(zip(names, plain_numbers(amounts), strict=True))

"""The cache that `model.generate` is given: it evicts as it is filled, and holds exactly what was kept.

The first forward on an empty cache is the prefill: each layer attends densely, shows its evidence, and is cut
to its kept entries before the next layer runs, so the peak is what is held plus one layer, or one and a half
where layers share a budget. Later forwards append to the ragged rows and attend over them; when the regime
says so (`retain.hf.cache.regime`), all layers are cut back to the budget (`retain.hf.cache.later_evidence`).
Layers without full attention keep a cache layer of transformers.

Length means tokens *seen*: positions, masks and slicing follow it as if nothing had been evicted; only
`report()` and `bytes_held()` show what is held. All state of a conversation is here, none on the model.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, SupportsInt

import torch
from jaxtyping import Int
from torch import Tensor, nn

from retain.cache.precision import Precision
from retain.cache.store import SLACK
from retain.config import plain_numbers
from retain.correction.merge import Merge
from retain.evidence import Evidence
from retain.hf.cache import saving
from retain.hf.cache.batch_context import (
    check_wanted,
    pinned_of,
    prompt_from,
    seeds_from,
    seeds_of,
    slack_from,
    whole,
)
from retain.hf.cache.bound_policy import bind_policy, check_precision, short_limit
from retain.hf.cache.changes import cannot_crop, concat, crop, cut_all, select_batch
from retain.hf.cache.engine import Engine
from retain.hf.cache.regime import Regime
from retain.hf.cache.report import ReportingCache
from retain.hf.cache.state import State
from retain.hf.intercept.attach import attach
from retain.hf.intercept.interceptor import PREVIOUS
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.hf.model.decoder import base_model, layout_of, learned_prompt, refuse_prefix
from retain.hf.model.identity import marks_of
from retain.hf.version_names import CACHE


class Cache(ReportingCache):
    """A KV cache that keeps, of each (sequence, layer, KV head), the entries that a policy chose.

    Args:
        model: the model it is for; `retain.attach(model)` it before use.
        policy: a preset (`retain.policies()`), a path to a YAML, a `Policy`, a function `evidence ->
            keep_BHT`, or None to keep everything until `evict` is called.
        keep_ratio: kept / seen, in (0, 1]. State exactly one budget.
        tokens_per_head: entries per KV head.
        bytes: bytes of keys and values per sequence, over all layers that evict.
        byte_ratio: bytes held / bytes of all that was seen, in (0, 1]: where entries are held in fewer bytes
            (`precision`), as many more of them.
        threshold: in place of a budget: what scores below it goes, once it is protected no longer
            (admission).
        regime: when to evict: `prefill` (once, when the first prompt was read), `chunked` (after every read:
            each chunk of a prompt, each later turn), `decode` (every so many tokens, once the first prompt is
            over), `prefill+decode`, `chunked+decode`.
        every: tokens between evictions, for `decode`.
        gates: for learned policies: a path, a hub id, or loaded gates; None: those that ship for the model's
            weights. Lookahead gates bring adapters of
            their own for the modules that they adapt, and take none beside them: merge yours first
            (`model.merge_and_unload()`).
        seeds: for policies that draw: one per sequence, or per prompt where `generate` repeats them.
        pinned: spans `(start, stop)` of tokens of the first prompt that are never evicted, counted without
            padding: one list for all sequences, or one list per sequence (per prompt, where `generate`
            repeats them).
        slack: free entries per row that an evicted layer is given for new tokens.
        short: a sequence of at most `short_tokens` tokens whose budget cannot hold what is protected, or that
            is shorter than the policy's window, is held whole, as `report()` says (`keep`), or refused as a
            longer one is (`raise`: for comparisons at equal memory).
        **overrides: fields of the policy to replace, e.g. `fusion="max"`; a section is merged into the
            policy's, e.g. `protection={"recent": 8}`; `observed` may be a function `evidence -> Score`
            (`retain.hf.intercept.press` makes one of a foreign scorer).

    Padding stands before the tokens of a prompt or a turn. The mask of a turn may take back tokens that were
    seen, such as those that `generate` fills a finished sequence up with. That of a decoding step is not
    looked at.

    Examples:
        >>> cache = retain.Cache(model, policy="snapkv", keep_ratio=0.2)  # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Any = "merge",
        *,
        keep_ratio: SupportsFloat | None = None,
        tokens_per_head: SupportsFloat | None = None,
        bytes: SupportsFloat | None = None,
        byte_ratio: SupportsFloat | None = None,
        threshold: SupportsFloat | None = None,
        regime: str = "prefill",
        every: SupportsInt = 32,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        slack: int = SLACK,
        short: str = "keep",
        short_tokens: int = 256,
        **overrides: Any,
    ):
        refuse_prefix(model)
        layout = layout_of(model)
        bound = bind_policy(
            model,
            policy,
            layers=layout.evicting,
            budget=_stated(keep_ratio, tokens_per_head, bytes, byte_ratio, threshold),
            gates=gates,
            pinned=pinned,
            overrides=overrides,
            short_tokens=short_limit(short, short_tokens),
        )
        own = Regime(regime, plain_numbers(every))
        bound.refuse(*(("again",) if own.again else ()))
        self.model, self._given_short = model, (short, short_tokens)
        slack, seeds = slack_from(slack), seeds_from(seeds)
        self.state = State(layout, bound, own, slack=slack, seeds=seeds, pinned=pinned)
        self.engine: Engine = Engine(model, self.state)
        super().__init__(layers=self.state.layers)

    @property
    def is_compileable(self) -> bool:
        """Whether transformers compiles decoding steps (`retain.hf.cache.static_decoding`)."""
        return self.engine.generation.compiles()

    @property
    def _is_user_defined(self) -> bool:
        """What transformers' `generate` notes of a cache that it was given, before its first forward."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        if not self.engine.generation.runs:
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
        engine = self.engine
        engine.evict_at_prefill, engine.hold_evidence = evict, hold_evidence
        engine.recorded = frozenset(wanted)
        total = input_ids.shape[1]
        if chunk_size is not None and chunk_size < total:
            self.state.announce(total, mask)
        try:
            for start in range(0, total, chunk_size or total):
                stop = min(start + (chunk_size or total), total)
                base_model(self.model)(
                    input_ids=input_ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    **{CACHE: self},
                    use_cache=True,
                    output_attentions=False,  # a config may ask for them, and nobody sees them
                )
        except BaseException:
            self.reset()  # what was filled so far is let go: memory may be why it failed
            raise
        finally:
            engine.evict_at_prefill, engine.hold_evidence = True, False
            engine.recorded = frozenset()
        return self

    def _check_prefill(self, chunk_size: int | None, evict: bool, hold_evidence: bool) -> None:
        if hold_evidence and evict:
            raise ValueError(
                "hold_evidence=True holds all keys and values, so nothing would be freed: pass "
                "evict=False too."
            )
        regime = self.state.regime
        if not evict and regime.again and not self.state.bound_policy.keeps_all:
            raise ValueError(
                f"evict=False leaves the eviction to you, and regime {regime.name!r} evicts by itself "
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
        byte_ratio: SupportsFloat | None = None,
        threshold: SupportsFloat | None = None,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        **overrides: Any,
    ) -> "Cache":
        """Evict what a `prefill(evict=False, hold_evidence=True)` held, by the cache's own policy or the one
        given here, which stays until `reset()`.

        Args:


        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: the request cannot be met; the cache is as it
                was, and may be asked again.
        """
        self.state.check_whole()
        if self.evidence is None:
            raise ValueError(
                "there is no evidence to decide on: prefill with evict=False, hold_evidence=True."
            )
        budget = _stated(keep_ratio, tokens_per_head, bytes, byte_ratio, threshold)
        state = self.state
        bound = state.bound_policy
        if policy is not None:
            bound = bind_policy(
                self.model,
                policy,
                layers=state.specs,
                budget=budget,
                gates=gates,
                pinned=pinned,
                overrides=overrides,
                short_tokens=short_limit(*self._given_short),
            )
        elif overrides or any(value is not None for value in (*budget.values(), gates)):
            raise ValueError(
                "a budget, gates or policy settings were given without a policy: name the policy too."
            )
        chosen = state.seeds if seeds is None else seeds_of(seeds_from(seeds), self.batch_size)
        evidence: Sequence[Evidence] = self.evidence
        pinned_BT = pinned_of(state.pinned if pinned is None else pinned, evidence[0].valid_BT)
        if bound.looks_ahead:
            with torch.no_grad(), attach(self.model):
                evidence = look_ahead(self.model, bound.gates, self.engine.read_only(), self.evidence)
        eviction = bound.decide(evidence, chosen, pinned_BT)
        kept = [None] * len(self.evidence) if eviction is None else eviction.finish()
        del evidence
        state.held_whole = [] if eviction is None else [*eviction.held_whole]
        cut_all(state, kept, bound.correction, bound.precision)
        state.bound_policy, state.seeds = bound, chosen
        return self

    def evict_with(
        self,
        keep: Sequence[Tensor],
        *,
        correction: Merge | None = None,
        precision: Precision | None = None,
    ) -> "Cache":
        """Evict what a `prefill(evict=False)` held, by keep masks `[B, H, T]`, one per layer, of the tokens
        as evidence shows them: padding first, which is never kept.

        Args:
            keep: the masks.
            correction: how what stays makes up for what goes; None: it does not.
            precision: in how many bits what stays is held from now on; what comes later is held as it comes.
                None: as it is.

        Returns:
            this cache, whose evidence is released.

        Raises:
            ValueError: a mask does not fit; the cache is as it was.
        """
        self.state.check_whole()
        if any(layer.keys is None for layer in self.state.ragged):
            raise ValueError(
                "nothing is held densely, so nothing can be chosen from: prefill with evict=False."
            )
        if len(keep) != len(self.state.specs):
            raise ValueError(
                f"got {len(keep)} keep masks for {len(self.state.specs)} layers: pass one [B, H, T] per "
                "layer that evicts."
            )
        check_precision(precision, self.state.specs)
        cut_all(self.state, keep, correction, precision)
        return self

    def reset(self) -> None:
        """Forget everything; the cache may be filled again."""
        self.engine.reset()

    def fork(self) -> "Cache":
        """A copy that goes its own way. Of a dense prefill nothing is copied until a fork evicts."""
        self.state.check_whole()
        other = self._like(self.state.fork())
        other.engine = self.engine.fork(other.state)
        return other

    def _like(self, state: State) -> "Cache":
        """Another cache of this kind, with a state of its own and this engine."""
        other = object.__new__(type(self))
        other.__dict__ = dict(vars(self))
        other.state, other.layers = state, state.layers
        return other

    def __copy__(self) -> "Cache":
        return self.fork()

    def __deepcopy__(self, memo: dict) -> "Cache":
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickles, which would carry the model."""
        raise TypeError(
            "a retain.Cache belongs to its model, so that it is not pickled (torch.save, multiprocessing): "
            "write it with cache.save(path), and read it with retain.Cache.load(path, model)."
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the conversation to one `.safetensors` file (`retain.hf.cache.saving`), beside an older one
        until it is whole.

        Args:
            path: of the file.

        Returns:
            the path.

        Raises:
            ValueError: nothing was read yet, or it is held densely (evict first); nothing was written.
        """
        self.state.check_whole()
        self.state.check_marks(marks_of(self.model))
        return saving.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        gates: Any = None,
        policy: Any = None,
    ) -> "Cache":
        """Read a conversation back that `save` wrote, policy, budget and regime with it. It goes on exactly.

        Args:
            path: of the file.
            model: that it was saved from, in the same precision; entries go to their layers' devices.
            gates: that the policy takes, if it is a learned one.
            policy: the function that the policy (or its `observed`) was: a file cannot hold one.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it is truncated, corrupt, of a newer schema, of another model or precision, or gates
                or a function are missing.

        Examples:
            >>> cache.save("context.safetensors")  # doctest: +SKIP
            >>> cache = retain.Cache.load("context.safetensors", model)  # doctest: +SKIP
        """
        return saving.load(cls, path, model, gates=gates, policy=policy)

    @classmethod
    def concat(cls, caches: Sequence["Cache"], *, slack: int | None = None) -> "Cache":
        """Stack caches along the batch, so that contexts cut by different policies and ratios decode as one
        batch.

        Args:
            caches: of one model, all having seen equally many tokens, padding included.
            slack: free entries per row for new tokens (a question and its answer, if known); default: theirs.

        Returns:
            a new cache, which evicts no more and packs no new entries into few bits (`precision`); the given
            ones are left alone.
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
        if any(cache.state.marks != caches[0].state.marks for cache in caches):
            raise ValueError(
                "caches to concat were read with other adapters, or weights were written to in between: read "
                "them again with the model as it is."
            )
        other = caches[0]._like(concat([cache.fork().state for cache in caches], slack))
        other.engine = Engine(other.model, other.state)
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
        assert self.state.history is not None
        self.state.check_whole()
        cut = self.state.history.cut(length)
        if reason := cannot_crop(self.state, length, cut):
            raise ValueError(
                f"the cache has seen {self.num_seen} tokens and cannot go back to {length}: {reason}. fork() "
                "the cache before it reads or decodes what may have to be forgotten."
            )
        crop(self.state, length, cut)

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        if self.state.history is None:
            return
        self.state.check_whole()
        select_batch(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as `generate` expects for beams and several returned sequences."""
        if self.num_seen:
            sequences = torch.arange(self.batch_size, device=self.state.valid_BT.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)


def _stated(*amounts: SupportsFloat | None) -> dict[str, int | float | None]:
    """A budget as `retain.budget.statement.Budget` takes it; None is not stated."""
    names = ("keep_ratio", "tokens_per_head", "bytes", "byte_ratio", "threshold")
    return dict(zip(names, plain_numbers(amounts), strict=True))

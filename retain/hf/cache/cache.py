"""The cache that `model.generate` is given: it evicts as it is filled, and holds exactly what was kept.

The first forward on an empty cache is the prefill: each layer attends densely, shows its evidence, and is cut
to its kept entries before the next layer runs, so the peak is what is held plus one layer, or one and a half
where layers share a budget. Later forwards append to the ragged rows and attend over them; when it is
time (`retain.eviction.When`), all layers are cut back to the budget (`retain.hf.cache.later_evidence`).
Layers without full attention keep a cache layer of transformers.

Length means tokens *seen*: positions, masks and slicing follow it as if nothing had been evicted; only
`report()` and `bytes_held()` show what is held. All state of a conversation is here, none on the model.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, SupportsInt

import torch
from jaxtyping import Int, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from retain.cache.precision import Precision
from retain.cache.store import SLACK
from retain.config import plain_numbers, whole
from retain.correction.merge import Merge
from retain.eviction import When
from retain.evidence import Evidence
from retain.gates.base import INPUTS
from retain.hf.cache import saving
from retain.hf.cache.bound_policy import bind_policy
from retain.hf.cache.engine import Engine
from retain.hf.cache.report import Report, report_of
from retain.hf.cache.state import State, concat
from retain.hf.intercept.interceptor import InterceptedCache
from retain.hf.model.decoder import base_model, layout_of, refuse_learned_prompt
from retain.hf.version_names import CACHE
from retain.process.registry import lookup


class Cache(InterceptedCache):
    """A KV cache that keeps, of each (sequence, layer, KV head), the entries that a policy chose.

    Args:
        model: the model it is for; `retain.attach(model)` it before use.
        policy: a preset (`retain.policies()`), a path to a YAML, a `Policy`, a function `evidence ->
            keep_BHT`, or None to keep everything until `evict_with` is called.
        keep_ratio: kept / seen, in (0, 1]. State exactly one budget.
        tokens_per_head: entries per KV head.
        bytes: bytes of keys and values per sequence, over all layers that evict.
        byte_ratio: bytes held / bytes of all that was seen, in (0, 1]: where entries are held in fewer bytes
            (`precision`), as many more of them.
        threshold: in place of a budget: entries that score below it are evicted, once they are protected no
            longer (admission).
        when: when to evict: `prefill` (once, when the first prompt was read), `chunk` (after every read:
            each chunk of a prompt, each later turn), `decode` (every so many tokens, once the first prompt is
            over), `prefill+decode`, `chunk+decode`.
        every: tokens between evictions, for `decode`.
        gates: for learned policies: a path, a hub id, or loaded gates; None: those that ship for the model's
            weights. Lookahead gates bring adapters for the modules that they adapt, and take none on them:
            merge yours first (`model.merge_and_unload()`).
        seeds: for policies that draw: one per sequence, or per prompt where `generate` repeats them.
        pinned: spans `(start, stop)` of tokens of the first prompt that are never evicted, counted without
            padding: one list for all sequences, or one list per sequence (per prompt, where `generate`
            repeats them).
        short: a sequence of at most 256 tokens whose budget cannot hold what is protected, or that is shorter
            than the policy's window, is held whole, as `report()` says (`keep`), or refused as a longer one
            is (`raise`: for comparisons at equal memory).
        **overrides: fields of the policy to replace, e.g. `fusion="max"`; a section is merged into the
            policy's, e.g. `protection={"recent": 8}`; `observed` may be a function `evidence -> Score`
            (`retain.hf.intercept.press` makes one of a foreign scorer).

    Padding stands before the tokens of a prompt or a turn. The mask of a decoding step is not looked at.

    Examples:
        >>> cache = retain.Cache(model, policy="snapkv", keep_ratio=0.2)  # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=64)  # doctest: +SKIP
    """

    state: State
    engine: Engine

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
        when: str = "prefill",
        every: SupportsInt = 32,
        gates: Any = None,
        seeds: Sequence[int] | None = None,
        pinned: Any = None,
        short: str = "keep",
        **overrides: Any,
    ):
        refuse_learned_prompt(model)
        layout = layout_of(model)
        budget = {"keep_ratio": keep_ratio, "tokens_per_head": tokens_per_head, "bytes": bytes}
        budget |= {"byte_ratio": byte_ratio, "threshold": threshold}
        bound = bind_policy(
            model,
            policy,
            layers=layout.evicting,
            budget=plain_numbers(budget),
            gates=gates,
            pinned=pinned,
            overrides=overrides,
            short=short,
        )
        times = When(when, plain_numbers(every))
        bound.refuse(*(("again",) if times.again else ()))
        self.model, self.short = model, short
        seeds = None if seeds is None else [whole(seed, "seeds", -(2**63), 2**63) for seed in seeds]
        self.state = State(layout, bound, times, seeds=seeds, pinned=pinned)
        self.engine = Engine(model, self.state)
        super().__init__(layers=self.state.layers)

    @property
    def is_compileable(self) -> bool:
        """True if transformers compiles decoding steps (`retain.hf.cache.static_decoding`)."""
        return self.engine.generation.compiles()

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

        Positions count a sequence's real tokens, as `model.generate` counts them, so `generate` may continue.

        Args:
            input_ids: token ids, left-padded.
            attention_mask: 1 on tokens, 0 on padding; None: no padding.
            chunk_size: tokens a forward; None: all at once. With `chunk` the budget (a ratio is
                one of the whole context) is enforced after each; in the others the context is evicted from
                when it was read.
            evict: cut each layer as it is filled. False holds everything, for `evict_with` later.
            hold_evidence: keep `self.evidence` (queries and attention inputs too). Only with `evict=False`:
                the tensors of evidence cannot be freed.
            wanted: inputs of gates that are no part of this cache (`GateSet.inputs`), to be held in the
                evidence: `stream`, the residual stream, is only held where it is named.

        Returns:
            this cache.

        Raises:
            ValueError: ids that are no `[B, T]`, settings that do not go together, unknown names in `wanted`,
                or a cache that has seen tokens; nothing was read then.
        """
        if evict and hold_evidence or not evict and (chunk_size is not None or self.state.evicts_again):
            raise ValueError(
                f"hold_evidence is {hold_evidence}, chunk_size {chunk_size}, evict {evict} and when "
                f"{self.state.when.name!r}: evidence holds all keys and values, so pass evict=False with it; "
                "and evict=False, which leaves evicting to you, without chunk_size and with when='prefill'."
            )
        if self.num_seen:
            raise ValueError(
                f"the cache has already seen {self.num_seen} tokens: make a new one, or reset() it."
            )
        for name in wanted:
            lookup(name, INPUTS, what="input of gates (wanted)")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)}: pass token ids [B, T], at least one a sequence."
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        engine, total = self.engine, input_ids.shape[1]
        chunk_size = total if chunk_size is None else whole(chunk_size, "chunk_size", 1)
        if chunk_size < total:
            self.state.prompt_mask_BT = mask.bool()
        engine.evict_at_prefill, engine.hold_evidence = evict, hold_evidence
        engine.recorded = frozenset(wanted)
        try:
            for start in range(0, total, chunk_size):
                stop = start + chunk_size
                base_model(self.model)(
                    input_ids=input_ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    **{CACHE: self},
                    output_attentions=False,  # a config may ask for them, and nobody sees them
                )
        except BaseException:
            self.reset()  # frees what was filled so far: memory may be why it failed
            raise
        finally:
            engine.evict_at_prefill, engine.hold_evidence = True, False
            engine.recorded = frozenset()
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
            correction: merges what is evicted into what stays; None: it is lost.
            precision: the bits in which what stays is held from now on; new entries are held as they come.
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
        self.state.cut_all(keep, correction, precision)
        return self

    def reset(self) -> None:
        """Forget everything; the cache may be filled again."""
        self.engine.reset()

    def fork(self) -> "Cache":
        """A copy that goes its own way. Of a dense prefill nothing is copied until a fork evicts."""
        self.state.check_whole()
        return self._like(self.state.fork())

    def _like(self, state: State) -> "Cache":
        """Another cache of this kind, with another state."""
        other = object.__new__(type(self))
        other.__dict__ = dict(vars(self))
        other.state, other.layers, other.engine = state, state.layers, Engine(self.model, state)
        return other

    __copy__ = fork

    def __deepcopy__(self, memo: dict) -> "Cache":
        return self.fork()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the conversation to one `.safetensors` file (`retain.hf.cache.saving`); an older file stays
        until the new one is complete.

        Returns:
            the path.

        Raises:
            ValueError: nothing was read yet, or it is held densely (evict first); nothing was written.
        """
        self.state.check_whole()
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
        """Read a conversation back that `save` wrote, policy, budget and when with it. It goes on exactly.

        Args:
            path: of the file.
            model: that it was saved from, in the same precision; entries go to their layers' devices.
            gates: that the policy takes, if it is a learned one.
            policy: the function that the policy was, if it was one: a file cannot hold it.

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
    def concat(cls, caches: Sequence["Cache"], *, slack: int = SLACK) -> "Cache":
        """Stack caches along the batch, so that contexts cut by different policies and ratios decode as one
        batch.

        Args:
            caches: of one model, all having seen equally many tokens, padding included.
            slack: free entries per row for new tokens (a question and its answer, if known).

        Returns:
            a new cache, which evicts no more and packs no new entries into few bits (`precision`); the given
            ones are left alone.
        """
        seen = sorted({cache.num_seen for cache in caches})
        if len(seen) != 1 or not seen[0]:
            raise ValueError(
                f"caches to concat have seen {seen} tokens: left-pad their contexts to one width first."
            )
        slack, first = whole(slack, "slack", 0, 2**20), caches[0]
        if any(cache.model is not first.model for cache in caches):
            raise ValueError("caches to concat were read by other models.")
        return first._like(concat([cache.fork().state for cache in caches], slack))

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens: keep the first `num_tokens` seen, or remove `-num_tokens` of them.

        The cache is then as if they had never come; their bytes are given back. To keep none is to
        `reset()`.

        Raises:
            ValueError: something was evicted since, or a later eviction would read what is no longer there:
                nothing was changed.
        """
        length = num_tokens if num_tokens >= 0 else max(0, self.num_seen + num_tokens)
        if length == 0:
            self.reset()
        if length >= self.num_seen:
            return
        self.state.check_whole()
        if reason := self.state.cannot_crop(length):
            raise ValueError(
                f"the cache has seen {self.num_seen} tokens and cannot go back to {length}: {reason}. fork() "
                "the cache before it reads or decodes what may have to be forgotten."
            )
        self.state.crop(length)

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; an index may repeat."""
        if self.num_seen:
            self.state.check_whole()
            self.state.select_batch(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as `generate` expects for beams and several returned sequences."""
        if self.num_seen:
            sequences = torch.arange(self.batch_size, device=self.state.valid_BT.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))

    reorder_cache = batch_select_indices  # follows the beams

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    @property
    def num_seen(self) -> int:
        """Tokens seen, padding included: the logical length."""
        return self.state.num_seen

    @property
    def evidence(self) -> list[Evidence] | None:
        """The evidence of each layer, where a prefill was told to hold it."""
        return self.state.evidence

    @property
    def evictions(self) -> int:
        """Times that entries were evicted."""
        return self.state.evictions

    def __repr__(self) -> str:
        name = f"retain.Cache: policy {self.state.bound_policy.name}"
        if self.state.broken or self.state.call is not None:
            return f"{name}, broken off: reset() it"
        if not self.num_seen:
            return f"{name}, empty"
        total = self.report().total
        held = f"{total.entries_held:,} of {total.entries_seen:,} entries"
        return f"{name}, {self.num_seen:,} tokens seen, {held} and {total.bytes_held / 2**20:,.2f} MiB held"

    def report(self) -> Report:
        """Entries and bytes seen, held and allocated, per layer and in total; `str` of it is a table."""
        return report_of(self.state)

    def entries_by_head(self) -> Int64[Tensor, "B L H"]:
        """Entries that each sequence, layer and KV head holds, on the CPU; 0 for heads that a layer has not.

        Raises:
            ValueError: nothing was read yet.
        """
        if not self.state.stores:
            raise ValueError(
                "nothing was read yet, or all is held densely: prefill or generate first, or evict."
            )
        counts = [store.lengths_BH.cpu() for store in self.state.stores]
        most = max(count_BH.shape[1] for count_BH in counts)
        return torch.stack([pad(count_BH, (0, most - count_BH.shape[1])) for count_BH in counts], dim=1)

    def bytes_held(self) -> int:
        """Bytes of the keys and values held, over all layers that evict."""
        return self.report().total.bytes_held

    @property
    def entries_held(self) -> int:
        return self.report().total.entries_held

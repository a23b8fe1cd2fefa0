"""The caches that benchmarks compare: transformers' own, ours that keeps everything, and ours under a policy.

    plain   transformers' `DynamicCache` with `sdpa`; it copies a layer's entries to append one
    full    our cache that keeps everything, which does not: a gain over it is gained by eviction alone
    dense   a `DynamicCache` that is cut to as many entries as a policy would keep, whichever they are

The plain caches have a model of their own that is never attached; its weights are the same tensors.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

import retain
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import base_model
from retain.hf.model.gates import load_gates, new_gates
from retain.hf.version_names import CACHE
from retain.presets import load_policy
from retain.process.benchmark import Column
from retain.process.memory import Peak
from retain.process.timing import Case, Times, spread, timed

PLAIN, FULL, DENSE = FULL_CACHES = "plain", "full", "dense"
RANDOM = "random"
# Error of a logit that is allowed, relative to the largest: two caches sum in another order.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
SEPARATED = "each as NAME[,key=value ...], between semicolons or, without settings, commas"


def typed_policies(text: str) -> list[str]:
    """Policies `NAME[,key=value ...]`, separated by semicolons or, if none has settings of its own, commas;
    each once."""
    between = ";" if {";", "="} & set(text) else ","
    return [one for one in dict.fromkeys(text.split(between)) if one]


def numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers separated by commas; none if one is no number of this kind."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        return []


def name_of(typed: str) -> str:
    """The name of a policy, without its settings."""
    return typed.partition(",")[0]


def takes_gates(typed: str) -> bool:
    """Whether a preset takes gates."""
    return any(one.name == name_of(typed) and "gates" in one.needs for one in retain.policies())


@dataclass(frozen=True)
class Workload:
    """The tokens that a cache reads and decodes.

    Args:
        prompt_BT: that is read.
        following_BS: tokens that are decoded behind it, the same for all caches; none: it is read alone.
        head: whether the prompt's last token is given to the language-model head, and the next one chosen.
        uncounted: of the decoded tokens, how many come before the clock starts.
    """

    prompt_BT: Tensor
    following_BS: Tensor
    head: bool = True
    uncounted: int = 0


@dataclass(eq=False, kw_only=True)
class TimedCache(Case):
    """A cache under a policy. A run is a life: `prefill_ms`, and `token_ms` of a decoded token.

    Args:
        name: of the policy, as typed.
        keep_ratio: kept / seen; 1.0 for the full caches.
        empty: makes an empty cache.
        cut_to: entries of each head that are left behind the prompt of a `dense` one.
        watches: whether memory is watched: always on CUDA, elsewhere in a process of its own.
        peaks: where memory is watched, bytes at most beyond those `before`, of `prefill` and `decode`.
        bytes: `cache_bytes` behind the prompt, and `held_at_end` and `allocated_at_end`.
        achieved: entries held / seen behind the prompt.
        waits: times that the host waited for the device in an uncounted token; None on a CPU.
    """

    name: str
    keep_ratio: float
    model: PreTrainedModel
    empty: Callable[[], Any]
    work: Workload
    cut_to: int | None = None
    watches: bool = False
    peaks: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    achieved: float = 1.0
    waits: float | None = None

    def read(self) -> Any:
        """Reads the prompt and evicts; returns the cache."""
        cache, ids_BT = self.empty(), self.work.prompt_BT
        given: dict[str, Any] = {"input_ids": ids_BT, CACHE: cache, "use_cache": True}
        if self.work.head:
            self.model(**given, logits_to_keep=1).logits[:, -1].argmax(-1)
        elif isinstance(cache, Cache):
            cache.prefill(ids_BT)
        else:
            base_model(self.model)(**given)
        if self.cut_to is not None:
            for layer in cache.layers:
                layer.keys = layer.keys[:, :, -self.cut_to :].clone()
                layer.values = layer.values[:, :, -self.cut_to :].clone()
        return cache

    def logits(self, cache: Any, seen: int, ids_BS: Tensor) -> Iterator[Tensor]:
        """Decodes given tokens, one at a time: the logits of each."""
        at_BS = seen + torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        for ids_B1, at_B1 in zip(ids_BS.split(1, dim=1), at_BS.split(1, dim=1), strict=True):
            given = {"input_ids": ids_B1, "position_ids": at_B1, CACHE: cache}
            yield self.model(**given, use_cache=True).logits

    def decode(self, cache: Any, seen: int, ids_BS: Tensor) -> None:
        """Decodes given tokens and chooses those behind them: all caches do the same work."""
        for logits_B1V in self.logits(cache, seen, ids_BS):
            logits_B1V[:, -1].argmax(-1)

    def run(self) -> Times:
        """One life; peaks, bytes and waits are noted beside the times."""
        work, seen = self.work, self.work.prompt_BT.shape[1]
        device = str(work.prompt_BT.device)
        on_gpu = device.startswith("cuda")
        peak = Peak(device) if self.watches or on_gpu else None

        def note_peak(stage: str) -> None:
            if peak is not None:
                self.peaks |= {"before": peak.before, stage: peak.beyond()}

        cache, prefill_ms = timed(self.read)
        note_peak("prefill")
        self.bytes = cache_bytes(cache)
        if isinstance(cache, Cache):
            total = cache.report().total
            self.achieved = total.entries_held / total.entries_seen
        first, rest = work.following_BS.tensor_split([work.uncounted], dim=1)
        if first.shape[1]:
            waits = waits_of(partial(self.decode, cache, seen, first), on_gpu=on_gpu)
            self.waits = None if waits is None else waits / first.shape[1]
        if not rest.shape[1]:
            return {"prefill_ms": prefill_ms}
        note_peak("decode")  # of what is not counted: forgotten
        _, decode_ms = timed(partial(self.decode, cache, seen + work.uncounted, rest))
        note_peak("decode")
        end = cache_bytes(cache)
        self.bytes |= {"held_at_end": end["held"], "allocated_at_end": end["allocated"]}
        return {"prefill_ms": prefill_ms, "token_ms": decode_ms / rest.shape[1]}


@dataclass
class Bench:
    """A model with and without our cache, gates, and tokens.

    Args:
        model: for our cache.
        gates: of the policies that take some: a folder, a hub id, `random` (linear ones with random weights:
            their time is that of trained ones, what they keep is not), or empty.
        batch: prompts.
        tokens: of each, and of what is decoded behind it.
        seed: of tokens and random gates.
    """

    model: PreTrainedModel
    gates: Any
    batch: int
    tokens: int
    device: str
    seed: int

    def __post_init__(self) -> None:
        # Gates are loaded once: reading a folder is no part of a first token.
        named, self.gates = self.gates, None
        if named == RANDOM:
            self.gates = new_gates(self.model, "linear", seed=self.seed).eval().requires_grad_(False)
        elif named:
            self.gates = load_gates(named, self.model)
        self.twin = sharing_weights(self.model)
        draw = torch.Generator().manual_seed(self.seed)
        vocabulary = self.model.config.get_text_config().vocab_size
        self.ids_BT = torch.randint(vocabulary, (self.batch, self.tokens), generator=draw).to(self.device)

    def workload(self, tokens: int, *, batch: int | None = None, steps: int = 0, **how: Any) -> Workload:
        """Prompts of so many tokens, and so many tokens behind them."""
        ids_BT = self.ids_BT[:batch]
        return Workload(ids_BT[:, :tokens], ids_BT[:, tokens : tokens + steps], **how)

    def plain(
        self,
        work: Workload,
        name: str = PLAIN,
        *,
        twin: PreTrainedModel | None = None,
        keep_ratio: float = 1.0,
        **own: Any,
    ) -> TimedCache:
        """Transformers' own cache."""
        model = twin or self.twin
        empty = partial(DynamicCache, config=model.config)
        return TimedCache(name=name, keep_ratio=keep_ratio, model=model, empty=empty, work=work, **own)

    def cut(self, typed: str, keep_ratio: float, work: Workload, beside: Case | None = None) -> TimedCache:
        """Our cache under a policy, or a `dense` one.

        Raises:
            ValueError: a policy is unknown, or cannot be made of its name and these settings.
        """
        name, *changes = typed.split(",")
        own: dict[str, Any] = {"keep_ratio": keep_ratio, "beside": beside}
        if name in (DENSE, FULL) and changes:
            raise ValueError(f"{name!r} takes no settings, got {','.join(changes)!r}: leave them out.")
        if name == DENSE:
            return self.plain(work, DENSE, cut_to=max(1, int(keep_ratio * work.prompt_BT.shape[1])), **own)
        if name == FULL:
            own["keep_ratio"], empty = 1.0, partial(Cache, self.model, FULL)
        else:
            gates, policy = self.gates if takes_gates(name) else None, load_policy(name, changes)
            empty = partial(Cache, self.model, policy, keep_ratio=keep_ratio, short="raise", gates=gates)
        empty()
        return TimedCache(name=typed, model=self.model, empty=empty, work=work, **own)


def try_out(caches: Sequence[TimedCache]) -> None:
    """Lets every cache live once, before anything is timed.

    Raises:
        ValueError: a budget cannot be met; says whose.
    """
    for one in caches:
        try:
            one.attempt()
        except ValueError as error:
            raise ValueError(
                f"benchmark: policy {one.name!r} at keep_ratio {one.keep_ratio}: {error}"
            ) from error


def row_of(one: TimedCache, caches: Sequence[TimedCache], **more: Any) -> dict[str, Any]:
    """The row of one cache: its times, their ratios to the full caches, bytes and peaks.

    Args:
        one: that the row is about.
        caches: all that were timed with it.
        more: where it was timed, in front.
    """
    kind = "full" if one.name in FULL_CACHES else "policy"
    row: dict[str, Any] = {"policy": one.name, "kind": kind, "keep_ratio": one.keep_ratio, **more}
    row["failed"] = one.failed
    if one.failed:
        return row
    named = {"prefill_ms": "ttft" if one.work.head else "prefill", "token_ms": "token"}
    as_many = DENSE, one.keep_ratio
    others = [
        other
        for other in caches
        if other.name in (PLAIN, FULL) or (kind == "policy" and (other.name, other.keep_ratio) == as_many)
    ]
    for quantity in one.runs[0][1]:
        row[f"{named[quantity]}_ms"] = spread(one.times(quantity))
        for other in others:
            if other is not one and not other.failed:
                row[f"{named[quantity]}_over_{other.name}"] = spread(one.over(other, quantity))
    return row | {
        "achieved_keep_ratio": one.achieved,
        "peak_bytes": {stage: one.peaks.get(stage) for stage in ("prefill", "decode")},
        "held_before": one.peaks.get("before"),
        "cache_bytes": one.bytes,
        "held_of_full": one.bytes["held"] / one.bytes["full"],
        "waits_a_token": one.waits,
    }


KEEP = Column("keep", "keep_ratio", "g")
POLICY = Column("policy", "policy")
HELD = Column("held MiB", "cache_bytes.held", ".2f", 2**20)
PEAK = Column("peak MiB", "peak_bytes.prefill", ".1f", 2**20)


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose weights are the same tensors."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def check_logits(actual: Tensor, wanted: Tensor, dtype: str, refused: str) -> dict[str, float]:
    """The largest error of a logit, relative to the largest logit, and what is allowed (`checked`)."""
    return checked(float((actual - wanted).abs().max() / wanted.abs().max()), ALLOWED[dtype], refused)


def checked(error: float, allowed: float, refused: str) -> dict[str, float]:
    """An error, and the one that is allowed.

    Raises:
        RuntimeError: more than that; says `refused`, with both numbers in it.
    """
    if not error <= allowed:
        raise RuntimeError(refused.format(error=f"{error:.2e}", allowed=f"{allowed:.2e}"))
    return {"error": error, "allowed": allowed}


def waits_of(run: Callable[[], Any], *, on_gpu: bool) -> int | None:
    """Runs a call: how often it made the host wait for the device, as CUDA counts it; None on a CPU."""
    if not on_gpu:
        run()
        return None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in warned)


def cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes of a cache, ours or one of transformers: held, allocated, and of all that was seen."""
    if isinstance(cache, Cache):
        report = cache.report()
        parts: list[Any] = [report.total, *report.alone]
        held, allocated = sum(one.bytes_held for one in parts), sum(one.bytes_allocated for one in parts)
        full = held - report.total.bytes_held + report.total.bytes_full
        return {"held": held, "allocated": allocated, "full": full}
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    held = sum(tensor.nbytes for tensor in found)
    # Several tensors may be views of one storage, which is there once.
    storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in found)}
    return {"held": held, "allocated": sum(storages.values()), "full": held}

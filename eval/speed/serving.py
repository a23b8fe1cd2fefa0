"""The benchmark of serving: first token, decoding, memory and stages, for every policy beside the full cache.

    python -m retain.eval.speed.serving [--model random|reference|PATH|HUB_ID] [--policies NAME ...]
    [--keep-ratios 0.2,0.5] [--batches 1,4] [--tokens 2048] [--gates PATH|random] [--device cpu|cuda]
    [--output PATH]

In: a model, policies (default: every preset that needs nothing trained or measured beforehand, and with
`--gates` those that take gates), budgets, batch sizes. Out: one table, and every single number beside it as
JSON: time to first token (the prompt read, evicted from, and the next token chosen), milliseconds a decoded
token, tokens a second, peak memory beyond what was held before (on CUDA what torch allocated; on a CPU the
resident set's high-water mark, in a process of its own), bytes of the cache, and which share of a prefill is
scoring and which evicting. `plain` is transformers' own `DynamicCache`; `full` is our cache that keeps all;
`dense`, if it is among the policies, is a `DynamicCache` that holds as many entries as the budget allows.

The one decision taken here, as in `retain.eval.speed.scoring`: a cost is a ratio of neighbours. Each life of
a policy (a prompt, then some tokens) has a life of `plain` next to it, which of them comes first alternates,
the policies take turns in an order that rotates, and `over plain` is the median of neighbours' ratios. Before
anything is timed every side lives once, so that what cannot be met is an error and not half a table.
"""

import argparse
import copy
import gc
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import retain
from retain.eval.speed import scoring as speed
from retain.eval.speed.cache_bytes import cache_bytes
from retain.eval.speed.long import FULL, PLAIN, random_gates
from retain.eval.speed.stages import EVICTION, SCORING, staged
from retain.eval.speed.table import serving as table
from retain.eval.speed.table import spread_and_all
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import describe
from retain.hf.model.gates import load_gates
from retain.hf.model.named import load_named_model
from retain.process import memory as resident
from retain.process.command import status_of
from retain.process.stopwatch import (
    DTYPES,
    Started,
    add_settings,
    clock,
    flags_of,
    publish,
    quiet,
    record_of,
    whole_numbers,
)
from retain.reference import load_model

# Transformers' own cache again, of which as many entries are left behind the prompt as a policy would keep.
DENSE = "dense"
# What a preset may need that somebody has to train or measure first.
MADE = ("gates", "head_classes")
RANDOM, REFERENCE = "random", "reference"


@dataclass(frozen=True)
class Setting:
    """One benchmark.

    Args:
        model: `random` (a Llama of the shape below), `reference` (the reference model of seed `seed`), or a
            folder or hub id of a causal language model.
        policies: as `retain.eval.speed.scoring` takes them, separated by semicolons or, if none has settings
        of its
            own, commas; empty: every preset that can be made.
        gates: a folder or hub id, or `random` (linear ones with random weights: their time is that of trained
            ones, what they keep is not); empty: none.
        keep_ratios: budgets, kept / seen, separated by commas.
        batches: prompts read at once, separated by commas.
        tokens: T, length of each prompt.
        steps: tokens decoded in a life.
        rounds: lives measured of each policy.
        warmup: lives before them that are not counted, at least 1.
        layers: L, as the sizes below of a random model only.
        width: E.
        heads: Q, query heads, of width `width / heads`.
        kv_heads: H.
        intermediate: width of the feed-forward part.
        threads: CPU threads.
        dtype: of weights and cache, a name in `retain.process.stopwatch.DTYPES`.
        device: where it runs.
        seed: of weights and tokens.
    """

    model: str = RANDOM
    policies: str = ""
    gates: str = ""
    keep_ratios: str = "0.2,0.5"
    batches: str = "1,4"
    tokens: int = 2048
    steps: int = 16
    rounds: int = 5
    warmup: int = 1
    layers: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 1376
    threads: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = whole_numbers(self, {"seed": 0, "rounds": 2})
        for name, kind, least in (("keep_ratios", float, 0.0), ("batches", int, 0)):
            found = _numbers(getattr(self, name), kind)
            if not found or min(found) <= least or (kind is float and max(found) > 1):
                wanted = "numbers above 0 and at most 1" if kind is float else "whole numbers of at least 1"
                problems.append(f"{name} are {wanted}, separated by commas, got {getattr(self, name)!r}")
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")
        self.shape()  # which looks at the rest
        self.entries()

    @property
    def ratios(self) -> list[float]:
        """The budgets of `keep_ratios`."""
        return _numbers(self.keep_ratios, float)

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of `batches`."""
        return _numbers(self.batches, int)

    def entries(self) -> list[speed.Entry]:
        """The policies to time, the full cache apart.

        Raises:
            ValueError: an unknown policy, or one that needs gates that were not named.
        """
        needs = {preset.name: preset.needs for preset in retain.policies()}
        between = ";" if {";", "="} & set(self.policies) else ","
        typed = [name for name in self.policies.split(between) if name]
        if not typed:
            made = {"gates"} if self.gates else set()
            typed = [name for name, own in needs.items() if not (own & set(MADE)) - made and name != FULL]
        entries = [
            speed.Entry(DENSE, DENSE, {}) if name == DENSE else speed.parse_entry(name)
            for name in dict.fromkeys(typed)
            if name != FULL
        ]
        for entry in entries:
            if "gates" in needs.get(entry.policy, ()) and not self.gates:
                raise ValueError(
                    f"benchmark: policy {entry.policy!r} needs gates: pass --gates with a folder or hub id, "
                    "or with 'random' for the time of linear ones."
                )
        return entries

    def shape(self) -> speed.Setting:
        """The part of it that a random model is made of, with room for prompt and answer."""
        names = ("layers", "width", "heads", "kv_heads", "intermediate", "threads", "dtype", "device", "seed")
        own = {name: getattr(self, name) for name in names}
        return speed.Setting(tokens=self.tokens + self.steps, **own)


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers between commas; none if one is no number."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        return []


@dataclass
class Side:
    """One of those that are measured, and what was found of it.

    Args:
        policy: as typed; `plain` for transformers' own cache.
        keep_ratio: kept / seen; 1.0 for the full caches.
        model: that it runs on.
        empty: makes an empty cache.
        entries: of a `dense` one: entries of each head that are left behind the prompt (the last ones: which
            they are does not matter to a time).
        turns: of each life: the round that it was lived in (`plain` lives several times in each).
        ttft_ms: of each life: prompt, eviction, and the choice of the next token.
        token_ms: of each life: a decoded token of the whole batch.
        ttft_over_plain: of each life, over its neighbour's.
        token_over_plain: the same of a decoded token.
        shares: of each clocked prefill: seconds of scoring and of eviction over all of it.
        prefill_peak: bytes at most while the first token was made, beyond what was held before; None where
            that was not measured.
        decode_peak: the same while tokens were decoded.
        bytes: what the cache counts: `held` and `allocated` behind the prompt, `held_at_end`, `full` (all
            that was seen behind the prompt).
        achieved: entries held / seen behind the prompt.
        failed: why it was given up; empty: it was not.
    """

    policy: str
    keep_ratio: float
    model: PreTrainedModel
    empty: Callable[[], Any]
    entries: int | None = None
    turns: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    ttft_over_plain: list[float] = field(default_factory=list)
    token_over_plain: list[float] = field(default_factory=list)
    shares: dict[str, list[float]] = field(default_factory=lambda: {SCORING: [], EVICTION: []})
    prefill_peak: int | None = None
    decode_peak: int | None = None
    bytes: dict[str, int] = field(default_factory=dict)
    achieved: float = 1.0
    failed: str = ""

    def first(self, ids_BT: Tensor) -> Any:
        """Read a prompt, evict, choose the next token; returns the cache."""
        cache = self.empty()
        logits_BSV = self.model(
            input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        logits_BSV[:, -1].argmax(-1)
        if self.entries is not None:
            for layer in cache.layers:
                layer.keys = layer.keys[:, :, -self.entries :].clone()
                layer.values = layer.values[:, :, -self.entries :].clone()
        return cache

    def decode(self, cache: Any, seen: int, ids_BS: Tensor) -> None:
        """Decode given tokens, one at a time: all sides do the same work."""
        at_BS = seen + torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        for step in range(ids_BS.shape[1]):
            now = slice(step, step + 1)
            logits_BSV = self.model(
                input_ids=ids_BS[:, now], position_ids=at_BS[:, now], past_key_values=cache, use_cache=True
            ).logits
            logits_BSV[:, -1].argmax(-1)


def load(setting: Setting) -> PreTrainedModel:
    """The model of a setting, in eval mode, on its device.

    Raises:
        ValueError: it cannot be loaded, or reads fewer tokens than are asked for.
    """
    if setting.model == RANDOM:
        return speed.build_model(setting.shape())
    dtype = DTYPES[setting.dtype]
    if setting.model == REFERENCE:
        model: Any = load_model(setting.seed).to(dtype)
    else:
        try:
            model = load_named_model(setting.model, dtype=setting.dtype)
        except ValueError as error:
            said = str(error).strip().splitlines()[0]
            raise ValueError(
                f"benchmark: model {setting.model!r} cannot be loaded: {said} Pass 'random', 'reference', a "
                "folder that save_pretrained made, or a hub id that can be reached."
            ) from error
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and setting.tokens + setting.steps > most:
        raise ValueError(
            f"benchmark: {setting.tokens} tokens and {setting.steps} steps are more than the {most} "
            f"positions of model {setting.model!r}: take fewer tokens."
        )
    return model.to(setting.device).eval().requires_grad_(False)


@dataclass
class Bench:
    """What all sides share: the model, a twin that is never attached, gates, and tokens.

    Args:
        setting: of the benchmark.
        model: for our cache.
        twin: the same weights: for transformers' own.
        gates: for the policies that take some.
        ids_BT: prompts and what is decoded behind them, as many as the largest batch.
    """

    setting: Setting
    model: PreTrainedModel
    twin: PreTrainedModel
    gates: Any
    ids_BT: Tensor

    @classmethod
    def of(cls, setting: Setting) -> "Bench":
        """Load, copy, draw. Gates are loaded here, once: reading a folder is no part of a first token."""
        model = load(setting)
        twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            gates: Any = random_gates(model) if setting.gates == RANDOM else None
        if setting.gates and gates is None:
            gates = load_gates(setting.gates, model)
        draw = torch.Generator().manual_seed(setting.seed)
        shape = (max(setting.sizes), setting.tokens + setting.steps)
        ids_BT = torch.randint(model.config.get_text_config().vocab_size, shape, generator=draw)
        return cls(setting, model, twin, gates, ids_BT.to(setting.device))

    def tokens(self, batch: int) -> tuple[Tensor, Tensor]:
        """Prompts, and what is decoded behind them."""
        T = self.setting.tokens
        return self.ids_BT[:batch, :T], self.ids_BT[:batch, T:]

    def sides(self) -> list[Side]:
        """`plain` first, then `full`, then every policy at every budget."""
        needs = {preset.name: preset.needs for preset in retain.policies()}

        def cut(entry: speed.Entry, keep_ratio: float) -> Callable[[], Cache]:
            own = self.gates if "gates" in needs.get(entry.policy, ()) else None
            return lambda: Cache(
                self.model, entry.policy, keep_ratio=keep_ratio, gates=own, short="raise", **entry.overrides
            )

        plain = Side(PLAIN, 1.0, self.twin, lambda: DynamicCache(config=self.twin.config))
        full = Side(FULL, 1.0, self.model, lambda: Cache(self.model, FULL))
        sides = [plain, full]
        for ratio in self.setting.ratios:
            entries = max(1, int(ratio * self.setting.tokens))
            sides += [
                Side(DENSE, ratio, self.twin, plain.empty, entries)
                if entry.policy == DENSE
                else Side(entry.typed, ratio, self.model, cut(entry, ratio))
                for entry in self.setting.entries()
            ]
        for side in sides:
            side.empty()  # what is wrong with a policy's name or settings shows here
        return sides

    def try_out(self, sides: Sequence[Side], batch: int) -> None:
        """Let every side live once, and count the bytes of its cache.

        Raises:
            ValueError: a budget cannot be met; says whose.
        """
        prompt, following = self.tokens(batch)
        for side in sides:
            try:
                cache = side.first(prompt)
                side.bytes = cache_bytes(cache)
                if isinstance(cache, Cache):
                    total = cache.report().total
                    side.achieved = total.entries_held / total.entries_seen
                side.decode(cache, self.setting.tokens, following)
                side.bytes["held_at_end"] = cache_bytes(cache)["held"]
            except torch.OutOfMemoryError:
                side.failed = "out of memory"
            except ValueError as error:
                raise ValueError(
                    f"benchmark: policy {side.policy!r} at keep_ratio {side.keep_ratio}: {error}"
                ) from error


def live(bench: Bench, side: Side, batch: int) -> tuple[float, float] | None:
    """One life of one side: milliseconds to the first token, and of a decoded one; None: no memory."""
    setting, seconds = bench.setting, clock(bench.setting.device)
    prompt, following = bench.tokens(batch)
    gc.collect()  # what the one before has left
    peak = resident.Peak(setting.device) if setting.device.startswith("cuda") else None
    held: list[Any] = []
    try:
        first = seconds(lambda: held.append(side.first(prompt)))
        side.prefill_peak = None if peak is None else peak.beyond()
        rest = seconds(lambda: side.decode(held[0], setting.tokens, following))
        side.decode_peak = None if peak is None else peak.beyond()
    except torch.OutOfMemoryError:
        side.failed = "out of memory"
        return None
    return 1e3 * first, 1e3 * rest / following.shape[1]


def round_of(bench: Bench, sides: Sequence[Side], batch: int, turn: int, *, stages: bool = True) -> None:
    """A life of every side, each with one of `plain` next to it; counted from turn 0 on.

    Args:
        bench: what they share.
        sides: `plain` first.
        batch: prompts read at once.
        turn: which round; those before turn 0 warm up.
        stages: whether another prefill follows, whose stages are clocked.
    """
    plain, *others = sides
    start = turn % len(others)
    for side in (*others[start:], *others[:start]):
        pair = (plain, side) if turn % 2 else (side, plain)
        taken = {one.policy: live(bench, one, batch) for one in pair if not one.failed}
        own, its = taken.get(side.policy), taken.get(PLAIN)
        if turn < 0:
            continue
        for one, times in ((side, own), (plain, its)):
            if times is not None:
                one.turns.append(turn)
                one.ttft_ms.append(times[0])
                one.token_ms.append(times[1])
        if own is not None and its is not None:
            side.ttft_over_plain.append(own[0] / its[0])
            side.token_over_plain.append(own[1] / its[1])
        if own is not None and stages:
            clock_stages(bench, side, batch)


def clock_stages(bench: Bench, side: Side, batch: int) -> None:
    """One more prefill, of which the stages are clocked; without memory for it there is one share fewer."""
    seconds, (prompt, _) = clock(bench.setting.device), bench.tokens(batch)
    gc.collect()
    try:
        with staged(bench.setting.device) as parts:
            whole = seconds(lambda: side.first(prompt))
    except torch.OutOfMemoryError:
        return
    for stage, taken in parts.items():
        side.shares[stage].append(taken / whole)


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Rows of all sides, at every batch size."""
    rows, setting = [], bench.setting
    with attach(bench.model), quiet(setting.threads):
        tried = []
        for batch in setting.sizes:  # all of them before the first is timed
            sides = bench.sides()
            bench.try_out(sides, batch)
            tried.append((batch, sides))
        for batch, sides in tried:
            for turn in range(-setting.warmup, setting.rounds):
                round_of(bench, sides, batch, turn)
            full = sides[1]
            rows += [row_of(side, full, batch, setting) | over_dense(side, sides) for side in sides]
    return rows


def over_dense(side: Side, sides: Sequence[Side]) -> dict[str, Any]:
    """Of a policy: a decoded token's time over that of a plain cache of as many entries, within a round."""
    there = [one for one in sides if one.policy == DENSE and one.keep_ratio == side.keep_ratio]
    if not there or there[0].failed or side.failed or side.policy in (PLAIN, FULL, DENSE):
        return {}
    pairs = zip(side.token_ms, there[0].token_ms, strict=True)
    return {"token_over_dense": spread_and_all([own / its for own, its in pairs])}


def row_of(side: Side, full: Side, batch: int, setting: Setting) -> dict[str, Any]:
    """One side's row of the record."""
    row: dict[str, Any] = {
        "policy": side.policy,
        "kind": "full" if side.policy in (PLAIN, FULL, DENSE) else "policy",
        "keep_ratio": side.keep_ratio,
        "batch": batch,
        "failed": side.failed,
    }
    if side.failed or not side.token_ms:
        return row
    over_full: dict[str, list[float]] = {"ttft": [], "token": []}
    if side.policy not in (PLAIN, FULL) and not full.failed:
        over_full["ttft"] = [a / b for a, b in zip(side.ttft_ms, full.ttft_ms, strict=True)]
        over_full["token"] = [a / b for a, b in zip(side.token_ms, full.token_ms, strict=True)]
    return row | {
        "achieved_keep_ratio": side.achieved,
        "ttft_ms": spread_and_all(side.ttft_ms),
        "token_ms": spread_and_all(side.token_ms),
        "tokens_per_s": spread_and_all([1e3 * batch / taken for taken in side.token_ms]),
        "ttft_over_plain": spread_and_all(side.ttft_over_plain),
        "token_over_plain": spread_and_all(side.token_over_plain),
        "ttft_over_full": spread_and_all(over_full["ttft"]),
        "token_over_full": spread_and_all(over_full["token"]),
        "scoring_share": spread_and_all(side.shares[SCORING]),
        "eviction_share": spread_and_all(side.shares[EVICTION]),
        "peak_bytes": {"prefill": side.prefill_peak, "decode": side.decode_peak},
        "cache_bytes": side.bytes,
    }


def watch(setting: Setting) -> list[dict[str, Any]]:
    """In this process, on a CPU: what each side holds at most beyond what was held before it.

    Returns:
        `{"policy", "keep_ratio", "batch", "prefill", "decode"}` in bytes, in the order of `Bench.sides`.
    """
    bench, found = Bench.of(setting), []
    with attach(bench.model), quiet(setting.threads):
        for batch in setting.sizes:
            sides, (prompt, following) = bench.sides(), bench.tokens(batch)
            # Libraries are loaded and pools filled by one life of each, which is not looked at.
            for side in sides:
                side.decode(side.first(prompt), setting.tokens, following[:, :2])
            for side in sides:
                gc.collect()
                peak = resident.Peak(setting.device)
                cache = side.first(prompt)
                prefill = peak.beyond()
                side.decode(cache, setting.tokens, following)
                decode = peak.beyond()
                del cache
                who = {"policy": side.policy, "keep_ratio": side.keep_ratio, "batch": batch}
                found.append({**who, "prefill": prefill, "decode": decode})
    return found


def watched(setting: Setting) -> list[dict[str, Any]]:
    """`watch` in a process of its own, whose allocator gives back what is freed.

    Raises:
        RuntimeError: that process failed or took too long; says what it said.
    """
    return json.loads(resident.in_a_process("retain.eval.speed.serving", ["--watch", *flags_of(setting)])[-1])


def benchmark(setting: Setting, command: str = "", *, memory: bool = True) -> dict[str, Any]:
    """Time all sides, watch their memory, and return the record.

    Args:
        setting: of the benchmark.
        command: that a reader would type.
        memory: on a CPU, whether to watch memory in a process of its own (each side lives there twice more).

    Raises:
        ValueError: a policy, a model or a budget that cannot be; before anything is timed.
        RuntimeError: the watched process failed.
    """
    started, bench = Started(), Bench.of(setting)
    rows = measure(bench)
    on_gpu = setting.device.startswith("cuda")
    of = "device: allocated at most, beyond what was held before (weights)"
    if not on_gpu and memory and resident.measurable():
        of = "process: resident set at most, beyond what was held before (weights), in a process of its own"
        peaks = {(p["policy"], p["keep_ratio"], p["batch"]): p for p in watched(setting)}
        for row in rows:
            peak = peaks.get((row["policy"], row["keep_ratio"], row["batch"]))
            if peak is not None and not row["failed"]:
                row["peak_bytes"] = {"prefill": peak["prefill"], "decode": peak["decode"]}
    elif not on_gpu:
        of = "not measured"
    specs, config = list(describe(bench.model)), bench.model.config.get_text_config()
    found = {
        "model": {
            "name": setting.model,
            "kind": type(bench.model).__name__,
            "layers": config.num_hidden_layers,
            "evicting_layers": len(specs),
            "width": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": specs[0].num_kv_heads,
            "parameters": bench.model.num_parameters(),
            "weights_bytes": sum(weight.nbytes for weight in bench.model.parameters()),
        },
        "peak_of": of,
        "rows": rows,
    }
    return record_of("serving", setting, command, started, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.speed.serving",
        description="Time and watch every policy beside the full cache.",
    )
    add_settings(parser, Setting)
    parser.add_argument("--no-memory", action="store_true", help="leave out the process that watches memory")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("results/speed/serving.json"))
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{own.name: getattr(given, own.name) for own in fields(Setting)})
        if given.watch:  # a process of `watched`
            print(json.dumps(watch(setting)), flush=True)
            return 0
        command = shlex.join(["python", "-m", "retain.eval.speed.serving", *typed])
        record = benchmark(setting, command, memory=not given.no_memory)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

"""The benchmark: what scoring and eviction cost a prefill.

    python -m retain.eval.speed --what scoring [--policies NAME[,key=value ...] ...] [--tokens 4096 ...]
    python -m retain.eval.speed --what serving|peers|decode|long|eviction [its own options]

In: the shape of a random Llama, policies, a budget. Out: one table, and every single time beside it as JSON.
Measured: the wall time of `Cache.prefill` (the decoder without its language-model head, then scoring,
selecting and cutting each layer, the making of the cache included) over that of the same decoder with
transformers' own `DynamicCache` and `sdpa`, on the same tokens. Not measured: generation, the head, quality
(the weights are random), and peak memory; the bytes held are the cache's own count, and show that eviction
ran. The other benchmarks are modules of their own, `speed_serving` first, and are also reached from here.

The one decision taken here: a cost is a ratio of neighbours. The two prefills of a pair run one after the
other, which of them comes first alternates, and the median is taken over the pairs' ratios, so that a machine
that drifts, or that others use too, moves both sides alike.
"""

import argparse
import copy
import gc
import importlib
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import DynamicCache, PreTrainedModel

from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import base_model
from retain.hf.model.random_llama import VOCABULARY, random_llama
from retain.process.command import status_of
from retain.process.stopwatch import (
    DTYPES,
    Started,
    add_settings,
    clock,
    heading,
    publish,
    quiet,
    record_of,
    unfit,
    whole_numbers,
)
from retain.registry import lookup

# What the published comparisons of prefill cost name, and Layer-DefensiveKV, whose layers compete.
POLICIES = ("snapkv,scope=layer", "defensivekv", "criticalkv", "ada_criticalkv", "layer_defensivekv")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Setting:
    """One benchmark: the model, the prompt, the budget and the clock.

    Args:
        tokens: T, length of the prompt.
        batch: prompts read at once.
        layers: L.
        width: E.
        heads: Q, query heads, of width `width / heads`.
        kv_heads: H.
        intermediate: width of the feed-forward part.
        threads: CPU threads.
        pairs: ratios measured per policy.
        warmup: pairs before them that are not counted.
        keep_ratio: kept / seen.
        dtype: of weights and cache, a name in `retain.process.stopwatch.DTYPES`.
        device: where it runs.
        seed: of weights and tokens.
    """

    tokens: int = 4096
    batch: int = 1
    layers: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 1376
    threads: int = 2
    pairs: int = 20
    warmup: int = 2
    keep_ratio: float = 0.2
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = whole_numbers(self, {"warmup": 0, "seed": 0})
        if not problems and self.width % (2 * self.heads):
            problems.append(
                f"width {self.width} is not {self.heads} heads of an even width: take a multiple of "
                f"{2 * self.heads}"
            )
        if not problems and self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} are not a multiple of kv_heads {self.kv_heads}")
        if not 0 < self.keep_ratio <= 1:
            problems.append(f"keep_ratio is kept / seen, above 0 and at most 1, got {self.keep_ratio}")
        problems += unfit(self)
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")


@dataclass(frozen=True)
class Entry:
    """A policy to time: as typed, and what `retain.Cache` is given."""

    typed: str
    policy: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """What was measured of one policy.

    Args:
        policy: as typed.
        plain_ms: the plain prefill of each pair.
        policy_ms: the policy's prefill of each pair.
        bytes_held: keys and values held afterwards, as the cache counts them.
        bytes_full: the same of all that was seen.
    """

    policy: str
    plain_ms: tuple[float, ...]
    policy_ms: tuple[float, ...]
    bytes_held: int
    bytes_full: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Policy over plain, pair by pair."""
        return tuple(cut / plain for plain, cut in zip(self.plain_ms, self.policy_ms, strict=True))


def parse_entry(typed: str) -> Entry:
    """Read `NAME[,key=value ...]`; a key may be `section.key`, a value is YAML.

    Raises:
        ValueError: something behind the name is no `key=value`.

    Example:
        >>> parse_entry("snapkv,scope=layer,protection.recent=8").overrides
        {'scope': 'layer', 'protection': {'recent': 8}}
    """
    name, *settings = typed.split(",")
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise ValueError(
                f"policy {typed!r}: {setting!r} is no setting; write NAME,key=value or "
                "NAME,section.key=value, without spaces."
            )
        section, dot, inner = key.partition(".")
        if dot:
            overrides.setdefault(section, {})[inner] = yaml.safe_load(value)
        else:
            overrides[key] = yaml.safe_load(value)
    return Entry(typed, name, overrides)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """An interval for the median that supposes nothing about the distribution.

    The k-th smallest and the k-th largest of n values hold the median between them with probability
    `1 - 2 P(X < k)`, X binomial(n, 1/2); k is the largest for which that is at least `confidence`, or 1 if
    there is none.

    Returns:
        the two ends, and the probability itself.
    """
    ordered, n = sorted(values), len(values)

    def covered(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n

    k = max((k for k in range(1, n // 2 + 1) if covered(k) >= confidence), default=1)
    return ordered[k - 1], ordered[n - k], covered(k)


def build_model(setting: Setting) -> PreTrainedModel:
    """The random Llama of a setting."""
    sizes = ("tokens", "layers", "width", "heads", "kv_heads", "intermediate", "device", "seed")
    own: dict[str, Any] = {name: getattr(setting, name) for name in sizes}
    return random_llama(dtype=DTYPES[setting.dtype], **own)


def measure_scoring(setting: Setting, entries: Sequence[Entry]) -> list[Timing]:
    """Time the prefill of each policy against the plain one.

    Raises:
        ValueError: a policy is unknown, cannot be made without more than its name, or cannot meet the budget;
            found before anything is timed.
    """
    model = build_model(setting)
    # The plain side has a model of its own that is never attached; the weights are the same tensors.
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    draw = torch.Generator().manual_seed(setting.seed)
    input_ids = torch.randint(VOCABULARY, (setting.batch, setting.tokens), generator=draw).to(setting.device)

    def cut(entry: Entry) -> Cache:
        return Cache(model, entry.policy, keep_ratio=setting.keep_ratio, short="raise", **entry.overrides)

    def plain() -> Any:
        cache = DynamicCache(config=twin.config)
        base_model(twin)(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return cache

    seconds = clock(setting.device)

    def milliseconds(run: Callable[[], Any]) -> float:
        gc.collect()  # what the run before has left is not paid for here
        return 1e3 * seconds(run)

    for entry in entries:
        cut(entry)
    with attach(model), quiet(setting.threads):
        totals = [cut(entry).prefill(input_ids).report().total for entry in entries]
        times: list[list[tuple[float, float]]] = [[] for _ in entries]
        for pair in range(-setting.warmup, setting.pairs):
            for entry, rows in zip(entries, times, strict=True):

                def policy(entry: Entry = entry) -> Cache:
                    return cut(entry).prefill(input_ids)

                sides: dict[str, Callable[[], Any]] = {"plain": plain, "policy": policy}
                order = ("plain", "policy") if pair % 2 else ("policy", "plain")
                taken = {side: milliseconds(sides[side]) for side in order}
                if pair >= 0:
                    rows.append((taken["plain"], taken["policy"]))
    return [
        Timing(
            entry.typed,
            tuple(plain_ms for plain_ms, _ in rows),
            tuple(policy_ms for _, policy_ms in rows),
            total.bytes_held,
            total.bytes_full,
        )
        for entry, rows, total in zip(entries, times, totals, strict=True)
    ]


# What can be measured, by name: `(setting, policies) -> timings`.
MEASURES: dict[str, Callable[[Setting, Sequence[Entry]], list[Timing]]] = {"scoring": measure_scoring}
# Benchmarks that are modules of their own, with options of their own; they import this one.
ELSEWHERE = ("serving", "peers", "decode", "long", "eviction")


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting = Setting(**record["setting"])
    width = max(len("policy"), *(len(row["policy"]) for row in record["rows"]))
    lines = [
        *heading(
            record,
            "prefill with scoring and eviction / plain prefill",
            f"model: Llama, random weights, {setting.layers} layers, width {setting.width}, {setting.heads} "
            f"query and {setting.kv_heads} KV heads, feed-forward {setting.intermediate}, {setting.dtype}",
            f"prompt: {setting.batch} x {setting.tokens} tokens; keep_ratio {setting.keep_ratio}",
        ),
        f"{'policy':<{width}} {'ratio':>7} {'interval of the median':>23} {'policy ms':>10} "
        f"{'plain ms':>10} {'bytes held / full':>25}",
    ]
    for row in record["rows"]:
        low, high, covered = row["interval"]
        interval = f"{low:.3f} .. {high:.3f} ({covered:.0%})"
        held = f"{row['bytes_held']:,} / {row['bytes_full']:,}"
        lines.append(
            f"{row['policy']:<{width}} {row['ratio']:>7.3f} {interval:>23} {row['policy_median_ms']:>10.1f} "
            f"{row['plain_median_ms']:>10.1f} {held:>25}"
        )
    return "\n".join([*lines, f"medians of {setting.pairs} interleaved pairs", ""])


def describe_row(timing: Timing) -> dict[str, Any]:
    """One policy's line of a record, with every time that was taken."""
    return {
        "policy": timing.policy,
        "ratio": statistics.median(timing.ratios),
        "interval": median_interval(timing.ratios),
        "policy_median_ms": statistics.median(timing.policy_ms),
        "plain_median_ms": statistics.median(timing.plain_ms),
        "bytes_held": timing.bytes_held,
        "bytes_full": timing.bytes_full,
        "plain_ms": timing.plain_ms,
        "policy_ms": timing.policy_ms,
    }


def benchmark(what: str, setting: Setting, policies: Sequence[str], *, command: str = "") -> dict[str, Any]:
    """Run one benchmark.

    Args:
        what: a name in `MEASURES`.
        setting: of the model, the prompt and the clock.
        policies: each as `NAME[,key=value ...]`.
        command: that a reader would type.

    Returns:
        the record: setting, rows, environment, commit, command, date.

    Raises:
        ValueError: an unknown name, or settings that do not fit; before anything is timed.
    """
    lookup(what, dict.fromkeys((*MEASURES, *ELSEWHERE)), what="benchmark")
    if what in ELSEWHERE:
        raise ValueError(f"benchmark {what!r} has a setting of its own: call retain.eval.speed_{what}.")
    measure = MEASURES[what]
    entries = [parse_entry(typed) for typed in policies]
    if not entries:
        raise ValueError("benchmark: there is no policy to time; name at least one.")
    started = Started()
    timings = measure(setting, entries)
    return record_of(what, setting, command, started, {"rows": [describe_row(timing) for timing in timings]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--what")
    what, rest = first.parse_known_args(arguments)
    if what.what in ELSEWHERE:
        other = importlib.import_module(f"retain.eval.speed.{what.what}")
        return int(other.main(rest))
    parser = argparse.ArgumentParser(description="Time what scoring and eviction cost a prefill.")
    known = ", ".join((*MEASURES, *ELSEWHERE))
    parser.add_argument("--what", required=True, help=f"what is measured: {known} (those have own options)")
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), metavar="NAME[,key=value]", help="policies to time"
    )
    defaults = Setting()
    add_settings(parser, defaults)
    parser.add_argument(
        "--output", type=Path, help="default results/speed/WHAT.json; the table lies beside it"
    )
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{name: getattr(given, name) for name in asdict(defaults)})
        command = shlex.join(["python", "-m", "retain.eval.speed", *typed])
        record = benchmark(given.what, setting, given.policies, command=command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output or Path("results/speed") / f"{given.what}.json")
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

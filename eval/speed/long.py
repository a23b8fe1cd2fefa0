"""The benchmark of a long context: prefill with eviction, decoding and memory, beside the full cache.

    python -m retain.eval.speed.long [--tokens 32768,131072] [--policies fused,defensivekv,lava]
    [--device cuda] [--output PATH]

In: the shape of a Llama with random weights (default: one of 8B, but for its vocabulary of 1,024), lengths of
a prompt, policies, a keep_ratio. Out: a table for each length, and every single time beside it as JSON: the
milliseconds of a prefill (without the head) and of a decoded token (with it), the most memory that either
took (on CUDA), the bytes of the cache, and how often decoding made the host wait for the device.

Two full caches stand beside the policies. `plain` is transformers' `DynamicCache` with `sdpa`, which is what
a model does by itself; it copies a layer's entries whenever it appends one. `full` is our own cache that
keeps everything, which does not: what a policy gains on it is gained by eviction alone. Policies that take
gates get linear ones with random weights: the time is that of trained ones, the entries that they keep are
not. Where the package `flash_attn` is installed, transformers' cache stands there once more with its
attention. Published ratios that a run is about are lines behind its table (`speed_published`).

The one decision taken here: a round is a whole life, a prefill and then some tokens, of each side in turn, in
an order that rotates; ratios are medians of those within a round. First the cache that keeps everything is
held against `plain` on a short prompt, and nothing is timed if their logits differ. A side that runs out of
memory is said to, and the others go on.
"""

import argparse
import copy
import gc
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import retain
from retain.eval.speed import published as speed_published
from retain.eval.speed import scoring as speed
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import base_model
from retain.hf.model.gates import new_gates
from retain.hf.model.random_llama import VOCABULARY
from retain.kernels import backend
from retain.process.command import status_of
from retain.process.stopwatch import (
    Started,
    add_settings,
    clock,
    heading,
    publish,
    quiet,
    record_of,
    spread_of,
    synchronise,
    whole_numbers,
)

PLAIN, FULL = speed_published.PLAIN, speed_published.FULL
# Packages that are measured where they are installed, on a GPU: transformers' name of their attention.
ATTENTIONS = {"flash_attn": "flash_attention_2"}
# Tokens decoded before the clock starts, and prompt of the check.
FIRST, CHECKED = 4, 128
# Error of a logit that is allowed in the check, relative to the largest: the two sum in another order.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Setting:
    """One benchmark.

    Args:
        tokens: lengths T of the prompt, separated by commas.
        policies: as `retain.eval.speed.scoring` takes them, separated by semicolons or, if none has settings
        of its
            own, commas.
        steps: tokens decoded in a round.
        batch: prompts read at once.
        layers: L.
        width: E.
        heads: Q, query heads, of width `width / heads`.
        kv_heads: H.
        intermediate: width of the feed-forward part.
        keep_ratio: kept / seen.
        rounds: lives measured of each side.
        warmup: lives before them that are not counted.
        threads: CPU threads.
        dtype: of weights and cache, a name in `retain.process.stopwatch.DTYPES`.
        device: where it runs.
        seed: of weights and tokens.
    """

    tokens: str = "32768,131072"
    policies: str = "fused,defensivekv,lava"
    steps: int = 64
    batch: int = 1
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    keep_ratio: float = 0.2
    rounds: int = 3
    warmup: int = 1
    threads: int = 2
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = whole_numbers(self, {"warmup": 0, "seed": 0, "rounds": 2})
        if not self.lengths or min(self.lengths) < CHECKED:
            problems.append(
                f"tokens are whole numbers of at least {CHECKED}, separated by commas, got {self.tokens!r}"
            )
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")
        self.shape()  # which looks at the rest
        self.entries()

    @property
    def lengths(self) -> list[int]:
        """The lengths of `tokens`; none if one is no whole number."""
        parts = self.tokens.split(",")
        return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else []

    def entries(self) -> list[speed.Entry]:
        """The policies, the full cache first."""
        between = ";" if {";", "="} & set(self.policies) else ","
        typed = [name for name in self.policies.split(between) if name]
        return [speed.parse_entry(name) for name in dict.fromkeys((FULL, *typed))]

    def shape(self) -> speed.Setting:
        """The model's part of it, with room for the longest prompt and what is decoded behind it."""
        names = ("batch", "layers", "width", "heads", "kv_heads", "intermediate", "threads", "keep_ratio")
        own = {name: getattr(self, name) for name in (*names, "dtype", "device", "seed")}
        return speed.Setting(tokens=max(self.lengths) + FIRST + self.steps, **own)


@dataclass
class Side:
    """One of those that are measured: how it reads a prompt, and what was found.

    Args:
        name: as typed; `plain` for transformers' own cache.
        model: that it runs on.
        empty: makes an empty cache.
        prefill_ms: of each round.
        decode_ms: a token, of each round.
        prefill_peak: bytes of device memory at most while it read, weights included; None on a CPU.
        decode_peak: the same while it decoded.
        bytes_held: keys and values held when all was decoded.
        bytes_allocated: of the storage behind them.
        waits: times that the host waited for the device in a decoded token; None on a CPU.
        failed: why it was given up; empty: it was not.
    """

    name: str
    model: PreTrainedModel
    empty: Callable[[], Any]
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    prefill_peak: int | None = None
    decode_peak: int | None = None
    bytes_held: int = 0
    bytes_allocated: int = 0
    waits: float | None = None
    failed: str = ""

    def prefill(self, ids_BT: Tensor) -> Any:
        """Read a prompt, without the head."""
        cache = self.empty()
        if isinstance(cache, Cache):
            return cache.prefill(ids_BT)
        base_model(self.model)(input_ids=ids_BT, past_key_values=cache, use_cache=True)
        return cache

    def decode(self, cache: Any, seen: int, ids_BS: Tensor) -> list[Tensor]:
        """Decode given tokens, one at a time; the logits of each."""
        at_BS = seen + torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        return [
            self.model(
                input_ids=ids_BS[:, step : step + 1],
                position_ids=at_BS[:, step : step + 1],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for step in range(ids_BS.shape[1])
        ]


def random_gates(model: PreTrainedModel) -> GateSet:
    """Linear gates with random weights, for each layer that evicts."""
    return new_gates(model, "linear").eval().requires_grad_(False)


def sides_of(setting: Setting, model: PreTrainedModel, twin: PreTrainedModel, gates: GateSet) -> list[Side]:
    """All that are measured, `plain` first. Each policy is made once here, so that errors come before work.

    Args:
        setting: of the benchmark.
        model: for our cache.
        twin: the same weights, never attached: for transformers' own.
        gates: for the policies that take some.
    """
    needs = {preset.name: preset.needs for preset in retain.policies()}

    def cut(entry: speed.Entry) -> Callable[[], Cache]:
        own = gates if "gates" in needs.get(entry.policy, ()) else None
        ratio = setting.keep_ratio
        return lambda: Cache(
            model, entry.policy, keep_ratio=ratio, gates=own, short="raise", **entry.overrides
        )

    policies = [Side(entry.typed, model, cut(entry)) for entry in setting.entries()]
    for side in policies:
        side.empty()

    def plain(name: str, own: PreTrainedModel) -> Side:
        return Side(name, own, lambda: DynamicCache(config=own.config))

    others = []
    for package, attention in ATTENTIONS.items() if setting.device.startswith("cuda") else ():
        if importlib.util.find_spec(package) is not None:
            own = copy.deepcopy(twin, {id(weight): weight for weight in twin.parameters()})
            others.append(plain(f"{PLAIN}, {attention}", own))
            try:
                own.set_attn_implementation(attention)
            except (ImportError, ValueError) as error:  # installed, and not for this machine
                others[-1].failed = str(error).partition("\n")[0]
    return [plain(PLAIN, twin), *policies, *others]


def check(setting: Setting, plain: Side, full: Side, ids_BT: Tensor) -> dict[str, float]:
    """Hold our cache that keeps everything against transformers' own, on a short prompt.

    Returns:
        the largest error of a logit, relative to the largest logit, and what is allowed.

    Raises:
        RuntimeError: more than that.
    """
    prompt, rest = ids_BT[:, :CHECKED], ids_BT[:, :FIRST]
    wanted, actual = (
        torch.cat(side.decode(side.prefill(prompt), CHECKED, rest), dim=1).double() for side in (plain, full)
    )
    error, allowed = float((actual - wanted).abs().max() / wanted.abs().max()), ALLOWED[setting.dtype]
    if not error <= allowed:
        raise RuntimeError(
            f"our cache that keeps everything gives other logits than transformers' own: error {error:.2e}, "
            f"{allowed:.2e} allowed. Nothing was timed: run tests/hf."
        )
    return {"error": error, "allowed": allowed}


def waits_of(run: Callable[[], Any], device: str) -> int | None:
    """Run a call: how often it made the host wait for the device, as CUDA counts it; None on a CPU."""
    if not device.startswith("cuda"):
        run()
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in said)


def peak_of(device: str) -> int | None:
    """Bytes of device memory taken at most since the last call; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    synchronise(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def live(side: Side, setting: Setting, ids_BT: Tensor, next_BS: Tensor, *, counts: bool) -> None:
    """One round of one side: read, decode, look at what is held."""
    device, seconds, seen = setting.device, clock(setting.device), ids_BT.shape[1]
    gc.collect()  # what the one before has left
    peak_of(device)
    held: list[Any] = []
    prefill = seconds(lambda: held.append(side.prefill(ids_BT)))
    (cache,) = held
    prefill_peak = peak_of(device)
    first, rest = next_BS[:, :FIRST], next_BS[:, FIRST:]
    waits = waits_of(lambda: side.decode(cache, seen, first), device)
    peak_of(device)
    decode = seconds(lambda: side.decode(cache, seen + FIRST, rest))
    decode_peak = peak_of(device)
    if not counts:
        return
    side.prefill_ms.append(1e3 * prefill)
    side.decode_ms.append(1e3 * decode / rest.shape[1])
    side.prefill_peak, side.decode_peak = prefill_peak, decode_peak
    side.waits = None if waits is None else waits / first.shape[1]
    if isinstance(cache, Cache):
        total = cache.report().total
        side.bytes_held, side.bytes_allocated = total.bytes_held, total.bytes_allocated
    else:
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        side.bytes_held = sum(tensor.nbytes for tensor in tensors)
        side.bytes_allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def measure(setting: Setting, sides: Sequence[Side], length: int, ids_BT: Tensor) -> dict[str, Any]:
    """Time all sides at one length of the prompt."""
    prompt, following = ids_BT[:, :length], ids_BT[:, length:]
    for turn in range(-setting.warmup, setting.rounds):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):
            if side.failed:
                continue
            try:
                live(side, setting, prompt, following, counts=turn >= 0)
            except torch.OutOfMemoryError:
                side.failed = "out of memory"
        if setting.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return {side.name: describe_side(side, sides) for side in sides}


def describe_side(side: Side, sides: Sequence[Side]) -> dict[str, Any]:
    """What was found of one side, with every time that was taken, and its times over the full caches'."""
    if side.failed:
        return {"failed": side.failed}
    row: dict[str, Any] = {
        "prefill_ms": {**spread_of(side.prefill_ms), "all": side.prefill_ms},
        "decode_ms": {**spread_of(side.decode_ms), "all": side.decode_ms},
        "prefill_peak_bytes": side.prefill_peak,
        "decode_peak_bytes": side.decode_peak,
        "bytes_held": side.bytes_held,
        "bytes_allocated": side.bytes_allocated,
        "waits_a_token": side.waits,
    }
    for other in sides:
        if other.name in (PLAIN, FULL) and other is not side and not other.failed:
            for what in ("prefill_ms", "decode_ms"):
                pairs = zip(getattr(side, what), getattr(other, what), strict=True)
                row[f"{what}_over_{other.name}"] = spread_of([own / its for own, its in pairs])
    return row


def benchmark(setting: Setting, command: str = "") -> dict[str, Any]:
    """Check, time every side at every length, and return the record.

    Raises:
        ValueError: a policy is unknown or cannot meet the budget; before anything is timed.
        RuntimeError: our cache is wrong; nothing was timed.
    """
    started = Started()
    draw = torch.Generator().manual_seed(setting.seed)
    width = max(setting.lengths) + FIRST + setting.steps
    ids_BT = torch.randint(VOCABULARY, (setting.batch, width), generator=draw).to(setting.device)
    model = speed.build_model(setting.shape())
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    with torch.random.fork_rng():
        torch.manual_seed(setting.seed)
        gates = random_gates(model)

    def sides() -> list[Side]:
        return sides_of(setting, model, twin, gates)

    plain, full, *_ = sides()
    weights = sum(weight.nbytes for weight in model.parameters())
    found: dict[str, Any] = {"weights_bytes": weights, "parameters": model.num_parameters(), "lengths": {}}
    with attach(model), quiet(setting.threads):
        found["check"] = check(setting, plain, full, ids_BT)
        for length in setting.lengths:
            own = ids_BT[:, : length + FIRST + setting.steps]
            found["lengths"][str(length)] = measure(setting, sides(), length, own)
    found["paths"] = [f"{op}: {path}{why and f' ({why})'}" for op, path, why in backend.said()]
    record = record_of("long", setting, command, started, found)
    return {**record, "published": speed_published.published(record)}


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting = Setting(**record["setting"])
    lines = [
        *heading(
            record,
            "a long context, end to end",
            f"model: Llama, random weights, {setting.layers} layers, width {setting.width}, {setting.heads} "
            f"query and {setting.kv_heads} KV heads, feed-forward {setting.intermediate}, vocabulary "
            f"{VOCABULARY:,}, {setting.dtype}: {record['parameters'] / 1e9:.3g} billion parameters, "
            f"{record['weights_bytes'] / 2**30:.3g} GiB",
            f"prompts: {setting.batch} at once, random tokens; keep_ratio {setting.keep_ratio}; gates: "
            f"random, linear; {setting.rounds} rounds of a prefill and {setting.steps} tokens, in turn",
            f"checked against transformers' cache on {CHECKED} tokens: error {record['check']['error']:.1e}, "
            f"{record['check']['allowed']:.1e} allowed",
            f"paths: {'; '.join(record['paths'])}",
        ),
    ]
    names = [name for rows in record["lengths"].values() for name in rows]
    width = max(len(name) for name in names)
    for length, rows in record["lengths"].items():
        good = {name: row for name, row in rows.items() if "failed" not in row}
        lines.append(f"prefill of {int(length):,}")
        lines.append(f"{'':<{width}} {'ms':>32} {'/ plain':>22} {'peak GiB':>9}")
        for name, row in good.items():
            lines.append(
                f"{name:<{width}} {_spread(row['prefill_ms'], 32, 1)} "
                f"{_spread(row.get('prefill_ms_over_plain'), 22, 3)} {_gib(row['prefill_peak_bytes']):>9}"
            )
        lines += [f"{name:<{width}} {row['failed']}" for name, row in rows.items() if "failed" in row]
        lines.append(f"decoding behind {int(length):,}")
        lines.append(
            f"{'':<{width}} {'ms a token':>26} {'/ plain':>22} {'/ full':>22} {'peak GiB':>9} "
            f"{'held MiB':>9} {'allocated':>9} {'waits':>6}"
        )
        for name, row in good.items():
            waits = "-" if row["waits_a_token"] is None else f"{row['waits_a_token']:g}"
            lines.append(
                f"{name:<{width}} {_spread(row['decode_ms'], 26, 3)} "
                f"{_spread(row.get('decode_ms_over_plain'), 22, 3)} "
                f"{_spread(row.get('decode_ms_over_full'), 22, 3)} {_gib(row['decode_peak_bytes']):>9} "
                f"{row['bytes_held'] / 2**20:>9.2f} {row['bytes_allocated'] / 2**20:>9.2f} {waits:>6}"
            )
        lines.append("")
    lines += [
        "median (20 % .. 80 %) over rounds; ratios are medians of those within a round.",
        "plain: transformers' DynamicCache, which copies a layer's entries to append one; full: our cache, "
        "nothing evicted.",
        "peak: of the device, weights included. held: keys and values when all was decoded; allocated: the "
        "storage behind.",
        "waits: of the host for the device, a decoded token.",
        *record["published"],
    ]
    return "\n".join([*lines, ""])


def _spread(spread: dict[str, Any] | None, width: int, digits: int) -> str:
    """A median and its percentiles; blank where there is none."""
    if spread is None:
        return " " * width
    low, middle, high = (f"{spread[key]:.{digits}f}" for key in ("p20", "median", "p80"))
    return f"{middle} ({low}..{high})".rjust(width)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(description="Time a long context end to end, beside the full cache.")
    add_settings(parser, Setting)
    parser.add_argument("--output", type=Path, default=Path("results/speed/long.json"))
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{own.name: getattr(given, own.name) for own in fields(Setting)})
        record = benchmark(setting, shlex.join(["python", "-m", "retain.eval.speed.long", *typed]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

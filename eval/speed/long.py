"""Times a long context: prefill with eviction, decoding and memory, beside the full caches.

    python -m retain.eval.speed --what long [--tokens 32768,131072] [--policies fused,defensivekv,lava]
    [--device cuda] [--output PATH]

The model is a Llama with random weights (by default of 8B, but for its vocabulary of 1,024), and policies
that take gates get linear ones with random weights: the time is that of trained ones, the entries that they
keep are not. Measured for each length: milliseconds of a prefill (without the head) and of a decoded token
(with it), the most memory that either took (on CUDA), bytes of the cache, and how often decoding made the
host wait for the device. Where the package `flash_attn` is installed, transformers' cache stands there once
more with its attention. Published ratios that a run is about are lines behind its table, which hold or do
not: their numbers are of A100s and A800s, of other models and kernels, and of transformers' cache as it was
then, so one that does not hold says that the ratio is not reached here, and the times beside it say why.

A round is a life of each cache in turn: at these lengths a plain neighbour for each would take too long, and
ratios are those within a round. First our cache that keeps everything is held against `plain` on a short
prompt, and nothing is timed if their logits differ. A cache that runs out of memory is reported, and the
others go on.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch

from retain.eval.speed.caches import (
    FULL,
    PLAIN,
    POLICY,
    RANDOM,
    SEPARATED,
    Bench,
    TimedCache,
    Workload,
    check_logits,
    numbers,
    row_of,
    sharing_weights,
    typed_policies,
)
from retain.hf.intercept.attach import attach
from retain.hf.model.random_llama import VOCABULARY, LlamaSettings, random_llama
from retain.kernels import backend
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.timing import interleave, quiet

SHAPE = "of the model, by default of 8B"
# Packages that are measured where they are installed, on a GPU: transformers' name of their attention.
ATTENTIONS = {"flash_attn": "flash_attention_2"}
# Tokens decoded before the clock starts, and prompt of the check.
FIRST, CHECKED = 4, 128
PREFILL, DECODE = "prefill", "token"


@dataclass(frozen=True, kw_only=True)
class LongSettings(LlamaSettings):
    """The model, the prompts, the budget and the clock."""

    layers: Annotated[int, SHAPE] = 32
    width: Annotated[int, SHAPE] = 4096
    heads: Annotated[int, SHAPE] = 32
    kv_heads: Annotated[int, SHAPE] = 8
    intermediate: Annotated[int, SHAPE] = 14336
    dtype: Annotated[str, SHAPE] = "bfloat16"
    device: Annotated[str, SHAPE] = "cuda"
    tokens: Annotated[str, "lengths of the prompt, separated by commas"] = "32768,131072"
    policies: Annotated[str, SEPARATED] = "fused,defensivekv,lava"
    steps: Annotated[int, "tokens decoded in a round"] = 64
    batch: Annotated[int, "prompts read at once"] = 1
    keep_ratio: Annotated[float, "kept / seen"] = 0.2
    rounds: Annotated[int, "lives measured of each cache"] = 3
    warmup: Annotated[int, "lives before them that are not counted"] = 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.lengths or min(self.lengths) < CHECKED:
            wanted = f"whole numbers of at least {CHECKED}, separated by commas"
            yield f"tokens are {wanted}, got {self.tokens!r}"

    @property
    def lengths(self) -> list[int]:
        """The lengths of `tokens`; none if one is no whole number."""
        return numbers(self.tokens, int)


def caches_of(settings: LongSettings, bench: Bench, work: Workload) -> list[TimedCache]:
    """All that are measured, `plain` and `full` first.

    Raises:
        ValueError: a policy is unknown, or cannot be made.
    """
    entries = dict.fromkeys((FULL, *typed_policies(settings.policies)))
    caches = [bench.plain(work), *(bench.cut(typed, settings.keep_ratio, work) for typed in entries)]
    for package, attention in ATTENTIONS.items() if settings.on_gpu else ():
        if importlib.util.find_spec(package) is not None:
            twin = sharing_weights(bench.twin)
            caches.append(bench.plain(work, f"{PLAIN}, {attention}", twin=twin))
            try:
                twin.set_attn_implementation(attention)
            except (ImportError, ValueError) as error:  # installed, and not for this machine
                caches[-1].failed = str(error).partition("\n")[0]
    return caches


def check(bench: Bench, settings: LongSettings) -> dict[str, float]:
    """Holds our cache that keeps everything against transformers' own, on a short prompt (`check_logits`)."""
    work = bench.workload(CHECKED, steps=FIRST, head=False)
    wanted, actual = (
        torch.cat([*one.logits(one.read(), CHECKED, work.following_BS)], dim=1).double()
        for one in caches_of(settings, bench, work)[:2]
    )
    refused = (
        "our cache that keeps everything gives other logits than transformers' own: error {error}, {allowed} "
        "allowed. Nothing was timed: run tests/hf."
    )
    return check_logits(actual, wanted, settings.dtype, refused)


def measure(settings: LongSettings) -> dict[str, Any]:
    """Check, and time every cache at every length.

    Raises:
        ValueError: a policy is unknown or cannot meet the budget; before anything is timed.
        RuntimeError: our cache is wrong; nothing was timed.
    """
    most, rows = max(settings.lengths) + FIRST + settings.steps, []
    model = random_llama(settings, most)
    bench = Bench(model, RANDOM, settings.batch, most, settings.device, settings.seed)
    with attach(model), quiet(settings.threads, settings.device):
        checked = check(bench, settings)
        for length in settings.lengths:
            work = bench.workload(length, steps=FIRST + settings.steps, head=False, uncounted=FIRST)
            caches = caches_of(settings, bench, work)
            after = torch.cuda.empty_cache if settings.on_gpu else None
            interleave(caches, rounds=settings.rounds, warmup=settings.warmup, after_round=after)
            rows += [row_of(one, caches, tokens=length) for one in caches]
    return {
        "weights_bytes": sum(weight.nbytes for weight in model.parameters()),
        "parameters": model.num_parameters(),
        "check": checked,
        "paths": [f"{op}: {path}{why and f' ({why})'}" for op, path, why in backend.said()],
        "rows": rows,
        "published": published(vars(settings), rows),
    }


class Published(NamedTuple):
    """One published ratio: of `prefill`, whose time is at most `ratio` of the full cache's, or of a `token`,
    for which the full cache takes at least `ratio` times as long. Without a `keep_ratio` the time does not
    hang on it."""

    source: str
    policy: str
    what: str
    ratio: float
    tokens: int
    batch: int
    keep_ratio: float | None = None


PUBLISHED = (
    # arXiv 2502.03805: 3.54 s without eviction, 3.60 s with it; 0.0828 s and 0.0332 s a token.
    Published("CriticalKV (A100)", "criticalkv", PREFILL, 1.017, 32768, 1),
    Published("SnapKV, as CriticalKV's authors measured it (A100)", "snapkv", DECODE, 2.49, 32768, 4, 0.4),
    # "More than nine times" at 128K tokens; here with the largest of its published budgets, 1,024 a head.
    Published("LAVa (A800)", "lava", DECODE, 9.0, 131072, 1, 1024 / 131072),
)


def published(setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each published ratio that rows are about.

    Args:
        setting: their `batch` and `keep_ratio`.
        rows: of the benchmark `long`.

    Returns:
        lines that begin with `held`, `**NOT held**` or `**not measured**`.
    """
    lines = []
    for own in PUBLISHED:
        here = {row["policy"]: row for row in rows if row["tokens"] == own.tokens}
        same = own.keep_ratio is None or abs(setting["keep_ratio"] / own.keep_ratio - 1) < 0.01
        if own.policy in here and setting["batch"] == own.batch and same:
            lines.append(_line(own, here))
    return lines


def _line(own: Published, rows: Mapping[str, Mapping[str, Any]]) -> str:
    prefill = own.what == PREFILL
    what = "time to first token" if prefill else "decoding"
    bound = f"at most {own.ratio:g} x" if prefill else f"at least {own.ratio:g} times as fast as"
    prompts = f"{own.batch} x {own.tokens:,}" if own.batch > 1 else f"{own.tokens:,}"
    claim = f"{own.source}: {what} at {prompts} tokens {bound} the full cache"
    failed = [f"{who}: {rows[who]['failed']}" for who in (own.policy, PLAIN) if rows[who].get("failed")]
    if failed:
        return f"**not measured**: {claim}: {'; '.join(failed)}"

    def shown(over: Mapping[str, float]) -> tuple[float, str]:
        median, *ends = (over[key] if prefill else 1 / over[key] for key in ("median", "p20", "p80"))
        return median, f"{median:.3f} ({min(ends):.3f}..{max(ends):.3f})"

    over, beside = (rows[own.policy].get(f"{own.what}_over_{other}") for other in (PLAIN, FULL))
    assert over is not None
    median, text = shown(over)
    good = median <= own.ratio if prefill else median >= own.ratio
    also = "" if beside is None else f", {shown(beside)[1]} over our cache that keeps everything"
    return f"{'held' if good else '**NOT held**'}: {claim}: {text} here{also}"


def ratio(stage: str, other: str) -> Column:
    """The column of a ratio."""
    return Column(f"/ {other}", f"{stage}_over_{other}", wide=True)


GIB, MIB = 2**30, 2**20
PREFILL_COLUMNS = (
    *(POLICY, Column("ms", "prefill_ms", ".1f", wide=True), ratio("prefill", PLAIN)),
    Column("peak GiB", "peak_bytes.prefill", ".2f", GIB),
)
DECODE_COLUMNS = (
    *(POLICY, Column("ms a token", "token_ms", wide=True), ratio("token", PLAIN), ratio("token", FULL)),
    *(Column("peak GiB", "peak_bytes.decode", ".2f", GIB), Column("waits", "waits_a_token", "g")),
    Column("held MiB", "cache_bytes.held_at_end", ".2f", MIB),
    Column("allocated", "cache_bytes.allocated_at_end", ".2f", MIB),
)


def table(record: dict[str, Any], settings: LongSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    tables: list[str] = []
    for length in settings.lengths:
        rows = [row for row in record["rows"] if row["tokens"] == length]
        decoded = [row for row in rows if not row["failed"]]
        tables += [f"prefill of {length:,}", *grid(PREFILL_COLUMNS, rows)]
        tables += [f"decoding behind {length:,}", *grid(DECODE_COLUMNS, decoded), ""]
    return [
        *heading(
            record,
            "a long context, end to end",
            f"model: Llama, random weights, {settings.described()}, vocabulary {VOCABULARY:,}: "
            f"{record['parameters'] / 1e9:.3g} billion parameters, {record['weights_bytes'] / 2**30:.3g} GiB",
            f"prompts: {settings.batch} at once, random tokens; keep_ratio {settings.keep_ratio}; gates: "
            f"random, linear; {settings.rounds} rounds of a prefill and {settings.steps} tokens, in turn",
            f"checked against transformers' cache on {CHECKED} tokens: error {record['check']['error']:.1e}, "
            f"{record['check']['allowed']:.1e} allowed",
            f"paths: {'; '.join(record['paths'])}",
        ),
        *tables,
        "median (20 % .. 80 %) over rounds; ratios are medians of those within a round.",
        "plain: transformers' DynamicCache, which copies a layer's entries to append one; full: our cache, "
        "nothing evicted.",
        "peak: of the device, beyond what was held before (weights). held: keys and values when all was "
        "decoded; allocated: the storage behind.",
        "waits: of the host for the device, a decoded token.",
        *record["published"],
    ]


BENCHMARK = Benchmark("retain.eval.speed", "long", LongSettings, measure, table)

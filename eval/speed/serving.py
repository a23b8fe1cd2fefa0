"""Times serving: first token, decoding, memory and stages, for every policy beside the full caches.

    python -m retain.eval.speed --what serving [--model random|reference|PATH|HUB_ID] [--policies NAME ...]
    [--keep-ratios 0.2,0.5] [--batches 1,4] [--tokens 2048] [--gates PATH|random] [--device cpu|cuda]
    [--output PATH]

Measured: time to first token (the prompt read, evicted from, and the next token chosen), milliseconds a
decoded token, tokens a second, peak memory beyond what was held before (on CUDA what torch allocated; on a
CPU the resident set's high-water mark, in a process of its own), bytes of the cache, and which share of a
prefill is scoring and which evicting. Every policy lives once before anything is timed, so that a budget that
cannot be met is an error and not half a table.

Shares of a prefill are those of one that was clocked stage by stage (`retain.eval.speed.stages`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import retain
from retain.eval.speed.caches import (
    FULL,
    FULL_CACHES,
    HELD,
    KEEP,
    PEAK,
    POLICY,
    RANDOM,
    SEPARATED,
    Bench,
    TimedCache,
    name_of,
    numbers,
    row_of,
    takes_gates,
    try_out,
    typed_policies,
)
from retain.eval.speed.stages import Part, staged
from retain.head_tables import TABLES
from retain.hf.cache import engine
from retain.hf.cache.bound_policy import BoundPolicy
from retain.hf.cache.eviction_request import EvictionRequest, LayerByLayer
from retain.hf.cache.state import State
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import describe
from retain.hf.model.named import load_named_model
from retain.hf.model.random_llama import LlamaSettings, random_llama
from retain.process import memory as resident
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.timing import Case, Times, interleave, quiet, spread, timed

# What a preset may need that somebody has to train or measure first.
MADE = ("gates", *TABLES)
REFERENCE = "reference"
# `scoring` is the policy's score of a layer, gates and running statistics included, and lookahead tokens;
# `eviction` budgets, protection, selection, and cutting layers to what is kept. A cache that keeps everything
# has some too: it lays out what it holds.
SCORING, EVICTION = "scoring", "eviction"
PARTS: tuple[Part, ...] = (
    (EvictionRequest, "score", SCORING),
    (EvictionRequest, "noted", SCORING),
    (EvictionRequest, "counted", SCORING),
    (engine, "look_ahead", SCORING),
    (BoundPolicy, "begin", EVICTION),
    (LayerByLayer, "add", EVICTION),
    (engine, "shrink", EVICTION),
    (State, "cut_dense", EVICTION),
)


@dataclass(frozen=True, kw_only=True)
class ServingSettings(LlamaSettings):
    """The model, the policies, their budgets and the clock."""

    model: Annotated[str, "random, reference (of this seed), or a folder or hub id"] = RANDOM
    policies: Annotated[str, f"{SEPARATED}; empty: every preset that can be made"] = ""
    gates: Annotated[str, "folder, hub id, or random (linear, untrained: right in time alone)"] = ""
    keep_ratios: Annotated[str, "kept / seen, separated by commas"] = "0.2,0.5"
    batches: Annotated[str, "prompts read at once, separated by commas"] = "1,4"
    tokens: Annotated[int, "length of each prompt"] = 2048
    steps: Annotated[int, "tokens decoded in a life"] = 16
    rounds: Annotated[int, "lives measured of each policy"] = 5
    warmup: Annotated[int, "lives before them that are not counted, at least 1"] = 1
    memory: Annotated[bool, "on a CPU, watch memory in a process of its own"] = True

    least = {**LlamaSettings.least, "warmup": 1}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.ratios or not 0 < min(self.ratios) <= max(self.ratios) <= 1:
            wanted = "numbers above 0 and at most 1, separated by commas"
            yield f"keep_ratios are {wanted}, got {self.keep_ratios!r}"
        if not self.sizes or min(self.sizes) < 1:
            wanted = "whole numbers of at least 1, separated by commas"
            yield f"batches are {wanted}, got {self.batches!r}"
        gates = "pass --gates with a folder or hub id, or with 'random' for the time of linear ones"
        for typed in self.entries():
            if takes_gates(typed) and not self.gates:
                yield f"policy {name_of(typed)!r} needs gates: {gates}"

    @property
    def ratios(self) -> list[float]:
        """The budgets of `keep_ratios`; none if one is no number."""
        return numbers(self.keep_ratios, float)

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of `batches`; none if one is no whole number."""
        return numbers(self.batches, int)

    @property
    def watches(self) -> bool:
        """Whether memory is watched in a process of its own."""
        return self.memory and not self.on_gpu and resident.measurable()

    def entries(self) -> list[str]:
        """The policies to time, as typed, the full cache apart."""
        missing = {*MADE} - ({"gates"} if self.gates else set())
        evicting = [preset for preset in retain.policies() if preset.regime != "select"]
        able = [preset.name for preset in evicting if not preset.needs & missing]
        return [typed for typed in typed_policies(self.policies or ",".join(able)) if name_of(typed) != FULL]


def bench_of(settings: ServingSettings) -> Bench:
    """Loads the model, in eval mode and on its device, and its gates; draws prompts for the largest batch.

    Raises:
        ValueError: it cannot be loaded, or reads fewer tokens than are asked for.
    """
    model = model_of(settings, settings.model, settings.tokens, settings.steps)
    tokens = settings.tokens + settings.steps
    return Bench(model, settings.gates, max(settings.sizes), tokens, settings.device, settings.seed)


def model_of(settings: LlamaSettings, named: str, tokens: int, steps: int) -> Any:
    """The model of that name, for prompts of so many tokens and so many decoded behind them.

    Raises:
        ValueError: it cannot be loaded, or reads fewer tokens.
    """
    if named == RANDOM:
        return random_llama(settings, tokens + steps)
    name = f"{REFERENCE}:{settings.seed}" if named == REFERENCE else named
    model = load_named_model(name, dtype=settings.dtype)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and tokens + steps > most:
        raise ValueError(
            f"benchmark: {tokens} tokens and {steps} steps are more than the {most} positions of model "
            f"{named!r}: take fewer tokens."
        )
    return model.to(settings.device).requires_grad_(False)


def caches_of(settings: ServingSettings, bench: Bench, batch: int) -> list[TimedCache]:
    """`plain` first, then `full`, then every policy at every budget; each beside `plain`."""
    work = bench.workload(settings.tokens, batch=batch, steps=settings.steps)
    plain = bench.plain(work)
    cells = [(FULL, 1.0), *((typed, ratio) for ratio in settings.ratios for typed in settings.entries())]
    return [plain, *(bench.cut(typed, ratio, work, plain) for typed, ratio in cells)]


def stage_shares(one: TimedCache) -> Times:
    """The shares of one more prefill that are scoring and evicting."""
    with staged(PARTS) as parts:
        _, whole = timed(one.read)
    return {stage: taken / whole for stage, taken in parts.items()}


def measure(settings: ServingSettings) -> dict[str, Any]:
    """Times all caches at every batch size, and watches their memory.

    Raises:
        ValueError: a policy, a model or a budget that cannot be; before anything is timed.
        RuntimeError: the watched process failed.
    """
    bench, rows = bench_of(settings), []
    with attach(bench.model), quiet(settings.threads, settings.device):
        tried = [(batch, caches_of(settings, bench, batch)) for batch in settings.sizes]
        try_out([one for _, caches in tried for one in caches])  # all before the first is timed
        for batch, caches in tried:
            interleave(caches, rounds=settings.rounds, warmup=settings.warmup)
            ours = [one for one in caches[1:] if not one.failed]
            stages = {one: Case(call=partial(stage_shares, one)) for one in ours}
            interleave([*stages.values()], rounds=settings.rounds, warmup=0)
            for one in caches:
                row = serving_row(one, caches, batch)
                for part in (SCORING, EVICTION) if one in stages else ():
                    row[f"{part}_share"] = spread(stages[one].times(part))
                rows.append(row)
    peak_of = "device: allocated at most, beyond what was held before (weights)" * settings.on_gpu
    if settings.watches:
        peak_of = (
            "process: resident set at most, beyond what was held before (weights), in a process of its own"
        )
        add_peaks(rows, *BENCHMARK.watched([settings]))
    specs, config = list(describe(bench.model)), bench.model.config.get_text_config()
    model = {
        "name": settings.model,
        "kind": type(bench.model).__name__,
        "layers": config.num_hidden_layers,
        "evicting_layers": len(specs),
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": specs[0].num_kv_heads,
        "parameters": bench.model.num_parameters(),
        "weights_bytes": sum(weight.nbytes for weight in bench.model.parameters()),
    }
    return {"model": model, "peak_of": peak_of or "not measured", "rows": rows}


def serving_row(one: TimedCache, caches: Sequence[TimedCache], batch: int) -> dict[str, Any]:
    """The row of one cache, with its tokens a second."""
    row = row_of(one, caches, batch=batch)
    if not one.failed:
        row["tokens_per_s"] = spread([1e3 * batch / taken for taken in one.times("token_ms")])
    return row


def watch(settings: ServingSettings) -> list[dict[str, Any]]:
    """In this process, on a CPU: what each cache holds at most beyond what was held before it.

    Returns:
        `{"policy", "keep_ratio", "batch", "prefill", "decode"}` in bytes, in the order of `caches_of`.
    """
    bench, found = bench_of(settings), []
    with attach(bench.model), quiet(settings.threads, settings.device):
        for batch in settings.sizes:
            caches = caches_of(settings, bench, batch)
            try_out(caches)  # loads libraries and fills pools
            for one in caches:
                one.watches = True
                one.attempt()
                who = {"policy": one.name, "keep_ratio": one.keep_ratio, "batch": batch}
                found.append({**who, **one.peaks})
    return found


def add_peaks(rows: Sequence[dict[str, Any]], peaks: Sequence[Mapping[str, Any]]) -> None:
    """Writes what `watch` found into the rows of the same caches that have not failed."""
    for row, peak in zip(rows, peaks, strict=True):
        if not row["failed"]:
            row["peak_bytes"] = {stage: peak[stage] for stage in ("prefill", "decode")}


COLUMNS = (
    *(POLICY, KEEP, Column("first token ms", "ttft_ms", ".1f", wide=True)),
    *(Column("/ plain", "ttft_over_plain"), Column("/ full", "ttft_over_full")),
    Column("token ms", "token_ms", ".2f", wide=True),
    *(Column(f"/ {other}", f"token_over_{other}") for other in FULL_CACHES),
    *(Column("tokens/s", "tokens_per_s", ",.1f"), Column("scoring", "scoring_share", ".1%")),
    *(Column("evicting", "eviction_share", ".1%"), PEAK, HELD, Column("of full", "held_of_full", ".1%")),
)


def by_batch(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each batch size."""
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += [f"batch {batch}", *grid(columns, [row for row in rows if row["batch"] == batch]), ""]
    return lines


def table(record: dict[str, Any], settings: ServingSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    model, rows = record["model"], record["rows"]
    return [
        *heading(
            record,
            "serving: every policy beside the full cache",
            f"model: {model['name']} ({model['kind']}), {model['layers']} layers, width {model['width']}, "
            f"{model['heads']} query and {model['kv_heads']} KV heads, {model['parameters'] / 1e6:,.1f} "
            f"million parameters, {settings.dtype}",
            f"prompts of {settings.tokens:,} random tokens, {settings.steps} decoded behind them; "
            f"{settings.rounds} lives of each policy, each beside one of plain",
            f"peak: {record['peak_of']}",
        ),
        *by_batch(COLUMNS, rows),
        "median (20 % .. 80 %) over lives; / plain: median of neighbours' ratios; / full, / dense: of those "
        "within a round;",
        "dense: transformers' own cache of as many entries.",
        "scoring, evicting: share of a prefill that was clocked stage by stage. peak: up to the first token.",
        "held: keys and values behind the prompt, as the cache counts them; of full: over those of all seen.",
    ]


BENCHMARK = Benchmark("retain.eval.speed", "serving", ServingSettings, measure, table, watch)

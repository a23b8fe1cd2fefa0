"""Times decoding over ragged rows: attention, appending and compacting, beside dense attention.

    python -m retain.eval.speed --what decode [--device cpu|cuda] [--threads 2] [--rounds 40] [--output PATH]

The settings are the shape of one layer, how much was seen, the share kept, and how unequal rows are. Five
questions are answered: (a) how much faster than dense attention over all that was seen, (b) how much slower
than dense attention over a cache of equal rows that holds the same total, (c) whether appending costs more
behind longer rows, (d) what an eviction in place costs, (e) how much slower attention is with what each entry
counts beside it (`retain.cache.store.LOG_WEIGHT`). The op is checked against float64 first, and nothing
is timed if it is wrong.

Everything is timed in turn, over several layers whose entries do not fit into the processor's caches
together, as in a model. Dense attention is `scaled_dot_product_attention`, and the fastest of three ways to
call it counts: with `enable_gqa`, with repeated heads, and with the heads of a group as query positions.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.cache.attend import attend
from retain.cache.store import GROWTH, LOG_WEIGHT, RaggedStore
from retain.eval.speed.caches import checked
from retain.kernels.measure import FLOOR
from retain.process.benchmark import DTYPES, Benchmark, Column, Settings, grid, heading
from retain.process.timing import Case, Times, interleave, quiet, spread, timed

SHORT, LONG = 1024, 16384
AHEAD, BEHIND, COUNTED = 2.0, 1.3, 1.05
WARMUP = 3
OWN, READING = "ragged attention", "reading the store once"
WEIGHTED = "ragged attention, counted"


@dataclass(frozen=True, kw_only=True)
class RowSettings(Settings):
    """The shape of one layer, and how unequal its rows are."""

    batch: Annotated[int, "sequences"] = 4
    heads: Annotated[int, "query heads"] = 32
    kv_heads: Annotated[int, "KV heads"] = 8
    width: Annotated[int, "width of a head"] = 128
    spread: Annotated[float, "longest row / shortest row, where heads share a budget"] = 4.0

    def problems(self) -> Iterator[str]:
        if self.heads % max(1, self.kv_heads):
            yield f"heads {self.heads} are not a multiple of kv_heads {self.kv_heads}"
        if self.spread < 1:
            yield f"spread is longest / shortest, at least 1, got {self.spread}"

    def random(self, *shape: int) -> Tensor:
        """Random numbers in the precision of the benchmark, where it runs."""
        return torch.randn(shape, device=self.device).to(DTYPES[self.dtype])

    def random_queries(self) -> Tensor:
        """Queries of one decoded token in one layer, `[B, Q, 1, D]`."""
        return self.random(self.batch, self.heads, 1, self.width)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(RowSettings):
    """The shape of one layer, its rows, and the clock."""

    seen: Annotated[int, "tokens seen"] = 4096
    keep_ratio: Annotated[float, "kept / seen"] = 0.2
    evicted: Annotated[int, "entries that an eviction in place takes from each row"] = 32
    layers: Annotated[int, "layers that are attended in turn"] = 3
    rounds: Annotated[int, "ratios measured; three more before them are not counted"] = 40

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.spread >= 1 and min(self.batch, self.kv_heads) > 0 and min(self.lengths()) <= self.evicted:
            yield f"evicted {self.evicted} would empty the shortest row, of {min(self.lengths())}"

    @property
    def held(self) -> int:
        """Entries that a row holds on average."""
        return int(self.keep_ratio * self.seen)

    def lengths(self) -> list[int]:
        """Entries of each row: evenly from the shortest to the longest, shuffled, `held` on average."""
        draw = torch.Generator().manual_seed(self.seed)
        return unequal(self.batch * self.kv_heads, self.held, self.spread, draw)


def unequal(rows: int, mean: int, spread: float, draw: torch.Generator) -> list[int]:
    """Lengths evenly from the shortest to the longest, which is `spread` times that, shuffled; `mean` on
    average, exactly."""
    shortest = 2 * mean / (1 + spread)
    steps = torch.linspace(shortest, spread * shortest, rows, dtype=torch.float64).round().long()
    steps[rows // 2] += mean * rows - int(steps.sum())
    return steps[torch.randperm(rows, generator=draw)].tolist()


def ragged(
    settings: RowSettings, lengths: Sequence[int], slack: int = 32, *, counted: bool = False
) -> RaggedStore:
    """A store of random entries with rows of these lengths, and with log weights beside them if counted."""
    keys_ND, values_ND = (settings.random(sum(lengths), settings.width) for _ in range(2))
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(settings.device)
    lengths_R = torch.tensor(lengths, device=settings.device)
    beside = {LOG_WEIGHT: torch.rand(sum(lengths), device=settings.device)} if counted else None
    return RaggedStore(keys_ND, values_ND, positions_N, lengths_R, settings.kv_heads, slack, beside)


def attend_store(queries_BQSD: Tensor, store: RaggedStore, seen_RS: Tensor | None = None) -> Tensor:
    """Ragged attention over a store; over all of each row, where nothing else is said."""
    return attend(
        queries_BQSD,
        store.keys_CD,
        store.values_CD,
        store.offsets_R1,
        store.lengths_R,
        store.lengths_R.to(torch.int64)[:, None] if seen_RS is None else seen_RS,
        scaling=queries_BQSD.shape[-1] ** -0.5,
        pages=store.pages,
        log_weight_C=store.log_weight_C,
    )


def check(settings: DecodeSettings, queries_BQSD: Tensor, store: RaggedStore) -> dict[str, float]:
    """The op's error against float64, and what is allowed: twice plain PyTorch's, and a floor.

    Raises:
        RuntimeError: more than that.
    """
    rows = queries_BQSD.view(store.num_rows, -1, settings.width)

    def row_by_row(dtype: torch.dtype) -> Tensor:
        outputs = []
        for row, queries in enumerate(rows.to(dtype)):
            keys, values, _ = store.row(*divmod(row, settings.kv_heads))
            logits = queries @ keys.to(dtype).T * settings.width**-0.5
            if store.log_weight_C is not None:
                start = int(store.offsets_R1[row])
                logits = logits + store.log_weight_C[start : start + len(keys)].to(dtype)
            outputs.append(torch.softmax(logits, -1) @ values.to(dtype))
        return torch.cat(outputs).view_as(queries_BQSD).double()

    exact, plain = row_by_row(torch.float64), row_by_row(queries_BQSD.dtype)
    error, own = (
        float((found - exact).abs().max()) for found in (attend_store(queries_BQSD, store).double(), plain)
    )
    return checked(
        error,
        2 * own + FLOOR[queries_BQSD.dtype] * float(exact.abs().max()),
        "ragged attention is wrong: error {error} against float64, {allowed} allowed. Nothing was timed: run "
        "tests/test_attend.py.",
    )


def dense_ways(
    settings: DecodeSettings, queries_BQSD: Tensor, num_entries: int
) -> dict[str, Callable[[int], Tensor]]:
    """Three ways to call torch's attention on dense caches of so many entries a row, one a layer."""
    B, H, D = settings.batch, settings.kv_heads, settings.width
    keys, values = ([settings.random(B, H, num_entries, D) for _ in range(settings.layers)] for _ in range(2))
    group = settings.heads // H
    grouped = queries_BQSD.view(B, H, group, D)

    def repeated(layer: int) -> Tensor:
        wide_keys, wide_values = (side[layer].repeat_interleave(group, 1) for side in (keys, values))
        return scaled_dot_product_attention(queries_BQSD, wide_keys, wide_values)

    return {
        "enable_gqa": lambda layer: scaled_dot_product_attention(
            queries_BQSD, keys[layer], values[layer], enable_gqa=True
        ),
        "repeated heads": repeated,
        "grouped queries": lambda layer: scaled_dot_product_attention(grouped, keys[layer], values[layer]),
    }


def ragged_ways(settings: DecodeSettings, queries_BQSD: Tensor) -> dict[str, Callable[[int], float]]:
    """What is timed over ragged stores, one a layer, by name: a layer to milliseconds."""
    stores, weighted = (
        [ragged(settings, settings.lengths(), counted=counted) for _ in range(settings.layers)]
        for counted in (False, True)
    )
    flat = [torch.cat([store.keys_CD, store.values_CD]) for store in stores]
    new = settings.random(settings.batch, settings.kv_heads, 1, settings.width)
    position = torch.full((settings.batch, 1), settings.seen, device=settings.device)

    def append(store: RaggedStore) -> Tensor:
        return store.append_(new, new, position)

    def equal(length: int, slack: int) -> RaggedStore:
        return ragged(settings, [length] * len(settings.lengths()), slack=slack)

    def taken_back(run: Callable[[RaggedStore], Any], layer: int) -> float:
        """Times what changes the rows' lengths, and puts them back: a copy would lie in the caches."""
        store = stores[layer]
        lengths_R, free = store.lengths_R.clone(), store.free
        _, ms = timed(partial(run, store))
        store.lengths_R.copy_(lengths_R)
        store.free = free
        return ms

    def evicting(layer: int) -> float:
        keep = [torch.randperm(length) >= settings.evicted for length in settings.lengths()]
        keep_N = torch.cat(keep).to(settings.device)
        return taken_back(lambda own: own.compact_(keep_N), layer)

    def appending(length: int) -> Callable[[int], float]:
        # There is room for all appends of the benchmark.
        store = equal(length, 10 * (settings.rounds + WARMUP) * settings.layers)
        return lambda layer: timed(lambda: [append(store) for _ in range(10)])[1] / 10

    def growing(length: int) -> Callable[[int], float]:
        store = equal(length, slack=1)

        def share(layer: int) -> float:
            """A token's share of laying out anew: one growth, over the tokens until the next."""
            full, free = store.fork(), store.free
            full.append_(*(new.expand(-1, -1, free, -1),) * 2, position.expand(-1, free))
            return timed(partial(append, full))[1] / (1 + full.free)

        return share

    return {
        READING: lambda layer: timed(lambda: flat[layer].sum())[1],
        OWN: lambda layer: timed(lambda: attend_store(queries_BQSD, stores[layer]))[1],
        WEIGHTED: lambda layer: timed(lambda: attend_store(queries_BQSD, weighted[layer]))[1],
        "append and ragged attention": partial(
            taken_back, lambda own: attend_store(queries_BQSD, own, append(own))
        ),
        **{f"append behind {length:,}": appending(length) for length in (SHORT, LONG)},
        **{f"growth a token, behind {length:,}": growing(length) for length in (SHORT, LONG)},
        f"compaction, {settings.evicted} of each row": evicting,
    }


def ratios_of(settings: DecodeSettings, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """The five questions: ratios within each round, and whether the bound is kept."""

    def fastest(kind: str) -> str:
        own = [name for name in cases if name.startswith(kind)]
        return min(own, key=lambda name: statistics.median(cases[name].times("ms")))

    def ratio(above: str, below: str, bound: list[float] | None = None) -> dict[str, Any]:
        found = spread(cases[above].over(cases[below], "ms"))
        assert found is not None
        kept = None if bound is None else bound[0] <= found["median"] <= bound[1]
        return {**found, "of": above, "over": below, "bound": bound, "kept": kept}

    compaction = ratio(f"compaction, {settings.evicted} of each row", OWN)
    share = {key: compaction[key] / settings.evicted for key in ("median", "p20", "p80")}
    over = f"{OWN}, amortised over {settings.evicted} tokens"
    behind = ("append behind {:,}", "growth a token, behind {:,}")
    append, growth = (ratio(name.format(LONG), name.format(SHORT)) for name in behind)
    return {
        "a: times faster than the full cache": ratio(fastest("full cache"), OWN, [AHEAD, math.inf]),
        "b: time over a dense cache of as many": ratio(OWN, fastest("dense cache"), [-math.inf, BEHIND]),
        "c: append behind 16 times as many": append,
        "c: growth a token, the same": growth,
        "d: compaction over attention": compaction,
        "d: a token's share of it": {**compaction, **share, "over": over},
        "e: with a count beside each entry": ratio(WEIGHTED, OWN, [-math.inf, COUNTED]),
    }


def measure(settings: DecodeSettings) -> dict[str, Any]:
    """Checks the op, and times everything.

    Raises:
        RuntimeError: the op is wrong; nothing is timed.
    """
    torch.manual_seed(settings.seed)
    queries_BQSD = settings.random_queries()
    with quiet(settings.threads, settings.device):
        store, weighted = (ragged(settings, settings.lengths(), counted=counted) for counted in (False, True))
        error = check(settings, queries_BQSD, store)
        check(settings, queries_BQSD, weighted)

        def over_layers(run: Callable[[int], float]) -> Times:
            return {"ms": sum(map(run, range(settings.layers))) / settings.layers}

        kinds = {"full cache": settings.seen, "dense cache of as many": settings.held}
        dense = {
            f"{kind}, {way}": lambda layer, run=run: timed(partial(run, layer))[1]
            for kind, length in kinds.items()
            for way, run in dense_ways(settings, queries_BQSD, length).items()
        }
        runs = {**dense, **ragged_ways(settings, queries_BQSD)}
        cases = {name: Case(call=partial(over_layers, run)) for name, run in runs.items()}
        interleave([*cases.values()], rounds=settings.rounds, warmup=WARMUP)
    return {
        "check": error,
        "bytes_held": store.bytes_held,
        "bytes_allocated": store.bytes_allocated,
        "growth": GROWTH,
        "times_ms": {name: spread(case.times("ms")) for name, case in cases.items()},
        "ratios": ratios_of(settings, cases),
    }


def table(record: dict[str, Any], settings: DecodeSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    lengths = settings.lengths()
    times = [{"name": name, **row} for name, row in record["times_ms"].items()]
    for row in times:
        if row["name"] in (READING, OWN):
            row["gb_per_s"] = record["bytes_held"] / row["median"] / 1e6
    ratios = [{"name": name, **row} for name, row in record["ratios"].items()]
    for row in ratios:
        row["verdict"] = {None: "", True: "kept", False: "NOT KEPT"}[row["kept"]]
        row["bounds"] = " .. ".join(f"{end:g}" for end in row["bound"] or ())
    percents = [Column(title, key, ".4f") for title, key in PERCENTS]
    names = Column(f"medians of {settings.rounds} rounds, ms", "name")
    return [
        *heading(
            record,
            "decoding over ragged rows",
            f"layer: {settings.batch} sequences, {settings.heads} query and {settings.kv_heads} KV heads of "
            f"width {settings.width}, {settings.dtype}; {settings.layers} layers in turn",
            f"seen {settings.seen:,}, kept {settings.keep_ratio:.0%}: {min(lengths):,} to {max(lengths):,} "
            f"entries a row, {settings.held:,} on average; {record['bytes_held']:,} bytes held, "
            f"{record['bytes_allocated']:,} allocated",
            f"checked against float64: error {record['check']['error']:.1e}, "
            f"{record['check']['allowed']:.1e} allowed",
        ),
        *grid((names, *percents, Column("GB/s", "gb_per_s", ".1f")), times),
        "",
        *grid((Column("ratios within a round", "name"), *percents, *VERDICT), ratios),
    ]


PERCENTS = (("20 %", "p20"), ("median", "median"), ("80 %", "p80"))
VERDICT = (Column("bound", "bounds"), Column("", "verdict"), Column("of", "of"), Column("over", "over"))
BENCHMARK = Benchmark("retain.eval.speed", "decode", DecodeSettings, measure, table)

"""The benchmark of decoding: attention over ragged rows, appending and compacting, beside dense attention.

    python -m retain.eval.speed.decode [--device cpu|cuda] [--threads 2] [--rounds 40] [--output PATH]

In: the shape of one layer, how much was seen, the share kept, how unequal rows are. Out: times and four
questions with their ratios, as a table and as JSON: (a) how much faster than dense attention over all that
was seen, (b) how much slower than dense attention over a cache of equal rows that holds the same total, (c)
whether appending costs more behind longer rows, (d) what an eviction in place costs. The op is checked
against float64 first, and nothing is timed if it is wrong.

The one decision taken here: everything is timed in turn, in an order that rotates, over several layers whose
entries do not fit into the processor's caches together, as in a model; a ratio is the median over rounds of
ratios within a round. Dense attention is `scaled_dot_product_attention`, and the fastest of three ways to
call it counts: with `enable_gqa`, with repeated heads, and with the heads of a group as query positions.
"""

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retain.cache.attend import attend
from retain.cache.store import GROWTH, RaggedStore
from retain.kernels.measure import FLOOR
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
    spread_of,
    unfit,
    whole_numbers,
)

SHORT, LONG = 1024, 16384
AHEAD, BEHIND = 2.0, 1.3


@dataclass(frozen=True)
class Setting:
    """One benchmark.

    Args:
        batch: sequences.
        heads: Q, query heads.
        kv_heads: H.
        width: D.
        seen: T, tokens seen.
        keep_ratio: kept / seen.
        spread: longest row / shortest row.
        evicted: entries that an eviction in place takes from each row.
        layers: that are attended in turn.
        threads: CPU threads.
        rounds: ratios measured; three more before them are not counted.
        dtype: a name in `retain.process.stopwatch.DTYPES`.
        device: where it runs.
        seed: of all numbers.
    """

    batch: int = 4
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    seen: int = 4096
    keep_ratio: float = 0.2
    spread: float = 4.0
    evicted: int = 32
    layers: int = 3
    threads: int = 2
    rounds: int = 40
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = whole_numbers(self, {"seed": 0, "rounds": 2})
        if not problems and self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} are not a multiple of kv_heads {self.kv_heads}")
        if not 0 < self.keep_ratio <= 1:
            problems.append(f"keep_ratio is kept / seen, above 0 and at most 1, got {self.keep_ratio}")
        if self.spread < 1:
            problems.append(f"spread is longest / shortest, at least 1, got {self.spread}")
        if not problems and min(self.lengths()) <= self.evicted:
            problems.append(f"evicted {self.evicted} would empty the shortest row, of {min(self.lengths())}")
        problems += unfit(self)
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")

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


def ragged(setting: Setting, lengths: Sequence[int], slack: int = 32) -> RaggedStore:
    """A store of random entries with rows of these lengths."""
    entries, dtype = sum(lengths), DTYPES[setting.dtype]
    keys, values = (torch.randn(entries, setting.width, device=setting.device) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(setting.device)
    rows = torch.tensor(lengths, device=setting.device)
    return RaggedStore(keys.to(dtype), values.to(dtype), positions, rows, setting.kv_heads, slack)


def attend_store(queries_BQSD: Tensor, store: RaggedStore, seen_RS: Tensor) -> Tensor:
    """Ragged attention over a store."""
    return attend(
        queries_BQSD,
        store.keys_CD,
        store.values_CD,
        store.offsets_R1,
        store.lengths_R,
        seen_RS,
        scaling=queries_BQSD.shape[-1] ** -0.5,
        pages=store.pages,
    )


def check(setting: Setting, queries_BQSD: Tensor, store: RaggedStore) -> tuple[float, float]:
    """The op's error against float64, and what is allowed: twice plain PyTorch's, and a floor."""
    lengths_R = store.lengths_R.to(torch.int64)
    actual = attend_store(queries_BQSD, store, lengths_R[:, None]).double()
    group = setting.heads // setting.kv_heads
    plain: list[Tensor] = []
    exact: list[Tensor] = []
    for row in range(store.num_rows):
        b, h = divmod(row, setting.kv_heads)
        keys, values, _ = store.row(b, h)
        queries = queries_BQSD[b, h * group : (h + 1) * group, 0]
        for outputs, wide in ((plain, queries.dtype), (exact, torch.float64)):
            logits = queries.to(wide) @ keys.to(wide).T * setting.width**-0.5
            outputs.append(torch.softmax(logits, -1) @ values.to(wide))
    reference = torch.cat(exact).view_as(actual)
    floor = FLOOR[queries_BQSD.dtype] * float(reference.abs().max())
    own = float((torch.cat(plain).view_as(actual).double() - reference).abs().max())
    return float((actual - reference).abs().max()), 2 * own + floor


def dense_ways(setting: Setting, queries_BQSD: Tensor, num_entries: int) -> dict[str, Callable[[int], Any]]:
    """Three ways to call torch's attention on dense caches of so many entries a row, one a layer."""
    shape = (setting.batch, setting.kv_heads, num_entries, setting.width)
    dtype, group = queries_BQSD.dtype, setting.heads // setting.kv_heads
    keys, values = (
        [torch.randn(shape, device=setting.device).to(dtype) for _ in range(setting.layers)] for _ in range(2)
    )
    grouped = queries_BQSD.view(setting.batch, setting.kv_heads, group, setting.width)

    def shared(layer: int) -> Tensor:
        return scaled_dot_product_attention(queries_BQSD, keys[layer], values[layer], enable_gqa=True)

    def repeated(layer: int) -> Tensor:
        wide_keys = keys[layer].repeat_interleave(group, 1)
        return scaled_dot_product_attention(
            queries_BQSD, wide_keys, values[layer].repeat_interleave(group, 1)
        )

    def together(layer: int) -> Tensor:
        return scaled_dot_product_attention(grouped, keys[layer], values[layer])

    return {"enable_gqa": shared, "repeated heads": repeated, "grouped queries": together}


def measures(setting: Setting, queries_BQSD: Tensor) -> dict[str, Callable[[int], float]]:
    """Everything that is timed, by name: `layer -> seconds`."""
    seconds_of = clock(setting.device)
    stores = [ragged(setting, setting.lengths()) for _ in range(setting.layers)]
    shape = (setting.batch, setting.kv_heads, 1, setting.width)
    new = torch.randn(shape, device=setting.device).to(queries_BQSD.dtype)
    position = torch.full((setting.batch, 1), setting.seen, device=setting.device)
    rows = setting.batch * setting.kv_heads

    def timed(run: Callable[[int], Any]) -> Callable[[int], float]:
        return lambda layer: seconds_of(lambda: run(layer))

    def ragged_attention(layer: int) -> float:
        seen_RS = stores[layer].lengths_R.to(torch.int64)[:, None]
        return seconds_of(lambda: attend_store(queries_BQSD, stores[layer], seen_RS))

    def taken_back(store: RaggedStore, run: Callable[[], Any]) -> float:
        """Time what changes the rows' lengths, and put them back: a copy would lie in the caches."""
        lengths_R, free = store.lengths_R.clone(), store.free
        seconds = seconds_of(run)
        store.lengths_R.copy_(lengths_R)
        store.free = free
        return seconds

    def step(layer: int) -> float:
        store = stores[layer]
        return taken_back(store, lambda: attend_store(queries_BQSD, store, store.append_(new, new, position)))

    def appending(length: int) -> Callable[[int], float]:
        # Room for all appends of the benchmark, so that none of them grows the store.
        store = ragged(setting, [length] * rows, slack=10 * (setting.rounds + 3) * setting.layers)

        def ten() -> None:
            for _ in range(10):
                store.append_(new, new, position)

        return lambda layer: seconds_of(ten) / 10

    def growing(length: int) -> Callable[[int], float]:
        """A token's share of laying out anew: one growth, over the tokens until the next."""
        store = ragged(setting, [length] * rows, slack=1)

        def run(layer: int) -> float:
            full = store.fork()
            full.append_(*(new.expand(-1, -1, store.free, -1),) * 2, position.expand(-1, store.free))
            return seconds_of(lambda: full.append_(new, new, position)) / (1 + full.free)

        return run

    def compacting(layer: int) -> float:
        keep = [torch.randperm(length) >= setting.evicted for length in setting.lengths()]
        keep_N = torch.cat(keep).to(setting.device)
        return taken_back(stores[layer], lambda: stores[layer].compact_(keep_N))

    full = dense_ways(setting, queries_BQSD, setting.seen)
    held = dense_ways(setting, queries_BQSD, setting.held)
    flat = [torch.cat([store.keys_CD, store.values_CD]) for store in stores]
    return {
        **{f"full cache, {way}": timed(run) for way, run in full.items()},
        **{f"dense cache of as many, {way}": timed(run) for way, run in held.items()},
        "reading the store once": timed(lambda layer: flat[layer].sum()),
        "ragged attention": ragged_attention,
        "append and ragged attention": step,
        f"append behind {SHORT:,}": appending(SHORT),
        f"append behind {LONG:,}": appending(LONG),
        f"growth a token, behind {SHORT:,}": growing(SHORT),
        f"growth a token, behind {LONG:,}": growing(LONG),
        f"compaction, {setting.evicted} of each row": compacting,
    }


def ratios_of(setting: Setting, taken: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """The four questions: ratios within each round, and whether the bound is kept."""

    def fastest(kind: str) -> str:
        return min(
            (name for name in taken if name.startswith(kind)), key=lambda n: statistics.median(taken[n])
        )

    def ratio(above: str, below: str, least: float = -math.inf, most: float = math.inf) -> dict[str, Any]:
        found = spread_of([up / down for up, down in zip(taken[above], taken[below], strict=True)])
        bound = None if least == -math.inf and most == math.inf else [least, most]
        kept = None if bound is None else least <= found["median"] <= most
        return {**found, "of": above, "over": below, "bound": bound, "kept": kept}

    own = "ragged attention"
    compaction = f"compaction, {setting.evicted} of each row"
    questions = {
        "a: times faster than the full cache": ratio(fastest("full cache"), own, least=AHEAD),
        "b: time over a dense cache of as many": ratio(own, fastest("dense cache"), most=BEHIND),
        "c: append behind 16 times as many": ratio(f"append behind {LONG:,}", f"append behind {SHORT:,}"),
        "c: growth a token, the same": ratio(
            f"growth a token, behind {LONG:,}", f"growth a token, behind {SHORT:,}"
        ),
        "d: compaction over attention": ratio(compaction, own),
    }
    share = {
        key: questions["d: compaction over attention"][key] / setting.evicted
        for key in ("median", "p20", "p80")
    }
    text = f"{own}, amortised over {setting.evicted} tokens"
    questions["d: a token's share of it"] = {
        **share,
        "of": compaction,
        "over": text,
        "bound": None,
        "kept": None,
    }
    return questions


def benchmark(setting: Setting, command: str = "") -> dict[str, Any]:
    """Check the op, time everything, and return the record.

    Raises:
        RuntimeError: the op is wrong; nothing is timed.
    """
    torch.manual_seed(setting.seed)
    shape = (setting.batch, setting.heads, 1, setting.width)
    queries_BQSD = torch.randn(shape, device=setting.device).to(DTYPES[setting.dtype])
    started = Started()
    with quiet(setting.threads):
        store = ragged(setting, setting.lengths())
        error, allowed = check(setting, queries_BQSD, store)
        if not error <= allowed:
            raise RuntimeError(
                f"ragged attention is wrong: error {error:.2e} against float64, {allowed:.2e} allowed. "
                "Nothing was timed: run tests/test_attend.py."
            )
        runs = measures(setting, queries_BQSD)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for turn in range(-3, setting.rounds):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                seconds = sum(runs[name](layer) for layer in range(setting.layers))
                if turn >= 0:
                    taken[name].append(1e3 * seconds / setting.layers)
    found = {
        "check": {"error": error, "allowed": allowed},
        "bytes_held": store.bytes_held,
        "bytes_allocated": store.bytes_allocated,
        "growth": GROWTH,
        "times_ms": {name: {**spread_of(times), "all": times} for name, times in taken.items()},
        "ratios": ratios_of(setting, taken),
    }
    return record_of("decode", setting, command, started, found)


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting = Setting(**record["setting"])
    lengths = setting.lengths()
    lines = [
        *heading(
            record,
            "decoding over ragged rows",
            f"layer: {setting.batch} sequences, {setting.heads} query and {setting.kv_heads} KV heads of "
            f"width {setting.width}, {setting.dtype}; {setting.layers} layers in turn",
            f"seen {setting.seen:,}, kept {setting.keep_ratio:.0%}: {min(lengths):,} to {max(lengths):,} "
            f"entries a row, {setting.held:,} on average; {record['bytes_held']:,} bytes held, "
            f"{record['bytes_allocated']:,} allocated",
            f"checked against float64: error {record['check']['error']:.1e}, "
            f"{record['check']['allowed']:.1e} allowed",
        ),
        f"{'medians of ' + str(setting.rounds) + ' rounds, ms':<44} {'20 %':>9} {'median':>9} {'80 %':>9} "
        f"{'GB/s':>7}",
    ]
    for name, times in record["times_ms"].items():
        reads = name in ("reading the store once", "ragged attention")
        speed = f"{record['bytes_held'] / times['median'] / 1e6:7.1f}" if reads else ""
        lines.append(
            f"{name:<44} {times['p20']:9.4f} {times['median']:9.4f} {times['p80']:9.4f} {speed}".rstrip()
        )
    lines.append("")
    for name, row in record["ratios"].items():
        verdict = "" if row["bound"] is None else ("kept" if row["kept"] else "NOT KEPT")
        bound = "" if row["bound"] is None else " .. ".join(f"{end:g}" for end in row["bound"])
        lines.append(
            f"{name:<44} {row['p20']:9.4f} {row['median']:9.4f} {row['p80']:9.4f}  {bound} {verdict}".rstrip()
        )
        lines.append(f"    {row['of']} / {row['over']}")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(description="Time decoding over ragged rows beside dense attention.")
    defaults = Setting()
    add_settings(parser, defaults)
    parser.add_argument(
        "--output", type=Path, help="default results/speed/decode.json; the table lies beside it"
    )
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{name: getattr(given, name) for name in asdict(defaults)})
        record = benchmark(setting, shlex.join(["python", "-m", "retain.eval.speed.decode", *typed]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output or Path("results/speed/decode.json"))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

"""Times what scoring and eviction cost a prefill: `python -m retain.eval.speed --what scoring`.

Measured: `Cache.prefill` (the decoder without its language-model head, then scoring, selecting and cutting
each layer, the making of the cache included) over the same decoder with transformers' own `DynamicCache` and
`sdpa`, on the same tokens. Not measured: generation, the head, quality (the weights are random), and peak
memory. The bytes held are the cache's own count, and show that eviction ran.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from retain.eval.speed.caches import POLICY, Bench, row_of, try_out
from retain.hf.intercept.attach import attach
from retain.hf.model.random_llama import LlamaSettings, random_llama
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.timing import interleave, quiet

# What the published comparisons of prefill cost name, and Layer-DefensiveKV, whose layers compete.
POLICIES = ("snapkv,scope=layer", "defensivekv", "criticalkv", "ada_criticalkv", "layer_defensivekv")
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class ScoringSettings(LlamaSettings):
    """The model, the prompt, the budget and the clock."""

    policies: Annotated[Sequence[str], "each as NAME[,key=value ...]"] = POLICIES
    tokens: Annotated[int, "length of the prompt"] = 4096
    batch: Annotated[int, "prompts read at once"] = 1
    pairs: Annotated[int, "ratios measured of each policy"] = 20
    warmup: Annotated[int, "pairs before them that are not counted"] = 2
    keep_ratio: Annotated[float, "kept / seen"] = 0.2

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.policies:
            yield "there is no policy to time; name one"


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


def measure(settings: ScoringSettings) -> dict[str, Any]:
    """Time the prefill of each policy beside the plain one.

    Raises:
        ValueError: a policy is unknown, cannot be made, or cannot meet the budget; before anything is timed.
    """
    model = random_llama(settings, settings.tokens)
    bench = Bench(model, "", settings.batch, settings.tokens, settings.device, settings.seed)
    work = bench.workload(settings.tokens, head=False)
    plain = bench.plain(work)
    caches = [bench.cut(typed, settings.keep_ratio, work, plain) for typed in settings.policies]
    with attach(model), quiet(settings.threads, settings.device):
        try_out(caches)
        interleave([plain, *caches], rounds=settings.pairs, warmup=settings.warmup)
    rows = [row_of(one, [plain]) for one in (plain, *caches)]
    for one, row in zip(caches, rows[1:], strict=True):
        if not one.failed and not plain.failed:
            row["interval"] = median_interval(one.over(plain, "prefill_ms"))
    return {"rows": rows}


def table(record: dict[str, Any], settings: ScoringSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    rows = [{**row} for row in record["rows"]]
    for row in rows:
        if "interval" in row:
            row["shown"] = "{:.3f} .. {:.3f} ({:.0%})".format(*row["interval"])
    columns = (
        *(POLICY, Column("ratio", "prefill_over_plain"), Column("interval of the median", "shown")),
        *(Column("ms", "prefill_ms", ".1f"), Column("bytes held", "cache_bytes.held", ",")),
        Column("of", "cache_bytes.full", ","),
    )
    return [
        *heading(
            record,
            "prefill with scoring and eviction / plain prefill",
            f"model: Llama, random weights, {settings.described()}",
            f"prompt: {settings.batch} x {settings.tokens} tokens; keep_ratio {settings.keep_ratio}",
        ),
        *grid(columns, rows),
        f"medians of {settings.pairs} interleaved pairs",
    ]


BENCHMARK = Benchmark("retain.eval.speed", "scoring", ScoringSettings, measure, table)

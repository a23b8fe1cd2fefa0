"""What the benchmarks of serving print: spreads, and the table of policies beside the full cache.

In: records and the spreads in them. Out: text. The one decision taken here: a time is shown as its median
with its 20th and 80th percentile beside it, a ratio as its median alone; all percentiles are in the JSON.
"""

from collections.abc import Sequence
from typing import Any

from retain.process.stopwatch import heading, spread_of


def spread_and_all(values: Sequence[float]) -> dict[str, Any] | None:
    """The spread of values, and all of them; None of fewer than two."""
    return None if len(values) < 2 else {**spread_of(values), "all": list(values)}


def serving(record: dict[str, Any]) -> str:
    """The record of `retain.eval.speed.serving` as the text that is printed and kept."""
    setting, model, rows = record["setting"], record["model"], record["rows"]
    lines = heading(
        record,
        "serving: every policy beside the full cache",
        f"model: {model['name']} ({model['kind']}), {model['layers']} layers, width {model['width']}, "
        f"{model['heads']} query and {model['kv_heads']} KV heads, {model['parameters'] / 1e6:,.1f} million "
        f"parameters, {setting['dtype']}",
        f"prompts of {setting['tokens']:,} random tokens, {setting['steps']} decoded behind them; "
        f"{setting['rounds']} lives of each policy, each beside one of plain",
        f"peak: {record['peak_of']}",
    )
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    head = (
        f"{'policy':<{width}} {'keep':>5} {'first token ms':>25} {'/ plain':>8} {'/ full':>7} "
        f"{'token ms':>22} {'/ plain':>8} {'/ full':>7} {'/ dense':>7} {'tokens/s':>9} "
        f"{'scoring':>8} {'evicting':>8} {'peak MiB':>9} {'held MiB':>9} {'of full':>8}"
    )
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += [f"batch {batch}", head]
        lines += [_line(row, width) for row in rows if row["batch"] == batch] + [""]
    lines += [
        "median (20 % .. 80 %) over lives; / plain: median of neighbours' ratios; / full, / dense: of those "
        "within a round;",
        "dense: transformers' own cache of as many entries.",
        "scoring, evicting: share of a prefill that was clocked stage by stage. peak: up to the first token.",
        "held: keys and values behind the prompt, as the cache counts them; of full: over those of all seen.",
    ]
    return "\n".join([*lines, ""])


def _line(row: dict[str, Any], width: int) -> str:
    start = f"{row['policy']:<{width}} {row['keep_ratio']:>5g}"
    if row["failed"]:
        return f"{start} {row['failed']}"
    held, full, peak = row["cache_bytes"]["held"], row["cache_bytes"]["full"], row["peak_bytes"]["prefill"]
    return (
        f"{start} {show_spread(row['ttft_ms'], 1):>25} {show_median(row['ttft_over_plain']):>8} "
        f"{show_median(row['ttft_over_full']):>7} {show_spread(row['token_ms'], 2):>22} "
        f"{show_median(row['token_over_plain']):>8} {show_median(row['token_over_full']):>7} "
        f"{show_median(row.get('token_over_dense')):>7} {row['tokens_per_s']['median']:>9,.1f} "
        f"{show_share(row['scoring_share']):>8} {show_share(row['eviction_share']):>8} {show_mib(peak):>9} "
        f"{held / 2**20:>9.2f} {held / full:>8.1%}"
    )


def show_spread(spread: dict[str, Any] | None, digits: int) -> str:
    """Median, and 20th and 80th percentile; `-` where there is nothing."""
    if spread is None:
        return "-"
    low, middle, high = (f"{spread[key]:.{digits}f}" for key in ("p20", "median", "p80"))
    return f"{middle} ({low}..{high})"


def show_median(spread: dict[str, Any] | None) -> str:
    """A median; `-` where there is nothing."""
    return "-" if spread is None else f"{spread['median']:.3f}"


def show_share(spread: dict[str, Any] | None) -> str:
    """A median in percent; `-` where there is nothing."""
    return "-" if spread is None else f"{spread['median']:.1%}"


def show_mib(num_bytes: int | None) -> str:
    """Bytes in MiB; `-` where they were not measured."""
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"

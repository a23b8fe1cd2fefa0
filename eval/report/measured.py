"""Figures and tables of `diagnostics.json` and `speed.json`, which other commands write.

Each names the command that its file names. A part whose file is missing is a sentence with the command that
makes it (`missing`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from retain.eval.config import FULL
from retain.eval.report.blocks import PAGE, Block, Figure, Prose, Table, TableCell, number, scale, words
from retain.eval.report.plots import Lines, Look, Series
from retain.eval.report.tables import heat_table

# Columns of the summary, where they were measured: name in the file, head, digits.
METRICS = (
    ("coverage_mean", "coverage", 3),
    ("coverage_worst_step", "worst step", 3),
    ("coverage_worst", "worst of all", 3),
    ("coverage_outliers", "share below 0.5", 4),
    ("oracle_overlap", "overlap with oracle", 3),
    ("kl", "KL, nats a token", 4),
    ("agreement", "top-1 agreement", 3),
    ("perplexity_ratio", "perplexity ratio", 3),
    ("kept_share", "kept / seen", 3),
)


# Curves over decoding steps: name in the file, title, label.
CURVES = (
    ("coverage_mean", "Mean over layers and heads", "coverage"),
    ("coverage_min", "Worst layer, head and document", "coverage"),
    ("kl", "KL from the full cache", "nats a token"),
)


def missing(what: str, command: str) -> tuple[Block, ...]:
    """A part that nobody has measured: what it would show, and the command that makes it."""
    text = f"{what} This was not measured for this run; to measure it:"
    return Prose(text, "missing", PAGE), Prose(command, "command", PAGE)


def coverage_figure(made: Mapping[str, Any], looks: Mapping[str, Look]) -> Figure:
    """Coverage over decoding steps: the mean, and the worst of all layers and heads."""
    curves = {name: own for name, own in made["curves"].items() if name != FULL}
    panels = []
    for key, title, label in CURVES:
        series = []
        for name, own in curves.items():
            points = [(step, v) for step, v in enumerate(own.get(key) or (), 1) if v is not None]
            if points:
                series.append(Series(name, looks[name], *zip(*points, strict=True)))
        if series:
            reach = (0.0, 1.0) if key != "kl" else None
            panels.append(Lines(title, "decoding step", label, tuple(series), y_range=reach))
    ends = made.get("curves_documents") or []
    reached = f" The last step is reached by {ends[-1]} of {ends[0]} documents." if ends else ""
    return Figure(
        ident="fig-coverage",
        title="Coverage over decoding steps, with its worst case",
        note="Of the attention that goes to prompt entries, the share that goes to kept ones, along what the "
        f"full cache generated; {_setting(made)}.{reached}",
        command=made["command"],
        panels=tuple(panels),
        legend=tuple((name, looks[name]) for name in curves),
        data=(summary_table(made),),
    )


def summary_table(made: Mapping[str, Any]) -> Table:
    """Every diagnostic of every policy."""
    summary = made["summary"]
    present = [one for one in METRICS if any(own.get(one[0]) is not None for own in summary.values())]
    rows = tuple(
        (words(policy), *(number(own.get(name), digits) for name, _, digits in present))
        for policy, own in summary.items()
    )
    return Table(
        "tab-diagnostics",
        f"Diagnostics; {_setting(made)}",
        ("policy", *(head for _, head, _ in present)),
        rows,
    )


def jaccard_figure(made: Mapping[str, Any]) -> Figure | None:
    """Overlap of the kept sets of two policies; None with fewer than two policies."""
    own = made.get("jaccard") or {}
    names = own.get("policies") or []
    if len(names) < 2:
        return None
    kinds = {
        "mean": "Jaccard: kept by both / kept by either, mean",
        "identical": "Share of (layer, head) pairs that keep the same",
    }
    tables = (
        heat_table(f"jaccard-{key}", title, ("", *names), names, own[key])
        for key, title in kinds.items()
        if own.get(key)
    )
    return Figure(
        ident="fig-jaccard",
        title="Which policies keep the same entries",
        note=f"1: the same entries; 0: none in common; {_setting(made)}.",
        command=made["command"],
        tables=tuple(tables),
        scale=scale(),
    )


def budget_figure(made: Mapping[str, Any]) -> Figure | None:
    """Share kept by layer and head, one map a policy; None where no policy has one."""
    maps = {
        name: own["kept_share"]
        for name, own in made["maps"].items()
        if name != FULL and own.get("kept_share")
    }
    if not maps:
        return None
    layers = made["made"].get("layers") or range(len(next(iter(maps.values()))))
    top = max(value for rows in maps.values() for row in rows for value in row if value is not None)
    tables = []
    for place, (name, rows) in enumerate(maps.items()):
        columns = ("layer", *(f"h{head}" for head in range(max(map(len, rows)))))
        tables.append(heat_table(f"budget-{place}", name, columns, map(str, layers), rows, top))
    return Figure(
        ident="fig-budgets",
        title="Where the budget goes: share kept by layer and KV head",
        note=f"Kept / seen of each layer (rows) and KV head (columns), mean over documents; "
        f"{_setting(made)}.",
        command=made["command"],
        tables=tuple(tables),
        scale=scale(top),
    )


# Panels of the speed figure: title, label, the field of a row that has the value, and what one unit of it is.
SPEED = (
    ("Memory held", "KiB of keys and values", ("cache_bytes", "held"), 1024),
    ("Peak memory of the prefill", "MiB", ("peak_bytes", "prefill"), 2**20),
    ("Decoding", "tokens/s", ("tokens_per_s", "median"), 1),
    ("Time to first token", "ms", ("ttft_ms", "median"), 1),
)


def speed_figure(made: Mapping[str, Any], looks: Mapping[str, Look]) -> Figure:
    """Memory and speed against budget, a panel each for every batch size."""
    rows = sorted(
        (row for row in made["rows"] if not row.get("failed")), key=lambda row: float(row["keep_ratio"])
    )
    panels: list[Lines] = []
    drawn: dict[str, Look] = {}
    for batch in sorted({row["batch"] for row in rows}):
        names = [
            str(row["policy"]) for row in made["rows"] if row["batch"] == batch and not row.get("failed")
        ]
        for title, label, (field, part), unit in SPEED:
            series, rules = [], []
            for name in dict.fromkeys(names):
                here = [row for row in rows if (row["batch"], row["policy"]) == (batch, name)]
                own = [(row, value) for row in here if (value := _scaled(row, field, part, unit)) is not None]
                y = tuple(value for _, value in own)
                if own and own[0][0]["kind"] == "full":
                    rules.append((y[0], name))
                elif own:
                    drawn[name] = looks[name]
                    x = tuple(float(row["keep_ratio"]) for row, _ in own)
                    ends = ("p20", "p80") if part == "median" else ()
                    edges = [tuple(float(row[field][end]) for row, _ in own) for end in ends]
                    series.append(Series(name, looks[name], x, y, *edges))
            if series:
                ticks = tuple(sorted({x for one in series for x in one.x}))
                axes = (f"{title}, batch {batch}", "keep_ratio", label)
                panels.append(Lines(*axes, tuple(series), ticks, rules=tuple(rules)))
    model = made["model"]
    peak = str(made.get("peak_of") or "").strip().rstrip(".")
    return Figure(
        ident="fig-speed",
        title="Memory and speed against budget",
        note="Medians; bands: 20th to 80th percentile. Dashed: nothing evicted. "
        f"Model {model.get('name', '')} ({model.get('parameters', 0) / 1e6:,.1f} M parameters), "
        f"measured {made.get('date', '')}." + (f" Peak memory: {peak}." if peak else ""),
        command=made["command"],
        panels=tuple(panels),
        legend=tuple(drawn.items()),
        data=(speed_table(made["rows"]),),
    )


def speed_policies(made: Mapping[str, Any]) -> list[str]:
    """Names of lines of the speed figure."""
    return list(dict.fromkeys(str(row["policy"]) for row in made["rows"] if row["kind"] != "full"))


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every row of the file."""
    lines: list[tuple[TableCell, ...]] = []
    for row in rows:
        own: Mapping[str, Any] = {} if row.get("failed") else row
        lines.append(
            (
                words(str(row["policy"])),
                *(number(row["keep_ratio"], 2), number(row["batch"], 0), words(row.get("failed") or "")),
                *(_spread(own.get("ttft_ms")), _spread(own.get("token_ms"), 2)),
                *(_spread(own.get("tokens_per_s")), _spread(own.get("ttft_over_plain"), 2)),
                *(_spread(own.get("token_over_plain"), 2), number(_scaled(own, "cache_bytes", "held", 1024))),
                *(number(_scaled(own, "peak_bytes", part, 2**20), 2) for part in ("prefill", "decode")),
            )
        )
    columns = (
        *("policy", "keep_ratio", "batch", "failed", "first token, ms", "a token, ms", "tokens/s"),
        *("first token / plain", "a token / plain", "KiB held"),
        *("peak MiB, prefill", "peak MiB, decode"),
    )
    return Table("tab-speed", "Medians (20th to 80th percentile)", columns, tuple(lines), num_text=1)


def _setting(made: Mapping[str, Any]) -> str:
    own = made["made"]
    return (
        f"{own.get('model', 'a model')}, {own.get('regime', '')}, keep_ratio {own.get('keep_ratio', '')}, "
        f"{own.get('documents', '')} documents"
    )


def _scaled(row: Mapping[str, Any], field: str, part: str, unit: int) -> float | None:
    """One number of a row in some unit; None where it was not measured."""
    found = (row.get(field) or {}).get(part)
    return None if found is None else float(found) / unit


def _spread(own: Mapping[str, Any] | None, digits: int = 1) -> TableCell:
    if own is None or own["median"] is None or math.isnan(own["median"]):
        return words()
    text = f"{own['median']:.{digits}f} ({own['p20']:.{digits}f} to {own['p80']:.{digits}f})"
    return words(text, own["median"])

"""The parts of a page of results that other commands measure: `diagnostics.json` and `speed.json`.

In: what those files hold. Out: tables and figures. The one decision taken here: each carries the command that
its file names, and a part whose file is missing is one sentence with the command that would make it, never an
empty frame.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retain.eval.config import FULL
from retain.eval.report.figures import Panel, Series, draw_lines
from retain.eval.report.page_scores import legend
from retain.eval.report.tabular import Figure, Shown, Table, heat, number, scale, words

# Columns of the summary, where they were measured: name in the file, head, digits.
METRICS = (
    ("coverage_mean", "coverage", 3),
    ("coverage_worst_step", "worst step", 3),
    ("coverage_worst", "worst of all", 3),
    ("coverage_outliers", "share below 0.5", 4),
    ("value_coverage_mean", "value coverage", 3),
    ("output_loss_l1", "output loss (l1)", 3),
    ("output_loss_bound", "its bound", 3),
    ("perturbation", "perturbation", 3),
    ("perturbation_bound", "its bound", 3),
    ("oracle_overlap", "overlap with oracle", 3),
    ("kl", "KL, nats a token", 4),
    ("agreement", "top-1 agreement", 3),
    ("perplexity_ratio", "perplexity ratio", 3),
    ("repetition", "4-gram repetition", 3),
    ("hit_cap", "hit the cap", 3),
    ("kept_share", "kept / seen", 3),
)


@dataclass(frozen=True)
class Missing:
    """A part that nobody has measured: what it would show, and the command that makes it."""

    what: str
    command: str


def coverage_figure(made: Mapping[str, Any], styles: Mapping[str, int]) -> Figure:
    """Coverage over decoding steps: the mean, and the worst of all layers and heads."""
    curves = made["curves"]
    names = [name for name in curves if name != FULL]
    most = max(len(own["coverage_mean"]) for own in curves.values())
    steps = tuple(map(float, range(1, 1 + most)))
    panels = []
    kinds = (
        ("coverage_mean", "Mean over layers and heads", "coverage"),
        ("coverage_min", "Worst layer, head and document", "coverage"),
        ("value_coverage_mean", "Weighted by values, mean", "value coverage"),
        ("kl", "KL from the full cache", "nats a token"),
    )
    for place, (key, title, label) in enumerate(kinds):
        series = []
        for name in names:
            values = curves[name].get(key) or ()
            points = [(s, v) for s, v in zip(steps, values, strict=False) if v is not None]
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(name, styles[name], x, y))
        if series:
            reach = (0.0, 1.0) if key != "kl" else None
            names_of = (f"fig-coverage-{place}", title, "decoding step", label)
            panels.append(draw_lines(_unmarked(Panel(*names_of, tuple(series), y_range=reach))))
    ends = made.get("curves_documents") or []
    reached = f" The last step is reached by {ends[-1]} of {ends[0]} documents." if ends else ""
    return Figure(
        ident="fig-coverage",
        title="Coverage over decoding steps, with its worst case",
        note="Of the attention that goes to prompt entries, the share that goes to kept ones, along what the "
        f"full cache generated; {_made(made)}.{reached}",
        command=made["command"],
        panels=tuple(panels),
        legend=legend(names, styles),
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
        f"Diagnostics; {_made(made)}",
        ("policy", *(head for _, head, _ in present)),
        rows,
    )


def jaccard_figure(made: Mapping[str, Any]) -> Figure | None:
    """How alike the kept sets of two policies are; None with fewer than two policies."""
    own = made.get("jaccard") or {}
    names = own.get("policies") or []
    if len(names) < 2:
        return None
    tables = []
    kinds = (
        ("mean", "Jaccard: kept by both / kept by either, mean"),
        ("identical", "Share of (layer, head) pairs that keep the same"),
    )
    for key, title in kinds:
        if own.get(key):
            rows = tuple(
                (words(name), *(heat(value) for value in line))
                for name, line in zip(names, own[key], strict=True)
            )
            tables.append(Table(f"jaccard-{key}", title, ("", *names), rows, sortable=False))
    return Figure(
        ident="fig-jaccard",
        title="Which policies keep the same entries",
        note=f"1: the same entries; 0: none in common; {_made(made)}.",
        command=made["command"],
        tables=tuple(tables),
        scale=scale(1.0, 2),
        wide=True,
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
        width = max(map(len, rows))
        lines = tuple(
            (words(layer), *(heat(value, top) for value in row), *(Shown(""),) * (width - len(row)))
            for layer, row in zip(layers, rows, strict=True)
        )
        columns = ("layer", *(f"h{head}" for head in range(width)))
        tables.append(Table(f"budget-{place}", name, columns, lines, sortable=False))
    return Figure(
        ident="fig-budgets",
        title="Where the budget goes: share kept by layer and KV head",
        note=f"Kept / seen of each layer (rows) and KV head (columns), mean over documents; {_made(made)}.",
        command=made["command"],
        tables=tuple(tables),
        scale=scale(top, 2),
    )


def speed_figure(made: Mapping[str, Any], styles: Mapping[str, int]) -> Figure:
    """Memory and speed against budget, a panel each for every batch size."""
    rows = [row for row in made["rows"] if not row.get("failed")]
    batches = sorted({row["batch"] for row in rows})
    kinds = (
        ("Memory held", "KiB of keys and values", lambda row: _bytes(row, "held"), None),
        ("Peak memory of the prefill", "MiB", lambda row: _peak(row, "prefill"), None),
        ("Decoding", "tokens/s", lambda row: row["tokens_per_s"]["median"], "tokens_per_s"),
        ("Time to first token", "ms", lambda row: row["ttft_ms"]["median"], "ttft_ms"),
    )
    panels: list[str] = []
    drawn: dict[str, None] = {}
    for batch in batches:
        here = [row for row in rows if row["batch"] == batch]
        for title, label, read, spread in kinds:
            series, rules = [], []
            for name in dict.fromkeys(_label(row) for row in here):
                own = sorted((r for r in here if _label(r) == name), key=lambda r: r["keep_ratio"])
                points = [(float(r["keep_ratio"]), value, r) for r in own if (value := read(r)) is not None]
                if not points:
                    continue
                if own[0]["kind"] == "full":
                    rules.append((points[0][1], name))
                    continue
                drawn[name] = None
                x, y, rows_here = zip(*points, strict=True)
                series.append(
                    Series(
                        *(name, styles[name], x, y),
                        low=tuple(float(r[spread]["p20"]) for r in rows_here) if spread else (),
                        high=tuple(float(r[spread]["p80"]) for r in rows_here) if spread else (),
                    )
                )
            if not series:
                continue
            ratios = sorted({x for one in series for x in one.x})
            panel = Panel(
                f"fig-speed-{len(panels)}",
                f"{title}, batch {batch}",
                "keep_ratio",
                label,
                tuple(series),
                x_ticks=tuple((ratio, f"{ratio:g}") for ratio in ratios),
                rules=tuple(rules),
            )
            panels.append(draw_lines(panel))
    model = made["model"]
    peak = str(made.get("peak_of") or "").strip().rstrip(".")
    note = (
        f"Medians; bands: 20th to 80th percentile. Dashed: nothing evicted. Model {model.get('name', '')} "
        f"({model.get('parameters', 0) / 1e6:,.1f} M parameters), measured {made.get('date', '')}."
        + (f" Peak memory: {peak}." if peak else "")
    )
    return Figure(
        ident="fig-speed",
        title="Memory and speed against budget",
        note=note,
        command=made["command"],
        panels=tuple(panels),
        legend=legend(drawn, styles),
        data=(speed_table(made["rows"]),),
    )


def speed_policies(made: Mapping[str, Any]) -> list[str]:
    """Names of lines of the speed figure."""
    return list(dict.fromkeys(_label(row) for row in made["rows"] if row["kind"] != "full"))


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every row of the file."""
    lines = []
    for row in rows:
        name = (words(_label(row)), words(row.get("memory", "")))
        where = (number(row["keep_ratio"], 2), number(row["batch"], 0))
        if row.get("failed"):
            lines.append((*name, *where, words(row["failed"]), *(Shown(""),) * 10))
            continue
        lines.append(
            (
                *(*name, *where, words("")),
                *(_spread(row["ttft_ms"]), _spread(row["token_ms"], 2), _spread(row["tokens_per_s"])),
                *(_spread(row.get("ttft_over_plain"), 2), _spread(row.get("token_over_plain"), 2)),
                *(_spread(row.get("scoring_share"), 3), _spread(row.get("eviction_share"), 3)),
                *(number(_bytes(row, "held")), number(_peak(row, "prefill"), 2)),
                number(_peak(row, "decode"), 2),
            )
        )
    columns = (
        *("policy", "memory", "keep_ratio", "batch", "failed", "first token, ms", "a token, ms", "tokens/s"),
        *("first token / plain", "a token / plain", "scoring share", "eviction share", "KiB held"),
        *("peak MiB, prefill", "peak MiB, decode"),
    )
    return Table("tab-speed", "Medians (20th to 80th percentile)", columns, tuple(lines), num_text=2)


def _unmarked(panel: Panel) -> Panel:
    """Without markers, where there are many points."""
    return replace(panel, markers=max(len(one.x) for one in panel.series) <= 16)


def _made(made: Mapping[str, Any]) -> str:
    own = made["made"]
    return (
        f"{own.get('model', 'a model')}, {own.get('regime', '')}, keep_ratio {own.get('keep_ratio', '')}, "
        f"{own.get('documents', '')} documents"
    )


def _label(row: Mapping[str, Any]) -> str:
    library = row.get("library", "retain")
    return str(row["policy"]) if library == "retain" else f"{row['policy']} ({library})"


def _bytes(row: Mapping[str, Any], name: str) -> float | None:
    found = (row.get("cache_bytes") or {}).get(name)
    return None if found is None else found / 1024


def _peak(row: Mapping[str, Any], name: str) -> float | None:
    found = (row.get("peak_bytes") or {}).get(name)
    return None if found is None else found / 2**20


def _spread(own: Mapping[str, Any] | None, digits: int = 1) -> Shown:
    if own is None or own["median"] is None or math.isnan(own["median"]):
        return Shown("")
    text = f"{own['median']:.{digits}f} ({own['p20']:.{digits}f} to {own['p80']:.{digits}f})"
    return Shown(text, float(own["median"]))

"""Plots panels with matplotlib, for every picture of the evaluation: lines, rows of dots, areas, heat maps.

A panel is data. `save_png` puts panels into one file; `as_svg` makes one a part of a page. In a page the
colours are variables of its style sheet, so that a dark page has dark drawings, and a drawing is as wide as a
phone (360 units), so that its text has the size of text at every width.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from retain.eval.config import FULL
from retain.eval.stats.comparisons import is_bound
from retain.eval.stats.summary import preset_of
from retain.process.extras import deferred

with deferred("eval", "matplotlib", "matplotlib.figure", what="a picture"):
    import matplotlib
    from matplotlib.figure import Figure

# Of the light page (`report.css` has a dark value of each). Colours of policies; the last is for controls.
COLOURS = ("#0060b0", "#c44e00", "#00805e", "#a8437f", "#9a6b00", "#0d8f9c", "#6a4fb3", "#555b63")
VERDICTS = {"better": "#006b4f", "worse": "#a83a00", "equivalent": "#0b5cad", "identical": "#0b5cad"}
UNKNOWN, INK, SOFT, FAINT, BAND, GROUND = "#5f6670", "#1a1d21", "#565d66", "#e8ebee", "#d9dee4", "#ffffff"
VARIABLES = {
    **{colour: f"s{number}" for number, colour in enumerate(COLOURS)},
    **{VERDICTS["better"]: "better", VERDICTS["worse"]: "worse", VERDICTS["equivalent"]: "even"},
    **{UNKNOWN: "unknown", INK: "ink", SOFT: "soft", FAINT: "faint", BAND: "band", GROUND: "ground"},
}
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1.4, 2)), (0, (6, 2, 1.4, 2)))
MARKERS = "os^Dvp"
STYLE: Any = {
    **{"svg.fonttype": "none", "svg.hashsalt": "retain", "text.parse_math": False, "font.size": 9},
    **{"axes.edgecolor": SOFT, "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT},
    **{"axes.grid": True, "grid.color": FAINT, "axes.axisbelow": True, "axes.titlesize": 10},
    "text.color": INK,
}
# A heat map of more cells than these does not write their numbers.
NUMBERS = 64
# beartype takes no int for a float, and sizes are whole.
Real = int | float


@dataclass(frozen=True)
class Look:
    """Style of a policy's lines: its number in the page, colour, dashes, marker, and whether it is hollow."""

    number: int
    colour: int
    dash: int = 0
    marker: int = 0
    hollow: bool = False

    @property
    def swatch(self) -> str:
        """The piece of line that stands in a page's legend."""
        line = "─╌┈┄"[self.dash]
        return f"{line}{('○□△◇▽⬠' if self.hollow else '●■▲◆▼⬟')[self.marker]}{line}"


@dataclass(frozen=True)
class Series:
    """One line, with the edges of its band, if it has one."""

    name: str
    look: Look
    x: tuple[Real, ...]
    y: tuple[Real, ...]
    low: tuple[Real, ...] = ()
    high: tuple[Real, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Lines on one pair of axes.

    Attributes:
        series: Where all have one and the same x, they stand side by side.
        ticks: Of the horizontal axis; empty: chosen.
        y_range: Of the vertical axis; None: from 0 to the data's end.
        log_x: Whether the horizontal axis is logarithmic.
        rules: Dashed horizontal lines: height and name.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[Real, ...] = ()
    y_range: tuple[Real, Real] | None = None
    log_x: bool = False
    rules: tuple[tuple[Real, str], ...] = ()


@dataclass(frozen=True)
class Dot:
    """A value with its interval, in a row; `reach` is a thin line beneath it, `shape` one of matplotlib's."""

    height: Real
    value: Real
    low: Real
    high: Real
    about: str
    colour: str
    shape: str = "o"
    hollow: bool = False
    reach: tuple[Real, Real] | None = None
    label: str = ""


@dataclass(frozen=True)
class Rows:
    """Dots in named rows, from the top down.

    Attributes:
        names: Height and name of each row.
        x_range: Ends of the axis; what lies beyond is drawn at its end. None: of the data.
        rule: A dashed vertical line; None: none.
        margin: Half width of a band around 0: what would not matter.
    """

    title: str
    x_label: str
    names: tuple[tuple[Real, str], ...]
    dots: tuple[Dot, ...]
    x_range: tuple[Real, Real] | None = None
    rule: Real | None = None
    margin: Real = 0.0


@dataclass(frozen=True)
class Areas:
    """Shares between 0 and 1 by place, an area a name: what was kept of a document."""

    title: str
    rows: tuple[tuple[str, tuple[Real, ...]], ...]


@dataclass(frozen=True)
class Heat:
    """A heat map; nan is left blank."""

    title: str
    x_label: str
    y_label: str
    values: Sequence[Sequence[Real]]
    x_ticks: tuple[str, ...] = ()
    y_ticks: tuple[str, ...] = ()
    log: bool = False


Panel = Lines | Rows | Areas | Heat


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The look of each policy: a preset has one colour under every protection, hollow and dashed under others
    than its own; controls are grey; the full cache is a rule of its own."""
    own = list(dict.fromkeys(name for name in names if name != FULL))
    protections = list(dict.fromkeys(name.partition("+")[2] for name in own if "+" in name))
    presets = list(dict.fromkeys(preset_of(name) for name in own if not is_bound(name)))
    controls = list(dict.fromkeys(preset_of(name) for name in own if is_bound(name)))
    colours, made = len(COLOURS) - 1, {}
    for number, name in enumerate(own):
        bound, protection = is_bound(name), name.partition("+")[2]
        place = (controls if bound else presets).index(preset_of(name))
        turn = (place + 1 if bound else place // colours) + (
            protection in protections and 1 + protections.index(protection)
        )
        colour = colours if bound else place % colours
        made[name] = Look(number, colour, turn % len(DASHES), place % len(MARKERS), bool(protection))
    return made


def as_svg(panel: Panel, ident: str) -> str:
    """A panel as markup of a page: an SVG without any address, whose ids begin with its own."""
    height, width = _height(panel), 10.0 if isinstance(panel, Areas) else 5.0  # inches of 72 units
    with matplotlib.rc_context({**STYLE, "font.size": 11}):
        figure = Figure(figsize=(width, height))
        left = {Lines: 0.7, Rows: 1.8, Areas: 1.5, Heat: 0.7}[type(panel)]
        below, above = (0.3, 0.05) if isinstance(panel, Areas) else (0.62, 0.14)
        axes = figure.add_axes(
            (left / width, below / height, 1 - (left + 0.1) / width, 1 - (below + above) / height)
        )
        draw(axes, panel)
        axes.set_title("")
        text = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return _embedded(text.getvalue(), panel, ident)


def _embedded(svg: str, panel: Panel, ident: str) -> str:
    """matplotlib's SVG as a part of a page: colours become variables, marks say what they are."""
    body = re.sub(r"\s*\n\s*", " ", svg[svg.index("<svg") :])
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    body = re.sub(r"(\.\d\d)\d+", r"\1", body)
    body = re.sub(r"^<svg[^>]*>|<defs> <style.*?</defs>|<defs> <clipPath.*?</defs>", "", body)
    body = re.sub(r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*; ', "", body)
    body = re.sub(r'<g id="(\d*)\|([^"]*)">', r'<g data-style="\1"><title>\2</title>', body)
    body = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{ident}-', body).replace(' id="', f' id="{ident}-')
    for colour, name in VARIABLES.items():
        body = body.replace(colour, f"var(--{name})")
    title = f"{panel.title}: {panel.x_label}" if not isinstance(panel, Areas) else panel.title
    return (
        f'<svg id="{ident}" class="plot" {box[0]} role="img" aria-labelledby="{ident}-title">'
        f'<title id="{ident}-title">{escape(title)}</title>{body}'
    )


def check_png(path: Path) -> None:
    """Refuse what a picture cannot be written to: matplotlib would append an ending, or draw another kind.

    Raises:
        ValueError: a folder, or a name of another ending.
    """
    if path.is_dir() or path.suffix.lower() != ".png":
        what = "a folder" if path.is_dir() else "no name of a PNG"
        raise ValueError(f"{path} is {what}, and a picture is written there: name a file that ends in .png.")


def save_png(panels: Sequence[Sequence[Panel]], path: Path, *, title: str = "") -> Path:
    """Draw rows of panels into a PNG, with one legend; written beside, then renamed.

    Raises:
        ValueError: a folder, or a name that does not end in .png.
    """
    check_png(path)
    heights = [max(map(_height, row)) for row in panels]
    with matplotlib.rc_context(STYLE):
        size = (5.2 * len(panels[0]) + 1.6, sum(heights) + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid.flat, (panel for row in panels for panel in row), strict=True):
            draw(axes, panel)
        handles = (pair for axes in grid.flat for pair in zip(*axes.get_legend_handles_labels(), strict=True))
        known = {name: own for own, name in handles}
        if known:
            figure.legend(known.values(), known.keys(), loc="outside right center", frameon=False)
        if title:
            figure.suptitle(title, fontsize="large")
        beside = path.with_name(path.stem + ".new.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(beside, dpi=120)
    return beside.replace(path)


def _height(panel: Panel) -> float:
    """Inches of a panel."""
    if isinstance(panel, Rows):
        heights = [height for height, _ in panel.names]
        return 0.25 * (1 + max(heights, default=0) - min(heights, default=0)) + 0.9
    if isinstance(panel, Areas):
        return 0.34 * len(panel.rows) + 0.35
    return min(9.0, 1.8 + 0.3 * len(panel.values)) if isinstance(panel, Heat) else 3.4


def draw(axes: Any, panel: Panel) -> None:
    """Draw a panel onto matplotlib axes."""
    axes.set_title(panel.title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    kinds: dict[type, Callable[[Any, Any], None]] = {Lines: _lines, Rows: _rows, Areas: _areas, Heat: _heat}
    kinds[type(panel)](axes, panel)
    if not isinstance(panel, Areas):
        axes.set_xlabel(panel.x_label)


def _lines(axes: Any, panel: Lines) -> None:
    alone = len({x for one in panel.series for x in one.x}) == 1
    for place, one in enumerate(panel.series):
        x, colour = [place + 1] if alone else one.x, COLOURS[one.look.colour]
        options: dict[str, Any] = {
            "color": colour,
            "linestyle": DASHES[one.look.dash],
            "linewidth": 1.5,
            "marker": MARKERS[one.look.marker] if len(one.x) <= 16 else None,
            "markersize": 4.5,
            "markerfacecolor": GROUND if one.look.hollow else colour,
        }
        (line,) = axes.plot(x, one.y, label=one.name, **options)
        drawn = [line]
        if one.low and alone:
            drawn.append(axes.vlines(x, one.low, one.high, color=colour, linewidth=1.5))
        elif one.low:
            drawn.append(axes.fill_between(x, one.low, one.high, color=colour, alpha=0.12, linewidth=0))
        for artist in drawn:
            artist.set_gid(f"{one.look.number}|{one.name}")
    for height, name in panel.rules:
        axes.axhline(height, color=INK, linestyle=(0, (4, 3)), linewidth=1, label=name)
        below: dict[str, Any] = {"xytext": (0, -3), "textcoords": "offset points", "va": "top"}
        axes.annotate(name, (0.02, height), xycoords=("axes fraction", "data"), fontsize="small", **below)
    if panel.log_x and not alone:
        axes.set_xscale("log")
    if alone:
        shared = next(x for one in panel.series for x in one.x)
        axes.set_xlim(0.3, len(panel.series) + 0.7)
        axes.set_xticks([(len(panel.series) + 1) / 2], [f"{shared:g}"])
    elif panel.ticks:
        axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
    axes.minorticks_off()
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    elif panel.series:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_ylabel(panel.y_label)


def _rows(axes: Any, panel: Rows) -> None:
    first, last = panel.x_range or (-math.inf, math.inf)
    if panel.margin:
        axes.axvspan(-panel.margin, panel.margin, color=BAND, linewidth=0, zorder=0)
    for dot in panel.dots:
        low, high, value = (min(last, max(first, own)) for own in (dot.low, dot.high, dot.value))
        if dot.reach:
            axes.hlines(dot.height, *dot.reach, color=dot.colour, linewidth=1, alpha=0.45)
        fill = GROUND if dot.hollow else dot.colour
        drawn = [
            axes.hlines(dot.height, low, high, color=dot.colour, linewidth=1.6),
            *axes.plot(value, dot.height, dot.shape, color=dot.colour, markerfacecolor=fill, markersize=4.5),
        ]
        for artist in drawn:
            artist.set_gid(f"|{dot.about}")
        if dot.label and dot.label not in axes.get_legend_handles_labels()[1]:
            drawn[-1].set_label(dot.label)
    if panel.rule is not None:
        axes.axvline(panel.rule, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    if panel.x_range:
        axes.set_xlim(first, last)
    heights = [height for height, _ in panel.names]
    axes.set_yticks(heights, [_short(name, 22) for _, name in panel.names], fontsize="small")
    axes.set_ylim(max(heights, default=0) + 0.7, min(heights, default=0) - 0.7)
    axes.grid(axis="y", visible=False)


def _areas(axes: Any, panel: Areas) -> None:
    for place, (name, shares) in enumerate(panel.rows):
        edges = [number / len(shares) for number in range(len(shares) + 1)]
        base = place + 0.9
        tops = [base - 0.8 * share for share in (*shares, shares[-1])]
        area = axes.fill_between(edges, base, tops, step="post", color=COLOURS[0], linewidth=0)
        area.set_gid(f"|{name}")
    axes.set_yticks(
        [place + 0.5 for place in range(len(panel.rows))], [_short(name, 16) for name, _ in panel.rows]
    )
    axes.set_ylim(len(panel.rows), 0)
    axes.set_xlim(0, 1)
    axes.set_xticks([0.08, 0.92], ["first token", "last token"])
    axes.tick_params(length=0)
    axes.grid(visible=False)


def _heat(axes: Any, panel: Heat) -> None:
    rows, columns = len(panel.values), max(map(len, panel.values), default=0)
    if not rows:
        return
    options: dict[str, Any] = {"norm": "log"} if panel.log else {"vmin": 0.0}
    image = axes.imshow(panel.values, aspect="auto", cmap="cividis", **options)
    for axis, names, count, most in (
        (axes.xaxis, panel.x_ticks, columns, 8),
        (axes.yaxis, panel.y_ticks, rows, 12),
    ):
        shown = range(0, count, max(1, count // (most if not names or len(names) > 40 else count)))
        axis.set_ticks(shown, [names[own] if names else str(own) for own in shown], fontsize="small")
    if not panel.log and rows * columns <= NUMBERS:
        middle = 0.6 * max((value for row in panel.values for value in row), default=0.0)
        for place, row in enumerate(panel.values):
            for column, value in enumerate(row):
                how = {"color": "white" if value < middle else "black", "ha": "center", "va": "center"}
                axes.text(column, place, f"{value:.0f}", fontsize="small", **how)
    axes.grid(visible=False)
    axes.set_ylabel(panel.y_label)
    axes.figure.colorbar(image, ax=axes)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"

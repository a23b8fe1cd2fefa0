"""Drawings of a page of results, as SVG that is part of it: lines with bands, a forest of differences, ranks.

In: series of numbers. Out: markup. Colours are classes (`s0` to `s7`), which the page's style sheet gives a
light and a dark value; text takes the colour of the text around it. Nothing in a drawing depends on when or
where it was made.

The one decision taken here: a drawing is as wide as a phone (360 units), and figures are grids of drawings.
So text has the size of text at every width, and no drawing is ever scaled down until it cannot be read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 40
NUM_COLOURS = 8
DASHES = ("", "6 3", "2 3", "8 3 2 3")

# beartype takes no int for a float, and sizes are whole.
Real = int | float
At = Callable[[Real], float]


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        name: Of what is drawn.
        style: Number of its look: colour, dashes and marker follow from it.
        x, y: Points.
        low, high: Edges of its band; empty: none.
    """

    name: str
    style: int
    x: tuple[Real, ...]
    y: tuple[Real, ...]
    low: tuple[Real, ...] = ()
    high: tuple[Real, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        ident: Id in the page.
        title: Printed above it.
        x_label, y_label: Of the axes.
        series: Lines.
        x_ticks: Places and texts; empty: chosen.
        y_range: Lowest and highest value; None: of the data, from 0.
        log_x: Whether the horizontal axis is logarithmic.
        rules: Dashed horizontal lines: value and name.
        markers: Whether points are marked.
    """

    ident: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[Real, str], ...] = ()
    y_range: tuple[Real, Real] | None = None
    log_x: bool = False
    rules: tuple[tuple[Real, str], ...] = ()
    markers: bool = True


@dataclass(frozen=True)
class Difference:
    """One line of a forest: estimate and interval, in points."""

    name: str
    estimate: Real
    low: Real
    high: Real
    verdict: str


def look(style: int) -> tuple[str, str, int]:
    """Class of colour, dashes and number of the marker of a style; 32 styles differ in colour or dashes."""
    return f"s{style % NUM_COLOURS}", DASHES[style // NUM_COLOURS % len(DASHES)], style % 6


def ticks(low: Real, high: Real, count: int = 5) -> list[Real]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def swatch(style: int) -> str:
    """The piece of line that stands in a legend."""
    colour, dashes, marker = look(style)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<svg class="swatch {colour}" width="26" height="12" viewBox="0 0 26 12" aria-hidden="true">'
        f'<path class="line" d="M1 6H25"{dash}/>{_marker(13, 6, marker)}</svg>'
    )


def draw_lines(panel: Panel) -> str:
    """Lines with bands, and dashed rules across."""
    xs = [x for one in panel.series for x in one.x]
    ys = [v for one in panel.series for v in (*one.y, *one.low, *one.high) if math.isfinite(v)]
    ys += [value for value, _ in panel.rules]
    low, high = panel.y_range or (min(0.0, min(ys, default=0.0)), max(ys, default=1.0) * 1.05 or 1.0)
    at_x = _scale(xs or [0.0, 1.0], LEFT + 10, WIDTH - RIGHT - 10, log=panel.log_x)
    at_y = _scale([low, high], HEIGHT - BOTTOM, TOP)
    x_ticks = panel.x_ticks or tuple((t, f"{t:g}") for t in ticks(min(xs, default=0), max(xs, default=1)))
    parts = [_opening(panel.ident, f"{panel.title}: {panel.y_label} against {panel.x_label}", HEIGHT)]
    parts += _y_axis(ticks(low, high), at_y, WIDTH - RIGHT)
    for tick, text in x_ticks:
        x = at_x(tick)
        parts.append(f'<path class="tick" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 16, text, anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.x_label, anchor="middle", kind="label"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(11 {middle:.0f}) rotate(-90)">'
        f"{escape(panel.y_label)}</text>"
    )
    for place, (value, name) in enumerate(panel.rules):
        y = at_y(value)
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        below = y + 13 if y < TOP + 12 else y - 4
        parts.append(_text(LEFT + 3 + 54 * place, below, name, kind="small"))
    alone = len(set(xs)) == 1
    for place, one in enumerate(panel.series):
        if alone:
            parts.append(_whisker(one, LEFT + _between(place, len(panel.series)), at_y))
        else:
            parts.append(_line(one, at_x, at_y, markers=panel.markers))
    return _framed(panel.title, "".join([*parts, "</svg>"]))


def draw_forest(
    ident: str,
    title: str,
    lines: Sequence[Difference],
    label: str,
    margin: Real,
    reach: Real | None = None,
) -> str:
    """Differences with intervals; the band is what would not matter.

    Args:
        ident: Id in the page.
        title: Above it.
        lines: In the order drawn.
        label: Of the axis.
        margin: Half width of the band.
        reach: Largest absolute value on the axis; None: of these lines.
    """
    step, first = 20, 116
    reach = reach or forest_reach(lines, margin)
    height = TOP + step * len(lines) + BOTTOM
    at_x = _scale([-reach, reach], first + 8, WIDTH - RIGHT)
    bottom = TOP + step * len(lines) + 4
    parts = [_opening(ident, f"{title}: {label}, with 95 % intervals", height)]
    left, right = at_x(-margin), at_x(margin)
    parts.append(
        f'<rect class="margin" x="{left:.1f}" y="{TOP - 4}" width="{right - left:.1f}" '
        f'height="{bottom - TOP + 4}"/>'
    )
    for tick in ticks(-reach, reach, 4):
        x = at_x(tick)
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{x:.1f} {TOP - 4}V{bottom}"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g}", anchor="middle"))
    parts.append(_text((first + WIDTH) / 2, height - 4, label, anchor="middle", kind="label"))
    for place, one in enumerate(lines):
        y = TOP + step * place + step / 2
        name = one.name if len(one.name) <= 18 else one.name[:17] + "…"
        parts.append(_text(first, y + 4, name, anchor="end"))
        low, high = at_x(max(-reach, one.low)), at_x(min(reach, one.high))
        parts.append(
            f'<g class="v-{escape(one.verdict)}"><title>{escape(one.name)}: {one.estimate:+.1f} '
            f"[{one.low:+.1f}, {one.high:+.1f}], {escape(one.verdict)}</title>"
            f'<path class="line" d="M{low:.1f} {y:.1f}H{high:.1f}"/>'
            f"{_verdict_mark(at_x(max(-reach, min(reach, one.estimate))), y, one.verdict)}</g>"
        )
    return _framed(title, "".join([*parts, "</svg>"]))


def forest_reach(lines: Sequence[Difference], margin: Real) -> float:
    """How far the axis of a forest goes to both sides."""
    return max([2 * margin, *(max(abs(one.low), abs(one.high)) for one in lines)]) * 1.04


def draw_ranks(
    ident: str, title: str, lines: Sequence[tuple[str, int, Real, Real, Real, Real]], full: Real | None
) -> str:
    """Many policies, best first: a dot with its band, and a thin line over all budgets.

    Args:
        ident: Id in the page.
        title: Above it.
        lines: Name, style, mean, half of its band, lowest and highest mean over budgets.
        full: The full cache's mean.
    """
    step, label = 16, 138
    height = TOP + step * len(lines) + BOTTOM
    bottom = TOP + step * len(lines) + 2
    at_x = _scale([0.0, 100.0], label + 8, WIDTH - RIGHT)
    parts = [_opening(ident, f"{title}: mean score of each policy, best first", height)]
    for tick in ticks(0, 100, 4):
        x = at_x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP - 4}V{bottom}"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g}", anchor="middle"))
    if full is not None:
        parts.append(f'<path class="rule" d="M{at_x(full):.1f} {TOP - 4}V{bottom}"/>')
    for place, (name, style, mean, half, low, high) in enumerate(lines):
        y = TOP + step * place + step / 2
        shown = name if len(name) <= 22 else name[:21] + "…"
        parts.append(_text(label, y + 4, shown, anchor="end"))
        first, last = at_x(max(0.0, mean - half)), at_x(min(100.0, mean + half))
        parts.append(
            f'<g class="{look(style)[0]}"><title>{escape(name)}: {mean:.1f} ± {half:.1f}</title>'
            f'<path class="faint" d="M{at_x(low):.1f} {y:.1f}H{at_x(high):.1f}"/>'
            f'<path class="line" d="M{first:.1f} {y:.1f}H{last:.1f}"/>{_marker(at_x(mean), y, 0)}</g>'
        )
    parts.append(_text((label + WIDTH) / 2, height - 4, "score, %", anchor="middle", kind="label"))
    return _framed(title, "".join([*parts, "</svg>"]))


def draw_strips(ident: str, title: str, strips: Sequence[tuple[str, Sequence[Real]]]) -> str:
    """Share kept by position, one strip a policy: from white (evicted) to full colour (kept)."""
    step, label, width = 18, 104, 720
    height = step * len(strips) + 34
    parts = [_opening(ident, f"{title}: share kept by place in the document", height, width)]
    for row, (name, shares) in enumerate(strips):
        shown = name if len(name) <= 16 else name[:15] + "…"
        parts.append(_text(label - 4, step * row + 13, shown, anchor="end"))
        each = (width - label - 6) / max(1, len(shares))
        parts += [
            f'<rect class="kept" x="{label + each * place:.2f}" y="{step * row + 2}" width="{each:.2f}" '
            f'height="{step - 4}" fill-opacity="{share:.2f}"/>'
            for place, share in enumerate(shares)
            if share >= 0.005
        ]
        parts.append(
            f'<rect class="box" x="{label}" y="{step * row + 2}" width="{width - label - 6}" '
            f'height="{step - 4}"/>'
        )
    y = step * len(strips) + 14
    parts.append(_text(label, y, "first token", kind="small"))
    parts.append(_text(width - 6, y, "last token", anchor="end", kind="small"))
    return _framed(title, "".join([*parts, "</svg>"]))


def _framed(title: str, svg: str) -> str:
    return f'<div class="panel"><p class="panel-title">{escape(title)}</p>{svg}</div>'


def _opening(ident: str, title: str, height: Real, width: int = WIDTH) -> str:
    name = escape(ident)
    return (
        f'<svg id="{name}" class="plot" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-title"><title id="{name}-title">{escape(title)}</title>'
    )


def _text(x: Real, y: Real, text: str, *, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(values: Sequence[Real], first: Real, last: Real, *, log: bool = False) -> At:
    low, high = min(values), max(values)
    if log:
        low, high = math.log(low), math.log(high)

    def place(value: Real) -> float:
        own = math.log(value) if log else value
        return (first + last) / 2 if high == low else first + (own - low) / (high - low) * (last - first)

    return place


def _y_axis(places: Sequence[Real], at_y: At, right: Real) -> list[str]:
    parts = []
    for tick in places:
        y = at_y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(LEFT - 5, y + 4, f"{tick:,.10g}", anchor="end"))
    return parts


def _line(one: Series, at_x: At, at_y: At, *, markers: bool) -> str:
    colour, dashes, marker = look(one.style)
    points = [(at_x(x), at_y(y)) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(y)]
    parts = [f'<g class="{colour}" data-style="{one.style}"><title>{escape(one.name)}</title>']
    if one.low:
        there = [f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(one.x, one.high, strict=True)]
        back = [f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(one.x, one.low, strict=True)][::-1]
        parts.append(f'<path class="band" d="M{"L".join([*there, *back])}Z"/>')
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts.append(f'<path class="line" d="M{path}"{dash}/>' if points else "")
    if markers:
        parts += [_marker(x, y, marker) for x, y in points]
    return "".join([*parts, "</g>"])


def _between(place: int, count: int) -> float:
    """Where the marks of one place on the axis stand, side by side."""
    return (WIDTH - RIGHT - LEFT) * (place + 1) / (count + 1)


def _whisker(one: Series, x: Real, at_y: At) -> str:
    """A lone point, with its band as a bar."""
    colour, _, marker = look(one.style)
    bar = (
        f'<path class="line" d="M{x:.1f} {at_y(one.low[0]):.1f}V{at_y(one.high[0]):.1f}"/>' if one.low else ""
    )
    return (
        f'<g class="{colour}" data-style="{one.style}"><title>{escape(one.name)}</title>{bar}'
        f"{_marker(x, at_y(one.y[0]), marker)}</g>"
    )


def _marker(x: Real, y: Real, kind: int) -> str:
    """Six shapes, filled."""
    shapes = (
        f"M{x - 3.5:.1f} {y:.1f}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",
        f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4Z",
        f"M{x:.1f} {y - 4:.1f}l4 7h-8Z",
        f"M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2Z",
        f"M{x:.1f} {y + 4:.1f}l4 -7h-8Z",
        f"M{x - 4:.1f} {y - 1.5:.1f}h8v3h-8Z",
    )
    return f'<path class="dot" d="{shapes[kind]}"/>'


def _verdict_mark(x: Real, y: Real, verdict: str) -> str:
    """Verdicts differ in shape as well as in colour: up, down, square, circle; hollow where nothing is
    known."""
    shape = {"better": 2, "worse": 4, "equivalent": 1, "identical": 1}.get(verdict, 0)
    return _marker(x, y, shape)

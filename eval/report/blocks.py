"""Blocks of a report: sections of prose, lists, tables whose cells know their number, and figures.

A section is made once; the templates `report.md.j2` and `report.html.j2` write it out. A block that only one
of the two shows says so in `on`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.eval.report.plots import Look, Panel, Real
from retain.process.extras import require

LEVELS = 20
# Where a block is shown.
BOTH, REPORT, PAGE = "both", "report", "page"


@dataclass(frozen=True)
class TableCell:
    """One cell.

    Attributes:
        text: As printed.
        value: Number that it sorts by; None: by its text, or last where it is empty.
        level: Step of the colour scale, 0 to `LEVELS`; None: no colour.
        mark: Class of the cell in the page, a verdict for instance; "marked": its text has `**` and the like.
    """

    text: str
    value: float | None = None
    level: int | None = None
    mark: str = ""


Row = tuple[TableCell, ...]


@dataclass(frozen=True)
class Prose:
    """A paragraph; `role` is empty, "heading", "warning", "command", or "missing": of a part that was not
    measured."""

    text: str
    role: str = ""
    on: str = BOTH
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Bullets:
    """A list: each line, and the lines below it."""

    lines: tuple[tuple[str, tuple[str, ...]], ...]
    on: str = BOTH
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        caption: Contents in one line; only the page prints it.
        num_text: How many first columns are words.
        page_columns: How many last columns only the page shows.
        most: Rows that the report shows at most; 0: all.
        sortable: Whether columns sort; a heat map keeps its order.
    """

    ident: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    num_text: int = 1
    page_columns: int = 0
    most: int = 0
    sortable: bool = True
    on: str = BOTH
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """One figure: drawings, or heat maps, side by side.

    Attributes:
        note: Contents, and how to read them.
        command: The exact command that makes its numbers.
        tables: Heat maps, drawn as tables.
        data: The numbers drawn, under a fold.
        scale: Labelled steps of the colour scale: (level, text).
        group_of: Group of each table, of which one group is shown at a time; empty: all are shown.
        chosen: The group shown first.
        image: File that the report shows in its place, and what it is.
    """

    ident: str
    title: str
    note: str
    command: str
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    data: tuple[Table, ...] = ()
    legend: tuple[tuple[str, Look], ...] = ()
    scale: tuple[tuple[int, str], ...] = ()
    group_of: tuple[str, ...] = ()
    chosen: str = ""
    image: tuple[str, str] | None = None
    on: str = PAGE
    kind: ClassVar[str] = "figure"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of groups, each once."""
        return tuple(dict.fromkeys(self.group_of))


@dataclass(frozen=True)
class PagePart:
    """A part of the page alone, with a macro of its own: "document", "facts" or "folded"."""

    kind: str
    data: Any
    on: str = PAGE


Block = Prose | Bullets | Table | Figure | PagePart


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    ident: str
    title: str
    blocks: tuple[Block, ...]

    def shown(self, where: str) -> list[Block]:
        """The blocks that the report or the page shows."""
        return [block for block in self.blocks if block.on in (BOTH, where)]


@dataclass(frozen=True)
class Report:
    """All of it: `first` is the first screen, `warnings` stand above it and `lead` below."""

    title: str
    warnings: tuple[Block, ...]
    first: tuple[Block, ...]
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]


def words(text: object = "", value: Real | None = None, mark: str = "") -> TableCell:
    """A cell of words; with a value it sorts by that."""
    return TableCell(str(text), None if value is None else float(value), mark=mark)


def of_budget(budget: Real) -> TableCell:
    """A cell with a budget: a keep_ratio below 1, tokens per head above it."""
    return words(f"{budget:g}", budget)


def number(value: Real | None, digits: int = 1, *, sign: bool = False) -> TableCell:
    """A cell with a number; None and nan: an empty one."""
    if value is None or math.isnan(value):
        return words()
    return words(f"{value:{'+' if sign else ''}.{digits}f}", value)


def p_value(value: Real | None) -> TableCell:
    """A cell with a p value."""
    if value is None:
        return words()
    return words("< 0.001" if value < 0.001 else f"{value:.3f}", value)


def heat(value: Real | None, top: Real = 1.0, digits: int = 2) -> TableCell:
    """A cell coloured by its number, between 0 and `top`."""
    if value is None or math.isnan(value):
        return words()
    level = round(LEVELS * min(1.0, max(0.0, value / top if top > 0 else 0.0)))
    return TableCell(f"{value:.{digits}f}", float(value), level)


def scale(top: Real = 1.0, digits: int = 2) -> tuple[tuple[int, str], ...]:
    """Five labelled steps of the colour scale."""
    return tuple((round(LEVELS * part / 4), f"{part * top / 4:.{digits}f}") for part in range(5))


def colours() -> tuple[tuple[str, str], ...]:
    """Background and text colour of each level; the text is the one of black and white that stands out more.

    Cividis is readable to all common kinds of colour blindness, and monotone in lightness.
    """
    require("eval", "matplotlib", what="the colours of a page")
    import matplotlib

    made = []
    for level in range(LEVELS + 1):
        rgb = [int(own) for own in matplotlib.colormaps["cividis"](level / LEVELS, bytes=True)[:3]]
        light = luminance(rgb)
        ink = "#fff" if 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 else "#000"
        made.append((f"#{bytes(rgb).hex()}", ink))
    return tuple(made)


def luminance(rgb: Sequence[int]) -> float:
    """Relative luminance of sRGB in 0..255 (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

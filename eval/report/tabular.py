"""What a page of results is made of: tables whose cells know the number behind their text, and figures.

In: numbers and words. Out: plain dataclasses that the template `template/page.html.j2` writes out. The one
decision taken here: a cell's text is never parsed again. What sorts a column is the number that the text was
made from, and a missing number is an empty cell that sorts last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Cividis, from dark blue (low) to yellow (high): readable to all common kinds of colour blindness, and
# monotone in lightness, so that it survives a grey printer.
CIVIDIS = (
    *("00224e", "123570", "3b496c", "575d6d", "707173"),
    *("8a8678", "a59c74", "c3b369", "e1cc55", "fee838"),
)
LEVELS = 20

# beartype takes no int for a float, and counts are whole.
Real = int | float


@dataclass(frozen=True)
class Shown:
    """One cell.

    Attributes:
        text: As printed.
        value: What it sorts by; None: by its text, or last where it is empty.
        level: Step of the colour scale, 0 to `LEVELS`; None: no colour.
        mark: Class of the cell: a verdict, for instance.
    """

    text: str
    value: float | None = None
    level: int | None = None
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """One sortable table.

    Attributes:
        ident: Id in the page.
        caption: What it holds, in one line.
        columns: Heads.
        rows: One tuple of cells a row.
        num_text: How many first columns are words.
        sortable: Whether columns sort; a heat map keeps its order.
    """

    ident: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Shown, ...], ...]
    num_text: int = 1
    sortable: bool = True


@dataclass(frozen=True)
class Entry:
    """One line of a figure's legend: a policy, and how it is drawn."""

    name: str
    style: int
    swatch: str


@dataclass(frozen=True)
class Figure:
    """One figure: drawings, or small tables, side by side.

    Attributes:
        ident: Id in the page.
        title: One line.
        note: What is drawn, and how to read it.
        command: The exact command that makes its numbers.
        panels: SVG, as markup that is safe.
        tables: Heat maps, drawn as tables.
        data: The numbers drawn, under a fold.
        legend: What the lines are.
        scale: Labelled steps of the colour scale: (level, text).
        groups: Names of groups of panels or tables of which one is shown at a time; "" for one group.
        group_of: Group of each panel or table.
    """

    ident: str
    title: str
    note: str
    command: str
    panels: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    data: tuple[Table, ...] = ()
    legend: tuple[Entry, ...] = ()
    scale: tuple[tuple[int, str], ...] = ()
    groups: tuple[str, ...] = ()
    group_of: tuple[str, ...] = ()
    chosen: str = ""
    wide: bool = field(default=False)


def words(text: object, mark: str = "") -> Shown:
    """A cell of words."""
    return Shown(str(text), mark=mark)


def number(value: Real | None, digits: int = 1, *, sign: bool = False, after: str = "") -> Shown:
    """A cell with a number; None and nan: an empty one."""
    if value is None or math.isnan(value):
        return Shown("")
    return Shown(f"{value:{'+' if sign else ''}.{digits}f}{after}", float(value))


def p_value(value: Real | None) -> Shown:
    """A cell with a p value."""
    if value is None:
        return Shown("")
    return Shown("< 0.001" if value < 0.001 else f"{value:.3f}", float(value))


def heat(value: Real | None, top: Real = 1.0, digits: int = 2, bottom: Real = 0.0) -> Shown:
    """A cell coloured by its number, between `bottom` and `top`."""
    if value is None or math.isnan(value):
        return Shown("")
    part = (value - bottom) / (top - bottom) if top > bottom else 0.0
    level = round(LEVELS * min(1.0, max(0.0, part)))
    return Shown(f"{value:.{digits}f}", float(value), level)


def scale(top: Real = 1.0, digits: int = 2, bottom: Real = 0.0) -> tuple[tuple[int, str], ...]:
    """Five labelled steps of the colour scale."""
    steps = [bottom + part * (top - bottom) / 4 for part in range(5)]
    return tuple((round(LEVELS * part / 4), f"{step:.{digits}f}") for part, step in enumerate(steps))


def colours() -> tuple[tuple[str, str], ...]:
    """Background and text colour of each level; the text is the one of black and white that stands out
    more."""
    made = []
    for level in range(LEVELS + 1):
        place = level / LEVELS * (len(CIVIDIS) - 1)
        low = min(int(place), len(CIVIDIS) - 2)
        mixed = [
            round((1 - place + low) * a + (place - low) * b)
            for a, b in zip(_rgb(CIVIDIS[low]), _rgb(CIVIDIS[low + 1]), strict=True)
        ]
        light = luminance(mixed)
        ink = "#fff" if 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 else "#000"
        made.append(("#" + "".join(f"{part:02x}" for part in mixed), ink))
    return tuple(made)


def luminance(rgb: Sequence[int]) -> float:
    """Relative luminance of sRGB in 0..255 (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16)

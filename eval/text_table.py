"""Lays out rows as lines of text under the titles of their columns, for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: above it.
        key: of the value in a row; `a.b` is `b` inside of `a`. A missing value is shown as `-`.
        form: of a number, or of the median of a spread (a mapping with `median`, `p20`, `p80`).
        unit: that numbers are divided by.
        wide: whether the 20th and 80th percentile of a spread are shown with its median.
    """

    title: str
    key: str
    form: str = ".3f"
    unit: int = 1
    wide: bool = False

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of a row's value."""
        value: Any = row
        for part in self.key.split("."):
            value = value.get(part) if value else None
        if value is None or isinstance(value, str):
            return value or "-"
        number = value["median"] if isinstance(value, Mapping) else value
        median = f"{number if self.unit == 1 else number / self.unit:{self.form}}"
        return f"{median} ({value['p20']:{self.form}}..{value['p80']:{self.form}})" if self.wide else median


def text_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows under the titles of their columns, the first column to the left and the others to the right; a row
    with a text in `failed` ends with it."""
    lines = [[column.title for column in columns], *([one.cell(row) for one in columns] for row in rows)]
    first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    reasons = ["", *(row.get("failed") or "" for row in rows)]
    return [
        " ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths), reason]).rstrip()
        for line, reason in zip(lines, reasons, strict=True)
    ]

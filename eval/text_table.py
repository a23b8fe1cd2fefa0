"""Lays out rows of cells as lines of text, for a terminal."""

from collections.abc import Sequence


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their titles, the first column to the left and the others to the right."""
    lines = [titles, *rows]
    first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return [" ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)]).rstrip() for line in lines]

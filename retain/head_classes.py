"""Reads head classes (retrieval or streaming heads) from a table, and turns them into budgets.

The table is a tab-separated file, one row a layer, one number in 0..1 a KV head: the layout of DuoAttention's
published patterns (how much a head needs the whole context). Streaming heads hold the protected entries;
retrieval heads share the rest. The total stays as the user stated it.

DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, arXiv 2410.10819.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

from retain.budget.largest_remainder import fill, round_shares


def read_head_classes(path: str) -> tuple[tuple[float, ...], ...]:
    """Read a table of head classes.

    Args:
        path: of a tab-separated file of numbers in 0..1.

    Returns:
        one row a layer, one number a KV head.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a table of numbers in 0..1.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"head classes file {path!r} does not exist: pass allocation={{'head_classes': path}}, a "
            "tab-separated table of one row a layer and one number in 0..1 a KV head (DuoAttention's layout; "
            "python -m retain.eval.diagnose.head_classes measures one)."
        )
    return _parsed(path, Path(path).stat().st_mtime_ns)


@cache
def _parsed(path: str, changed_ns: int) -> tuple[tuple[float, ...], ...]:
    """Parse a table, cached until the file changes: every layer of every prefill needs it."""
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = tuple(float(cell) for cell in line.split())
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {error}; wanted tab-separated numbers in 0..1."
            ) from None
        if not all(0 <= cell <= 1 for cell in row) or (rows and len(row) != len(rows[0])):
            raise ValueError(
                f"{path}, line {number}: got {len(row)} numbers {row}; wanted numbers in 0..1, "
                f"{'as many in every row' if not rows else f'{len(rows[0])} as in the first row'}."
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no numbers; wanted one row a layer, one number in 0..1 a KV head.")
    return tuple(rows)


def check_shape(path: str, heads_L: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Read a table and check that it has these layers and heads.

    Raises:
        ValueError: it is another model's.
    """
    classes_LH = read_head_classes(path)
    if [len(row) for row in classes_LH] != list(heads_L):
        raise ValueError(
            f"head classes {path!r} hold {len(classes_LH)} layers of {len(classes_LH[0])} KV heads, and the "
            f"model evicts from {len(heads_L)} of {heads_L[0]}: pass the table of this model."
        )
    return classes_LH


def class_budgets(
    classes_LH: Sequence[Sequence[float]],
    threshold: float,
    total: int,
    least: int,
    capacity_LH: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Budgets of one sequence: streaming heads hold `least`, retrieval heads share the rest alike.

    What full retrieval heads cannot hold goes to the streaming heads, equally.

    Args:
        classes_LH: the table.
        threshold: a head at or above it is a retrieval head.
        total: entries over all layers and heads, at most those that exist.
        least: entries of every head that has them (protected ones, at least one).
        capacity_LH: entries that each head has.

    Returns:
        entries `[L][H]`, which sum to the total.
    """
    weights = [Fraction(int(cell >= threshold)) for row in classes_LH for cell in row]
    most = [own for row in capacity_LH for own in row]
    shares = iter(round_shares(fill(total, weights, [min(least, own) for own in most], most)))
    return [[next(shares) for _ in row] for row in classes_LH]

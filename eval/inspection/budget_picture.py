"""Draws the share of seen entries that each layer and head holds."""

from pathlib import Path

from retain.budget.budget_table import BudgetTable
from retain.eval.report.plots import Heat, save_png


def budget_map(table: BudgetTable, title: str) -> Heat:
    """The share of what was seen that each layer and head holds, in %: pictures of unlike lengths and budgets
    compare."""
    return Heat(title, "KV head", "layer that evicts", (100 * table.share_LH).tolist())


def plot_budgets(table: BudgetTable, path: str | Path) -> Path:
    """Draw the table of `cache.budgets()` into a PNG, whose path is returned.

    Raises:
        ValueError: A folder, or a name that does not end in .png.
    """
    return save_png([[budget_map(table, f"{table.policy}: entries held, % of seen")]], Path(path))

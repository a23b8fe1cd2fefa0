"""A picture of what each layer and head holds.

In: a `BudgetTable`. Out: a heat map of layers and KV heads. The decision taken here: the colour is the share
of what was seen, so that pictures of unlike lengths and budgets compare.
"""

from pathlib import Path
from typing import Any

from retain.budget.table import BudgetTable
from retain.process.extras import deferred

with deferred("eval", "matplotlib", "matplotlib.figure", what="a picture"):
    from matplotlib.figure import Figure

# A picture of more cells than these does not write their numbers.
NUMBERS = 64


def check_png(path: Path) -> None:
    """Refuse what a picture cannot be written to: matplotlib would append an ending, or draw another kind.

    Raises:
        ValueError: a folder, or a name of another ending.
    """
    if path.is_dir() or path.suffix.lower() != ".png":
        what = "a folder" if path.is_dir() else "no name of a PNG"
        raise ValueError(f"{path} is {what}, and a picture is written there: name a file that ends in .png.")


def plot_budgets(table: BudgetTable, path: str | Path) -> Path:
    """Draw the share of what was seen that each layer and head holds, into a PNG.

    Args:
        table: `cache.budgets()`.
        path: of the PNG.

    Returns:
        the path.

    Raises:
        ValueError: a folder, or a name that does not end in .png.
    """
    path = Path(path)
    check_png(path)
    share_LH = table.share_LH.numpy()
    layers, heads = share_LH.shape
    figure = Figure(figsize=(min(12.0, 3.0 + 0.45 * heads), min(12.0, 1.8 + 0.3 * layers)), dpi=150)
    axes = figure.add_subplot()
    image = axes.imshow(100 * share_LH, aspect="auto", cmap="viridis", vmin=0.0)
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_title(f"{table.policy}: entries held, % of seen", fontsize=10)
    axes.set_xticks(range(0, heads, max(1, heads // 8)))
    axes.set_yticks(range(0, layers, max(1, layers // 12)))
    if layers * heads <= NUMBERS:
        for layer in range(layers):
            for head in range(heads):
                own = share_LH[layer, head]
                color = "white" if own < 0.6 * share_LH.max() else "black"
                centred: dict[str, Any] = {"ha": "center", "va": "center"}
                axes.text(head, layer, f"{100 * own:.0f}", fontsize=8, color=color, **centred)
    figure.colorbar(image, ax=axes)
    figure.tight_layout()
    figure.savefig(path)
    return path

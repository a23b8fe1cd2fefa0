"""Reads tables of what was measured of a model's heads and layers.

A table is a tab-separated file: one row a layer that evicts, numbers in 0..1; the layout in which
DuoAttention publishes its patterns. Where some layers of the model do not evict, a first line
`# layers 1 3 5` names those that do. `TABLES` lists the kinds, with what a row has a number for.

DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, arXiv 2410.10819.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Columns = Literal["KV heads", "query heads", "KV or query heads", "numbers"]


@dataclass(frozen=True)
class TableKind:
    """One kind of table.

    Args:
        what: what it holds, in the plural.
        stated: how a policy names the file.
        columns: what a row has a number for; `numbers`: one, of the layer.
    """

    what: str
    stated: str
    columns: Columns


# By the name of the setting that names the file, and of what `retain.eval.diagnose.head_tables` measures.
TABLES: Mapping[str, TableKind] = MappingProxyType(
    {
        "head_classes": TableKind("head classes", "allocation={'head_classes': path}", "KV heads"),
        "head_importance": TableKind(
            "head importances", "allocation={'head_importance': path}", "KV or query heads"
        ),
        "retrieval_heads": TableKind(
            "retrieval heads", "observed_settings={'retrieval_heads': path}", "query heads"
        ),
        "layer_errors": TableKind("layer errors", "allocation={'layer_errors': path}", "numbers"),
    }
)


@dataclass(frozen=True)
class HeadTable:
    """A table that was read.

    Args:
        rows: one a layer, as many numbers in each.
        layers: index in the model of each of these layers.
        named: whether the file names them; else they are taken to be the first ones.
    """

    rows: tuple[tuple[float, ...], ...]
    layers: tuple[int, ...]
    named: bool = False


def read_table(kind: str, path: str) -> HeadTable:
    """Read a table.

    Args:
        kind: a name in `TABLES`.
        path: of a tab-separated file of numbers in 0..1.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a table of numbers in 0..1.
    """
    if not Path(path).is_file():
        own = TABLES[kind]
        a_row = "one number in 0..1" if own.columns == "numbers" else f"numbers in 0..1 of its {own.columns}"
        raise FileNotFoundError(
            f"{own.what} file {path!r} does not exist: pass {own.stated}, a tab-separated table of "
            f"one row a layer with {a_row} (python -m retain.eval.diagnose.head_tables --table {kind} "
            "measures one)."
        )
    return _parsed(path, Path(path).stat().st_mtime_ns)


@cache
def _parsed(path: str, changed_ns: int) -> HeadTable:
    """Parse a table, cached until the file changes: every layer of every prefill needs it."""
    rows: list[tuple[float, ...]] = []
    layers: tuple[int, ...] | None = None
    named = False
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            if line.startswith("#"):
                word, *numbers = line[1:].split()
                if word == "layers":
                    layers, named = tuple(map(int, numbers)), True
                continue
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
        raise ValueError(f"{path} holds no numbers; wanted one row a layer, numbers in 0..1.")
    layers = tuple(range(len(rows))) if layers is None else layers
    if len(layers) != len(rows) or [*layers] != sorted({*layers}):
        raise ValueError(
            f"{path} names layers {' '.join(map(str, layers))} and has {len(rows)} rows; wanted one row a "
            "layer, layers ascending."
        )
    return HeadTable(tuple(rows), layers, named)


def check_table(
    kind: str,
    path: str,
    heads_L: Sequence[int],
    query_heads_L: Sequence[int] | None = None,
    layers_L: Sequence[int] | None = None,
) -> HeadTable:
    """Read a table and check that it has these layers and heads.

    Args:
        kind: a name in `TABLES`.
        heads_L: KV heads of the layers that evict.
        query_heads_L: their query heads; None: unknown, and any multiple of the KV heads will do.
        layers_L: their indices in the model, for a table that names its layers; None: not compared.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no table, or another model's.
    """
    table, columns = read_table(kind, path), TABLES[kind].columns
    widths = []
    for idx, heads in enumerate(heads_L):
        got = len(table.rows[0])
        of_queries = got // heads * heads if query_heads_L is None else query_heads_L[idx]
        wanted = {"KV heads": (heads,), "query heads": (of_queries,), "numbers": (1,)}
        widths.append(wanted.get(columns, (heads, of_queries)))
    if len(table.rows) != len(widths) or any(len(table.rows[0]) not in own for own in widths):
        what = {"numbers": "number"}.get(columns, columns)
        have = " or ".join(map(str, dict.fromkeys(widths[0])))
        raise ValueError(
            f"{TABLES[kind].what} {path!r} hold {len(table.rows)} layers of {len(table.rows[0])} {what}, "
            f"and the model evicts from {len(widths)} of {have}: pass the table of this model."
        )
    # A score looks its row up by the layer's index, whether the table names it or not.
    by_index = table.named or kind == "retrieval_heads"
    if layers_L is not None and by_index and table.layers != tuple(layers_L):
        raise ValueError(
            f"{TABLES[kind].what} {path!r} are of layers {' '.join(map(str, table.layers))}, and the model "
            f"evicts from {' '.join(map(str, layers_L))}: pass the table of this model."
        )
    return table


def check_tables(tables: Mapping[str, str], *columns: Sequence[int]) -> None:
    """Check all tables of a policy (`Policy.tables`), as `check_table` does one."""
    for kind, path in tables.items():
        check_table(kind, path, *columns)


def row_of(kind: str, path: str, layer_idx: int, columns: int) -> tuple[float, ...]:
    """The row of one layer of the model, of a table that a score reads.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it has no such row, or one of another length.
    """
    table = read_table(kind, path)
    row = dict(zip(table.layers, table.rows, strict=True)).get(layer_idx, ())
    if len(row) != columns:
        raise ValueError(
            f"{TABLES[kind].what} {path!r} hold {len(row)} numbers for layer {layer_idx}, which shows "
            f"{columns} {TABLES[kind].columns}: measure those of this model with python -m "
            f"retain.eval.diagnose.head_tables --table {kind}."
        )
    return row


def format_table(rows: Sequence[Sequence[float]], layers: Sequence[int]) -> str:
    """Text of a table; its first line names the layers unless they are the first ones of the model."""
    named = [] if [*layers] == [*range(len(rows))] else ["# layers " + " ".join(map(str, layers))]
    lines = ["\t".join(f"{cell:.6f}" for cell in row) for row in rows]
    return "\n".join([*named, *lines, ""])

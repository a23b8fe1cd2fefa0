"""Reads a number for each KV head of a model, by which the heads share a budget.

The file is JSON, by the index of each layer that evicts: `{"0": [1, 0], "1": [0.5, 0.25]}`. Numbers are at
least 0, and count in proportion. `python -m retain.eval.head_weights` measures those of DuoAttention
and of HeadKV.

DuoAttention's (arXiv 2410.10819) are 1 for a retrieval head and 0 for a streaming head: streaming heads hold
the protected entries, and retrieval heads share the rest. HeadKV's (arXiv 2410.19258) are `(beta - 1) *
sum(s) + N * s_h` over N heads, with s their importance: of what is not protected, `1 / beta` goes by
importance and the rest equally.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

Weights = Mapping[int, tuple[float, ...]]


def read_weights(path: str) -> Weights:
    """Read the numbers of each layer, layers ascending.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not JSON of this form.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"head weights {path!r} do not exist: pass allocation={{'weights': path}}, JSON of a number for "
            "each KV head, by layer (python -m retain.eval.head_weights measures them)."
        )
    return _parsed(path, Path(path).stat().st_mtime_ns)


@cache
def _parsed(path: str, changed_ns: int) -> Weights:
    """Parse a file, cached until it changes: every layer of every prefill needs it."""
    wanted = 'wanted a list of numbers of at least 0 for each layer, such as {"0": [1, 0], "1": [0.5, 0.25]}.'
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"head weights {path!r} are no JSON ({error}); {wanted}") from None
    if not isinstance(rows, dict) or not rows:
        raise ValueError(f"head weights {path!r} hold no layers; {wanted}")
    for layer, row in rows.items():
        if not (layer.isdecimal() and isinstance(row, list) and row and all(map(_is_weight, row))):
            raise ValueError(f"head weights {path!r} hold {row!r} for layer {layer!r}; {wanted}")
    return {int(layer): tuple(map(float, rows[layer])) for layer in sorted(rows, key=int)}


def _is_weight(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < math.inf


def check_weights(
    path: str, heads_L: Sequence[int], layers_L: Sequence[int] | None = None
) -> list[tuple[float, ...]]:
    """Read the numbers, and check that they are of these layers and heads.

    Args:
        heads_L: KV heads of the layers that evict.
        layers_L: their indices in the model; None: not compared.

    Returns:
        the numbers of each layer, in order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not JSON of this form, or another model's.
    """
    weights = read_weights(path)
    widths = [len(row) for row in weights.values()]
    if widths != [*heads_L]:
        raise ValueError(
            f"head weights {path!r} are of {_said(widths)}, and the model evicts from {_said(heads_L)}: pass "
            "those of this model."
        )
    if layers_L is not None and [*weights] != [*layers_L]:
        raise ValueError(
            f"head weights {path!r} are of layers {' '.join(map(str, weights))}, and the model evicts from "
            f"{' '.join(map(str, layers_L))}: pass those of this model."
        )
    return [*weights.values()]


def _said(heads_L: Sequence[int]) -> str:
    """Layers and KV heads, for an error."""
    return f"{len(heads_L)} layers of {' or '.join(map(str, dict.fromkeys(heads_L)))} KV heads"


def format_weights(weights: Mapping[int, Sequence[float]]) -> str:
    """Text of a file."""
    rows = (f'"{layer}": {json.dumps([*row])}' for layer, row in weights.items())
    return "{\n  " + ",\n  ".join(rows) + "\n}\n"

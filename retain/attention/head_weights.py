"""Reads a number for each KV head of a model, by which the heads share a budget.

The file is JSON, by the index of each layer that evicts: `{"0": [1, 0], "1": [0.5, 0.25]}`. Numbers are at
least 0, and count in proportion. `python -m retain.eval.head_weights` measures DuoAttention's and HeadKV's.

DuoAttention's (arXiv 2410.10819) are 1 for a retrieval head and 0 for a streaming head: streaming heads hold
the protected entries, and retrieval heads share the rest. HeadKV's (arXiv 2410.19258) are `(beta - 1) *
sum(s) + N * s_h` over N heads, with s their importance: of what is not protected, `1 / beta` goes by
importance and the rest equally.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from retain.config import STRICT

Weight = Annotated[float, Field(ge=0)]
Weights = dict[Annotated[int, Field(ge=0)], Annotated[tuple[Weight, ...], Field(min_length=1)]]
_FILE = TypeAdapter(Annotated[Weights, Field(min_length=1)], config=STRICT)


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
    try:
        return dict(sorted(_FILE.validate_json(Path(path).read_bytes()).items()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        raise ValueError(
            f"head weights {path!r}, at {place}: {first['msg']}; wanted "
            'a list of numbers of at least 0 for each layer, such as {"0": [1, 0], "1": [0.5, 0.25]}.'
        ) from None


def check_weights(path: str, heads_L: Sequence[int], layers_L: Sequence[int]) -> None:
    """Refuse numbers of other layers and heads.

    Args:
        heads_L: KV heads of the layers that evict.
        layers_L: their indices in the model.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not JSON of this form, or another model's.
    """
    got = {layer: len(row) for layer, row in read_weights(path).items()}
    if got != (wanted := dict(zip(layers_L, heads_L, strict=True))):
        raise ValueError(
            f"head weights {path!r} are of another model: they have layers and heads {got}, and the model "
            f"evicts from {wanted}. Pass those of this model."
        )


def format_weights(weights: Mapping[int, Sequence[float]]) -> str:
    """Text of a file."""
    rows = (f'"{layer}": {json.dumps([*row])}' for layer, row in weights.items())
    return "{\n  " + ",\n  ".join(rows) + "\n}\n"

"""Learned scores: one small gate per attention layer, trained by `train/distill.py`, read back by
`load_gates`."""

from collections.abc import Mapping

from retain.gates.base import Gate, GateInputs, GateSet
from retain.gates.linear import LinearGate
from retain.gates.mlp import MLPGate
from retain.registry import lookup

__all__ = ["GATES", "Gate", "GateInputs", "GateSet", "LinearGate", "MLPGate", "build_gates"]

GATES: dict[str, type[Gate]] = {"linear": LinearGate, "mlp": MLPGate}


def build_gates(family: str, dims: Mapping[int, Mapping[str, int]]) -> GateSet:
    """A fresh gate set of one family.

    Args:
        family: a name in `GATES`.
        dims: layer index -> keyword arguments of that layer's gate (`E`, `H`, and the family's
            own).

    Raises:
        ValueError: if the family is unknown.
    """
    gate_class = lookup(family, GATES, what="gate family")
    return GateSet({layer: gate_class(**layer_dims) for layer, layer_dims in dims.items()})

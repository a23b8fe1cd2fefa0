"""Lists the families of gates by name, and builds gates from model sizes and user settings.

A family's settings are its constructor's keyword arguments, checked by their annotations, so that a config,
an artifact and a call name them alike.
"""

from collections.abc import Mapping
from typing import Any

from retain.config import checked
from retain.gates.admission import AdmissionGate, DMSGate
from retain.gates.base import Gate, GateSet
from retain.gates.context import ContextGate
from retain.gates.decay import DecayGate, SharedDecayGate
from retain.gates.lookahead import LookaheadGate
from retain.gates.lowrank import LowRankGate
from retain.gates.mlp import LinearGate, MLPGate
from retain.gates.qkv import QKVGate
from retain.process.registry import lookup

GATES: dict[str, type[Gate]] = {
    "admission": AdmissionGate,
    "context": ContextGate,
    "decay": DecayGate,
    "decay_shared": SharedDecayGate,
    "dms": DMSGate,
    "linear": LinearGate,
    "lookahead": LookaheadGate,
    "lowrank": LowRankGate,
    "mlp": MLPGate,
    "qkv": QKVGate,
}


def build_gates(family: str, dims: Mapping[int, Mapping[str, Any]]) -> GateSet:
    """Build a fresh gate set of one family; parts that its layers share are shared.

    Args:
        dims: layer index -> keyword arguments of that layer's gate (`dims_for` makes them).

    Raises:
        ValueError: if the family is unknown.
    """
    gate_class = lookup(family, GATES, what="gate family")
    return GateSet({layer: gate_class(**layer_dims) for layer, layer_dims in dims.items()})


def dims_for(
    family: str, sizes: Mapping[int, Mapping[str, int]], settings: Mapping[str, Any] | None = None
) -> dict[int, dict[str, Any]]:
    """Keyword arguments of each layer's gate: the sizes that the family needs, and the user's settings.

    Args:
        sizes: layer index -> that layer's E, H, Q and D (more than the family wants is left out).
        settings: of the family, by name; the others have their defaults.

    Raises:
        ValueError: an unknown family; settings that it does not have, or of another type, all in one message.
    """
    gate_class = lookup(family, GATES, what="gate family")
    chosen, problems = checked(settings or {}, gate_class, family, gate_class.sizes)
    if problems:
        raise ValueError(f"settings of gate family {family!r}: {'; '.join(problems)}.")
    return {
        layer: {**{name: layer_sizes[name] for name in gate_class.sizes}, **chosen}
        for layer, layer_sizes in sizes.items()
    }

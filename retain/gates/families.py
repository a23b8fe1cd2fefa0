"""Lists the families of gates by name, and builds gates from model sizes and user settings.

A family's settings are its constructor's keyword arguments, so that a config, an artifact and a call name
them alike.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from retain.gates.admission import AdmissionGate, DMSGate
from retain.gates.base import Gate, GateSet
from retain.gates.context import ContextGate
from retain.gates.decay import DecayGate, SharedDecayGate
from retain.gates.lookahead import LookaheadGate
from retain.gates.lowrank import LowRankGate
from retain.gates.mlp import LinearGate, MLPGate
from retain.gates.qkv import QKVGate
from retain.process.registry import lookup, suggest

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


def build_gates(
    family: str,
    dims: Mapping[int, Mapping[str, Any]],
    *,
    calibrators: Mapping[int, nn.Module] | None = None,
    extension: Any = None,
) -> GateSet:
    """Build a fresh gate set of one family; parts that its layers share are shared.

    Args:
        dims: layer index -> keyword arguments of that layer's gate (`dims_for` makes them).
        calibrators: layer index -> calibration of that layer's scores.
        extension: addition of the family to the model.

    Raises:
        ValueError: if the family is unknown.
    """
    gate_class = lookup(family, GATES, what="gate family")
    gates = {layer: gate_class(**layer_dims) for layer, layer_dims in dims.items()}
    return GateSet(gates, calibrators=calibrators, extension=extension)


def settings_of(family: str) -> dict[str, Any]:
    """Settings of a family and their defaults; a ValueError if the family is unknown."""
    gate_class = lookup(family, GATES, what="gate family")
    parameters = inspect.signature(gate_class).parameters
    return {name: parameters[name].default for name in parameters if name not in gate_class.sizes}


def dims_for(
    family: str, sizes: Mapping[int, Mapping[str, int]], settings: Mapping[str, Any] | None = None
) -> dict[int, dict[str, Any]]:
    """Keyword arguments of each layer's gate: the sizes that the family needs, and the user's settings.

    Args:
        sizes: layer index -> that layer's E, H, Q and D (more than the family wants is left out).
        settings: of the family, by name; the others have their defaults.

    Raises:
        ValueError: an unknown family; settings that it does not have, or of another type than their default,
            all in one message.
    """
    gate_class = lookup(family, GATES, what="gate family")
    known = settings_of(family)
    problems = []
    for name, value in (settings or {}).items():
        if name in gate_class.sizes:
            problems.append(f"{name} comes from the model and cannot be set")
        elif name not in known:
            problems.append(f"there is no setting {name!r}{suggest(name, known)}")
        elif not _fits(value, known[name]):
            problems.append(f"{name} is {value!r}, where a {type(known[name]).__name__} is wanted")
    if problems:
        listing = ", ".join(f"{name} ({default!r})" for name, default in sorted(known.items()))
        raise ValueError(
            f"settings of gate family {family!r}: {'; '.join(problems)}. It has, with defaults: "
            f"{listing or 'none'}."
        )
    # A whole number that a config writes for a fraction becomes one: artifacts then read alike.
    chosen = {
        name: float(value) if isinstance(known[name], float) else value
        for name, value in (settings or {}).items()
    }
    return {
        layer: {**{name: layer_sizes[name] for name in gate_class.sizes}, **chosen}
        for layer, layer_sizes in sizes.items()
    }


def _fits(value: Any, default: Any) -> bool:
    """True for a value of the default's type; a whole number may replace a float."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and math.isfinite(value)
    return default is None or isinstance(value, type(default))

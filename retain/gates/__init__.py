"""Learned scores: one small gate per attention layer, trained by `train/distill.py`, read by `load_gates`.

Reading order: `base` (interface, `GateSet`), `families` (by name), then one file a family; `calibrate`
(scores to risk), `artifact` (saved and loaded), `hub` (where it lies), `card`, `published` (releases of
others).
"""

from retain.gates.admission import AdmissionGate, DMSGate
from retain.gates.base import Gate, GateInputs, GateSet, HiddenGate, inputs_of
from retain.gates.context import ContextGate
from retain.gates.decay import DecayGate, SharedDecayGate
from retain.gates.families import GATES, build_gates, dims_for
from retain.gates.lookahead import LookaheadExtension, LookaheadGate
from retain.gates.lowrank import LowRankGate
from retain.gates.mlp import LinearGate, MLPGate
from retain.gates.qkv import QKVGate

__all__ = [
    "GATES",
    "AdmissionGate",
    "ContextGate",
    "DMSGate",
    "DecayGate",
    "Gate",
    "GateInputs",
    "GateSet",
    "HiddenGate",
    "LinearGate",
    "LookaheadExtension",
    "LookaheadGate",
    "LowRankGate",
    "MLPGate",
    "QKVGate",
    "SharedDecayGate",
    "build_gates",
    "dims_for",
    "inputs_of",
]

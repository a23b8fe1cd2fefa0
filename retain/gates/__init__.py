"""Learned scores: one small gate per attention layer, trained by `train/distill.py`, read by `load_gates`.

Reading order: `base` (interface, `GateSet`), `families` (by name), then one file a family; `calibrate`
(scores to risk), `artifact` (saved and loaded), `hub` (where it lies), `card`, `published` (releases of
others).
"""

from retain.gates.base import Gate, GateInputs, GateSet, inputs_of
from retain.gates.families import GATES, build_gates, dims_for

__all__ = ["GATES", "Gate", "GateInputs", "GateSet", "build_gates", "dims_for", "inputs_of"]

"""Makes the gates that a policy takes: those of a folder, or a control that is made of them.

Two controls say what a trained gate is worth: one with random weights (what family, calibration and pipeline
give by themselves), and one that scores each layer by the next layer's gate (what a gate gives that has
learned of importance in general, and nothing of its layer).

A random gate keeps what is known of *heads* and loses what was learned of *entries*. Its weights are fresh,
drawn from the run's seed and the set's name, and its extension too. It keeps the statistics of its inputs,
and of the calibration each head's level: with `log r = curve_h(axis(s))` the artifact's curve, its own is

    log r = axis(s) + mean_k curve_h(knot_k)

so that it is as large as observed risk, which it may be fused with, and heads share a joint budget as the
trained gates' levels say. Under the trained curve itself its scores would lie beyond the knots; without one
they would exceed every observed risk, and the control would be too easy to beat. Without
a calibrator, random gates are as large as their family begins, and under fusion by `max` nothing else counts.
"""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from retain.eval.config import OWN_GATES, CompareConfig
from retain.eval.run.results_store import gates_identity
from retain.gates import GATES, GateSet, build_gates
from retain.gates.artifact import ties_of
from retain.gates.calibrate import REACH, Calibrator
from retain.hf.model.gates import load_gates

# What the input statistics of a gate are called: they are measured on documents, without a target.
STATISTICS = ("input_mean_E", "input_scale_E", "risk_floor_H")


def load_source(
    config: CompareConfig,
    seed: int,
    name: str = OWN_GATES,
    model: Any | None = None,
    read: dict[str, GateSet] | None = None,
) -> GateSet:
    """Loads the gates of a set for one seed.

    Args:
        name: In `gate_sets`, or "gates".
        model: That they will be used on; None: nothing is checked against it.
        read: Folders that are read already -> gates as trained, to which this one is added; a control is a
            copy of them.

    Raises:
        ValueError: If there are none, they are damaged or of another model, or allow no such control.
    """
    control, folder = config.source_of(name).control, config.gates_of(seed, name)
    read = {} if read is None else read
    if folder not in read:
        read[folder] = load_gates(folder, model, allow_other_weights=config.allow_other_weights)
    gates = read[folder]
    if control == "random":
        return random_gates(gates, random_seed(seed, name))
    return other_layer(gates) if control == "other_layer" else gates


def random_seed(seed: int, name: str) -> int:
    """Returns the seed of a random set, from the run's seed and the set's name."""
    return int.from_bytes(hashlib.sha256(f"random gates {seed}/{name}".encode()).digest()[:4], "big")


def random_gates(gates: GateSet, seed: int) -> GateSet:
    """Makes gates of the same family, sizes, input statistics and head levels, with fresh weights.

    `log r = axis(s) + level_h`, with `level_h` the mean over its knots of the trained calibrator's curve;
    without calibrators the levels are those of fresh gates.

    Returns:
        Gates with the artifact's metadata, `control` added, and a sha256 of their own.
    """
    added = GATES[gates.family].extension
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        extension = None
        if added is not None and gates.extension is not None:
            extension = added(**gates.extension.dims())
        made = build_gates(
            gates.family,
            {layer: gates[layer].dims() for layer in gates.layers},
            calibrators={int(layer): _levels(own) for layer, own in gates.calibrators.items()},
            extension=extension,
        )
        for layer in gates.layers:
            known = gates[layer].state_dict()
            made[layer].load_state_dict({n: known[n] for n in STATISTICS if n in known}, strict=False)
    return _named(made, gates.metadata, "random")


def _levels(trained: nn.Module) -> Calibrator:
    """A calibrator that shifts each head's log-scores to the level of a trained one."""
    assert isinstance(trained, Calibrator)
    made = Calibrator(H=trained.H, K=2, space=trained.space, unit=trained.unit)
    level_H = trained.knots()[1].mean(-1)
    # The line's two knots lie as far out as what it gives may.
    reach = float(REACH - 1 - level_H.abs().max())
    for ends_K in (made.knots_K, made.values_K):
        ends_K.copy_(torch.tensor([-reach, reach]))
    made.offset_H.copy_(level_H)
    return made


def other_layer(gates: GateSet) -> GateSet:
    """Makes gates that score each layer by the gate and the calibrator of the next layer that has
    gates, and the last one by the first one's.

    Returns:
        Gates with the artifact's metadata, `control` added, and a sha256 of their own.

    Raises:
        ValueError: If there is one layer alone, or layers are of unlike sizes.
    """
    layers = gates.layers
    if len(layers) < 2:
        raise ValueError(
            f"control 'other_layer' scores a layer by another's gate, and these gates have layer {layers[0]} "
            "alone: take control 'random'."
        )
    behind = dict(zip(layers, (*layers[1:], layers[0]), strict=True))
    for layer, other in behind.items():
        own, its = gates[layer].dims(), gates[other].dims()
        if own != its:
            differ = ", ".join(f"{n} {own.get(n)} and {its.get(n)}" for n in own if own.get(n) != its.get(n))
            raise ValueError(
                f"control 'other_layer' scores layer {layer} by the gate of layer {other}, and they are of "
                f"unlike sizes ({differ}): take control 'random'."
            )
    # A copy, all at once: what layers share stays shared, and following a layer to its device moves no other.
    copied: GateSet = copy.deepcopy(gates)
    made = GateSet(
        {layer: copied[behind[layer]] for layer in layers},
        calibrators={int(layer): copied.calibrators[str(behind[int(layer)])] for layer in copied.calibrators},
        extension=copied.extension,
    )
    return _named(made, gates.metadata, "other_layer")


def _named(made: GateSet, metadata: Mapping[str, Any], control: str) -> GateSet:
    made.metadata = {**metadata, "control": control, "sha256": weights_sha256(made)}
    return made.eval().requires_grad_(False)


def weights_sha256(gates: GateSet) -> str:
    """Returns the sha256 of the weights as an artifact would hold them."""
    ties = ties_of(gates)
    state = {name: own for name, own in gates.state_dict().items() if name not in ties}
    return hashlib.sha256(
        save_tensors({name: own.detach().cpu().contiguous() for name, own in state.items()})
    ).hexdigest()


def source_identity(config: CompareConfig, seed: int, name: str = OWN_GATES) -> dict[str, Any]:
    """Returns what of a set decides its scores: the weights, and what they are read as. The folder and
    the set's name are left out; a control says that it is one."""
    identity = gates_identity(config.gates_of(seed, name))
    control = config.source_of(name).control
    if control == "none":
        return identity
    made = load_source(config, seed, name)
    return {**identity, "sha256": made.metadata["sha256"], "control": control}

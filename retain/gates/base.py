"""Defines the interface of gates, and `GateSet`: one gate per attention layer.

A gate scores the entries of one layer, per KV head. It declares the unit of its output (`unit`), its inputs
(`inputs`), and whether the output is a decay per token of age (`ages`); `GateSet.score` turns it into a
`Score`, so that fusion and selection never meet a logarithm. A `GateSet` is indexed by the layer's index in
the model; layers that retain leaves alone (sliding window, linear attention) have no gate.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from huggingface_hub import ModelCard, ModelHubMixin
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from retain.evidence import Evidence, Score, masked_score
from retain.shapes import axis_of

# A standard deviation below this is a dead input channel: it is centred, never blown up.
SMALLEST_SCALE = 1e-4

# A log-risk at which a soft gate is open but for a hundredth: where end-to-end training begins.
OPEN = 5.0

# Unit of a gate's output -> unit of the score that is made of it.
UNITS = {"risk": "risk", "log_risk": "risk", "mass": "mass", "rank": "rank"}

# Name in `Gate.inputs` -> its field in `Evidence`, its axes in `GateInputs`, its description in messages.
INPUTS = {
    "hidden": ("hidden_BTE", "BTE", "the attention input, after the input layer norm"),
    "stream": ("stream_BTE", "BTE", "the residual stream, before the input layer norm"),
    "queries": ("queries_BQSD", "BQTD", "queries after norm and RoPE"),
    "queries_before": ("queries_BQSD", "BQTD", "queries after norm, before RoPE"),
    "keys": ("keys_BHTD", "BHTD", "keys after norm and RoPE"),
    "keys_before": ("keys_BHTD", "BHTD", "keys after norm, before RoPE"),
    "values": ("values_BHTD", "BHTD", "values"),
    "lookahead": (
        *("lookahead_BQSD", "BQSD"),
        "queries of the gate's lookahead tokens (retain.hf.intercept.lookahead_pass.look_ahead)",
    ),
}


@dataclass(frozen=True)
class GateInputs:
    """Inputs of the gate of one layer; a gate names in `inputs` the fields that it needs (`INPUTS`).

    Args:
        lookahead_BQSD: queries of the lookahead tokens, after norm and RoPE.
        lookahead_keys_BHSD: their keys.
        valid_BT: False on padding; None: none. For gates that look from one entry at another.
        scaling, soft_cap: factor on the layer's attention logits, and their cap; None: none.
        sinks_Q: the layer's sink logits; None: none.
    """

    hidden_BTE: Float[Tensor, "B T E"] | None = None
    stream_BTE: Float[Tensor, "B T E"] | None = None
    queries_BQTD: Float[Tensor, "B Q T D"] | None = None
    queries_before_BQTD: Float[Tensor, "B Q T D"] | None = None
    keys_BHTD: Float[Tensor, "B H T D"] | None = None
    keys_before_BHTD: Float[Tensor, "B H T D"] | None = None
    values_BHTD: Float[Tensor, "B H T D"] | None = None
    lookahead_BQSD: Float[Tensor, "B Q lookahead D"] | None = None
    lookahead_keys_BHSD: Float[Tensor, "B H lookahead D"] | None = None
    valid_BT: Bool[Tensor, "B T"] | None = None
    scaling: float | None = None
    soft_cap: float | None = None
    sinks_Q: Float[Tensor, " Q"] | None = None

    def entries(self, idx: Int[Tensor, " N"] | slice) -> "GateInputs":
        """Select some of the entries (a slice gives views); lookahead tokens belong to all."""
        chosen: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            tensor, axis = getattr(self, name), axis_of(name, "T")
            if tensor is not None and axis is not None:
                chosen[name] = tensor[(slice(None),) * axis + (idx,)]
        return replace(self, **chosen)


class Gate(nn.Module, ABC):
    """Interface of a family.

    Class attributes: `family`, its name; `inputs`, of `INPUTS`; `unit`, of `UNITS`, the unit of its output;
    `sizes`, of E, H, Q, D, the sizes of the layer that its constructor takes (its other keyword arguments are
    the family's own settings, with defaults); `ages`, whether the output is the logarithm of a decay, at most
    0, by which an entry's worth is multiplied with every token of age; `signed`, whether the output can be
    negative where its unit cannot (`log_risk` aside); `contextual`, whether the output of an entry depends on
    other entries (then a part of them cannot be scored alone); `extension`, the addition to the model for a
    prefill.
    """

    family: ClassVar[str]
    # A family's settings may choose it for each gate; the class says what it is by default.
    inputs: frozenset[str] = frozenset({"hidden"})
    unit: ClassVar[str] = "log_risk"
    sizes: ClassVar[tuple[str, ...]] = ("E", "H")
    ages: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    contextual: bool = False
    extension: ClassVar[Any] = None

    risk_floor_H: Tensor

    def __init__(self, *, E: int, H: int):
        super().__init__()
        self.E, self.H = E, H
        self.register_buffer("risk_floor_H", torch.zeros(H))

    def dims(self) -> dict[str, Any]:
        """Keyword arguments that rebuild this gate; attributes have the names of the arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @property
    def device(self) -> torch.device:
        return self.risk_floor_H.device

    @classmethod
    def tie_(cls, gates: "Sequence[Gate]") -> None:
        """Share the family's shared parts between the gates of all layers, ascending: those of the first."""

    def prepare_(
        self,
        inputs: GateInputs,
        counted_BT: Bool[Tensor, "B T"],
        floor_H: Float[Tensor, " H"],
        mean_H: Float[Tensor, " H"],
    ) -> None:
        """Prepare a layer-local training: store the target's floor, and start the output at its mean.

        Args:
            inputs: of some documents of the first step.
            counted_BT: entries of them that the loss will count.
            floor_H: added to a risk before its logarithm, per head (zeros in other units).
            mean_H: mean target in the gate's own unit, per head: of log(risk + floor), of risk, of mass.
        """
        if inputs.hidden_BTE is not None:
            self.standardise_as_(inputs.hidden_BTE[counted_BT])
        self.risk_floor_H.copy_(floor_H)
        self.start_at_(mean_H)

    def standardise_as_(self, hidden_NE: Float[Tensor, "N E"]) -> None:
        """Set the input statistics, if the family has some, from these attention inputs."""

    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        """Set the output bias, so that training begins near this output."""

    def open_(self) -> None:
        """Set the output bias as the family's paper does, so that end-to-end training begins with (almost)
        all entries open."""
        raise ValueError(
            f"gates of family {self.family!r} are not trained end to end; choose stage `local`, or a family "
            "that has an openness (log_gate)."
        )

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """Term that soft attention adds to the logits of an entry: a natural logarithm of at most 0; with
        `ages`, per token of distance."""
        raise ValueError(
            f"gates of family {self.family!r} say no openness, so that they cannot gate softly: train them "
            "with stage `local`, or pass to_log_gate=."
        )

    @abstractmethod
    def forward(self, inputs: GateInputs) -> Float[Tensor, "B H T"]:
        """Score each entry, in the unit of the gate."""


class HiddenGate(Gate):
    """Gate that reads only the standardised attention input.

    `(x - input_mean_E) / input_scale_E`: two buffers, estimated on the first documents of a training run.
    They cost nothing at inference and take the place of a layer norm; fresh ones change nothing.
    """

    input_mean_E: Tensor
    input_scale_E: Tensor

    def __init__(self, *, E: int, H: int):
        super().__init__(E=E, H=H)
        self.register_buffer("input_mean_E", torch.zeros(E))
        self.register_buffer("input_scale_E", torch.ones(E))

    def standardise(self, hidden_BTE: Float[Tensor, "B T E"] | None) -> Float[Tensor, "B T E"]:
        """Centre and scale the attention input (which `inputs_of` has found), in the gate's precision."""
        assert hidden_BTE is not None
        return (hidden_BTE.to(self.input_mean_E.dtype) - self.input_mean_E) / self.input_scale_E

    @torch.no_grad()
    def standardise_as_(self, hidden_NE: Float[Tensor, "N E"]) -> None:
        hidden_NE = hidden_NE.double()
        self.input_mean_E.copy_(hidden_NE.mean(0))
        self.input_scale_E.copy_(hidden_NE.std(0, correction=0).clamp_min(SMALLEST_SCALE))


class LogitGate(HiddenGate):
    """Gate whose last layer `out` gives a logit per KV head."""

    out: nn.Linear

    @torch.no_grad()
    def start_at_(self, mean_H: Float[Tensor, " H"]) -> None:
        self.out.weight.mul_(0.1)
        self.out.bias.copy_(mean_H)

    @torch.no_grad()
    def open_(self) -> None:
        self.out.weight.zero_()
        self.out.bias.fill_(OPEN)

    def log_gate(self, output_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T"]:
        """`logsigmoid` of the output: half open at a logit (or log-risk) of 0."""
        return nn.functional.logsigmoid(output_BHT)


class GateSet(nn.Module, ModelHubMixin):
    """Gates of all attention layers, one a layer; huggingface_hub's mixin saves, cards and publishes them.

    `push_to_hub` and `save_pretrained(folder)` write an artifact with a model card, which `retain.load_gates`
    reads. A licence is `gates.metadata["license"]`.

    Args:
        gates: layer index in the model -> the gate of that layer.
        metadata: from the artifact: base fingerprint, target and loss recipe, ... (plain JSON
            values).
        calibrators: layer index -> calibration of that layer's scores (`retain.gates.calibrate`); none:
            scores are as the gates give them.
        extension: lookahead tokens and adapters (`retain.gates.lookahead`), which the model has during a
            prefill; None: none.

    Raises:
        ValueError: no layer; gates of several families, or with different inputs; calibrators that do not
            cover exactly the gates' layers, with one unit and each with its gate's KV heads.
    """

    def __init__(
        self,
        gates: Mapping[int, Gate],
        metadata: Mapping[str, Any] | None = None,
        *,
        calibrators: Mapping[int, nn.Module] | None = None,
        extension: Any = None,
    ):
        super().__init__()
        self._hub_mixin_config = None  # an artifact has its files, and no config.json
        if not gates:
            raise ValueError("a gate set needs at least one layer: got an empty mapping {layer index: gate}.")
        calibrators = calibrators or {}
        _check_alike(gates, calibrators)
        ascending = [gates[layer] for layer in sorted(gates)]
        type(ascending[0]).tie_(ascending)
        self.gates = nn.ModuleDict({str(layer): gates[layer] for layer in sorted(gates)})
        self.calibrators = nn.ModuleDict({str(layer): each for layer, each in calibrators.items()})
        self.extension = extension
        self.metadata: dict[str, Any] = dict(metadata or {})
        # `sha256` of a model with other weights than the base's, on which they were allowed by name.
        self.allowed_on: str | None = None
        # Where they were read from, for reports; empty: they were made here.
        self.source = ""

    # By name: an artifact is made of gate sets.

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **how: Any) -> "GateSet":
        """Read gates from a folder or the hub (`retain.load_gates`, which also checks the model).

        Args:
            **how: of the hub, as huggingface_hub's mixin has them: `revision`, `token`, `cache_dir`,
                `force_download`, `local_files_only`.
        """
        folder = import_module("retain.gates.hub").fetch(pretrained_model_name_or_path, **how)
        return import_module("retain.gates.artifact").load_gates(folder)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the artifact, and drop an earlier card, in whose place the mixin writes one of these gates; a
        ValueError if the gates do not say which model they belong to."""
        if not (fingerprint := self.metadata.get("fingerprint")):
            raise ValueError(
                "these gates do not say which model they belong to, so that nobody could check it: save them "
                "with retain.gates.artifact.save_gates(gates, folder, fingerprint=retain.hf.model.identity."
                "fingerprint(model)), and push what retain.load_gates(folder) returns."
            )
        import_module("retain.gates.artifact").save_gates(self, save_directory, fingerprint=fingerprint)
        (save_directory / "README.md").unlink(missing_ok=True)

    def push_to_hub(self, repo_id: str, **how: Any) -> str:
        """Publish these gates with a model card, and return the address of the commit.

        Args:
            repo_id: `owner/name`, made if missing; a name alone is one's account's.
            **how: of huggingface_hub's mixin: `branch`, `private`, `token`, `commit_message`, ...
        """
        place = f"{repo_id}@{how['branch']}" if how.get("branch") else repo_id
        card = {"place": place} | (how.pop("model_card_kwargs", None) or {})
        return str(super().push_to_hub(repo_id, model_card_kwargs=card, **how))

    def generate_model_card(self, **how: Any) -> ModelCard:
        """The card of these gates (`retain.gates.card.card_of`, whose arguments `model_card_kwargs` are)."""
        return import_module("retain.gates.card").card_of(self.metadata, **how)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a gate, ascending."""
        return tuple(int(name) for name in self.gates)

    @property
    def family(self) -> str:
        return self[self.layers[0]].family

    @property
    def inputs(self) -> frozenset[str]:
        """Inputs that the gates read, of `INPUTS`."""
        return self[self.layers[0]].inputs

    @property
    def ages(self) -> bool:
        return self[self.layers[0]].ages

    @property
    def unit(self) -> str:
        """Unit of the score: `risk`, `mass` or `rank`.

        That of the family, unless the gates learned a number of another unit (`score_unit` of the artifact:
        KVzap's regresses attention over a hidden norm), or are calibrated.
        """
        for calibrator in self.calibrators.values():
            return str(calibrator.unit)
        return str(self.metadata.get("score_unit") or UNITS[self[self.layers[0]].unit])

    @property
    def contextual(self) -> bool:
        return self[self.layers[0]].contextual

    def threshold_for(self, keep_ratio: float) -> float:
        """Threshold on the score that keeps, on average, this share of the unprotected entries of the
        held-out calibration documents; for `retain.Cache(model, "gate", threshold=...)`.

        Single documents keep more or less; their spread is in `metadata["calibration"]`. Between two points
        of the stored curve (.02 apart) thresholds are interpolated.

        Args:
            keep_ratio: in 0..1, between those of the stored curve.

        Raises:
            ValueError: no curve was stored, or it does not reach that far.
        """
        curve = (self.metadata.get("calibration") or {}).get("curve") or {}
        ratios = curve.get("keep_ratio") or [math.nan]
        if not ratios[0] <= keep_ratio <= ratios[-1]:
            known = f"{ratios[0]:g} .. {ratios[-1]:g}" if curve else "none"
            raise ValueError(
                f"these gates know no threshold for keep_ratio={keep_ratio}, but for {known}: train them "
                "with calibration.kind shared (train/distill.py), or state a budget (keep_ratio=...)."
            )
        return float(numpy.interp(keep_ratio, ratios, curve["threshold"]))

    def __getitem__(self, layer_idx: int) -> Gate:
        if str(layer_idx) not in self.gates:
            raise ValueError(
                f"there is no gate for layer {layer_idx}: gates exist for layers {list(self.layers)}."
            )
        gate = self.gates[str(layer_idx)]
        assert isinstance(gate, Gate)
        return gate

    @torch.no_grad()
    def learned(self, evidence: Evidence) -> Float[Tensor, "B H T"]:
        """Number stored with each entry for later evictions, float32: its score, or with `ages` the logarithm
        of its decay. Moves the gate to the layer's device.

        Args:
            evidence: the layer, with the gate's inputs.

        Raises:
            ValueError: if there is no gate for that layer, or an input is missing.
        """
        return self._learned(evidence)

    def _learned(self, evidence: Evidence) -> Float[Tensor, "B H T"]:
        gate = self[evidence.layer_idx]
        inputs = inputs_of(evidence, gate)
        _follow(gate, evidence.keys_BHTD.device)
        output_BHT = gate(inputs).float()
        if gate.ages:
            return output_BHT
        value_BHT = output_BHT.exp() if gate.unit == "log_risk" else output_BHT
        return self._calibrated(value_BHT, evidence.layer_idx)

    def _calibrated(self, value_BHT: Float[Tensor, "B H T"], layer_idx: int) -> Float[Tensor, "B H T"]:
        """Apply a layer's calibrator, if it has one."""
        if str(layer_idx) not in self.calibrators:
            return value_BHT
        calibrator = self.calibrators[str(layer_idx)]
        _follow(calibrator, value_BHT.device)
        return calibrator(value_BHT)

    def values(self, evidence: Evidence) -> Float[Tensor, "B H T"]:
        """Values of `score` with their graph to the gate's parameters, for losses on what was kept. Entries
        that do not exist have a number too.

        Raises:
            ValueError: as `learned`.
        """
        learned_BHT = self._learned(evidence) if evidence.learned_BHT is None else evidence.learned_BHT
        if not self.ages:
            return learned_BHT
        places_BT = evidence.places_BT
        newest_B1 = places_BT.masked_fill(~evidence.valid_BT, 0).amax(-1, keepdim=True)
        return self._calibrated(learned_BHT * (newest_B1 - places_BT)[:, None], evidence.layer_idx)

    @torch.no_grad()
    def score(self, evidence: Evidence) -> Score:
        """Score one layer's entries now.

        Of gates whose output ages, `score_i = (t - i) log beta_i` at the newest place `t` of the sequence:
        the order of TRIM-KV (arXiv 2512.03324), in `rank`; a calibrator is applied to that.

        Args:
            evidence: the layer, with the gate's inputs, or with `learned_BHT`, which `learned` gave when its
                entries came.

        Returns:
            `Score(values_BHT float32, unit)`, -inf on entries that do not exist.
        """
        return masked_score(self.values(evidence), evidence.exists_BHT, self.unit)


def _follow(module: nn.Module, device: torch.device) -> None:
    """Move a gate or calibrator to its layer's device: a model may lie on several, and gates know of none."""
    if module.device != device:
        with torch.inference_mode(False):  # whose tensors could not be trained again
            module.to(device)


def _check_alike(gates: Mapping[int, Gate], calibrators: Mapping[int, nn.Module]) -> None:
    """Refuse gates or calibrators that cannot make one score."""
    sides = {layer: (gate.family, sorted(gate.inputs), gate.contextual) for layer, gate in gates.items()}
    heads = {layer: gate.H for layer, gate in gates.items()}
    curves = {layer: each.H for layer, each in calibrators.items()}
    units = {str(each.unit) for each in calibrators.values()}
    if len({*map(str, sides.values())}) > 1 or (calibrators and (curves != heads or len(units) > 1)):
        raise ValueError(
            f"a gate set scores all its layers alike: got {sides} (family, inputs, contextual) with KV heads "
            f"{heads}, and calibrators with {curves}. Build all layers with the same settings, and calibrate "
            "all of them, in one unit, or none."
        )


def inputs_of(evidence: Evidence, gate: Gate) -> GateInputs:
    """Take a gate's inputs from the evidence of its layer, the last S of whose entries have queries.

    Raises:
        ValueError: an input is missing.
    """
    found: dict[str, Any] = {
        name: getattr(evidence, name) for name in ("valid_BT", "scaling", "soft_cap", "sinks_Q")
    }
    if "lookahead" in gate.inputs:
        found["lookahead_keys_BHSD"] = evidence.lookahead_keys_BHSD
    for name in sorted(gate.inputs):
        field, axes, description = INPUTS[name]
        tensor = getattr(evidence, field)
        if name.endswith("_before"):
            rotary = evidence.rotary
            positions_BS = evidence.positions_BT[:, evidence.num_seen - tensor.shape[2] :]
            tensor = None if rotary is None else rotary.unrotate(tensor, positions_BS)
        if tensor is None:
            raise ValueError(
                f"the gate of layer {evidence.layer_idx} looks at {description}, which this evidence does "
                "not hold: record it with retain.attach(model) and a retain.Cache made with these gates."
            )
        found[f"{name}_{axes}"] = tensor
        assert axes != "BQTD" or tensor.shape[2] == evidence.num_seen, "a query for each entry"
    return GateInputs(**found)

"""Checks that target, loss and gate go together, before anything is read."""

from retain.gates import Gate
from retain.gates.base import UNITS
from retain.train.objectives.case import LossSettings
from retain.train.objectives.losses import TERMS
from retain.train.objectives.targets import TargetSettings, target_unit
from retain.train.settings import refuse, unknown

BUDGETED = {"pairwise", "layer_output"}
# Terms that fit some units only.
UNITS_OF = {"bce": ("mass",), "smooth_l1": ("mass", "risk", "rank")}


def check_losses(settings: LossSettings) -> None:
    """Raises ValueError with all settings that mean nothing."""
    budgeted = sorted(BUDGETED & settings.terms.keys())
    refuse(
        (
            not any(settings.terms.values()),
            f"loss.terms={settings.terms} trains on nothing: give a term a positive weight",
        ),
        (
            budgeted and not settings.keep_ratios,
            f"loss.terms {', '.join(budgeted)} need at least one of loss.keep_ratios",
        ),
        (
            "pairwise" in settings.terms and settings.pairs < 1,
            f"loss.pairs={settings.pairs}: pairwise needs at least 1",
        ),
        found=unknown(settings.terms, TERMS, what="loss term", key="loss.terms"),
    )


def check_fit(settings: LossSettings, gate: Gate | type[Gate]) -> None:
    """Raises ValueError with all terms that say nothing about gates of this unit."""
    refuse(
        (
            gate.ages,
            f"gates of family {gate.family!r} say a decay per token, for which no layer-local target "
            "exists: train them with stage `end_to_end`",
        ),
        *(
            (
                name in settings.terms and gate.unit not in units,
                f"loss.terms.{name} is for gates whose output is {' or '.join(units)}, and that of "
                f"family {gate.family!r} is {gate.unit}: use mse",
            )
            for name, units in UNITS_OF.items()
        ),
    )


def check_unit(gate: Gate | type[Gate], target: TargetSettings) -> str:
    """Returns the unit of the score that gates of this family have after learning this target; ValueError: a
    gate that says a share of attention, asked for another number."""
    unit = target_unit(target)
    if gate.unit in ("risk", "log_risk"):
        return unit  # it learns whatever number it is shown, or its logarithm
    if gate.unit == "mass" and unit != "mass":
        raise ValueError(
            f"gates of family {gate.family!r} say attention (mass, 0..1), and target.weight={target.weight} "
            f"makes a target in {unit}: set target.weight=none, or choose gate.family=mlp."
        )
    return UNITS[gate.unit]

"""Checks that gates go with a policy, before anything is read: their unit, their weights, and the window that
they were trained for.
"""

from collections.abc import Mapping
from typing import Any

from retain.budget.statement import Budget
from retain.fusion import CALIBRATED, IN_RISK
from retain.policy import check_budget
from retain.presets import Policy
from retain.scores.trial import try_settings


def unit_of(gates: Any) -> str:
    """Unit of what stands in for a gate set, or is one: a control that does not say is in `risk`."""
    return str(getattr(gates, "unit", "risk"))


def check_gates(
    policy: Policy, budget: Budget, gates: Any, heads: Mapping[int, int], *, scored_elsewhere: bool = False
) -> str | None:
    """Refuse gates that a policy cannot use.

    Args:
        policy: a learned one.
        budget: as stated.
        gates: a `GateSet`, or what scores in its place.
        heads: layer index -> KV heads, of the layers that evict.
        scored_elsewhere: whether a function stands in for the policy's own observed score.

    Returns:
        what to warn of where the gates may not be what the policy is made for; None for nothing.

    Raises:
        ValueError: the gates know nothing of entries that the policy may evict; a fusion of unlike units,
            numbers wanted of a gate of which only the order means something, or calibrated weights that the
            gates were not given, or not for every head.
    """
    # What else scores in a gate's place (a control of an evaluation) may have no metadata.
    window = getattr(gates, "metadata", {}).get("protected_window") or 0
    if window > policy.protection.recent:
        raise ValueError(
            f"policy {policy.name!r} protects the last {policy.protection.recent} entries, and its gates "
            f"were trained for a protected window of {window}: of nearer entries they know nothing. Wanted: "
            f"protection.recent of at least {window}. Set protection.recent={window}, or train gates with a "
            f"smaller target.horizon (at most {policy.protection.recent})."
        )
    unit, problems = unit_of(gates), []
    observed = None
    if policy.observed is not None and not scored_elsewhere:
        tried, _ = try_settings(policy.observed, policy.observed_settings)
        observed = None if tried is None else tried.unit
    how = policy.fusion_of(policy.observed is not None or scored_elsewhere, True)
    alike = how in ("max", "sum") and observed is not None
    wanted = "risk" if how in IN_RISK else observed if alike else unit
    if unit != wanted:
        problems.append(
            f"fusion {how!r} wants a gate in {wanted!r}, and these gates are in {unit!r}: calibrate them to "
            "risk (train/distill.py, calibration.kind remap or shared), or take fusion 'rank_blend' or "
            "'learned', which take any unit"
        )
    made = "rank" if how == "rank_blend" else unit if how == "learned" else wanted
    own = policy.allocation
    by_value = ["allocation.layers 'entropy'"] if own.layers == "entropy" else []
    by_value += ["allocation.normalise"] if own.normalise is not None else []
    if made == "rank" and by_value and how != "observed":
        problems.append(
            f"{' and '.join(by_value)} want numbers, and the score is in 'rank', of which only the order "
            "means something: calibrate the gates to risk, or leave it out"
        )
    weights = getattr(gates, "fusion_weights", {})
    if policy.fusion_weight == CALIBRATED and how in weights:
        problems += _weight_problems(how, weights[how], heads)
    elif policy.fusion_weight == CALIBRATED:
        problems.append(
            f"fusion_weight 'calibrated' wants weights for fusion {how!r}, and these gates were given none: "
            "train them with calibration.fusion_weights true, or state fusion_weight as a number in 0..1"
        )
    if problems:
        raise ValueError(f"policy {policy.name!r} does not go with these gates: {'; '.join(problems)}.")
    if how not in ("observed", "learned"):
        check_budget(policy, budget, made)
    # Whoever names a gate alone and a scope has chosen to compare; what is made for risk is taken unawares.
    if how == "learned" and policy.draw is not None and unit == "rank" and policy.scope != "head":
        return (
            f"policy {policy.name!r} lets heads compete by the numbers of these gates, which are in 'rank': "
            "only their order inside a head is promised. That is right where one cut for all heads was "
            "trained; otherwise calibrate them to risk (train/distill.py, calibration.kind shared or remap), "
            "or take scope='head', draw=None."
        )
    return None


def _weight_problems(how: str, weights: Any, heads: Mapping[int, int]) -> list[str]:
    """What is wrong with the calibrated weights of a fusion: a layer without, another number of heads, or
    what is no weight."""
    wrong = []
    for layer_idx, H in heads.items():
        own = weights.get(str(layer_idx))
        if own is None:
            wrong.append(f"none for layer {layer_idx}")
        elif len(own) != H or not all(0 <= weight <= 1 for weight in own):
            wrong.append(f"{list(own)!s:.60} for layer {layer_idx}, which has {H} KV heads")
    if not wrong:
        return []
    more = f" (and {len(wrong) - 1} layers more)" if len(wrong) > 1 else ""
    return [
        f"fusion_weight 'calibrated' wants a weight in 0..1 for each head of every layer, and for fusion "
        f"{how!r} these gates have {wrong[0]}{more}: calibrate them again (train/distill.py, "
        "calibration.fusion_weights true), or state fusion_weight as a number in 0..1"
    ]

"""Checks that gates go with a policy, before anything is read: their unit, and the window that they were
trained for.
"""

from typing import Any

from retain.budget.statement import Budget
from retain.policy import check_budget
from retain.presets import Policy
from retain.scores.trial import try_settings


def unit_of(gates: Any) -> str:
    """Unit of what stands in for a gate set, or is one: a control that does not say is in `risk`."""
    return str(getattr(gates, "unit", "risk"))


def check_gates(policy: Policy, budget: Budget, gates: Any, *, scored_elsewhere: bool = False) -> str | None:
    """Refuse gates that a policy cannot use.

    Args:
        policy: a learned one.
        budget: as stated.
        gates: a `GateSet`, or what scores in its place.
        scored_elsewhere: whether a function stands in for the policy's own observed score.

    Returns:
        what to warn of where the gates may not be what the policy is made for; None for nothing.

    Raises:
        ValueError: the gates know nothing of entries that the policy may evict; a fusion of unlike units,
            or numbers wanted of a gate of which only the order means something.
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
    wanted = observed if alike else unit
    if unit != wanted:
        problems.append(
            f"fusion {how!r} wants a gate in {wanted!r}, and these gates are in {unit!r}: calibrate them to "
            "risk (train/distill.py, calibration.kind shared), or take fusion 'rank_blend' or "
            "'learned', which take any unit"
        )
    made = "rank" if how == "rank_blend" else unit if how == "learned" else wanted
    if made == "rank" and policy.layers == "entropy" and how != "observed":
        problems.append(
            "allocation.layers 'entropy' wants numbers, and the score is in 'rank', of which only the order "
            "means something: calibrate the gates to risk, or leave it out"
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
            "trained; otherwise calibrate them to risk (train/distill.py, calibration.kind shared), "
            "or take scope='head', draw=None."
        )
    return None

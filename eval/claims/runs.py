"""Finished runs that claims are checked on: several read as one, lines that play a part, conditions.

Runs that are read as one asked the same tasks, each in regimes of its own. They may differ in how many items
they asked, since a difference is always of two cells of one regime. The same name for another policy, or for
other gates, is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retain.eval.claims.claim import Condition, Conditions, Parts
from retain.eval.config import CONTROLS, FULL
from retain.eval.stats.comparisons import is_bound
from retain.eval.stats.summary import Cell, Scores, heuristics, preset_of
from retain.head_tables import TABLES
from retain.registry import suggest

ORACLE = "oracle"


@dataclass(frozen=True)
class Joined(Scores):
    """Scores of several runs: those of a regime (`of`) are of the run that measured it."""

    of: Mapping[str, Scores] = field(default_factory=dict)

    def strata(self, cell: Cell, tasks: Iterable[str]) -> list[np.ndarray]:
        """As of the run that measured the cell's regime."""
        return self.of[cell.regime].strata(cell, tasks)

    def seed_means(self, cell: Cell, tasks: Sequence[str]) -> dict[int, float]:
        """As of the run that measured the cell's regime."""
        return self.of[cell.regime].seed_means(cell, tasks)

    def num_items(self, tasks: Iterable[str]) -> int:
        """Clusters of these tasks, in the run that has the fewest."""
        names = [*tasks]
        return min(own.num_items(names) for own in self.of.values())


def join(runs: Sequence[tuple[Scores, Mapping[str, Any]]]) -> Scores:
    """Read the scores of several runs, each with its manifest, as those of one.

    Returns:
        Of one run its own scores; of several theirs, with the seeds of the run that has the fewest.

    Raises:
        ValueError: If two runs measured one regime, asked other tasks, or mean something else by a name.
    """
    if len(runs) == 1:
        return runs[0][0]
    of: dict[str, Scores] = {}
    problems = []
    names = [str(manifest.get("run", "unknown")) for _, manifest in runs]
    families = runs[0][0].families
    for place, ((scores, manifest), name) in enumerate(zip(runs, names, strict=True)):
        if twice := [regime for regime in scores.regimes if regime in of]:
            problems.append(f"{name} measured {', '.join(twice)}, and so did a run before it")
        of |= {regime: scores for regime in scores.regimes if regime not in of}
        if scores.families != families:
            problems.append(
                f"{name} asked the tasks {', '.join(scores.families)}, and {names[0]} asked "
                f"{', '.join(families)}"
            )
        problems += [
            f"{line!r} is {what} in {name} than in {other}"
            for (_, before), other in zip(runs[:place], names, strict=False)
            for line, what in _contradictions(before, manifest)
        ]
    if problems:
        raise ValueError(f"These runs cannot be read as one: {'; '.join(problems)}.")
    every = [scores for scores, _ in runs]
    smallest = min(every, key=lambda own: len({int(s) for seeds in own.seeds.values() for s in seeds}))
    cells = ("exact", "partial", "memory", "judged", "nulls", "attended")
    whole = {name: {at: one for own in every for at, one in getattr(own, name).items()} for name in cells}
    named = {n: frozenset(line for own in every for line in getattr(own, n)) for n in ("trained", "gated")}
    return Joined(**{**vars(smallest), **whole, **named, "of": of})


def policies_in(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Line -> the policy that a manifest says it resolved to."""
    found: Mapping[str, Any] = manifest.get("identity", {}).get("policies", {})
    return found


def _contradictions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines that two manifests mean other things by, and whether it is policy or gates."""
    one, other = policies_in(before), policies_in(after)
    for line in (line for line in one if line in other):
        if one[line] != other[line]:
            yield line, "another policy"
        if one[line].get("learned"):
            gates, others = gates_of(before, line), gates_of(after, line)
            if any(own != others[seed] for seed, own in gates.items() if seed in others):
                yield line, "scored by other gates"


def gates_of(manifest: Mapping[str, Any], policy: str) -> Mapping[str, Mapping[str, Any]]:
    """Seed -> facts that a manifest records of the gates that a line took; protections change no gates."""
    identity = manifest.get("identity", {})
    others: Mapping[str, Any] = identity.get("gates_of_policies", {})
    found: Mapping[str, Mapping[str, Any]] = others.get(preset_of(policy), identity.get("gates", {}))
    return found


def same_gates(manifests: Sequence[Mapping[str, Any]], policy: str) -> list[str]:
    """Lines, beside the policy, that are learned and take the policy's gates in every run that has both.
    Controls, by their name or by what is said of their gates, are left out."""
    found = []
    for line in dict.fromkeys(name for one in manifests for name in policies_in(one) if name != policy):
        there = [one for one in manifests if line in policies_in(one)]
        shared = all(
            policies_in(one)[line].get("learned") and gates_of(one, line) == gates_of(one, policy)
            for one in there
        )
        control = any("control" in gates for one in there for gates in gates_of(one, line).values())
        if shared and not control and not is_bound(line):
            found.append(line)
    return found


def parts_of(
    scores: Scores,
    manifests: Sequence[Mapping[str, Any]],
    *,
    policy: str,
    gate: str,
    oracle: str,
    also: Sequence[str] | None = None,
) -> Parts:
    """Find the parts of a run, or of several that are read as one.

    Args:
        manifests: Of the runs: the policies that they resolved say which lines read gates or head classes;
            runs that record none are taken to hold presets alone.
        also: Other lines that the policy is shown beside; None: those that take its gates and are no control.

    Raises:
        ValueError: If the run has no such line, or the three are not three. A run without the control
            `oracle` leaves the claims about it unmeasured.
    """
    own = {"policy": policy, "gate": gate, "oracle": oracle}
    problems = [
        f"{part} is {name!r}, which was not measured{suggest(name, scores.policies)}"
        for part, name in (*own.items(), *(("also", name) for name in also or ()))
        if name not in scores.policies and name != ORACLE
    ]
    if len({*own.values()}) < 3:
        problems.append(f"policy, gate and oracle must be three lines, got {policy}, {gate} and {oracle}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}. Measured: {', '.join(scores.policies)}.")
    resolved = {name: found for one in manifests for name, found in policies_in(one).items()}
    others = [name for name in scores.policies if name not in own.values()]
    beside = same_gates(manifests, policy) if also is None else also
    there = {(cell.regime, preset_of(cell.policy)) for cell in scores.judged}
    lacking = {
        regime: tuple(name for name in heuristics() if (regime, name) not in there)
        for regime in scores.regimes
    }
    return Parts(
        **own,
        heuristics=tuple(name for name in others if _untrained(name, resolved)),
        also=tuple(name for name in beside if name in others),
        unmeasured=lacking,
    )


def _untrained(name: str, resolved: Mapping[str, Any]) -> bool:
    """Whether a line of a run needs nothing trained or measured beforehand."""
    if name == FULL or preset_of(name) in CONTROLS:
        return False
    if name not in resolved:
        return name in heuristics()
    stated = {**resolved[name].get("allocation", {}), **resolved[name].get("observed_settings", {})}
    # Quotas of a budget may come from the gates' calibration as well.
    return not (resolved[name]["learned"] or any(stated.get(own) for own in (*TABLES, "quotas")))


def places_of(scores: Scores, policy: str) -> list[tuple[str, float]]:
    """Regimes and budgets at which a policy was measured."""
    return [
        (regime, budget)
        for regime in scores.regimes
        for budget in scores.budgets
        if Cell(regime, policy, budget) in scores.judged
    ]


def check_conditions(
    scores: Scores, parts: Parts, manifests: Sequence[Mapping[str, Any]], wanted: Conditions
) -> list[Condition]:
    """Check for enough items and seeds, items that nothing was chosen on, equal bytes, one set of gates, and
    finished runs of clean code; of several runs in each of them."""
    items = {task: scores.num_items([task]) for task in scores.families}
    rarest = min(items, key=lambda task: items[task])
    seeds = sorted({int(seed) for own in scores.seeds.values() for seed in own})
    largest, where = 0.0, ""
    for regime, budget in places_of(scores, parts.policy):
        own = Cell(regime, parts.policy, budget)
        for name in (*parts.heuristics, parts.gate, parts.oracle, *parts.also):
            off = abs(scores.bytes_apart(own._replace(policy=name), own) or 0.0)
            if off > largest:
                largest, where = off, f" ({name}, {regime}, {budget:g})"
    pairs = [[gates_of(one, name) for name in (parts.policy, parts.gate)] for one in manifests]
    shas = [[{str(one.get("sha256"))[:12] for one in gates.values()} for gates in pair] for pair in pairs]
    num_sets = min(len(of_policy) for of_policy, _ in shas)
    # A run that does not say where its items begin is one of those that began at 0.
    firsts = [(one.get("run", "unknown"), one.get("config", {}).get("first_item", 0)) for one in manifests]
    states = [state for one in manifests for state in one.get("code_states", [])]
    clean = all(one.get("code_states") for one in manifests) and all(state.get("clean") for state in states)
    checks = {
        f"at least {wanted.items} items a task": (
            items[rarest] >= wanted.items,
            f"{items[rarest]} ({rarest})",
        ),
        f"at least {wanted.seeds} seeds, each with gates of its own": (
            min(len(seeds), num_sets) >= wanted.seeds,
            f"seeds {', '.join(map(str, seeds))}; {num_sets} sets of gates",
        ),
        f"items that nothing was chosen on: from index {wanted.first_item} on": (
            all(first >= wanted.first_item for _, first in firsts),
            ", ".join(f"{run} from {first} on" for run, first in firsts),
        ),
        "equal achieved bytes in every cell": (
            largest <= wanted.bytes_apart,
            f"at most {100 * largest:.2f} % apart{where}",
        ),
        f"{parts.gate} and {parts.policy} take the same gates": (
            all(own == alone for own, alone in pairs),
            "sha256 " + ", ".join(sorted({sha for pair in shas for own in pair for sha in own})),
        ),
        "the run is finished": (
            all("finished" in one for one in manifests),
            ", ".join(str(one.get("finished", "not yet")) for one in manifests),
        ),
        "the code was clean": (clean, ", ".join(str(s.get("commit"))[:12] for s in states) or "unknown"),
    }
    return [Condition(text, *found) for text, found in checks.items()]

"""Several runs in, one set of scores out, for claims that speak of regimes which no single run measured.

In: the scores and manifests of runs that asked the same tasks, each in regimes of its own. Out: scores that
are read as those of one run; what the runs say of gates; which training-free presets nobody measured.

The one decision taken here: runs may differ in how many items they asked, since a difference is always of two
cells of one regime, but not in what a name stands for: another policy, or other gates, under the same name is
refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retain.eval.stats.comparisons import is_bound
from retain.eval.stats.summary import Cell, Scores, heuristics, preset_of


@dataclass(frozen=True)
class Joined(Scores):
    """Scores of several runs.

    Attributes:
        of: Regime -> the scores of its run.
    """

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
    """Read the scores of several runs as those of one.

    Args:
        runs: Scores and manifest of each.

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
    for (scores, manifest), name in zip(runs, names, strict=True):
        twice = [regime for regime in scores.regimes if regime in of]
        if twice:
            problems.append(f"{name} measured {', '.join(twice)}, and so did a run before it")
        of |= {regime: scores for regime in scores.regimes if regime not in of}
        if scores.families != runs[0][0].families:
            problems.append(
                f"{name} asked the tasks {', '.join(scores.families)}, and {names[0]} asked "
                f"{', '.join(runs[0][0].families)}"
            )
        problems += [
            f"{line!r} is {what} in {name} than in {other}"
            for (_, before), other in zip(runs, names[: names.index(name)], strict=False)
            for line, what in _apart(before, manifest)
        ]
    if problems:
        raise ValueError(f"These runs cannot be read as one: {'; '.join(problems)}.")
    every = [scores for scores, _ in runs]
    fewest = min(every, key=lambda own: len({int(s) for seeds in own.seeds.values() for s in seeds}))
    return Joined(
        **{
            name: {where: one for own in every for where, one in getattr(own, name).items()}
            for name in ("exact", "partial", "memory", "judged", "nulls", "attended")
        },
        seeds=fewest.seeds,
        clusters=fewest.clusters,
        families=fewest.families,
        trained=frozenset[str]().union(*(own.trained for own in every)),
        gated=frozenset[str]().union(*(own.gated for own in every)),
        of=of,
    )


def _apart(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines that two manifests mean other things by, and whether it is policy or gates."""
    found = []
    resolved = [one.get("identity", {}).get("policies", {}) for one in (before, after)]
    for line in (line for line in resolved[0] if line in resolved[1]):
        if resolved[0][line] != resolved[1][line]:
            found.append((line, "another policy"))
        gates = [gates_of(one, line) for one in (before, after)] if resolved[0][line].get("learned") else []
        if gates and any(gates[0][seed] != gates[1][seed] for seed in gates[0] if seed in gates[1]):
            found.append((line, "scored by other gates"))
    return found


def gates_of(manifest: Mapping[str, Any], policy: str) -> Mapping[str, Mapping[str, Any]]:
    """Seed by seed, what a manifest says of the gates that a line took; protections change no gates."""
    identity = manifest.get("identity", {})
    others: Mapping[str, Any] = identity.get("gates_of_policies", {})
    found: Mapping[str, Mapping[str, Any]] = others.get(preset_of(policy), identity.get("gates", {}))
    return found


def same_gates(manifests: Sequence[Mapping[str, Any]], policy: str) -> list[str]:
    """Lines, beside the policy, that are learned and take the policy's gates in every run that has both:
    controls, by their name or by what is said of their gates, are none."""
    found = []
    for line in dict.fromkeys(
        name for one in manifests for name in one.get("identity", {}).get("policies", {}) if name != policy
    ):
        there = [one for one in manifests if line in one.get("identity", {}).get("policies", {})]
        learned = all(one["identity"]["policies"][line].get("learned") for one in there)
        own = all(gates_of(one, line) == gates_of(one, policy) for one in there)
        if learned and own and not is_bound(line) and not any(_is_control(one, line) for one in there):
            found.append(line)
    return found


def _is_control(manifest: Mapping[str, Any], line: str) -> bool:
    return any("control" in own for own in gates_of(manifest, line).values())


def unmeasured(scores: Scores) -> dict[str, tuple[str, ...]]:
    """Regime -> the presets that need nothing trained or measured beforehand and have no line of their own
    there, under whatever protection."""
    found = {}
    for regime in scores.regimes:
        there = {preset_of(cell.policy) for cell in scores.judged if cell.regime == regime}
        found[regime] = tuple(name for name in heuristics() if name not in there)
    return found

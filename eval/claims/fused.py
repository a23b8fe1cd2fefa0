"""What the fused policy is claimed to do, checked on the rows of a finished comparison.

    python -m retain.eval.claims.fused results/RUN [results/RUN2 ...] [--policy fused --gate gate] [--check]

In: folders that `eval/compare.py` filled, each with regimes of its own. Out: `claims.md` and `claims.json` in
the first: four claims, each with one line for every regime, budget and task family that it speaks of, and the
conditions under which they may be read as claims at all.

- better: than the best heuristic and than the gate alone, in context_only at 0.1 and 0.2 (`BETTER_AT`);
- not worse: than the better of these two, by `MARGIN` points, in every regime of `WANTED_IN` at every budget
  of `WANTED_AT`, and wherever else the policy was measured;
- near the oracle: on seen tasks it loses at most `ORACLE_LOSS` points more than the oracle, in the regimes
  that have one (`SHARED`);
- gap closed: `(policy - best) / (oracle - best)`, wherever the oracle is `GAP_FROM` points or more above the
  best heuristic, is at least `SHARES`; in the same regimes.

A place that a claim speaks of and that was not measured is a line of its own, *not measured*, and the claim
does not hold. Which training-free presets were not measured is said, since the best heuristic is the best of
those that were.

The one decision taken here: a line *holds* where its interval and its test, if it has one, show it, *does not
hold* where its interval shows the opposite, and is *undecided* otherwise, whatever the estimate. The best
heuristic is the one with the highest mean of that very cell, chosen on the items that it is then compared on,
out of every line of the run that reads neither gates nor head classes, under whatever protection. Its mean is
therefore too high, and the differences to it are too small; "better" is said of that one, and not of each of
the others. Which cells have a gap to close is read from the same scores and leans the other way, so the cells
left out are printed with their gap. And the policy itself was chosen once: its items must be others
(`FRESH_FROM`).

The gate alone is a preset with a budget and a protection of its own, so that what the policy gains on it may
be these. Other lines (`--also`; by default every one with the policy's gates that is no control) are compared
beside, in families of their own, and nothing is claimed of them.

Better: the interval excludes 0 and the Holm-adjusted test passes; the four lines of the macro-average over
all tasks are one Holm family, each task family's four another, all other cells of either are shown as a
family of their own and claim nothing. Not worse and near the oracle rest on `retain.eval.stats.not_worse`
beside the interval, so that losses too rare to be seen count; of not worse all regimes and budgets are one
Holm family for each of the three macro-averages. Gap closed rests on its interval alone, whose coverage is
measured (`retain.eval.studies.interval_coverage`). The last two claims are conjunctions, which need no
adjustment: "all of them hold" is wrong with at most the probability of one.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retain.eval.claims.lines import Condition, FusedClaim, Line, Outcome, Parts, all_hold, write_claims
from retain.eval.claims.runs import gates_of, join, same_gates, unmeasured
from retain.eval.config import CONTROLS, FULL, SHARED
from retain.eval.run.results_store import read_manifest, read_rows
from retain.eval.stats.not_worse import ONE_SIDED, NotWorse, not_worse, step_down
from retain.eval.stats.significance import Interval, macro_mean, paired_interval, ratio_interval
from retain.eval.stats.summary import (
    ALL,
    FAMILIES,
    SAME_BYTES,
    Cell,
    Comparison,
    Scores,
    best_of,
    compare_family,
    gather,
    heuristics,
)
from retain.eval.tasks.suites import tasks_of
from retain.process.command import status_of
from retain.registry import suggest

ORACLE = "oracle"
# Stated before any run.
BETTER_IN, BETTER_AT = "context_only", (0.1, 0.2)
WANTED_IN, WANTED_AT = ("context_only", "query_aware", "chunked", "decode"), (0.05, 0.1, 0.2, 0.4)
MARGIN = 2.0
ORACLE_LOSS: Mapping[float, float] = {0.1: 3.0, 0.2: 2.0}
GAP_FROM = 5.0
SHARES: Mapping[str, float] = {"seen": 0.95, "held-out": 0.8}
ITEMS_WANTED, SEEDS_WANTED = 200, 3
# The policy was chosen on items of lower indices: scratch from 0 on, studies from 2,000 and from 4,000 on.
# Whoever chooses another by items from here on (configs/study begin beyond) moves this beyond them.
FRESH_FROM = 5000
# Of what is chosen on one half of the items and compared on the other.
SPLITS = 20


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
        scores: Of the runs.
        manifests: Of the runs: what their policies resolved to says which of them read gates or head classes.
            Those that do not say so are taken to hold presets alone.
        policy, gate, oracle: Lines of the runs.
        also: Other lines that the policy is shown beside; None: those that take its gates and are no control.

    Raises:
        ValueError: If the run has no such line, or the three are not three. A run without the control
            `oracle` leaves the claims about it unmeasured.
    """
    problems = [
        f"{part} is {name!r}, which was not measured{suggest(name, scores.policies)}"
        for part, name in (
            *(("policy", policy), ("gate", gate), ("oracle", oracle)),
            *(("also", name) for name in also or ()),
        )
        if name not in scores.policies and name != ORACLE
    ]
    if len({policy, gate, oracle}) < 3:
        problems.append(f"policy, gate and oracle must be three lines, got {policy}, {gate} and {oracle}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}. Measured: {', '.join(scores.policies)}.")
    resolved = {name: own for one in manifests for name, own in _resolved(one).items()}
    found = [
        name for name in scores.policies if name not in (policy, gate, oracle) and _untrained(name, resolved)
    ]
    beside = [
        name
        for name in (same_gates(manifests, policy) if also is None else also)
        if name in scores.policies and name not in (policy, gate, oracle)
    ]
    return Parts(policy, gate, oracle, tuple(found), tuple(beside), unmeasured(scores))


def _resolved(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = manifest.get("identity", {}).get("policies", {})
    return found


def _untrained(name: str, resolved: Mapping[str, Any]) -> bool:
    """Whether a line of a run needs nothing trained or measured beforehand."""
    if name == FULL or name.partition("+")[0] in CONTROLS:
        return False
    if name not in resolved:
        return name in heuristics()
    own = resolved[name]
    beforehand = own.get("allocation", {})
    # What a budget is shared out by may come from the gates' calibration as well.
    return not (own["learned"] or beforehand.get("head_classes") or beforehand.get("quotas"))


def groups_of(scores: Scores) -> list[str]:
    """Macro-averages that a run has, the one that claims rest on first: over all tasks, then over each task
    family; of a run with one family only that."""
    families = [family for family in FAMILIES if scores.tasks(family)]
    return [ALL, *families] if len(families) > 1 else families


def places_of(scores: Scores, parts: Parts) -> list[tuple[str, float]]:
    """Regimes and budgets at which the policy was measured."""
    return [
        (regime, budget)
        for regime in scores.regimes
        for budget in scores.budgets
        if Cell(regime, parts.policy, budget) in scores.judged
    ]


def missing_places(scores: Scores, parts: Parts, regimes: Sequence[str]) -> list[tuple[str, float]]:
    """What is wanted of these regimes and was not measured."""
    there = places_of(scores, parts)
    return [place for place in itertools.product(regimes, WANTED_AT) if place not in there]


def differences(scores: Scores, own: Cell, other: Cell, family: str) -> list[np.ndarray]:
    """One array per task, in points: own minus other on the same clusters."""
    tasks = scores.tasks(family)
    pairs = zip(scores.strata(own, tasks), scores.strata(other, tasks), strict=True)
    return [a - b for a, b in pairs]


def _line(
    scores: Scores, own: Cell, other: Cell, family: str, interval: Interval, outcome: Outcome, **more: Any
) -> Line:
    """A line of two cells that were compared: what was found, and beside it means, counts, seeds and tasks.

    Args:
        scores: Of the run.
        own, other: Compared on the tasks of a family.
        family: Of tasks.
        interval: Of what the line is about.
        outcome: Of the line.
        more: Other fields of it.
    """
    tasks, full = scores.tasks(family), Cell(own.regime, FULL, 1.0)
    made = differences(scores, own, other, family)
    seeds = scores.seed_means(own, tasks), scores.seed_means(other, tasks)
    found: dict[str, Any] = {
        "outcome": outcome,
        "required": True,
        "regime": own.regime,
        "budget": own.budget,
        "family": family,
        "against": other.policy,
        "estimate": interval.estimate,
        "low": None if interval.undefined else interval.low,
        "high": None if interval.undefined else interval.high,
        "policy_mean": scores.mean(own, tasks),
        "against_mean": scores.mean(other, tasks),
        "full_mean": scores.mean(full, tasks) if full in scores.judged else None,
        "num_items": sum(values.size for values in made),
        "num_differ": sum(int(np.count_nonzero(values)) for values in made),
        "by_seed": {seed: mean - seeds[1][seed] for seed, mean in seeds[0].items()},
        "by_task": {task: float(values.mean()) for task, values in zip(tasks, made, strict=True)},
    }
    return Line(**(found | more))


def check_better(scores: Scores, parts: Parts, *, resamples: int) -> FusedClaim:
    """Better than the best heuristic and than the gate alone; a line for every regime and budget, of which
    those at `BETTER_IN`, `BETTER_AT` are required."""
    lines: list[Line] = []
    groups = groups_of(scores)
    wanted = [(BETTER_IN, budget) for budget in BETTER_AT]
    others = [place for place in places_of(scores, parts) if place not in wanted]
    for group in groups:
        for places in (wanted, others):
            required = places is wanted and group == groups[0]
            found = [
                (place, name, best_of(scores, names, *place, group))
                for place in places
                for name, names in (("best heuristic", parts.heuristics), (parts.gate, (parts.gate,)))
            ]
            pairs = [
                (Cell(place[0], parts.policy, place[1]), Cell(place[0], other or "", place[1]), group)
                for place, _, other in found
            ]
            made = compare_family(scores, pairs, margin=MARGIN, resamples=resamples)
            for (place, name, _), pair, one in zip(found, pairs, made, strict=True):
                if one is None:
                    lines.append(Line("not measured", required, *place, group, name))
                    continue
                lines.append(_better(scores, pair, one, required, name == "best heuristic"))
        pairs = _beside(scores, parts, group)
        for pair, one in zip(
            pairs, compare_family(scores, pairs, margin=MARGIN, resamples=resamples), strict=True
        ):
            assert one is not None
            lines.append(_better(scores, pair, one, False, False))
    text = (
        f"{BETTER_IN}, keep_ratio {' and '.join(f'{own:g}' for own in BETTER_AT)}: {parts.policy} is better "
        f"than the best heuristic and than {parts.gate} alone"
    )
    return FusedClaim("better", text, tuple(lines))


def _beside(scores: Scores, parts: Parts, group: str) -> list[tuple[Cell, Cell, str]]:
    """The policy and every line to be shown beside it, at every place that has both."""
    return [
        (Cell(regime, parts.policy, budget), Cell(regime, name, budget), group)
        for regime, budget in places_of(scores, parts)
        for name in parts.also
        if Cell(regime, name, budget) in scores.judged
    ]


def _better(
    scores: Scores, pair: tuple[Cell, Cell, str], made: Comparison, required: bool, chosen: bool
) -> Line:
    word = made.verdict
    outcome: Outcome = "undecided"
    if word == "better":
        outcome = "holds"
    elif word in ("worse", "identical"):
        outcome = "does not hold"
    note = f"{word}{', best of all heuristics here' if chosen else ''}"
    return _line(scores, *pair, made.interval, outcome, required=required, p=made.result.holm_p, note=note)


def check_not_worse(scores: Scores, parts: Parts) -> FusedClaim:
    """Not worse than the better of best heuristic and gate by `MARGIN` points, wherever it is wanted and
    wherever it was measured.

    It holds where the 95 % interval lies above -`MARGIN` and the Holm-adjusted p is below 2.5 %; it does not
    where the interval, which is not adjusted, lies below.
    """
    lines: list[Line] = []
    groups = groups_of(scores)
    for group in groups:
        cells: list[tuple[Cell, Cell]] = []
        for regime, budget in (*places_of(scores, parts), *missing_places(scores, parts, WANTED_IN)):
            own = Cell(regime, parts.policy, budget)
            rivals = [
                best_of(scores, names, regime, budget, group) for names in (parts.heuristics, (parts.gate,))
            ]
            best = best_of(scores, [name for name in rivals if name], regime, budget, group)
            if best is None or None in rivals or own not in scores.judged:
                missing = Line("not measured", group == groups[0], regime, budget, group, "the best of all")
                lines.append(missing)
                continue
            cells.append((own, Cell(regime, best, budget)))
        lines += _not_worse(scores, cells, group, group == groups[0])
        beside = [(own, other) for own, other, _ in _beside(scores, parts, group)]
        lines += _not_worse(scores, beside, group, False)
    text = (
        f"{_listed(WANTED_IN)} at keep_ratio {_listed([f'{own:g}' for own in WANTED_AT])}, and wherever "
        f"else it was measured: {parts.policy} is not worse than the better of best heuristic and "
        f"{parts.gate}, by {MARGIN:g} points"
    )
    return FusedClaim("not worse", text, tuple(lines))


def _not_worse(scores: Scores, cells: Sequence[tuple[Cell, Cell]], group: str, required: bool) -> list[Line]:
    """The lines of one Holm family."""
    lines = []
    tests: list[NotWorse] = [not_worse(differences(scores, *pair, group), MARGIN) for pair in cells]
    for (own, other), step in zip(cells, step_down(tests, ONE_SIDED), strict=True):
        interval = paired_interval(differences(scores, own, other, group))
        outcome: Outcome = "undecided"
        if interval.low > -MARGIN and step.p < ONE_SIDED:
            outcome = "holds"
        elif interval.high < -MARGIN:
            outcome = "does not hold"
        more = {
            "required": required,
            "bound": -MARGIN,
            "p": step.p,
            "adjusted_low": None if step.end == -np.inf else step.end,
            "note": f"one of {len(tests)}",
        }
        lines.append(_line(scores, own, other, group, interval, outcome, **more))
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]


def check_near_oracle(scores: Scores, parts: Parts) -> FusedClaim:
    """On seen tasks at most `ORACLE_LOSS` points below the oracle: shown by the 95 % interval and by the
    one-sided test (`retain.eval.stats.not_worse`), neither adjusted; in the regimes of `SHARED`, and wherever
    else there is an oracle."""
    lines: list[Line] = []
    for budget, loss in ORACLE_LOSS.items():
        for regime in dict.fromkeys((*SHARED, *scores.regimes)):
            own, other = Cell(regime, parts.policy, budget), Cell(regime, parts.oracle, budget)
            if not scores.tasks("seen") or not {own, other} <= scores.judged.keys():
                lines.append(_without(scores, other, "seen", parts.oracle, bound=-loss))
                continue
            made = differences(scores, own, other, "seen")
            test, interval = not_worse(made, loss), paired_interval(made)
            outcome: Outcome = "undecided"
            if interval.low >= -loss and test.p < ONE_SIDED:
                outcome = "holds"
            elif interval.high < -loss:
                outcome = "does not hold"
            lines.append(_line(scores, own, other, "seen", interval, outcome, bound=-loss))
    said = " and ".join(f"{loss:g} at {budget:g}" for budget, loss in ORACLE_LOSS.items())
    text = (
        f"{_listed(SHARED)}, seen tasks: {parts.policy} loses at most so many points more than "
        f"{parts.oracle}: {said}"
    )
    return FusedClaim("near the oracle", text, tuple(lines))


def _without(scores: Scores, oracle: Cell, family: str, against: str, *, bound: float) -> Line:
    """A line of a place that was not measured. Only where a prefill is shared could there be an oracle:
    elsewhere the claim asks nothing."""
    required = oracle.regime in SHARED
    note = "" if required or oracle in scores.judged else "no oracle in this regime"
    place = (oracle.regime, oracle.budget, family)
    return Line("not measured", required, *place, against, bound=bound, note=note)


def check_gap_closed(scores: Scores, parts: Parts) -> FusedClaim:
    """The share of the gap between best heuristic and oracle that the policy closes,
    `(mean(policy) - mean(best)) / (mean(oracle) - mean(best))`, macro means of the same items for all three;
    a line for every place that is wanted or measured and every family of `SHARES`, "no gap" where oracle -
    best is below `GAP_FROM`. Where there can be no oracle nothing is asked.

    It holds where the 95 % interval of `policy - best - share * (oracle - best)` does not go below 0: that is
    where the ratio's interval (`retain.eval.stats.significance.ratio_interval`) does not go below the share.
    """
    lines: list[Line] = []
    for family, share in SHARES.items():
        if not scores.tasks(family):
            lines.append(Line("not measured", True, "any", 0.0, family, "best heuristic", bound=share))
            continue
        there = places_of(scores, parts)
        for regime, budget in (*there, *missing_places(scores, parts, SHARED)):
            best = best_of(scores, parts.heuristics, regime, budget, family)
            oracle = Cell(regime, parts.oracle, budget)
            if best is None or oracle not in scores.judged or (regime, budget) not in there:
                lines.append(_without(scores, oracle, family, "best heuristic", bound=share))
                continue
            lines.append(_closed(scores, parts, oracle, best, family, share))
    said = " and ".join(f"{100 * share:g} % ({family})" for family, share in SHARES.items())
    text = (
        f"{_listed(SHARED)}, wherever {parts.oracle} - best heuristic is {GAP_FROM:g} points or more: "
        f"{parts.policy} closes at least {said} of that gap"
    )
    return FusedClaim("gap closed", text, tuple(lines), of_gap=True)


def _closed(scores: Scores, parts: Parts, oracle: Cell, best: str, family: str, share: float) -> Line:
    own, base = oracle._replace(policy=parts.policy), oracle._replace(policy=best)
    won, gap = differences(scores, own, base, family), differences(scores, oracle, base, family)
    size = float(macro_mean(*gap))
    more: dict[str, Any] = {"bound": share, "gap": size}
    if size < GAP_FROM:
        nothing = Interval(0.0, -math.inf, math.inf, 0.95, "undefined", 0, 0)
        more |= {"required": False, "estimate": None, "by_seed": {}}
        return _line(scores, own, base, family, nothing, "no gap", **more)
    means = [scores.seed_means(cell, scores.tasks(family)) for cell in (own, base, oracle)]
    more["crossed"] = _crossed(scores, parts, oracle, family)
    more["by_seed"] = {
        seed: (mine - means[1][seed]) / (means[2][seed] - means[1][seed])
        for seed, mine in means[0].items()
        if means[2][seed] > means[1][seed]
    }
    # The same question without a division, which is 0 or more where the share is closed: the ratio's interval
    # holds the share where this one holds 0.
    left = [a - share * b for a, b in zip(won, gap, strict=True)]
    rest, interval = paired_interval(left), ratio_interval(won, gap)
    outcome: Outcome = "undecided"
    if rest.low >= 0:
        outcome = "holds"
    elif rest.high < 0:
        outcome = "does not hold"
    if interval.undefined or paired_interval(gap).low <= 0:
        more |= {"low": None, "high": None}
        more["note"] = (
            f"there may be no gap; judged by won - {share:g} gap: {rest.estimate:+.1f} {rest.spelled()}"
        )
    return _line(scores, own, base, family, interval, outcome, **more)


def _crossed(scores: Scores, parts: Parts, oracle: Cell, family: str) -> float | None:
    """The share closed with the heuristic chosen on one half of each task's items and compared on the other,
    summed over both ways of `SPLITS` splits; None where a task has one item, or no gap is left.

    Halves are drawn (seed 0): kinds of questions may take turns with the items, and a choice on one kind that
    is compared on another is no choice on other items."""
    tasks = scores.tasks(family)
    names = [name for name in parts.heuristics if oracle._replace(policy=name) in scores.judged]
    strata = {
        name: scores.strata(oracle._replace(policy=name), tasks)
        for name in (*names, parts.policy, parts.oracle)
    }
    if any(values.size < 2 for values in strata[parts.oracle]):
        return None
    rng = np.random.default_rng(0)
    won = gap = 0.0
    for _ in range(SPLITS):
        orders = [rng.permutation(values.size) for values in strata[parts.oracle]]
        for start in (0, 1):
            chosen, compared = (
                {
                    name: float(macro_mean(*(v[o[half::2]] for v, o in zip(own, orders, strict=True))))
                    for name, own in strata.items()
                }
                for half in (1 - start, start)
            )
            best = max(names, key=lambda name: chosen[name])
            won += compared[parts.policy] - compared[best]
            gap += compared[parts.oracle] - compared[best]
    return won / gap if gap > 0 else None


def check_conditions(scores: Scores, parts: Parts, manifests: Sequence[Mapping[str, Any]]) -> list[Condition]:
    """Enough items and seeds, items that nothing was chosen on, equal bytes, one set of gates, finished runs
    of clean code; of several runs in each of them."""
    items = {task: scores.num_items([task]) for task in scores.families}
    fewest = min(items, key=lambda task: items[task])
    seeds = sorted({int(seed) for own in scores.seeds.values() for seed in own})
    apart, where = 0.0, ""
    for regime, budget in places_of(scores, parts):
        own = Cell(regime, parts.policy, budget)
        for name in (*parts.heuristics, parts.gate, parts.oracle, *parts.also):
            off = abs(scores.bytes_apart(own._replace(policy=name), own) or 0.0)
            if off > apart:
                apart, where = off, f" ({name}, {regime}, {budget:g})"
    pairs = [[gates_of(one, name) for name in (parts.policy, parts.gate)] for one in manifests]
    of_run = [{str(one.get("sha256"))[:12] for one in own.values()} for own, _ in pairs]
    shas = min(of_run, key=len)
    every = {str(one.get("sha256"))[:12] for pair in pairs for own in pair for one in own.values()}
    # A run that does not say where its items begin is one of those that began at 0.
    firsts = [(one.get("run", "unknown"), one.get("config", {}).get("first_item", 0)) for one in manifests]
    states = [state for one in manifests for state in one.get("code_states", [])]
    clean = all(one.get("code_states") for one in manifests) and all(state.get("clean") for state in states)
    return [
        Condition(
            f"at least {ITEMS_WANTED} items a task",
            items[fewest] >= ITEMS_WANTED,
            f"{items[fewest]} ({fewest})",
        ),
        Condition(
            f"at least {SEEDS_WANTED} seeds, each with gates of its own",
            min(len(seeds), len(shas)) >= SEEDS_WANTED,
            f"seeds {', '.join(map(str, seeds))}; {len(shas)} sets of gates",
        ),
        Condition(
            f"items that nothing was chosen on: from index {FRESH_FROM} on",
            all(first >= FRESH_FROM for _, first in firsts),
            ", ".join(f"{run} from {first} on" for run, first in firsts),
        ),
        Condition(
            "equal achieved bytes in every cell",
            apart <= SAME_BYTES,
            f"at most {100 * apart:.2f} % apart{where}",
        ),
        Condition(
            f"{parts.gate} and {parts.policy} take the same gates",
            all(own == alone for own, alone in pairs),
            "sha256 " + ", ".join(sorted(every)),
        ),
        Condition(
            "the run is finished",
            all("finished" in one for one in manifests),
            ", ".join(str(one.get("finished", "not yet")) for one in manifests),
        ),
        Condition(
            "the code was clean", clean, ", ".join(str(s.get("commit"))[:12] for s in states) or "unknown"
        ),
    ]


def check_all(scores: Scores, parts: Parts, *, resamples: int) -> list[FusedClaim]:
    """The four claims."""
    return [
        check_better(scores, parts, resamples=resamples),
        check_not_worse(scores, parts),
        check_near_oracle(scores, parts),
        check_gap_closed(scores, parts),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check folders, write `claims.md` and `claims.json` in the first, and say how each claim came out."""
    parser = argparse.ArgumentParser(
        description="Check what the fused policy is claimed to do on a finished run."
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", help="results/<run>; several are read as one, each with own regimes"
    )
    parser.add_argument("--policy", default="fused", help="what the claims are about")
    parser.add_argument("--gate", default="gate", help="its own gate alone")
    parser.add_argument(
        "--also",
        action="append",
        help="another line that the policy is shown beside; again for more; default: all with its gates",
    )
    parser.add_argument("--oracle", default=ORACLE, help="the reference that knows the future")
    parser.add_argument("--resamples", type=int, default=5000, help="at most of a sign-flip test")
    parser.add_argument("--out", type=Path, help="where claims.md and claims.json go; default: the first")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every claim holds")
    given = parser.parse_intermixed_args(arguments)
    try:
        manifests = [read_manifest(folder) for folder in given.folders]
        runs = [
            (gather(read_rows(folder), tasks_of(manifest)), manifest)
            for folder, manifest in zip(given.folders, manifests, strict=True)
        ]
        scores = join(runs)
        names = {"policy": given.policy, "gate": given.gate, "oracle": given.oracle, "also": given.also}
        parts = parts_of(scores, manifests, **names)
        claims = check_all(scores, parts, resamples=given.resamples)
        conditions = check_conditions(scores, parts, manifests)
        options = {"resamples": given.resamples}
        path = write_claims(given.out or given.folders[0], manifests, parts, claims, conditions, options)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for condition in conditions:
        if not condition.holds:
            print(f"condition not met: {condition.text}: {condition.numbers}")
    for claim in claims:
        print(f"{claim.outcome}: {claim.text}")
    print(f"Claims: {path}, {path.with_suffix('.json')}")
    return 0 if not given.check or all_hold(claims, conditions) else 1


if __name__ == "__main__":
    sys.exit(status_of(main))

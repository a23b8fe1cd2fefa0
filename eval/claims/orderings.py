"""Published orderings: which method its paper says is better than which, and whether that holds here.

The rows (`configs/claims/orderings.yaml`) are written before the run that checks them. Each is a paired
difference over all tasks; all orderings of one regime, over all keep_ratios, are one Holm family. "better"
holds where the policy is better, whatever the size; "alike" where the difference is shown to lie within the
margin, whatever its sign. Findings that were published before this rule read the interval alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from retain.config import load
from retain.eval.claims.claim import shipped
from retain.eval.stats.significance import Interval
from retain.eval.stats.summary import ALL, ALPHA, Cell, Comparison, Scores, compare_family

Finding = Literal["holds", "does not hold", "inconclusive"]
Size = Literal["above", "within", "below", "open"]


@dataclass(frozen=True)
class Ordering:
    """One published ordering.

    Attributes:
        topic: Heading that it stands under.
        policy: What is said to be better.
        baseline: Than what.
        claim: What was published, in short.
        paper: arXiv id; empty where the comparison is this project's own.
        says: "better", or "alike" where text and code differ and are published as one method.
        regimes: Where numbers were published; empty: nowhere.
        keep_ratios: At which shares; empty: at a number of entries, so that only the regime is compared.
        also: Other headings that it speaks of, which refer to it.
    """

    topic: str
    policy: str
    baseline: str
    claim: str
    paper: str = ""
    says: Literal["better", "alike"] = "better"
    regimes: tuple[str, ...] = ()
    keep_ratios: tuple[float, ...] = ()
    also: tuple[str, ...] = ()

    def covers(self, regime: str, keep_ratio: float) -> bool:
        """Whether it was published there; one method under two names is meant everywhere."""
        if self.says == "alike":
            return True
        return regime in self.regimes and (not self.keep_ratios or keep_ratio in self.keep_ratios)


@dataclass(frozen=True)
class Checked:
    """An ordering at one regime and keep_ratio.

    Attributes:
        ordering: The row.
        made: Policy minus baseline.
        finding: Of interval and adjusted test.
        size: Place of the interval against the margin; "open": over one of its ends.
        published: Whether the ordering was published there; if not, it is extrapolated.
        recovery: Of protection on against off, (on - off) / (full - off); None where the full cache is not
            ahead.
    """

    ordering: Ordering
    made: Comparison
    finding: Finding
    size: Size
    published: bool
    recovery: float | None = None


# Of policies under X and X_bare, protection on and off; and where one end of it is on.
PROTECTION = "Protection of both ends, on against off"
ENDS = "Protection of one end, and of another kind"


@dataclass(frozen=True)
class OrderingsConfig:
    """The file of orderings: each pair of policies once (`*` is a policy that a run has, `*_bare` the same
    with that ending), and notes for readers of a topic's rows."""

    rows: tuple[Ordering, ...]
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)


@cache
def load_orderings() -> OrderingsConfig:
    """Read `configs/claims/orderings.yaml`."""
    return load(shipped("orderings"), OrderingsConfig)


def orderings_of(scores: Scores) -> list[Ordering]:
    """Rows of which a run has both policies."""
    measured = scores.policies
    found = [
        replace(row, policy=row.policy.replace("*", name), baseline=row.baseline.replace("*", name))
        for row in load_orderings().rows
        for name in (measured if "*" in row.policy else ("",))
    ]
    return [one for one in found if {one.policy, one.baseline} <= set(measured)]


def check_orderings(scores: Scores, *, margin: float, resamples: int) -> list[Checked]:
    """Every ordering at every regime and keep_ratio of a run, over all tasks, each counting alike. Those of a
    regime are one Holm family. The margin is that of verdicts, sizes and "alike", in points.
    """
    places = [
        (one, (Cell(regime, one.policy, ratio), Cell(regime, one.baseline, ratio)))
        for one in orderings_of(scores)
        for regime in scores.regimes
        for ratio in scores.budgets
    ]
    places = [(one, pair) for one, pair in places if {*pair} <= scores.exact.keys()]
    settled: dict[tuple[Cell, Cell], Comparison] = {}
    for regime in scores.regimes:
        pairs = [pair for _, pair in places if pair[0].regime == regime]
        made = compare_family(scores, [(*pair, ALL) for pair in pairs], margin=margin, resamples=resamples)
        settled |= {pair: one for pair, one in zip(pairs, made, strict=True) if one is not None}
    return [
        Checked(
            one,
            settled[pair],
            finding_of(one, settled[pair], margin),
            size_of(settled[pair].interval, margin),
            published=one.covers(pair[0].regime, pair[0].budget),
            recovery=_recovery(scores, *pair) if one.topic == PROTECTION else None,
        )
        for one, pair in places
    ]


def finding_of(ordering: Ordering, made: Comparison, margin: float) -> Finding:
    """The finding of a comparison on an ordering.

    "better" holds where the verdict is better, and does not where it is worse or the difference is shown to
    be no more than the margin. "alike" holds where the interval lies within the margin and the adjusted
    equivalence test passes, also where the difference is certain; it does not where the interval lies beyond
    the margin and the verdict says so. What its family does not bear is inconclusive.
    """
    if ordering.says == "alike":
        size, result = size_of(made.interval, margin), made.result
        p = result.within_p if result.holm_within_p is None else result.holm_within_p
        if made.verdict == "identical" or (size == "within" and p < ALPHA):
            return "holds"
        beyond = size in ("above", "below") and made.verdict in ("better", "worse")
        return "does not hold" if beyond else "inconclusive"
    if made.verdict == "inconclusive":
        return "inconclusive"
    return "holds" if made.verdict == "better" else "does not hold"


def size_of(interval: Interval, margin: float) -> Size:
    """Place of an interval against the margin."""
    if -margin < interval.low and interval.high < margin:
        return "within"
    if interval.low >= margin:
        return "above"
    return "below" if interval.high <= -margin else "open"


def _recovery(scores: Scores, on: Cell, off: Cell) -> float | None:
    """Share of what eviction costs that protection wins back."""
    full, tasks = Cell(on.regime, "full", 1.0), scores.tasks(ALL)
    if full not in scores.exact:
        return None
    lost = scores.mean(full, tasks) - scores.mean(off, tasks)
    return (scores.mean(on, tasks) - scores.mean(off, tasks)) / lost if lost > 0 else None


def in_words(findings: Mapping[float, str]) -> str:
    """Findings, or sizes, by keep_ratio as one phrase: "holds", or which where."""
    kinds = list(dict.fromkeys(findings.values()))
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(
        f"{kind} at {', '.join(f'{ratio:g}' for ratio, own in findings.items() if own == kind)}"
        for kind in kinds
    )

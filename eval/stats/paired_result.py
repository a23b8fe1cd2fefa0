"""Compares two policies on the same items: estimate, interval, tests and verdict.

`compare_paired` makes one `PairedResult`; `adjust` takes the family of comparisons that was declared before
the run and gives each its Holm p and its final word.

The final word starts from what the interval shows (`retain.eval.stats.significance.verdict`) and stands only
if the tests of the family support it:

- identical: the two agree on every cluster; nothing is tested;
- better / worse: the interval excludes 0 *and* the Holm-adjusted p of the difference test is below alpha;
- equivalent: neither of these, the interval lies strictly inside (-margin, +margin) *and* the Holm-adjusted p
  of "the difference is at least the margin" (`retain.eval.stats.not_worse.within`) is below alpha;
- inconclusive: everything else.

A sixth, "unjudged", is given to comparisons that are shown and not tested (`retain.eval.stats.comparisons`).

So no word says more than the interval printed beside it, and a large family makes words rarer, never bolder.
The difference p values are one Holm family and those of equivalence another, each at alpha; the two null
hypotheses of one comparison (no difference; a difference of at least the margin) exclude each other. TOST,
the t tests that papers print, is no part of it: where rare items lose everything and the others next to
nothing, most runs of fifty items hold no such item, and t says "equivalent" of them. The difference test is
the sign-flip test of the macro mean (the exact McNemar test where scores are 0 or 1 and there is one stratum,
which is the same test counted exactly). Wilcoxon's test is printed and decides nothing: it is about ranks,
not about the mean.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from retain.eval.stats.not_worse import WORST, within
from retain.eval.stats.paired_tests import (
    ExactBinary,
    SignedRank,
    SignFlip,
    exact_mcnemar,
    holm,
    sign_flip,
    signed_rank,
)
from retain.eval.stats.significance import Interval, Verdict, checked_strata, paired_interval, verdict

Name = TypeVar("Name", bound=Hashable)

# Equal scores that were computed in two ways may differ in their last bit, and no test would take them for
# equal: what is smaller than this share of the largest score is rounding, not a difference.
ROUNDING = 1e-12


@dataclass(frozen=True)
class PairedResult:
    """Policy minus baseline: estimate, interval, tests and verdict.

    Attributes:
        estimate: Macro mean of the differences.
        interval: Of the estimate.
        signed_rank: Wilcoxon's test of the differences, strata pooled; decides nothing.
        sign_flip: Of the macro mean.
        mcnemar: Exact McNemar where every score is either 0 or one other value (1, or 100 points) and
            there is one stratum; otherwise None.
        margin: Largest difference that does not matter, as stated.
        within_p: Raw p of "the difference is at least the margin", of the verdict "equivalent".
        num_clusters: Scores on each side.
        test, p: The difference test, and its raw p.
        verdict: In one word, for a family of this comparison alone until `adjust` has seen the others.
        alpha: Level of every test that the verdict rests on.
        holm_p, holm_within_p: `p` and `within_p` adjusted within their families; None before `adjust`.
        family_size: Comparisons declared; None before `adjust`.
    """

    estimate: float
    interval: Interval
    signed_rank: SignedRank
    sign_flip: SignFlip
    mcnemar: ExactBinary | None
    margin: float
    within_p: float
    num_clusters: int
    test: Literal["sign-flip", "mcnemar"]
    p: float
    verdict: Verdict
    alpha: float
    holm_p: float | None = None
    holm_within_p: float | None = None
    family_size: int | None = None


def supported_verdict(
    interval: Interval, margin: float, *, p: float, within_p: float, alpha: float
) -> Verdict:
    """The word of an interval, if the tests support it (rule: this file's docstring); `p`, of the difference
    test, and `within_p`, of "the difference is at least the margin", are adjusted for their families."""
    word = verdict(interval, margin)
    if word == "identical" or (word in ("better", "worse") and p < alpha):
        return word
    # A difference that the family cannot bear may still be shown to be small.
    inside = -margin < interval.low and interval.high < margin
    return "equivalent" if inside and within_p < alpha else "inconclusive"


def compare_paired(
    policy: Sequence[np.ndarray],
    baseline: Sequence[np.ndarray],
    *,
    margin: float,
    level: float = 0.95,
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
    worst: float = WORST,
) -> PairedResult:
    """Compare two policies that answered the same items.

    Differences are taken per cluster, and a task (stratum) counts as much as any other:
    `(1/K) * sum_k mean_c (a_kc - b_kc)`. The result does not depend on the order within a stratum.

    Args:
        policy: Scores, higher is better, one array per stratum, one number per cluster.
        baseline: Scores of the same clusters in the same order.
        margin: Largest difference that does not matter, in the unit of the scores, > 0, stated before the
            run: 0.02 for an F1 in [0, 1], 2 for points of 100.
        level: Of the interval.
        alpha: Level of the tests behind the verdict.
        resamples, seed: Of the sign-flip test.
        worst: The most that two scores of one item can differ, the width of the scale: 100 of points, 1 of
            scores in [0, 1]. "Equivalent" has to hold against unseen items.

    Returns:
        The result, with the verdict of a family of one. `adjust` it together with its family.

    Raises:
        ValueError: If the scores do not pair up, hold a nan, differ by more than `worst`, or the margin is
            not positive.

    Examples:
        >>> scores = [np.array([1.0, 0.0, 1.0])]
        >>> compare_paired(scores, scores, margin=0.02, worst=1.0).verdict
        'identical'
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha}.")
    own, other = (checked_strata(one, "compare_paired") for one in (policy, baseline))
    sizes = [[stratum.size for stratum in side] for side in (own, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"Paired scores need the same items on both sides, got {sizes[0]} and {sizes[1]}.")
    values = np.unique(np.concatenate([*own, *other]))
    rounding = ROUNDING * float(np.abs(values).max())
    # Other differences stay as they are: 0.3 - 0.2 and 0.2 - 0.1 are no tie to a rank test, here as in scipy.
    # Sorted, no sum depends on the order of the rows.
    differences = [
        np.sort(np.where(np.abs(a - b) <= rounding, 0.0, a - b)) for a, b in zip(own, other, strict=True)
    ]
    inside = within(differences, margin, worst)
    interval = paired_interval(differences, level=level)
    flip = sign_flip(differences, resamples=resamples, seed=seed)
    binary = None
    if len(own) == 1 and np.count_nonzero(values) <= 1:  # 0 and 1, or 0 and 100 in points
        binary = exact_mcnemar(own[0] != 0, other[0] != 0)
    p = flip.p if binary is None else binary.p
    return PairedResult(
        estimate=interval.estimate,
        interval=interval,
        signed_rank=signed_rank(np.concatenate(differences)),
        sign_flip=flip,
        mcnemar=binary,
        margin=margin,
        within_p=inside,
        num_clusters=sum(sizes[0]),
        test="sign-flip" if binary is None else "mcnemar",
        p=p,
        verdict=supported_verdict(interval, margin, p=p, within_p=inside, alpha=alpha),
        alpha=alpha,
    )


def adjust(
    results: Mapping[Name, PairedResult],
    *,
    declared: Collection[Name] | None = None,
    alpha: float | None = None,
) -> dict[Name, PairedResult]:
    """Judge a family of comparisons together: Holm-adjusted p values and final verdicts.

    Args:
        results: All comparisons of the family by name, from `compare_paired`.
        declared: The names that were fixed before the run. A name that is declared and not compared, or the
            other way round, is refused: a family that shrinks or grows after the run adjusts for nothing.
        alpha: Level of the family; None takes the results' own.

    Returns:
        The results in the same order, with `holm_p`, `holm_within_p`, `family_size`, `alpha` and
        `verdict` of the family.

    Raises:
        ValueError: If the family is empty, is not the declared one, mixes levels, or is so large that a
            sign-flip test which drew its smallest p could still not pass: then more resamples are needed.

    Examples:
        >>> scores = [np.array([1.0, 0.0, 1.0])]
        >>> same = compare_paired(scores, scores, margin=0.02)
        >>> adjust({"task A": same, "task B": same})["task A"].family_size
        2
    """
    if not results:
        raise ValueError("adjust needs at least one comparison, got none.")
    if declared is not None:
        missing = [name for name in declared if name not in results]
        extra = [name for name in results if name not in declared]
        if missing or extra:
            raise ValueError(
                f"The family is fixed before the run: declared but not compared {missing}, compared but not "
                f"declared {extra}. Run what is missing, or judge what was added as a family of its own."
            )
    levels = {one.alpha for one in results.values()} if alpha is None else {alpha}
    if len(levels) > 1 or not all(0 < one < 1 for one in levels):
        raise ValueError(f"A family has one alpha in (0, 1), got {sorted(levels)}: pass alpha.")
    (level,) = levels
    size = len(results)
    for name, one in results.items():
        least = one.sign_flip.smallest_p
        if one.test == "sign-flip" and not one.sign_flip.exact and one.p <= least and size * least >= level:
            raise ValueError(
                f"{one.sign_flip.resamples} sign flips cannot give a p below {least:.2g}, too coarse for a "
                f"family of {size} at alpha {level} (comparison {name!r} is at that floor). Compare with "
                f"resamples={int(np.ceil(4 * size / level))}."
            )
    difference = holm([one.p for one in results.values()])
    inside = holm([one.within_p for one in results.values()])
    return {
        name: replace(
            one,
            holm_p=float(p),
            holm_within_p=float(q),
            family_size=size,
            alpha=level,
            verdict=supported_verdict(one.interval, one.margin, p=float(p), within_p=float(q), alpha=level),
        )
        for (name, one), p, q in zip(results.items(), difference, inside, strict=True)
    }

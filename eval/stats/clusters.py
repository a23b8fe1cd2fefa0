"""Pairs the scores of two policies and averages them by cluster.

A value is one score of one answer. Values that share a problem are not independent: the same item under
several seeds, or one problem sampled 32 times. They form a cluster, and clusters are what varies in an
interval and what a test counts. Which label makes a cluster says which question is asked:

- the item: its values over several seeds are averaged first, and items stay the unit;
- (seed, item): where every seed has items of its own, each pair stands for itself;
- the problem: repeated samples of one problem count once.

A cluster's values are *averaged* (`cluster_pairs`), so that every cluster weighs the same however often it
was sampled. `cluster_interval` keeps the other reading, the mean over all values.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from retain.eval.stats.significance import Interval, ratio_interval

Key = TypeVar("Key", bound=Hashable)
# One hashable label per value.
Labels = Sequence[Hashable] | np.ndarray

# Equal scores that were computed in two ways may differ in their last bit, and no test would take them for
# equal: what is smaller than this share of the largest score is rounding, not a difference.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Clustered:
    """Cluster means of two policies, one array per stratum, in an order that only their values decide.

    Attributes:
        strata: Labels, sorted.
        policy: Per stratum, one mean per cluster.
        baseline: The same for the baseline, same order.
        differences: Policy minus baseline; exactly 0 where they differ by rounding only.
        num_values: Values that went in.
    """

    strata: tuple[Hashable, ...]
    policy: tuple[np.ndarray, ...]
    baseline: tuple[np.ndarray, ...]
    differences: tuple[np.ndarray, ...]
    num_values: int

    @property
    def num_clusters(self) -> int:
        """Clusters over all strata."""
        return sum(stratum.size for stratum in self.policy)


def pair_items(
    policy: Mapping[Key, float], baseline: Mapping[Key, float]
) -> tuple[list[Key], np.ndarray, np.ndarray]:
    """Pair two sets of scores by their keys, never by the order of lines.

    Returns:
        The keys (items, or (task, seed, item)) in the policy's order, its scores, and the baseline's scores
        in the same order.

    Raises:
        ValueError: If one of the two lacks an item. A crashed or empty answer is a score of zero, not a gap.

    Examples:
        >>> keys, a, b = pair_items({"x": 1.0, "y": 0.0}, {"y": 0.5, "x": 1.0})
        >>> keys, (a - b).tolist()
        (['x', 'y'], [0.0, -0.5])
    """
    lacking = {
        "baseline": [key for key in policy if key not in baseline],
        "policy": [key for key in baseline if key not in policy],
    }
    if any(lacking.values()) or not policy:
        named = "; ".join(f"the {side} lacks {len(k)}: {k[:5]}" for side, k in lacking.items() if k)
        raise ValueError(
            f"Paired scores need the same items on both sides, got {len(policy)} and {len(baseline)}"
            f"{': ' + named if named else ''}. Count a crashed or empty answer as 0 and list it as a null."
        )
    keys = list(policy)
    scores = np.array([(policy[key], baseline[key]) for key in keys], dtype=np.float64)
    return keys, scores[:, 0], scores[:, 1]


def _scores(values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    """Check one-dimensional float64 scores without NaN."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"{name} must be one-dimensional with at least one score, got shape {scores.shape}.")
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ValueError(
            f"{name} holds {bad.size} scores that are not finite, at positions {bad[:5].tolist()}. Count a "
            "crashed or empty answer as 0 and list it as a null."
        )
    return scores


def _checked_labels(labels: Labels, size: int, name: str) -> list[Hashable]:
    if len(labels) != size:
        raise ValueError(f"{name} needs one label per value: got {len(labels)} labels for {size} values.")
    own: list[Hashable] = list(labels.tolist() if isinstance(labels, np.ndarray) else labels)
    # A nan is unlike itself, so each would be a label of its own.
    bad = [place for place, label in enumerate(own) if label != label]
    if bad:
        raise ValueError(
            f"{name} holds {len(bad)} labels that are nan, at positions {bad[:5]}. Name the item, problem or "
            "task of each value; leave out values of which it is not known."
        )
    return own


def _groups(size: int, clusters: Labels | None, strata: Labels | None) -> dict[Hashable, list[list[int]]]:
    """Positions of each cluster's values, by stratum; a cluster never reaches over two strata."""
    own = range(size) if clusters is None else _checked_labels(clusters, size, "clusters")
    tasks = [None] * size if strata is None else _checked_labels(strata, size, "strata")
    found: dict[Hashable, dict[Hashable, list[int]]] = {}
    for position, (stratum, cluster) in enumerate(zip(tasks, own, strict=True)):
        found.setdefault(stratum, {}).setdefault(cluster, []).append(position)
    order = sorted(found, key=lambda label: (type(label).__name__, repr(label)))
    return {label: list(found[label].values()) for label in order}


def cluster_pairs(
    policy: Sequence[float] | np.ndarray,
    baseline: Sequence[float] | np.ndarray,
    *,
    clusters: Labels | None = None,
    strata: Labels | None = None,
) -> Clustered:
    """Average the values of each cluster: `a_c = (1/n_c) * sum_{i in c} a_i`, the same for the baseline.

    Args:
        policy: Scores, one per value.
        baseline: Scores of the same answers' items, in the same order (`pair_items` makes it so).
        clusters: A label per value: the item, (seed, item), or the problem. None: each value by itself.
        strata: A label per value, its task. None: one stratum. Equal cluster labels in two strata are two
            clusters.

    Returns:
        The cluster means and their differences, per stratum.

    Raises:
        ValueError: If lengths differ, there is nothing, a score is not finite, or a label is a nan.

    Examples:
        >>> made = cluster_pairs([1.0, 0.0, 1.0], [0.0, 0.0, 1.0], clusters=["x", "x", "y"])
        >>> made.num_clusters, sorted(made.differences[0].tolist())
        (2, [0.0, 0.5])
    """
    a, b = _scores(policy, "policy"), _scores(baseline, "baseline")
    if a.size != b.size:
        raise ValueError(f"Paired scores need equal lengths, got {a.size} and {b.size}: use pair_items.")
    groups = _groups(a.size, clusters, strata)
    scale = float(max(np.abs(a).max(), np.abs(b).max()))
    means: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for members in groups.values():
        # Rounded once (`math.fsum`), no mean depends on the order of its values.
        own, other = (np.array([math.fsum(x[one]) / len(one) for one in members]) for x in (a, b))
        # Other differences stay as they are: 0.3 - 0.2 and 0.2 - 0.1 are no tie to a rank test, here as in
        # scipy, so that anyone's `wilcoxon(x, y)` gives the same p (the protection study's own p among them).
        difference = np.where(np.abs(own - other) <= ROUNDING * scale, 0.0, own - other)
        # Sorted, neither a sum nor what a bootstrap draws depends on the order of the rows.
        order = np.lexsort((own, difference))
        means.append((own[order], other[order], difference[order]))
    policies, baselines, differences = zip(*means, strict=True)
    return Clustered(tuple(groups), policies, baselines, differences, a.size)


def cluster_interval(
    differences: Sequence[float] | np.ndarray,
    clusters: Labels,
    *,
    level: float = 0.95,
    resamples: int = 5000,
    seed: int = 0,
    method: str = "t",
) -> Interval:
    """Interval of the mean over all values, with whole clusters as the unit: `sum_c s_c / sum_c n_c`, where
    `s_c` is the sum of cluster c's differences and `n_c` their number
    (`retain.eval.stats.significance.ratio_interval`).

    A cluster of many values weighs more than one of few, which is what `cluster_pairs` avoids; with clusters
    of one size the two have the same estimate and the same interval. Clusters of unlike sizes say less than
    as many of one size: degrees of freedom are those of the effective number of clusters,
    `(sum_c n_c^2)^2 / sum_c n_c^4 - 1`, where values of a cluster say the same (Carter, Schnepel and
    Steigerwald, *Asymptotic Behavior of a t-Test Robust to Cluster Heterogeneity*, 2017).

    Args:
        differences: Policy minus baseline, one per value.
        clusters: A label per value.
        level, resamples, seed, method: As in `paired_interval`.

    Returns:
        The mean over all values with its interval, "undefined" for a single cluster that is not all zero, and
        where one cluster has so many of the values that the others say nothing of its kind.
        `num_items` counts clusters, and `num_nonzero` the clusters in which any value differs.

    Raises:
        ValueError: If lengths differ, there is nothing, a difference is not finite, or a label is a nan.
    """
    values = _scores(differences, "differences")
    (members,) = _groups(values.size, clusters, None).values()
    sums = np.array([math.fsum(values[one]) for one in members])
    sizes = np.array([float(len(one)) for one in members])
    nonzero = sum(bool(np.any(values[one])) for one in members)
    if not nonzero:
        return Interval(0.0, 0.0, 0.0, level, "constant", len(members), 0)
    order = np.lexsort((sizes, sums))
    effective = (sizes**2).sum() ** 2 / (sizes**4).sum()
    made = ratio_interval(
        [sums[order]],
        [sizes[order]],
        level=level,
        resamples=resamples,
        seed=seed,
        method=method,
        max_df=max(float(effective) - 1, 1.0),
    )
    return replace(made, num_nonzero=nonzero)

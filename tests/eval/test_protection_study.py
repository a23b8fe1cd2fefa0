"""The statistics against published rows: every figure of evaluation.md, section 5.3, whose rows are at hand.

The rows are the per-item scores of *Protection Is (Nearly) All You Need* (arXiv 2605.18053); the figures were
recomputed from them by other code. They test statistics, they are no target to reproduce (section 5.4).
"""

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from retain.eval.stats.clusters import cluster_pairs, pair_items
from retain.eval.stats.paired_result import PairedResult, adjust, compare_paired, supported_verdict
from retain.eval.stats.paired_tests import holm, signed_rank
from retain.eval.stats.significance import ratio_interval

ROWS = Path(__file__).resolve().parents[3] / "shared" / "data" / "protection_study_items.csv"
pytestmark = pytest.mark.skipif(not ROWS.exists(), reason=f"../shared/data/{ROWS.name} is absent")

N481 = "n481/qwen25-3b/q25-c256-"
SWEEP = "protection-sweep/q25-"
PHI = "phi35-multiarch/phi35-c256-"
PROT10 = "confound-fix/q25-c256-lru-protected"
FULL = "confound/q25-c2048-fullcache"


class Pair(NamedTuple):
    """One line of the section's table, as printed."""

    policy: str
    baseline: str
    num_items: int
    num_nonzero: int
    difference: str
    low: str
    high: str
    wilcox: str
    pratt: str
    tost: str
    statistic: str | None = None


PAIRS = {
    "prot10 - prot5": Pair(
        PROT10, f"{SWEEP}c256-lru-prot5", *(162, 50, "0.0350", ".0027", ".0681", "0.0156", "0.00242", "0.816")
    ),
    "prot15 - prot10": Pair(
        f"{SWEEP}c256-lru-prot15",
        PROT10,
        *(162, 33, "0.0031", "-.0093", ".0160", "0.514", "0.584", "0.00501"),
    ),
    "prot20 - prot10": Pair(
        f"{SWEEP}c256-lru-prot20", PROT10, *(162, 38, "0.0016", "-.0161", ".0196", "0.800", "0.549", "0.0233")
    ),
    "Phi-3.5 h2o+prot - lru+prot": Pair(
        f"{PHI}h2o-prot",
        f"{PHI}lru-prot",
        *(162, 96, "0.0013", "-.0108", ".0140", "0.980", "0.741", "0.00181"),
    ),
    "n481 prot - noprot": Pair(
        f"{N481}lru-prot",
        f"{N481}lru-noprot",
        *(481, 258, "0.2417", ".2109", ".2734", "1.01e-43", "7.9e-52", "1", "95"),
    ),
    "n481 adakv_f - lru": Pair(
        f"{N481}adakv_faithful-prot",
        f"{N481}lru-prot",
        *(481, 186, "0.0504", ".0313", ".0704", "5.271e-06", "2.345e-04", "0.999", "5347.5"),
    ),
}
INTERVAL_TOLERANCE = 2e-3


def half_a_unit(printed: str) -> float:
    """Half a unit of the last printed digit: 0.0005 for "0.514", 5e-10 for "5.271e-06"."""
    digits, _, exponent = printed.partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def agrees(value: float, printed: str) -> bool:
    """Whether a value rounds to what was printed."""
    return abs(value - float(printed)) <= half_a_unit(printed) * (1 + 1e-9)


@cache
def scores() -> dict[str, dict[int, float]]:
    """Token F1 by file and idx: rows pair by idx, never by line."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert int(row["idx"]) not in found[row["file"]]
            found[row["file"]][int(row["idx"])] = float(row["token_f1"])
    return dict(found)


@cache
def compared(name: str) -> PairedResult:
    """A line of the table, with the interval that the section prints: percentile, 10,000 resamples."""
    pair = PAIRS[name]
    _, a, b = pair_items(scores()[pair.policy], scores()[pair.baseline])
    return compare_paired(a, b, margin=0.02, method="percentile", resamples=10_000, seed=0, worst=1.0)


def test_recovery_is_a_ratio_of_means_with_a_paired_interval():
    _, kept, full = pair_items(scores()[PROT10], scores()[FULL])
    made = ratio_interval([kept], [full], resamples=10_000, method="BCa")
    assert made.method == "BCa"
    assert agrees(made.estimate, "0.893")
    assert (made.low, made.high) == pytest.approx((0.791, 0.984), abs=INTERVAL_TOLERANCE)


@pytest.mark.parametrize("name", PAIRS)
def test_figures_of_a_pair(name):
    pair, made = PAIRS[name], compared(name)
    assert (made.num_clusters, made.interval.num_nonzero) == (pair.num_items, pair.num_nonzero)
    assert made.signed_rank.num_nonzero == pair.num_nonzero
    assert agrees(made.estimate, pair.difference) and agrees(made.equivalence.p, pair.tost)
    printed = float(pair.low), float(pair.high)
    assert (made.interval.low, made.interval.high) == pytest.approx(printed, abs=INTERVAL_TOLERANCE)
    assert pair.statistic is None or agrees(made.signed_rank.statistic, pair.statistic)
    _, a, b = pair_items(scores()[pair.policy], scores()[pair.baseline])
    (differences,) = cluster_pairs(a, b).differences
    for zero_method in ("wilcox", "pratt"):
        rank = signed_rank(differences, zero_method=zero_method)
        assert agrees(rank.p, getattr(pair, zero_method))
        assert (rank.zero_method, rank.method) == (zero_method, "asymptotic")
        assert zero_method == "pratt" or made.signed_rank == rank


def test_verdicts_of_the_table_as_one_family():
    """By the published rule, with TOST, and by ours: 162 items do not rule out, in a family of six, that one
    of fifty of those nobody saw loses everything, which is the margin."""
    made = adjust({name: compared(name) for name in PAIRS}, declared=list(PAIRS))
    tost = holm([one.equivalence.p for one in made.values()])
    published = {
        name: supported_verdict(one.interval, 0.02, p=one.holm_p or 0.0, within_p=float(p), alpha=0.05)
        for (name, one), p in zip(made.items(), tost, strict=True)
    }
    assert published == {
        "prot10 - prot5": "inconclusive",  # raw p 0.03, the interval excludes 0: too little among six
        "prot15 - prot10": "equivalent",
        "prot20 - prot10": "inconclusive",  # raw TOST p 0.023, third smallest of six: 4 * 0.023
        "Phi-3.5 h2o+prot - lru+prot": "equivalent",
        "n481 prot - noprot": "better",
        "n481 adakv_f - lru": "better",
    }
    changed = {name for name, one in made.items() if one.verdict != published[name]}
    assert changed == {"prot15 - prot10", "Phi-3.5 h2o+prot - lru+prot"}
    assert {made[name].verdict for name in changed} == {"inconclusive"}
    assert compared("prot10 - prot5").verdict == "better"
    assert compared("prot20 - prot10").verdict == "inconclusive"

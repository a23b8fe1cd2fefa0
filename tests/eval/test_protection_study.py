"""The statistics against published rows: every figure of evaluation.md, section 5.3, whose rows are at hand.

The rows are the per-item scores of *Protection Is (Nearly) All You Need* (arXiv 2605.18053); the figures were
recomputed from them by other code. They test statistics, they are no target to reproduce (section 5.4).

Figures of that section which have no rows in the file, and so no test: the second run of unprotected LRU
(0.0047), credit-v2 (three means), the full cache of Phi-3.5 (0.1790), Qwen2.5-7B (three means), NIAH at 64K
(five means with standard errors), and the means of LRU+prot at n = 481 of the five models beside Qwen2.5-3B.
Of section 7, the spreads behind 348 and 589 items have no rows; the one behind 1,009 has.
"""

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from retain.eval.stats.clusters import cluster_pairs, pair_items
from retain.eval.stats.paired_result import PairedResult, adjust, compare_paired, supported_verdict
from retain.eval.stats.paired_tests import holm, signed_rank
from retain.eval.stats.power import items_for_equivalence
from retain.eval.stats.significance import paired_interval, ratio_interval

ROWS = Path(__file__).resolve().parents[3] / "shared" / "data" / "protection_study_items.csv"
pytestmark = pytest.mark.skipif(not ROWS.exists(), reason=f"../shared/data/{ROWS.name} is absent")

N481 = "n481/qwen25-3b/q25-c256-"
SWEEP = "protection-sweep/q25-"
PHI = "phi35-multiarch/phi35-c256-"
PROT10 = "confound-fix/q25-c256-lru-protected"
FULL = "confound/q25-c2048-fullcache"
NOPROT = "ablation/q25-c256-lru"

# name in the section: (file, mean as printed)
MEANS = {
    "LRU noprot C256": (NOPROT, "0.0112"),
    "LRU+prot C128": ("confound-fix/q25-c128-lru-protected", "0.2294"),
    "LRU+prot C256": (PROT10, "0.2816"),
    "LRU+prot C512": ("confound-fix/q25-c512-lru-protected", "0.2848"),
    "full": (FULL, "0.3152"),
    "prot 5%": (f"{SWEEP}c256-lru-prot5", "0.2466"),
    "prot 15%": (f"{SWEEP}c256-lru-prot15", "0.2847"),
    "prot 20%": (f"{SWEEP}c256-lru-prot20", "0.2832"),
    "C64": (f"{SWEEP}c64-lru-prot10", "0.1530"),
    "C96": (f"{SWEEP}c96-lru-prot10", "0.2138"),
    "Phi-3.5 LRU+prot C256": (f"{PHI}lru-prot", "0.1413"),
    "Phi-3.5 LRU noprot C256": (f"{PHI}lru-noprot", "0.0295"),
    "n481 Q2.5-3B LRU+prot": (f"{N481}lru-prot", "0.2535"),
}


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
        PROT10,
        f"{SWEEP}c256-lru-prot5",
        *(162, 50, "0.0350", ".0027", ".0681", "0.0156", "0.00242", "0.816"),
    ),
    "prot15 - prot10": Pair(
        f"{SWEEP}c256-lru-prot15",
        PROT10,
        *(162, 33, "0.0031", "-.0093", ".0160", "0.514", "0.584", "0.00501"),
    ),
    "prot20 - prot10": Pair(
        f"{SWEEP}c256-lru-prot20",
        PROT10,
        *(162, 38, "0.0016", "-.0161", ".0196", "0.800", "0.549", "0.0233"),
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


def of(file: str) -> np.ndarray:
    return np.array(list(scores()[file].values()))


@cache
def compared(name: str) -> PairedResult:
    """A line of the table, with the interval that the section prints: percentile, 10,000 resamples."""
    pair = PAIRS[name]
    _, a, b = pair_items(scores()[pair.policy], scores()[pair.baseline])
    return compare_paired(a, b, margin=0.02, method="percentile", resamples=10_000, seed=0, worst=1.0)


@pytest.mark.parametrize("name", MEANS)
def test_condition_means(name):
    file, printed = MEANS[name]
    assert len(scores()[file]) == (481 if file.startswith("n481") else 162)
    assert agrees(float(of(file).mean()), printed)


def test_the_interval_of_unprotected_lru():
    # Printed with three decimals, from the percentile bootstrap. BCa is another interval on data so skewed:
    # one item scores 1 and none of the others above 0.18.
    made = paired_interval([of(NOPROT)], method="percentile", resamples=10_000)
    assert (made.low, made.high) == pytest.approx((0.003, 0.026), abs=INTERVAL_TOLERANCE)
    assert paired_interval([of(NOPROT)], resamples=10_000, method="BCa").high > 0.035


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


def test_ties_that_binary_fractions_hide():
    # As printed, p counts 0.3 - 0.2 and 0.2 - 0.1 as two ranks. Rounded to the six decimals of the rows,
    # which makes them one, the printed 0.980 / 0.741 would be 0.981 / 0.740: the one line where it shows.
    pair = PAIRS["Phi-3.5 h2o+prot - lru+prot"]
    _, a, b = pair_items(scores()[pair.policy], scores()[pair.baseline])
    tied = [signed_rank(np.round(a - b, 6), zero_method=zero).p for zero in ("wilcox", "pratt")]
    assert agrees(tied[0], "0.981") and agrees(tied[1], "0.740")


def test_items_for_equivalence_of_section_7():
    # The closed form. 348 and 589 items have no rows: tests/eval/test_power.py.
    pair = PAIRS["n481 adakv_f - lru"]
    _, a, b = pair_items(scores()[pair.policy], scores()[pair.baseline])
    sd = float((a - b).std(ddof=1))
    assert agrees(sd, "0.217")
    assert items_for_equivalence(sd, 0.02, method="normal") == 1009


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


def test_policies_that_are_one_policy_are_identical():
    # Section 0, point 2: H2O and SnapKV make the same selection there, on every one of 481 items.
    _, a, b = pair_items(scores()[f"{N481}h2o-prot"], scores()[f"{N481}snapkv-prot"])
    made = compare_paired(a, b, margin=0.02)
    assert (made.verdict, made.p, made.signed_rank.p, made.interval.low) == ("identical", 1.0, 1.0, 0.0)

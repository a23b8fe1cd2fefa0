"""Claims on runs that nobody ran, whose numbers can be worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.eval.claims.check import check_claim, groups_of
from retain.eval.claims.claim import CheckedClaim, Condition, Line, Outcome, all_hold, load_claims
from retain.eval.claims.page import HEADS, as_markdown
from retain.eval.stats.paired_result import compare_paired
from retain.eval.stats.paired_tests import holm
from retain.eval.stats.summary import Cell, best_of, gather
from tests.eval.made_claims import (
    CLAIMS,
    FAMILY,
    PARTS,
    RATES,
    SCORES,
    SEEDS,
    SIDES,
    WANTED_AT,
    WANTED_IN,
    changed,
    checked,
    complete,
    line_of,
    make_rows,
    named,
    scores_of,
)

# A run whose policy answers as its oracle does.
AS_ORACLE = {"oracle": (0.9, 0.8, 0.7)}


def test_the_best_heuristic_is_that_of_its_cell() -> None:
    names = PARTS.heuristics
    assert {*names} == {"keydiff", "snapkv"}
    assert best_of(SCORES, names, "context_only", 0.1, "seen") == "keydiff"  # 35 against 30
    assert best_of(SCORES, names, "context_only", 0.1, "held-out") == "snapkv"  # 50 against 10
    assert best_of(SCORES, names, "context_only", 0.1, "all") == "snapkv"  # 36.7 against 26.7
    assert best_of(SCORES, names, "context_only", 0.4, "all") is None


def test_what_was_trained_is_no_heuristic() -> None:
    policies = ("snapkv", "snapkv+none", "mine", "wide_gate", "duo", "shared_out", "token_identity", "random")
    rates = {("context_only", name, 0.1): (0.5, 0.5, 0.5) for name in (*policies, *SIDES)}
    plain = {"learned": False, "allocation": {"head_classes": None, "quotas": None}}
    resolved = {
        **dict.fromkeys(("snapkv", "snapkv+none", "mine", "token_identity"), plain),
        **dict.fromkeys((*SIDES, "wide_gate"), {**plain, "learned": True}),
        "duo": {**plain, "allocation": {"head_classes": "measured"}},
        "shared_out": {**plain, "allocation": {"quotas": "calibrated"}},
    }
    parts = named(scores_of(rates, items=2), manifests=[{"identity": {"policies": resolved}}])
    # `random` is a preset, of which the manifest says nothing.
    assert {*parts.heuristics} == {"snapkv", "snapkv+none", "mine", "random"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"policy": "fusde"}, r"policy is 'fusde', which was not measured \(did you mean 'fused'"),
        ({"oracle": "oracle_b"}, r"oracle is 'oracle_b', which was not .*did you mean 'oracle'"),
        ({"policy": "gate"}, "three lines, got gate, gate and oracle. Measured: .*snapkv"),
    ],
)
def test_parts_that_are_not_there_are_named_with_what_is(names: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        named(SCORES, **names)


def test_better_is_judged_in_the_family_of_its_four_lines() -> None:
    claim = checked("better", SCORES)
    required = [line for line in claim.lines if line.required]
    assert [(line.budget, line.family, line.against) for line in required] == [
        (budget, "all", against) for budget in (0.1, 0.2) for against in ("snapkv", "gate")
    ]
    assert {line.outcome for line in required} == {"holds"} and claim.outcome == "holds"
    # 80 against 36.7 and 46.7; every seed has the same rates.
    assert [line.estimate for line in required[:2]] == pytest.approx([43.3333, 33.3333], abs=1e-3)
    assert required[0].by_seed == pytest.approx(dict.fromkeys(SEEDS, 43.3333), abs=1e-3)
    assert required[0].by_task == pytest.approx({"copy": 70.0, "pair": 40.0, "odd": 20.0})
    assert (required[0].policy_mean, required[0].full_mean) == pytest.approx((80.0, 100.0))
    raw = []
    for line in required:
        cells = [Cell("context_only", name, line.budget) for name in ("fused", line.against)]
        sides = [np.concatenate(SCORES.strata(cell, FAMILY)) for cell in cells]
        labels = [task for task in FAMILY for _ in range(120)]
        raw.append(compare_paired(*sides, margin=2.0, strata=labels, resamples=500).p)
    assert [line.p for line in required] == pytest.approx(holm(raw))

    # A line that is shown beside makes no claim weaker, and does not count for the family.
    alone = scores_of({cell: own for cell, own in RATES.items() if cell[0] == "context_only"})
    for one in (claim, checked("better", alone, PARTS)):
        assert line_of(one, "context_only", 0.1, "all", "gate").p == pytest.approx(4 * 2 / 501, rel=1e-6)
    beside = line_of(claim, "query_aware", 0.4, "all", "snapkv")
    assert (beside.required, beside.outcome) == (False, "does not hold")
    assert beside.note.startswith("identical,")


@pytest.mark.parametrize(
    ("odd", "outcome"), [(0.7, "does not hold"), (0.9, "does not hold"), (0.675, "undecided")]
)
def test_better_fails_or_stays_open(odd: float, outcome: Outcome) -> None:
    claim = checked("better", scores_of(changed(gate=(0.9, 0.8, odd))))
    assert line_of(claim, "context_only", 0.2, "all", "snapkv").outcome == "holds"
    assert line_of(claim, "context_only", 0.2, "all", "gate").outcome == claim.outcome == outcome


def test_budgets_that_were_not_measured_leave_a_claim_open() -> None:
    scores = scores_of({cell: own for cell, own in RATES.items() if cell[2] != 0.1})
    claim = checked("better", scores)
    assert line_of(claim, "context_only", 0.1, "all", "gate").outcome == "not measured"
    assert claim.outcome == "undecided"
    assert line_of(checked("near the oracle", scores), "context_only", 0.1).outcome == "not measured"


def test_not_worse_is_against_the_best_of_them_all_in_every_cell() -> None:
    claim = checked("not worse", SCORES)
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    required = {(line.regime, line.budget): line for line in measured if line.required}
    against = {place: line.against for place, line in required.items()}
    assert against == {
        ("context_only", 0.1): "gate",
        ("context_only", 0.2): "gate",
        ("query_aware", 0.4): "snapkv",
    }
    # Of every regime and budget, whatever the run happens to have; a claim that lacks one does not hold.
    lacking = {(one.regime, one.budget) for one in claim.lines if one.outcome == "not measured"}
    assert lacking == {(regime, budget) for regime in WANTED_IN for budget in WANTED_AT} - against.keys()
    assert len(measured) == 9 and claim.outcome == "undecided"
    # No item was lost to either: 360 items in three tasks of one size; one of three is at the last level.
    same = required["query_aware", 0.4]
    assert same.estimate == 0
    assert same.adjusted_low == pytest.approx(-100 * (1 - 0.025 ** (1 / 360)), rel=1e-6)
    assert {line.outcome for line in required.values()} == {"holds"}
    # Of one task of 120 items it is not shown.
    assert line_of(claim, "query_aware", 0.4, "held-out").outcome == "undecided"
    whole = checked("not worse", scores_of(complete(RATES)))
    assert whole.outcome == "holds" and "not measured" not in {one.outcome for one in whole.lines}
    assert "chunked and decode at keep_ratio 0.05, 0.1, 0.2 and 0.4" in whole.text


@pytest.mark.parametrize(
    ("gate", "items", "outcome"),
    [
        ((0.8, 0.7), 40, "holds"),  # identical, 360 items
        ((0.8, 0.7), 10, "undecided"),  # identical, 90 items
        ((0.8, 0.8), 40, "undecided"),  # 3.3 points worse, interval across -2
        ((0.9, 0.8), 40, "does not hold"),  # 6.7 points worse
    ],
)
def test_not_worse_needs_items_and_a_small_loss(
    gate: tuple[float, float], items: int, outcome: Outcome
) -> None:
    claim = checked("not worse", scores_of(changed(gate=(0.9, *gate)), items=items))
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    assert {line.outcome for line in measured if line.required} == {outcome}
    for line in measured:
        assert line.bound == -2.0 and line.p is not None and line.adjusted_low is not None
        assert (line.adjusted_low > -2.0) == (line.p < 0.025)


@pytest.mark.parametrize("gone", [("gate",), ("snapkv", "keydiff")])
def test_the_best_of_them_needs_them_all(gone: tuple[str, ...]) -> None:
    rates = {cell: own for cell, own in RATES.items() if cell[1] not in gone or cell[0] == "context_only"}
    claim = checked("not worse", scores_of(rates))
    assert line_of(claim, "query_aware", 0.4, "all").outcome == "not measured"
    assert line_of(claim, "context_only", 0.1, "all").outcome == "holds"


def test_the_family_of_not_worse_is_every_cell_of_one_average() -> None:
    """The gate wins a few: as one of many cells the same numbers show less."""
    rates = changed(gate=(0.875, 0.8, 0.7), fused=(0.9, 0.8, 0.7))
    alone = {cell: own for cell, own in rates.items() if cell[2] != 0.1}
    one, two = (
        line_of(checked("not worse", scores_of(own)), "context_only", 0.2, "all").p for own in (alone, rates)
    )
    assert one is not None and two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("budget", "oracle", "outcome"),
    [
        (0.1, (0.9, 0.8, 1.0), "holds"),  # alike on seen tasks
        (0.2, (0.9, 0.8, 1.0), "holds"),
        (0.1, (0.95, 0.8, 0.7), "undecided"),  # 2.5 below: inside at 0.1, and not shown
        (0.1, (1.0, 0.9, 0.7), "does not hold"),  # 10 below
        (0.2, (0.8, 0.8, 0.7), "holds"),  # above the oracle
    ],
)
def test_near_the_oracle_reads_seen_tasks(
    budget: float, oracle: tuple[float, float, float], outcome: Outcome
) -> None:
    line = line_of(checked("near the oracle", scores_of(changed(oracle=oracle))), "context_only", budget)
    assert (line.outcome, line.family, line.bound) == (outcome, "seen", {0.1: -3.0, 0.2: -2.0}[budget])
    assert line.estimate == pytest.approx(100 * (1.7 - oracle[0] - oracle[1]) / 2) and line.p is None


def test_many_items_tell_3_points_from_2() -> None:
    """2 points below the oracle, 2,000 items: shown at 0.1, where 3 are allowed, and not at 0.2."""
    rates = {cell: own for cell, own in changed(oracle=(0.92, 0.82, 0.7)).items() if cell[1] in SIDES}
    claim = checked("near the oracle", scores_of(rates, items=1000, seeds=(0,)))
    found = {line.budget: line.outcome for line in claim.lines if line.regime == "context_only"}
    assert found == {0.1: "holds", 0.2: "undecided"}


def test_the_gap_closed_is_the_ratio_of_its_means() -> None:
    claim = checked("gap closed", SCORES)
    seen = line_of(claim, "context_only", 0.1, "seen")
    # (85 - 35) / (90 - 35) and (70 - 50) / (80 - 50)
    assert (seen.estimate, seen.gap, seen.bound) == pytest.approx((50 / 55, 55.0, 0.95))
    assert seen.by_seed == pytest.approx(dict.fromkeys(SEEDS, 50 / 55))
    held = line_of(claim, "context_only", 0.1, "held-out")
    assert (seen.against, held.against) == ("keydiff", "snapkv")
    assert (held.estimate, held.gap, held.bound) == pytest.approx((2 / 3, 30.0, 0.8))
    assert (seen.outcome, held.outcome, claim.outcome) == ("undecided", "undecided", "does not hold")
    # Where there is no gap nothing is asked. Of seen tasks the oracle is 5 points above: there it is.
    none = line_of(claim, "query_aware", 0.4, "held-out")
    assert (none.outcome, none.required, none.estimate, none.gap) == ("no gap", False, None, 0.0)
    asked = line_of(claim, "query_aware", 0.4, "seen")
    assert (asked.required, asked.estimate, asked.gap) == (True, 0.0, pytest.approx(5.0))
    # What must be closed is in percent on every line, measured or not.
    page = as_markdown("made", PARTS, [claim], [], {})
    rows = [row.split(" | ") for row in page.splitlines() if row.count(" | ") == len(HEADS) - 1]
    bounds = {(row[3], row[HEADS.index("must exceed")]) for row in rows[2:]}
    assert bounds == {("seen", "+95.0"), ("held-out", "+80.0")}
    assert {row[0].strip("| ()") for row in rows[2:]} > {"not measured"}


def test_a_gap_that_may_be_none_is_judged_without_a_division() -> None:
    # A policy that answers as the oracle closes all of it.
    claim = checked("gap closed", scores_of(changed(**AS_ORACLE)))
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    assert {(line.low, line.high, line.outcome) for line in measured} == {(1.0, 1.0, "holds")}
    assert claim.outcome == "undecided"  # the other budgets were not measured
    few = {"snapkv": (0.8, 0.7, 0.6), "keydiff": (0.8, 0.7, 0.6), **AS_ORACLE}
    claim = checked("gap closed", scores_of(changed(**few), items=10, seeds=(0,)))
    line = line_of(claim, "context_only", 0.1, "held-out")
    assert (line.low, line.estimate, line.outcome) == (None, 1.0, "undecided")
    assert "there may be no gap; judged by won - 0.8 gap: +2.0" in line.note


def taking_turns(**means: Any) -> tuple[Line, dict[str, float]]:
    """snapkv answers even items, keydiff the others; policies of `means` as it says. The line of the gap, and
    the mean of everybody."""
    rows = make_rows({cell: own for cell, own in changed(fused=(0.8, 0.8, 0.9)).items() if cell[2] != 0.2})
    for row in rows:
        if row["policy"] in means:
            row["score"] = float(means[row["policy"]](row["item"]))
    scores = gather(rows, list(FAMILY))
    every = (*SIDES, "snapkv", "keydiff")
    found = {name: scores.mean(Cell("context_only", name, 0.1), ["copy", "pair"]) for name in every}
    return line_of(checked("gap closed", scores, PARTS), "context_only", 0.1, "seen"), found


def test_the_crossed_share_chooses_on_one_half_and_compares_on_the_other() -> None:
    # snapkv answers one item more, so that it leads by six of 240; on a half either may, and what of its lead
    # is luck is missing on the other half: there its mean is below what it has on all.
    line, means = taking_turns(snapkv=lambda i: i % 2 == 1 or i == 0, keydiff=lambda i: i % 2 == 0)
    best = means["snapkv"]
    assert line.estimate == pytest.approx((means["fused"] - best) / (means["oracle"] - best))
    # Half of a lead by luck is taken from the other half. Of differences of +-1, 120 drawn of 240, three
    # standard deviations of the mean are 3 sqrt(1 / 240).
    unlucky = (best + means["keydiff"]) / 2 - 100 * 3 * (1 / 240) ** 0.5 / 2
    highest = (means["fused"] - unlucky) / (means["oracle"] - unlucky)
    assert line.crossed is not None and line.estimate is not None
    assert line.estimate + 0.001 < line.crossed < highest < 0.8


def test_kinds_that_take_turns_with_the_items_do_not_tell_the_halves_apart() -> None:
    """Whoever chose on one kind of item and compared on the other would find the gap all but closed; halves
    drawn by chance are of both kinds."""
    line, _ = taking_turns(
        snapkv=lambda i: i % 2 == 1,
        keydiff=lambda i: i % 2 == 0,
        fused=lambda i: i % 4 != 0,
        oracle=lambda i: True,
    )
    assert line.estimate == pytest.approx(0.5)  # (75 - 50) / (100 - 50)
    assert line.crossed == pytest.approx(0.5, abs=0.06)  # by turns: (75 - 0) / (100 - 0)


@pytest.mark.parametrize("name", ["near the oracle", "gap closed"])
def test_an_oracle_is_asked_for_where_there_can_be_one(name: str) -> None:
    """In the regimes of its rows a missing oracle leaves a claim open; in the others the lines say so and ask
    nothing."""
    rates = complete(changed(**AS_ORACLE))
    claim = checked(name, scores_of(rates))
    assert claim.outcome == "holds"
    beside = [one for one in claim.lines if one.regime in ("chunked", "decode")]
    assert beside and {(one.outcome, one.required) for one in beside} == {("not measured", False)}
    assert {one.note for one in beside} == {"no oracle in this regime"}
    without = {cell: own for cell, own in rates.items() if cell != ("query_aware", "oracle", 0.2)}
    claim = checked(name, scores_of(without))
    missing = [one for one in claim.lines if one.required and one.outcome == "not measured"]
    assert claim.outcome == "undecided"
    assert {(one.regime, one.budget) for one in missing} == {("query_aware", 0.2)}
    nowhere = scores_of({cell: own for cell, own in RATES.items() if cell[1] != "oracle"})
    assert checked(name, nowhere).outcome == "not measured"


def test_a_run_of_one_family_has_one_average_and_a_row_may_name_any_line() -> None:
    scores = gather([row for row in make_rows(RATES) if row["task"] == "odd"], ["odd"])
    assert (groups_of(SCORES), groups_of(scores)) == (["all", "seen", "held-out"], ["held-out"])
    lines = checked("not worse", scores, PARTS).lines
    assert lines and all(line.required and line.family == "held-out" for line in lines)
    stated = replace(CLAIMS["better"], against=("keydiff",), text="{policy}: {margins}, {shares}, {gap_from}")
    claim = check_claim(stated, SCORES, PARTS, resamples=500)
    assert [line.against for line in claim.lines if line.required] == ["keydiff"] * 2
    assert claim.text == "fused: 2, 100 % (all), 5" and claim.outcome == "holds"


def test_a_file_of_claims_is_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text(
        "policy: fused\ngate: gate\noracle: o\nclaims: [{name: a, sys: b}]\n"
    )
    with pytest.raises(ValueError, match=r"(?s)unknown key 'claims\[0\].sys' \(did you mean 'says'.*missing"):
        load_claims(tmp_path / "claims.yaml")


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "undecided"], "undecided"),
        (["holds", "not measured"], "undecided"),
        (["not measured", "not measured"], "not measured"),
        (["undecided", "does not hold"], "does not hold"),
        (["holds", "no gap"], "holds"),
        (["no gap"], "no gap"),
        ([], "not measured"),
    ],
)
def test_a_claim_is_as_strong_as_its_weakest_line(outcomes: list[Outcome], whole: Outcome) -> None:
    lines = [Line(outcome, True, "context_only", 0.1, "all", "gate") for outcome in outcomes]
    beside = Line("does not hold", False, "context_only", 0.1, "seen", "gate")
    claim = CheckedClaim("one", "A claim", (*lines, beside))
    assert claim.outcome == whole
    assert all_hold([claim], [Condition("met", True, "")]) == (whole in ("holds", "no gap"))
    assert not all_hold([claim], [Condition("not met", False, "")])

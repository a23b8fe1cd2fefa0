"""Claims of the fused policy on runs that nobody ran, whose numbers can be worked out by hand."""

from functools import cache

import numpy as np
import pytest

from retain.eval.claims.fused import (
    MARGIN,
    check_better,
    check_gap_closed,
    check_near_oracle,
    check_not_worse,
    groups_of,
    parts_of,
)
from retain.eval.claims.lines import HEADS, Condition, FusedClaim, Line, Outcome, all_hold, as_markdown
from retain.eval.stats.paired_result import compare_paired
from retain.eval.stats.paired_tests import holm
from retain.eval.stats.summary import Cell, Scores, best_of, gather
from tests.eval.made_claims import (
    FAMILY,
    OPTIONS,
    PARTS,
    RATES,
    SCORES,
    SEEDS,
    SIDES,
    changed,
    check_of,
    complete,
    line_of,
    make_rows,
)


@cache
def better_here() -> FusedClaim:
    return check_better(SCORES, PARTS, **OPTIONS)


@cache
def closed_here() -> FusedClaim:
    return check_gap_closed(SCORES, PARTS)


def test_the_best_heuristic_is_that_of_its_cell() -> None:
    assert PARTS.heuristics == ("keydiff", "snapkv") or PARTS.heuristics == ("snapkv", "keydiff")
    names = PARTS.heuristics
    assert best_of(SCORES, names, "context_only", 0.1, "seen") == "keydiff"  # 35 against 30
    assert best_of(SCORES, names, "context_only", 0.1, "held-out") == "snapkv"  # 50 against 10
    assert best_of(SCORES, names, "context_only", 0.1, "all") == "snapkv"  # 36.7 against 26.7
    assert best_of(SCORES, names, "context_only", 0.4, "all") is None


def test_what_was_trained_is_no_heuristic() -> None:
    policies = ("snapkv", "snapkv+none", "mine", "wide_gate", "duo", "shared_out", "token_identity", "random")
    rates = {("context_only", name, 0.1): (0.5, 0.5, 0.5) for name in (*policies, "fused", "gate", "oracle")}
    scores = gather(make_rows(rates, items=2), list(FAMILY))
    plain = {"learned": False, "allocation": {"head_classes": None, "quotas": None}}
    resolved = {
        **dict.fromkeys(("snapkv", "snapkv+none", "mine"), plain),
        **dict.fromkeys(("fused", "gate", "oracle", "wide_gate"), {**plain, "learned": True}),
        "duo": {**plain, "allocation": {"head_classes": "measured"}},
        "shared_out": {**plain, "allocation": {"quotas": "calibrated"}},
        "token_identity": plain,
    }
    manifest = {"identity": {"policies": resolved}}
    parts = parts_of(scores, [manifest], policy="fused", gate="gate", oracle="oracle")
    # `random` is a preset, of which the manifest says nothing.
    assert {*parts.heuristics} == {"snapkv", "snapkv+none", "mine", "random"}


def test_parts_that_are_not_there_are_named_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"policy is 'fusde', which was not measured \(did you mean 'fused'"):
        parts_of(SCORES, [{}], policy="fusde", gate="gate", oracle="oracle")
    with pytest.raises(ValueError, match=r"oracle is 'oracle_b', which was not .*did you mean 'oracle'"):
        parts_of(SCORES, [{}], policy="fused", gate="gate", oracle="oracle_b")
    with pytest.raises(ValueError, match="three lines, got gate, gate and oracle. Measured: .*snapkv"):
        parts_of(SCORES, [{}], policy="gate", gate="gate", oracle="oracle")


def test_better_is_judged_in_the_family_of_its_four_lines() -> None:
    claim = better_here()
    required = [line for line in claim.lines if line.required]
    assert [(line.budget, line.family, line.against) for line in required] == [
        (budget, "all", against) for budget in (0.1, 0.2) for against in ("snapkv", "gate")
    ]
    assert [line.outcome for line in required] == ["holds"] * 4
    assert claim.outcome == "holds"
    # 80 against 36.7 and 46.7; every seed has the same rates.
    assert [line.estimate for line in required[:2]] == pytest.approx([43.3333, 33.3333], abs=1e-3)
    assert required[0].by_seed == pytest.approx(dict.fromkeys(SEEDS, 43.3333), abs=1e-3)
    assert required[0].by_task == pytest.approx({"copy": 70.0, "pair": 40.0, "odd": 20.0})
    assert (required[0].policy_mean, required[0].full_mean) == pytest.approx((80.0, 100.0))
    raw = []
    for line in required:
        cells = [Cell("context_only", name, line.budget) for name in ("fused", line.against)]
        sides = [SCORES.strata(cell, FAMILY) for cell in cells]
        labels = [task for task in FAMILY for _ in range(120)]
        sides = [np.concatenate(side) for side in sides]
        raw.append(compare_paired(*sides, margin=MARGIN, strata=labels, resamples=500).p)
    assert [line.p for line in required] == pytest.approx(holm(raw))


def test_what_is_shown_beside_makes_no_claim_weaker() -> None:
    alone, _ = check_of({cell: own for cell, own in RATES.items() if cell[0] == "context_only"})
    for claim in (better_here(), check_better(alone, PARTS, **OPTIONS)):
        assert line_of(claim, "context_only", 0.1, "all", "gate").p == pytest.approx(4 * 2 / 501, rel=1e-6)
    beside = line_of(better_here(), "query_aware", 0.4, "all", "snapkv")
    assert (beside.required, beside.outcome, beside.note.split(",")[0]) == (
        False,
        "does not hold",
        "identical",
    )


@pytest.mark.parametrize(
    ("gate", "outcome"),
    [
        ((0.9, 0.8, 0.7), "does not hold"),
        ((0.9, 0.8, 0.9), "does not hold"),
        ((0.9, 0.8, 0.675), "undecided"),
    ],
)
def test_better_fails_or_stays_open(gate: tuple[float, float, float], outcome: Outcome) -> None:
    scores, parts = check_of(changed(gate=gate))
    claim = check_better(scores, parts, **OPTIONS)
    assert line_of(claim, "context_only", 0.2, "all", "snapkv").outcome == "holds"
    assert line_of(claim, "context_only", 0.2, "all", "gate").outcome == outcome
    assert claim.outcome == outcome


def test_budgets_that_were_not_measured_leave_the_claim_open() -> None:
    scores, parts = check_of({cell: own for cell, own in RATES.items() if cell[2] != 0.1})
    claim = check_better(scores, parts, **OPTIONS)
    assert line_of(claim, "context_only", 0.1, "all", "gate").outcome == "not measured"
    assert claim.outcome == "undecided"
    near = check_near_oracle(scores, parts)
    assert line_of(near, "context_only", 0.1).outcome == "not measured"


def test_not_worse_is_against_the_best_of_them_all_in_every_cell() -> None:
    claim = check_not_worse(SCORES, PARTS)
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    required = {(line.regime, line.budget): line for line in measured if line.required}
    assert {place: line.against for place, line in required.items()} == {
        ("context_only", 0.1): "gate",
        ("context_only", 0.2): "gate",
        ("query_aware", 0.4): "snapkv",
    }
    assert len(measured) == 9
    # No item was lost to either: 360 items in three tasks of one size; one of three is at the last level.
    same = required["query_aware", 0.4]
    assert same.estimate == 0
    assert same.adjusted_low == pytest.approx(-100 * (1 - 0.025 ** (1 / 360)), rel=1e-6)
    assert all(line.outcome == "holds" for line in required.values())
    assert claim.outcome == "undecided"
    # Of one task of 120 items it is not shown.
    assert line_of(claim, "query_aware", 0.4, "held-out").outcome == "undecided"


@pytest.mark.parametrize(
    ("gate", "items", "outcome"),
    [
        ((0.9, 0.8, 0.7), 40, "holds"),  # identical, 360 items
        ((0.9, 0.8, 0.7), 10, "undecided"),  # identical, 90 items
        ((0.9, 0.8, 0.8), 40, "undecided"),  # 3.3 points worse, interval across -2
        ((0.9, 0.9, 0.8), 40, "does not hold"),  # 6.7 points worse
    ],
)
def test_not_worse_needs_items_and_a_small_loss(
    gate: tuple[float, float, float], items: int, outcome: Outcome
) -> None:
    scores, parts = check_of(changed(gate=gate), items=items)
    claim = check_not_worse(scores, parts)
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    assert {line.outcome for line in measured if line.required} == {outcome}
    for line in measured:
        assert line.bound == -MARGIN
        assert line.p is not None and line.adjusted_low is not None
        assert (line.adjusted_low > -MARGIN) == (line.p < 0.025)


@pytest.mark.parametrize("gone", [("gate",), ("snapkv", "keydiff")])
def test_the_best_of_them_needs_them_all(gone: tuple[str, ...]) -> None:
    rates = {cell: own for cell, own in RATES.items() if cell[1] not in gone or cell[0] == "context_only"}
    scores, parts = check_of(rates)
    claim = check_not_worse(scores, parts)
    assert line_of(claim, "query_aware", 0.4, "all").outcome == "not measured"
    assert line_of(claim, "context_only", 0.1, "all").outcome == "holds"
    assert claim.outcome == "undecided"


def test_the_family_of_not_worse_is_every_cell_of_one_average() -> None:
    """The gate wins a few: as one of many cells the same numbers show less."""
    rates = changed(gate=(0.875, 0.8, 0.7), fused=(0.9, 0.8, 0.7))
    alone, parts = check_of({cell: own for cell, own in rates.items() if cell[2] != 0.1})
    both, _ = check_of(rates)
    ends = [line_of(check_not_worse(scores, parts), "context_only", 0.2, "all").p for scores in (alone, both)]
    assert ends[0] is not None and ends[1] == pytest.approx(2 * ends[0])


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
    scores, parts = check_of(changed(oracle=oracle))
    line = line_of(check_near_oracle(scores, parts), "context_only", budget)
    assert (line.outcome, line.family, line.bound) == (outcome, "seen", {0.1: -3.0, 0.2: -2.0}[budget])
    assert line.estimate == pytest.approx(100 * (1.7 - oracle[0] - oracle[1]) / 2)


def test_many_items_tell_3_points_from_2() -> None:
    """2 points below the oracle, 2,000 items: shown at 0.1, where 3 are allowed, and not at 0.2."""
    rates = {cell: own for cell, own in changed(oracle=(0.92, 0.82, 0.7)).items() if cell[1] in SIDES}
    scores, parts = check_of(rates, items=1000, seeds=(0,))
    claim = check_near_oracle(scores, parts)
    found = {line.budget: line.outcome for line in claim.lines if line.regime == "context_only"}
    assert found == {0.1: "holds", 0.2: "undecided"}


def test_the_gap_closed_is_the_ratio_of_its_means() -> None:
    claim = closed_here()
    seen = line_of(claim, "context_only", 0.1, "seen")
    assert seen.against == "keydiff"
    # (85 - 35) / (90 - 35) and (70 - 50) / (80 - 50)
    assert (seen.estimate, seen.gap, seen.bound) == pytest.approx((50 / 55, 55.0, 0.95))
    assert seen.by_seed == pytest.approx(dict.fromkeys(SEEDS, 50 / 55))
    held = line_of(claim, "context_only", 0.1, "held-out")
    assert held.against == "snapkv"
    assert (held.estimate, held.gap, held.bound) == pytest.approx((2 / 3, 30.0, 0.8))
    assert (seen.outcome, held.outcome, claim.outcome) == ("undecided", "undecided", "does not hold")


def test_the_interval_of_the_gap_resamples_items_together() -> None:
    """Against a bootstrap in a loop: one draw of items for all three policies."""
    line = line_of(check_gap_closed(SCORES, PARTS), "context_only", 0.1, "seen")
    rng = np.random.default_rng(0)
    columns = [
        SCORES.strata(Cell("context_only", n, 0.1), ["copy", "pair"]) for n in ("fused", "keydiff", "oracle")
    ]
    drawn = []
    for _ in range(3000):
        mine, best, oracle = 0.0, 0.0, 0.0
        for task in range(2):
            pick = rng.integers(0, 120, size=120)
            mine, best, oracle = (
                mean + column[task][pick].mean() / 2
                for mean, column in zip((mine, best, oracle), columns, strict=True)
            )
        drawn.append((mine - best) / (oracle - best))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (line.low, line.high) == pytest.approx((low, high), abs=0.015)


def test_a_policy_that_answers_as_the_oracle_closes_all_of_the_gap() -> None:
    scores, parts = check_of(changed(oracle=(0.9, 0.8, 0.7)))
    claim = check_gap_closed(scores, parts)
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    assert {(line.low, line.high, line.outcome) for line in measured} == {(1.0, 1.0, "holds")}
    assert claim.outcome == "undecided"  # at the other budgets nobody looked
    scores, parts = check_of(complete(changed(oracle=(0.9, 0.8, 0.7))))
    assert check_gap_closed(scores, parts).outcome == "holds"


def test_where_there_is_no_gap_nothing_is_asked() -> None:
    claim = closed_here()
    line = line_of(claim, "query_aware", 0.4, "held-out")
    assert (line.outcome, line.required, line.estimate, line.gap) == ("no gap", False, None, 0.0)
    # Of seen tasks the oracle is 5 points above: there it is asked.
    seen = line_of(claim, "query_aware", 0.4, "seen")
    assert (seen.required, seen.estimate) == (True, 0.0)
    assert seen.gap == pytest.approx(5.0)


def test_a_gap_that_may_be_none_is_judged_without_a_division() -> None:
    few = {"snapkv": (0.8, 0.7, 0.6), "keydiff": (0.8, 0.7, 0.6), "oracle": (0.9, 0.8, 0.7)}
    scores, parts = check_of(changed(**few), items=10, seeds=(0,))
    claim = check_gap_closed(scores, parts)
    line = line_of(claim, "context_only", 0.1, "held-out")
    assert (line.low, line.estimate, line.outcome) == (None, 1.0, "undecided")
    assert "there may be no gap; judged by won - 0.8 gap: +2.0" in line.note


def mean_of(scores: Scores, cell: Cell) -> float:
    return scores.mean(cell, ["copy", "pair"])


def test_the_crossed_share_chooses_on_one_half_and_compares_on_the_other() -> None:
    """Two heuristics that are right on every other item each: together they would answer all."""
    rows = make_rows({cell: own for cell, own in changed(fused=(0.8, 0.8, 0.9)).items() if cell[2] != 0.2})
    for row in rows:
        if row["policy"] in ("snapkv", "keydiff"):
            row["score"] = float(row["item"] % 2 == (row["policy"] == "snapkv"))
            # One item more, so that one of the two is the best.
            row["score"] = max(row["score"], float(row["policy"] == "snapkv" and row["item"] == 0))
    scores = gather(rows, list(FAMILY))
    line = line_of(check_gap_closed(scores, PARTS), "context_only", 0.1, "seen")
    # On the items themselves snapkv leads by six of 240; on a half either may, and what of its lead is luck
    # is missing on the other half: there its mean is below what it has on all.
    means = {
        name: mean_of(scores, Cell("context_only", name, 0.1))
        for name in ("fused", "oracle", "snapkv", "keydiff")
    }
    both = (means["snapkv"] + means["keydiff"]) / 2
    assert line.estimate == pytest.approx(
        (means["fused"] - means["snapkv"]) / (means["oracle"] - means["snapkv"])
    )
    assert line.crossed is not None
    # Half of a lead by luck is taken from the other half. Of differences of +-1, 120 drawn of 240, three
    # standard deviations of the mean are 3 sqrt(1 / 240).
    unlucky = both - 100 * 3 * (1 / 240) ** 0.5 / 2
    highest = (means["fused"] - unlucky) / (means["oracle"] - unlucky)
    assert line.estimate < line.crossed < highest < 0.8
    assert abs(line.crossed - line.estimate) > 0.001


def test_kinds_that_take_turns_with_the_items_do_not_tell_the_halves_apart() -> None:
    """snapkv answers one kind, of even items, and keydiff the other: whoever chose on one kind and compared
    on the other would find the gap all but closed, and by chance halves are of both kinds."""
    rows = make_rows({cell: own for cell, own in changed().items() if cell[2] != 0.2})
    for row in rows:
        if row["policy"] in ("snapkv", "keydiff"):
            row["score"] = float(row["item"] % 2 == (row["policy"] == "snapkv"))
        elif row["policy"] == "fused":
            row["score"] = float(row["item"] % 4 != 0)
        elif row["policy"] == "oracle":
            row["score"] = 1.0
    scores = gather(rows, list(FAMILY))
    line = line_of(check_gap_closed(scores, PARTS), "context_only", 0.1, "seen")
    assert line.estimate == pytest.approx(0.5)  # (75 - 50) / (100 - 50)
    assert line.crossed == pytest.approx(0.5, abs=0.06)  # by turns: (75 - 0) / (100 - 0)


def test_an_oracle_is_asked_for_where_there_can_be_one() -> None:
    """In the regimes that share a prefill a missing oracle, at any budget, leaves its claims open; in the
    others the lines say so and ask nothing."""
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    scores, parts = check_of(rates)
    for check in (check_near_oracle, check_gap_closed):
        claim = check(scores, parts)
        assert claim.outcome == "holds"
        beside = [one for one in claim.lines if one.regime in ("chunked", "decode")]
        assert beside and {(one.outcome, one.required) for one in beside} == {("not measured", False)}
        assert {one.note for one in beside} == {"no oracle in this regime"}
    without = {cell: own for cell, own in rates.items() if cell != ("query_aware", "oracle", 0.2)}
    scores, parts = check_of(without)
    for check in (check_near_oracle, check_gap_closed):
        claim = check(scores, parts)
        assert claim.outcome == "undecided"
        missing = [one for one in claim.lines if one.required and one.outcome == "not measured"]
        assert {(one.regime, one.budget) for one in missing} == {("query_aware", 0.2)}


def test_a_run_without_an_oracle_measures_neither_claim_about_it() -> None:
    scores, parts = check_of({cell: own for cell, own in RATES.items() if cell[1] != "oracle"})
    assert check_gap_closed(scores, parts).outcome == "not measured"
    assert check_near_oracle(scores, parts).outcome == "not measured"


def test_what_must_be_closed_is_in_percent_on_every_line() -> None:
    """Measured or not, with a gap or without."""
    claim = check_gap_closed(SCORES, PARTS)
    page = as_markdown("made", PARTS, [claim], [], {})
    rows = [row.split(" | ") for row in page.splitlines() if row.count(" | ") == len(HEADS) - 1]
    bounds = {(row[3], row[HEADS.index("must exceed")]) for row in rows[2:]}
    assert bounds == {("seen", "+95.0"), ("held-out", "+80.0")}
    assert {row[0].strip("| ()") for row in rows[2:]} > {"not measured"}


def test_a_run_of_one_family_has_one_average() -> None:
    rows = [row for row in make_rows(RATES) if row["task"] == "odd"]
    scores = gather(rows, ["odd"])
    assert (groups_of(SCORES), groups_of(scores)) == (["all", "seen", "held-out"], ["held-out"])
    lines = check_not_worse(scores, PARTS).lines
    assert lines and all(line.required and line.family == "held-out" for line in lines)


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
    claim = FusedClaim("one", "A claim", (*lines, beside))
    assert claim.outcome == whole
    assert all_hold([claim], [Condition("met", True, "")]) == (whole in ("holds", "no gap"))
    assert not all_hold([claim], [Condition("not met", False, "")])

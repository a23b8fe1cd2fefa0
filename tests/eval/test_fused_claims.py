"""Claims of the fused policy on runs that nobody ran, whose numbers can be worked out by hand."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.eval.claim_lines import Condition, FusedClaim, Line, Outcome, all_hold
from retain.eval.fused_claims import (
    FRESH_FROM,
    MARGIN,
    WANTED_AT,
    WANTED_IN,
    check_better,
    check_conditions,
    check_gap_closed,
    check_near_oracle,
    check_not_worse,
    groups_of,
    main,
    parts_of,
)
from retain.eval.paired_result import compare_paired
from retain.eval.paired_tests import holm
from retain.eval.summary import Cell, Scores, best_of, gather

FAMILY = {"copy": "seen", "pair": "seen", "odd": "held-out"}
SEEDS = (0, 1, 2)
# (regime, policy, budget) -> share of right answers on each task, in steps of 1 / 40.
Rates = Mapping[tuple[str, str, float], tuple[float, float, float]]
RATES: Rates = {
    ("context_only", "full", 1.0): (1.0, 1.0, 1.0),
    **{
        ("context_only", policy, budget): rates
        for budget in (0.1, 0.2)
        for policy, rates in {
            "snapkv": (0.2, 0.4, 0.5),
            "keydiff": (0.4, 0.3, 0.1),
            "gate": (0.5, 0.6, 0.3),
            "fused": (0.9, 0.8, 0.7),
            "oracle": (0.9, 0.9, 0.8),
        }.items()
    },
    ("query_aware", "full", 1.0): (1.0, 1.0, 1.0),
    ("query_aware", "snapkv", 0.4): (0.9, 0.9, 0.9),
    ("query_aware", "keydiff", 0.4): (0.4, 0.9, 0.9),
    ("query_aware", "gate", 0.4): (0.5, 0.9, 0.9),
    ("query_aware", "fused", 0.4): (0.9, 0.9, 0.9),
    ("query_aware", "oracle", 0.4): (1.0, 0.9, 0.9),
}
SIDES = ("fused", "gate", "oracle")
OPTIONS = {"resamples": 500}


def make_rows(rates: Rates, items: int = 40, seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    """Item i is right for whoever has a rate above `((7 i + 3 seed) mod items) / items`: skills nest."""
    rows = []
    for (regime, policy, budget), own in rates.items():
        for (task, family), rate in zip(FAMILY.items(), own, strict=True):
            for seed in seeds:
                for item in range(items):
                    place = (7 * item + 3 * seed) % items
                    right = float(place < rate * items - 1e-9)
                    rows.append(
                        {
                            "unit": f"{task}/{seed}",
                            **{"regime": regime, "policy": policy, "budget": budget, "keep_ratio": budget},
                            **{"task": task, "family": family, "seed": seed, "item": item, "question": 0},
                            **{"score": right, "exact": right, "partial": right},
                            **{"kept_entries": round(1000 * budget), "seen_entries": 1000},
                            **{"bytes_held": round(64000 * budget), "bytes_full": 64000},
                        }
                    )
    return rows


def changed(
    **policies: tuple[float, float, float],
) -> dict[tuple[str, str, float], tuple[float, float, float]]:
    """The rates of context_only alone, with those of some policies replaced."""
    kept = {cell: own for cell, own in RATES.items() if cell[0] == "context_only"}
    return {cell: policies.get(cell[1], own) for cell, own in kept.items()}


def check_of(rates: Rates, **options: Any) -> tuple[Scores, Any]:
    scores = gather(make_rows(rates, **options), list(FAMILY))
    return scores, parts_of(scores, [{}], policy="fused", gate="gate", oracle="oracle")


def complete(rates: Rates) -> Rates:
    """With what is wanted and is not there: places where everybody answers alike, without an oracle where
    there can be none."""
    found = {}
    for regime in WANTED_IN:
        found[regime, "full", 1.0] = (1.0, 1.0, 1.0)
        for budget in WANTED_AT:
            for name in ("snapkv", "keydiff", "gate", "fused", "oracle"):
                if name != "oracle" or regime in ("context_only", "query_aware"):
                    found[regime, name, budget] = (0.9, 0.9, 0.9)
    return {**found, **rates}


def line_of(claim: FusedClaim, *place: Any) -> Line:
    """The line of a regime, budget, task family and, where there are several, opponent."""
    found = [
        line
        for line in claim.lines
        if (line.regime, line.budget, line.family, line.against)[: len(place)] == place
    ]
    assert len(found) == 1, found
    return found[0]


SCORES, PARTS = check_of(RATES)


@cache
def better_here() -> FusedClaim:
    return check_better(SCORES, PARTS, **OPTIONS)


@cache
def closed_here() -> FusedClaim:
    return check_gap_closed(SCORES, PARTS, **OPTIONS)


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
    near = check_near_oracle(scores, parts, **OPTIONS)
    assert line_of(near, "context_only", 0.1).outcome == "not measured"


def test_not_worse_is_against_the_best_of_them_all_in_every_cell() -> None:
    claim = check_not_worse(SCORES, PARTS, **OPTIONS)
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
    assert same.adjusted_low == pytest.approx(100 / 360 * math.log(0.025), rel=1e-6)
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
    claim = check_not_worse(scores, parts, **OPTIONS)
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
    claim = check_not_worse(scores, parts, **OPTIONS)
    assert line_of(claim, "query_aware", 0.4, "all").outcome == "not measured"
    assert line_of(claim, "context_only", 0.1, "all").outcome == "holds"
    assert claim.outcome == "undecided"


def test_the_family_of_not_worse_is_every_cell_of_one_average() -> None:
    """The gate wins a few: as one of many cells the same numbers show less."""
    rates = changed(gate=(0.875, 0.8, 0.7), fused=(0.9, 0.8, 0.7))
    alone, parts = check_of({cell: own for cell, own in rates.items() if cell[2] != 0.1})
    both, _ = check_of(rates)
    ends = [
        line_of(check_not_worse(scores, parts, **OPTIONS), "context_only", 0.2, "all").p
        for scores in (alone, both)
    ]
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
    line = line_of(check_near_oracle(scores, parts, **OPTIONS), "context_only", budget)
    assert (line.outcome, line.family, line.bound) == (outcome, "seen", {0.1: -3.0, 0.2: -2.0}[budget])
    assert line.estimate == pytest.approx(100 * (1.7 - oracle[0] - oracle[1]) / 2)


def test_many_items_tell_3_points_from_2() -> None:
    """2 points below the oracle, 2,000 items: shown at 0.1, where 3 are allowed, and not at 0.2."""
    rates = {cell: own for cell, own in changed(oracle=(0.92, 0.82, 0.7)).items() if cell[1] in SIDES}
    scores, parts = check_of(rates, items=1000, seeds=(0,))
    claim = check_near_oracle(scores, parts, **OPTIONS)
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
    line = line_of(check_gap_closed(SCORES, PARTS, resamples=3000), "context_only", 0.1, "seen")
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
    claim = check_gap_closed(scores, parts, **OPTIONS)
    measured = [line for line in claim.lines if line.outcome != "not measured"]
    assert {(line.low, line.high, line.outcome) for line in measured} == {(1.0, 1.0, "holds")}
    assert claim.outcome == "undecided"  # at the other budgets nobody looked
    scores, parts = check_of(complete(changed(oracle=(0.9, 0.8, 0.7))))
    assert check_gap_closed(scores, parts, **OPTIONS).outcome == "holds"


def test_where_there_is_no_gap_nothing_is_asked() -> None:
    claim = closed_here()
    line = line_of(claim, "query_aware", 0.4, "held-out")
    assert (line.outcome, line.required, line.estimate, line.gap) == ("no gap", False, None, 0.0)
    # Of seen tasks the oracle is 5 points above: there it is asked.
    seen = line_of(claim, "query_aware", 0.4, "seen")
    assert (seen.required, seen.estimate) == (True, 0.0)
    assert seen.gap == pytest.approx(5.0)


def test_a_gap_that_some_resamples_lack_is_judged_without_a_division() -> None:
    few = {"snapkv": (0.8, 0.7, 0.6), "keydiff": (0.8, 0.7, 0.6), "oracle": (0.9, 0.8, 0.7)}
    scores, parts = check_of(changed(**few), items=10, seeds=(0,))
    claim = check_gap_closed(scores, parts, **OPTIONS)
    line = line_of(claim, "context_only", 0.1, "held-out")
    assert (line.low, line.estimate, line.outcome) == (None, 1.0, "holds")
    assert "in some resamples there is no gap; judged by won - 0.8 gap: +2.0" in line.note


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
    line = line_of(check_gap_closed(scores, PARTS, **OPTIONS), "context_only", 0.1, "seen")
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
    line = line_of(check_gap_closed(scores, PARTS, **OPTIONS), "context_only", 0.1, "seen")
    assert line.estimate == pytest.approx(0.5)  # (75 - 50) / (100 - 50)
    assert line.crossed == pytest.approx(0.5, abs=0.06)  # by turns: (75 - 0) / (100 - 0)


def test_an_oracle_is_asked_for_where_there_can_be_one() -> None:
    """In the regimes that share a prefill a missing oracle, at any budget, leaves its claims open; in the
    others the lines say so and ask nothing."""
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    scores, parts = check_of(rates)
    for check in (check_near_oracle, check_gap_closed):
        claim = check(scores, parts, **OPTIONS)
        assert claim.outcome == "holds"
        beside = [one for one in claim.lines if one.regime in ("chunked", "decode")]
        assert beside and {(one.outcome, one.required) for one in beside} == {("not measured", False)}
        assert {one.note for one in beside} == {"no oracle in this regime"}
    without = {cell: own for cell, own in rates.items() if cell != ("query_aware", "oracle", 0.2)}
    scores, parts = check_of(without)
    for check in (check_near_oracle, check_gap_closed):
        claim = check(scores, parts, **OPTIONS)
        assert claim.outcome == "undecided"
        missing = [one for one in claim.lines if one.required and one.outcome == "not measured"]
        assert {(one.regime, one.budget) for one in missing} == {("query_aware", 0.2)}


def test_a_run_without_an_oracle_measures_neither_claim_about_it() -> None:
    scores, parts = check_of({cell: own for cell, own in RATES.items() if cell[1] != "oracle"})
    assert check_gap_closed(scores, parts, **OPTIONS).outcome == "not measured"
    assert check_near_oracle(scores, parts, **OPTIONS).outcome == "not measured"


def test_a_run_of_one_family_has_one_average() -> None:
    rows = [row for row in make_rows(RATES) if row["task"] == "odd"]
    scores = gather(rows, ["odd"])
    assert (groups_of(SCORES), groups_of(scores)) == (["all", "seen", "held-out"], ["held-out"])
    lines = check_not_worse(scores, PARTS, **OPTIONS).lines
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


def make_manifest(**changes: Any) -> dict[str, Any]:
    tasks = {
        name: {"family": family, "metric": "exact match", "primary": "exact", "version": 1}
        for name, family in FAMILY.items()
    }
    return {
        "run": "made",
        "config": {"suite": "stub", "first_item": FRESH_FROM},
        "tasks": tasks,
        "identity": {"gates": {str(seed): {"sha256": f"{seed}" * 64} for seed in SEEDS}},
        "code_states": [{"commit": "a" * 40, "clean": True}],
        "finished": "2026-01-02T03:04:05+00:00",
        **changes,
    }


def unmet(manifest: dict[str, Any], scores: Scores = SCORES) -> list[str]:
    return [one.text for one in check_conditions(scores, PARTS, [manifest]) if not one.holds]


def test_conditions_say_what_a_run_lacks() -> None:
    assert unmet(make_manifest()) == ["at least 200 items a task"]
    enough, _ = check_of(changed(), items=80)
    assert unmet(make_manifest(), enough) == []
    # Three seeds that answer with one set of gates are one.
    same = {"gates": {str(seed): {"sha256": "0" * 64} for seed in SEEDS}}
    assert unmet(make_manifest(identity=same), enough) == ["at least 3 seeds, each with gates of its own"]
    other = make_manifest()
    other["identity"]["gates_of_policies"] = {"fused": {str(s): {"sha256": f"f{s}" * 32} for s in SEEDS}}
    assert unmet(other, enough) == ["gate and fused take the same gates"]
    dirty = make_manifest(code_states=[{"commit": "a" * 40, "clean": False}])
    del dirty["finished"]
    assert unmet(dirty, enough) == ["the run is finished", "the code was clean"]


def test_items_that_something_was_chosen_on_are_found() -> None:
    enough, _ = check_of(changed(), items=80)
    configs = {"low": {"suite": "stub", "first_item": 1999}, "older": {"suite": "stub"}}
    runs = [make_manifest(), *(make_manifest(run=run, config=own) for run, own in configs.items())]
    assert [len(unmet(run, enough)) for run in runs] == [0, 1, 1]
    (found,) = [one for one in check_conditions(enough, PARTS, runs) if not one.holds]
    assert found.numbers == "made from 2000 on, low from 1999 on, older from 0 on"


def test_unequal_bytes_are_found() -> None:
    rows = make_rows(changed(), items=80)
    for row in rows:
        if row["policy"] == "keydiff" and row["budget"] == 0.2:
            row["bytes_held"] = round(1.01 * row["bytes_held"])
    scores = gather(rows, list(FAMILY))
    assert unmet(make_manifest(), scores) == ["equal achieved bytes in every cell"]
    numbers = [one.numbers for one in check_conditions(scores, PARTS, [make_manifest()])]
    assert "at most 1.00 % apart (keydiff, context_only, 0.2)" in numbers


def write_run(folder: Path, manifest: dict[str, Any], rates: Rates, items: int) -> Path:
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = [json.dumps(row) for row in make_rows(rates, items)]
    (folder / "items.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


def test_the_command_writes_both_files_and_says_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"learned": True, "allocation": {"head_classes": None}, "scope": "model"}
    manifest = make_manifest()
    manifest["identity"]["policies"] = {"fused": settings, "gate": {**settings, "scope": "head"}}
    folder = write_run(tmp_path, manifest, complete(RATES), 20)
    assert main([str(folder), "--resamples", "300"]) == 0
    printed = capsys.readouterr().out
    assert "condition not met: at least 200 items a task: 60 (copy)" in printed
    assert "holds: context_only, keep_ratio 0.1 and 0.2: fused is better than" in printed
    found = json.loads((folder / "claims.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert [claim["name"] for claim in found["claims"]] == [
        "better",
        "not worse",
        "near the oracle",
        "gap closed",
    ]
    assert (found["run"], found["holds"], found["parts"]["gate"]) == ("made", False, "gate")
    assert found["claims"][0]["outcome"] == "holds"
    first = found["claims"][0]["lines"][0]
    assert (first["outcome"], first["against"], first["num_items"], len(first["by_seed"])) == (
        *("holds", "snapkv", 180, 3),
    )
    page = (folder / "claims.md").read_text(encoding="utf-8")
    assert "`fused` and `gate` differ in: scope (model / head)." in page
    assert "| holds | context_only | 0.1 | all | snapkv | 80.0 | 36.7 | 100.0 | +43.3 |" in page
    assert " | context_only | 0.1 | seen | keydiff | 85.0 | 35.0 | 100.0 | +90.9 | [+" in page
    heads = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert heads == {4, 18}
    assert main([str(folder), "--resamples", "300", "--check"]) == 1


def test_the_command_is_content_where_everything_holds(tmp_path: Path) -> None:
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    folder = write_run(tmp_path, make_manifest(), rates, 80)
    out = tmp_path / "beside"
    out.mkdir()
    assert main([str(folder), "--resamples", "300", "--check", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["claims.json", "claims.md"]
    assert not (folder / "claims.md").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is no run of eval/compare.py" in capsys.readouterr().err
    folder = write_run(tmp_path, make_manifest(), RATES, 2)
    assert main([str(folder), "--gate", "gat"]) == 2
    assert "did you mean 'gate'" in capsys.readouterr().err

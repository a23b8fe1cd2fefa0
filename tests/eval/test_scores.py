"""Scores and comparisons from a table, against sums by hand."""

import numpy as np
import pytest
from pandas import DataFrame

from retain.eval.report.table import with_lines
from retain.eval.stats.paired import judge
from retain.eval.stats.scores import checked, comparisons, scores, strata
from tests.eval.made_table import RIGHT, rows
from tests.refused import refused


def table(lines=None) -> DataFrame:
    return with_lines(DataFrame(rows() if lines is None else lines))


def test_a_score_is_the_mean_over_strata_of_the_mean_over_items():
    found = scores(table()).set_index(["line", "budget"])
    for policy, shares in RIGHT.items():
        for ratio, share in shares.items():
            one = found.loc[policy, f"keep_ratio={ratio:g}"]
            assert one.score == pytest.approx(100 * share)
            assert (one["items"], one.keep_ratio) == (40, ratio)
    by_hand = 100 * np.sqrt(2 * 0.4 * 0.6 / 19) / 2  # two strata of 20: variance of the mean 0.24 / 19 each
    assert found.loc["snapkv", "keep_ratio=0.1"].error == pytest.approx(by_hand)


def test_rows_of_one_context_are_one_item():
    """Four questions on each of five contexts are five items, each the mean of its four."""
    lines = [{**line, "context_id": f"{line['item'] // 4}"} for line in rows()]
    values = strata(
        table([line for line in lines if line["policy"] == "snapkv" and line["keep_ratio"] == 0.1])
    )
    assert [one.tolist() for one in values] == [[100.0, 100.0, 0.0, 0.0, 0.0]] * 2
    assert set(scores(table(lines))["items"]) == {10}


def test_trained_policies_are_compared_with_the_best_other():
    made = comparisons(table(), margin=2.0, resamples=500)
    assert {(one.line, one.baseline, one.budget) for one in made} == {
        (line, "snapkv", budget)
        for line in ("gate", "learned")
        for budget in ("keep_ratio=0.1", "keep_ratio=0.2")
    }
    assert {one.result.family_size for one in made} == {4}
    assert {(one.line, one.budget[-3:]): one.result.verdict for one in made} == {
        ("gate", "0.1"): "better",
        ("learned", "0.1"): "better",
        ("gate", "0.2"): "inconclusive",
        ("learned", "0.2"): "better",
    }
    # As the statistics of arrays have it.
    frame = table()
    side = {
        line: strata(frame[(frame.line == line) & (frame.budget == "keep_ratio=0.1")])
        for line in ("gate", "snapkv")
    }
    alone = judge({0: (side["gate"], side["snapkv"])}, margin=2.0, resamples=500)[0]
    gate = next(one.result for one in made if (one.line, one.budget) == ("gate", "keep_ratio=0.1"))
    assert gate.interval == alone.interval and gate.holm_p >= alone.holm_p


def test_a_named_baseline_is_what_all_others_are_compared_with():
    made = comparisons(table(), margin=2.0, resamples=500, baseline="learned")
    assert {one.line for one in made} == {"random", "snapkv", "gate"} and {one.baseline for one in made} == {
        "learned"
    }
    refused(
        "baseline='h2o' was not measured. There are: full, random",
        comparisons,
        table(),
        margin=2.0,
        baseline="h2o",
    )


def test_the_full_cache_is_a_baseline_at_every_budget():
    made = comparisons(table(), margin=2.0, resamples=500, baseline="full")
    assert {(one.line, one.baseline) for one in made} == {
        (line, "full") for line in ("random", "snapkv", "gate", "learned")
    }
    estimate = {(one.line, one.budget): one.result.interval.estimate for one in made}
    assert len(estimate) == 8 and estimate["snapkv", "keep_ratio=0.1"] == pytest.approx(40 - 90)


def test_each_time_of_eviction_is_a_family_and_without_gates_nothing_is_judged():
    known = [{**line, "question": "known"} for line in rows()]
    made = comparisons(table(rows() + known), margin=2.0, resamples=500)
    assert len(made) == 8 and {one.result.family_size for one in made} == {4}
    assert comparisons(table([line for line in rows() if line["gates"] is None]), margin=2.0) == []
    assert comparisons(table([line for line in rows() if line["gates"]]), margin=2.0) == []


def test_weights_of_heads_are_training_too():
    """The resolved settings of a policy say whether it takes measured weights, not its name."""
    lines = [{**line, "policy": "mine"} if line["policy"] == "snapkv" else line for line in rows()]
    by_head = {"mine": {"policy": {"allocation": {"weights": {"0": [1.0, 0.5]}}}, "gates": None}}
    plain = {"random": {"policy": {"allocation": {"weights": None}}, "gates": None}}
    frame = with_lines(DataFrame(lines), {"policies": by_head | plain})
    assert {*frame["line"][frame["trained"]]} == {"gate", "learned", "mine"}


def test_an_unfinished_or_damaged_table_is_refused():
    lines = rows()
    place = next(i for i, line in enumerate(lines) if (line["policy"], line["keep_ratio"]) == ("snapkv", 0.1))
    without_one = table(lines[:place] + lines[place + 1 :])
    refused("There are no results to report", checked, table([]))
    refused("snapkv at keep_ratio=0.1 .* has 39 of 40 answers", checked, without_one)
    assert len(checked(table())) == len(lines)

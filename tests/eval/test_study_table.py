"""What a study says of its ingredients, from scores that were made up so that the answer is known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.eval.config import GateSource
from retain.eval.stats.summary import Cell, Scores, gather
from retain.eval.study.picture import draw_study
from retain.eval.study.plan import Level, StudyConfig, Winner, plan_of
from retain.eval.study.table import (
    Entry,
    Ingredient,
    as_markdown,
    as_rows,
    entries_of,
    ingredients_of,
    nothing_evicted,
    tables_of,
    unequal_bytes,
)
from tests.eval.made_rows import make_row
from tests.eval.stub import STUB, stub_config

OPTIONS: dict[str, Any] = {"margin": 2.0, "resamples": 400}
BUDGETS = (0.1, 0.2)
TASKS = {"copy": "seen", "pair": "seen", "odd": "held-out"}
ITEMS = 80
# How many of 40 pairs of items a line answers at each budget; what fewer answer is part of what more do.
SKILL = {
    "winner": (20, 30),
    "fusion=learned": (8, 30),
    "fusion=observed": (8, 10),
    "scope=head": (32, 30),
    "gates=other": (19, 29),
    "snapkv": (4, 5),
}
LEARNED = Level(("fusion=learned",), absent=True)
OBSERVED = Level(("fusion=observed", "learned=false"), absent=True)


def make_study(folder: Path, **changes: Any) -> StudyConfig:
    study = StudyConfig(
        compare=replace(stub_config(folder), gate_sets={}),
        winner=Winner(("fused", "fusion=max", "draw=null")),
        factors={
            "fusion": {"max": Level(), "learned": LEARNED, "observed": OBSERVED},
            "scope": {"model": Level(), "head": Level(("scope=head",), absent=True)},
            "again": {"head": Level(("scope=head",)), "far": Level(elsewhere="on the moon")},
        },
        references=("snapkv",),
    )
    return replace(study, **changes)


def make_rows(lines: tuple[str, ...], regimes: tuple[str, ...] = ("context_only",)) -> list[dict[str, Any]]:
    return [
        _row(regime, line, budget, task, family, seed, item, line == "full" or item < SKILL[line][at])
        for regime in regimes
        for task, family in TASKS.items()
        for seed in (0, 1)
        for item in range(ITEMS // 2)
        for line in ("full", *lines)
        for at, budget in enumerate((1.0,) if line == "full" else BUDGETS)
    ]


def _row(regime: str, line: str, *place: Any) -> dict[str, Any]:
    row = make_row(regime, line, *place)
    return row | {"bytes_held": row["bytes_held"] * (1.1 if line == "snapkv" else 1.0)}


def scores_of(lines: tuple[str, ...] = tuple(SKILL), **more: Any) -> Scores:
    return gather(make_rows(lines, **more), [*TASKS])


def at(entries: list[Entry], level: str, budget: float, family: str = "all", table: str = "fusion") -> Entry:
    place = (table, level, budget, family)
    (one,) = [one for one in entries if (one.table, one.level, one.budget, one.family) == place]
    return one


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    study = make_study(tmp_path_factory.mktemp("study"))
    plan = plan_of(study, STUB)
    scores = scores_of()
    return study, plan, scores, entries_of(scores, tables_of(study, plan), **OPTIONS)


def test_tables_hold_the_winner_and_name_lines(made):
    study, plan, _, _ = made
    assert tables_of(study, plan) == {
        "fusion": {"max": "winner", "learned": "fusion=learned", "observed": "fusion=observed"},
        "scope": {"model": "winner", "head": "scope=head"},
        "again": {"winner": "winner", "head": "scope=head"},
        "references": {"winner": "winner", "snapkv": "snapkv"},
    }


def test_every_level_is_the_naive_difference(made):
    *_, entries = made
    rows = make_rows(tuple(SKILL))

    def naive(line: str, budget: float, tasks: list[str], seed: int | None = None) -> float:
        means = []
        for task in tasks:
            own = [
                100 * row["score"]
                for row in rows
                if (row["policy"], row["budget"], row["task"]) == (line, budget, task)
                and seed in (None, row["seed"])
            ]
            means.append(sum(own) / len(own))
        return sum(means) / len(means)

    families = {"all": [*TASKS], "seen": ["copy", "pair"], "held-out": ["odd"]}
    for one in entries:
        tasks = families[one.family]
        assert one.mean == pytest.approx(naive(one.line, one.budget, tasks))
        if one.line == "winner":
            assert one.made is None and one.word is None and not one.seeds
            continue
        difference = naive(one.line, one.budget, tasks) - naive("winner", one.budget, tasks)
        assert one.made.result.estimate == pytest.approx(difference)
        for seed in (0, 1):
            own = naive(one.line, one.budget, tasks, seed) - naive("winner", one.budget, tasks, seed)
            assert one.seeds[seed] == pytest.approx(own)

    # Words are about the winner's choice.
    assert at(entries, "learned", 0.1).word == "pays"  # what stands in its place is 30 points worse
    assert at(entries, "learned", 0.2).word == "does not pay"  # the same answers
    assert at(entries, "head", 0.1, table="scope").word == "harms"
    assert at(entries, "learned", 0.2).made.verdict == "identical"
    assert at(entries, "snapkv", 0.1, table="references").made.verdict == "worse"


def test_a_small_difference_is_not_known_and_a_smaller_one_does_not_pay(tmp_path):
    study = make_study(tmp_path, factors={"fusion": {"max": Level(), "learned": LEARNED}}, references=())
    plan = plan_of(study, STUB)
    rows = [row for row in make_rows(("winner", "fusion=learned")) if row["budget"] in (0.1, 1.0)]
    for row in rows:
        if row["policy"] == "fusion=learned":  # two items of 80 in one task of three
            winner = row["item"] < SKILL["winner"][0]
            row["score"] = float(winner) if row["task"] != "copy" or row["item"] else 1.0 - float(winner)
    scores = gather(rows, [*TASKS])
    tables = tables_of(study, plan)
    small = entries_of(scores, tables, **OPTIONS)
    large = entries_of(scores, tables, margin=30.0, resamples=400)
    assert at(small, "learned", 0.1).made.result.estimate == pytest.approx(-100 * 2 / 80 / 3)
    assert at(small, "learned", 0.1).word == "not known"
    assert at(large, "learned", 0.1).word == "does not pay"


@pytest.mark.parametrize(("items", "word"), [(184, "not known"), (185, "does not pay")])
def test_the_same_answers_on_few_items_show_nothing(tmp_path, items, word):
    """The chance to see no difference on n items, of which a share 0.02 differs, is 0.98^n: below 0.05 / 2
    from 183 on, the whole number behind ln(0.025) / ln(0.98) = 182.6."""
    rows = [
        _row("context_only", line, budget, "copy", "seen", 0, item, item % 2 == 0)
        for line in ("winner", "a")
        for budget in BUDGETS
        for item in range(items - 2)
    ]
    entries = entries_of(gather(rows), {"t": {"winner": "winner", "a": "a"}}, **OPTIONS)
    assert at(entries, "a", 0.1, table="t").word == word
    assert (0.98 ** (items - 2) < 0.05 / 2) == (word == "does not pay")


def test_one_table_of_one_regime_is_one_holm_family(made):
    study, plan, scores, _ = made
    # Two levels of one line are tested once.
    tables = {"t": {"winner": "winner", "a": "scope=head", "b": "scope=head"}}
    entries = entries_of(scores, tables, **OPTIONS)
    assert at(entries, "a", 0.1, table="t").made == at(entries, "b", 0.1, table="t").made
    assert at(entries, "a", 0.1, table="t").made.result.family_size == 2
    scores = scores_of(regimes=("context_only", "query_aware"))
    entries = entries_of(scores, tables_of(study, plan), **OPTIONS)
    sizes = {one.table: one.made.result.family_size for one in entries if one.made is not None}
    assert sizes == {"fusion": 4, "scope": 2, "again": 2, "references": 2}
    for regime in ("context_only", "query_aware"):
        own = [one for one in entries if (one.table, one.regime, one.family) == ("fusion", regime, "seen")]
        raw = sorted((one.made.result.p, one.made.result.holm_p) for one in own if one.made is not None)
        stepped = np.maximum.accumulate([min(1.0, p * (len(raw) - rank)) for rank, (p, _) in enumerate(raw)])
        assert [holm for _, holm in raw] == pytest.approx(stepped)


def ingredients(made: Any, factor: str, family: str = "all") -> list[Ingredient]:
    study, plan, _, entries = made
    found = ingredients_of(study, plan, entries)
    return [one for one in found if (one.factor, one.family) == (factor, family)]


def test_what_each_level_leaves_out_is_asked_for_itself(made):
    alone, other = ingredients(made, "fusion")
    # At 0.1 both are worse than the winner; at 0.2 one of them is as good.
    assert alone.places == {("context_only", 0.1): "pays", ("context_only", 0.2): "does not pay"}
    assert other.places == {("context_only", 0.1): "pays", ("context_only", 0.2): "pays"}
    assert (alone.chosen, alone.absent, alone.sentence) == ("max", "learned", "pays at 1 of 2 places")
    assert (other.chosen, other.absent, other.sentence) == ("max", "observed", "pays")


def test_an_ingredient_may_harm_and_may_not_be_known(tmp_path, made):
    (scope,) = ingredients(made, "scope", "held-out")
    # The same 80 answers leave more than two points open; the same 240 do not.
    assert scope.places == {("context_only", 0.1): "harms", ("context_only", 0.2): "not known"}
    assert scope.verdict == "harms"
    (over_all,) = ingredients(made, "scope")
    assert over_all.places["context_only", 0.2] == "does not pay"
    (again,) = ingredients(made, "again")
    assert (again.chosen, again.absent, again.verdict) == (None, None, "not asked")
    # A winner without the ingredient has nothing to defend.
    absent = {"max": Level(absent=True), "learned": replace(LEARNED, absent=False)}
    study = make_study(tmp_path, factors={"fusion": absent}, references=())
    plan = plan_of(study, STUB)
    entries = entries_of(made[2], tables_of(study, plan), **OPTIONS)
    assert {one.verdict for one in ingredients_of(study, plan, entries)} == {"not asked"}


def test_where_all_tasks_are_of_one_family_nothing_is_said_twice(made):
    study, plan, *_ = made
    rows = [row for row in make_rows(("winner", "fusion=learned")) if row["family"] == "held-out"]
    scores = gather(rows, ["odd"])
    entries = entries_of(scores, {"fusion": {"max": "winner", "learned": "fusion=learned"}}, **OPTIONS)
    assert {one.family for one in entries} == {"all"} and len(entries) == 2 * len(BUDGETS)
    assert [one.family for one in ingredients_of(study, plan, entries)] == ["all", "all"]
    assert "- context_only: all 100.0\n" in as_markdown(study, plan, scores, entries, head=())


@pytest.mark.parametrize(
    ("words", "verdict", "said"),
    [
        (("pays", "not known", "pays"), "pays", "pays at 2 of 3 places"),
        (("pays",), "pays", "pays"),
        (("pays", "harms"), "pays here, harms there", "pays here, harms there"),
        (("harms", "not known"), "harms", "harms at 1 of 2 places"),
        (("does not pay", "not known"), "not known", "not known"),
        (("does not pay",), "does not pay", "does not pay"),
        ((), "not asked", "not asked: the winner leaves it out"),
    ],
)
def test_over_all_places(words, verdict, said):
    """And in words, of how many of them it is said."""
    places = {("context_only", float(number)): word for number, word in enumerate(words)}
    one = Ingredient("f", "all", "x", "y", places)
    assert (one.verdict, one.sentence) == (verdict, said)
    alone = replace(one, absent=None, places={})
    assert alone.sentence == "not asked: its levels are alternatives, and none leaves it out"


def test_the_report_says_what_was_found_and_what_was_not_asked(made):
    study, plan, scores, entries = made
    text = as_markdown(study, plan, scores, entries, head=("Made up.",))
    assert "| fusion | all | max | learned | 1 | 1 | 0 | 0 | pays at 1 of 2 places |" in text
    assert "| fusion | all | max | observed | 2 | 0 | 0 | 0 | pays |" in text
    assert "- far: `no change`; not measured here: on the moon" in text
    assert "- head: `scope=head`; the same line as scope=head" in text
    assert "- max: `no change`; the winner" in text
    assert "- context_only: all 100.0, seen 100.0, held-out 100.0" in text
    assert "- snapkv holds +10.0 % of the winner's bytes (context_only, " in text  # a reference too
    (row,) = [line for line in text.splitlines() if line.startswith("| 0.1 | learned |")]
    one = at(entries, "learned", 0.1)
    said = f"pays, p = {one.made.result.holm_p:.3f}"
    assert one.made.result.holm_p < 0.05 and f"| 20.0 | -30.0 {one.made.interval.spelled()} | {said} |" in row
    assert row.endswith(f"| {one.seeds[0]:+.1f} {one.seeds[1]:+.1f} |")
    tables = [line for line in text.splitlines() if line.startswith("| 0.")]
    assert len(tables) == 2 * (3 + 2 + 2 + 2)  # budgets times levels, in each table
    for line, above in zip(text.splitlines()[1:], text.splitlines(), strict=False):
        if line.startswith("|") and above.startswith("|"):
            assert line.count("|") == above.count("|"), line
    # Rows can be written as JSON.
    rows = json.loads(json.dumps(as_rows(entries), allow_nan=False))
    assert len(rows) == len(entries)
    row = rows[entries.index(at(entries, "learned", 0.1))]
    assert row["word"] == "pays" and row["verdict"] == "worse" and row["seeds"] == {"0": -30.0, "1": -30.0}
    assert row["difference"] == pytest.approx(-30.0) and row["low"] < row["difference"] < row["high"]


def test_an_interval_that_is_not_known_is_null_and_is_not_drawn(tmp_path, made):
    study, plan, *_ = made
    rows = [row for row in make_rows(("winner", "scope=head")) if row["item"] == 20 and row["seed"] == 0]
    scores = gather(rows, [*TASKS])  # one item a task, on which they differ at 0.1
    entries = entries_of(scores, {"scope": {"model": "winner", "head": "scope=head"}}, **OPTIONS)
    one = at(entries, "head", 0.1, table="scope")
    assert one.made.interval.undefined and one.word == "not known"
    (row,) = as_rows([one])
    assert row["low"] is None and row["high"] is None
    json.dumps(as_rows(entries), allow_nan=False)
    draw_study(entries, tmp_path / "s.png", title="one item")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_lines_that_hold_more_than_the_winner_are_told(made):
    _, _, scores, _ = made
    assert unequal_bytes(scores, ["scope=head"]) == []
    assert unequal_bytes(scores, ["snapkv"]) == [
        "snapkv holds +10.0 % of the winner's bytes (context_only, keep_ratio 0.1)",
        "snapkv holds +10.0 % of the winner's bytes (context_only, keep_ratio 0.2)",
    ]
    more, winner = (Cell("context_only", name, 0.1) for name in ("snapkv", "winner"))
    assert scores.bytes_apart(more, winner) == pytest.approx(0.1)
    assert scores.bytes_apart(winner, more) == pytest.approx(1 / 1.1 - 1)
    assert scores.bytes_apart(more._replace(budget=0.7), winner) is None


def test_answers_that_were_given_before_anything_had_gone_are_told():
    rows = make_rows(("winner", "scope=head"))
    for row in rows:
        row["attended_ratio"] = 1.0 if row["budget"] == 0.2 else 0.5
    said = (
        "nothing had been evicted before an answer ended (context_only, keep_ratio 0.2): lower compare.every"
    )
    assert nothing_evicted(gather(rows)) == [said]
    row = next(row for row in rows if (row["policy"], row["budget"]) == ("winner", 0.2))
    row["attended_ratio"] = 0.9
    assert nothing_evicted(gather(rows)) == []


def test_a_grid_has_one_table_and_averages(tmp_path):
    scopes = {"model": Level(), "head": Level(("scope=head",))}
    scopes["quotas"] = Level(("scope=head", "allocation.quotas=calibrated"))
    factors = {"fusion": {"max": Level(), "observed": OBSERVED}, "scope": scopes}
    study = make_study(tmp_path, factors=factors, plan="grid", cross=("fusion", "scope"), references=())
    plan = plan_of(study, STUB)
    assert [*plan.lines] == [
        *("winner", "fusion=max,scope=head", "fusion=max,scope=quotas"),
        *("fusion=observed,scope=model", "fusion=observed,scope=head"),
    ]
    skill = dict(zip(plan.lines, (20, 12, 16, 8, 4), strict=True))
    SKILL.update({name: (number, number) for name, number in skill.items() if name != "winner"})
    scores = scores_of(tuple(plan.lines))
    tables = tables_of(study, plan)
    assert tables == {"grid": {name: name for name in plan.lines}}
    entries = entries_of(scores, tables, **OPTIONS)
    assert {one.made.result.family_size for one in entries if one.made is not None} == {8}
    assert ingredients_of(study, plan, entries) == []
    text = as_markdown(study, plan, scores, entries, head=())
    # 20 is the winner's at 0.1 (30 at 0.2): of 40 items, in per cent, over the combinations that there are.
    first, second = (20 + 12 + 16) / 3 / 0.4, (30 + 12 + 16) / 3 / 0.4
    assert f"| fusion | max | {first:.1f} | {second:.1f} |" in text
    assert f"| scope | quotas | {16 / 0.4:.1f} | {16 / 0.4:.1f} |" in text
    assert "left out of the grid, since it cannot be: fusion=observed,scope=quotas" in text


def test_a_factor_without_an_absent_level_says_so_and_two_changes_are_told(tmp_path):
    gates = {"other": GateSource(str(tmp_path / "other-seed{seed}"))}
    factors = {
        "scope": {"model": Level(), "head": Level(("scope=head",))},
        "fusion": {"max": Level(), "learned": replace(LEARNED, gates="other")},
    }
    study = make_study(tmp_path, factors=factors, references=())
    study = replace(study, compare=replace(study.compare, gate_sets=gates))
    plan = plan_of(study, STUB)
    scores = scores_of(("winner", "scope=head", "fusion=learned"))
    entries = entries_of(scores, tables_of(study, plan), **OPTIONS)
    text = as_markdown(study, plan, scores, entries, head=["head"])
    scope, fusion = text.partition("## scope")[2].partition("## fusion")[::2]
    assert "These are alternatives: none of them leaves the ingredient out" in scope
    assert "These are alternatives" not in fusion
    assert "the ingredient left out; two changes at once: policy and gates" in fusion
    assert "| scope | all | model | no level is marked `absent` |" in text
    assert "not asked: its levels are alternatives, and none leaves it out |" in text
    assert "| learned (policy and gates at once) |" in text
    assert "one place alone that pays, among many, may be chance" in text


def test_agreement_counts_for_as_many_items_as_the_smallest_task_has():
    """600 items of one task and 60 of another that are all alike: the second says little of its own."""
    lines = ("winner", "fusion=learned")
    rows = [
        _row("context_only", line, budget, task, "seen", 0, item, True)
        for task, items in (("copy", 600), ("pair", 60))
        for line in lines
        for budget in BUDGETS
        for item in range(items)
    ]
    tables = {"fusion": {"max": "winner", "learned": "fusion=learned"}}
    entries = entries_of(gather(rows, ["copy", "pair"]), tables, **OPTIONS)
    one = at(entries, "learned", 0.1)
    assert (one.items, one.made.result.num_clusters) == (120, 660)
    # 100 (1 - (0.05 / 2)^(1 / 120)) = 3.0 points are left open; of 660 equal items it would be 0.6.
    assert (one.made.verdict, one.word) == ("identical", "not known")
    equal = [row for row in rows if row["task"] == "copy"]
    known = at(entries_of(gather(equal, ["copy"]), tables, **OPTIONS), "learned", 0.1)
    assert (known.items, known.word) == (600, "does not pay")

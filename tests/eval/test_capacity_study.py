"""The study of what foretells a wrong answer: its areas against plain pairs, items under all budgets."""

import itertools
import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

import retain
from retain.eval.diagnose import capacity as capacity_study
from retain.eval.diagnose.capacity import (
    SIGNALS,
    auroc,
    auroc_within,
    best_limit,
    items_of,
    main,
    said,
    study,
    tables,
    written,
)
from retain.eval.tasks.reference_basic import item_writer
from retain.eval.tasks.reference_shift import CROWD, crowd_item, reference_shift_item
from retain.eval.tasks.suites import load_suite
from retain.reference import load_model
from tests.eval.stub import STUB
from tests.hf.regime_runs import gates_of
from tests.hf.test_calibrated import curve


def crowd(facts, context_tokens):
    return crowd_item(item_writer(f"crowd{facts}", 0, 0), facts, context_tokens)


def pairs(values, wrong):
    """Over all pairs of a failure and an answer, the share in which the failure is higher; ties are half."""
    hits = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, failed in zip(values, wrong, strict=True)
        if failed
        for b, other in zip(values, wrong, strict=True)
        if not other
    ]
    return sum(hits), len(hits)


def drawn(seed: int, count: int = 60):
    draw = np.random.default_rng(seed)
    wrong = (draw.random(count) < 0.3).tolist()
    values = np.round(draw.normal(size=count) + np.asarray(wrong), 1).tolist()
    return values, wrong, draw.integers(0, 4, count).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_areas_are_those_of_plain_pairs(seed):
    values, wrong, cells = drawn(seed)
    hits, count = pairs(values, wrong)
    assert auroc(values, wrong) == pytest.approx(hits / count)
    parts = []
    for cell in set(cells):
        own = [place for place, other in enumerate(cells) if other == cell]
        parts.append(pairs([values[place] for place in own], [wrong[place] for place in own]))
    within = sum(hits for hits, _ in parts) / sum(count for _, count in parts)
    assert auroc_within(values, wrong, cells) == pytest.approx(within)


def test_where_all_went_alike_there_is_no_area_and_a_limit_says_what_it_finds():
    assert math.isnan(auroc([1.0, 2.0], [True, True])) and math.isnan(auroc([1.0], [False]))
    assert math.isnan(auroc_within([1.0, 2.0], [True, False], ["a", "b"]))
    assert best_limit(np.asarray([1.0, 2.0]), np.asarray([False, False])) == math.inf
    prices, wrong = np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([False, False, True, True])
    assert best_limit(prices, wrong) == 2.0
    names = ("limit", "warned", "found", "wrong_if_warned", "wrong_if_not")
    assert said(prices, wrong, 2.0) == dict(zip(names, (2.0, 0.5, 1.0, 1.0, 0.0), strict=True))
    assert said(prices, wrong, 9.0)["wrong_if_warned"] is None


def test_a_crowd_is_as_long_as_asked_and_written_as_that_of_the_shifted_tasks():
    """By one function: the writers differ, which follow from the task's name."""
    crowds, again = (
        [item for *_, item in items_of(load_suite("reference"), 0, [20], [], 5, 400)] for _ in range(2)
    )
    item = crowds[3]
    assert len(item.context_ids) == 400 and item.context_ids == again[3].context_ids
    value = item.asked[0].gold_ids[0]
    assert item.context_ids.count(value) == 1 and item.asked[0].score([value])[0] == 1
    assert item.context_ids != crowds[4].context_ids and item.about == {"facts": 20, "length": 400}
    ((start, stop),) = item.needles
    assert value in item.context_ids[start:stop]
    with pytest.raises(ValueError, match="do not fit into a context of 100"):
        crowd(60, 100)
    ladder = crowd_item(item_writer("shift/crowd", 0, 1), CROWD[1], 1000)
    shifted = reference_shift_item("crowd", 0, 1, 1000)
    assert (ladder.context_ids, ladder.question_ids) == (shifted.context_ids, shifted.question_ids)


def test_the_page_says_the_whole_command(tmp_path, monkeypatch, capsys):
    """Every argument, as it came: `retain capacity` hands them on, and the process's own are others."""
    monkeypatch.setattr("sys.argv", ["retain", "capacity", "--seed", "9"])
    stand_ins = {
        "load_suite": lambda name: STUB,
        "attach": lambda model: None,
        "load_gates": lambda folder, model: SimpleNamespace(unit="risk"),
        "stored_limit": lambda gates: 5.0,
        "study": lambda *_, **__: [],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(capacity_study, name, stand_in)
    typed = ["--gates", "of mine", "--items", "3", "--facts", "8", "16", "--output", str(tmp_path / "out")]
    main(typed)
    page = (tmp_path / "out" / "capacity.md").read_text()
    (command,) = [line.strip("`") for line in page.splitlines() if line.startswith("`python")]
    assert shlex.split(command) == ["python", "-m", "retain.eval.diagnose.capacity", *typed]
    assert command in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["capacity_study.py", *typed[:-1], str(tmp_path / "own")])
    main()
    assert f"--facts 8 16 --output {tmp_path / 'own'}`" in (tmp_path / "own" / "capacity.md").read_text()


def test_items_under_all_budgets():
    model = load_model(0)
    gates, ratios = curve(gates_of(model)), (0.3, 0.6)
    items = [("crowd", facts, 0, crowd(facts, 260)) for facts in (4, 12)]
    with retain.attach(model):
        how = {"policy": "fused", "scopes": ("model", "head"), "keep_ratios": ratios, "limit": 5.0}
        cases = study(model, gates, iter(items), **how)
    places = {(case.facts, case.scope, case.keep_ratio) for case in cases}
    assert places == {*itertools.product((4, 12), ("model", "head"), ratios)}
    for small, large in zip(cases[0::2], cases[1::2], strict=True):
        assert small.signals["price"] >= large.signals["price"] > 0
        assert small.signals["lost"] > large.signals["lost"] > 0
        assert small.signals["total"] > large.signals["total"]
        assert small.signals["keep_ratio"] == -0.3
    made = tables(cases, [5.0])
    assert set(made["signals"]) == {"crowd, scope model", "crowd, scope head"}
    page = written(made, "the command")
    assert "`the command`" in page and all(f"| {name} |" in page for name in SIGNALS)

"""The study of what foretells a wrong answer: its areas against plain pairs, items under all budgets."""

import itertools
import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

import retain
from retain.eval.diagnose import capacity
from retain.eval.tasks.reference_basic import item_writer
from retain.eval.tasks.reference_shift import CROWD, crowd_item, reference_shift_item
from retain.eval.tasks.suites import load_suite
from retain.reference import load_model
from tests.eval.stub import STUB
from tests.hf.regime_runs import gates_of
from tests.hf.test_calibrated import curve
from tests.refused import refused


def pairs(values, wrong):
    """Over all pairs of a failure and an answer, the share in which the failure is higher; ties are half."""
    failed, right = ([a for a, b in zip(values, wrong, strict=True) if b == one] for one in (True, False))
    hits = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(failed, right)]
    return sum(hits), len(hits)


@pytest.mark.parametrize("seed", range(3))
def test_areas_are_those_of_plain_pairs(seed):
    draw = np.random.default_rng(seed)
    wrong = draw.random(60) < 0.3
    values = np.round(draw.normal(size=60) + wrong, 1)
    cells = draw.integers(0, 4, 60)
    hits, count = pairs(values, wrong)
    given = values.tolist(), wrong.tolist()
    assert capacity.auroc(*given) == pytest.approx(hits / count)
    parts = [pairs(values[cells == cell], wrong[cells == cell]) for cell in set(cells)]
    within = sum(hits for hits, _ in parts) / sum(count for _, count in parts)
    assert capacity.auroc(*given, cells.tolist()) == pytest.approx(within)


def test_where_all_went_alike_there_is_no_area_and_a_limit_says_what_it_finds():
    assert math.isnan(capacity.auroc([1.0, 2.0], [True, True])) and math.isnan(capacity.auroc([1.0], [False]))
    assert math.isnan(capacity.auroc([1.0, 2.0], [True, False], ["a", "b"]))
    assert capacity.best_limit(np.asarray([1.0, 2.0]), np.asarray([False, False])) == math.inf
    prices, wrong = np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([False, False, True, True])
    assert capacity.best_limit(prices, wrong) == 2.0
    names = ("limit", "warned", "found", "wrong_if_warned", "wrong_if_not")
    assert capacity.said(prices, wrong, 2.0) == dict(zip(names, (2.0, 0.5, 1.0, 1.0, 0.0), strict=True))
    assert capacity.said(prices, wrong, 9.0)["wrong_if_warned"] is None


def test_a_crowd_is_as_long_as_asked_and_written_as_that_of_the_shifted_tasks():
    suite = load_suite("reference")
    made, again = ([item for *_, item in capacity.items_of(suite, 0, [20], [], 5, 400)] for _ in range(2))
    item = made[3]
    assert len(item.context_ids) == 400 and item.context_ids == again[3].context_ids
    value = item.asked[0].gold_ids[0]
    assert item.context_ids.count(value) == 1 and item.asked[0].score([value])[0] == 1
    assert item.context_ids != made[4].context_ids and item.about == {"facts": 20, "length": 400}
    ((start, stop),) = item.needles
    assert value in item.context_ids[start:stop]
    refused("do not fit into a context of 100", crowd_item, item_writer("crowd60", 0, 0), 60, 100)
    # By one function: the writers differ, which follow from the task's name.
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
        monkeypatch.setattr(capacity, name, stand_in)
    typed = ["--gates", "of mine", "--items", "3", "--facts", "8", "16", "--output", str(tmp_path / "out")]
    capacity.main(typed)
    page = (tmp_path / "out" / "capacity.md").read_text()
    (command,) = [line.strip("`") for line in page.splitlines() if line.startswith("`python")]
    assert shlex.split(command) == ["python", "-m", "retain.eval.diagnose.capacity", *typed]
    assert command in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["capacity.py", *typed[:-1], str(tmp_path / "own")])
    capacity.main()
    assert f"--facts 8 16 --output {tmp_path / 'own'}`" in (tmp_path / "own" / "capacity.md").read_text()


def test_items_under_all_budgets():
    model = load_model(0)
    gates, ratios = curve(gates_of(model)), (0.3, 0.6)
    items = [
        ("crowd", facts, 0, crowd_item(item_writer(f"crowd{facts}", 0, 0), facts, 260)) for facts in (4, 12)
    ]
    with retain.attach(model):
        how = {"policy": "fused", "scopes": ("model", "head"), "keep_ratios": ratios, "limit": 5.0}
        cases = capacity.study(model, gates, iter(items), **how)
    places = {(case.facts, case.scope, case.keep_ratio) for case in cases}
    assert places == {*itertools.product((4, 12), ("model", "head"), ratios)}
    for small, large in zip(cases[0::2], cases[1::2], strict=True):
        assert small.signals["price"] >= large.signals["price"] > 0
        assert small.signals["lost"] > large.signals["lost"] > 0
        assert small.signals["total"] > large.signals["total"]
        assert small.signals["keep_ratio"] == -0.3
    made = capacity.tables(cases, [5.0])
    assert set(made["signals"]) == {"crowd, scope model", "crowd, scope head"}
    page = capacity.written(made, "the command")
    assert "`the command`" in page and all(f"| {name} |" in page for name in capacity.SIGNALS)

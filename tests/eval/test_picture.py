"""Pictures of runs have the lines that were measured, and no others."""

import itertools
from dataclasses import asdict

import matplotlib.figure
import pytest

from retain.eval.report import picture
from retain.eval.report.plots import looks_of, save_png
from retain.eval.run.results_store import MANIFEST, read_manifest, read_rows
from retain.eval.stats.summary import Cell, gather
from retain.process.provenance import write_json
from tests.eval.made_run import BUDGETS, make_rows, make_run


def test_a_figure_of_chosen_policies_has_their_lines(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "made")
    seen = []

    def look(panels, path, *, title):
        seen.extend(panel for row in panels for panel in row)
        return save_png(panels, path, title=title)

    monkeypatch.setattr(picture, "save_png", look)
    assert picture.main([str(folder), "--policies", "oracle", "random"]) == 0
    scores = gather(read_rows(folder))
    places = [*itertools.product(("context_only", "query_aware"), ("seen", "held-out"))]
    assert [panel.title for panel in seen] == [f"{regime}, {family} (2 tasks)" for regime, family in places]
    for panel, (regime, family) in zip(seen, places, strict=True):
        tasks = scores.tasks(family)
        assert [one.name for one in panel.series] == ["oracle", "random"]
        assert panel.rules == ((scores.mean(Cell(regime, "full", 1.0), tasks), "full cache"),)
        for one in panel.series:
            wanted = [scores.mean(Cell(regime, one.name, budget), tasks) for budget in BUDGETS]
            assert one.x == BUDGETS and one.y == pytest.approx(wanted)
    assert (folder / "chosen.png").stat().st_size > 10_000
    assert capsys.readouterr().out == f"Picture: {folder / 'chosen.png'}\n"


def test_items_that_seeds_share_count_once(tmp_path, monkeypatch):
    """As in the report: three seeds of a task that is the same for all are three answers to one item."""
    seen = []
    monkeypatch.setattr(picture, "draw", lambda scores, path, *, title: seen.append(scores))
    for seeded in (True, False):
        folder = make_run(tmp_path / str(seeded), policies=("gate",))
        manifest = read_manifest(folder)
        manifest["config"]["suite"] = "made"
        manifest["tasks"] = {name: own | {"seeded": seeded} for name, own in manifest["tasks"].items()}
        write_json(folder / MANIFEST, manifest)
        assert picture.main([str(folder), "--policies", "gate"]) == 0
    own, shared = (len(scores.strata(Cell("context_only", "gate", 0.2), ["copy"])[0]) for scores in seen)
    assert own == 2 * shared


def test_a_line_of_one_regime_is_in_the_legend(tmp_path, monkeypatch):
    rows = [
        asdict(row) | {"regime": {"context_only": "chunked", "query_aware": "context_only"}[row.regime]}
        for row in make_rows(("gate", "oracle"))
        if (row.regime, row.policy) != ("context_only", "oracle")
    ]
    legends = []
    legend = matplotlib.figure.Figure.legend

    def drawn(own, *how, **more):
        legends.append(legend(own, *how, **more))

    monkeypatch.setattr(matplotlib.figure.Figure, "legend", drawn)
    picture.draw(gather(rows), tmp_path / "a.png", title="made")
    assert {text.get_text() for text in legends[0].get_texts()} == {"gate", "oracle", "full cache"}


def test_a_ranking_is_sorted_by_the_middle_budget(monkeypatch):
    monkeypatch.setattr(picture, "MANY", 2)
    scores = gather([asdict(row) for row in make_rows()])
    panel, _ = picture.score_panels(scores, "context_only", looks_of(scores.policies), ["recency"])
    means = [dot.value for dot in panel.dots]
    assert means == sorted(means, reverse=True) and panel.rule > 90
    for (height, name), dot in zip(panel.names, panel.dots, strict=True):
        own = [scores.mean(Cell("context_only", name, budget), scores.tasks("seen")) for budget in BUDGETS]
        assert (dot.height, dot.value, dot.reach) == (height, own[1], (min(own), max(own)))
        assert dot.low <= dot.value <= dot.high and dot.hollow == (name == "recency")
    assert [name for _, name in panel.names][:2] == ["oracle", "gate"]


def test_a_policy_that_was_not_measured_is_refused_by_name(tmp_path, capsys):
    folder = make_run(tmp_path / "made")
    assert picture.main([str(folder), "--policies", "orakle", "gate"]) == 2
    assert "'orakle' (did you mean 'oracle'?)" in capsys.readouterr().err
    assert not (folder / "chosen.png").exists()
    assert picture.main([str(tmp_path / "none"), "--policies", "gate"]) == 2

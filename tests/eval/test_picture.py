"""A figure of chosen policies has these lines, and no others."""

from dataclasses import asdict

import pytest

from retain.eval.report import picture
from retain.eval.run.results_store import MANIFEST, read_manifest, read_rows
from retain.eval.stats.summary import Cell, gather
from retain.process.provenance import write_json
from tests.eval.made_run import BUDGETS, make_rows, make_run


def test_a_figure_of_chosen_policies_has_their_lines(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "made")
    seen = []
    save = picture._save

    def look(figure, path):
        for axis in figure.axes:
            lines = {line.get_label(): line for line in axis.get_lines()}
            seen.append((axis.get_title(), {name: line.get_xydata().T for name, line in lines.items()}))
        save(figure, path)

    monkeypatch.setattr(picture, "_save", look)
    assert picture.main([str(folder), "--policies", "oracle", "random"]) == 0
    scores = gather(read_rows(folder))
    assert [title.split(" families")[0] for title, _ in seen] == [
        f"{regime}, {family}" for regime in ("context_only", "query_aware") for family in ("seen", "held-out")
    ]
    for title, lines in seen:
        regime, family = title.split(" families")[0].split(", ")
        assert [*lines] == ["oracle", "random", "full cache"]
        for name in ("oracle", "random"):
            budgets, means = lines[name]
            assert tuple(budgets) == BUDGETS
            wanted = [scores.mean(Cell(regime, name, budget), scores.tasks(family)) for budget in BUDGETS]
            assert means.tolist() == pytest.approx(wanted)
    assert (folder / "chosen.png").stat().st_size > 10_000
    assert capsys.readouterr().out == f"Picture: {folder / 'chosen.png'}\n"


def test_items_that_seeds_share_count_once(tmp_path, monkeypatch):
    """As in the report: three seeds of a task that is the same for all are three answers to one item."""
    seen = []
    monkeypatch.setattr(picture, "draw", lambda scores, path, *, title: seen.append(scores))
    for seeded in (True, False):
        folder = make_run(tmp_path / str(seeded))
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
    monkeypatch.setattr(picture, "_save", lambda figure, path: legends.extend(figure.legends))
    picture.draw(gather(rows), tmp_path / "a.png", title="made")
    (legend,) = legends
    assert {text.get_text() for text in legend.get_texts()} == {"gate", "oracle", "full cache"}


def test_a_policy_that_was_not_measured_is_refused_by_name(tmp_path, capsys):
    folder = make_run(tmp_path / "made")
    assert picture.main([str(folder), "--policies", "orakle", "gate"]) == 2
    assert "'orakle' (did you mean 'oracle'?)" in capsys.readouterr().err
    assert not (folder / "chosen.png").exists()
    assert picture.main([str(tmp_path / "none"), "--policies", "gate"]) == 2


def test_one_policy_under_two_protections_is_two_lines_to_the_eye():
    looks = [
        picture._look(name, ("least", "joint")) for name in ("keydiff", "keydiff+least", "keydiff+joint")
    ]
    assert len({str(look.get("linestyle", "-")) for look in looks}) == 3
    assert len({look["color"] for look in looks}) == 1

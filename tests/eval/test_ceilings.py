"""What a cell could have shown, by hand: ceilings, noise, flags, nulls."""

import json
import math

import numpy as np
import pytest

from retain.eval.run.results_store import ITEMS
from retain.eval.stats.ceilings import CELLS, cells_of, discriminate, noise_of, write_cells
from retain.eval.stats.summary import Cell, gather
from tests.refused import refused

FULL = Cell("decode", "full", 1.0)


def rows(right, *, regime="decode", task="t", budget=0.2, questions=1, null=(), attended=None, beside=0):
    """Rows of policies that have so many of their items right, the first ones; `attended` holds the ratios
    of the items."""
    for policy, marks in right.items():
        for item, mark in enumerate(marks):
            for question in range(questions):
                missing = (policy, item, question) in null
                full = policy == "full"
                base, _, protection = policy.partition("+")
                yield {
                    **{"seed": 0, "task": task, "family": "seen", "item": item, "question": question},
                    **{"regime": regime, "policy": policy, "base_policy": base},
                    **{"protection": protection or "preset", "budget": 1.0 if full else budget},
                    **{"keep_ratio": 1.0 if full else 0.2, "score": 0.0 if missing else float(mark)},
                    **{"exact": 0.0, "partial": 0.0, "null": missing, "seen_entries": 100},
                    **{"kept_entries": 100 if full else 20 + item % 2, "bytes_held": 800},
                    **{"bytes_full": 800, "gate_bytes": 4 if policy == "gate" else 0},
                    **({} if attended is None else {"attended_ratio": attended[item % len(attended)]}),
                    **({"bytes_beside": beside + item} if beside else {}),
                }


def told(right, *, regime="decode", **more):
    return discriminate(gather(rows(right, regime=regime, **more)), regime, "t", 0.2)


def test_a_task_that_the_full_cache_fails_cannot_tell():
    made = told({"full": [0] * 20, "snapkv": [0] * 20, "random": [1] * 8 + [0] * 12})
    assert not made.yes and "the full cache scores 0.0" in made.why and made.ceiling == 0
    assert not made.falls
    # One right of forty is no more than its own noise: 1.96 * sqrt(39 / 40 / 40 * 40 / 39 / 40) points.
    made = told({"full": [1] + [0] * 39, "snapkv": [0] * 40})
    assert not made.yes and made.ceiling == 2.5 and "(4.9)" in made.why
    made = told({"full": [1] + [0] * 39, "snapkv": [0] * 40, "h2o": [1] * 40})
    assert not (made.yes or made.falls) and (made.spread, made.noise) == (100.0, 0.0)


def test_policies_within_their_noise_tell_nothing():
    same = [1] * 15 + [0] * 5
    made = told({"full": same, "snapkv": same, "h2o": same})
    assert (made.yes, made.spread, made.noise, made.falls) == (False, 0.0, 0.0, False)
    assert "best and worst differ by 0.0" in made.why
    made = told({"full": same, "snapkv": [1] * 14 + [0] * 6, "h2o": same})
    assert not made.yes and made.spread == pytest.approx(5.0) and (made.best, made.worst) == ("h2o", "snapkv")
    apart = told({"full": same, "snapkv": same, "h2o": [0] * 20})
    assert apart.yes and apart.why == "" and (apart.worst, apart.spread) == ("h2o", 75.0)
    assert apart.falls and apart.fall == 75.0


def test_policies_that_fall_alike_fall_and_are_not_told_apart():
    made = told({"full": [1] * 20, "snapkv": [0] * 20, "h2o": [0] * 20})
    assert (made.yes, made.falls, made.fall, made.spread) == (False, True, 100.0, 0.0)
    assert "best and worst differ" in made.why
    # Apart they may be where none is below the full cache.
    made = told({"full": [0, 1] * 10, "snapkv": [0, 1] * 10, "h2o": [1] * 20})
    assert (made.yes, made.falls) == (True, False)


@pytest.mark.parametrize("control", ["random", "oracle", "token_identity", "random+none", "oracle+none"])
def test_controls_and_chance_tell_nothing_of_policies(control):
    marks = {"full": [1] * 20, "snapkv": [1] * 20, "h2o": [1] * 20, control: [0] * 20}
    made = told(marks)
    assert (made.yes, made.falls) == (False, False) and control not in (made.best, made.worst)
    alone = told({"full": [1] * 20, "snapkv": [0] * 20, control: [1] * 20})
    assert not alone.yes and alone.falls and "1 policy was measured beside controls" in alone.why
    none = told({"full": [1] * 20, control: [0] * 20})
    assert (none.yes, none.falls, none.best, none.worst) == (False, False, "", "")
    assert "no policy was measured beside controls" in none.why


def test_answers_that_were_given_before_anything_went_tell_nothing():
    marks = {"full": [1] * 20, "snapkv": [1] * 20, "h2o": [0] * 20}
    made = told(marks, attended=(1.0, 1.0))
    assert not made.yes and made.why.startswith("nothing had gone when the answer was given")
    assert "one-token answer" in made.why
    assert "one-token answer" not in told(marks, attended=(1.0, 1.0), regime="chunked+decode").why
    assert told(marks, attended=(1.0, 0.6)).yes and told(marks).yes  # earlier rows do not say
    # What is not known of one is not known of the cell.
    assert told(marks, attended=(1.0, None)).yes


def test_the_noise_is_that_of_the_pair_out_of_all_pairs():
    values = np.array([100.0, 0.0, 100.0, 0.0, 0.0])
    deviation = math.sqrt(sum((value - 40) ** 2 for value in values) / 4)
    assert noise_of(values, 1) == pytest.approx(1.959964 * deviation / math.sqrt(5))
    # Three policies and the full cache: six pairs, 1 - 0.05 / 12.
    assert noise_of(values, 6) == pytest.approx(2.638257 * deviation / math.sqrt(5))
    assert noise_of(values[:1], 1) == math.inf
    marks = {"full": [1] * 8 + [0] * 2, "a": [1] * 5 + [0] * 5, "b": [1] * 6 + [0] * 4, "c": [1, 0] * 5}
    made = told(marks | {"random": [0] * 10})
    assert (made.best, made.worst) == ("b", "a")
    apart, below = (
        np.array([100.0 * (x - y) for x, y in zip(marks[name], marks["a"], strict=True)])
        for name in ("b", "full")
    )
    # Three policies: three pairs, and three that the worst was picked from.
    assert made.noise == pytest.approx(noise_of(apart, 3)) and made.spread == pytest.approx(10.0)
    assert made.fall_noise == pytest.approx(noise_of(below, 3)) and made.fall == pytest.approx(30.0)


def test_one_cluster_tells_nothing():
    made = told({"full": [1], "snapkv": [0], "h2o": [1]})
    assert not (made.yes or made.falls) and made.noise == made.fall_noise == math.inf


def test_what_was_not_measured_is_refused():
    scores = gather(rows({"full": [1, 1], "snapkv": [0, 1]}))
    for place in (("chunked", "t", 0.2), ("decode", "u", 0.2), ("decode", "t", 0.3)):
        refused("was not measured in regime", discriminate, scores, *place)


def test_questions_of_an_item_are_one_cluster():
    scores = gather(
        rows({"full": [1, 1], "snapkv": [1, 0]}, questions=4, null={("full", 1, 2), ("snapkv", 0, 0)})
    )
    assert scores.judged[FULL]["t"].tolist() == [100.0, 75.0]
    assert scores.judged[Cell("decode", "snapkv", 0.2)]["t"].tolist() == [75.0, 0.0]
    assert scores.nulls == {(FULL, "t"): ((0, 1, 2),), (Cell("decode", "snapkv", 0.2), "t"): ((0, 0, 0),)}
    assert scores.exact[FULL]["t"].tolist() == [0.0, 0.0]  # judged by the score
    assert scores.mean(FULL, ["t"]) == 87.5


def test_every_cell_stands_beside_its_ceiling(tmp_path):
    own = [
        *rows(
            {"full": [1] * 10, "gate+none": [1] * 3 + [0] * 7, "gate": [1] * 9 + [0]},
            null={("gate", 9, 0)},
            attended=(1.0, 0.5),
            beside=100,
        ),
        *rows({"full": [0] * 10, "gate+none": [0] * 10, "gate": [0] * 10}, task="u"),
    ]
    cells = cells_of(own, ["t", "u"])
    assert len(cells) == 3 * 2
    found = {(cell["policy"], cell["task"]): cell for cell in cells}
    assert {cell["ceiling"] for cell in cells if cell["task"] == "t"} == {100.0}
    gate = found["gate", "t"]
    assert (gate["score"], gate["items"], gate["nulls"]) == (90.0, 10, [[0, 9, 0]])
    assert gate["discriminative"] is True and gate["discrimination"]["worst"] == "gate+none"
    assert gate["falls"] is True and gate["bytes_beside"] == 104.5
    assert gate["attended_ratio"] == {"lowest": 0.5, "mean": 0.75, "highest": 1.0}
    assert found["gate", "u"]["attended_ratio"] is None and found["gate", "u"]["bytes_beside"] == 0
    assert found["gate", "u"]["falls"] is False and found["full", "t"]["falls"] is None
    assert gate["keep_ratio"] == {"lowest": 0.2, "mean": pytest.approx(0.205), "highest": 0.21}
    assert (gate["gate_bytes"], gate["base_policy"], gate["protection"]) == (4, "gate", "preset")
    assert found["gate+none", "t"]["protection"] == "none" and found["full", "t"]["discriminative"] is None
    assert found["gate", "u"]["discriminative"] is False
    (tmp_path / ITEMS).write_text("".join(json.dumps(row) + "\n" for row in own))
    path = write_cells(tmp_path, ["t", "u"])
    assert path.name == CELLS and json.loads(path.read_text()) == json.loads(json.dumps(cells))

    # A noise that is not known is null in JSON.
    alone = rows({"full": [1], "snapkv": [0]})
    (tmp_path / ITEMS).write_text("".join(json.dumps(row) + "\n" for row in alone))
    cells = json.loads(write_cells(tmp_path, ["t"]).read_text())
    assert cells[1]["discrimination"]["noise"] is None and cells[1]["discriminative"] is False

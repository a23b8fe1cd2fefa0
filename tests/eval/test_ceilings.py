"""What a cell could have shown, by hand: ceilings, noise, flags, nulls."""

import itertools
import json
import math

import numpy as np
import pytest

from retain.eval.run.results_store import ITEMS
from retain.eval.stats.ceilings import CELLS, cells_of, discriminate, noise_of, write_cells
from retain.eval.stats.summary import Cell, gather
from tests.refused import refused

FULL = Cell("decode", "full", 1.0)


def rows(right, *, regime="decode", task="t", questions=1, null=(), attended=None, beside=0):
    """Rows of policies that have so many of their items right, the first ones; `attended` holds the ratios
    of the items."""
    for policy, marks in right.items():
        full, (base, _, protection) = policy == "full", policy.partition("+")
        for (item, mark), question in itertools.product(enumerate(marks), range(questions)):
            missing = (policy, item, question) in null
            yield {
                **{"seed": 0, "task": task, "family": "seen", "item": item, "question": question},
                **{"regime": regime, "policy": policy, "base_policy": base},
                **{"protection": protection or "preset", "budget": 1.0 if full else 0.2},
                **{"keep_ratio": 1.0 if full else 0.2, "score": 0.0 if missing else float(mark)},
                **{"exact": 0.0, "partial": 0.0, "null": missing, "seen_entries": 100},
                **{"kept_entries": 100 if full else 20 + item % 2, "bytes_held": 800},
                **{"bytes_full": 800, "gate_bytes": 4 if policy == "gate" else 0},
                **({} if attended is None else {"attended_ratio": attended[item % len(attended)]}),
                **({"bytes_beside": beside + item} if beside else {}),
            }


def told(right, *, regime="decode", **more):
    return discriminate(gather(rows(right, regime=regime, **more)), regime, "t", 0.2)


SAME = [1] * 15 + [0] * 5
ONE = [1] + [0] * 39
NOTHING = [0] * 40


@pytest.mark.parametrize(
    ("right", "yes", "falls", "numbers", "why"),
    [
        ([NOTHING, NOTHING], False, False, {"ceiling": 0}, "the full cache scores 0.0"),
        # One right of forty is no more than its own noise: 1.96 * sqrt(39 / 40 / 40 * 40 / 39 / 40) points.
        ([ONE, NOTHING], False, False, {"ceiling": 2.5}, "(4.9)"),
        ([ONE, NOTHING, [1] * 40], False, False, {"spread": 100.0, "noise": 0.0}, ""),
        ([SAME, SAME, SAME], False, False, {"spread": 0.0, "noise": 0.0}, "best and worst differ by 0.0"),
        ([SAME, SAME, [1] * 14 + [0] * 6], False, False, {"best": "a", "worst": "b", "spread": 5.0}, ""),
        ([SAME, SAME, [0] * 20], True, True, {"worst": "b", "spread": 75.0, "fall": 75.0, "why": ""}, ""),
        (
            [[1] * 20, [0] * 20, [0] * 20],
            False,
            True,
            {"fall": 100.0, "spread": 0.0},
            "best and worst differ",
        ),
        # Apart they may be where none is below the full cache.
        ([[0, 1] * 10, [0, 1] * 10, [1] * 20], True, False, {}, ""),
        ([[1], [0], [1]], False, False, {"noise": math.inf, "fall_noise": math.inf}, ""),  # one cluster
    ],
)
def test_what_a_task_tells(right, yes, falls, numbers, why):
    made = told(dict(zip(("full", "a", "b"), right, strict=False)))
    assert (made.yes, made.falls) == (yes, falls) and why in made.why
    assert {name: getattr(made, name) for name in numbers} == pytest.approx(numbers)


@pytest.mark.parametrize("control", ["random", "oracle", "token_identity", "random+none", "oracle+none"])
def test_controls_and_chance_tell_nothing_of_policies(control):
    right = {"full": [1] * 20, control: [0] * 20}
    made = told(right | {"snapkv": [1] * 20, "h2o": [1] * 20})
    assert (made.yes, made.falls) == (False, False) and control not in (made.best, made.worst)
    alone = told(right | {"snapkv": [0] * 20})
    assert not alone.yes and alone.falls and "1 policy was measured beside controls" in alone.why
    none = told(right)
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
    # One pair; three policies and the full cache, six pairs: 1 - 0.05 / 12.
    for pairs, quantile in ((1, 1.959964), (6, 2.638257)):
        assert noise_of(values, pairs) == pytest.approx(quantile * deviation / math.sqrt(5))
    marks = {"full": [1] * 8 + [0] * 2, "a": [1] * 5 + [0] * 5, "b": [1] * 6 + [0] * 4, "c": [1, 0] * 5}
    made = told(marks | {"random": [0] * 10})
    assert (made.best, made.worst) == ("b", "a")
    apart, below = (100.0 * (np.array(marks[name]) - marks["a"]) for name in ("b", "full"))
    # Three policies: three pairs, and three that the worst was picked from.
    assert made.noise == pytest.approx(noise_of(apart, 3)) and made.spread == pytest.approx(10.0)
    assert made.fall_noise == pytest.approx(noise_of(below, 3)) and made.fall == pytest.approx(30.0)


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
    marks = {"full": [1] * 10, "gate+none": [1] * 3 + [0] * 7, "gate": [1] * 9 + [0]}
    own = [
        *rows(marks, null={("gate", 9, 0)}, attended=(1.0, 0.5), beside=100),
        *rows(dict.fromkeys(marks, [0] * 10), task="u"),
    ]
    cells = cells_of(own, ["t", "u"])
    assert len(cells) == 3 * 2
    found = {(cell["policy"], cell["task"]): cell for cell in cells}
    assert {cell["ceiling"] for cell in cells if cell["task"] == "t"} == {100.0}
    gate, bare, full, other = (
        found[name, task] for name, task in (("gate", "t"), ("gate+none", "t"), ("full", "t"), ("gate", "u"))
    )
    assert (gate["score"], gate["items"], gate["nulls"]) == (90.0, 10, [[0, 9, 0]])
    assert gate["discriminative"] is True and gate["discrimination"]["worst"] == "gate+none"
    assert gate["falls"] is True and gate["bytes_beside"] == 104.5
    assert gate["attended_ratio"] == {"lowest": 0.5, "mean": 0.75, "highest": 1.0}
    assert gate["keep_ratio"] == {"lowest": 0.2, "mean": pytest.approx(0.205), "highest": 0.21}
    assert (gate["gate_bytes"], gate["base_policy"], gate["protection"]) == (4, "gate", "preset")
    assert bare["protection"] == "none" and full["falls"] is full["discriminative"] is None
    assert other["attended_ratio"] is None and other["bytes_beside"] == 0
    assert other["falls"] is False and other["discriminative"] is False
    # A noise that is not known is null in JSON.
    alone = [*rows({"full": [1], "snapkv": [0]})]
    for part, tasks in ((own, ["t", "u"]), (alone, ["t"])):
        (tmp_path / ITEMS).write_text("".join(json.dumps(row) + "\n" for row in part))
        path = write_cells(tmp_path, tasks)
        written = json.loads(path.read_text())
        assert path.name == CELLS and (part is alone or written == json.loads(json.dumps(cells)))
    assert written[1]["discrimination"]["noise"] is None and written[1]["discriminative"] is False

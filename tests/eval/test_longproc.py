"""LongProc's rows are asked with prompts of our own, and scored by its accuracy."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.longproc import longproc
from retain.eval.tasks.rendering import render
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, tokenizer
from tests.refused import refused

ROUTE = "From Lille, take a ferry to Lecce.\nFrom Lecce, take a bus to Akron."
ROWS: dict[str, dict[str, Any]] = {
    "path_traversal": {
        "context_nl": "There are cities:\nYou can travel from Lille to Lecce by ferry.\n",
        "question_repr": ["Lille", "Akron"],
        "answer_nl": ROUTE,
    },
    "countdown": {"nums": [21, 16, 17, 26], "target": 46, "solution": ["21+16=37", "26-17=9", "37+9=46"]},
}
CARDS = [f"{name}_{size}" for name in ROWS for size in ("0.5k", "2k", "8k")]


@pytest.mark.parametrize("name", CARDS)
def test_a_row_is_asked_and_scored(name: str, tmp_path: Path) -> None:
    procedure = name.rpartition("_")[0]
    (tmp_path / procedure).mkdir()
    (tmp_path / procedure / f"{name}.json").write_text(json.dumps([ROWS[procedure]]))
    card = cards()[f"longproc/{name}"]
    item = longproc(asking(), **card.settings, path=str(tmp_path))
    assert longproc.size(**card.settings, path=str(tmp_path)) == 1
    (asked,) = render(item, card, tokenizer(), chat=False).asked
    assert asked.score(asked.gold_ids) == (1.0, 1.0) and asked.score(()) == (0.0, 0.0)
    shown = item.context + item.questions[0].question
    for wanted in ("Lille", "Akron", "<Route>") if procedure == "path_traversal" else ("21, 16", "46"):
        assert wanted in shown
    assert ROUTE not in shown


def test_a_route_is_right_as_a_whole() -> None:
    for answer, score in (
        (f"So:\n<Route>\n{ROUTE}\n</Route>", 1.0),
        (ROUTE, 0.0),
        (f"<Route>{ROUTE.replace('bus', 'train')}</Route>", 0.0),
        (f"<Route>{ROUTE}", 0.0),
    ):
        assert METRICS["route"](answer, (ROUTE,)) == score


@pytest.mark.parametrize(
    ("lines", "score"),
    [
        ("21 + 16 = 37\n26 - 17 = 9\n37 + 9 = 46", 1.0),
        ("21+16=37\n26-17=9\n37+9=46", 1.0),
        ("21 + 16 = 37\n26 - 17 = 9\n37 + 9 = 47", 0.0),  # does not hold
        ("21 + 21 = 42\n26 - 17 = 9\n42 + 9 = 51", 0.0),  # one number twice
        ("21 + 16 = 37\n37 + 9 = 46", 0.0),  # two left out
        ("26 - 17 = 9\n21 - 16 = 5\n9 * 5 = 45", 0.0),  # another number
        ("21 / 0 = 0\n26 - 17 = 9\n37 + 9 = 46", 0.0),
        ("21 + 16 = 37\n26 - 17 = 9\n37 plus 9 is 46", 0.0),
    ],
)
def test_a_countdown_is_checked_by_arithmetic(lines: str, score: float) -> None:
    found = METRICS["countdown"](f"<Solution>\n{lines}\n</Solution>", ("46",), numbers=(21, 16, 17, 26))
    assert found == score
    assert METRICS["countdown"](lines, ("46",), numbers=(21, 16, 17, 26)) == 0.0
    division = "<Solution>8 / 2 = 4</Solution>"
    assert METRICS["countdown"](division, ("4",), numbers=(8, 2)) == 1.0
    assert METRICS["countdown"](division.replace("8", "9"), ("4",), numbers=(9, 2)) == 0.0


def test_what_is_wrong_is_said() -> None:
    refused("unknown task of LongProc 'countdowns'", longproc, asking(), procedure="countdowns", size="2k")
    refused("unknown size of LongProc '4k'", longproc, asking(), procedure="countdown", size="4k")

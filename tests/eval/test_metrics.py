"""Scorers agree with the released ones: on the references' examples, and on plain versions written here."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from retain.eval.metrics import METRICS
from retain.eval.tasks.row import Row
from tests.refused import refused

CENTURY = ("the 1st century", "1st century", "first century")
TREC = ("Number of something", "Number", "Code", "Other number", "Other location", "Description of a person")


def score(metric: str, text: str, answers: tuple[str, ...], **extra: Any) -> float:
    return METRICS[metric](text, Row("made", "", "", answers, extra=extra))


@pytest.mark.parametrize(
    ("metric", "text", "answers", "expected"),
    [
        # One match is enough for RULER's `part`; its `all` is what lm-eval takes for both.
        ("match_any", "the 1st century BC", CENTURY, 1.0),
        ("match_all", "the 1st century BC", CENTURY, 2 / 3),
        ("match_any", "no idea", CENTURY, 0.0),
        ("match_all", "7 AND Abc", ("abc", "7", "8", "9"), 0.5),
        ("match_all", "12\x0034", ("1234",), 0.0),
        ("match_any", "12\n34", ("1234", "5"), 0.0),
        ("qa_f1", "The cat sat", ("cat sat!",), 1.0),
        ("qa_f1", "", ("cat",), 0.0),
        ("qa_f1", "the", ("a",), 0.0),
        ("qa_f1", "x x y", ("x y y", "z"), 2 / 3),
        ("rouge_l", "a b c", ("a c d e",), 4 / 7),
        ("rouge_l", "", ("a b",), 0.0),
        ("rouge_l", "...", ("a b",), 0.0),
        # The package counts distinct words: Google's rouge_score gives 0.667 here.
        ("rouge_l", "the cat the cat", ("the cat",), 1.0),
        # "Number" and, but for the walk through a list that shrinks, "Other number" are parts of no answer.
        ("classification", "Number of something", ("Number of something",), 1.0),
        ("classification", "Code or Other location", ("Code",), 0.5),
        ("classification", "Other location", ("Code",), 0.0),
        ("classification", "nothing of it", ("Code",), 0.0),
        ("classification", "Code or Other location", ("Number", "Code"), 0.5),
        ("retrieval", "Paragraph 3, or 4", ("Paragraph 3",), 0.5),
        ("retrieval", "Paragraph 13", ("Paragraph 3",), 0.0),
        ("retrieval", "none", ("Paragraph 3",), 0.0),
        ("count", "There are 7 of 30", ("7",), 0.5),
        ("count", "", ("7",), 0.0),
        ("count", "07", ("7",), 0.0),
        ("code_similarity", "public void Foo(int a)", ("private int Bar(string a, int b)",), 0.33),
        ("code_similarity", "\n# why\n```python\nx = 1\ny = 2", ("x = 1",), 1.0),
        ("code_similarity", "// all\n# comment", ("x = 1",), 0.0),
        ("code_similarity", "# why\n\nx = 1", ("x = 1",), 0.0),
        ("code_similarity", "", ("",), 1.0),
    ],
)
def test_examples(metric: str, text: str, answers: tuple[str, ...], expected: float) -> None:
    # The package rouge adds 1e-8 to a denominator.
    assert score(metric, text, answers, classes=TREC) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "ordered", "expected"),
    [("k a k b", True, 1.0), ("k b k a", True, 0.0), ("k b k a", False, 1.0), ("k a", False, 0.0)],
)
def test_tokens_are_scored_at_their_places(text: str, ordered: bool, expected: float) -> None:
    assert score("tokens_in_place", text, ("a", "b"), places=[1, 3], ordered=ordered) == expected


def naive_classification(text: str, truth: str, classes: Sequence[str]) -> float:
    """As the released code runs: it removes from the list that it walks through, so that the next name is
    passed over."""
    matches, place = [name for name in classes if name in text], 0
    while place < len(matches):
        if matches[place] in truth and matches[place] != truth:
            del matches[place]
        place += 1
    return 1 / len(matches) if truth in matches else 0.0


def test_classification_keeps_the_released_quirk() -> None:
    classes = ("a", "b", "ab", "abc", "c", "bc")
    for text in ("abc", "ab", "a b c", "bc", "x", "ab c"):
        for truth in classes:
            found = score("classification", text, (truth,), classes=classes)
            assert found == naive_classification(text, truth, classes)
    # Of a, b, ab, abc, c, bc are dropped a, ab and c; those behind them (b, abc, bc) are passed over.
    assert score("classification", "abc", ("abc",), classes=classes) == 1 / 3


def test_rows_that_cannot_be_scored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("reads 'Paragraph 12', but got '12'", score, "retrieval", "12", ("12",))
    refused(r"extra\['classes'\] is empty", score, "classification", "12", ("a",))
    monkeypatch.setitem(sys.modules, "rouge", None)
    refused(r"needs the package rouge, .*pip install 'retain-kv\[eval\]'", score, "rouge_l", "x", ("y",))

"""Scorers agree with the released ones: on the reference's examples, and on plain versions written here."""

import re
import string
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from retain.eval.metrics.found import ruler_clean
from retain.eval.metrics.overlap import normalised
from retain.eval.metrics.scorers import METRICS, first_line
from tests.refused import refused

CENTURY = ("the 1st century", "1st century", "first century")
TREC = ("Number of something", "Number", "Code", "Other number", "Other location", "Description of a person")


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        # One match is enough for RULER's `part`; its `all` is what lm-eval takes for both.
        ("ruler_part", "the 1st century BC", CENTURY, 1.0),
        ("ruler_all", "the 1st century BC", CENTURY, 2 / 3),
        ("ruler_part", "no idea", CENTURY, 0.0),
        ("ruler_all", "7 AND Abc", ("abc", "7", "8", "9"), 0.5),
        ("ruler_all", "12\x0034", ("1234",), 0.0),
        ("ruler_part", "12\n34", ("1234", "5"), 0.0),
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
        ("retrieval_zh", "段落3", ("段落3",), 1.0),
        ("count", "There are 7 of 30", ("7",), 0.5),
        ("count", "", ("7",), 0.0),
        ("count", "07", ("7",), 0.0),
        ("code_similarity", "public void Foo(int a)", ("private int Bar(string a, int b)",), 0.33),
        ("code_similarity", "\n# why\n```python\nx = 1\ny = 2", ("x = 1",), 1.0),
        ("code_similarity", "// all\n# comment", ("x = 1",), 0.0),
        ("code_similarity", "# why\n\nx = 1", ("x = 1",), 0.0),
        ("code_similarity", "", ("",), 1.0),
        ("multiple_choice", "**The correct answer is (B)**", ("B",), 1.0),
        ("multiple_choice", "The correct answer is B", ("B",), 1.0),
        ("multiple_choice", "The correct answer is C. The correct answer is (B)", ("B",), 1.0),
        ("multiple_choice", "(B)", ("B",), 0.0),
        ("multiple_choice", "The correct answer is E", ("E",), 0.0),
        ("verbatim", "the value is ab-c.", ("b-c",), 1.0),
        ("verbatim", "AB-C", ("ab-c",), 0.0),
        ("first_number", "about 4.5", ("4",), 1.0),
        ("first_number", "about 4", ("4.5",), 0.0),
        ("first_number", "-4", ("4",), 1.0),  # a sign is not read
        ("first_number", "1" * 5000, ("1" * 5000,), 0.0),  # Python reads no number of so many digits
        ("chosen_option", "Because", ("Bo", "B"), 1.0),  # its first letter is a B
        ("chosen_option", "It is (the option is B)", ("Bo", "B"), 1.0),
        ("chosen_option", "maybe C", ("Bo", "B"), 0.0),
        ("qa_f1_characters", "是张三！", ("张三",), 0.8),
        ("rouge_lsum", "b a\nc", ("a b c",), 2 / 3),  # of "b a" one, and "c"
        ("rouge_lsum", "a a a a", ("a",), 0.4),
        ("rouge_lsum", "A-b", ("a b",), 1.0),
    ],
)
def test_examples(metric: str, prediction: str, references: tuple[str, ...], expected: float) -> None:
    found = METRICS[metric](prediction, references, all_classes=TREC)
    # The package rouge adds 1e-8 to a denominator.
    assert found == pytest.approx(expected, abs=1e-7)


def naive_f1(prediction: str, reference: str) -> float:
    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    one, other = words(prediction), words(reference)
    common = sum((Counter(one) & Counter(other)).values())
    return 0.0 if not common else 2 * common / (len(one) + len(other))


TEXTS = ("", "the", "A man, a plan!", "a plan the man had", "Panama; a canal", "man man man", "theatre an")


@pytest.mark.parametrize("prediction", TEXTS)
def test_token_f1_is_the_formula(prediction: str) -> None:
    for reference in TEXTS:
        assert METRICS["qa_f1"](prediction, (reference,)) == pytest.approx(naive_f1(prediction, reference))


def naive_classification(prediction: str, truth: str, classes: Sequence[str]) -> float:
    """As the released code runs: it removes from the list that it walks through, so that whatever follows
    what was removed is passed over. (`remove` takes the first of equal names; here all differ.)"""
    matches, place = [name for name in classes if name in prediction], 0
    while place < len(matches):
        if matches[place] in truth and matches[place] != truth:
            del matches[place]
        place += 1
    return 1 / len(matches) if truth in matches else 0.0


def test_classification_keeps_the_released_quirk() -> None:
    classes = ("a", "b", "ab", "abc", "c", "bc")
    scores = set()
    for prediction in ("abc", "ab", "a b c", "bc", "x", "ab c"):
        for truth in classes:
            found = METRICS["classification"](prediction, (truth,), all_classes=classes)
            assert found == naive_classification(prediction, truth, classes)
            scores.add(found)
    # Of a, b, ab, abc, c, bc are dropped a, ab and c; those behind them (b, abc, bc) are passed over.
    assert METRICS["classification"]("abc", ("abc",), all_classes=classes) == 1 / 3
    assert {0.0, 1 / 6, 1 / 3, 1 / 2} <= scores


def test_long_sentences_have_a_rouge_and_leave_the_stack_as_it_was() -> None:
    limit = sys.getrecursionlimit()
    one = " ".join(f"w{i}" for i in range(700))
    other = " ".join(f"v{i}" for i in range(699)) + " w699"
    assert METRICS["rouge_l"](one, (other,)) == pytest.approx(1 / 700, abs=1e-6)
    assert sys.getrecursionlimit() == limit


def test_chinese_is_scored_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def lcut(text: str) -> list[str]:
        return re.findall(r"北京|天安门|.", text)

    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=lcut))
    # 我 爱 北京 against 北京 天安门, full stops and spaces aside: one word of three and of two.
    assert METRICS["qa_f1_zh"]("我爱北京。", ("北京 天安门！",)) == pytest.approx(0.4)
    assert METRICS["qa_f1_zh"]("。", ("北京",)) == 0.0
    assert METRICS["rouge_l_zh"]("我爱北京", ("北京天安门",)) == pytest.approx(0.4, abs=1e-7)
    assert METRICS["rouge_l_zh"]("", ("北京",)) == 0.0


@pytest.mark.parametrize(
    ("package", "metric"), [("jieba", "qa_f1_zh"), ("jieba", "rouge_l_zh"), ("rouge", "rouge_l")]
)
def test_a_missing_package_is_named(package: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    extra = "chinese" if package == "jieba" else "eval"
    refused(
        rf"needs the package {package}, .*pip install 'retain-kv\[{extra}\]'", METRICS[metric], "x", ("y",)
    )


def test_wrong_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=str.split))
    said = "right answers are a sequence of texts, but got 'Paragraph 1': write"
    for metric in METRICS.values():
        refused("an item without a right answer cannot be scored", metric, "x", (), all_classes=("a",))
        refused(said, metric, "x", "Paragraph 1", all_classes=("a",))


def test_malformed_right_answers_are_refused() -> None:
    refused("reads 'Paragraph 12', but got '12'", METRICS["retrieval"], "12", ("12",))
    refused("`all_classes` is empty", METRICS["classification"], "12", ("a",), all_classes=())


def test_cleaning() -> None:
    assert ruler_clean("\n 12\t34 \x00") == "12\n34"
    assert [first_line(text) for text in ("\n\n yes\nno", "yes", "\n")] == [" yes", "yes", ""]
    assert normalised("The  theatre, an Art.") == "theatre art"

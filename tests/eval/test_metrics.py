"""Scorers agree with the released ones: on the reference's examples, and on plain versions written here."""

import difflib
import random
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from retain.eval.metrics.found import ruler_clean
from retain.eval.metrics.numbers import boxed_answers, plain_mathematics, same_mathematics
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
        # Articles do not count, unless they are asked for.
        ("qa_f1", "The cat sat", ("cat sat!",), 1.0),
        ("qa_f1_keep_articles", "The cat sat", ("cat sat!",), 0.8),
        ("qa_f1", "", ("cat",), 0.0),
        ("qa_f1", "the", ("a",), 0.0),
        ("qa_f1", "x x y", ("x y y", "z"), 2 / 3),
        ("exact_match", "The Cat.", ("cat",), 1.0),
        ("exact_match", "the", ("a",), 0.0),
        ("contains", "It was The Eiffel-Tower, I think", ("the eiffel tower", "EiffelTower"), 1.0),
        ("contains", "15 times", ("5",), 0.0),
        ("contains", "5 times", ("5",), 1.0),
        ("contains", "anything", ("?!",), 0.0),
        ("contains", "anything", ("the",), 0.0),
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
        ("gsm8k", "So 9 * 2 = 18 dollars\n#### 18", ("worked\n#### 18",), 1.0),
        ("gsm8k", "#### $1,018.00", ("1018",), 1.0),
        ("gsm8k", "It is 5. #### 18\nNext problem: 4", ("18",), 1.0),
        ("gsm8k", "the answer is -3.", ("#### -3",), 1.0),
        ("gsm8k", "the answer is 3 of 4", ("3",), 0.0),
        ("gsm8k", "", ("3",), 0.0),
        # Models write a minus as U+2212.
        ("gsm8k", "the answer is \u22123.", ("-3",), 1.0),
        ("gsm8k", "#### \u2212$1,003", ("-1003",), 1.0),
        ("gsm8k_strict", "the answer is 3", ("3",), 0.0),
        ("gsm8k_strict", "#### 3", ("3",), 1.0),
        ("mathematics", r"thus \boxed{\dfrac12}", ("0.5",), 1.0),
        ("mathematics", r"thus \boxed{1+x}", ("x+1",), 0.0),
        ("mathematics", "thus 7", ("7",), 0.0),
        ("mathematics", r"\boxed{3}", (r"so \boxed{3}",), 1.0),
        ("aime", r"\boxed{073}", ("73",), 1.0),
        ("aime", r"\boxed{73^\circ}", ("073",), 1.0),
        ("aime", r"\boxed{n} = 73", ("73",), 0.0),
        # What boxes nothing is read whole, or between its dollar signs, as officially.
        ("aime", "73", ("073",), 1.0),
        ("aime", "It is $73$.", ("073",), 1.0),
        ("aime", "It is 73.", ("073",), 0.0),
        ("aime", r"73, or \boxed{73", ("073",), 0.0),
        # Commas do not count, wherever they stand between digits.
        ("gsm8k", "#### 12,34", ("1234",), 1.0),
        ("gsm8k_strict", "#### 12,34", ("#### 1234",), 1.0),
        ("gsm8k", "12, 34", ("1234",), 0.0),
        # MATH's last box: without braces, before any \fbox, and none where it is never closed.
        ("mathematics", r"so \boxed 5", ("5",), 1.0),
        ("mathematics", r"so $\boxed 5$. Or 7.", ("5",), 1.0),
        ("mathematics", r"\boxed{8} \fbox{7}", ("8",), 1.0),
        ("mathematics", r"\boxed{8} \fbox{7}", ("7",), 0.0),
        ("mathematics", r"\fbox{6} \fbox{7}", ("7",), 1.0),
        ("mathematics", r"\boxed{8} so \boxed{9", ("8",), 0.0),
    ],
)
def test_examples(metric: str, prediction: str, references: tuple[str, ...], expected: float) -> None:
    found = METRICS[metric](prediction, references, all_classes=TREC)
    # The package rouge adds 1e-8 to a denominator.
    assert found == pytest.approx(expected, abs=1e-7)


def naive_f1(prediction: str, reference: str, articles: bool) -> float:
    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return (text if articles else re.sub(r"\b(a|an|the)\b", " ", text)).split()

    one, other = words(prediction), words(reference)
    common = sum((Counter(one) & Counter(other)).values())
    return 0.0 if not common else 2 * common / (len(one) + len(other))


ANSWERS = sorted(METRICS.keys() - {"steps"})
TEXTS = ("", "the", "A man, a plan!", "a plan the man had", "Panama; a canal", "man man man", "theatre an")


@pytest.mark.parametrize("prediction", TEXTS)
def test_token_f1_is_the_formula(prediction: str) -> None:
    for reference in TEXTS:
        assert METRICS["qa_f1"](prediction, (reference,)) == pytest.approx(
            naive_f1(prediction, reference, False)
        )
        kept = METRICS["qa_f1_keep_articles"](prediction, (reference,))
        assert kept == pytest.approx(naive_f1(prediction, reference, True))


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


def test_code_similarity_is_the_formula() -> None:
    for one in ("for i in range(3):", "x", "return a + b"):
        for other in ("for j in range(4):", "xyz", "return a - b", "q"):
            ratio = difflib.SequenceMatcher(None, one, other).ratio()
            assert METRICS["code_similarity"](one, (other,)) == int(round(100 * ratio)) / 100


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
    scoring = {"all_classes": ("a",), "numbers": (1, 2)}
    for name in ANSWERS:
        refused("an item without a right answer cannot be scored", METRICS[name], "x", (), **scoring)
        said = "right answers are a sequence of texts, but got 'Paragraph 1': write"
        refused(said, METRICS[name], "x", "Paragraph 1", **scoring)


def test_malformed_right_answers_are_refused() -> None:
    refused("reads 'Paragraph 12', but got '12'", METRICS["retrieval"], "12", ("12",))
    refused("right answer of gsm8k has a number, but got 'many'", METRICS["gsm8k"], "12", ("many",))
    refused("answer of AIME is a whole number, but got 'pi'", METRICS["aime"], r"\boxed{3}", ("pi",))
    refused("`all_classes` is empty", METRICS["classification"], "12", ("a",), all_classes=())


def test_cleaning() -> None:
    assert ruler_clean("\n 12\t34 \x00") == "12\n34"
    assert [first_line(text) for text in ("\n\n yes\nno", "yes", "\n")] == [" yes", "yes", ""]
    assert normalised("The  theatre, an Art.") == "theatre art"
    assert normalised("The  theatre", articles=True) == "the theatre"


def test_boxes_are_balanced() -> None:
    assert boxed_answers(r"\boxed{a{b}c} \fbox{d} \boxed{ \{1\} } \boxed{open") == ["a{b}c", r"\{1\}", None]


def test_boxes_that_are_never_closed_are_read_once() -> None:
    begun = time.process_time()
    assert {*boxed_answers(r"\boxed{" * 10_000)} == {None}
    assert boxed_answers(r"\boxed " * 50_000 + "5")[-1] == "5"
    assert time.process_time() - begun < 2
    assert boxed_answers(r"\boxed{1" * 4_000 + "} }")[-2] == r"1\boxed{1}"


@pytest.mark.parametrize(
    ("metric", "before", "digits", "after", "reference", "expected"),
    [
        ("gsm8k", "It is 3. ", 5000, "", "3", 1.0),
        ("gsm8k", "#### ", 5000, "", "3", 0.0),
        ("gsm8k_strict", "#### ", 101, "", "1" * 100, 0.0),
        ("gsm8k_strict", "#### ", 100, "", "1" * 100, 1.0),
        ("mathematics", r"\boxed{", 5000, "}", "3", 0.0),
        ("mathematics", r"\boxed{0.", 5000, "}", r"\frac{1}{9}", 0.0),
        ("mathematics", r"\boxed{\frac{", 5000, "}{3}}", "3", 0.0),
        ("mathematics", r"\boxed{\frac{3}{", 5000, "}}", "3", 0.0),
        ("aime", r"\boxed{", 5000, "}", "11", 0.0),
        ("steps", "Step 1: a\nStep ", 5000, ": b", "Step 1: a", 1.0),
    ],
    ids=lambda value: None if len(str(value)) < 30 else "long",
)
def test_digits_without_end_are_no_number_and_no_error(
    metric: str, before: str, digits: int, after: str, reference: str, expected: float
) -> None:
    assert METRICS[metric](before + "1" * digits + after, (reference,)) == expected


def test_line_breaks_without_end_before_a_step_are_read_once() -> None:
    begun = time.process_time()
    assert METRICS["steps"]("\n" * 100_000 + "\t Step 1: a", ("Step 1: a",)) == 1.0
    assert time.process_time() - begun < 2


def naive_boxes(text: str) -> list[str]:
    """From each opening on, up to where as many braces are closed as were opened."""
    found = []
    box = "boxed" if "boxed" in text else "fbox"
    for match in re.finditer(rf"\\{box}\s*\{{", text):
        depth = 1
        for place in range(match.end(), len(text)):
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
            if depth == 0:
                found.append(text[match.end() : place].strip())
                break
    return found


def test_boxes_are_those_of_a_walk_from_each() -> None:
    draw = random.Random(0)
    pieces = (r"\boxed{", r"\fbox {", "{", "}", "}", r"\{", r"\}", "x", " ")
    texts = ["".join(draw.choices(pieces, k=12)) for _ in range(300)]
    closed = [[held for held in boxed_answers(text) if held is not None] for text in texts]
    assert sum(len(found) > 1 for found in closed) > 20
    assert closed == [naive_boxes(text) for text in texts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", "1/2"),
        (r"\frac12", "0.5"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac1{72}", r"\tfrac{1}{72}"),
        ("1,000", "1000"),
        ("$12$", "12."),
        (r"\$12", "12"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"50\%", "50"),
        ("x = 3", "3"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"5\text{ cm}", "5"),
        (r"5 \mbox{ cm}^2", "5"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\sqrt3", r"\sqrt{3}"),
        (".5", "0.50"),
        (r"2\!\sqrt{2}", r"2 \sqrt{2}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix} -1 & 0 \\ 2 & 3 \end{pmatrix}", "\\begin{pmatrix}-1&0\\\\\n2&3\\end{pmatrix}"),
        (r"(1, 2)\text{ units}", "(1,2)"),
        (r"2\pi\text{ cm}", r"2\pi"),
        ("1, 000", "1,000"),
        ("1{,}000", "1000"),
        (r"12,\!345,\!678", "12345678"),
        (r"-\$1,234.50", "-1234.5"),
        (r"1,234\text{ cm}", "1234"),
        ("x = 1,000.", "1000"),
        (r"\frac a2", r"\frac{a}{2}"),
        (r"\frac 1x", r"\frac{1}{x}"),
        (r"\frac{\pi}2", r"\frac{\pi}{2}"),
        (r"\frac{1{,}000}{3}", "1000/3"),
        ("\u22123", "-3"),
    ],
)
def test_spellings_of_one_answer(one: str, other: str) -> None:
    assert same_mathematics(one, other) and same_mathematics(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,2", "12"),
        ("(1,234)", "(1,235)"),
        # A pair, a set, a list: no thousands.
        ("(1,234)", "(1234)"),
        (r"\{1,234\}", r"\{1234\}"),
        ("1, 234", "1234"),
        ("1,234 or 5", "1234 or 5"),
        ("1{,}5", "15"),
        ("1 2/3", r"\frac{12}{3}"),
        (r"\frac{1}{0}", "1"),
        ("x=y", "y=x"),
        ("12", "1.2"),
        ("-3", "3"),
    ],
)
def test_different_answers(one: str, other: str) -> None:
    assert not same_mathematics(one, other)


def test_rewriting_is_done_once() -> None:
    texts = (r"\dfrac12", "x = 1,000", r"5\text{ cm}", r"\left(1,2\right)", r"\sqrt 3", "3/4", r"\frac a2")
    for text in texts:
        assert plain_mathematics(plain_mathematics(text)) == plain_mathematics(text)

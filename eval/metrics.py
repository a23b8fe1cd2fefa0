"""Scores answers: each metric is a function `(text, row) -> score`, from 0 to 1.

RULER's `string_match_all` and `string_match_part` (arXiv 2404.06654, NVIDIA/RULER
`scripts/eval/synthetic/constants.py`), and the metrics of LongBench (arXiv 2308.14508, THUDM/LongBench
`metrics.py`), computed as in the released code, with its quirks.

Several right answers mean what the benchmark's authors mean by them: `match_all` wants every one (mean), all
others any one (maximum). A further metric is a function and its name in `METRICS`.
"""

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from statistics import fmean

from retain.eval.tasks.row import Row
from retain.process.extras import require

Metric = Callable[[str, Row], float]
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _best(one: Callable[[str, str], float]) -> Metric:
    """Make a metric of a score against one right answer: the highest over all of them."""

    @wraps(one)
    def metric(text: str, row: Row) -> float:
        return max(one(text, answer) for answer in row.answers)

    return metric


def _contains(text: str, answer: str) -> float:
    plain = re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()
    return float(answer.lower() in plain.lower())


def match_all(text: str, row: Row) -> float:
    """Share of right answers that occur in the text, whatever their case: RULER's `string_match_all`."""
    return fmean(_contains(text, answer) for answer in row.answers)


@_best
def match_any(text: str, answer: str) -> float:
    """1 if any right answer occurs in the text, whatever its case: RULER's `string_match_part`."""
    return _contains(text, answer)


def tokens_in_place(text: str, row: Row) -> float:
    """1 if every answer stands at its place, of the reference model's tasks, whose texts are names of
    tokens. `row.extra["places"]` are the places of the answers; other tokens restate the question. With
    `row.extra["ordered"]` false their order is free."""
    tokens = text.split(" ")
    given = [tokens[place] if place < len(tokens) else "" for place in row.extra["places"]]
    return float(given == [*row.answers] if row.extra["ordered"] else {*given} == {*row.answers})


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, one space between words.

    Examples:
        >>> normalised("The cat, a mouse.")
        'cat mouse'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split())


@_best
def qa_f1(text: str, answer: str) -> float:
    """F1 of two multisets of words without case, punctuation and articles: SQuAD's and LongBench's.

    `c = sum_t min(#t in text, #t in answer);  F1 = 2 c / (|text| + |answer|)`, and 0 where `c = 0`
    """
    given, wanted = normalised(text).split(), normalised(answer).split()
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted)) if same else 0.0


@_best
def rouge_l(text: str, answer: str) -> float:
    """F of ROUGE-L as the package `rouge` 1.0.1 computes it, LongBench's choice: not `rouge_score`'s.

    A text that the package cannot score (an empty one) scores 0. The released code also scores 0 where a
    pair of sentences of about a thousand words exhausts Python's stack; here such a pair is scored.

    Raises:
        ValueError: The package is not installed.
    """
    require("eval", "rouge", what="rouge_l")
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    # It walks back through a pair of sentences by calling itself once a word.
    sys.setrecursionlimit(limit + len(text.split()) + len(answer.split()))
    try:
        scores = Rouge(metrics=["rouge-l"], stats=["f"]).get_scores(text, answer)
    except ValueError:  # a text without a sentence
        return 0.0
    finally:
        sys.setrecursionlimit(limit)
    return float(scores[0]["rouge-l"]["f"])


@_best
def code_similarity(text: str, answer: str) -> float:
    """Edit similarity of the first line of code (one without "`", "#" or "//"), in whole percents:
    `round(100 * 2 M / (|p| + |r|)) / 100`, `M` the characters in the matching blocks of
    `difflib.SequenceMatcher`. LongBench calls `fuzzywuzzy.fuzz.ratio`, which computes this when
    python-Levenshtein is not installed."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    # fuzzywuzzy calls two equal texts 100, empty ones too.
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def classification(text: str, row: Row) -> float:
    """`1 / number of classes named`, if the right one is among them, else 0: LongBench's.

    `row.extra["classes"]` are all classes. A class that is a proper part of the right one ("number" of
    "number of people") does not count as named. The released code drops such classes from the list that it is
    walking through, and so passes over the class behind each one that it drops; kept, since it decides scores
    where two parts are neighbours.

    Raises:
        ValueError: The row has no classes.
    """
    if not row.extra.get("classes"):
        raise ValueError("classification needs all classes of the data set: extra['classes'] is empty.")

    def one(answer: str) -> float:
        named, passed_over = [], False
        for name in (name for name in row.extra["classes"] if name in text):
            dropped = not passed_over and name in answer and name != answer
            if not dropped:
                named.append(name)
            passed_over = dropped
        return 1 / len(named) if answer in named else 0.0

    return max(map(one, row.answers))


@_best
def count(text: str, answer: str) -> float:
    """Share of the text's numbers that equal the right one, as written: LongBench's."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(text: str, row: Row) -> float:
    """`count` of the paragraph's number, of a right answer "Paragraph 12": LongBench's."""
    found = [re.search(r"Paragraph (\d+)", answer) for answer in row.answers]
    if not all(found):
        raise ValueError(f"a right answer of retrieval reads 'Paragraph 12', but got {row.answers[0]!r}.")
    return count(text, replace(row, answers=tuple(one[1] for one in found if one)))


METRICS: Mapping[str, Metric] = {
    one.__name__: one
    for one in (
        *(match_all, match_any, tokens_in_place, qa_f1, rouge_l, code_similarity, classification, retrieval),
        count,
    )
}

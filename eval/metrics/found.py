"""Scores whether an answer names the right thing: a needle, a class, a paragraph, a count, a letter.

RULER's `string_match_all` and `string_match_part` (arXiv 2404.06654, NVIDIA/RULER
`scripts/eval/synthetic/constants.py`); classification, retrieval and count of LongBench (arXiv 2308.14508);
the four-way choice of LongBench v2 (arXiv 2412.15204).

Several right answers mean what the benchmark's authors mean by them: RULER's `all` wants every one (mean),
its `part` any one (maximum). lm-evaluation-harness takes the mean for both.
"""

import re
from collections.abc import Sequence
from typing import Any

from retain.eval.metrics.overlap import average, best, checked


def ruler_clean(prediction: str) -> str:
    """A prediction without outer blanks, each control character replaced by a line break."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


@average
def ruler_all(prediction: str, reference: str) -> float:
    """Share of right answers that occur in the prediction, whatever their case: RULER's `string_match_all`.

    `mean_r 1[lower(r) in lower(prediction)]`
    """
    return float(reference.lower() in ruler_clean(prediction).lower())


@best
def ruler_part(prediction: str, reference: str) -> float:
    """Whether any right answer occurs in the prediction, whatever its case: RULER's `string_match_part`."""
    return float(reference.lower() in ruler_clean(prediction).lower())


def classification(
    prediction: str, references: Sequence[str], *, all_classes: Sequence[str], **about: Any
) -> float:
    """One over the number of classes named, if the right one is among them, else 0: LongBench's.

    A class that is a proper part of the right one ("number" of "number of people") does not count as named.
    The released code drops such classes from the list that it is walking through, and so passes over the
    class behind each one that it drops; kept, since it decides scores where two parts are neighbours.

    Raises:
        ValueError: `all_classes`, every class of the data set, is empty.
    """
    if not all_classes:
        raise ValueError("classification needs the data set's classes, but `all_classes` is empty.")

    def one(reference: str) -> float:
        kept, passed_over = [], False
        for name in (name for name in all_classes if name in prediction):
            dropped = not passed_over and name in reference and name != reference
            if not dropped:
                kept.append(name)
            passed_over = dropped
        return 1 / len(kept) if reference in kept else 0.0

    return max(map(one, checked(references)))


@best
def retrieval(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that are the paragraph's, of "Paragraph 12": LongBench's."""
    return _share(prediction, _paragraph(reference, "Paragraph "))


@best
def retrieval_zh(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that are the paragraph's, of "段落12": LongBench's."""
    return _share(prediction, _paragraph(reference, "段落"))


@best
def count(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that equal the right one, as written: LongBench's."""
    return _share(prediction, reference)


@best
def multiple_choice(prediction: str, reference: str) -> float:
    """Whether the letter of "The correct answer is (B)", or else of "The correct answer is B", is right,
    ignoring asterisks: LongBench v2's.

    A prediction that names none scores 0; the released code can count it as a quarter ("compensated").
    """
    plain = prediction.replace("*", "")
    patterns = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")
    letter = next((found[1] for pattern in patterns if (found := re.search(pattern, plain))), None)
    return float(letter == reference.strip())


def _paragraph(reference: str, word: str) -> str:
    match = re.search(rf"{word}(\d+)", reference)
    if match is None:
        raise ValueError(f"a right answer of retrieval reads {word + '12'!r}, but got {reference!r}.")
    return match.group(1)


def _share(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


METRICS = (classification, count, multiple_choice, retrieval, retrieval_zh, ruler_all, ruler_part)

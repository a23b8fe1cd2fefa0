"""Scores whether an answer names the right thing: a needle, a class, a paragraph, a count, a letter.

Scores are from 0 to 1. RULER's `string_match_all` and `string_match_part` (arXiv 2404.06654, NVIDIA/RULER
`scripts/eval/synthetic/constants.py`); classification, retrieval and count of LongBench (arXiv 2308.14508);
the four-way choice of LongBench v2 (arXiv 2412.15204).

Several right answers mean what the benchmark's authors mean by them. RULER's `all` wants every one (mean),
its `part` any one (maximum); lm-evaluation-harness takes the mean for both, which scores "the 1st century BC"
0.667 against ("the 1st century", "1st century", "first century") instead of 1. That is no variant here, since
it would be `ruler_all` under a misleading name.
"""

import re
from collections.abc import Sequence
from typing import Any

from retain.eval.metrics.overlap import best, checked

_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"\d+")


def ruler_clean(prediction: str) -> str:
    r"""A prediction as RULER reads it: stripped, every control character a line break, stripped again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def kvpress_clean(prediction: str) -> str:
    r"""A prediction as kvpress reads it: control characters deleted, so that "12\n34" becomes "1234"."""
    return _CONTROL.sub("", prediction.strip()).strip()


def ruler_all(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Share of right answers that occur in the prediction, whatever their case: RULER's `string_match_all`.

        `mean_r 1[lower(r) in lower(prediction)]`

    Args:
        prediction: Answer of the model.
        references: Everything that is to be named.
        about: Not used.
    """
    return _mean(_occurs(ruler_clean(prediction), references))


def ruler_part(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether any right answer occurs in the prediction, whatever its case: RULER's `string_match_part`.

    `max_r 1[lower(r) in lower(prediction)]`
    """
    return max(_occurs(ruler_clean(prediction), references))


def ruler_all_kvpress(prediction: str, references: Sequence[str], **about: Any) -> float:
    """`ruler_all`, with control characters deleted instead of made line breaks, as kvpress does."""
    return _mean(_occurs(kvpress_clean(prediction), references))


def ruler_part_kvpress(prediction: str, references: Sequence[str], **about: Any) -> float:
    """`ruler_part`, with control characters deleted instead of made line breaks, as kvpress does."""
    return max(_occurs(kvpress_clean(prediction), references))


def classification(
    prediction: str, references: Sequence[str], *, all_classes: Sequence[str], **about: Any
) -> float:
    """One over the number of classes named, if the right one is among them, else 0: LongBench's.

    A class that is a proper part of the right one ("number" of "number of people") does not count as named.
    The released code drops such classes from the list that it is walking through, and so passes over the
    class behind each one that it drops; kept, since it decides scores where two parts are neighbours.

    Args:
        prediction: Answer of the model.
        references: Right classes; the best counts.
        all_classes: Every class of the data set.
        about: Not used.

    Raises:
        ValueError: there are no classes.
    """
    if not all_classes:
        raise ValueError("classification needs the data set's classes, but `all_classes` is empty.")

    def one(predicted: str, reference: str) -> float:
        kept, passed_over = [], False
        for name in (name for name in all_classes if name in predicted):
            dropped = not passed_over and name in reference and name != reference
            if not dropped:
                kept.append(name)
            passed_over = dropped
        return 1 / len(kept) if reference in kept else 0.0

    return best(prediction, references, one)


def retrieval(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Share of the prediction's numbers that are the paragraph's, of "Paragraph 12": LongBench's."""
    return best(prediction, references, lambda p, r: _share(p, _paragraph(r, "Paragraph ")))


def retrieval_zh(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Share of the prediction's numbers that are the paragraph's, of "段落12": LongBench's."""
    return best(prediction, references, lambda p, r: _share(p, _paragraph(r, "段落")))


def count(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Share of the prediction's numbers that equal the right one, as written: LongBench's."""
    return best(prediction, references, _share)


def choice(prediction: str) -> str | None:
    """The letter of "The correct answer is (B)" or "The correct answer is B", ignoring asterisks, or None."""
    plain = prediction.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if match := re.search(pattern, plain):
            return match.group(1)
    return None


def multiple_choice(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether the letter that the prediction calls "The correct answer" is right: LongBench v2's.

    A prediction that names none scores 0; the released code can count it as a quarter ("compensated").
    """
    return best(prediction, references, lambda p, r: float(choice(p) == r.strip()))


def _occurs(prediction: str, references: Sequence[str]) -> list[float]:
    read = prediction.lower()
    return [float(reference.lower() in read) for reference in checked(references)]


def _mean(found: list[float]) -> float:
    return sum(found) / len(found)


def _paragraph(reference: str, word: str) -> str:
    match = re.search(rf"{word}(\d+)", reference)
    if match is None:
        raise ValueError(f"a right answer of retrieval reads {word + '12'!r}, but got {reference!r}.")
    return match.group(1)


def _share(prediction: str, wanted: str) -> float:
    numbers = _NUMBER.findall(prediction)
    return sum(number == wanted for number in numbers) / len(numbers) if numbers else 0.0

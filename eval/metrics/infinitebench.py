r"""Scores of InfiniteBench, which SCBench takes over: a number, a word, an option, a summary.

Zhang et al., "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens" (arXiv 2402.13718) and
OpenBMB/InfiniteBench `src/compute_scores.py`; Li et al., "SCBench: A KV Cache-Centric Analysis of
Long-Context Methods" (arXiv 2412.10319) and microsoft/MInference `scbench/compute_scores.py`. Their quirks
are kept, since they decide scores; where the two differ, both are here.

Right answers are texts, numbers too. Token F1 and substrings that ignore case are `qa_f1` and `ruler_part`.
"""

import re
from collections.abc import Sequence
from typing import Any

from retain.eval.metrics.overlap import best, checked, plain_zh, token_f1
from retain.process.extras import require

_RETRIEVED = re.compile(r"[\n:\"'.,?!{}]")
_NUMBER = re.compile(r"\d+\.\d+|\d+")
# A number of more digits is none: Python refuses to read one of more than 4300.
_MOST_DIGITS = 1000
# In this order; what follows the first that occurs decides.
_DEBUG_LEADS = ("answer is:", "is:", "answer:", "correct option is:")
_CHOICE_LEADS = ("answer is:", "answer:", "answer is", "option is")


@best
def verbatim(prediction: str, reference: str) -> float:
    """Whether a right answer occurs in the prediction, as it is written: SCBench's for keys and values."""
    return float(reference in prediction)


@best
def whole_word(prediction: str, reference: str) -> float:
    """Whether a right answer is a word of the prediction, punctuation (but no hyphen) apart: InfiniteBench's
    for Retrieve.KV."""
    return float(reference in _RETRIEVED.sub(" ", prediction).split())


@best
def first_digits(prediction: str, reference: str) -> float:
    """Whether the first run of digits is the right one, leading zeros included: PassKey and Number."""
    found = re.search(r"[0-9]+", prediction)
    return float(reference == ("" if found is None else found.group()))


@best
def first_number(prediction: str, reference: str) -> float:
    """Whether the first number, its sign apart, is the right one: Math.Find.

    A right answer without a decimal point is compared with the whole part of the number, as in SCBench;
    InfiniteBench's code stops at a number with decimals there.
    """
    found = _NUMBER.search(prediction)
    if found is None or len(found.group()) > _MOST_DIGITS:
        return 0.0
    if "." in reference:
        return float(float(found.group()) == float(reference))
    return float(int(found.group().partition(".")[0]) == int(reference))


@best
def last_number(prediction: str, reference: str) -> float:
    """Whether the last word is the right whole number: Code.Run."""
    words = re.sub(r"[\n.`'\":]", " ", prediction.strip()).split()
    if not words or len(words[-1]) > _MOST_DIGITS:
        return 0.0
    try:
        return float(int(words[-1]) == int(reference))
    except ValueError:
        return 0.0


def leading_numbers(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Share of the right numbers, one after another, with which the prediction begins: Math.Calc.

    Signs are not read, so that a negative right number ends the count, as in the released code.
    """
    wanted, correct = checked(references), 0
    for right, found in zip(wanted, re.findall(r"[0-9]+", prediction), strict=False):
        if len(found) > _MOST_DIGITS or int(found) != int(right):
            break
        correct += 1
    return correct / len(wanted)


@best
def speaker(prediction: str, reference: str) -> float:
    """Whether the name is a word of the prediction in capitals: En.Dia.

    Of several right answers the task takes the first. A name of two words is never one word, and never
    right: so in the released code.
    """
    return float(reference in _RETRIEVED.sub(" ", prediction.strip()).upper().split())


def debugged(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether the answer is the option's letter or the function's name: Code.Debug.

    It begins with `B.` or `B:`, or one of the two follows the first of "answer is:", "is:", "answer:",
    "correct option is:" that occurs, in this order.

    Args:
        prediction: The answer.
        references: The function's name, and the letter of its option.
    """
    name, letter = checked(references)
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" {2,}", " ", re.sub(r"[\n`'\"*-]|Option|option", " ", text))
    return _behind(text, _DEBUG_LEADS, (letter, name)) or 0.0


def chosen_option(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether the answer is the option's letter or its text: En.MC.

    The first letter decides if it is A, B, C or D. Else the whole answer, what follows "answer is:",
    "answer:", "answer is" or "option is", or the first word that stands in "ABCD" does.

    Args:
        prediction: The answer.
        references: The option's text, and its letter.
    """
    right, text = checked(references), prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in right)
    if text in right:
        return 1.0
    text = re.sub(" {2,}", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    found = _behind(text, _CHOICE_LEADS, right)
    if found is None:
        found = float(next((word for word in text.split() if word in "ABCD"), None) in right)
    return found


def _behind(text: str, leads: Sequence[str], right: Sequence[str]) -> float | None:
    """Whether a right answer stands one character behind the first lead that occurs; None without one."""
    for lead in leads:
        if lead in text:
            rest = text[text.index(lead) + len(lead) + 1 :]
            return float(any(rest.startswith(one) for one in right))
    return None


@best
def qa_f1_characters(prediction: str, reference: str) -> float:
    """Token F1 of characters, without case, punctuation and spaces: Zh.QA, where LongBench takes words."""
    return token_f1(plain_zh(prediction), plain_zh(reference))


@best
def rouge_lsum(prediction: str, reference: str) -> float:
    """F of ROUGE-Lsum as the package rouge_score computes it: no stemmer, a sentence a line. En.Sum.

    Raises:
        ValueError: The package is not installed.
    """
    require("eval", "rouge_score", what="rouge_lsum")
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeLsum"]).score(reference, prediction)["rougeLsum"].fmeasure)


METRICS = (
    *(chosen_option, debugged, first_digits, first_number, last_number, leading_numbers, qa_f1_characters),
    *(rouge_lsum, speaker, verbatim, whole_word),
)

r"""Scores of SCBench: a key's value, a number, an option, Chinese characters, a summary.

Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (arXiv 2412.10319) and
microsoft/MInference `scbench/compute_scores.py`, which takes most of them over from InfiniteBench (arXiv
2402.13718). Their quirks are kept, since they decide scores.

Right answers are texts, numbers too. Substrings that ignore case are `ruler_part`.
"""

import re
from collections.abc import Sequence
from typing import Any

from retain.eval.metrics.overlap import best, checked, plain_zh, token_f1
from retain.process.extras import require

_NUMBER = re.compile(r"\d+\.\d+|\d+")
# A number of more digits is none: Python refuses to read one of more than 4300.
_MOST_DIGITS = 1000
# In this order; what follows the first that occurs decides.
_LEADS = ("answer is:", "answer:", "answer is", "option is")


@best
def verbatim(prediction: str, reference: str) -> float:
    """Whether a right answer occurs in the prediction, as it is written: for keys and values."""
    return float(reference in prediction)


@best
def first_number(prediction: str, reference: str) -> float:
    """Whether the first number, its sign apart, is the right one: Math.Find.

    A right answer without a decimal point is compared with the whole part of the number.
    """
    found = _NUMBER.search(prediction)
    if found is None or len(found.group()) > _MOST_DIGITS:
        return 0.0
    if "." in reference:
        return float(float(found.group()) == float(reference))
    return float(int(found.group().partition(".")[0]) == int(reference))


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
    for lead in _LEADS:
        if lead in text:  # one character stands between the lead and the answer
            rest = text[text.index(lead) + len(lead) + 1 :]
            return float(any(rest.startswith(one) for one in right))
    return float(next((word for word in text.split() if word in "ABCD"), None) in right)


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


METRICS = (chosen_option, first_number, qa_f1_characters, rouge_lsum, verbatim)

"""Lists scorers by name, and averages their scores.

A card names a scorer; scorers take a prediction and its right answers and give a score from 0 to 1. They
stand in four files: shared words and characters (`overlap`), named things (`found`), numbers and formulas
(`numbers`), steps (`steps`).

A name means one computation. If two programs call two computations by one name, both are here under two
names, so that a table's column is unambiguous.
"""

from collections.abc import Callable, Mapping, Sequence

from retain.eval.metrics.found import (
    classification,
    count,
    multiple_choice,
    retrieval,
    retrieval_zh,
    ruler_all,
    ruler_all_kvpress,
    ruler_part,
    ruler_part_kvpress,
)
from retain.eval.metrics.numbers import aime, boxed, boxed_first, gsm8k, gsm8k_strict, mathematics
from retain.eval.metrics.overlap import (
    code_similarity,
    code_similarity_rapidfuzz,
    code_similarity_skip_blank,
    contains,
    exact_match,
    exact_match_verbatim,
    first_line,
    qa_f1,
    qa_f1_keep_articles,
    qa_f1_zh,
    rouge_l,
    rouge_l_zh,
)
from retain.eval.metrics.steps import final_step, step_share, steps

__all__ = ["METRICS", "Metric", "first_line", "official_mean"]

# (prediction, references, **what the question's `scoring` says) -> score from 0 to 1.
Metric = Callable[..., float]

METRICS: Mapping[str, Metric] = {
    metric.__name__: metric
    for metric in (
        *(aime, boxed, boxed_first, classification, code_similarity),
        *(code_similarity_rapidfuzz, code_similarity_skip_blank, contains, count, exact_match),
        *(exact_match_verbatim, final_step, gsm8k, gsm8k_strict, mathematics),
        *(multiple_choice, qa_f1, qa_f1_keep_articles, qa_f1_zh, retrieval),
        *(retrieval_zh, rouge_l, rouge_l_zh, ruler_all, ruler_all_kvpress),
        *(ruler_part, ruler_part_kvpress, step_share, steps),
    )
}


def official_mean(scores: Sequence[float]) -> float:
    """One number of many scores, as RULER and LongBench print it: `round(100 * mean, 2)`.

    An item without an answer counts as 0 and must be among the scores.

    Raises:
        ValueError: there are no scores, or one lies outside 0 to 1.
    """
    if not scores:
        raise ValueError("the mean of no scores is not a number: there is no item.")
    outside = [score for score in scores if not 0 <= score <= 1]
    if outside:
        raise ValueError(f"scores lie between 0 and 1, but got {outside[0]}.")
    return round(100 * sum(scores) / len(scores), 2)

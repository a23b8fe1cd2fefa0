"""Scores the overlap of an answer with the right one: words, subsequences, characters.

Token F1, ROUGE-L and edit similarity as in LongBench (arXiv 2308.14508, THUDM/LongBench `metrics.py`).

A score is computed as in the benchmark's released code, with its quirks; every departure is a variant with a
name of its own, since two programs that both print "ROUGE-L" need not agree.
"""

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from statistics import fmean
from typing import Any

from retain.process.extras import require

# (prediction, references, **scoring of the question) -> score from 0 to 1.
Metric = Callable[..., float]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench removes these from Chinese answers besides the punctuation of ASCII.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def _fold(fold: Callable[[list[float]], float], one: Callable[[str, str], float]) -> Metric:
    """Makes a metric of a score against one right answer: its highest or mean over all of them.

    The metric takes the prediction, its right answers (see `checked`), and keywords that it does not use.
    """

    @wraps(one)
    def metric(prediction: str, references: Sequence[str], **about: Any) -> float:
        return fold([one(prediction, reference) for reference in checked(references)])

    return metric


best = partial(_fold, max)
average = partial(_fold, fmean)


def checked(references: Sequence[str]) -> Sequence[str]:
    """Right answers, at least one and each a text.

    Raises:
        ValueError: There is none, or something other than a sequence of texts.
    """
    if isinstance(references, str) or not all(isinstance(reference, str) for reference in references):
        raise ValueError(
            f"right answers are a sequence of texts, but got {references!r:.100}: write (text,)."
        )
    if not references:
        raise ValueError("an item without a right answer cannot be scored: leave it out of the task.")
    return references


def first_line(prediction: str) -> str:
    r"""Text before the first line break, leading line breaks aside.

    LongBench scores no more than this of trec, triviaqa, samsum and lsht. kvpress strips leading spaces too.
    """
    return prediction.lstrip("\n").partition("\n")[0]


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, one space between words.

    Examples:
        >>> normalised("The cat, a mouse.")
        'cat mouse'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split())


def plain_zh(text: str) -> str:
    """Lower case, without punctuation of ASCII and Chinese, and without spaces."""
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def token_f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two multisets of tokens.

    `c = sum_t min(#t in predicted, #t in reference);  P = c / |predicted|;  R = c / |reference|;`
    `F1 = 2 P R / (P + R)`, and 0 where `c = 0`
    """
    same = sum((Counter(predicted) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(reference)
    return 2 * precision * recall / (precision + recall)


@best
def qa_f1(prediction: str, reference: str) -> float:
    """Token F1 after removal of case, punctuation and articles: SQuAD's and LongBench's."""
    return token_f1(normalised(prediction).split(), normalised(reference).split())


@best
def qa_f1_zh(prediction: str, reference: str) -> float:
    """Token F1 of Chinese words as jieba cuts them, without case, punctuation and spaces: LongBench's.

    Raises:
        ValueError: jieba is not installed.
    """

    def words(text: str) -> list[str]:
        return [word for word in map(plain_zh, _cut(text)) if word]

    return token_f1(words(prediction), words(reference))


@best
def rouge_l(prediction: str, reference: str) -> float:
    """F of ROUGE-L as the package `rouge` 1.0.1 computes it, LongBench's choice: not `rouge_score`'s.

    The package cuts both texts into sentences at full stops, counts each distinct word once, and takes the
    union over sentences of longest common subsequences. A text that it cannot score (an empty prediction)
    scores 0. The released code also scores 0 where a sentence pair of about a thousand words exhausts
    Python's stack, which depends on where it was called from; here such a pair is scored.

    Raises:
        ValueError: The package is not installed.
    """
    return _rouge_l(prediction, reference)


@best
def rouge_l_zh(prediction: str, reference: str) -> float:
    """`rouge_l` of Chinese words as jieba cuts them: LongBench's for dureader and vcsum.

    Raises:
        ValueError: jieba or rouge is not installed.
    """
    return _rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)))


@best
def code_similarity(prediction: str, reference: str) -> float:
    """Edit similarity of the first line of code, in whole percents: LongBench's, for lcc and repobench-p.

    That is the first line without "`", "#" or "//".

        `round(100 * 2 M / (|p| + |r|)) / 100`

    `M` is the number of characters in the matching blocks that `difflib.SequenceMatcher` finds. The released
    code calls `fuzzywuzzy.fuzz.ratio`, which computes this when python-Levenshtein is not installed.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    # fuzzywuzzy calls two equal texts 100, empty ones too.
    if line == reference:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _rouge_l(predicted: str, reference: str) -> float:
    require("eval", "rouge", what="rouge_l")
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    # It walks back through a pair of sentences by calling itself once a word.
    sys.setrecursionlimit(limit + len(predicted.split()) + len(reference.split()))
    try:
        scores = Rouge(metrics=["rouge-l"], stats=["f"]).get_scores(predicted, reference)
    except ValueError:  # a text without a sentence
        return 0.0
    finally:
        sys.setrecursionlimit(limit)
    return float(scores[0]["rouge-l"]["f"])


def _cut(text: str) -> list[str]:
    require("chinese", "jieba", what="a metric of Chinese text")
    import jieba

    words: list[str] = jieba.lcut(text)
    return words


METRICS = (code_similarity, qa_f1, qa_f1_zh, rouge_l, rouge_l_zh)

"""Scores the overlap of an answer with the right one: words, subsequences, characters.

Scores are from 0 to 1, the best over the right answers. Token F1, ROUGE-L and edit similarity as in LongBench
(arXiv 2308.14508, THUDM/LongBench `metrics.py`), token F1 of the protection study (arXiv 2605.18053), exact
match and containment.

A score is what the benchmark's released code computes, with its quirks, and every departure is a variant with
a name of its own; two programs that both print "ROUGE-L" need not agree.
"""

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from retain.process.extras import require

ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What LongBench removes from Chinese answers besides the punctuation of ASCII.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def best(prediction: str, references: Sequence[str], one: Callable[[str, str], float]) -> float:
    """The maximum over right answers of `one(prediction, reference)`.

    Raises:
        ValueError: there is no right answer to compare with.
    """
    return max(one(prediction, reference) for reference in checked(references))


def checked(references: Sequence[str]) -> Sequence[str]:
    """Right answers, at least one and each a text.

    Raises:
        ValueError: there is none, or something other than a sequence of texts.
    """
    if isinstance(references, str) or not all(isinstance(reference, str) for reference in references):
        raise ValueError(
            f"right answers are a sequence of texts, but got {references!r:.100}: write (text,)."
        )
    if not references:
        raise ValueError("an item without a right answer cannot be scored: leave it out of the task.")
    return references


def first_line(prediction: str) -> str:
    r"""What precedes the first line break, leading line breaks aside.

    LongBench scores no more than this of trec, triviaqa, samsum and lsht. kvpress strips leading spaces too.
    """
    return prediction.lstrip("\n").partition("\n")[0]


def normalised(text: str, *, articles: bool = False) -> str:
    """Lower case, without ASCII punctuation, one space between words; "a", "an" and "the" only if asked for.

    Example:
        >>> normalised("The cat, a mouse.")
        'cat mouse'
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join((plain if articles else ARTICLES.sub(" ", plain)).split())


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


def qa_f1(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Token F1 after removal of case, punctuation and articles: SQuAD's and LongBench's.

    Args:
        prediction: Answer of the model.
        references: Right answers; the best counts.
        about: Not used.
    """
    return best(prediction, references, lambda p, r: token_f1(normalised(p).split(), normalised(r).split()))


def qa_f1_keep_articles(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Token F1 after removal of case and punctuation, articles kept: the protection study's."""

    def one(predicted: str, reference: str) -> float:
        return token_f1(
            normalised(predicted, articles=True).split(), normalised(reference, articles=True).split()
        )

    return best(prediction, references, one)


def qa_f1_zh(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Token F1 of Chinese words as jieba cuts them, without case, punctuation and spaces: LongBench's.

    Raises:
        ValueError: jieba is not installed.
    """
    cut = _jieba()

    def words(text: str) -> list[str]:
        plain = ("".join(word.lower().translate(_NO_CHINESE_PUNCTUATION).split()) for word in cut(text))
        return [word for word in plain if word]

    return best(prediction, references, lambda p, r: token_f1(words(p), words(r)))


def exact_match(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether a right answer is all of the prediction, both without case, punctuation and articles."""
    return best(prediction, references, lambda p, r: float(_plain(p) == _plain(r)))


def exact_match_verbatim(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether a right answer is all of the prediction, character for character, outer spaces aside."""
    return best(prediction, references, lambda p, r: float(p.strip() == r.strip()))


def contains(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Whether the words of a right answer occur in a row in the prediction, both normalised as for `qa_f1`.

    Whole words only: "5" is not contained in "15". A right answer that normalises to nothing ("the") is
    compared with its articles; one of punctuation alone is contained in nothing.
    """

    def one(predicted: str, reference: str) -> float:
        articles = not normalised(reference)
        wanted = normalised(reference, articles=articles)
        return float(bool(wanted) and f" {wanted} " in f" {normalised(predicted, articles=articles)} ")

    return best(prediction, references, one)


def rouge_l(prediction: str, references: Sequence[str], **about: Any) -> float:
    """F of ROUGE-L as the package `rouge` 1.0.1 computes it, LongBench's choice: not `rouge_score`'s.

    The package cuts both texts into sentences at full stops, counts each distinct word once, and takes the
    union over sentences of longest common subsequences. What it cannot score (an empty prediction) scores 0.
    The released code also scores 0 where a sentence pair of about a thousand words exhausts Python's stack,
    which depends on where it was called from; here such a pair is scored.

    Raises:
        ValueError: the package is not installed.
    """
    return best(prediction, references, _rouge_l)


def rouge_l_zh(prediction: str, references: Sequence[str], **about: Any) -> float:
    """`rouge_l` of Chinese words as jieba cuts them: LongBench's for dureader and vcsum.

    Raises:
        ValueError: jieba or rouge is not installed.
    """
    cut = _jieba()
    return best(prediction, references, lambda p, r: _rouge_l(" ".join(cut(p)), " ".join(cut(r))))


def code_line(prediction: str, *, skip_blank: bool = False) -> str:
    r"""First line without "`", "#" or "//", leading line breaks aside; "" if there is none.

    Args:
        prediction: Code, perhaps with comments and fences before it.
        skip_blank: Whether a blank line is passed over too.
    """
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")) and (line.strip() or not skip_blank):
            return line
    return ""


def code_similarity(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Edit similarity of the first line of code, in whole percents: LongBench's, for lcc and repobench-p.

        `round(100 * 2 M / (|p| + |r|)) / 100`

    `M` is the number of characters in the matching blocks that `difflib.SequenceMatcher` finds. The released
    code calls `fuzzywuzzy.fuzz.ratio`, which computes this when python-Levenshtein is not installed.
    """
    return best(prediction, references, lambda p, r: _difflib_ratio(code_line(p), r))


def code_similarity_skip_blank(prediction: str, references: Sequence[str], **about: Any) -> float:
    """`code_similarity` of the first line of code that is not blank: lm-eval's LongBench."""
    return best(prediction, references, lambda p, r: _difflib_ratio(code_line(p, skip_blank=True), r))


def code_similarity_rapidfuzz(prediction: str, references: Sequence[str], **about: Any) -> float:
    """Edit similarity of the first line of code by `rapidfuzz.fuzz.ratio`, not rounded.

        `1 - (|p| + |r| - 2 LCS(p, r)) / (|p| + |r|)`

    Never below difflib's before rounding, and often above: it finds the longest common subsequence.

    Raises:
        ValueError: rapidfuzz is not installed.
    """
    require("eval", "rapidfuzz", what="code_similarity_rapidfuzz")
    from rapidfuzz import fuzz

    return best(prediction, references, lambda p, r: float(fuzz.ratio(code_line(p), r)) / 100)


def _plain(text: str) -> str:
    return normalised(text) or text.strip().lower()


def _difflib_ratio(predicted: str, reference: str) -> float:
    # fuzzywuzzy calls two equal texts 100, empty ones too.
    if predicted == reference:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, predicted, reference).ratio()) / 100


def _rouge_l(predicted: str, reference: str) -> float:
    require("eval", "rouge", what="rouge_l")
    from rouge import Rouge

    try:
        # It walks back through a pair of sentences by calling itself once a word.
        with _stack(len(predicted.split()) + len(reference.split())):
            scores = Rouge(metrics=["rouge-l"], stats=["f"]).get_scores(predicted, reference)
    except ValueError:
        # How the package says that a text has no sentence.
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


@contextmanager
def _stack(calls: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + calls)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _jieba() -> Callable[[str], list[str]]:
    require("chinese", "jieba", what="a metric of Chinese text")
    import jieba

    cut: Callable[[str], list[str]] = jieba.lcut
    return cut

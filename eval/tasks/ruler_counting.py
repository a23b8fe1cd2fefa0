"""RULER's tracing and counting tasks: vt (variable tracking), cwe (common words), fwe (frequent coded words).

After Hsieh et al. (arXiv 2404.06654), NVIDIA/RULER `scripts/data/synthetic/`, whose templates are quoted
("assgined" and four dots included), with the settings of `synthetic.yaml`.

Different from the released scripts: `context_tokens` bounds the context (worked example, instruction and
text) alone; every row is searched for its size and shuffled by a stream of its seed; the question is drawn
first, so that the same row at another length asks for the same words; the worked example of vt has at most
half of the context's tokens; and where cwe needs more words than wonderwords has (from about 90,000 tokens),
pairs of adjective and noun take the place of RULER's further list, whose origin is unknown.
"""

import math
import random
import string
from itertools import pairwise
from typing import Any

from retain.eval.tasks.haystacks import Haystack, all_words, different_places, draw_word, insert, spans
from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.eval.tasks.ruler import NOISE

VT_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = "\nQuestion: Find all variables that are assigned the value {} in the text above."
VT_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {} variables are "
    "assgined the value {}, they are: "
)
CWE_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
FWE_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?"
)
FWE_ANSWER = " Answer: According to the coded text above, the three most frequently appeared words are:"
# Assignments of one variable to the next, and most tokens of the worked example.
HOPS, EXAMPLE_TOKENS = 4, 500
# Common words of cwe; below this length, where RULER has none, its short lists are made.
COMMON, SHORT = 10, 4096


@one_by_one
def ruler_vt(request: Request) -> Row:
    """Write variables that are assigned a value, or each other, among noise; behind one worked example, which
    has as many assignments as fit.

    Raises:
        ValueError: A context too short for a noise sentence per assignment.
    """
    draw = random.Random(f"ruler_vt 1 {HOPS} {request.seed} {request.item}")
    limit, drawn = min(EXAMPLE_TOKENS, request.context_tokens // 2), draw.getrandbits(64)
    for hops in range(HOPS, 0, -1):
        # Drawn from another stream: the number of hops that fit must not change the question.
        example = _Chain(hops, 3, random.Random(drawn))
        if request.count(example.solved(hops + 1)) <= limit:
            break
    what = "the worked example of ruler_vt (half of the context)"
    size = request.fit(example.solved, least=hops + 1, what=what, most=limit)
    opening = f"{example.solved(size)}\n\n{VT_INSTRUCTION}"
    chain = _Chain(HOPS, 5, draw)
    size = request.fit(lambda size: chain.text(size, opening), least=HOPS + 1, what="ruler_vt")
    context = chain.text(size, opening)
    evidence = spans(context, [line.rstrip() for line in chain.lines])
    return _row(context, chain.question, tuple(chain.names), chain.answer_prefix, evidence=evidence)


def _different(alphabet: str, letters: int, count: int, draw: random.Random) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(alphabet, k=letters))] = None
    return [*words]


class _Chain:
    """A chain of assignments among noise sentences, one for each assignment or more."""

    def __init__(self, hops: int, letters: int, draw: random.Random) -> None:
        self.names = _different(string.ascii_uppercase, letters, hops + 1, draw)
        (value,) = draw.sample(range(10000, 99999), 1)
        self.depths = sorted(draw.random() for _ in self.names)
        # The blank at the end of a line is the released code's.
        further = [f"VAR {name} = VAR {before} " for before, name in pairwise(self.names)]
        self.lines = [f"VAR {self.names[0]} = {value}", *further]
        self.question, self.answer_prefix = VT_QUESTION.format(value), VT_ANSWER.format(hops + 1, value)

    def text(self, size: int, opening: str = VT_INSTRUCTION) -> str:
        """Lines of noise with the assignments among them."""
        placed = [*zip(different_places(self.depths, size), self.lines, strict=True)]
        return insert(Haystack("noise", lambda number: NOISE, "\n"), size, placed, opening)

    def solved(self, size: int) -> str:
        """A task with its answer."""
        return f"{self.text(size)}{self.question}{self.answer_prefix} {' '.join(self.names)}"


@one_by_one
def ruler_cwe(request: Request) -> Row:
    """Write a numbered list, and ask for its ten most common words; behind one worked example.

    A common word stands there 30 times and any other 3 times, below 4,096 tokens 6 times and once.

    Raises:
        ValueError: A context too short for the common words.
    """
    short = request.context_tokens < SHORT
    draw = random.Random(f"ruler_cwe {request.seed} {request.item}")
    example = _NumberedList(*((3, 1) if short else (10, 3)), draw)
    text = example.text(10 if short else 30)
    opening = f"{CWE_INSTRUCTION}{text}{CWE_QUESTION}{CWE_ANSWER} {example.answer}\n{CWE_INSTRUCTION}"
    asked = _NumberedList(*((6, 1) if short else (30, 3)), draw)
    what = "ruler_cwe with its worked example"
    size = request.fit(lambda size: opening + asked.text(size), least=1, what=what)
    words = tuple(asked.words[:COMMON])
    return _row(opening + asked.text(size), CWE_QUESTION, words, CWE_ANSWER, full_answer=asked.answer)


class _NumberedList:
    """A numbered list of common words and any number of others."""

    def __init__(self, often: int, seldom: int, draw: random.Random) -> None:
        self.often, self.seldom, self.seed = often, seldom, draw.getrandbits(64)
        self.words = draw.sample(all_words(), len(all_words()))
        self.answer = self._numbered(self.words[:COMMON])
        self.further = random.Random(draw.getrandbits(64))

    def text(self, others: int) -> str:
        """The list, with `others` other words."""
        known = {*self.words}
        while len(self.words) < COMMON + others:
            word = draw_word(self.further)
            if word not in known:
                known.add(word)
                self.words.append(word)
        words = self.words[:COMMON] * self.often + self.words[COMMON : COMMON + others] * self.seldom
        random.Random(self.seed).shuffle(words)
        return self._numbered(words)

    @staticmethod
    def _numbered(words: list[str]) -> str:
        return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@one_by_one
def ruler_fwe(request: Request) -> Row:
    """Write a stream of coded words, and ask for the three most frequent ones, dots apart.

    Of `n` words, the one of rank `k` stands there `floor(n / (k^2 zeta(2)))` times; the first rank is "...".
    There are `context_tokens // 50` ranks.

    Raises:
        ValueError: A context too short to tell the third word from the fourth.
    """
    draw = random.Random(f"ruler_fwe 2.0 6 {request.seed} {request.item}")
    coded = _different(string.ascii_lowercase, 6, max(5, request.context_tokens // 50) - 1, draw)
    ranked = ["...", *coded]
    order, total = draw.getrandbits(64), math.pi**2 / 6

    def counts(size: int) -> list[int]:
        return [int(size * rank**-2.0 / total) for rank in range(1, len(ranked) + 1)]

    def text(size: int) -> str:
        words = [word for word, count in zip(ranked, counts(size), strict=True) for _ in range(count)]
        random.Random(order).shuffle(words)
        return FWE_INSTRUCTION + " ".join(words)

    # With fewer words the third and the fourth can be equally frequent.
    least = next(size for size in range(1, 10**6) if counts(size)[3] > counts(size)[4])
    size = request.fit(text, least=least, what="ruler_fwe")
    if counts(size)[3] <= counts(size)[4]:
        raise ValueError(
            f"ruler_fwe: in {request.context_tokens} tokens the third and the fourth word are equally "
            "frequent: ask for a longer context."
        )
    return _row(text(size), FWE_QUESTION, tuple(ranked[1:4]), FWE_ANSWER)


def _row(context: str, question: str, answers: tuple[str, ...], answer_prefix: str, **extra: Any) -> Row:
    extra = {"full_answer": " ".join(answers), **extra}
    return Row("ruler", context, question, answers, answer_prefix=answer_prefix, extra=extra)


SOURCES: dict[str, Source] = {
    f"ruler/{name}": Source(about, write, {"max_new_tokens": most})
    for name, about, write, most in (
        ("vt", "every variable on a chain of assignments, among noise", ruler_vt, 30),
        ("cwe", "the ten words most frequent in a numbered list", ruler_cwe, 120),
        ("fwe", "the three coded words most frequent in a stream", ruler_fwe, 50),
    )
}

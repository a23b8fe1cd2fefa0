"""RULER's tracing and counting tasks: vt (variable tracking), cwe (common words), fwe (frequent coded words).

Assignments among noise, a numbered list of words, a stream of coded words. After Hsieh et al. (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/`, there `variable_tracking.py`,
`common_words_extraction.py`, `freq_words_extraction.py` and `constants.py`, whose templates are quoted
("assgined" and four dots included).

Different from the released scripts: `context_tokens` bounds the context (worked example, instruction and
text), while `max_seq_length` there counts question, answer prefix and the tokens to generate too; every row
is searched for its own size and shuffled by its own stream; the worked example of vt has at most half of the
context's tokens, which matters below 1,000; places of a chain are drawn as shares, which hold at every size;
and where cwe needs more words than wonderwords has (from about 90,000 tokens), pairs of adjective and noun
take the place of RULER's further list, whose origin is unknown.

The question is drawn before the size is searched, so the same row at another length asks for the same words.
"""

import random
import string
from itertools import pairwise

from retain.eval.tasks.made.haystacks import Haystack, different_places, insert, spans
from retain.eval.tasks.made.ruler import NOISE
from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.eval.tasks.words import all_words, draw_word
from retain.process.extras import require

VT_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
VT_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assgined the value {query}, they are: "
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
# RULER's lengths begin at 4K; below it makes lists of its own.
SHORT = 4096


@one_by_one
def ruler_vt(
    request: Request, *, max_new_tokens: int = 30, chains: int = 1, hops: int = 4, example_tokens: int = 500
) -> Row:
    """Write variables that are assigned a value, or each other, among noise; behind one worked example.

    Args:
        request: Which row.
        max_new_tokens: Most tokens of an answer.
        chains: How many; the first is asked for.
        hops: Assignments of one variable to the next; the answer names `hops + 1`.
        example_tokens: Most tokens of the worked example, which has as many hops, but no more than fit, and
            (as released) than 10.

    Raises:
        ValueError: Numbers below 1, or a context too short for a noise sentence per assignment of a chain.
    """
    if chains < 1 or hops < 1:
        raise ValueError(f"ruler_vt: chains and hops are 1 or more, got {chains} and {hops}.")
    draw = random.Random(f"ruler_vt {chains} {hops} {request.seed} {request.item}")
    limit, drawn = min(example_tokens, request.context_tokens // 2), draw.getrandbits(64)
    for fewer in range(min(10, hops), 0, -1):
        # Drawn from its own stream: the number of hops that fit must not change the question.
        example = _Chains(chains, fewer, 3, random.Random(drawn))
        if request.count(example.solved(example.least)) <= limit:
            break
    what = "the worked example of ruler_vt (half of the context)"
    size = request.fit(example.solved, least=example.least, what=what, context_tokens=limit)
    opening = f"{example.solved(size)}\n\n{VT_INSTRUCTION}"
    main = _Chains(chains, hops, 5, draw)
    what = f"ruler_vt with {chains} chains of {hops} hops"
    size = request.fit(lambda size: main.text(size, opening), least=main.least, what=what)
    context, names = main.text(size, opening), main.names[0]
    return Row(
        task="ruler",
        context=context,
        question=main.question,
        answer_prefix=main.answer_prefix,
        answers=names,
        max_new_tokens=max_new_tokens,
        extra={
            "full_answer": " ".join(names),
            "evidence": spans(context, [line.rstrip() for line in main.lines[0]]),
        },
    )


def _different(alphabet: str, letters: int, count: int, draw: random.Random) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(alphabet, k=letters))] = None
    return [*words]


class _Chains:
    """Chains of assignments among `least` noise sentences or more; their places are drawn once."""

    def __init__(self, chains: int, hops: int, letters: int, draw: random.Random) -> None:
        self.least = hops + 1
        drawn = _different(string.ascii_uppercase, letters, chains * self.least, draw)
        self.names = [tuple(drawn[start : start + self.least]) for start in range(0, len(drawn), self.least)]
        values = draw.sample(range(10000, 99999), chains)
        self.depths = [sorted(draw.random() for _ in range(hops + 1)) for _ in range(chains)]
        # The blank at the end of a line is the released code's.
        self.lines = [
            [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before} " for before, name in pairwise(names))]
            for names, value in zip(self.names, values, strict=True)
        ]
        fields = {"query": values[0], "count": hops + 1}
        self.question, self.answer_prefix = VT_QUESTION.format(**fields), VT_ANSWER.format(**fields)

    def text(self, size: int, opening: str = VT_INSTRUCTION) -> str:
        """Lines of noise with the assignments among them."""
        placed: list[tuple[int, str]] = []
        for lines, depths in zip(self.lines, self.depths, strict=True):
            placed += zip(different_places(depths, size), lines, strict=True)
        return insert(Haystack("noise", lambda number: NOISE, "\n"), size, placed, opening)

    def solved(self, size: int) -> str:
        """A task with its answer."""
        return f"{self.text(size)}{self.question}{self.answer_prefix} {' '.join(self.names[0])}"


@one_by_one
def ruler_cwe(
    request: Request,
    *,
    max_new_tokens: int = 120,
    frequency: int = 30,
    other_frequency: int = 3,
    common: int = 10,
) -> Row:
    """Write a numbered list, and ask for its most common words; behind one worked example.

    Args:
        request: Which row. Below 4,096 tokens the released code's short lists are made: 6 times and once
            instead of `frequency` and `other_frequency`, and an example of 20 words instead of 40.
        max_new_tokens: Most tokens of an answer.
        frequency: How often each common word stands there.
        other_frequency: How often each other word does; less often.
        common: How many common words there are.

    Raises:
        ValueError: Frequencies that do not tell the words apart, or a context too short for the common ones.
    """
    short = request.context_tokens < SHORT
    often, seldom = (6, 1) if short else (frequency, other_frequency)
    if not frequency > other_frequency >= 1 or not 1 <= common < 20:
        raise ValueError(
            "ruler_cwe: frequency > other_frequency >= 1 and common of 1 to 19 are wanted, got "
            f"frequency={frequency}, other_frequency={other_frequency}, common={common}."
        )
    draw = random.Random(f"ruler_cwe {request.seed} {request.item}")
    example = _Numbered(common, *((3, 1) if short else (10, 3)), draw)
    text = example.text((20 if short else 40) - common)
    opening = f"{CWE_INSTRUCTION}{text}{CWE_QUESTION}{CWE_ANSWER} {example.answer}\n{CWE_INSTRUCTION}"
    asked = _Numbered(common, often, seldom, draw)
    what = "ruler_cwe with its worked example"
    size = request.fit(lambda size: opening + asked.text(size), least=1, what=what)
    return Row(
        task="ruler",
        context=opening + asked.text(size),
        question=CWE_QUESTION,
        answer_prefix=CWE_ANSWER,
        answers=asked.answers,
        max_new_tokens=max_new_tokens,
        extra={"full_answer": asked.answer},
    )


class _Numbered:
    """A numbered list of common words and any number of others."""

    def __init__(self, common: int, often: int, seldom: int, draw: random.Random) -> None:
        self.often, self.seldom, self.seed = often, seldom, draw.getrandbits(64)
        self.words = draw.sample(all_words(), len(all_words()))
        self.answers = tuple(self.words[:common])
        self.answer = " ".join(f"{number}. {word}" for number, word in enumerate(self.answers, 1))
        self.further = random.Random(draw.getrandbits(64))

    def text(self, others: int) -> str:
        """The list, with `others` other words."""
        common, known = len(self.answers), {*self.words}
        while len(self.words) < common + others:
            word = draw_word(self.further)
            if word not in known:
                known.add(word)
                self.words.append(word)
        listed = [*self.answers] * self.often + self.words[common : common + others] * self.seldom
        random.Random(self.seed).shuffle(listed)
        return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))


@one_by_one
def ruler_fwe(request: Request, *, max_new_tokens: int = 50, alpha: float = 2.0, letters: int = 6) -> Row:
    """Write a stream of coded words, and ask for the three most frequent ones, dots apart.

    Of `n` words, the one of rank `k` stands there `floor(n k^-alpha / zeta(alpha))` times; the first rank is
    "...". There are `context_tokens // 50` ranks.

    Args:
        request: Which row.
        max_new_tokens: Most tokens of an answer.
        alpha: Of the Zeta distribution, above 1.
        letters: Of a coded word.

    Raises:
        ValueError: Alpha of 1 or less, or a context too short to tell the third word from the fourth.
    """
    require("eval", "scipy", what="ruler_fwe")
    from scipy.special import zeta

    if not alpha > 1:
        raise ValueError(f"ruler_fwe: the Zeta distribution has alpha above 1, got {alpha}.")
    draw = random.Random(f"ruler_fwe {alpha} {letters} {request.seed} {request.item}")
    coded = _different(string.ascii_lowercase, letters, max(5, request.context_tokens // 50) - 1, draw)
    ranked = ["...", *coded]
    order, total = draw.getrandbits(64), float(zeta(alpha))

    def counts(size: int) -> list[int]:
        return [int(size * rank**-alpha / total) for rank in range(1, len(ranked) + 1)]

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
    answers = tuple(ranked[1:4])
    return Row(
        task="ruler",
        context=text(size),
        question=FWE_QUESTION,
        answer_prefix=FWE_ANSWER,
        answers=answers,
        max_new_tokens=max_new_tokens,
        extra={"full_answer": " ".join(answers)},
    )


SOURCES: dict[str, Source] = {
    "ruler/vt": Source("every variable on a chain of assignments, among noise", ruler_vt),
    "ruler/cwe": Source("the ten words that stand most often in a numbered list", ruler_cwe),
    "ruler/fwe": Source("the three coded words that stand most often in a stream of them", ruler_fwe),
}

"""RULER's tracing and counting tasks: vt (variable tracking), cwe (common words), fwe (frequent coded words).

Assignments among noise, a numbered list of words, a stream of coded words. After Hsieh et al. (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/`, there `variable_tracking.py`,
`common_words_extraction.py`, `freq_words_extraction.py` and `constants.py`, whose templates are quoted
("assgined" and four dots included). Nothing has to be downloaded: all three are exact.

Different from the released scripts: `context_tokens` bounds the context (worked example, instruction and
text), while `max_seq_length` there counts question, answer prefix and the tokens to generate too; every item
is searched for its own size and shuffled by its own stream; the worked example of vt has at most half of the
context's tokens, which matters below 1,000; no two assignments of a chain share a place among the noise, as
there, but places are drawn as shares, which hold at every size; and where cwe needs more words than
wonderwords has (from about 90,000 tokens), pairs of adjective and noun take the place of RULER's further
list, whose origin is unknown.

The question is drawn before the size is searched, so the same item at another length asks for the same words.
"""

import random
import string
from itertools import pairwise

from retain.eval.tasks.haystacks import different_places, woven
from retain.eval.tasks.ruler import NOISE
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
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


def ruler_vt(asking: Asking, *, chains: int = 1, hops: int = 4, example_tokens: int = 500) -> TextItem:
    """Write variables that are assigned a value, or each other, among noise; behind one worked example.

    Args:
        asking: Which item.
        chains: How many; the first is asked for.
        hops: Assignments of one variable to the next; the answer names `hops + 1`.
        example_tokens: Most tokens of the worked example, which has as many hops, but no more than fit, and
            (as released) than 10.

    Raises:
        ValueError: numbers below 1, or a context too short for a noise sentence per assignment of a chain.
    """
    if chains < 1 or hops < 1:
        raise ValueError(f"ruler_vt: chains and hops are 1 or more, got {chains} and {hops}.")
    draw = random.Random(f"ruler_vt {chains} {hops} {asking.seed} {asking.index}")
    limit, drawn = min(example_tokens, asking.context_tokens // 2), draw.getrandbits(64)
    for fewer in range(min(10, hops), 0, -1):
        # Drawn from its own stream: the number of hops that fit must not change the question.
        example = _Chains(chains, fewer, 3, random.Random(drawn))
        if asking.measure(example.solved(example.least)) <= limit:
            break
    size = asking.fit(
        example.solved,
        least=example.least,
        what="the worked example of ruler_vt (half of the context)",
        context_tokens=limit,
    )
    opening = f"{example.solved(size)}\n\n{VT_INSTRUCTION}"
    main = _Chains(chains, hops, 5, draw)
    size = asking.fit(
        lambda count: main.text(count, opening)[0],
        least=main.least,
        what=f"ruler_vt with {chains} chains of {hops} hops",
    )
    context, needles = main.text(size, opening)
    return TextItem(
        context=context,
        questions=(
            TextQuestion(main.question, main.names[0], main.answer_prefix, answer=" ".join(main.names[0])),
        ),
        needles=needles,
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
        self.values = draw.sample(range(10000, 99999), chains)
        self.depths = [sorted(draw.random() for _ in range(hops + 1)) for _ in range(chains)]
        fields = {"query": self.values[0], "count": hops + 1}
        self.question, self.answer_prefix = VT_QUESTION.format(**fields), VT_ANSWER.format(**fields)

    def text(self, count: int, opening: str = VT_INSTRUCTION) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Lines of noise with the assignments among them, and the places of the first chain."""
        placed: list[tuple[int, str]] = []
        for own, value, depths in zip(self.names, self.values, self.depths, strict=True):
            lines = [f"VAR {own[0]} = {value}"]
            # The blank at the end is the released code's.
            lines += [f"VAR {name} = VAR {before} " for before, name in pairwise(own)]
            placed += zip(different_places(depths, count), lines, strict=True)
        text, spans = woven([NOISE] * count, placed, "\n", opening)
        return text, tuple(
            (start, start + len(text[start:stop].rstrip())) for start, stop in spans[: self.least]
        )

    def solved(self, count: int) -> str:
        """A task with its answer."""
        return f"{self.text(count)[0]}{self.question}{self.answer_prefix} {' '.join(self.names[0])}"


def ruler_cwe(asking: Asking, *, frequency: int = 30, other_frequency: int = 3, common: int = 10) -> TextItem:
    """Write a numbered list, and ask for its most common words; behind one worked example.

    Args:
        asking: Which item. Below 4,096 tokens the released code's short lists are made: 6 times and once
            instead of `frequency` and `other_frequency`, and an example of 20 words instead of 40.
        frequency: How often each common word stands there.
        other_frequency: How often each other word does; less often.
        common: How many common words there are.

    Raises:
        ValueError: frequencies that do not tell the words apart, or a context too short for the common ones.
    """
    short = asking.context_tokens < SHORT
    often, seldom = (6, 1) if short else (frequency, other_frequency)
    if not frequency > other_frequency >= 1 or not 1 <= common < 20:
        raise ValueError(
            "ruler_cwe: frequency > other_frequency >= 1 and common of 1 to 19 are wanted, got "
            f"frequency={frequency}, other_frequency={other_frequency}, common={common}."
        )
    draw = random.Random(f"ruler_cwe {asking.seed} {asking.index}")
    example = _Numbered(common, *((3, 1) if short else (10, 3)), draw)
    text = example.text((20 if short else 40) - common)
    opening = f"{CWE_INSTRUCTION}{text}{CWE_QUESTION}{CWE_ANSWER} {example.answer}\n{CWE_INSTRUCTION}"
    asked = _Numbered(common, often, seldom, draw)
    size = asking.fit(
        lambda count: opening + asked.text(count), least=1, what="ruler_cwe with its worked example"
    )
    return TextItem(
        context=opening + asked.text(size),
        questions=(TextQuestion(CWE_QUESTION, asked.answers, answer_prefix=CWE_ANSWER, answer=asked.answer),),
        about={"words": float(common + size)},
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


def ruler_fwe(asking: Asking, *, alpha: float = 2.0, letters: int = 6) -> TextItem:
    """Write a stream of coded words, and ask for the three most frequent ones, dots apart.

    Of `n` words, the one of rank `k` stands there `floor(n k^-alpha / zeta(alpha))` times; the first rank is
    "...". There are `context_tokens // 50` ranks.

    Args:
        asking: Which item.
        alpha: Of the Zeta distribution, above 1.
        letters: Of a coded word.

    Raises:
        ValueError: alpha of 1 or less, or a context too short to tell the third word from the fourth.
    """
    require("eval", "scipy", what="ruler_fwe")
    from scipy.special import zeta

    if not alpha > 1:
        raise ValueError(f"ruler_fwe: the Zeta distribution has alpha above 1, got {alpha}.")
    draw = random.Random(f"ruler_fwe {alpha} {letters} {asking.seed} {asking.index}")
    coded = _different(string.ascii_lowercase, letters, max(5, asking.context_tokens // 50) - 1, draw)
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
    size = asking.fit(text, least=least, what="ruler_fwe")
    if counts(size)[3] <= counts(size)[4]:
        raise ValueError(
            f"ruler_fwe: in {asking.context_tokens} tokens the third and the fourth word are equally "
            "frequent: ask for a longer context."
        )
    answers = tuple(ranked[1:4])
    question = TextQuestion(FWE_QUESTION, answers, FWE_ANSWER, answer=" ".join(answers))
    return TextItem(context=text(size), questions=(question,))


GENERATORS = {"ruler_vt": ruler_vt, "ruler_cwe": ruler_cwe, "ruler_fwe": ruler_fwe}

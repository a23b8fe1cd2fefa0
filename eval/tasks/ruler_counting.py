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
from collections.abc import Callable, Iterator, Mapping

from retain.eval.tasks.haystacks import different_places, most_that_fit
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
        example = _Tracked(chains, fewer, 3, random.Random(drawn))
        if asking.measure(example.solved(example.least)) <= limit:
            break
    size = most_that_fit(
        lambda count: asking.measure(example.solved(count)),
        limit,
        least=example.least,
        what="the worked example of ruler_vt (half of the context)",
    )
    opening = f"{example.solved(size)}\n\n{VT_INSTRUCTION}"
    tracked = _Tracked(chains, hops, 5, draw)
    size = most_that_fit(
        lambda count: asking.measure(opening + tracked.text(count)[0]),
        asking.context_tokens,
        least=tracked.least,
        what=f"ruler_vt with {chains} chains of {hops} hops",
    )
    text, spans = tracked.text(size)
    return TextItem(
        context=opening + text,
        questions=(
            TextQuestion(
                VT_QUESTION.format(query=tracked.value),
                tracked.names[0],
                answer_prefix=VT_ANSWER.format(query=tracked.value, count=hops + 1),
                answer=" ".join(tracked.names[0]),
            ),
        ),
        needles=tuple((start + len(opening), stop + len(opening)) for start, stop in spans),
    )


class _Tracked:
    """Chains of assignments among `least` noise sentences or more; their places are drawn once."""

    def __init__(self, chains: int, hops: int, letters: int, draw: random.Random) -> None:
        names: dict[str, None] = {}
        while len(names) < chains * (hops + 1):
            names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
        every = [*names]
        self.names = tuple(tuple(every[start : start + hops + 1]) for start in range(0, len(every), hops + 1))
        self.values = [str(value) for value in draw.sample(range(10000, 99999), chains)]
        self.value = self.values[0]
        self.least = hops + 1
        self.depths = [sorted(draw.random() for _ in range(hops + 1)) for _ in range(chains)]

    def text(self, count: int) -> tuple[str, list[tuple[int, int]]]:
        """Lines of noise with the assignments among them, and the places of the first chain."""
        lines: list[tuple[int, int, str]] = []
        for chain, (own, value, depths) in enumerate(zip(self.names, self.values, self.depths, strict=True)):
            said = [f"VAR {own[0]} = {value}"]
            # The blank at the end is the released code's.
            said += [f"VAR {name} = VAR {before} " for before, name in zip(own, own[1:], strict=False)]
            places = different_places(depths, count)
            lines += [(place, chain, line) for place, line in zip(places, said, strict=True)]
        lines.sort(key=lambda line: line[0])
        parts, spans, at = [], [], 0
        for place in range(count + 1):
            here = [line for line in lines if line[0] == place]
            noise = [(place, -1, NOISE)] if place < count else []
            for _, chain, line in (*here, *noise):
                if chain == 0:
                    spans.append((at, at + len(line.rstrip())))
                parts.append(line)
                at += len(line) + 1
        return "\n".join(parts), spans

    def solved(self, count: int) -> str:
        """A task with its answer."""
        asked = {"query": self.value, "count": len(self.names[0])}
        answer = VT_ANSWER.format(**asked)
        return (
            f"{VT_INSTRUCTION}{self.text(count)[0]}{VT_QUESTION.format(**asked)}{answer} "
            f"{' '.join(self.names[0])}"
        )


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
    size = most_that_fit(
        lambda count: asking.measure(opening + asked.text(count)),
        asking.context_tokens,
        least=1,
        what="ruler_cwe with its worked example",
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
        self.further = self._further(random.Random(draw.getrandbits(64)))

    def _further(self, draw: random.Random) -> Iterator[str]:
        known = {*self.words}
        while True:
            word = draw_word(draw)
            if word not in known:
                known.add(word)
                yield word

    def text(self, others: int) -> str:
        """The list, with `others` other words."""
        common = len(self.answers)
        while len(self.words) < common + others:
            self.words.append(next(self.further))
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
    coded: dict[str, None] = {}
    while len(coded) < max(5, asking.context_tokens // 50) - 1:
        coded["".join(draw.choices(string.ascii_lowercase, k=letters))] = None
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
    size = most_that_fit(
        lambda count: asking.measure(text(count)), asking.context_tokens, least=least, what="ruler_fwe"
    )
    if counts(size)[3] <= counts(size)[4]:
        raise ValueError(
            f"ruler_fwe: in {asking.context_tokens} tokens the third and the fourth word are equally "
            "frequent: ask for a longer context."
        )
    return TextItem(
        context=text(size),
        questions=(
            TextQuestion(
                FWE_QUESTION, tuple(ranked[1:4]), answer_prefix=FWE_ANSWER, answer=" ".join(ranked[1:4])
            ),
        ),
    )


GENERATORS: Mapping[str, Callable[..., TextItem]] = {
    "ruler_vt": ruler_vt,
    "ruler_cwe": ruler_cwe,
    "ruler_fwe": ruler_fwe,
}

"""RULER's eight needles in a haystack: niah_single_1..3, niah_multikey_1..3, niah_multivalue, _multiquery.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/niah.py`, `constants.py` and `synthetic.yaml`, whose
templates are quoted.

The same as released: templates and their singular, needles, kinds of keys and values, noise sentence, forty
depths, needles at boundaries of sentences, size by search. Different, in all eight:

- `context_tokens` bounds the *context* (instruction and haystack), which is what is evicted from. RULER's
  `max_seq_length` also counts the question, the beginning of the answer (together about 40 tokens) and 128
  tokens to generate.
- Every item is searched for its own size, in steps of one sentence, and draws from a stream of its own, the
  order of its needles included. The released code draws all items from one stream, shuffles needles by one
  permutation, finds one size and shrinks it by 500, 25 or 5 where an item is too long.
- Keys and values of one item are all different; the released code leaves that to chance.

RULER's essays are replaced, never imitated. The five tasks that need them say `ruler-like` and name their
haystack; the other three are exact.
"""

import random
from collections.abc import Callable, Mapping

from retain.eval.tasks.haystacks import different_places, identity, load_haystack, most_that_fit, woven
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.eval.tasks.words import draw_different

INSTRUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Shares of the text in per cent, as numpy rounds linspace(0, 100, 40).
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


def singular(template: str) -> str:
    """Write a template for one answer, by the released code's replacements."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(old, new)
    return template


def ruler_niah(
    asking: Asking,
    *,
    haystack: str = "noise",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key_kind: str = "words",
    value_kind: str = "numbers",
) -> TextItem:
    """Write needles in a haystack.

    Args:
        asking: Which item; `context_tokens` is the most tokens of instruction and haystack.
        haystack: "noise" (one sentence again and again), "needle" (needles that nothing asks for), or a name
            that `haystacks.load_haystack` knows.
        keys: Keys that have needles; at least `queries`.
        values: Needles of each key.
        queries: Keys that are asked for.
        key_kind: "words", "numbers" or "uuids".
        value_kind: The same.

    Raises:
        ValueError: unknown names, numbers below 1, or a context too short for the needles.
    """
    for name, count in (("keys", keys), ("values", values), ("queries", queries)):
        if count < 1:
            raise ValueError(f"ruler_niah: {name} is 1 or more, got {count}.")
    keys = max(keys, queries)
    draw = random.Random(
        f"ruler_niah {identity(haystack)} {keys} {values} {queries} {key_kind} {value_kind} "
        f"{asking.seed} {asking.index}"
    )
    taken: set[str] = set()
    hidden = {
        key: draw_different(value_kind, values, draw, taken)
        for key in draw_different(key_kind, keys, draw, taken)
    }
    needles = [
        (key, NEEDLE.format(kind=value_kind, key=key, value=value)) for key in hidden for value in hidden[key]
    ]
    draw.shuffle(needles)
    asked = draw.sample([*hidden], queries)
    answers = tuple(value for key in asked for value in hidden[key])
    one = len(answers) == 1
    kind = value_kind[:-1] if one else value_kind
    query = asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"

    def said(template: str) -> str:
        return (singular(template) if one else template).format(kind=kind, query=query)

    opening = said(INSTRUCTION)
    written = _Written(haystack, [text for _, text in needles], key_kind, value_kind, draw, taken)
    size = most_that_fit(
        lambda count: asking.measure(opening + written(count)[0]),
        asking.context_tokens,
        least=len(needles),
        what=f"ruler_niah with {len(needles)} needles",
    )
    text, spans, depths = written(size)
    shift = len(opening)
    return TextItem(
        context=opening + text,
        questions=(_asked(said(QUESTION), answers, said(ANSWER_PREFIX)),),
        needles=tuple(
            (start + shift, stop + shift)
            for (key, _), (start, stop) in zip(needles, spans, strict=True)
            if key in asked
        ),
        about={"haystack": written.name}
        | ({} if len(asked) * values > 1 else {"depth": _depth_of(asked[0], needles, depths)}),
    )


def _asked(question: str, answers: tuple[str, ...], answer_prefix: str) -> TextQuestion:
    *most, last = answers
    answer = f"{', '.join(most)}, and {last}" if most else last
    return TextQuestion(question, answers, answer_prefix, answer=f"{answer}.")


def _depth_of(key: str, needles: list[tuple[str, str]], depths: list[float]) -> float:
    return depths[[own for own, _ in needles].index(key)]


class _Written:
    """Haystack with its needles, at any size; the places of needles are drawn once."""

    def __init__(
        self,
        haystack: str,
        needles: list[str],
        key_kind: str,
        value_kind: str,
        draw: random.Random,
        taken: set[str],
    ) -> None:
        self.needles = needles
        self.scattered = haystack in ("noise", "needle")
        self.name, self.joint = haystack, "\n"
        if self.scattered:
            # Of every needle, whatever the number of sentences; needles were shuffled.
            self.depths = sorted(draw.random() for _ in needles)
            own = random.Random(draw.getrandbits(64))
            known: list[str] = []

            def distractors(count: int) -> list[str]:
                while len(known) < count:
                    (key,) = draw_different(key_kind, 1, own, taken)
                    (value,) = draw_different(value_kind, 1, own, taken)
                    known.append(NEEDLE.format(kind=value_kind, key=key, value=value))
                return known[:count]

            self.sentences = distractors if haystack == "needle" else lambda count: [NOISE] * count
        else:
            found = load_haystack(haystack, draw)
            self.name, self.joint, self.sentences = found.name, found.joint, found.sentences
            self.depths = [depth / 100 for depth in sorted(draw.sample(DEPTHS, len(needles)))]

    def __call__(self, count: int) -> tuple[str, list[tuple[int, int]], list[float]]:
        """The text, the place of each needle in it, and its depth in per cent."""
        sentences = self.sentences(count)
        if self.scattered:
            places = different_places(self.depths, count)
        else:
            places = [int(count * depth) for depth in self.depths]
        text, spans = woven(sentences, [*zip(places, self.needles, strict=True)], self.joint)
        return text, spans, [100.0 * place / count for place in places]


GENERATORS: Mapping[str, Callable[..., TextItem]] = {"ruler_niah": ruler_niah}

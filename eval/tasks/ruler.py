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

from retain.eval.tasks.haystacks import Haystack, different_places, identity, load_haystack, woven
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
        key_kind, value_kind: "words", "numbers" or "uuids".

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
    fields = {
        "kind": value_kind[:-1] if one else value_kind,
        "query": asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
    }
    opening, question, answer_prefix = (
        (singular(template) if one else template).format(**fields)
        for template in (INSTRUCTION, QUESTION, ANSWER_PREFIX)
    )
    scattered = haystack in ("noise", "needle")
    if scattered:
        # Of every needle, whatever the number of sentences; needles were shuffled.
        depths = sorted(draw.random() for _ in needles)
        distractors = random.Random(draw.getrandbits(64))

        def distractor(number: int) -> str:
            (key,) = draw_different(key_kind, 1, distractors, taken)
            (value,) = draw_different(value_kind, 1, distractors, taken)
            return NEEDLE.format(kind=value_kind, key=key, value=value)

        found = Haystack(haystack, distractor if haystack == "needle" else lambda number: NOISE, "\n")
    else:
        found = load_haystack(haystack, draw)
        depths = [depth / 100 for depth in sorted(draw.sample(DEPTHS, len(needles)))]

    def places(count: int) -> list[int]:
        return different_places(depths, count) if scattered else [int(count * depth) for depth in depths]

    def written(count: int) -> tuple[str, list[tuple[int, int]]]:
        placed = [(place, text) for place, (_, text) in zip(places(count), needles, strict=True)]
        return woven(found.sentences(count), placed, found.joint, opening)

    size = asking.fit(
        lambda count: written(count)[0], least=len(needles), what=f"ruler_niah with {len(needles)} needles"
    )
    context, spans = written(size)
    about: dict[str, str | float] = {"haystack": found.name}
    if one:
        place = places(size)[[key for key, _ in needles].index(asked[0])]
        about["depth"] = 100.0 * place / size
    *most, last = answers
    answer = f"{', '.join(most)}, and {last}." if most else f"{last}."
    return TextItem(
        context=context,
        questions=(TextQuestion(question, answers, answer_prefix, answer=answer),),
        needles=tuple(span for (key, _), span in zip(needles, spans, strict=True) if key in asked),
        about=about,
    )


GENERATORS = {"ruler_niah": ruler_niah}

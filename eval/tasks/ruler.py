"""RULER's eight needles in a haystack: niah_single_1..3, niah_multikey_1..3, niah_multivalue, _multiquery.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/niah.py`, `constants.py` and `synthetic.yaml`, whose
templates are quoted.

Different from the released code: `context_tokens` bounds the *context* (instruction and haystack), which is
what is evicted from, while `max_seq_length` there also counts the question, the beginning of the answer
(together about 40 tokens) and 128 tokens to generate; every row is searched for its own size, in steps of one
sentence, and draws from a stream of its own; keys and values of one row are all different.

RULER's essays have no licence. The five tasks that need them are `ruler_like/...`, on another haystack; RULER
as published, essays included, is on the hub: `hub:simonjegou/ruler`.
"""

import random
from typing import Any

from retain.eval.tasks.haystacks import (
    DEFAULT,
    Haystack,
    different_places,
    draw_different,
    identity,
    insert,
    load_haystack,
    spans,
)
from retain.eval.tasks.row import Request, Row, Source, one_by_one

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


@one_by_one
def ruler_niah(
    request: Request,
    *,
    haystack: str = "noise",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key_kind: str = "words",
    value_kind: str = "numbers",
) -> Row:
    """Write needles in a haystack.

    Args:
        request: Which row; `context_tokens` is the most tokens of instruction and haystack.
        haystack: "noise" (one sentence again and again), "needle" (needles that nothing asks for), or a name
            that `haystacks.load_haystack` knows.
        keys: Keys that have needles; at least `queries`.
        values: Needles of each key.
        queries: Keys that are asked for.
        key_kind, value_kind: "words", "numbers" or "uuids".

    Raises:
        ValueError: Unknown names, numbers below 1, or a context too short for the needles.
    """
    if min(keys, values, queries) < 1:
        raise ValueError(
            f"ruler_niah: keys, values and queries are 1 or more, got {keys}, {values}, {queries}."
        )
    keys = max(keys, queries)
    draw = random.Random(
        f"ruler_niah {identity(haystack)} {keys} {values} {queries} {key_kind} {value_kind} "
        f"{request.seed} {request.item}"
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
    *most, last = answers = tuple(value for key in asked for value in hidden[key])
    fields = {
        "kind": value_kind if most else value_kind[:-1],
        "query": asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
    }
    opening, question, answer_prefix = (
        (template if most else singular(template)).format(**fields)
        for template in (INSTRUCTION, QUESTION, ANSWER_PREFIX)
    )
    scattered = haystack in ("noise", "needle")
    if scattered:
        depths = sorted(draw.random() for _ in needles)
        further = random.Random(draw.getrandbits(64))

        def unasked(number: int) -> str:
            key, value = (draw_different(kind, 1, further, taken)[0] for kind in (key_kind, value_kind))
            return NEEDLE.format(kind=value_kind, key=key, value=value)

        hay = Haystack(haystack, unasked if haystack == "needle" else lambda number: NOISE, "\n")
    else:
        hay = load_haystack(haystack, draw)
        depths = [depth / 100 for depth in sorted(draw.sample(DEPTHS, len(needles)))]

    def places(size: int) -> list[int]:
        return different_places(depths, size) if scattered else [int(size * depth) for depth in depths]

    def written(size: int) -> str:
        placed = zip(places(size), (text for _, text in needles), strict=True)
        return insert(hay, size, [*placed], opening)

    size = request.fit(written, least=len(needles), what=f"ruler_niah with {len(needles)} needles")
    context = written(size)
    extra: dict[str, Any] = {"haystack": hay.name}
    if not most:
        extra["depth"] = 100.0 * places(size)[[key for key, _ in needles].index(asked[0])] / size
    extra["full_answer"] = f"{', '.join(most)}, and {last}." if most else f"{last}."
    extra["evidence"] = spans(context, [text for key, text in needles if key in asked])
    return Row("ruler", context, question, answers, answer_prefix=answer_prefix, extra=extra)


_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ruler/niah_single_1": ("the number of a key, among one sentence again and again", {}),
    "ruler/niah_multikey_2": ("the number of one key among nothing but such needles", {"haystack": "needle"}),
    "ruler/niah_multikey_3": (
        "the UUID of one UUID among nothing but such needles",
        {"haystack": "needle", "key_kind": "uuids", "value_kind": "uuids"},
    ),
    "ruler_like/niah_single_2": ("the number of a key, in prose", {"haystack": DEFAULT}),
    "ruler_like/niah_single_3": (
        "the UUID of a key, in prose",
        {"haystack": DEFAULT, "value_kind": "uuids"},
    ),
    "ruler_like/niah_multikey_1": ("one number of four, in prose", {"haystack": DEFAULT, "keys": 4}),
    "ruler_like/niah_multivalue": ("four numbers of a key, in prose", {"haystack": DEFAULT, "values": 4}),
    "ruler_like/niah_multiquery": ("the numbers of four keys, in prose", {"haystack": DEFAULT, "queries": 4}),
}
SOURCES: dict[str, Source] = {
    name: Source(about, ruler_niah, {"max_new_tokens": 128, **settings})
    for name, (about, settings) in _TASKS.items()
}

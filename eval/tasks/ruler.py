"""Needles in a haystack: RULER's eight tasks, and a grid of depths and lengths.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/niah.py`, `constants.py` and `synthetic.yaml`, whose
templates are quoted; the grid is Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack) with RULER's
needle and question, since Kamradt's needle would need a model as judge.

Different from RULER's code: `context_tokens` bounds the *context* (instruction and haystack), which is what
is evicted from, while `max_seq_length` there also counts the question, the beginning of the answer (together
about 40 tokens) and 128 tokens to generate; every row is searched for its size, in steps of one sentence,
and draws from a stream of its seed; keys and values of one row are all different.

RULER's essays have no licence. The five tasks that need them are `ruler_like/...`, on another haystack; RULER
as published, essays included, is on the hub: `hub:simonjegou/ruler`.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from retain.eval.tasks.haystacks import (
    DEFAULT,
    Haystack,
    different_places,
    draw_different,
    draw_number,
    draw_word,
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
# Of the grid: depths in per cent of the haystack's characters, lengths as shares of `context_tokens`.
GRID_DEPTHS, GRID_LENGTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100), (0.25, 0.5, 0.75, 1.0)


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
        got = f"{keys}, {values}, {queries}"
        raise ValueError(f"ruler_niah: keys, values and queries are 1 or more, got {got}.")
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
    query = asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    templates = _asked(value_kind if most else value_kind[:-1], query, several=bool(most))
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
        return insert(hay, size, [*placed], templates[0])

    size = request.fit(written, least=len(needles), what=f"ruler_niah with {len(needles)} needles")
    extra: dict[str, Any] = {"full_answer": f"{', '.join(most)}, and {last}." if most else f"{last}."}
    if not most:
        extra["depth"] = 100.0 * places(size)[[key for key, _ in needles].index(asked[0])] / size
    shown = [text for key, text in needles if key in asked]
    return _row(written(size), templates, answers, shown, haystack=hay.name, **extra)


@one_by_one
def niah_grid(
    request: Request,
    *,
    haystack: str = DEFAULT,
    depths: Sequence[float | int] = GRID_DEPTHS,
    lengths: Sequence[float | int] = GRID_LENGTHS,
) -> Row:
    """Write one needle at the depth and length of cell `item mod (depths x lengths)` of the grid, depths
    first. The needle goes to the boundary of sentences that is nearest to its depth.

    Args:
        request: Which row.
        haystack: Name that `haystacks.load_haystack` knows.
        depths: In per cent of the haystack, 0 (before it) to 100 (behind it).
        lengths: Shares of `context_tokens`, above 0 and at most 1.

    Raises:
        ValueError: Depths or lengths out of range, or a length too short for the needle.
    """
    if not depths or not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"niah_grid: depths are per cent, 0 to 100, and at least one; got {[*depths]}.")
    if not lengths or not all(0 < length <= 1 for length in lengths):
        raise ValueError(f"niah_grid: lengths are shares, above 0 and at most 1; got {[*lengths]}.")
    line, column = divmod(request.item % (len(depths) * len(lengths)), len(depths))
    depth, tokens = float(depths[column]), int(lengths[line] * request.context_tokens)
    draw = random.Random(f"niah_grid {identity(haystack)} {request.seed} {request.item}")
    key, value = draw_word(draw), draw_number(draw)
    needle = NEEDLE.format(kind="numbers", key=key, value=value)
    templates, hay = _asked("number", key), load_haystack(haystack, draw)

    def written(size: int) -> str:
        ends = [0, *accumulate(map(len, hay.sentences(size)))]
        place = min(range(size + 1), key=lambda place: abs(ends[place] - depth / 100 * ends[-1]))
        return insert(hay, size, [(place, needle)], templates[0])

    context = written(request.fit(written, least=1, what="niah_grid", most=tokens))
    labels = {"haystack": hay.name, "depth": depth}
    return _row(context, templates, (value,), [needle], length=tokens, **labels)


def _asked(kind: str, query: str, several: bool = False) -> list[str]:
    """Instruction, question and beginning of the answer."""
    templates = (INSTRUCTION, QUESTION, ANSWER_PREFIX)
    return [(one if several else singular(one)).format(kind=kind, query=query) for one in templates]


def _row(
    context: str,
    templates: Sequence[str],
    answers: tuple[str, ...],
    needles: Sequence[str],
    length: int | None = None,
    **labels: Any,
) -> Row:
    extra = {**labels, "evidence": spans(context, needles)}
    _, question, prefix = templates
    return Row("ruler", context, question, answers, answer_prefix=prefix, length=length, extra=extra)


_PROSE = {"haystack": DEFAULT}
_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ruler/niah_single_1": ("the number of a key, among one sentence again and again", {}),
    "ruler/niah_multikey_2": ("the number of one key among nothing but such needles", {"haystack": "needle"}),
    "ruler/niah_multikey_3": (
        "the UUID of one UUID among nothing but such needles",
        {"haystack": "needle", "key_kind": "uuids", "value_kind": "uuids"},
    ),
    "ruler_like/niah_single_2": ("the number of a key, in prose", _PROSE),
    "ruler_like/niah_single_3": ("the UUID of a key, in prose", {**_PROSE, "value_kind": "uuids"}),
    "ruler_like/niah_multikey_1": ("one number of four, in prose", {**_PROSE, "keys": 4}),
    "ruler_like/niah_multivalue": ("four numbers of a key, in prose", {**_PROSE, "values": 4}),
    "ruler_like/niah_multiquery": ("the numbers of four keys, in prose", {**_PROSE, "queries": 4}),
}
SOURCES: dict[str, Source] = {
    "niah/grid": Source(
        "one needle at each of 11 depths of 4 lengths in turn, in prose", niah_grid, {"max_new_tokens": 16}
    ),
    **{
        name: Source(about, ruler_niah, {"max_new_tokens": 128, **settings})
        for name, (about, settings) in _TASKS.items()
    },
}

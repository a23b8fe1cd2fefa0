"""Needles in a haystack: RULER's three tasks without essays, and a grid of depths and lengths.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654), NVIDIA/RULER `scripts/data/synthetic/niah.py`, `constants.py` and `synthetic.yaml`, whose
templates are quoted; the grid is Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack) with RULER's
needle and question, since Kamradt's needle would need a model as judge.

Different from RULER's code: `context_tokens` bounds the *context* (instruction and haystack), which is what
is evicted from, while `max_seq_length` there also counts the question, the beginning of the answer (together
about 40 tokens) and 128 tokens to generate; every row is searched for its size, in steps of one sentence,
and draws from a stream of its seed; keys and values of one row are all different.

RULER's essays have no licence. Its five tasks on them are on the hub, as published: `hub:simonjegou/ruler`;
`facts` asks the same of other prose.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from retain.eval.tasks.haystacks import (
    DEFAULT,
    Haystack,
    draw_new,
    draw_number,
    draw_word,
    identity,
    insert,
    load_haystack,
    spans,
)
from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.process.registry import lookup

INSTRUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Of the grid: depths in per cent of the haystack's characters, lengths as shares of `context_tokens`.
GRID_DEPTHS, GRID_LENGTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100), (0.25, 0.5, 0.75, 1.0)


def singular(template: str) -> str:
    """Write a template for one answer, by the released code's replacements."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(old, new)
    return template


@one_by_one
def ruler_niah(
    request: Request, *, haystack: str = "noise", key_kind: str = "words", value_kind: str = "numbers"
) -> Row:
    """Write a needle in a haystack.

    Args:
        request: Which row; `context_tokens` is the most tokens of instruction and haystack.
        haystack: "noise" (one sentence again and again) or "needle" (needles that nothing asks for).
        key_kind, value_kind: "words", "numbers" or "uuids".

    Raises:
        ValueError: Unknown names, or a context too short for the needle.
    """
    lookup(haystack, {"noise": None, "needle": None}, what="haystack")
    # The numbers 1 once counted keys, values and keys asked for, as did the choice: rows stay what they were.
    where = f"{request.seed} {request.item}"
    draw = random.Random(f"ruler_niah {haystack} 1 1 1 {key_kind} {value_kind} {where}")
    taken: set[str] = set()
    key, value = draw_new(key_kind, draw, taken), draw_new(value_kind, draw, taken)
    draw.choice([key])
    depth, further = draw.random(), random.Random(draw.getrandbits(64))

    def unasked(number: int) -> str:
        names = {"key": draw_new(key_kind, further, taken), "value": draw_new(value_kind, further, taken)}
        return NEEDLE.format(kind=value_kind, **names)

    hay = Haystack(haystack, unasked if haystack == "needle" else lambda number: NOISE, "\n")
    needle = NEEDLE.format(kind=value_kind, key=key, value=value)
    templates = _asked(value_kind[:-1], key)

    def written(size: int) -> str:
        return insert(hay, size, [(int(depth * size), needle)], templates[0])

    size = request.fit(written, least=1, what="ruler_niah")
    labels: dict[str, Any] = {
        "haystack": haystack,
        "full_answer": f"{value}.",
        "depth": 100.0 * int(depth * size) / size,
    }
    return _row(written(size), templates, value, needle, **labels)


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
    return _row(context, templates, value, needle, length=tokens, **labels)


def _asked(kind: str, query: str) -> list[str]:
    """Instruction, question and beginning of the answer."""
    templates = (INSTRUCTION, QUESTION, ANSWER_PREFIX)
    return [singular(one).format(kind=kind, query=query) for one in templates]


def _row(
    context: str, templates: Sequence[str], value: str, needle: str, length: int | None = None, **labels: Any
) -> Row:
    extra = {**labels, "evidence": spans(context, [needle])}
    _, question, prefix = templates
    return Row("ruler", context, question, (value,), answer_prefix=prefix, length=length, extra=extra)


_UUIDS = {"haystack": "needle", "key_kind": "uuids", "value_kind": "uuids"}
_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "niah_single_1": ("the number of a key, among one sentence again and again", {}),
    "niah_multikey_2": ("the number of one key among nothing but such needles", {"haystack": "needle"}),
    "niah_multikey_3": ("the UUID of one UUID among nothing but such needles", _UUIDS),
}
SOURCES: dict[str, Source] = {
    "niah/grid": Source(
        "one needle at each of 11 depths of 4 lengths in turn, in prose", niah_grid, {"max_new_tokens": 16}
    ),
    **{
        f"ruler/{name}": Source(about, ruler_niah, {"max_new_tokens": 128, **settings})
        for name, (about, settings) in _TASKS.items()
    },
}

"""Writes a grid of depths and lengths: one needle, at each depth of each length in turn.

Row `i` is cell `i mod (depths x lengths)` of the grid, depths first. Needle and question are RULER's (arXiv
2404.06654), the grid is Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack), whose needle (a
sandwich in San Francisco) would need a model as judge.

A depth is a share of the haystack's characters, and the needle goes to the nearest boundary of sentences, so
that it never cuts one.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from retain.eval.tasks.haystacks import (
    DEFAULT,
    draw_number,
    draw_word,
    identity,
    insert,
    load_haystack,
    spans,
)
from retain.eval.tasks.row import Request, Row, Source, one_by_one
from retain.eval.tasks.ruler import ANSWER_PREFIX, INSTRUCTION, NEEDLE, QUESTION, singular

DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
LENGTHS = (0.25, 0.5, 0.75, 1.0)


@one_by_one
def niah_grid(
    request: Request,
    *,
    haystack: str = DEFAULT,
    depths: Sequence[float | int] = DEPTHS,
    lengths: Sequence[float | int] = LENGTHS,
) -> Row:
    """Write one needle at the depth and length of one cell of the grid.

    Args:
        request: Which row.
        haystack: Name that `load_haystack` knows.
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
    opening, question, prefix = (
        singular(template).format(kind="number", query=key)
        for template in (INSTRUCTION, QUESTION, ANSWER_PREFIX)
    )
    hay = load_haystack(haystack, draw)

    def written(size: int) -> str:
        ends = [0, *accumulate(map(len, hay.sentences(size)))]
        place = min(range(size + 1), key=lambda place: abs(ends[place] - depth / 100 * ends[-1]))
        return insert(hay, size, [(place, needle)], opening)

    context = written(request.fit(written, least=1, what="niah_grid", most=tokens))
    extra = {"haystack": hay.name, "depth": depth, "evidence": spans(context, [needle])}
    return Row("niah", context, question, (value,), answer_prefix=prefix, length=tokens, extra=extra)


_ABOUT = f"one needle at each of {len(DEPTHS)} depths of {len(LENGTHS)} lengths in turn"
SOURCES: dict[str, Source] = {
    "niah/grid": Source(f"{_ABOUT}, in prose", niah_grid, {"max_new_tokens": 16}),
    "niah/grid_python": Source(
        f"{_ABOUT}, in source code", niah_grid, {"max_new_tokens": 16, "haystack": "python"}
    ),
}

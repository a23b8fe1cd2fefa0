"""Writes a grid of depths and lengths: one needle, at each depth of each length in turn.

Item `i` is cell `i mod (depths x lengths)` of the grid, depths first, so a number of items that is a multiple
of the cells fills it evenly; `about` has depth and length, for the heat map. Needle and question are RULER's
(arXiv 2404.06654), the grid is Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack), whose needle
(a sandwich in San Francisco) would need a model as judge.

A depth is a share of the haystack's characters, and the needle goes to the nearest boundary of sentences, so
that it never cuts one.
"""

import random
from collections.abc import Sequence

from retain.eval.tasks.haystacks import DEFAULT, identity, load_haystack, place_at, woven
from retain.eval.tasks.ruler import ANSWER_PREFIX, INSTRUCTION, NEEDLE, QUESTION, singular
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.eval.tasks.words import draw_number, draw_word

DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
LENGTHS = (0.25, 0.5, 0.75, 1.0)


def niah_grid(
    asking: Asking,
    *,
    haystack: str = DEFAULT,
    depths: Sequence[float | int] = DEPTHS,
    lengths: Sequence[float | int] = LENGTHS,
) -> TextItem:
    """Write one needle at the depth and length of one cell of the grid.

    Args:
        asking: Which item.
        haystack: Name that `haystacks.load_haystack` knows.
        depths: In per cent of the haystack, 0 (before it) to 100 (behind it).
        lengths: Shares of `context_tokens`, above 0 and at most 1.

    Raises:
        ValueError: depths or lengths out of range, or a length too short for the needle.
    """
    if not depths or not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"niah_grid: depths are per cent, 0 to 100, and at least one; got {[*depths]}.")
    if not lengths or not all(0 < length <= 1 for length in lengths):
        raise ValueError(
            f"niah_grid: lengths are shares of context_tokens, above 0 and at most 1; got {[*lengths]}."
        )
    row, column = divmod(asking.index % (len(depths) * len(lengths)), len(depths))
    depth, tokens = float(depths[column]), int(lengths[row] * asking.context_tokens)
    draw = random.Random(f"niah_grid {identity(haystack)} {asking.seed} {asking.index}")
    key, value = draw_word(draw), draw_number(draw)
    needle = NEEDLE.format(kind="numbers", key=key, value=value)
    opening = singular(INSTRUCTION).format(kind="number")
    found = load_haystack(haystack, draw)

    def written(count: int) -> tuple[str, list[tuple[int, int]]]:
        sentences = found.sentences(count)
        return woven(sentences, [(place_at(sentences, depth / 100), needle)], found.joint, opening)

    size = asking.fit(lambda count: written(count)[0], least=1, what="niah_grid", context_tokens=tokens)
    context, needles = written(size)
    question, answer_prefix = (
        singular(template).format(kind="number", query=key) for template in (QUESTION, ANSWER_PREFIX)
    )
    return TextItem(
        context=context,
        questions=(TextQuestion(question, (value,), answer_prefix),),
        needles=tuple(needles),
        about={"haystack": found.name, "depth": depth, "length": float(tokens)},
    )


GENERATORS = {"niah_grid": niah_grid}

"""Scores what a written procedure ends in: a route, the solution of a countdown.

Ye et al., "LongProc: Benchmarking Long-Context Language Models on Long Procedural Generation" (arXiv
2501.05414) and princeton-pli/LongProc `longproc/longproc_data.py`, `longproc/countdown_evaluator.py`: its
accuracy. Its partial accuracy, which compares a search line by line with the one its own code writes, is left
out.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from retain.eval.metrics.overlap import best, checked

_EQUATION = re.compile(r"\s*(\d{1,9})\s*([-+*/])\s*(\d{1,9})\s*=\s*(-?\d{1,18})\s*")


def _tagged(prediction: str, tag: str) -> str | None:
    """Text between the first `<tag>` and the first `</tag>`."""
    start, stop = prediction.find(f"<{tag}>"), prediction.find(f"</{tag}>")
    return None if -1 in (start, stop) else prediction[start + len(tag) + 2 : stop].strip()


@best
def route(prediction: str, reference: str) -> float:
    """Whether the lines between `<Route>` and `</Route>` are the right ones."""
    return float(_tagged(prediction, "Route") == reference.strip())


def countdown(prediction: str, references: Sequence[str], *, numbers: Sequence[int], **about: Any) -> float:
    """Whether three equations between `<Solution>` and `</Solution>` lead from four numbers to the target.

    Each takes two numbers of those that are left, puts their result with the rest, and holds. A division
    leaves no remainder (in the released code the result must equal the quotient, which is the same). The
    released code evaluates what stands before "=", and takes signs and other expressions there too.

    Args:
        prediction: The answer.
        references: The target alone.
        numbers: The four.
    """
    (target,) = checked(references)
    solution = _tagged(prediction, "Solution")
    lines = [] if solution is None else solution.split("\n")
    if len(lines) != len(numbers) - 1:
        return 0.0
    left = Counter(numbers)
    for line in lines:
        found = _EQUATION.fullmatch(line)
        if found is None:
            return 0.0
        one, sign, other, result = int(found[1]), found[2], int(found[3]), int(found[4])
        taken = Counter((one, other))
        if taken - left or not _holds(one, sign, other, result):
            return 0.0
        left = left - taken + Counter((result,))
    return float(left == Counter((int(target),)))


def _holds(one: int, sign: str, other: int, result: int) -> bool:
    if sign == "/":
        return other != 0 and one == result * other
    return result == {"+": one + other, "-": one - other, "*": one * other}[sign]


METRICS = (countdown, route)

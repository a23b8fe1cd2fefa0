"""Chooses the tests of the default tier: none marked `slow`, at most a dozen cases of a function.

Cases are chosen pairwise: as many pairs of values of two parameters as possible occur in the chosen cases
(with one parameter, as many of its values as possible). The choice depends on a function's own cases only:
it is the same in every selection of files and on every worker. `--all` runs every case. A function marked
`every_case` is never sampled: its cases are quick and each holds something of its own.
"""

import itertools
import zlib
from collections.abc import Hashable, Sequence

import pytest

MAX_CASES = 12


def pairwise(cases: Sequence[tuple[Hashable, ...]], limit: int = MAX_CASES, salt: str = "") -> list[int]:
    """Chooses at most `limit` cases that together hold many pairs of parameter values, greedily.

    Args:
        cases: one tuple a case, with the value of each parameter.
        limit: how many cases to choose at most.
        salt: orders cases that add equally many pairs, so that functions over the same list choose others.

    Returns:
        The indices of the chosen cases, in order.
    """
    if len(cases) <= limit:
        return list(range(len(cases)))
    held = [set(_pairs(case)) for case in cases]
    order = sorted(range(len(cases)), key=lambda index: zlib.crc32(f"{salt}:{index}".encode()))
    missing = set().union(*held)
    chosen: list[int] = []
    while len(chosen) < limit:
        if not missing:
            missing = set().union(*(held[index] for index in order if index not in chosen))
        best = max(
            (index for index in order if index not in chosen), key=lambda index: len(held[index] & missing)
        )
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _pairs(case: tuple[Hashable, ...]) -> list[tuple[Hashable, ...]]:
    valued = list(enumerate(case))
    return list(itertools.combinations(valued, 2)) if len(valued) > 1 else [tuple(valued)]


def _values(item: pytest.Function) -> tuple[Hashable, ...]:
    """The value of each parameter of a case, or its index in the parameter's list if it cannot be hashed."""
    values: list[Hashable] = []
    for name, value in sorted(item.callspec.params.items()):
        try:
            hash(value)
            values.append(value)
        except TypeError:
            values.append(item.callspec.indices[name])
    return tuple(values)


def choose(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Splits collected tests into those of the default tier and the others, in their order."""
    functions: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and not item.get_closest_marker("every_case")
        ):
            functions.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for (_, name), cases in functions.items():
        quick = [case for case in cases if case not in left_out]
        chosen = set(pairwise([_values(case) for case in quick], salt=name))
        left_out.update(case for index, case in enumerate(quick) if index not in chosen)
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]

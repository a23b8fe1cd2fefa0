"""Chooses the tests of the default tier by how long they took; `--all` runs the others too.

Left out are tests marked `slow`, and tests of which a case took longer than `SECONDS_A_CASE` (but for those
marked `always`). Of a grid at most a dozen cases are run, fewer where they took longer than `SECONDS_A_GRID`
together. They are chosen pairwise: as many pairs of values of two parameters as possible occur in them (with
one parameter, as many of its values as possible). The choice depends on a function's own cases only: it is
the same in every selection of files and on every worker.

Seconds are measured: `make test-all` writes them into `seconds.json`, to be committed. A test that is not in
there counts as quick.
"""

import functools
import itertools
import json
import statistics
import sys
import zlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

MAX_CASES = 12
SECONDS_A_CASE = 2.0
SECONDS_A_GRID = 0.6
SECONDS = Path(__file__).with_name("seconds.json")


def choose(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Splits collected tests into those of the default tier and the others, in their order."""
    functions: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        assert item.parent is not None
        functions.setdefault((item.parent.nodeid, _name_of(item)), []).append(item)
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for (parent, name), every in functions.items():
        cases = [case for case in every if case not in left_out]
        took = seconds().get(f"{Path(parent).stem}::{name}", 0.0)
        limit = MAX_CASES if took == 0 else max(1, min(MAX_CASES, int(SECONDS_A_GRID / took)))
        if took > SECONDS_A_CASE and not any(case.get_closest_marker("always") for case in cases):
            limit = 0
        chosen = set(pairwise([_values(case) for case in cases], limit, salt=name))
        left_out.update(case for index, case in enumerate(cases) if index not in chosen)
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


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
        left = [index for index in order if index not in chosen]
        if not missing:
            missing = set().union(*(held[index] for index in left))
        best = max(left, key=lambda index: len(held[index] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _pairs(case: tuple[Hashable, ...]) -> list[tuple[Hashable, ...]]:
    valued = list(enumerate(case))
    return list(itertools.combinations(valued, 2)) if len(valued) > 1 else [tuple(valued)]


def _name_of(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """The value of each parameter of a case, or its index in the parameter's list if it cannot be hashed."""
    callspec = getattr(item, "callspec", None)
    values: list[Hashable] = []
    for name, value in sorted(callspec.params.items()) if callspec else ():
        try:
            hash(value)
            values.append(value)
        except TypeError:
            values.append(callspec.indices[name])
    return tuple(values)


@functools.cache
def seconds() -> Mapping[str, float]:
    """Test function (`module::name`) -> mean seconds of a case; quick functions are left out."""
    found: Mapping[str, float] = json.loads(SECONDS.read_text())
    return found


def measured(report: Path) -> dict[str, float]:
    """Seconds as `seconds` reads them, from the JUnit file of a whole run: those that change the choice."""
    took: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name'].partition('[')[0]}"
            took.setdefault(name, []).append(float(case.attrib["time"]))
    return {
        name: round(statistics.fmean(every), 2)
        for name, every in sorted(took.items())
        if sum(sorted(every)[-MAX_CASES:]) > (SECONDS_A_GRID if len(every) > 1 else SECONDS_A_CASE)
    }


if __name__ == "__main__":
    SECONDS.write_text(json.dumps(measured(Path(sys.argv[1])), indent=0) + "\n")

"""The environments of `make matrix`: their constraints, and the table that the ranges must follow."""

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import matrix

RECORDS = matrix.read_records()


def pins(name: str) -> dict[str, str]:
    lines = matrix.constraints(matrix.MATRIX[name]).splitlines()
    return dict(line.split("==") for line in lines)


def test_constraints_replace_what_an_environment_pins():
    assert pins("pinned")["transformers"] == "5.17.0"
    assert pins("transformers-lowest")["transformers"] == matrix.lower_ends()["transformers"]
    assert pins("transformers-lowest")["numpy"] == pins("pinned")["numpy"]
    assert set(pins("newest")) == {"torch"}
    for name in matrix.MATRIX:
        lines = matrix.constraints(matrix.MATRIX[name]).splitlines()
        assert len(lines) == len({line.partition("==")[0] for line in lines})


def test_lower_ends_are_those_of_the_ranges():
    stated = {Requirement(text).name for text in matrix.PROJECT["dependencies"]}
    assert stated - {"torch"} <= set(matrix.lower_ends())


def test_the_page_shows_the_records():
    assert matrix.table(RECORDS) in matrix.PAGE.read_text(encoding="utf-8")


def test_every_environment_was_run_and_nothing_failed():
    assert set(RECORDS) == set(matrix.MATRIX)
    assert {name: record["failed"] for name, record in RECORDS.items() if record["failed"]} == {}
    assert min(record["passed"] for record in RECORDS.values()) > 3000


@pytest.mark.parametrize("package", ["transformers", "huggingface_hub", "numpy"])
def test_ranges_end_where_the_table_ends(package):
    """The lowest version that was run is the lowest that pyproject.toml allows; so is that of torch."""
    run = [Version(record["versions"][package]) for record in RECORDS.values()]
    assert min(run) == Version(matrix.lower_ends()[package])
    ranges = {one.name: one.specifier for one in map(Requirement, matrix.PROJECT["dependencies"])}
    assert all(version in ranges[package] for version in run)
    torch = [Version(record["versions"]["torch"].partition("+")[0]) for record in RECORDS.values()]
    assert f">={min(torch).major}.{min(torch).minor}" in str(ranges["torch"])


def test_an_absent_interpreter_is_none():
    assert matrix.interpreter("2.99") is None

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
    assert Version(pins("pinned")["transformers"]) == Version(matrix.lower_ends()["transformers"])
    assert pins("numpy-lowest")["numpy"] == matrix.lower_ends()["numpy"]
    assert pins("numpy-lowest")["transformers"] == pins("pinned")["transformers"]
    assert set(pins("newest")) == {"torch"}
    for name in matrix.MATRIX:
        lines = matrix.constraints(matrix.MATRIX[name]).splitlines()
        assert len(lines) == len({line.partition("==")[0] for line in lines})


def test_lower_ends_are_those_of_the_ranges():
    stated = {Requirement(text).name for text in matrix.PROJECT["dependencies"]}
    assert stated - {"torch"} <= set(matrix.lower_ends())


def test_the_page_shows_the_records():
    assert matrix.table(RECORDS) in matrix.PAGE.read_text(encoding="utf-8")


def test_nothing_failed_in_what_was_run():
    assert set(RECORDS) <= set(matrix.MATRIX)
    assert {name: record["failed"] for name, record in RECORDS.items() if record["failed"]} == {}
    assert all(record["passed"] > 3000 for record in RECORDS.values())


@pytest.mark.parametrize("package", ["transformers", "huggingface_hub", "numpy", "torch"])
def test_what_was_run_lies_in_the_ranges(package):
    ranges = {one.name: one.specifier for one in map(Requirement, matrix.PROJECT["dependencies"])}
    run = {name: record["versions"][package].partition("+")[0] for name, record in RECORDS.items()}
    assert {name: version for name, version in run.items() if version not in ranges[package]} == {}
    if "lowest" in run and package != "torch":
        assert Version(run["lowest"]) == Version(matrix.lower_ends()[package])


def test_an_absent_interpreter_is_none():
    assert matrix.interpreter("2.99") is None

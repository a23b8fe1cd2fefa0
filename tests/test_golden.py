"""Golden data: what a rebuilding of the tree must not change (`make golden` checks all of it, and beside it
the gates of `make gates-seed0`)."""

import pytest

import retain
from retain.gates import GATES
from tests.golden import kept, make

SEEN = "make it again with `python -m tests.golden.make {}` in a commit of its own if CHANGELOG.md says why"


def told(part: str, wrong: list[str]) -> str:
    return "\n".join([*wrong[:20], f"{len(wrong)} differences: {SEEN.format(part)}"])


@pytest.mark.always
def test_policies_keep_the_golden_entries() -> None:
    cells = [cell.split("/") for cell in kept.cells()]
    policies = [each for each in retain.policies() if each.name != "kivi"]  # which evicts nothing
    names = {
        f"{each.name}{variant}" for each in policies for variant in ("", *(f":{v}" for v in each.variants))
    }
    families = {f"gate@{family}" for family in GATES if family != "mlp"}
    assert {policy for _, policy, _ in cells} == names | families
    for when in kept.WHEN:
        assert {model for model, _, each in cells if each == when} == {*kept.MODELS}
    assert not (wrong := kept.check([*kept.cells()])), told("kept", wrong)


def test_the_report_has_the_golden_numbers_and_words() -> None:
    assert not (wrong := make.check_report()), told("report", wrong)


def test_commands_keys_and_names_are_the_golden_ones() -> None:
    assert not (wrong := make.check_manifest()), told("manifest", wrong)

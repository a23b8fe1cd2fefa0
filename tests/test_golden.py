"""Golden data: what a rebuilding of the tree must not change (`make golden` checks all of it, and beside it
the gates of `make gates-seed0`)."""

import numpy as np
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
    policies = [own for own in retain.policies() if own.name != "kivi"]  # which evicts nothing
    names = {f"{own.name}{variant}" for own in policies for variant in ("", *(f":{v}" for v in own.variants))}
    families = {f"gate@{family}" for family in GATES if family != "mlp"}
    assert {policy for _, policy, _ in cells} == names | families
    for regime in kept.REGIMES:
        assert {model for model, _, own in cells if own == regime} == {*kept.MODELS}
    assert not (wrong := kept.check([*kept.cells()])), told("kept", wrong)


@pytest.mark.parametrize("rounding", [False, True])
def test_an_entry_that_is_kept_elsewhere_is_a_difference_or_a_tie(
    monkeypatch: pytest.MonkeyPatch, rounding: bool
) -> None:
    cell, run, said = next(own for own in kept.cells() if "/snapkv/" in own), kept.run, list[str]()

    def moved(cell: str, jitter: int = 0) -> np.ndarray:
        bits = run(cell, jitter)
        if not rounding or jitter in (0, 2):
            bits[1, 1, 0, [0, 50]] ^= True
        return bits

    monkeypatch.setattr(kept, "run", moved)
    wrong = kept.check([cell], say=said.append)
    if rounding:
        assert wrong == [] and len(said) == 1 and "ties within rounding" in said[0]
    else:
        assert wrong[0].startswith(f"{cell}: 2 entries differ") and "(1, 1, 0, 0)" in wrong[0] and not said


def test_the_report_has_the_golden_numbers_and_words() -> None:
    assert not (wrong := make.check_report()), told("report", wrong)


def test_commands_keys_and_names_are_the_golden_ones() -> None:
    assert not (wrong := make.check_manifest()), told("manifest", wrong)

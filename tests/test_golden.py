"""Golden data: what a rebuilding of the tree must not change (`make golden` checks all of it).

The default part samples the kept entries by a fixed rule; the whole grid is marked slow, and the gates of
`make gates-seed0` are checked by the command alone.
"""

import pytest

from tests.golden import kept, make, manifest

SEEN = "make it again with `python -m tests.golden.make {}` in a commit of its own if CHANGELOG.md says why"


def told(part: str, wrong: list[str]) -> str:
    return "\n".join([*wrong[:20], f"{len(wrong)} differences: {SEEN.format(part)}"])


def test_the_sample_has_every_policy_and_each_regime_with_many() -> None:
    cells = kept.sample()
    assert {cell.policy for cell in cells} == {*kept.policy_names()}
    assert {cell.model for cell in cells} == {*kept.MODELS}
    for regime in kept.REGIMES:
        assert len([cell for cell in cells if cell.regime == regime]) >= 10
        assert any(cell.regime == regime and cell.model == "reference" for cell in cells)


def test_the_grid_has_the_golden_cells() -> None:
    assert not (wrong := kept.unmatched()), told("kept", wrong)


@pytest.mark.parametrize("regime", kept.REGIMES)
def test_sampled_policies_keep_the_golden_entries(regime: str) -> None:
    cells = [cell for cell in kept.sample() if cell.regime == regime]
    assert not (wrong := kept.check(cells)), told("kept", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("regime", kept.REGIMES)
@pytest.mark.parametrize("model", kept.MODELS)
def test_every_policy_keeps_the_golden_entries(model: str, regime: str) -> None:
    cells = [cell for cell in kept.grid() if (cell.model, cell.regime) == (model, regime)]
    assert not (wrong := kept.check(cells)), told("kept", wrong)


def test_a_cell_reads_back_what_was_written() -> None:
    cell = kept.Cell("llama", "recency", "context_only")
    bits = kept.decode(line := kept.encode(cell, [[[0, 5], [1]], [[2, 9], [3, 4, 8]]]))
    assert bits.shape == (2, 2, 1, 10) and line["counts"] == [[[2], [2]], [[1], [3]]]
    assert bits[1, 1, 0].nonzero()[0].tolist() == [3, 4, 8]


@pytest.mark.parametrize("rounding", [False, True])
def test_an_entry_that_is_kept_elsewhere_is_a_difference_or_a_tie(
    monkeypatch: pytest.MonkeyPatch, rounding: bool
) -> None:
    cell, run, said = kept.Cell("llama", "snapkv", "context_only"), kept.run, list[str]()

    def moved(cell: kept.Cell, jitter: int = 0) -> kept.Positions:
        positions = run(cell, jitter)
        if not rounding or jitter in (0, 2):
            positions[1][2].append(positions[1][2].pop() + 1)
        return positions

    monkeypatch.setattr(kept, "run", moved)
    wrong = kept.check([cell], say=said.append)
    if rounding:
        assert wrong == [] and len(said) == 1 and "ties within rounding" in said[0]
    else:
        assert wrong[0].startswith(f"{cell}: 2 entries differ") and "(1, 1, 0, " in wrong[0] and not said


def test_the_report_has_the_golden_numbers_and_words() -> None:
    assert not (wrong := make.check_report()), told("report", wrong)


def test_a_line_that_differs_says_whether_its_numbers_do() -> None:
    (numbers,) = make.differing_lines("a\nb 1.25 c", "a\nb 1.26 c")
    (words,) = make.differing_lines("b 1.25 d", "b 1.25 c")
    assert "NUMBERS" in numbers and "words" in words
    assert [*make.unlike({"a": [1.0, 2]}, {"a": [1.0 + 1e-12, 2]})] == []
    assert [*make.unlike({"a": [1.0, 2]}, {"a": [1.001, 2]})] == ["/a/0: 1.0, golden: 1.001"]


def test_commands_keys_and_names_are_the_golden_ones() -> None:
    assert not (wrong := make.check_manifest()), told("manifest", wrong)


def test_what_is_gone_new_or_another_is_named() -> None:
    golden = {"names": {"Cache": "(model)", "attach": "(model)"}}
    found = {"names": {"Cache": "(model, *, every=32)", "evict": "()"}}
    assert [*manifest.differences(found, golden)] == [
        "names / Cache: '(model, *, every=32)', golden: '(model)'",
        "names / attach: gone",
        "names / evict: new",
    ]

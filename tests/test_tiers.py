import itertools
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import MAX_CASES, pairwise

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parent


def pairs_of(cases: list[tuple[object, ...]]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_a_grid_is_covered_in_pairs() -> None:
    grid = list(itertools.product("abc", range(4), (False, True)))
    chosen = [grid[index] for index in pairwise(grid)]
    assert len(chosen) == MAX_CASES
    # Twelve is the least that holds all pairs of three and of four values.
    assert pairs_of(chosen) == pairs_of(grid)


def test_the_default_tier_leaves_out_slow_tests_and_most_of_a_grid(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(
        "from tests import tiers\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    items[:], left_out = tiers.choose(items)\n"
        "    config.hook.pytest_deselected(items=left_out)\n"
    )
    pytester.makepyfile(
        test_made="""
        import pytest

        def test_single(): pass

        @pytest.mark.slow
        def test_slow(): pass

        @pytest.mark.parametrize("a", range(5))
        @pytest.mark.parametrize("b", [[1], [2], [3], [4]])
        def test_grid(a, b): pass

        def test_long(): pass

        @pytest.mark.always
        def test_launch(): pass

        @pytest.mark.parametrize("a", range(20))
        def test_costly_grid(a): pass

        @pytest.mark.parametrize("a", [*range(12), pytest.param(99, marks=pytest.mark.slow)])
        def test_one_slow_case(a): pass
        """,
    )
    took = {"test_long": 3.0, "test_launch": 3.0, "test_costly_grid": 0.18}
    monkeypatch.setattr(tiers, "seconds", lambda: {f"test_made::{name}": one for name, one in took.items()})
    settings = (f"pythonpath={TESTS.parent}", "markers=slow\nalways")
    outcome = pytester.runpytest("-p", "no:cacheprovider", *(f"-o{setting}" for setting in settings))
    outcome.assert_outcomes(passed=1 + 12 + 1 + 3 + 12, deselected=1 + 8 + 1 + 17 + 1)


def test_seconds_are_those_of_a_report_that_change_the_choice(tmp_path: Path) -> None:
    took = {"test_a": [2.5], "test_b": [1.1], "test_c[x]": [0.2], "test_c[y]": [0.4], "test_d[x]": [0.1]}
    cases = "".join(
        f'<testcase classname="tests.eval.test_x" name="{name}" time="{one}"/>'
        for name, (one,) in took.items()
    )
    skipped = '<testcase classname="tests.test_y" name="test_gpu" time="9"><skipped/></testcase>'
    (tmp_path / "r.xml").write_text(f"<testsuites><testsuite>{cases}{skipped}</testsuite></testsuites>")
    assert tiers.measured(tmp_path / "r.xml") == {"test_x::test_a": 2.5, "test_x::test_c": 0.3}

import itertools
from pathlib import Path

import pytest

from tests.tiers import MAX_CASES, pairwise

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parent


def pairs_of(cases: list[tuple[object, ...]]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_few_cases_are_all_chosen() -> None:
    assert pairwise([(number,) for number in range(MAX_CASES)]) == list(range(MAX_CASES))


def test_of_one_parameter_a_dozen_values_are_chosen_and_other_functions_choose_others() -> None:
    values = [(number,) for number in range(100)]
    one, two = pairwise(values, salt="test_one"), pairwise(values, salt="test_two")
    assert len(set(one)) == len(set(two)) == MAX_CASES
    assert one == pairwise(values, salt="test_one") and set(one) != set(two)


def test_a_grid_is_covered_in_pairs() -> None:
    grid = list(itertools.product("abc", range(4), (False, True)))
    chosen = [grid[index] for index in pairwise(grid)]
    assert len(chosen) == MAX_CASES
    # Twelve is the least that holds all pairs of three and of four values.
    assert pairs_of(chosen) == pairs_of(grid)


def test_the_default_tier_leaves_out_slow_tests_and_most_of_a_grid(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from tests import tiers\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    items[:], left_out = tiers.choose(items)\n"
        "    config.hook.pytest_deselected(items=left_out)\n"
    )
    pytester.makepyfile(
        """
        import pytest

        def test_single(): pass

        @pytest.mark.slow
        def test_slow(): pass

        @pytest.mark.parametrize("a", range(5))
        @pytest.mark.parametrize("b", [[1], [2], [3], [4]])
        def test_grid(a, b): pass

        @pytest.mark.every_case
        @pytest.mark.parametrize("a", range(20))
        def test_texts(a): pass

        @pytest.mark.parametrize("a", [*range(12), pytest.param(99, marks=pytest.mark.slow)])
        def test_one_slow_case(a): pass
        """
    )
    settings = (f"pythonpath={TESTS.parent}", "markers=slow\nevery_case")
    outcome = pytester.runpytest("-p", "no:cacheprovider", *(f"-o{setting}" for setting in settings))
    outcome.assert_outcomes(passed=1 + 12 + 20 + 12, deselected=1 + 8 + 1)

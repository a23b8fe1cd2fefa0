"""Coverage of intervals, and of "equivalent" where it is wrong: the command's own runs, fewer of them."""

import numpy as np
import pytest

from retain.eval.studies.interval_coverage import DESIGNS, RARE, Design, Rare, main


@pytest.mark.parametrize(
    "design",
    [
        Design("normal", (30,), 0.8),
        Design("normal", (100,), 0.9),
        Design("exponential", (100,), 0.9),
        Design("normal", (4, 40, 150)),
        Design("+1", (4, 40, 150), 0.8),
        Design("normal", (12,), largest=60),
        Design("exponential", (12,), largest=60),
    ],
    ids=lambda design: design.name,
)
def test_intervals_cover_where_ties_are_many_strata_small_and_clusters_few(design):
    assert design in DESIGNS
    rng = np.random.default_rng(0)
    assert np.mean([design.covered(rng, "t") for _ in range(250)]) >= 0.93


def test_a_bootstrap_does_not_and_it_shows():
    rng = np.random.default_rng(0)
    assert np.mean([Design("normal", (30,), 0.8).covered(rng, "BCa") for _ in range(60)]) < 0.93
    assert np.mean([Rare((50,), (0.02,)).equivalent(rng, "BCa") for _ in range(60)]) > 0.15


@pytest.mark.parametrize("rare", [RARE[0], RARE[1], RARE[3], RARE[-2]], ids=lambda rare: rare.name)
def test_a_difference_of_the_margin_is_rarely_called_equivalent(rare):
    rng = np.random.default_rng(0)
    assert np.mean([rare.equivalent(rng, "t") for _ in range(60)]) <= 0.05


def test_the_command_prints_both_tables(capsys):
    assert main(["--replicates", "2", "--bootstrap", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| 95 % interval of | covers | BCa covers |"
    assert f"| {DESIGNS[0].name} | 1.000 |  |" in lines
    assert [sum(one.name in line for line in lines) for one in (*DESIGNS, *RARE)] == [1] * 27
    assert main(["--replicates", "2"]) == 2
    assert "bootstrap 0 to replicates" in capsys.readouterr().err

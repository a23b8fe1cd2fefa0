"""The grid of depths and lengths: every cell once, the needle where it is said to be."""

import pytest

from retain.eval.tasks.niah import DEPTHS, LENGTHS, niah_grid
from tests.eval.asked_in_text import asking, held, made, measure
from tests.refused import refused


@pytest.mark.parametrize("task", ["niah/grid", "niah/grid_python"])
def test_every_cell_once_with_the_needle_in_its_place(task):
    cells = []
    for index in range(len(DEPTHS) * len(LENGTHS)):
        item = made(task, index=index, context_tokens=800)
        depth, length = item.about["depth"], item.about["length"]
        cells.append((depth, length))
        assert 0.8 * length < measure(item.context) <= length
        (needle,), (value,) = held(item), item.questions[0].references
        assert value in needle and item.context.count(value) == 1
        start = item.context.index("\n") + 1
        before, behind = item.context[start : item.needles[0][0]], item.context[item.needles[0][1] :]
        share = 100 * len(before) / (len(before) + len(behind))
        # Half a sentence away at most.
        assert share == pytest.approx(depth, abs=50 * 120 / (len(before) + len(behind)))
        if depth in (0, 100):
            assert (len(before) == 0, len(behind) == 0) == (depth == 0, depth == 100)
    assert len({*cells}) == len(cells) == 44
    assert made(task, index=44, context_tokens=800).about == made(task, index=0, context_tokens=800).about


def test_wrong_settings():
    refused("depths are per cent, 0 to 100", niah_grid, asking(), depths=[0, 101])
    refused("lengths are shares of context_tokens", niah_grid, asking(), lengths=[2000])
    refused("niah_grid has at least .* ask for a longer", niah_grid, asking(context_tokens=60))

"""The reference suite: items from (task, seed, index) alone, families that agree with the generator."""

import pytest

from retain.eval.tasks import load_suite
from retain.eval.tasks.reference import (
    ABOUT,
    SINGLE_KEY,
    reference_documents,
    reference_item,
    reference_suite,
)
from retain.reference.items import HELD_OUT_TASKS, SEEN_TASKS, TASKS


def test_families_are_the_generators():
    suite = reference_suite()
    assert [task.name for task in suite.tasks.values() if task.family == "seen"] == list(SEEN_TASKS)
    assert [task.name for task in suite.tasks.values() if task.family == "held-out"] == list(HELD_OUT_TASKS)
    assert set(suite.tasks) == set(ABOUT) and set(SINGLE_KEY) < set(ABOUT)
    assert "seed=1 output=there" in suite.train_gates.format(seed=1, gates="there")


@pytest.mark.parametrize("task", TASKS)
def test_an_item_is_its_own(task):
    item = reference_item(task, 1, 5, 600)
    assert item == reference_item(task, 1, 5, 600)
    others = (reference_item(task, 1, 6, 600), reference_item(task, 2, 5, 600))
    assert all(other.context_ids != item.context_ids for other in others)
    assert len(item.context_ids) == 600 and len(item.question_ids) >= 2
    assert item.score(item.gold_ids) == (1.0, 1.0) and item.score([0] * 12)[0] == 0.0


def test_documents_repeat_for_a_seed():
    first, again = (list(reference_documents(0, 2, 400)) for _ in range(2))
    assert first == again and first[0] != first[1]
    assert first[0] != next(iter(reference_documents(1, 1, 400)))


def test_unknown_suite():
    with pytest.raises(ValueError, match="unknown suite of tasks 'rulr'"):
        load_suite("rulr")

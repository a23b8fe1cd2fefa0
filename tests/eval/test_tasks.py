"""The reference suite: items from (task, seed, index) alone, families that agree with the generator."""

import hashlib
from itertools import product

import numpy as np
import pytest

from retain.eval.tasks.reference_basic import (
    ABOUT,
    reference_documents,
    reference_item,
    reference_suite,
    span,
)
from retain.eval.tasks.reference_more import DEPTHS, LENGTHS, reference_more_item
from retain.eval.tasks.reference_more import TASKS as MORE
from retain.eval.tasks.suites import load_suite
from retain.reference.documents import Writer
from retain.reference.items import HELD_OUT_TASKS, SEEN_TASKS, TASKS, write_item
from tests.eval.asked_in_text import answered, check_item
from tests.refused import refused


def test_families_are_the_generators():
    suite = reference_suite()
    assert [task.name for task in suite.tasks.values() if task.family == "seen"] == list(SEEN_TASKS)
    assert [task.name for task in suite.tasks.values() if task.family == "held-out"] == list(HELD_OUT_TASKS)
    assert set(suite.tasks) == set(ABOUT)
    assert "seed=1 output=there" in suite.train_gates.format(seed=1, gates="there")


@pytest.mark.parametrize("task", TASKS)
def test_an_item_is_the_generators_own(task):
    name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    own = int(np.random.SeedSequence([7, 1, name, 5]).generate_state(1)[0])
    context_ids, asked = write_item(Writer("eval", own), task, 600)
    item = check_item(reference_item, task, 5, 6, 600)
    assert item.context_ids == context_ids and item.question_ids == asked.ids
    assert item.gold_ids == asked.gold_ids and item.generate == asked.generate
    assert len(item.context_ids) == 600


def test_documents_repeat_for_a_seed():
    first, again = (list(reference_documents(0, 2, 400)) for _ in range(2))
    assert first == again and first[0] != first[1]
    assert first[0] != next(iter(reference_documents(1, 1, 400)))


def test_unknown_suite():
    refused("unknown suite of tasks 'rulr'", load_suite, "rulr")


@pytest.mark.parametrize("task", TASKS)
def test_needles_hold_the_answer(task):
    for index in range(3):
        item = reference_item(task, 0, index, 600)
        held = [item.context_ids[start:stop] for start, stop in item.needles]
        answers = {*item.gold_ids[:-1]}
        if task == "common":
            assert not held
            continue
        assert answers <= {token for ids in held for token in ids}
        assert len(held) == {"multivalue": 4, "multiquery": 4, "tracing": 4}.get(task, 1)
        # Each is where its words first stand together, and is short.
        assert all(
            len(ids) <= 8 and span(item.context_ids, ids) == own
            for ids, own in zip(held, item.needles, strict=True)
        )


def test_spans():
    assert span([1, 2, 1, 3], [1, 3]) == (2, 4)
    assert span([1, 2], [2, 1]) is None and span([1], [1, 2]) is None


def test_more_tasks_are_a_suite_of_their_own():
    first, more = load_suite("reference"), load_suite("reference_more")
    assert [*first.tasks] == [*TASKS] and [*MORE] == ["grid", "requests", "turns", "chain"]
    assert [*more.tasks] == [*TASKS, *MORE]
    assert reference_more_item("lists", 1, 2, 600).context_ids == first.item("lists", 1, 2, 600).context_ids
    assert more.load_model is first.load_model and more.seeds == first.seeds
    refused("unknown task 'grit': did you mean 'grid'", reference_more_item, "grit", 0, 0, 600)


@pytest.mark.parametrize("task", MORE)
def test_a_further_item_is_its_own(task):
    item = check_item(reference_more_item, task, 43, 87, 600)
    assert len(item.context_ids) == 600
    held = {token for start, stop in item.needles for token in item.context_ids[start:stop]}
    assert all({*asked.gold_ids[:-1]} <= held for asked in item.asked)


def test_the_grid_is_filled_once():
    cells = []
    for index in range(len(DEPTHS) * len(LENGTHS)):
        item = reference_more_item("grid", 0, index, 400)
        depth, length = item.about["depth"], item.about["length"]
        cells.append((depth, length))
        ((start, stop),) = item.needles
        assert len(item.context_ids) == length
        assert start - 1 == round(depth / 100 * (length - 1 - (stop - start)))
        answer = item.gold_ids[0]
        assert item.context_ids.count(answer) == 1 and answer in item.context_ids[start:stop]
    wanted = [(depth, length * 400) for length, depth in product(LENGTHS, DEPTHS)]
    assert sorted(cells) == sorted(wanted) and len(set(cells)) == len(wanted)
    assert {length for _, length in cells[:4]} == {int(length * 400) for length in LENGTHS}
    refused("shortest context is 0.4 of context_tokens=16", reference_more_item, "grid", 0, 0, 16)


def test_turns_are_requests_behind_what_was_said():
    apart, after = (reference_more_item(task, 0, 2, 600) for task in ("requests", "turns"))
    assert apart.context_ids == after.context_ids and apart.needles == after.needles
    said: tuple[int, ...] = ()
    for one, other in zip(apart.asked, after.asked, strict=True):
        assert other.question_ids == (*said, *one.question_ids) and one.gold_ids == other.gold_ids
        assert one.about == other.about
        said = (*other.question_ids, *other.gold_ids)
    assert sorted(str(asked.about["kind"]) for asked in after.asked) == ["get"] * 4 + ["trace"]
    assert [asked.about["turn"] for asked in after.asked] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("task", MORE)
def test_the_model_answers_with_the_full_cache(task):
    assert answered([reference_more_item(task, 0, index, 700) for index in (3, 21, 40)], 0) > 0.9

"""The generator: exact lengths, no leak between splits or families, answers can be found, seeds repeat."""

import numpy as np
import pytest

from retain.reference.documents import (
    HELD_OUT_FACT_FORMATS,
    VERBS,
    Writer,
    distill_document,
    words,
)
from retain.reference.items import HELD_OUT_TASKS, SEEN_TASKS, TASKS, Item, write_item
from retain.reference.library import sources
from retain.reference.tokenizer import BOS_ID, EOS_ID, QUESTION_ID, load_tokenizer


def encode(text: str) -> list[int]:
    return load_tokenizer()(text, add_special_tokens=False)["input_ids"]


def occurs(needle: list[int], ids: tuple[int, ...]) -> int:
    """How often a run of ids occurs."""
    return sum(list(ids[i : i + len(needle)]) == needle for i in range(len(ids)))


@pytest.mark.parametrize("task", TASKS)
def test_an_item_has_the_asked_length_and_its_own_gold_answer_scores_one(task: str) -> None:
    item = write_item(Writer("eval", 3), task, 300)
    assert len(item.context_ids) == 300
    assert item.context_ids[0] == BOS_ID
    assert item.question_ids[0] == QUESTION_ID
    assert item.gold_ids[-1] == EOS_ID
    assert item.score(item.gold_ids) == (1.0, 1.0)
    assert item.score([0] * len(item.gold_ids)) == (0.0, 0.0)
    assert all(answer in item.context_ids for answer in item.answers)


def test_half_an_answer_is_half_a_point_and_no_exact_match() -> None:
    item = Item("tracing", (1,), (3, 4), (10, 11), (0, 1), True, (10, 11, 2))
    assert item.score([10, 12]) == (0.0, 0.5)
    assert item.score([11, 10]) == (0.0, 0.0)
    either = Item("common", (1,), (3, 4), (10, 11), (0, 1), False, (10, 11, 2))
    assert either.score([11, 10]) == (1.0, 1.0)
    assert either.score([10, 10]) == (0.0, 0.5)
    assert either.score([10]) == (0.0, 0.5)


def test_the_same_seed_gives_the_same_item_and_another_seed_another() -> None:
    assert write_item(Writer("eval", 5), "multikey", 200) == write_item(Writer("eval", 5), "multikey", 200)
    assert write_item(Writer("eval", 5), "multikey", 200) != write_item(Writer("eval", 6), "multikey", 200)
    assert write_item(Writer("eval", 5), "multikey", 200) != write_item(Writer("train", 5), "multikey", 200)


def test_splits_share_no_file() -> None:
    train, held_out = ({name for name, _ in sources(split)} for split in ("train", "eval"))
    assert train and held_out
    assert train.isdisjoint(held_out)


def test_seen_and_held_out_tasks_are_different() -> None:
    assert set(SEEN_TASKS).isdisjoint(HELD_OUT_TASKS)
    assert len(HELD_OUT_TASKS) >= 2


def test_needles_are_ordinary_words_that_the_filler_uses_too() -> None:
    item = write_item(Writer("eval", 0), "single", 1000)
    assert all(answer in set(words().tolist()) for answer in item.answers)
    share = np.isin(item.context_ids, words()).mean()
    assert 0.15 < share < 0.5, share


def test_a_key_occurs_only_in_its_statements() -> None:
    writer = Writer("eval", 2)
    for _ in range(20):
        item = write_item(writer, "single", 500)
        key, value = item.question_ids[-2], item.answers[0]
        places = [i for i, token in enumerate(item.context_ids) if token == key]
        assert 1 <= len(places) <= 3  # stated once, used again up to twice
        assert all(value in item.context_ids[i + 1 : i + 4] for i in places)


@pytest.mark.parametrize("task", SEEN_TASKS)
def test_seen_tasks_use_no_held_out_format(task: str) -> None:
    """The key of a held-out format is followed by ` =` or `(`; no key of a seen task is."""
    writer = Writer("eval", 11)
    for _ in range(5):
        item = write_item(writer, task, 300)
        key = item.question_ids[-2]
        after = {item.context_ids[i + 1] for i, token in enumerate(item.context_ids[:-1]) if token == key}
        assert after.isdisjoint({*encode(" ="), *encode("(")})


def test_the_format_task_uses_only_held_out_formats() -> None:
    item = write_item(Writer("eval", 4), "format", 400)
    key = item.question_ids[-2]
    after = [item.context_ids[i + 1] for i, token in enumerate(item.context_ids[:-1]) if token == key]
    assert len(HELD_OUT_FACT_FORMATS) == 2
    assert set(after) & {*encode(" ="), *encode("(")}


def test_distillation_never_sees_a_held_out_family_or_format() -> None:
    writer = Writer("train", 9)
    verbs = {family: encode("<q>" + VERBS[family]) for family in VERBS}
    for _ in range(40):
        document = distill_document(writer, 300)
        assert len(document.context_ids) == 300
        for family in ("list", "who", "quote"):
            assert occurs(verbs[family], document.appendix_ids) == 0
            assert occurs(verbs[family], document.context_ids) == 0
        assert document.appendix_ids[0] == QUESTION_ID
        assert document.appendix_ids[-1] == EOS_ID


def test_a_context_too_short_for_its_statements_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into a context of 20"):
        write_item(Writer("eval", 0), "multikey", 20)


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown task 'multikeys': did you mean 'multikey'"):
        write_item(Writer("eval", 0), "multikeys", 200)

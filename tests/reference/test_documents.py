"""The generator: exact lengths, no leak between splits or families, answers can be found, seeds repeat."""

import pytest

from retain.reference.corpus import sources
from retain.reference.documents import VERBS, Writer, distill_document, random_content
from retain.reference.items import TASKS, write_item
from retain.reference.tokenizer import ANSWER_ID, BOS_ID, EOS_ID, QUESTION_ID, load_tokenizer


def encode(text: str) -> list[int]:
    return load_tokenizer()(text, add_special_tokens=False)["input_ids"]


def occurs(needle: list[int], ids: tuple[int, ...]) -> int:
    """How often a run of ids occurs."""
    return sum(list(ids[i : i + len(needle)]) == needle for i in range(len(ids)))


@pytest.mark.parametrize("task", TASKS)
def test_an_item_has_the_asked_length_and_its_answer_is_in_it(task: str) -> None:
    context_ids, asked = write_item(Writer("eval", 3), task, 300)
    assert len(context_ids) == 300 and context_ids[0] == BOS_ID
    assert (asked.ids[0], asked.gold_ids[-1]) == (QUESTION_ID, EOS_ID)
    assert {*asked.answers} <= {*context_ids}


def test_the_same_seed_gives_the_same_item_and_another_seed_or_split_another() -> None:
    one, same, *others = (
        write_item(Writer(split, seed), "multikey", 200)
        for split, seed in (("eval", 5), ("eval", 5), ("eval", 6), ("train", 5))
    )
    assert one == same and one not in others


def test_splits_share_no_file() -> None:
    train, held_out = ({name for name, _ in sources(split)} for split in ("train", "eval"))
    assert train and held_out and train.isdisjoint(held_out)


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
        assert document.appendix_ids.count(ANSWER_ID) == document.appendix_ids.count(EOS_ID)


@pytest.mark.parametrize("topics", [True, False])
def test_common_words_are_asked_for_where_a_text_has_some(topics: bool) -> None:
    writer = Writer("train", 2)
    content = random_content(writer, 100.0, topics=topics)
    asked = [{*one.answers} for one in writer.questions(content)]
    assert (len(content.topics) > 0) == topics == ({*content.topics} in asked)


@pytest.mark.parametrize(
    ("task", "tokens", "message"),
    [
        ("multikey", 20, "do not fit into a context of 20"),
        ("multikeys", 200, "unknown task 'multikeys': did you mean 'multikey'"),
    ],
)
def test_items_that_cannot_be_are_refused(task: str, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_item(Writer("eval", 0), task, tokens)

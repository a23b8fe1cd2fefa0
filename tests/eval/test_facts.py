"""Facts in prose: what is asked stands in the text once, at any depth but the last sentences."""

import pytest

from retain.eval.tasks.facts import KINDS, LAST, codes, facts, quote
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, held, made, measure
from tests.refused import refused

NAMES = [name for name in cards() if name.startswith("facts/")]


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_stands_in_its_needle(name):
    item = made(name)
    (question,) = item.questions
    assert 700 < measure(item.context) <= 1000
    for value in question.references:
        assert any(value in needle for needle in held(item)), (value, held(item))
    assert not item.context.endswith(held(item)[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_one_key_has_one_value(kind):
    for index in range(20):
        item = made("facts/number", index=index, kind=kind, keys=3)
        (question,) = item.questions
        (needle,) = held(item)
        assert item.context.count(needle) == 1
        key = next(key for key in KINDS[kind].keys if key in question.question.split("?")[0])
        said = KINDS[kind].says.format(key=key, value="|").split("|")[0]
        assert item.context.count(said) == 1


def test_depths_are_even_and_never_behind_the_last_sentences():
    depths = []
    for index in range(200):
        item = made("facts/place", index=index, context_tokens=600)
        behind = item.context[item.needles[0][1] :]
        assert behind.count(".") >= LAST
        depths.append(item.about["depth"])
    quarters = [sum(low <= depth < low + 25 for depth in depths) for low in (0, 25, 50, 75)]
    assert min(quarters) >= 30  # of 50 expected each; below 30 with odds of 1 in 2,000


def test_several_values_and_several_keys_are_all_wanted():
    values = made("facts/number_of_values")
    assert len(values.questions[0].references) == 2 == len(values.needles)
    queries = made("facts/number_of_queries")
    assert len(queries.questions[0].references) == 2 == len(queries.needles)
    assert " and " in queries.questions[0].question


def test_a_quotation_goes_on_as_the_text_does():
    for index in range(20):
        item = made("facts/quote", index=index)
        (question,), (needle,) = item.questions, held(item)
        assert f"{question.answer_prefix} {question.references[0]}" in needle
        assert item.context.count(question.answer_prefix) == 1


def test_a_list_stands_in_one_piece():
    item = made("facts/codes")
    assert item.context.count("The code of the office in") == 16
    (needle,), (question,) = held(item), item.questions
    assert question.references[0] in needle and item.context.count(question.references[0]) == 1


def test_wrong_settings():
    refused("kind of fact 'colr'", facts, asking(), kind="colr")
    refused("keys, values and queries are 1 to 20", facts, asking(), keys=0)
    refused("trade has 10 different values, and 11 are asked for", facts, asking(), kind="trade", keys=11)
    refused("lines is 1 to 16", codes, asking(), lines=17)
    refused("ask for a longer context", facts, asking(context_tokens=30))
    refused("no sentence of this text has 42 words", quote, asking(), begin=30, words=10)

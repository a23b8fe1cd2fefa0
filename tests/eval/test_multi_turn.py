"""Several questions of one context: turns and requests alike, answers that can be found, and found once."""

import re
from collections import Counter

import pytest

from retain.eval.tasks.multi_turn import multi_turn_counting, multi_turn_kv, multi_turn_tracing
from tests.eval.asked_in_text import asking, held, made
from tests.refused import refused

KINDS = ("counting", "kv", "mixed", "tracing")


@pytest.mark.parametrize("kind", KINDS)
def test_turns_and_requests_ask_the_same(kind):
    apart, after = (made(f"multi_turn/{kind}_{how}") for how in ("requests", "turns"))
    assert apart.context == after.context and not apart.turns and after.turns
    assert after.questions[: len(apart.questions)] == apart.questions and len(apart.questions) >= 4
    assert all(question.about["kind"] for question in apart.questions)


def test_pairs_are_spread_and_stand_once():
    for index in range(5):
        item = made("multi_turn/kv_requests", index=index, context_tokens=2000)
        depths = sorted(question.about["depth"] for question in item.questions)
        assert all(20 * place <= depth + 4 and depth < 20 * (place + 1) for place, depth in enumerate(depths))
        for question in item.questions:
            (value,) = question.references
            key = re.findall(r'key "(.*?)"', question.question)[0]
            assert item.context.count(value) == 1 == item.context.count(f'"{key}": "{value}"')
        assert {text.split('"')[3] for text in held(item)} == {q.references[0] for q in item.questions}


def test_chains_are_in_order():
    item = made("multi_turn/tracing_turns")
    lines = item.context.split("\n")
    for question in item.questions:
        value = re.findall(r"\d{7}", question.question)[0]
        names, found = [], value
        for line in lines:
            if line.endswith(f"= {found}."):
                names.append(line.split()[1])
                found = f"VAR {names[-1]}"
        assert tuple(names) == question.references and len(names) == 3
    assert len(item.needles) == 4 * 3


def test_the_log_is_counted():
    item = made("multi_turn/counting_requests")
    counted = Counter(re.findall(r"delivered to (\w+)\.", item.context))
    for question in item.questions:
        town = re.findall(r"went to (\w+)\?", question.question)[0]
        assert question.references == (str(counted[town]),)
    assert sum(counted.values()) == item.about["lines"]
    mixed = made("multi_turn/mixed_requests")
    (question,) = [q for q in mixed.questions if q.about["kind"] == "global"]
    counted = Counter(re.findall(r"delivered to (\w+)\.", mixed.context))
    assert counted[question.references[0]] == max(counted.values())
    assert sorted(q.about["kind"] for q in mixed.questions) == ["global", *["kv"] * 3, "tracing", "tracing"]


def test_no_answer_stands_in_a_prompt_of_its_own_question():
    for kind in KINDS:
        for index in range(4):
            questions = made(f"multi_turn/{kind}_turns", index=index).questions
            assert len({question.question for question in questions}) == len(questions)
    for index in range(4):
        questions = made("multi_turn/mixed_turns", index=index).questions
        assert [questions[place].about["kind"] for place in (0, -1)] == ["kv", "kv"] and len(questions) == 6
        said = [question.answer or question.references[0] for question in questions[:-1]]
        assert questions[-1].references[0] not in " ".join(said)


def test_depths_of_a_mixed_context_are_of_all_of_it():
    for index in range(4):
        item = made("multi_turn/mixed_requests", index=index)
        pairs = [question for question in item.questions if question.about["kind"] == "kv"]
        assert len(pairs) == 3
        for question in pairs:
            line = next(text for text in held(item) if f'"{question.references[0]}"' in text)
            assert question.about["depth"] == 100 * item.context.index(line) / len(item.context)
            # The pairs are the first of three parts.
            assert item.context.index(line) < item.context.index("Below, variables")
        assert max(question.about["depth"] for question in pairs) < 60


def test_wrong_settings():
    refused("multi_turn_kv: questions is 1 or more, got 0", multi_turn_kv, asking(), questions=0)
    refused("at most 6 towns, got 7", multi_turn_counting, asking(), questions=7)
    refused("hops is 1 or more, got 0", multi_turn_tracing, asking(), hops=0)
    refused("ask for a longer", multi_turn_kv, asking(context_tokens=100))

"""LongMemEval: the official history, where its evidence lies, and what is left out when it is too long."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.longmemeval import longmemeval
from tests.eval.asked_in_text import asking_words as asking
from tests.eval.asked_in_text import words
from tests.refused import refused


def chat(said: str, *, answer: bool = False) -> list[dict[str, Any]]:
    turn: dict[str, Any] = {"role": "user", "content": f" {said} "}
    if answer:
        turn["has_answer"] = True
    return [turn, {"role": "assistant", "content": "I see."}]


def row(**changes: Any) -> dict[str, Any]:
    return {
        "question_id": "q1",
        "question_type": "single-session-user",
        "question": "What is the name of my dog?",
        "answer": "Rex",
        "question_date": "2023/05/30 (Tue) 23:40",
        "haystack_dates": ["2023/05/21 (Sun) 02:21", "2023/05/20 (Sat) 02:21"],
        "haystack_session_ids": ["noise", "answer_1"],
        "haystack_sessions": [chat("It rains."), chat("My dog Rex barks.", answer=True)],
        "answer_session_ids": ["answer_1"],
    } | changes


def folder(path: Path, *rows: dict[str, Any], name: str = "longmemeval_s_cleaned.json") -> str:
    (path / name).write_text(json.dumps(rows or [row()]))
    return str(path)


def test_the_history_is_the_official_one(tmp_path: Path) -> None:
    item = longmemeval(asking(), haystack="s", path=folder(tmp_path))
    # run_generation.py with history_format=nl: by date, turns stripped, marks of evidence removed.
    assert item.context == (
        "I will give you several history chats between you and a user. Please answer the question based on "
        "the relevant chat history.\n\n\nHistory Chats:\n\n"
        "\n### Session 1:\nSession Date: 2023/05/20 (Sat) 02:21\nSession Content:\n"
        "\n\nuser: My dog Rex barks.\n\nassistant: I see.\n"
        "\n### Session 2:\nSession Date: 2023/05/21 (Sun) 02:21\nSession Content:\n"
        "\n\nuser: It rains.\n\nassistant: I see.\n"
    )
    asked = item.questions[0]
    assert asked.question == (
        "\n\nCurrent Date: 2023/05/30 (Tue) 23:40\nQuestion: What is the name of my dog?\nAnswer:"
    )
    assert asked.references == ("Rex",)
    assert [item.context[start:stop] for start, stop in item.needles] == ["My dog Rex barks."]
    assert item.about == {"id": "q1", "type": "single-session-user", "chats": 2.0, "chats_left_out": 0.0}


def test_a_long_history_keeps_the_evidence(tmp_path: Path) -> None:
    count = 12
    given = row(
        haystack_dates=[f"2023/05/{10 + place} (Sat) 02:21" for place in range(count)],
        haystack_session_ids=[f"s{place}" for place in range(count)],
        haystack_sessions=[chat("word " * 20, answer=place == 7) for place in range(count)],
        answer_session_ids=["s7"],
    )
    path = folder(tmp_path, given)
    whole = longmemeval(asking(), haystack="s", path=path)
    kept = []
    for tokens in (70, 150, 300, words(whole.context)):
        item = longmemeval(asking(tokens=tokens), haystack="s", path=path)
        assert words(item.context) <= tokens
        assert item.context[slice(*item.needles[0])] == ("word " * 20).strip()
        assert item.about["chats"] + item.about["chats_left_out"] == count
        dates = [line for line in item.context.split("\n") if line.startswith("Session Date")]
        assert dates == sorted(dates) and len(dates) == item.about["chats"]
        kept.append({*dates})
    # Nested, and as many as fit: one more chat has some 30 words.
    assert kept[0] < kept[1] < kept[2] < kept[3] and len(kept[3]) == count
    assert words(longmemeval(asking(tokens=300), haystack="s", path=path).context) > 300 - 35
    with pytest.raises(
        ValueError, match=r"q1 needs \d+ tokens for the chats that hold its answer, .* has 40"
    ):
        longmemeval(asking(tokens=40), haystack="s", path=path)


def test_questions_without_an_answer_are_left_out_and_the_rest_shuffled(tmp_path: Path) -> None:
    rows = [row(question_id=f"q{i}{'_abs' if i % 4 == 0 else ''}") for i in range(16)]
    path = folder(tmp_path, *rows)
    assert longmemeval.size(haystack="s", path=path) == 12
    # Rubrics of a judge are no answers either.
    mixed = [*rows, row(question_id="p1", question_type="single-session-preference", answer="The user would")]
    path = folder(tmp_path, *mixed)
    assert longmemeval.size(haystack="s", path=path) == 12
    order = [longmemeval(asking(i), haystack="s", path=path).about["id"] for i in range(12)]
    assert sorted(order) == sorted(f"q{i}" for i in range(16) if i % 4)
    assert order != sorted(order, key=lambda name: int(str(name)[1:]))
    refused(r"item 12 of .* 12 items", longmemeval, asking(12), haystack="s", path=path)


@pytest.mark.parametrize(
    ("answer", "alternatives"),
    [
        ("7 days. 8 days (including the last day) is also acceptable.", ("7 days", "8 days")),
        ("7.5 hours. 8 hours is also acceptable", ("7.5 hours", "8 hours")),
        ("Dr. Lee. Anna Lee is also acceptable.", ("Dr. Lee", "Anna Lee")),
        ("Rex. A dog.", ("Rex. A dog.",)),
        (12, ("12",)),
        ("A white lie is also acceptable.", ("A white lie is also acceptable.",)),
    ],
)
def test_what_is_also_acceptable_is_a_right_answer(
    answer: str | int, alternatives: tuple[str, ...], tmp_path: Path
) -> None:
    asked = longmemeval(asking(), haystack="s", path=folder(tmp_path, row(answer=answer))).questions[0]
    assert asked.references == alternatives
    for right in alternatives:
        assert METRICS["contains"](f"I think it was {right}!", asked.references) == 1.0
    assert METRICS["contains"]("9 cats", asked.references) == 0.0


def test_files_go_by_their_official_names(tmp_path: Path) -> None:
    assert longmemeval.size(haystack="oracle", path=folder(tmp_path, name="longmemeval_oracle.json")) == 1
    assert longmemeval.size(haystack="m", path=folder(tmp_path, name="longmemeval_m.json")) == 1
    refused("unknown haystack of LongMemEval 'l'", longmemeval, asking(), haystack="l")
    short = row()
    del short["haystack_dates"]
    with pytest.raises(ValueError, match="no column 'haystack_dates'.* in row 0"):
        longmemeval(asking(), haystack="s", path=folder(tmp_path, short))

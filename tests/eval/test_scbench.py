"""SCBench's rows become one context with all its questions, as turns or as requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.rendering import render
from retain.eval.tasks.scbench import PROMPTS, scbench
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, tokenizer
from tests.refused import refused

OPTIONS = ["Ann", "Bo", "Cy", "Di"]
LARGEST, SMALLEST = "The largest number is", "The smallest number of all is"
# Two questions with answers, a right reply to the first.
TURNS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "kv": ([{"input": "Key: a", "answer": "x-1"}, {"input": "Key: b", "answer": "x-2"}], '"x-1"'),
    "prefix_suffix": ([{"input": "a...b", "answer": "azb"}, {"input": "c...d", "answer": "czd"}], "azb"),
    "vt": ([{"input": "VARS", "answer": ["AB", "CD"]}, {"input": "MORE", "answer": ["EF"]}], "cd and ab"),
    "qa_eng": ([{"input": "Who?", "answer": ["Bo", "Bob"]}, {"input": "When?", "answer": "noon"}], "bob"),
    "qa_chn": ([{"input": "谁？", "answer": "张三"}, {"input": "何时？", "answer": "今天"}], "张三"),
    "choice_eng": (
        [
            {"input": "Who?", "answer": "Bo", "options": OPTIONS},
            {"input": "Not?", "answer": "A", "options": OPTIONS},
        ],
        "B",
    ),
    "many_shot": ([{"input": "Text: x", "answer": "(A)"}, {"input": "Text: y", "answer": "(B)"}], "(a)"),
    "mf": ([{"input": LARGEST, "answer": 88}, {"input": SMALLEST, "answer": 2}], "88."),
    "summary": ([{"input": "Sum up 1", "answer": "Ann wins."}, {"input": "2", "answer": "Bo"}], "ann wins"),
}


def written(path: Path, dataset: str, **changes: Any) -> str:
    row = {"id": 5, "context": "The text.", "multi_turns": TURNS[dataset][0]} | changes
    (path / f"scbench_{dataset}.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    return str(path)


@pytest.mark.parametrize("mode", ["turns", "requests"])
@pytest.mark.parametrize("dataset", sorted(TURNS))
def test_a_row_is_one_context_and_its_questions(dataset: str, mode: str, tmp_path: Path) -> None:
    card, (turns, reply) = cards()[f"scbench/{dataset}_{mode}"], TURNS[dataset]
    item = scbench(asking(), **card.settings, path=written(tmp_path, dataset))
    assert item.context.endswith("The text.") and item.turns == (mode == "turns")
    first, second = item.questions
    assert turns[0]["input"] in first.question and turns[1]["input"] in second.question
    # A blank line before each question: between turns the frame has it.
    assert first.question.startswith("\n\n") and second.question.startswith("\n\n") == (mode == "requests")
    score = METRICS[card.metric]
    assert score(reply, first.references) == 1.0 and score(reply, second.references) == 0.0
    if dataset == "qa_chn":  # the reference tokenizer has no such letters
        return
    read = tokenizer().decode(list(render(item, card, tokenizer(), chat=False).asked[1].question_ids))
    answer = turns[0]["answer"]
    known = answer[0] if isinstance(answer, list) else str(answer)
    # Of a later question's frame, `mf` has the same words, and an option's text stands among the options.
    if dataset not in ("choice_eng", "mf"):
        assert (turns[0]["input"].split()[0] in read and known in read) == (mode == "turns")
    earlier = first.answer if first.answer is not None else first.references[0]
    assert mode == "requests" or str(earlier) in read


def test_prompts_are_the_official_ones(tmp_path: Path) -> None:
    path = written(tmp_path, "choice_eng")
    turns = scbench(asking(), dataset="choice_eng", path=path)
    options = "\nA. Ann\nB. Bo\nC. Cy\nD. Di\n\nThe "
    assert turns.context == "Read the book and answer the question.\n\nThe text."
    assert [asked.question for asked in turns.questions] == [
        f"\n\nQuestion: Who?{options}the correct answer is",
        f"Question: Not?{options}letter of the correct answer is",
    ]
    requests = scbench(asking(), dataset="choice_eng", turns=False, path=path)
    assert requests.questions[1].question == f"\n\nQuestion: Not?{options}the correct answer is"
    assert requests.questions[1].references == ("Ann", "A")
    path = written(tmp_path, "mf")
    turns, requests = (scbench(asking(), dataset="mf", turns=own, path=path) for own in (True, False))
    asked = f"What is the smallest number of all?\n\n{SMALLEST}"
    assert turns.context == "What is the largest number?\n\nThe text."
    assert [one.question for one in turns.questions] == [f"\n\n{LARGEST}", asked]
    assert requests.context == f"{LARGEST}\n\nThe text."
    assert requests.questions[0].question == f"\n\nWhat is the largest number?\n\n{LARGEST}"
    assert requests.questions[1].question == f"\n\n{asked}"


def test_rows_come_from_the_hub_by_name(hub: Any) -> None:
    asked = hub(lambda *names: [{"input": "The text.", "multi_turns": TURNS["kv"][0]}])
    assert scbench(asking(), dataset="kv", revision="stub kv").context.endswith("The text.")
    assert [(*names, how["split"]) for *names, how in asked] == [("microsoft/SCBench", "scbench_kv", "test")]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    assert {*PROMPTS} == {*TURNS}
    refused("unknown task of SCBench 'repoqa'", scbench, asking(), dataset="repoqa")
    path = written(tmp_path, "kv", multi_turns=[])
    refused("row 0 of scbench_kv has no question or no context", scbench, asking(), dataset="kv", path=path)
    path = written(tmp_path, "mf", multi_turns=[{"input": "Largest?", "answer": 1}])
    refused("a question of scbench_mf reads 'The ... is'", scbench, asking(), dataset="mf", path=path)
    for changes, message in (
        ({"answer": "Eve"}, r"the right answer 'Eve' is none of the options \['Ann'"),
        ({"options": ["Ann"]}, r"a question has four options, but got 1: \['Ann'\]"),
    ):
        turn = {"input": "Who?", "answer": "Bo", "options": OPTIONS} | changes
        other = tmp_path / "-".join(changes)
        other.mkdir()
        path = written(other, "choice_eng", multi_turns=[turn])
        refused(message, scbench, asking(), dataset="choice_eng", path=path)


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        ("verbatim", "the value is ab-c.", ("b-c",), 1.0),
        ("verbatim", "AB-C", ("ab-c",), 0.0),
        ("first_number", "about 4.5", ("4",), 1.0),
        ("first_number", "about 4", ("4.5",), 0.0),
        ("first_number", "4.50", ("4.5",), 1.0),
        ("first_number", "-4", ("4",), 1.0),  # a sign is not read
        ("first_number", "none", ("4",), 0.0),
        ("chosen_option", "Because", ("Bo", "B"), 1.0),  # its first letter is a B
        ("chosen_option", "C", ("Bo", "B"), 0.0),
        ("chosen_option", "lo", ("lo", "D"), 1.0),  # the option's text
        ("chosen_option", "It is (the option is B)", ("Bo", "B"), 1.0),
        ("chosen_option", "The answer is: Bo", ("Bo", "B"), 1.0),
        ("chosen_option", "maybe C", ("Bo", "B"), 0.0),
        ("chosen_option", "maybe B", ("Bo", "B"), 1.0),
        ("chosen_option", " ", ("Bo", "B"), 0.0),
        ("qa_f1_characters", "\u662f\u5f20\u4e09\uff01", ("\u5f20\u4e09",), 0.8),
        ("rouge_lsum", "b a\nc", ("a b c",), 2 / 3),  # of "b a" one, and "c"
        ("rouge_lsum", "a a a a", ("a",), 0.4),
        ("rouge_lsum", "A-b", ("a b",), 1.0),
    ],
)
def test_scores_of_answers(
    metric: str, prediction: str, references: tuple[str, ...], expected: float
) -> None:
    assert METRICS[metric](prediction, references) == pytest.approx(expected)

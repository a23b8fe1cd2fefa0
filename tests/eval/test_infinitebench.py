"""InfiniteBench's rows become its official prompts, and its answers are scored as its code does."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks.infinitebench import PROMPTS, infinitebench
from retain.eval.tasks.rendering import render
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, asking_words, tokenizer
from tests.refused import refused

OPTIONS = ["Ann", "Bo", "Cy {D}", "Di"]
BOOK = "Once {input} upon a time."
_LIST = "What is the second largest number in the following list?\n\n"
# Input, answer; what stands before and behind the context; a right reply.
TASKS: dict[str, tuple[Any, ...]] = {
    "passkey": ("What is the pass key?", "01234", "quiz you about", "\n\nThe pass key is", "01234, 5"),
    "number_string": ("Which digits?", ["11234"], "Find it. I", "\n\nThe sequence of digits is", "is 11234."),
    "kv_retrieval": ('Key: "a-b"\nThe value is: ', "9-f", "JSON object below.\n\n", "value is: ", '"9-f"}'),
    "longbook_sum_eng": ("", ["Ann\nwins"], "Summarize the book below.", "\n\nSummary:", "Ann wins"),
    "longbook_choice_eng": ("Who?", "Bo", "Read the book", "C. Cy {D}\nD. Di\n\nThe letter of", "B."),
    "longbook_qa_eng": ("Who?", ["The Bo", "Bob"], "Be very concise", "\n\nQuestion: Who?\nAnswer:", "bo"),
    "longbook_qa_chn": ("谁？", ["张三。"], "阅读以下书籍", "\n\n问题：谁？\n答案：", "张三"),
    "longdialogue_qa_eng": ("", ["ACE", "ACE R"], '"$$MASK$$", and', "with $$MASK$$ is likely", "Ace."),
    "math_find": ("The second largest number of all:", [88], _LIST, "\n\nThe second largest", "88"),
    "math_calc": ("", [1, 3, 8], "Values: [8, 5, 7, 3]\n\nExpression: ", "\nValues:", "[1, 3, 8]"),
    "code_run": ("Call func_12(-3).", 7, "called func_12 in", "value of func_12(-3) is", "it is 7."),
    "code_debug": ("", ["Bo", "B"], "makes it crash.", "\n\nOptions:\nA. Ann\nB. Bo\n", "B."),
}


def row(dataset: str, **changes: Any) -> dict[str, Any]:
    asked, answer, *_ = TASKS[dataset]
    return {"id": 3, "context": BOOK, "input": asked, "answer": answer, "options": OPTIONS} | changes


def written(path: Path, dataset: str, **changes: Any) -> str:
    (path / f"{dataset}.jsonl").write_text(json.dumps(row(dataset, **changes), ensure_ascii=False))
    return str(path)


@pytest.mark.parametrize("dataset", sorted(TASKS))
def test_a_row_is_asked_and_scored(dataset: str, tmp_path: Path) -> None:
    _, _, before, behind, reply = TASKS[dataset]
    path = written(tmp_path, dataset)
    item = infinitebench(asking(), dataset=dataset, path=path)
    (asked,) = item.questions
    assert before in item.context and item.context.endswith(BOOK)
    assert behind in asked.question and item.about["id"] == "3" and item.about["cut_tokens"] == 0
    assert infinitebench.size(dataset=dataset, path=path) == 1
    card = cards()[f"infinitebench/{dataset}"]
    score = METRICS[card.metric]
    assert score(reply, asked.references) == 1.0 and score("", asked.references) == 0.0
    assert score("no such 99 answer", asked.references) == 0.0
    if dataset != "longbook_qa_chn":  # the reference tokenizer has no such letters
        whole = render(item, card, tokenizer(), chat=False)
        assert len(whole.asked) == 1 and whole.asked[0].references == asked.references


def test_every_task_has_a_prompt_and_a_card() -> None:
    assert {*PROMPTS} == {*TASKS} == {name[14:] for name in cards() if name.startswith("infinitebench/")}


def test_a_long_prompt_loses_its_middle(tmp_path: Path) -> None:
    path = written(tmp_path, "passkey", context="noise " * 400)
    item = infinitebench(asking(context_tokens=200), dataset="passkey", path=path)
    assert item.about["cut_tokens"] > 100 and item.questions[0].question.endswith("The pass key is")
    assert item.context.startswith("There is an important info")


def test_a_file_of_the_hub_is_fetched_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fetched = Path(written(tmp_path, "math_find")), []

    def download(hub: str, file: str, **how: Any) -> str:
        fetched.append((hub, file, how["repo_type"]))
        return str(path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    item = infinitebench(asking_words(), dataset="math_find", revision="a stub")
    assert item.questions[0].references == ("88",)
    assert fetched == [("xinrongzhang2022/InfiniteBench", "math_find.jsonl", "dataset")]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    refused("unknown task of InfiniteBench 'passkeys'", infinitebench, asking(), dataset="passkeys")
    for changes, message in (
        ({"answer": "Eve"}, r"the right answer 'Eve' is none of the options \['Ann'"),
        ({"options": ["Ann"]}, r"a question has four options, but got 1: \['Ann'\]"),
    ):
        path = written(tmp_path, "longbook_choice_eng", **changes)
        (tmp_path / "longbook_choice_eng.jsonl").rename(tmp_path / "changed.jsonl")
        refused(message, infinitebench, asking(), dataset="longbook_choice_eng", path=f"{path}/changed.jsonl")
    path = written(tmp_path, "code_run", input="Call it.")
    refused("a question of code_run has 'func_", infinitebench, asking(), dataset="code_run", path=path)


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        ("verbatim", "the value is ab-c.", ("b-c",), 1.0),
        ("verbatim", "AB-C", ("ab-c",), 0.0),
        ("whole_word", '"ab-c": {"x"}', ("ab-c",), 1.0),
        ("whole_word", "xab-c", ("ab-c",), 0.0),
        ("first_digits", "71432 or 5", ("71432",), 1.0),
        ("first_digits", "1234", ("01234",), 0.0),
        ("first_number", "about 4.5", ("4",), 1.0),
        ("first_number", "about 4", ("4.5",), 0.0),
        ("first_number", "-4", ("4",), 1.0),  # a sign is not read
        ("last_number", "returns `-7`.", ("-7",), 1.0),
        ("last_number", "7 is it", ("7",), 0.0),
        ("leading_numbers", "[1, 3, 9]", ("1", "3", "8", "9"), 0.5),
        ("leading_numbers", "1, -3, 4", ("1", "-3", "4"), 1 / 3),  # nor here
        ("speaker", "ace, I think", ("ACE",), 1.0),
        ("speaker", "ACE ROTHSTEIN", ("ACE ROTHSTEIN",), 0.0),
        ("debugged", "B: the loop", ("f", "B"), 1.0),
        ("debugged", "The answer is: f(x)", ("f", "B"), 1.0),
        ("debugged", "The answer is: A", ("f", "B"), 0.0),
        ("debugged", "B", ("f", "B"), 0.0),
        ("chosen_option", "Because", ("Bo", "B"), 1.0),  # its first letter is a B
        ("chosen_option", "It is (the option is B)", ("Bo", "B"), 1.0),
        ("chosen_option", "maybe C", ("Bo", "B"), 0.0),
        ("qa_f1_characters", "是张三！", ("张三",), 0.8),
        ("rouge_lsum", "b a\nc", ("a b c",), 2 / 3),  # of "b a" one, and "c"
        ("rouge_lsum", "a a a a", ("a",), 0.4),
        ("rouge_lsum", "A-b", ("a b",), 1.0),
    ],
)
def test_examples_of_scores(
    metric: str, prediction: str, references: tuple[str, ...], expected: float
) -> None:
    assert METRICS[metric](prediction, references) == pytest.approx(expected)

"""LongBench as released: prompts, truncation, stops, scorers by data set; on rows in the official layout."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retain.eval.tasks.longbench import length_bin, longbench, longbench_v2
from retain.eval.tasks.longbench_prompts import PROMPTS
from retain.eval.tasks.rendering import render
from retain.eval.tasks.task_card import Asking, TextItem
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, measure, tokenizer
from tests.refused import refused

# Of THUDM/LongBench's config/dataset2prompt.json, read as JSON and written with sorted keys.
PROMPTS_SHA256 = "e7d865d712fe45e2455f5e864ac474001d7758d68d349e76ffbcdd382483358f"


def row(**changes: Any) -> dict[str, Any]:
    return {
        **{"input": "Who wrote {it}?", "context": "Some {braces} in a long text. " * 20},
        **{"answers": ["Ann", "Ann Lee"], "length": 3999, "dataset": "any", "language": "en"},
        **{"all_classes": None, "_id": "f00"},
        **changes,
    }


def folder(path: Path, name: str, *rows: dict[str, Any]) -> str:
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows or (row(),))
    (path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return str(path)


def score(name: str, written: TextItem, answer: str) -> float:
    item = render(written, cards()[name], tokenizer(), chat=False)
    return item.asked[0].score(tokenizer()(answer, add_special_tokens=False)["input_ids"])[1]


def test_the_prompts_are_the_official_ones() -> None:
    text = json.dumps({**PROMPTS}, ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPTS_SHA256


@pytest.mark.parametrize("dataset", sorted(PROMPTS))
def test_context_and_question_are_the_official_prompt(dataset: str, tmp_path: Path) -> None:
    path = folder(tmp_path, dataset)
    item = longbench(asking(context_tokens=10_000), dataset=dataset, path=path)
    prompt = PROMPTS[dataset].replace("{context}", row()["context"])
    # The braces of a row are no fields of the prompt.
    if "{input}" in PROMPTS[dataset]:
        assert prompt.count("{input}") == 1
    assert item.context + item.questions[0].question == prompt.replace("{input}", row()["input"])
    assert item.context.endswith(row()["context"])
    assert item.questions[0].references == ("Ann", "Ann Lee")
    uncut = {"cut_tokens": 0.0, "cut_question_tokens": 0.0}
    assert item.about == {"id": "f00", "length": 3999.0, "bin": "0-4k", **uncut}
    assert longbench.size(dataset=dataset, path=path) == 1


@pytest.mark.parametrize("most", [400, 401])
def test_a_long_prompt_loses_its_middle(most: int, tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(400))
    path = folder(tmp_path, "qasper", row(context=text))
    item = longbench(asking(context_tokens=most), dataset="qasper", path=path)
    # As pred.py: tokens of the whole prompt, two halves, decoded apart.
    prompt = PROMPTS["qasper"].replace("{context}", text).replace("{input}", row()["input"])
    ids = tokenizer()(prompt)["input_ids"]
    half = int(most / 2)
    decode = partial(tokenizer().decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert item.context + item.questions[0].question == decode(ids[:half]) + decode(ids[-half:])
    assert item.about["cut_tokens"] == len(ids) - 2 * half > 0 == item.about["cut_question_tokens"]
    again = longbench(asking(context_tokens=10_000), dataset="qasper", path=path, max_tokens=most)
    assert again == item
    # A prompt that is just not too long is left alone.
    whole = longbench(asking(context_tokens=len(ids)), dataset="qasper", path=path)
    assert whole.context.endswith(text) and whole.about["cut_tokens"] == 0


@pytest.mark.parametrize(
    ("context", "behind"),
    [("x " * 500, True), ("a word " * 4, False)],
    ids=["the cut goes across the seam", "the cut is behind the seam"],
)
def test_a_long_question_is_cut_as_officially(context: str, behind: bool, tmp_path: Path) -> None:
    code = "\n".join(f"line_{i} = {i}" for i in range(60))
    path = folder(tmp_path, "repobench-p", row(context=context, input=code))
    prompt = PROMPTS["repobench-p"].replace("{context}", context).replace("{input}", code)
    ids = tokenizer()(prompt)["input_ids"]
    decode = partial(tokenizer().decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    most = 300
    head, tail = decode(ids[: most // 2]), decode(ids[-(most // 2) :])
    item = longbench(asking(context_tokens=most), dataset="repobench-p", path=path)
    question = item.questions[0].question
    assert item.context + question == head + tail
    if behind:
        assert (item.context, question) == (head, tail)
        assert 0 < item.about["cut_question_tokens"] < item.about["cut_tokens"]
    else:
        # Nothing of the question is read with the context.
        assert item.context == prompt[: prompt.index(code)] and question.startswith("line_0")
        assert 0 < item.about["cut_question_tokens"] == item.about["cut_tokens"]
    assert item.about["cut_tokens"] == len(ids) - most


def test_a_prompt_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    how = {"dataset": "qasper", "path": folder(tmp_path, "qasper", row(context="x " * 500))}
    refused(
        r"prompt of \d+ tokens has no two ends in 1: give more", longbench, asking(context_tokens=1), **how
    )
    without = Asking(seed=0, index=0, context_tokens=60, measure=measure)
    refused("cut to 60 tokens, which needs the model's tokenizer", longbench, without, **how)


@pytest.mark.parametrize(
    ("name", "answers", "said", "expected"),
    [
        # Only the first line counts, leading line breaks aside; elsewhere everything does.
        ("trec", ["Code"], "\nCode\nNumber", 1.0),
        ("trec", ["Code"], "Code or Number\n", 0.5),
        ("triviaqa", ["Ann", "Ann Lee"], "Ann\nQuestion: who", 1.0),
        ("samsum", ["a b c"], "a b c\nDialogue: x y z", 1.0),
        ("samsum", ["a b c"], "\na b c", 1.0),
        ("qasper", ["the river", "a sea"], "sea\nriver", 2 / 3),
        ("qasper", ["the river", "a sea"], "", 0.0),
        ("lcc", ["x = 1"], "# a comment\nx = 1\ny", 1.0),
        ("passage_count", ["7"], "7 of 10", 0.5),
        ("passage_retrieval_en", ["Paragraph 3"], "Paragraph 3", 1.0),
    ],
)
def test_scores_follow_the_released_code(
    name: str, answers: list[str], said: str, expected: float, tmp_path: Path
) -> None:
    rows = row(answers=answers, all_classes=["Number", "Number of something", "Code"])
    item = longbench(asking(context_tokens=10_000), dataset=name, path=folder(tmp_path, name, rows))
    assert score(f"longbench/{name}", item, said) == pytest.approx(expected, abs=1e-7)


def test_longbench_e_has_its_own_rows_and_bins(tmp_path: Path) -> None:
    path = folder(tmp_path, "trec_e", row(length=4000), row(length=7999), row(length=8000))
    bins = [longbench(asking(index=i), dataset="trec", even=True, path=path).about["bin"] for i in range(3)]
    assert bins == ["4-8k", "4-8k", "8k+"]
    assert length_bin(3999.0) == "0-4k"
    refused(r"item 3 of .* has 3 items", longbench, asking(index=3), dataset="trec", even=True, path=path)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    ask = partial(longbench, asking(context_tokens=10_000))
    refused("unknown LongBench data set 'qaspar': did you mean 'qasper'", ask, dataset="qaspar")
    refused("unknown LongBench data set 'musique'", ask, dataset="musique", even=True)
    path = folder(tmp_path, "qasper", row(answers="yes"))
    refused("answers of .*, row 0, is to be a list, but is 'yes'", ask, dataset="qasper", path=path)
    short = row()
    del short["all_classes"]
    path = folder(tmp_path, "trec", short)
    refused("no column 'all_classes' in row 0; needed input, context", ask, dataset="trec", path=path)


V2 = {
    **{"_id": "66f", "domain": "Single-Document QA", "sub_domain": "Legal", "difficulty": "hard"},
    **{"length": "short", "question": " What follows? ", "answer": "B", "context": "\nA law. " * 50},
    **{"choice_A": "one ", "choice_B": "two", "choice_C": "three", "choice_D": "four"},
}
# prompts/0shot.txt
PROMPT_V2 = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""


def test_longbench_v2(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([V2]))
    item = longbench_v2(asking(context_tokens=10_000), path=str(tmp_path))
    prompt = PROMPT_V2.replace("$DOC$", V2["context"].strip()).replace("$Q$", "What follows?")
    for letter in "ABCD":
        prompt = prompt.replace(f"$C_{letter}$", V2[f"choice_{letter}"].strip())
    assert item.context + item.questions[0].question == prompt
    assert item.context.endswith("A law.")
    assert item.about["difficulty"] == "hard"
    answers = (
        "The correct answer is (B).",
        "**The correct answer is B**",
        "The correct answer is (C), not (B)",
        "B",
    )
    assert [score("longbench_v2/longbench_v2", item, said) for said in answers] == [1, 1, 0, 0]
    assert longbench_v2.size(path=str(tmp_path)) == 1
    cut = longbench_v2(asking(context_tokens=10_000), path=str(tmp_path), max_tokens=240)
    assert cut.about["cut_tokens"] > 0 and cut.questions == item.questions
    assert cards()["longbench_v2/longbench_v2"].settings == {"max_tokens": 120_000}

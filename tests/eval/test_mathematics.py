"""Problems by name, in the hub's columns: text, instruction, answers, scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.tasks.mathematics import PROBLEMS, mathematics
from retain.eval.tasks.rendering import render
from retain.eval.tasks.text_suite import cards
from tests.eval.asked_in_text import asking, tokenizer
from tests.refused import refused

ROWS = {
    "gsm8k": {"question": "Ann has 9 hens. \n", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"},
    "math_500": {"problem": "Halve 1.", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2},
    "aime24": {"id": 60, "problem": "Find n.", "answer": "073"},
    "aime25": {"problem": "Find n.", "answer": 73, "id": "0"},
}
RIGHT = {
    "gsm8k": "So 18.\n#### 18",
    "math_500": r"\boxed{0.5}",
    "aime24": r"\boxed{73}",
    "aime25": r"\boxed{73}",
}
WRONG = {"gsm8k": "#### 19", "math_500": r"\boxed{2}", "aime24": "74", "aime25": r"\boxed{74}"}
# Source, configuration, part, and how an answer is to end.
OFFICIAL = {
    "gsm8k": ("openai/gsm8k", "main", "test", "####"),
    "math_500": ("HuggingFaceH4/MATH-500", None, "test", r"\boxed{}"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", r"\boxed{}"),
    "aime25": ("math-ai/aime25", None, "test", r"\boxed{}"),
}


@pytest.mark.parametrize("dataset", sorted(PROBLEMS))
def test_a_problem_is_asked_and_scored(dataset: str, tmp_path: Path) -> None:
    (tmp_path / f"{dataset}.jsonl").write_text(json.dumps(ROWS[dataset]))
    item = mathematics(asking(), dataset=dataset, path=str(tmp_path))
    assert item.context == (ROWS[dataset].get("question") or ROWS[dataset]["problem"]).strip()
    assert OFFICIAL[dataset][3] in item.questions[0].question
    assert item.questions[0].references == (str(ROWS[dataset]["answer"]),)
    assert mathematics.size(dataset=dataset, path=str(tmp_path)) == 1
    asked = render(item, cards()[f"mathematics/{dataset}"], tokenizer(), chat=False).asked[0]
    for answer, score in ((RIGHT[dataset], 1.0), (WRONG[dataset], 0.0)):
        ids = tokenizer()(answer, add_special_tokens=False)["input_ids"]
        assert asked.score(ids) == (score, score)


@pytest.mark.parametrize("dataset", sorted(PROBLEMS))
def test_rows_come_from_the_hub_by_name(dataset: str, hub: Any) -> None:
    asked, revision = hub(lambda *names: [ROWS[dataset]]), f"stub {dataset}"
    assert mathematics(asking(), dataset=dataset, revision=revision).context
    assert [(*names, how["split"]) for *names, how in asked] == [OFFICIAL[dataset][:3]]
    refused(r"item 1 of .* has 1 items", mathematics, asking(index=1), dataset=dataset, revision=revision)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    refused("unknown set of problems 'gsm_8k': did you mean 'gsm8k'", mathematics, asking(), dataset="gsm_8k")
    with pytest.raises(TypeError, match="unexpected keyword argument 'datasat'"):
        mathematics.size(dataset="gsm8k", datasat="gsm8k")
    (tmp_path / "aime24.jsonl").write_text(json.dumps(ROWS["gsm8k"]))
    with pytest.raises(
        ValueError, match="no column 'problem' in row 0; needed problem, answer, found answer"
    ):
        mathematics(asking(), dataset="aime24", path=str(tmp_path))

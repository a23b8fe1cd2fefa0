"""Rows of data sets: files of every kind, a stubbed hub, a Python file, and LongBench as released."""

import hashlib
import json
import re
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from retain.eval.tasks.longbench import TASKS
from retain.eval.tasks.sources import load_rows, task_names
from retain.reference import load_tokenizer
from tests.refused import refused

ROWS: list[dict[str, Any]] = [
    {"context": "one\u2028two", "question": "\nq 0?", "answer": "a", "metric": "qa_f1", "task": "first"},
    {"context": "other", "question": "\nq 1?", "answers": ["b", "c"], "max_new_tokens": 9, "task": "second"},
    {"context": "one\u2028two", "question": "\nq 2?", "answers": ["d"], "answer_prefix": "It is"},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {
            name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_text(lines, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_is_a_task(kind: str, tmp_path: Path) -> None:
    task = write(tmp_path / f"mine.{kind}")
    assert task_names([task]) == [task]
    rows = load_rows(task, None, seed=3)
    # Rows that share a context follow each other.
    assert [row.item for row in rows] == [0, 2, 1] and rows[0].context_id == rows[1].context_id
    first, third, second = rows
    assert (first.answers, first.metric, first.max_new_tokens) == (("a",), "qa_f1", 64)
    assert (second.answers, second.metric, second.max_new_tokens) == (("b", "c"), "match_all", 9)
    assert (third.answer_prefix, first.stratum, third.stratum) == ("It is", "first", task)
    assert {row.seed for row in rows} == {0} and {row.length for row in rows} == {None}
    assert load_rows(task, None, first_item=1, items=1) == [second]
    (only,) = load_rows(task, None, only="second", max_new_tokens=3, metric="match_any")
    assert (only.max_new_tokens, only.metric) == (3, "match_any")
    refused("has no rows from number 3 on", load_rows, task, None, first_item=3)


def test_a_python_file_is_a_task(tmp_path: Path) -> None:
    task = tmp_path / "mine.py"
    task.write_text(
        "from retain.eval.tasks.row import Row\n"
        "def rows(tokenizer, *, context_tokens, seed, first_item, items, word='sea'):\n"
        "    return [Row('', f'{word} ' * 9, f'{n}?', (word,), item=n, seed=seed)\n"
        "            for n in range(first_item, first_item + items)]\n"
    )
    rows = load_rows(str(task), None, seed=2, first_item=4, items=2, word="hill")
    assert [(row.task, row.item, row.seed, row.answers) for row in rows] == [
        (str(task), item, 2, ("hill",)) for item in (4, 5)
    ]
    refused("unknown setting of .* 'wort': did you mean 'word'", load_rows, str(task), None, items=1, wort="")
    (tmp_path / "empty.py").write_text("")
    refused("has no function `rows`", load_rows, str(tmp_path / "empty.py"), None)
    refused("there is no file", load_rows, str(tmp_path / "other.py"), None)


def test_the_task_of_the_page_is_rows(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "eval" / "README.md").read_text(encoding="utf-8")
    about = page.partition("## Your own task")[2]
    lines, made = (re.findall(rf"```{kind}\n(.*?)```", about, re.DOTALL)[0] for kind in ("", "python"))
    (tmp_path / "mine.jsonl").write_text(lines)
    (tmp_path / "mine.py").write_text(made)
    assert [row.answers for row in load_rows(str(tmp_path / "mine.jsonl"), None)] == [("mat",), ("key",)]
    first, second = load_rows(str(tmp_path / "mine.py"), None, items=2, town="Bergen")
    assert "House 1 stands in Bergen." in second.context and first.answers == ("Bergen",)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.jsonl", '{"context": 1}\n\n{"context": ', r"a\.jsonl cannot be read: line 3 is not JSON, "),
        ("a.jsonl", "[1]\n", r"is to hold JSON objects"),
        ("a.jsonl", "\n", r"at least one"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read"),
        ("a.jsonl", '{"context": "", "questions": ""}', r"(?s)row 0 of .*missing key 'question'"),
        (
            "a.jsonl",
            '{"context": null, "question": ""}',
            r"(?s)row 0 of .*context: input should be a valid str",
        ),
        ("a.jsonl", '{"context": "", "question": ""}', r"has no right answer"),
        ("a.jsonl", '{"context": "", "question": "", "answer": "a", "metric": "f2"}', r"unknown metric 'f2'"),
    ],
)
def test_broken_files_are_refused(name: str, text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(match, load_rows, str(tmp_path / name), None)
    refused("cannot be read", load_rows, str(tmp_path / "nowhere.jsonl"), None)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock(return_value=ROWS)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub, __spec__="made"))
    rows = load_rows("hub:me/mine", None, split="validation", data_dir="4096", only="second")
    assert [row.item for row in rows] == [1] and rows[0].task == "hub:me/mine"
    where = {"split": "validation", "data_dir": "4096", "name": None, "revision": None}
    hub.assert_called_once_with("me/mine", **where)
    for error in (ConnectionError("no route"), FileNotFoundError("not there"), ValueError("no config")):
        hub.side_effect = error
        refused(
            rf"could not be had from the hub: {type(error).__name__}: {error}", load_rows, "hub:a/b", None
        )


# English and code tasks of THUDM/LongBench's config/dataset2prompt.json, as JSON with sorted keys.
PROMPTS_SHA256 = "75e339f4f58566663b9e2916d85ca7258191b614158272128161675baece6c42"


def longbench(name: str, *rows: dict[str, Any], path: Path, context_tokens: int = 10_000, **how: Any) -> list:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (path / f"{name.rpartition('/')[2]}.jsonl").write_text(lines)
    return load_rows(name, load_tokenizer(), context_tokens=context_tokens, path=str(path), **how)


def released(**changes: Any) -> dict[str, Any]:
    return {
        **{"input": "Who wrote {it}?", "context": "Some {braces} in a long text. " * 20},
        **{"answers": ["Ann", "Ann Lee"], "length": 3999, "dataset": "any", "language": "en"},
        **{"all_classes": None, "_id": "f00"},
        **changes,
    }


def test_the_prompts_are_the_official_ones() -> None:
    text = json.dumps({name: told["prompt"] for name, told in TASKS.items()}, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPTS_SHA256


@pytest.mark.parametrize("name", sorted(TASKS))
def test_context_and_question_are_the_official_prompt(name: str, tmp_path: Path) -> None:
    (row,) = longbench(f"longbench/{name}", released(all_classes=["Ann"]), path=tmp_path)
    prompt = TASKS[name]["prompt"].replace("{context}", released()["context"])
    assert row.context + row.question == prompt.replace("{input}", released()["input"])
    assert row.context.endswith(released()["context"])
    assert (row.answers, row.metric) == (("Ann", "Ann Lee"), TASKS[name]["metric"])
    assert row.extra["cut_tokens"] == 0 and row.extra["classes"] == ["Ann"]
    # Few-shot tasks and code have no chat template; of few-shot answers the first line counts.
    few_shot = name in ("trec", "triviaqa", "samsum")
    assert row.extra.get("chat", True) == (not few_shot and name not in ("lcc", "repobench-p"))
    assert bool(row.extra.get("first_line")) == few_shot


@pytest.mark.parametrize(
    ("context", "code"),
    [(400, 0), (500, 60), (4, 60)],
    ids=["the cut is in the context", "the cut goes across the seam", "the cut is in the question"],
)
def test_a_long_prompt_loses_its_middle_as_officially(context: int, code: int, tmp_path: Path) -> None:
    asked = "\n".join(f"line_{i} = {i}" for i in range(code)) or "Who?"
    text = " ".join(f"word{i}" for i in range(context))
    (row,) = longbench(
        "longbench/repobench-p", released(context=text, input=asked), path=tmp_path, context_tokens=301
    )
    prompt = TASKS["repobench-p"]["prompt"].replace("{context}", text).replace("{input}", asked)
    # As pred.py: tokens of the whole prompt, two halves, decoded apart.
    ids = load_tokenizer()(prompt)["input_ids"]
    decode = partial(load_tokenizer().decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert row.context + row.question == decode(ids[:150]) + decode(ids[-150:])
    assert row.extra["cut_tokens"] == len(ids) - 300
    if context == 4:  # nothing of the question is read with the context
        assert row.context == prompt[: prompt.index(asked)]
    how = {"path": tmp_path, "context_tokens": 1}
    refused(r"prompt of \d+ tokens has no two ends in 1", longbench, "longbench/qasper", released(), **how)


def test_longbench_comes_from_the_zip_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/trec.jsonl", json.dumps(released(all_classes=["a"])) + "\n")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names, **how: tmp_path / "data.zip")
    assert len(load_rows("longbench/trec", load_tokenizer(), context_tokens=9000)) == 1
    refused("lcc could not be had.*path=", load_rows, "longbench/lcc", load_tokenizer())

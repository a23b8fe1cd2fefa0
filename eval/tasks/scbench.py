"""SCBench: several questions on one long context, in its own format, as turns or as requests.

After Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (arXiv 2412.10319) and
microsoft/MInference: `scbench/readme.md` (names, format), `scbench/eval_utils.py` (prompts, lengths) and
`scbench/compute_scores.py`. A row has a `context` and its `multi_turns`, each with `input` and `answer`.
`turns` is its multi-turn mode, in which right answers to earlier questions are read; without, its
multi-request mode (`scdq`), where each question follows on the context alone.

Not as there: a blank stands before an earlier answer, and a blank line before every question, in requests
too; prompts are cut by `cut_middle` over context and first question. In Math.Find the first question stands
before the context, too.

Where an answer is one text, the released scorers of `qa_eng`, `qa_chn` and `many_shot` walk over its letters:
here it is one right answer, and in `choice_eng` the option's letter or text. There an earlier answer is the
option's text, where the release has the row's own `answer`, and a later question ends as the first one does
under a chat template too. `scbench_repoqa` (its scorer parses code and compares it with every function of
the repository), `scbench_repoqa_and_kv` and `scbench_summary_with_needles` (two scorers in one task) are left
out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.longbench import cut_middle
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

OPTIONS = ("A", "B", "C", "D")
_ASKED = "\n\n{input}"
_OPTIONS = "\n\nQuestion: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe "

# Before the context; a question behind it, and one behind an earlier answer, if that differs.
PROMPTS: Mapping[str, Sequence[str]] = {
    "kv": ("Extract the value corresponding to the specified key in the JSON object below.\n\n", _ASKED),
    "prefix_suffix": ("", _ASKED),
    "vt": ("", _ASKED),
    "qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n",
        "\n\nQuestion: {input}\nAnswer:",
    ),
    "qa_chn": ("阅读以下书籍然后回答问题。\n\n", "\n\n问题：{input}\n答案："),
    "choice_eng": (
        "Read the book and answer the question.\n\n",
        f"{_OPTIONS}the correct answer is",
        f"{_OPTIONS}letter of the correct answer is",
    ),
    "many_shot": ("", _ASKED),
    "mf": ("{prefix}\n\n", _ASKED, "\n\n{prefix}\n\n{input}"),
    "summary": ("", _ASKED),
}


def _source(*, dataset: str, turns: bool = True, max_tokens: int | None = None) -> RowSource:
    lookup(dataset, PROMPTS, what="task of SCBench")
    name = f"scbench_{dataset}"
    return RowSource(names=(name,), hub="microsoft/SCBench", columns=("multi_turns",), config=name)


def _write(
    asking: Asking, row: Row, *, dataset: str, turns: bool = True, max_tokens: int | None = None
) -> TextItem:
    """Write one context and its questions.

    Args:
        asking: Which item; `context_tokens` is the most tokens of context and first question.
        row: Of the data set.
        dataset: One of `PROMPTS`.
        turns: Whether questions follow each other, with right answers between.
        max_tokens: As `cut_middle` takes it.

    Raises:
        ValueError: A row without questions or context, or a question that is not in the task's form.
    """
    asked = row["multi_turns"]
    text = row.get("context") or row.get("input")
    if not isinstance(asked, list) or not asked or not text:
        raise ValueError(f"row {asking.index} of scbench_{dataset} has no question or no context.")
    before, first, later = _prompts(dataset, turns)
    fields = [_fields(turn, dataset) for turn in asked]
    questions = [_filled(first, fields[0]), *(_filled(later, own) for own in fields[1:])]
    context, questions[0], cut = cut_middle(
        _filled(before, fields[0]) + text, questions[0], max_tokens, asking
    )
    if turns:  # the frame between turns has the blank line
        questions[1:] = [question.removeprefix("\n\n") for question in questions[1:]]
    return TextItem(
        context=context,
        questions=tuple(
            TextQuestion(question, _references(turn, dataset))
            for question, turn in zip(questions, asked, strict=True)
        ),
        turns=turns,
        about={"id": str(row.get("id", asking.index)), **cut},
    )


def _prompts(dataset: str, turns: bool) -> tuple[str, str, str]:
    """What stands before the context, a first question, and a later one."""
    before, first, *_ = PROMPTS[dataset]
    later = PROMPTS[dataset][-1]
    if turns:
        return before, first, later
    return ("{input}\n\n", later, later) if dataset == "mf" else (before, first, first)


def _fields(turn: Row, dataset: str) -> dict[str, str]:
    asked = str(turn["input"])
    if dataset == "choice_eng":
        return {"input": asked, **_lettered(turn["options"])}
    if dataset == "mf":
        found = re.search("The .+ is", asked)
        if found is None:
            raise ValueError(f"a question of scbench_mf reads 'The ... is', but got {asked!r:.100}.")
        return {"input": asked, "prefix": f"What is {found.group().lower()[:-3]}?"}
    return {"input": asked}


def _filled(template: str, fields: Mapping[str, str]) -> str:
    """A template with its fields in place, in one pass: a text that is filled in is not read again."""
    return re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], template)


def _lettered(options: Sequence[str]) -> dict[str, str]:
    """The four options of a question by letter."""
    if len(options) != len(OPTIONS):
        raise ValueError(f"a question has four options, but got {len(options)}: {list(options)!r:.100}.")
    return dict(zip(OPTIONS, options, strict=True))


def _references(turn: Row, dataset: str) -> tuple[str, ...]:
    """Right answers; of a choice, the option's text and its letter, either of which a row may give."""
    answer: Any = turn["answer"]
    answers = tuple(map(str, answer)) if isinstance(answer, list | tuple) else (str(answer),)
    if dataset != "choice_eng":
        return answers
    named = _lettered(turn["options"])
    for letter, text in named.items():
        if answers[0] == text:
            return text, letter
    if answers[0] in named:
        return named[answers[0]], answers[0]
    raise ValueError(
        f"the right answer {answers[0]!r:.60} is none of the options {list(named.values())!r:.200}."
    )


scbench = RowTask(_source, _write)
GENERATORS = {"scbench": scbench}

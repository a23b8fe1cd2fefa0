r"""InfiniteBench: books, scripts, code, and needles of more than a hundred thousand tokens.

After Zhang et al., "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens" (arXiv 2402.13718)
and OpenBMB/InfiniteBench: `src/prompt.py` (its `yarn_mistral_templates`, which its open models answer,
without a chat template), `src/eval_utils.py`, `src/compute_scores.py`. Too long a prompt loses its middle.

The context ends where the official prompt's document ends. Two prompts name what is asked before it:
Math.Find the question, Code.Run the function.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.longbench import cut_middle
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

OPTIONS = ("A", "B", "C", "D")
_OPTIONS = "".join(f"\n{letter}. {{{letter}}}" for letter in OPTIONS)

# `{context}`, and what `_fields` says of a row.
PROMPTS: Mapping[str, str] = {
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will "
        "quiz you about the important information.\n\n{context}\n\n{input}\n\nThe pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about "
        "the important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is"
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n"
        "{input}"
    ),
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        f"Read the book and answer the question.\n\n{{context}}\n\nQuestion: {{input}}{_OPTIONS}\n\n"
        "The letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
        "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        "Expression: {context}\nValues:"
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the "
        "exact value of {func_call}. The value of {func_call} is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that "
        f"makes it crash.\n\n{{context}}\n\nOptions:{_OPTIONS}\n\nThe correct option is:"
    ),
    "longdialogue_qa_eng": (
        "Below is a dialogue script where one random occurrence of a character name is replaced with "
        '"$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\nThe name that has '
        "been replaced with $$MASK$$ is likely"
    ),
}
CHOICES = ("longbook_choice_eng", "code_debug")
# Tasks that ask the same of every row.
_UNASKED = ("longbook_sum_eng", "longdialogue_qa_eng", "math_calc", "code_debug")


def _source(*, dataset: str, max_tokens: int | None = None) -> RowSource:
    lookup(dataset, PROMPTS, what="task of InfiniteBench")
    asked = () if dataset in _UNASKED else ("input",)
    options = ("options",) if dataset in CHOICES else ()
    return RowSource(
        names=(dataset,),
        hub="xinrongzhang2022/InfiniteBench",
        columns=("context", "answer", *asked, *options),
        file=f"{dataset}.jsonl",
    )


def _write(asking: Asking, row: Row, *, dataset: str, max_tokens: int | None = None) -> TextItem:
    """Write one item of one task.

    Args:
        asking: Which item; `context_tokens` is the most tokens of the whole prompt.
        row: Of the data set.
        dataset: One of `PROMPTS`.
        max_tokens: As `cut_middle` takes it; officially 131,072, or by model.
    """
    opening, closing = PROMPTS[dataset].split("{context}")
    fields = _fields(row, dataset)
    context, question, cut = cut_middle(
        filled(opening, fields) + row["context"], filled(closing, fields), max_tokens, asking
    )
    return TextItem(
        context=context,
        questions=(TextQuestion(question, _references(row, dataset)),),
        about={"id": str(row.get("id", asking.index)), **cut},
    )


def filled(template: str, fields: Mapping[str, str]) -> str:
    """A template with its fields in place, in one pass: a text that is filled in is not read again."""
    return re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], template)


def lettered(options: Sequence[str]) -> dict[str, str]:
    """The four options of a question by letter."""
    if len(options) != len(OPTIONS):
        raise ValueError(f"a question has four options, but got {len(options)}: {list(options)!r:.100}.")
    return dict(zip(OPTIONS, options, strict=True))


def right_option(answer: Any, options: Sequence[str]) -> tuple[str, str]:
    """Text and letter of the right option, of an answer that gives its text, its letter, or both.

    Raises:
        ValueError: The answer is none of the options.
    """
    named = lettered(options)
    first = str(answer[0] if isinstance(answer, list | tuple) else answer)
    for letter, text in named.items():
        if first == text:
            return text, letter
    if first in named:
        return named[first], first
    raise ValueError(f"the right answer {first!r:.60} is none of the options {list(options)!r:.200}.")


def texts_of(answer: Any) -> tuple[str, ...]:
    """Right answers as texts, of one answer or a list of them."""
    return tuple(map(str, answer)) if isinstance(answer, list | tuple) else (str(answer),)


def _fields(row: Row, dataset: str) -> dict[str, str]:
    if dataset in CHOICES:
        return {"input": str(row.get("input") or ""), **lettered(row["options"])}
    if dataset in _UNASKED:
        return {}
    asked = str(row["input"])
    if dataset == "code_run":
        call = _found(r"func_[0-9]+\(-?[0-9]+\)", asked, dataset)
        return {"func_call": call, "func": call.partition("(")[0]}
    if dataset == "math_find":
        target = _found(r"The .+ of", asked, dataset).lower()[:-3]
        return {"input": asked, "prefix": f"What is {target} in the following list?"}
    return {"input": asked}


def _found(pattern: str, asked: str, dataset: str) -> str:
    found = re.search(pattern, asked)
    if found is None:
        raise ValueError(f"a question of {dataset} has {pattern!r} in it, but got {asked!r:.100}.")
    return found.group()


def _references(row: Row, dataset: str) -> tuple[str, ...]:
    answer = row["answer"]
    if dataset in CHOICES:
        return right_option(answer, row["options"])
    if dataset == "math_calc" and isinstance(answer[0], list):
        answer = answer[0]
    right = texts_of(answer)
    # The released scorers of all but these look at the first answer alone.
    several = ("longbook_qa_eng", "longbook_qa_chn", "longbook_sum_eng", "math_calc")
    return right if dataset in several else right[:1]


infinitebench = RowTask(_source, _write)
GENERATORS = {"infinitebench": infinitebench}

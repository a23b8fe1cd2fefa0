"""Mathematical problems with long answers, for eviction while decoding: GSM8K, MATH-500, AIME 2024 and 2025.

The problem is the context, the instruction how to answer the question. GSM8K: Cobbe et al., "Training
Verifiers to Solve Math Word Problems" (arXiv 2110.14168). MATH-500: the 500 problems of "Let's Verify Step by
Step" (arXiv 2305.20050) out of MATH (arXiv 2103.03874).

No few-shot examples: papers on eviction ask zero-shot with an instruction such as these, each in its own
words, and none is official; so the words below are part of a task's version. AIME has 30 problems a year,
each 3.3 points: an interval clusters by problem, over several seeds.
"""

from collections.abc import Mapping

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
MARKED = '\n\nPlease reason step by step, and end with a line that reads "#### " and the number alone.\n'


_COLUMNS = ("problem", "answer")
# Source (its columns are those of the problem and of the right answer; GSM8K's is worked out and ends in
# "#### 18"), text behind the problem, and columns that a table may be split by, where a file has them.
PROBLEMS: Mapping[str, tuple[RowSource, str, tuple[str, ...]]] = {
    "gsm8k": (
        RowSource(("gsm8k", "test"), "openai/gsm8k", ("question", "answer"), config="main"),
        MARKED,
        (),
    ),
    "math_500": (
        RowSource(("math_500", "test"), "HuggingFaceH4/MATH-500", _COLUMNS),
        *(BOXED, ("subject", "level", "unique_id")),
    ),
    "aime24": (
        RowSource(("aime24", "train"), "HuggingFaceH4/aime_2024", _COLUMNS, split="train"),
        *(BOXED, ("id",)),
    ),
    "aime25": (RowSource(("aime25", "test"), "math-ai/aime25", _COLUMNS), BOXED, ("id",)),
}


def _source(*, dataset: str) -> RowSource:
    return lookup(dataset, PROBLEMS, what="set of problems")[0]


def _write(asking: Asking, row: Row, *, dataset: str) -> TextItem:
    """Write one problem of a set. A problem is never cut: `context_tokens` is not used."""
    source, instruction, labels = PROBLEMS[dataset]
    problem, answer = (str(row[column]).strip() for column in source.columns)
    about = {name: str(row[name]) for name in labels if name in row}
    return TextItem(problem, (TextQuestion(instruction, (answer,)),), about=about)


mathematics = RowTask(_source, _write)
GENERATORS = {"mathematics": mathematics}

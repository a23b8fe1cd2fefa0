"""Mathematical problems with long answers, for eviction while decoding: GSM8K, MATH-500, AIME 2024 and 2025.

The problem is the context, the instruction how to answer the question. GSM8K: Cobbe et al., "Training
Verifiers to Solve Math Word Problems" (arXiv 2110.14168). MATH-500: the 500 problems of "Let's Verify Step by
Step" (arXiv 2305.20050) out of MATH (arXiv 2103.03874).

No few-shot examples: papers on eviction ask zero-shot with an instruction such as these, each in its own
words, and none is official; so the words below are part of a task's version. AIME has 30 problems a year,
each 3.3 points: an interval clusters by problem, over several seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
MARKED = '\n\nPlease reason step by step, and end with a line that reads "#### " and the number alone.\n'


@dataclass(frozen=True)
class ProblemSet:
    """Location of a set of problems, and its prompt.

    Attributes:
        source: Where its rows are; its columns are those of the problem and of the right answer (GSM8K's is
            worked out and ends in "#### 18").
        instruction: Text behind the problem.
        about: Columns that a table may be split by, where a file has them.
    """

    source: RowSource
    instruction: str = BOXED
    about: tuple[str, ...] = ()


_COLUMNS = ("problem", "answer")
PROBLEMS: Mapping[str, ProblemSet] = {
    "gsm8k": ProblemSet(
        RowSource(("gsm8k", "test"), "openai/gsm8k", ("question", "answer"), config="main"), MARKED
    ),
    "math_500": ProblemSet(
        RowSource(("math_500", "test"), "HuggingFaceH4/MATH-500", _COLUMNS),
        about=("subject", "level", "unique_id"),
    ),
    "aime24": ProblemSet(
        RowSource(("aime24", "train"), "HuggingFaceH4/aime_2024", _COLUMNS, split="train"), about=("id",)
    ),
    "aime25": ProblemSet(RowSource(("aime25", "test"), "math-ai/aime25", _COLUMNS), about=("id",)),
}


def _source(*, dataset: str) -> RowSource:
    return lookup(dataset, PROBLEMS, what="set of problems").source


def _write(asking: Asking, row: Row, *, dataset: str) -> TextItem:
    """Write one problem of a set. A problem is never cut: `context_tokens` is not used."""
    problems = PROBLEMS[dataset]
    problem, answer = (str(row[column]).strip() for column in problems.source.columns)
    return TextItem(
        context=problem,
        questions=(TextQuestion(problems.instruction, (answer,)),),
        about={name: str(row[name]) for name in problems.about if name in row},
    )


mathematics = RowTask(_source, _write)
GENERATORS = {"mathematics": mathematics}

"""Mathematical problems with long answers, for eviction while decoding: GSM8K, MATH-500, AIME 2024 and 2025.

The problem is the context, the instruction how to answer the question. GSM8K: Cobbe et al., "Training
Verifiers to Solve Math Word Problems" (arXiv 2110.14168). MATH-500: the 500 problems of "Let's Verify Step by
Step" (arXiv 2305.20050) out of MATH (arXiv 2103.03874).

No few-shot examples: papers on eviction ask zero-shot with an instruction such as these, each in its own
words, and none is official; so the words below are part of a task's version. AIME has 30 problems a year,
each 3.3 points: an interval clusters by problem, over several seeds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from retain.eval.tasks.hub_rows import RowSource, load_rows, row_at
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
MARKED = '\n\nPlease reason step by step, and end with a line that reads "#### " and the number alone.\n'


@dataclass(frozen=True)
class ProblemSet:
    """Location of a set of problems, and its prompt.

    Attributes:
        hub: Name of the data set.
        split: Which part of it.
        config: Which of the repository's data sets.
        problem: Column of the problem.
        answer: Column of the right answer; GSM8K's is worked out and ends in "#### 18".
        instruction: What follows the problem.
        about: Columns that a table may be split by, where a file has them.
    """

    hub: str
    split: str
    config: str | None = None
    problem: str = "problem"
    answer: str = "answer"
    instruction: str = BOXED
    about: tuple[str, ...] = ()


PROBLEMS: Mapping[str, ProblemSet] = {
    "gsm8k": ProblemSet(
        hub="openai/gsm8k", split="test", config="main", problem="question", instruction=MARKED
    ),
    "math_500": ProblemSet(
        hub="HuggingFaceH4/MATH-500", split="test", about=("subject", "level", "unique_id")
    ),
    "aime24": ProblemSet(hub="HuggingFaceH4/aime_2024", split="train", about=("id",)),
    "aime25": ProblemSet(hub="math-ai/aime25", split="test", about=("id",)),
}


def mathematics(
    asking: Asking, *, dataset: str, path: str | None = None, revision: str | None = None
) -> TextItem:
    """Write one problem.

    Args:
        asking: Which. A problem is never cut: `context_tokens` is not used.
        dataset: One of `PROBLEMS`.
        path: File or folder on this machine, with the hub's columns.
        revision: Of the hub's repository.

    Raises:
        ValueError: no such set, or rows that cannot be had.
    """
    problems, source = _source(dataset, path, revision)
    row = row_at(load_rows(source, (problems.problem, problems.answer)), asking.index, source)
    about = {name: str(row[name]) for name in problems.about if name in row}
    return TextItem(
        context=str(row[problems.problem]).strip(),
        questions=(
            TextQuestion(question=problems.instruction, references=(str(row[problems.answer]).strip(),)),
        ),
        about=about,
    )


def mathematics_size(*, dataset: str, path: str | None = None, revision: str | None = None) -> int:
    """Number of problems of a set."""
    problems, source = _source(dataset, path, revision)
    return len(load_rows(source, (problems.problem, problems.answer)))


def _source(dataset: str, path: str | None, revision: str | None) -> tuple[ProblemSet, RowSource]:
    problems = lookup(dataset, PROBLEMS, what="set of problems")
    return problems, RowSource(
        names=(dataset, problems.split),
        hub=problems.hub,
        config=problems.config,
        split=problems.split,
        revision=revision,
        path=path,
    )


GENERATORS: Mapping[str, Callable[..., TextItem]] = {"mathematics": mathematics}
SIZES: Mapping[str, Callable[..., int]] = {"mathematics": mathematics_size}

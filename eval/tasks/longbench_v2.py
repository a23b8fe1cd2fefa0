"""LongBench v2: 503 questions with four choices on contexts of 8 thousand to 2 million words.

After Bai et al., "LongBench v2: Towards Deeper Understanding and Reasoning on Realistic Long-context
Multitasks" (arXiv 2412.15204) and THUDM/LongBench: `prompts/0shot.txt`, `pred.py`. The prompt is the official
one without a chain of thought, cut in the middle at 120,000 tokens as there, but answered greedily, where the
released code samples at temperature 0.1.
"""

from collections.abc import Callable, Mapping

from retain.eval.tasks.hub_rows import RowSource, load_rows, row_at
from retain.eval.tasks.longbench import cut_middle
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion

CHOICES = ("A", "B", "C", "D")
COLUMNS = (
    *("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer", "context"),
    *(f"choice_{letter}" for letter in CHOICES),
)
_OPENING = "Please read the following text and answer the question below.\n\n<text>\n"
_CLOSING = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n{choices}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def longbench_v2(
    asking: Asking, *, max_tokens: int | None = None, path: str | None = None, revision: str | None = None
) -> TextItem:
    """Write one item.

    Args:
        asking: Which; `context_tokens` is the most tokens of the whole prompt.
        max_tokens: The most tokens of the whole prompt, if fewer; 120,000 officially.
        path: The official `data.json` (or its folder) on this machine.
        revision: Of the hub's repository.

    Raises:
        ValueError: rows that cannot be had, or a prompt that cannot be cut at all.
    """
    source = _source(path, revision)
    row = row_at(load_rows(source, COLUMNS), asking.index, source)
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}'].strip()}" for letter in CHOICES)
    question = _CLOSING.format(question=row["question"].strip(), choices=choices)
    most = asking.context_tokens if max_tokens is None else min(max_tokens, asking.context_tokens)
    context, question, cut = cut_middle(_OPENING + row["context"].strip(), question, most, asking)
    about = {name: str(row[name]) for name in ("domain", "sub_domain", "difficulty", "length")}
    return TextItem(
        context=context,
        questions=(TextQuestion(question=question, references=(row["answer"].strip(),)),),
        about={"id": str(row["_id"]), **about, **cut},
    )


def longbench_v2_size(
    *, max_tokens: int | None = None, path: str | None = None, revision: str | None = None
) -> int:
    """Number of items."""
    return len(load_rows(_source(path, revision), COLUMNS))


def _source(path: str | None, revision: str | None) -> RowSource:
    return RowSource(
        names=("data", "longbench_v2", "train"),
        hub="THUDM/LongBench-v2",
        file="data.json",
        revision=revision,
        path=path,
    )


GENERATORS: Mapping[str, Callable[..., TextItem]] = {"longbench_v2": longbench_v2}
SIZES: Mapping[str, Callable[..., int]] = {"longbench_v2": longbench_v2_size}

"""Defines a row of a benchmark: one question on one context, and how its answer is scored.

Everything that is asked of a model is a list of rows, from wherever it comes: a generator of this folder, a
file of yours, or a data set on the hub (`retain.eval.tasks.sources`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any


@dataclass(frozen=True)
class Row:
    """A question on a context.

    Attributes:
        task: Name of the task: "niah/grid", "facts/number", "mine.jsonl"; `load_rows` fills it in.
        context: Text that is read, and evicted from.
        question: Text behind the context: the question, with all line breaks around it.
        answers: Right answers; the metric says what several of them mean.
        max_new_tokens: Most tokens of an answer.
        metric: Name in `retain.eval.metrics.METRICS`, of a function `(text, row) -> score in [0, 1]`.
        answer_prefix: Text that the model's answer begins with; "" if nothing.
        length: Tokens of the context that were asked for; None: the context has its natural length.
        context_id: The same for rows that share a context, which is read once for all of them; if it is
            empty, `load_rows` takes a digest of the context.
        item: Number of the row. Policies are compared on pairs of equal (task, seed, item).
        seed: Seed that the row was drawn with; 0 for rows of a data set, which are the same for every seed.
        extra: Labels such as `depth` or `haystack`, and where they are needed: `stratum` (label by which
            statistics are split), `full_answer` (a right answer in full, where it is not `answers[0]`),
            `evidence` (spans `[start, stop)` of characters of the context that hold the answer), `chat`
            (False: no chat template), `stop` (texts that end an answer), `first_line` (True: only the first
            line is scored), `classes` (of the metric `classification`), `token_ids` (of the reference
            model's tasks, which are no text: context, question, answer and evidence in tokens).
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int = 64
    metric: str = "match_all"
    answer_prefix: str = ""
    length: int | None = None
    context_id: str = ""
    item: int = 0
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def stratum(self) -> str:
        """Label by which statistics are split; the task's name unless the row says another."""
        return str(self.extra.get("stratum", self.task))


# Makes rows `first_item` to `first_item + items` (None: all) of a seed; the same arguments, the same rows:
# `(tokenizer, *, context_tokens, seed, first_item, items, **settings) -> list[Row]`.
RowsFunction = Callable[..., list[Row]]


@dataclass(frozen=True)
class Source:
    """A task: what is asked, in one line, a function of rows, and settings as `load_rows` takes them."""

    about: str
    rows: RowsFunction
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """Request for one row: its number, its seed, the most tokens of its context, and the tokenizer of the
    model that will read it."""

    tokenizer: Any
    context_tokens: int
    seed: int
    item: int

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def fit(self, write: Callable[[int], str], *, least: int, what: str, most: int | None = None) -> int:
        """Find the largest number of units whose text fits into the context, by doubling and halving.

        The length need not be quite monotone: the number returned was measured and fits.

        Args:
            write: The text with so many units.
            least: Fewest units.
            what: For the error.
            most: Most tokens, where they are not the context's.

        Raises:
            ValueError: Not even the fewest fit.
        """
        limit = self.context_tokens if most is None else most
        needed = self.count(write(least))
        if needed > limit:
            raise ValueError(
                f"{what} has at least {needed} tokens, more than context_tokens={limit}: ask for a longer "
                "context."
            )
        low, high = least, max(2 * least, 8)
        while self.count(write(high)) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.count(write(middle)) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low


def one_by_one(write: Callable[..., Row]) -> RowsFunction:
    """Make a `RowsFunction` of a function that writes a single row, `(request, **settings) -> Row`."""

    @wraps(write)
    def rows(
        tokenizer: Any, *, context_tokens: int, seed: int, first_item: int, items: int | None, **settings: Any
    ) -> list[Row]:
        if items is None:
            raise ValueError("rows of this task are made as many as are asked for: say how many (items).")
        made = []
        for item in range(first_item, first_item + items):
            row = write(Request(tokenizer, context_tokens, seed, item), **settings)
            made.append(replace(row, item=item, seed=seed, length=row.length or context_tokens))
        return made

    return rows

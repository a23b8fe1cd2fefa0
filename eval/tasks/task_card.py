"""Defines the types of a task in text: its card, its items, and the function that writes them.

A generator gets the context length and a way to measure it, and knows no model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from retain.eval.tasks.suite import Provenance


@dataclass(frozen=True)
class TextQuestion:
    """One question on a context.

    Attributes:
        question: The question, with all text between the context and the model's answer.
        references: Right answers; the scorer says what several mean.
        answer_prefix: Beginning of the model's own answer, behind a chat template's last header.
        about: Labels that a table may be split by.
        scoring: Further arguments of the scorer (`all_classes` of a classification).
        answer: A right answer in full, where it is not the first reference alone.
    """

    question: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    about: Mapping[str, str | float] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""


@dataclass(frozen=True)
class TextItem:
    """One context and its questions.

    Attributes:
        context: Read, and evicted from, before any question is (in the regime `context_only`).
        questions: At least one.
        turns: Whether each question follows on the questions before it and their right answers (a
            conversation), or every one on the context alone (requests).
        needles: Spans `[start, stop)` of characters of the context that hold the answer.
        about: Labels that a table may be split by.
    """

    context: str
    questions: tuple[TextQuestion, ...]
    turns: bool = False
    needles: tuple[tuple[int, int], ...] = ()
    about: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Asking:
    """Request for one item, passed to a generator.

    Attributes:
        seed: Of the run.
        index: Of the item.
        context_tokens: Most tokens of its context.
        measure: How many tokens a text has, to the model that will read it.
        tokenizer: Of that model, where a task is defined by its tokens (truncation in the middle).
    """

    seed: int
    index: int
    context_tokens: int
    measure: Callable[[str], int]
    tokenizer: Any = None

    def fit(
        self, write: Callable[[int], str], *, least: int, what: str, context_tokens: int | None = None
    ) -> int:
        """Find the largest number of units whose text fits into the context, by doubling and halving.

        The length need not be quite monotone: the number returned was measured and fits.

        Args:
            write: The text with so many units.
            least: Fewest units.
            what: For the error.
            context_tokens: Most tokens, where they are not the context's.

        Raises:
            ValueError: Not even the fewest fit.
        """
        limit = self.context_tokens if context_tokens is None else context_tokens
        needed = self.measure(write(least))
        if needed > limit:
            raise ValueError(
                f"{what} has at least {needed} tokens, more than context_tokens={limit}: ask for a longer "
                "context."
            )
        low, high = least, max(2 * least, 8)
        while self.measure(write(high)) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.measure(write(middle)) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low


# Writes the text of one item, `(asking, **settings)`; the same request gives the same item.
Generator = Callable[..., TextItem]


@dataclass(frozen=True)
class Card:
    """Description of a task: `cards/<group>/<task>.yaml`.

    Attributes:
        about: The question, in one line.
        generator: Name in `GENERATORS`.
        metric: Name in `retain.eval.metrics.scorers.METRICS`.
        max_new_tokens: Most tokens of an answer.
        source: Where data and definition come from: a paper, a repository, a data set.
        licence: Of the data.
        checked: Public file that names and columns of the data set were checked against, with its commit, and
            the part that nobody checked; "unverified": all of it; "no data set is read".
        provenance: "official" data, prompts and scorer; "official data", but prompts or scorer of our own;
            "ruler-like": RULER's task on another haystack; "synthetic": generated, under a name of its own.
        version: Raised whenever an item or a score would change.
        settings: Of the generator.
        chat: Whether a chat template is used, where the tokenizer has one.
        stop: Texts that end an answer; what follows is not scored.
        first_line: Whether only the first line of an answer is scored.
    """

    about: str
    generator: str
    metric: str
    max_new_tokens: int
    source: str
    licence: str
    provenance: Provenance
    checked: str = "unverified"
    version: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    stop: tuple[str, ...] = ()
    first_line: bool = False

"""What is asked: suites of tasks, each task one row of a table.

A `Task` says its name, whether gate training saw its family, and what it asks. A `Suite` knows how to make an
item of a task, where the models come from, and the documents that the token-identity control is fitted on.
The one decision taken here: an item is made from (suite, task, seed, index) alone, never from what was made
before it, so that units of work can run in any order, in any process, and again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from retain.registry import lookup

Family = Literal["seen", "held-out"]


@runtime_checkable
class Item(Protocol):
    """One question on one context; `retain.reference.documents.Item` is one."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids of the context."""

    @property
    def question_ids(self) -> tuple[int, ...]:
        """Token ids of the question, at least two."""

    @property
    def gold_ids(self) -> tuple[int, ...]:
        """A right continuation of the question."""

    @property
    def generate(self) -> int:
        """How many tokens to generate."""

    def score(self, generated: Any) -> tuple[float, float]:
        """Exact match and share of the answer found, of generated token ids."""


@runtime_checkable
class Document(Protocol):
    """A context with questions and answers appended; `retain.reference.documents.Document` is one."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids of the context."""

    @property
    def appendix_ids(self) -> tuple[int, ...]:
        """Token ids of what came after the eviction."""


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    Attributes:
        name: As the suite's generator knows it.
        family: "seen" if gates are trained on the family and its formats, "held-out" if they never see it.
        about: What is asked, in one line.
        single_key: Whether one fact of one key answers the question: where a score that sees the question
            must work.
    """

    name: str
    family: Family
    about: str
    single_key: bool = False


@dataclass(frozen=True)
class Suite:
    """Tasks, and where their items and models come from.

    Attributes:
        name: As configs name it.
        tasks: By name, in the order of the report's columns.
        item: `(task name, seed, index, context_tokens) -> Item`.
        documents: `(seed, count, context_tokens) -> Iterator[Document]`, of the families and text that gates
            train on.
        load_model: `(seed) -> causal language model`, in float32 and eval mode.
        seeds: Seeds that a model exists for.
        train_gates: Command that makes the gates of a seed, with `{seed}` and `{gates}` in it.
    """

    name: str
    tasks: Mapping[str, Task]
    item: Callable[[str, int, int, int], Item]
    documents: Callable[[int, int, int], Iterator[Document]]
    load_model: Callable[[int], Any]
    seeds: tuple[int, ...]
    train_gates: str


def load_suite(name: str) -> Suite:
    """Find a suite by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    from retain.eval.tasks.reference import reference_suite

    return lookup(name, {"reference": reference_suite}, what="suite of tasks")()

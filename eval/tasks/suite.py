"""Defines suites of tasks: each task is one row of a table.

A `Task` states its name, whether gate training saw its family, and its question. A `Suite` makes items of a
task, finds models, and provides the documents for the token-identity control. An `Item` is one context with
one or more questions on it, in token ids. An item depends on (suite, task, seed, index) alone, so that units
of work can run in any order, in any process, and again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from retain.reference.documents import Document

Family = Literal["seen", "held-out"]
Provenance = Literal["official", "official data", "ruler-like", "synthetic", "reference", "changed"]


@dataclass(frozen=True)
class Asked:
    """One question on a context.

    Attributes:
        question_ids: Token ids of all that is read behind the context: the question, what stands between it
            and the answer, and in a conversation the questions and right answers before it. At least two.
        gold_ids: A right continuation of the question; of an answer that cannot be written down, any.
        generate: Most tokens to generate.
        score: Exact match (0 or 1) and share of the answer found (0 to 1), of generated token ids.
        text: Text of generated token ids, as it was scored; None where tokens are not text.
        references: Right answers, as text.
        about: Labels that a table may be split by: the turn, a depth, a type of question.
    """

    question_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    generate: int
    score: Callable[[Sequence[int]], tuple[float, float]]
    text: Callable[[Sequence[int]], str] | None = None
    references: tuple[str, ...] = ()
    about: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A context and its questions; each question is asked of the same compressed context.

    Attributes:
        context_ids: Token ids of the context.
        asked: Questions, at least one. Scores see at most the first of them before they evict, as the regime
            says.
        end_ids: Token ids that end an answer; none: every answer has exactly `generate` tokens.
        needles: Spans `[start, stop)` of context tokens that hold the answer, for retention recall.
        about: Labels that a table may be split by: length, depth.
    """

    context_ids: tuple[int, ...]
    asked: tuple[Asked, ...]
    end_ids: tuple[int, ...] = ()
    needles: tuple[tuple[int, int], ...] = ()
    about: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def question_ids(self) -> tuple[int, ...]:
        """Of the first question."""
        return self.asked[0].question_ids

    @property
    def gold_ids(self) -> tuple[int, ...]:
        """Of the first question."""
        return self.asked[0].gold_ids

    @property
    def generate(self) -> int:
        """Of the first question."""
        return self.asked[0].generate

    def score(self, generated: Sequence[int]) -> tuple[float, float]:
        """Of the first question."""
        return self.asked[0].score(generated)


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    Attributes:
        name: As the suite's generator knows it.
        family: "seen" if gates are trained on the family and its formats, "held-out" if they never see it.
        about: The question, in one line.
        primary: Score that the task is judged by: exact match, or the share of the answer found.
        metric: Name of that in reports.
        provenance: Of a card (`retain.eval.tasks.task_card.Card`), with the haystack where it is not RULER's;
            "reference": of the reference model; "changed": a card's task under other settings.
        source, licence, version: Of a card.
        num_items: How many items there are; None: as many as are asked for.
        seeded: Whether every seed has items of its own. Where not, the answers of several seeds to one
            item are one cluster, averaged before anything is tested.
    """

    name: str
    family: Family
    about: str
    primary: Literal["exact", "partial"] = "exact"
    metric: str = "exact match"
    provenance: str = "reference"
    source: str = ""
    licence: str = ""
    version: int = 1
    num_items: int | None = None
    seeded: bool = True


@dataclass(frozen=True)
class Suite:
    """Tasks, and sources of their items and models.

    Attributes:
        name: As configs name it.
        tasks: By name, in the order of the report's columns.
        item: `(task name, seed, index, context_tokens) -> Item`.
        documents: `(seed, count, context_tokens) -> Iterator[Document]`, of the families and text that gates
            train on.
        probes: `(seed, count, context_tokens) -> Iterator[Item]`: items with needles, on which heads of a
            model are measured (`retain.eval.diagnose.head_weights`); never those of tasks.
        load_model: `(seed) -> causal language model`, in eval mode.
        seeds: Seeds that a model exists for; None: any.
        train_gates: Command that makes the gates of a seed, with `{seed}` and `{gates}` in it.
    """

    name: str
    tasks: Mapping[str, Task]
    item: Callable[[str, int, int, int], Item]
    documents: Callable[[int, int, int], Iterator[Document]]
    probes: Callable[[int, int, int], Iterator[Item]]
    load_model: Callable[[int], Any]
    seeds: tuple[int, ...] | None
    train_gates: str

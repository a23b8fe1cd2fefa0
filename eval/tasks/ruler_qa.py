"""Questions on as many documents as fit: RULER's qa_1 (SQuAD) and qa_2 (HotpotQA), and a generated variant.

Numbered documents, those with the answer among others of the same data set, and the question. After Hsieh et
al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654),
NVIDIA/RULER `scripts/data/synthetic/qa.py`; SQuAD 2.0: arXiv 1806.03822; HotpotQA: arXiv 1809.09600, from the
official dev files (`dev-v2.0.json`, `hotpot_dev_distractor_v1.json`) or the same rows on the hub. `synthqa`
needs no data: invented people and towns, asked about one document (one hop) or through one document about
another (two).

The documents of an item are drawn by that item alone, and a shorter context leaves out the last drawn, so the
same question at another length has the same documents or a part of them. The released code draws from one
stream for all items, and shuffles every item's documents by one permutation, so that among `n` documents the
answer always stands at the same place; here its place is drawn anew.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from retain.eval.tasks.hub_rows import RowSource, load_rows, local_file, row_at
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

SOURCES = {
    "squad": RowSource(
        names=("dev-v2.0", "squad", "validation"),
        hub="rajpurkar/squad_v2",
        columns=("title", "context", "question", "answers"),
        split="validation",
    ),
    "hotpotqa": RowSource(
        names=("hotpot_dev_distractor_v1", "hotpotqa", "validation"),
        hub="hotpotqa/hotpot_qa",
        columns=("question", "answer", "context", "supporting_facts"),
        config="distractor",
        split="validation",
    ),
}
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)
OPENING = f"{INSTRUCTION}\n\nThe following are given documents.\n\n"
ANSWER_PREFIX = " Answer:"


@dataclass(frozen=True)
class PooledQuestion:
    """One question on a pool of documents, which are given by their numbers.

    Attributes:
        question: As asked.
        answers: Right answers, any of which will do.
        needed: Documents that are always in the context.
        related: Documents that are put there before unrelated ones: the same article's.
        evidence: Those of `needed` that hold the answer, apart from HotpotQA's eight distractors.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]
    evidence: tuple[int, ...]


class Pool(NamedTuple):
    """Documents, each once and in alphabetical order, and questions in the order of the data set."""

    documents: tuple[str, ...]
    questions: tuple[PooledQuestion, ...]


def load_pool(dataset: str, path: str | None = None, revision: str | None = None) -> Pool:
    """Load all documents and answerable questions of a data set.

    Args:
        dataset: "squad" or "hotpotqa".
        path: The official dev file, or the hub's rows as a file, or a folder with one of them.
        revision: Of the hub's repository.

    Raises:
        ValueError: no such data set, or data that cannot be had or lack a column.
    """
    source = replace(lookup(dataset, SOURCES, what="data set of questions"), path=path, revision=revision)
    return _pool(dataset, source, 0.0 if path is None else local_file(path, source.names).stat().st_mtime)


@lru_cache(maxsize=2)
def _pool(dataset: str, source: RowSource, changed: float) -> Pool:
    return _squad(source) if dataset == "squad" else _hotpot(source)


def _squad(source: RowSource) -> Pool:
    articles: dict[str, dict[str, list[tuple[str, tuple[str, ...]]]]] = {}
    for title, paragraph, question, answers in _squad_questions(source):
        asked = articles.setdefault(title, {}).setdefault(paragraph, [])
        if answers:
            asked.append((question, answers))
    documents = sorted({paragraph for paragraphs in articles.values() for paragraph in paragraphs})
    places = {document: place for place, document in enumerate(documents)}
    questions = []
    for paragraphs in articles.values():
        for paragraph, asked in paragraphs.items():
            own = (places[paragraph],)
            related = tuple(places[other] for other in paragraphs if other != paragraph)
            questions += [PooledQuestion(text, answers, own, related, own) for text, answers in asked]
    return Pool(tuple(documents), tuple(questions))


def _squad_questions(source: RowSource) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Title, paragraph, question and answers, of the official file, which is one object, or of rows."""
    file = None if source.path is None else local_file(source.path, source.names)
    official: Any = None
    if file is not None and file.suffix == ".json":
        try:
            official = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {error.lineno}, is not JSON ({error.msg}): fetch it again."
            ) from error
    if not isinstance(official, dict):
        for row in load_rows(source):
            yield row["title"], row["context"], row["question"], tuple(row["answers"]["text"])
        return
    try:
        for article in official["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = () if asked["is_impossible"] else tuple(a["text"] for a in asked["answers"])
                    yield str(article.get("title", "")), paragraph["context"], asked["question"], answers
    except KeyError as error:
        raise ValueError(
            f"{source} is not SQuAD 2.0: no {error}; wanted data, paragraphs, context, qas, question, "
            "answers and is_impossible."
        ) from error


def _hotpot(source: RowSource) -> Pool:
    rows = load_rows(source)
    contexts = []
    for row in rows:
        own = row["context"]
        # Pairs in the official file, two lists on the hub.
        pairs = zip(own["title"], own["sentences"], strict=True) if isinstance(own, Mapping) else own
        contexts.append([(title, f"{title}\n{''.join(sentences)}") for title, sentences in pairs])
    documents = sorted({document for context in contexts for _, document in context})
    places = {document: place for place, document in enumerate(documents)}
    questions = []
    for row, context in zip(rows, contexts, strict=True):
        facts = row["supporting_facts"]
        titles = {*facts["title"]} if isinstance(facts, Mapping) else {title for title, _ in facts}
        evidence = tuple(places[document] for title, document in context if title in titles)
        needed = tuple(places[document] for _, document in context)
        questions.append(PooledQuestion(row["question"], (row["answer"],), needed, (), evidence))
    return Pool(tuple(documents), tuple(questions))


def ruler_qa(
    asking: Asking, *, dataset: str, path: str | None = None, revision: str | None = None
) -> TextItem:
    """Write a question of SQuAD or HotpotQA among documents of the same data set.

    Args:
        asking: Which question; `context_tokens` is the most tokens of instruction and documents.
        dataset: "squad" or "hotpotqa".
        path: The official dev file (or its folder) on this machine.
        revision: Of the hub's repository.

    Raises:
        ValueError: data that cannot be had, or documents of the question that do not fit.
    """
    pool = load_pool(dataset, path, revision)
    asked = row_at(pool.questions, asking.index, path or dataset)
    draw = random.Random(f"{dataset} {asking.seed} {asking.index}")
    related = draw.sample(asked.related, len(asked.related))
    known = {*asked.needed, *related}

    def others() -> Iterator[str]:
        yield from (pool.documents[place] for place in related)
        # Drawn only if they may fit; a data set has more documents than any context.
        places = draw.sample(range(len(pool.documents)), len(pool.documents))
        yield from (pool.documents[place] for place in places if place not in known)

    needed = [pool.documents[place] for place in asked.needed]
    order = _fitting(needed, others(), asking, what=f"question {asking.index} of {dataset}")
    evidence = {pool.documents[place] for place in asked.evidence}
    return _written(order, evidence, asked.question, asked.answers, draw)


def ruler_qa_size(*, dataset: str, path: str | None = None, revision: str | None = None) -> int:
    """Number of answerable questions of a data set."""
    return len(load_pool(dataset, path, revision).questions)


def synthqa(asking: Asking, *, hops: int = 1) -> TextItem:
    """Write a question on invented people and towns, among as many documents on others as fit.

    Each person was born in a town of their own, and each town lies on a river of its own, so there is one
    right answer. One hop asks for the town a person was born in; two, for the river on which it lies.

    Raises:
        ValueError: another number of hops, or two documents that do not fit.
    """
    if hops not in (1, 2):
        raise ValueError(f"synthqa asks over hops=1 or hops=2 documents, got {hops}.")
    draw = random.Random(f"synthqa {hops} {asking.seed} {asking.index}")
    names = _names(draw)
    person, town, river = next(names), next(names), next(names)
    own = [_person(person, town, draw), _town(town, river, draw)]

    def others() -> Iterator[str]:
        while True:
            a_person, a_town, a_river = next(names), next(names), next(names)
            yield _person(a_person, a_town, draw)
            yield _town(a_town, a_river, draw)

    order = _fitting(own, others(), asking, what="synthqa")
    question, answer = f"In which town was {person} born?", town
    if hops == 2:
        question, answer = f"On which river lies the town where {person} was born?", river
    return _written(order, {*own[:hops]}, question, (answer,), draw)


def _fitting(needed: list[str], more: Iterator[str], asking: Asking, *, what: str) -> list[str]:
    """The needed documents and the longest prefix of the others that fits with them.

    Documents are measured one by one; the sum is not quite the whole's length, and is mended at the end.
    """

    def length(documents: Sequence[str]) -> int:
        return asking.measure(_listed(documents)[0])

    used = length(needed)
    if used > asking.context_tokens:
        raise ValueError(
            f"{what} needs {used} tokens for the {len(needed)} documents that it is about, but a context "
            f"has {asking.context_tokens}: give more (context_tokens)."
        )
    documents = list(needed)
    for document in more:
        used += asking.measure(f"\n\nDocument {len(documents) + 1}:\n{document}")
        if used > asking.context_tokens:
            break
        documents.append(document)
    while length(documents) > asking.context_tokens:
        documents.pop()
    return documents


def _listed(documents: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The context, and where each document stands in it."""
    text, spans = OPENING, []
    for number, document in enumerate(documents, 1):
        text += f"\n\nDocument {number}:\n" if number > 1 else "Document 1:\n"
        spans.append((len(text), len(text) + len(document)))
        text += document
    return text, spans


def _written(
    documents: list[str], evidence: set[str], question: str, answers: tuple[str, ...], draw: random.Random
) -> TextItem:
    order = draw.sample(documents, len(documents))
    context, spans = _listed(order)
    asked = TextQuestion(f"\n\n{INSTRUCTION}\n\nQuestion: {question}", answers, ANSWER_PREFIX)
    return TextItem(
        context=context,
        questions=(asked,),
        needles=tuple(span for document, span in zip(order, spans, strict=True) if document in evidence),
        about={"documents": float(len(documents))},
    )


_STARTS = ("b", "br", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v", "w", "z")
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_ENDS = ("l", "n", "r", "s", "th", "nd", "rk", "x")
_TRADES = ("a baker", "a clockmaker", "a printer", "a sailor", "a surveyor", "a teacher", "a weaver")
_FAME = ("its bridge", "its glass", "its market", "its orchards", "its tower", "its wool")


def _names(draw: random.Random) -> Iterator[str]:
    """Draw names of two or three syllables: none twice, and none that contains one of the first three, which
    are asked about."""
    given: set[str] = set()
    asked: list[str] = []
    while True:
        syllables = "".join(draw.choice(_STARTS) + draw.choice(_MIDDLES) for _ in range(draw.choice((2, 3))))
        name = (syllables + draw.choice(_ENDS)).capitalize()
        if name in given or any(one.lower() in name.lower() or name.lower() in one.lower() for one in asked):
            continue
        given.add(name)
        if len(asked) < 3:
            asked.append(name)
        yield name


def _person(name: str, town: str, draw: random.Random) -> str:
    year = draw.randrange(1700, 1900)
    return (
        f"{name}\n{name} was born in the town of {town} in {year}. {name} worked as {draw.choice(_TRADES)} "
        f"for {draw.randrange(5, 50)} years."
    )


def _town(name: str, river: str, draw: random.Random) -> str:
    return (
        f"{name}\n{name} is a town on the river {river}. It was founded in {draw.randrange(900, 1600)} and "
        f"is known for {draw.choice(_FAME)}."
    )


GENERATORS = {"ruler_qa": ruler_qa, "synthqa": synthqa}

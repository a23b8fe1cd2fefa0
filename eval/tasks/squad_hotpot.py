"""Reads SQuAD 2.0 and HotpotQA as RULER does: a pool of documents, and questions that some of them answer.

From the official dev files (`dev-v2.0.json`, `hotpot_dev_distractor_v1.json`) or the same rows on the hub:
documents, each once and in alphabetical order, and questions in the order of the data set. After NVIDIA/RULER
`scripts/data/synthetic/qa.py`; SQuAD 2.0: arXiv 1806.03822; HotpotQA: arXiv 1809.09600.

A question stores which documents hold its answer, apart from HotpotQA's eight distractors, so that retention
of the evidence can be measured.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from retain.eval.tasks.hub_rows import Row, RowSource, load_rows, local_file
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


@dataclass(frozen=True)
class PooledQuestion:
    """One question on a pool of documents.

    Attributes:
        question: As asked.
        answers: Right answers, any of which will do.
        needed: Documents that are always in the context.
        related: Documents that are put there before unrelated ones: the same article's.
        evidence: Those of `needed` that hold the answer.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """Documents and the questions on them."""

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
    changed = 0.0 if path is None else local_file(path, source.names).stat().st_mtime
    return _pool(dataset, source, changed)


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
            raise ValueError(f"{file}, line {error.lineno}, is not JSON: {error.msg}.") from error
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
    contexts = [_documents(row) for row in rows]
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


def _documents(row: Row) -> list[tuple[str, str]]:
    """(title, document) of each document of a row: pairs in the official file, two lists on the hub."""
    context = row["context"]
    pairs = (
        zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    )
    return [(title, f"{title}\n{''.join(sentences)}") for title, sentences in pairs]

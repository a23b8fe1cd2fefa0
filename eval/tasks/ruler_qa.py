"""Questions on as many documents as fit: RULER's qa_1 (SQuAD) and qa_2 (HotpotQA), and a generated variant.

Numbered documents, those with the answer among others of the same data set, and the question. After Hsieh et
al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654),
NVIDIA/RULER `scripts/data/synthetic/qa.py`. `synthqa` needs no data: invented people and towns, asked about
one document (one hop) or through one document about another (two).

The documents of an item are drawn by that item alone, and a shorter context leaves out the last drawn, so the
same question at another length has the same documents or a part of them. The released code draws from one
stream for all items, and shuffles every item's documents by one permutation, so that among `n` documents the
answer always stands at the same place; here its place is drawn anew.
"""

import random
from collections.abc import Iterator, Sequence

from retain.eval.tasks.hub_rows import row_at
from retain.eval.tasks.squad_hotpot import load_pool
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)
OPENING = f"{INSTRUCTION}\n\nThe following are given documents.\n\n"
ANSWER_PREFIX = " Answer:"


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
        ValueError: Data that cannot be had, or documents of the question that do not fit.
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

    Args:
        asking: Which question.
        hops: 1 or 2.

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

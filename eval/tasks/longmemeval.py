"""LongMemEval: questions on facts mentioned in passing, over many chats with an assistant.

An item has the chats as context, a question, and the spans of the turns that hold the answer: whether a
policy keeps them is measured on the cache itself, without a judge. After Wu et al., "LongMemEval:
Benchmarking Chat Assistants on Long-Term Interactive Memory" (arXiv 2410.10813) and xiaowu0162/LongMemEval:
`run_generation.py`, history in plain text, no chain of thought.

The official score is a judgement of GPT-4o, which is not available offline. The score here is whether the
right answer's words occur in the answer: a lower bound, fit to compare policies on one model, never beside
published numbers. Left out are the questions without an answer ("_abs"), since only the judge can tell a
refusal, and those of the type `single-session-preference`, whose "answer" is a rubric for the judge ("The
user would prefer ...") that no good answer repeats.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from retain.eval.tasks.hub_rows import Row, RowSource, load_rows, row_at
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

COLUMNS = (
    *("question_id", "question_type", "question", "answer", "question_date", "haystack_dates"),
    *("haystack_session_ids", "haystack_sessions", "answer_session_ids"),
)
FILES = {
    "s": "longmemeval_s_cleaned.json",
    "m": "longmemeval_m_cleaned.json",
    "oracle": "longmemeval_oracle.json",
}
_OPENING = (
    "I will give you several history chats between you and a user. Please answer the question based on the "
    "relevant chat history.\n\n\nHistory Chats:\n\n"
)
# "7 days. 8 days (including the last day) is also acceptable." is two right answers.
_ALSO = re.compile(
    r"(?P<one>.+)\.\s+(?P<other>.+?)(?:\s*\([^()]*\))?\s+(?:is|are) also acceptable\.?", re.DOTALL
)
_RUBRICS = "single-session-preference"
_CLOSING = "\n\nCurrent Date: {date}\nQuestion: {question}\nAnswer:"


def longmemeval(
    asking: Asking, *, haystack: str, path: str | None = None, revision: str | None = None
) -> TextItem:
    """Write one question on its history.

    A history that is longer than the context may be keeps every chat that holds the answer, and of the others
    as many as fit, drawn by the item alone; `about` says how many.

    Args:
        asking: Which; the order is a fixed shuffle, since the file is sorted by type of question.
        haystack: "s" (some 115 thousand tokens), "m" (500 chats), or "oracle" (only chats with the answer).
        path: The official file (or its folder) on this machine.
        revision: Of the hub's repository.

    Raises:
        ValueError: no such haystack, rows that cannot be had, or chats with the answer that do not fit.
    """
    source = _source(haystack, path, revision)
    order = _answerable(load_rows(source, COLUMNS))
    row = row_at(order, asking.index, source)
    parts = zip(row["haystack_dates"], row["haystack_session_ids"], row["haystack_sessions"], strict=True)
    # The dates sort as they are written: "2023/05/20 (Sat) 02:21".
    chats = sorted(parts, key=lambda part: str(part[0]))
    kept = _fitting(chats, frozenset(row["answer_session_ids"]), str(row["question_id"]), asking)
    context, needles = _history([chats[place] for place in kept])
    question = _CLOSING.format(date=row["question_date"], question=row["question"])
    return TextItem(
        context=context,
        questions=(TextQuestion(question=question, references=right_answers(str(row["answer"]))),),
        needles=needles,
        about={
            "id": str(row["question_id"]),
            "type": str(row["question_type"]),
            "chats": float(len(kept)),
            "chats_left_out": float(len(chats) - len(kept)),
        },
    )


def longmemeval_size(*, haystack: str, path: str | None = None, revision: str | None = None) -> int:
    """Number of questions that words can answer: without "_abs" and preferences."""
    return len(_answerable(load_rows(_source(haystack, path, revision), COLUMNS)))


def right_answers(answer: str) -> tuple[str, ...]:
    """Alternatives of an answer that names what "is also acceptable", without remarks in brackets.

    Example:
        >>> right_answers("7 days. 8 days (including the last day) is also acceptable.")
        ('7 days', '8 days')
    """
    both = _ALSO.fullmatch(answer.strip())
    return (answer,) if both is None else (both["one"].strip(), both["other"].strip())


def _source(haystack: str, path: str | None, revision: str | None) -> RowSource:
    file = lookup(haystack, FILES, what="haystack of LongMemEval")
    name = file.removesuffix(".json")
    return RowSource(
        names=(name, name.removesuffix("_cleaned")),
        hub="xiaowu0162/longmemeval-cleaned",
        file=file,
        revision=revision,
        path=path,
    )


def _answerable(rows: Sequence[Row]) -> list[Row]:
    kept = [row for row in rows if "_abs" not in str(row["question_id"]) and row["question_type"] != _RUBRICS]
    return [kept[place] for place in _shuffled(len(kept))]


@lru_cache(maxsize=4)
def _shuffled(count: int) -> tuple[int, ...]:
    return tuple(random.Random("longmemeval").sample(range(count), count))


def _history(chats: Sequence[tuple[Any, Any, Any]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The chats as one text, and the character spans of the turns with the answer."""
    pieces, needles, length = [_OPENING], [], len(_OPENING)

    def add(piece: str) -> None:
        nonlocal length
        pieces.append(piece)
        length += len(piece)

    for number, (date, _, turns) in enumerate(chats, 1):
        add(f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n")
        for turn in turns:
            add(f"\n\n{turn['role']}: ")
            content = str(turn["content"]).strip()
            if turn.get("has_answer") and content:
                needles.append((length, length + len(content)))
            add(content)
        add("\n")
    return "".join(pieces), tuple(needles)


def _fitting(
    chats: Sequence[tuple[Any, Any, Any]], wanted: frozenset[Any], item: str, asking: Asking
) -> list[int]:
    """Indices of the chats that fit, in order, with the answer among them."""
    everything = list(range(len(chats)))
    whole = asking.measure(_history(chats)[0])
    if whole <= asking.context_tokens:
        return everything
    needed = [place for place in everything if chats[place][1] in wanted]
    least = asking.measure(_history([chats[place] for place in needed])[0])
    if least > asking.context_tokens:
        raise ValueError(
            f"LongMemEval's {item} needs {least} tokens for the chats that hold its answer, but a context "
            f"has {asking.context_tokens}: give more (context_tokens), or {whole} for the whole history."
        )
    others = [place for place in everything if place not in set(needed)]
    random.Random(item).shuffle(others)
    opening = asking.measure(_OPENING)
    kept, used = list(needed), least
    for place in others:
        length = asking.measure(_history([chats[place]])[0]) - opening
        if used + length <= asking.context_tokens:
            kept.append(place)
            used += length
    # Tokens of pieces do not quite add up to tokens of the whole.
    while asking.measure(_history([chats[place] for place in sorted(kept)])[0]) > asking.context_tokens:
        kept.pop()
    return sorted(kept)


GENERATORS: Mapping[str, Callable[..., TextItem]] = {"longmemeval": longmemeval}
SIZES: Mapping[str, Callable[..., int]] = {"longmemeval": longmemeval_size}

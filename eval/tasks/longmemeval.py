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
from collections.abc import Sequence
from typing import Any

from retain.eval.tasks.hub_rows import Row, RowSource, RowTask
from retain.eval.tasks.task_card import Asking, TextItem, TextQuestion
from retain.registry import lookup

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


def _source(*, haystack: str) -> RowSource:
    file = lookup(haystack, FILES, what="haystack of LongMemEval")
    name = file.removesuffix(".json")
    return RowSource(
        names=(name, name.removesuffix("_cleaned")),
        hub="xiaowu0162/longmemeval-cleaned",
        columns=(
            *("question_id", "question_type", "question", "answer", "question_date", "haystack_dates"),
            *("haystack_session_ids", "haystack_sessions", "answer_session_ids"),
        ),
        file=file,
    )


def _write(asking: Asking, row: Row, *, haystack: str) -> TextItem:
    """Write one question on its history.

    A history that is longer than the context may be keeps every chat that holds the answer, and of the others
    as many as fit, drawn by the item alone; `about` says how many.

    Args:
        asking: Which; the order is a fixed shuffle, since the file is sorted by type of question.
        row: Of the data set.
        haystack: "s" (some 115 thousand tokens), "m" (500 chats), or "oracle" (only chats with the answer).
    """
    parts = zip(row["haystack_dates"], row["haystack_session_ids"], row["haystack_sessions"], strict=True)
    # The dates sort as they are written: "2023/05/20 (Sat) 02:21".
    chats = sorted(parts, key=lambda part: str(part[0]))
    kept = _fitting(chats, frozenset(row["answer_session_ids"]), str(row["question_id"]), asking)
    context, needles = _history([chats[place] for place in kept])
    question = _CLOSING.format(date=row["question_date"], question=row["question"])
    return TextItem(
        context=context,
        questions=(TextQuestion(question, right_answers(str(row["answer"]))),),
        needles=needles,
        about={
            "id": str(row["question_id"]),
            "type": str(row["question_type"]),
            "chats": float(len(kept)),
            "chats_left_out": float(len(chats) - len(kept)),
        },
    )


def right_answers(answer: str) -> tuple[str, ...]:
    """Alternatives of an answer that names what "is also acceptable", without remarks in brackets.

    Examples:
        >>> right_answers("7 days. 8 days (including the last day) is also acceptable.")
        ('7 days', '8 days')
    """
    both = _ALSO.fullmatch(answer.strip())
    return (answer,) if both is None else (both["one"].strip(), both["other"].strip())


def _answerable(rows: Sequence[Row]) -> list[Row]:
    """Questions that words can answer, without "_abs" and preferences, in a fixed shuffled order."""
    kept = [row for row in rows if "_abs" not in str(row["question_id"]) and row["question_type"] != _RUBRICS]
    return random.Random("longmemeval").sample(kept, len(kept))


def _history(chats: Sequence[tuple[Any, Any, Any]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The chats as one text, and the character spans of the turns with the answer."""
    text, needles = _OPENING, []
    for number, (date, _, turns) in enumerate(chats, 1):
        text += f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n"
        for turn in turns:
            text += f"\n\n{turn['role']}: "
            content = str(turn["content"]).strip()
            if turn.get("has_answer") and content:
                needles.append((len(text), len(text) + len(content)))
            text += content
        text += "\n"
    return text, tuple(needles)


def _fitting(
    chats: Sequence[tuple[Any, Any, Any]], wanted: frozenset[Any], item: str, asking: Asking
) -> list[int]:
    """Indices of the chats that fit, in order, with the answer among them."""
    everything = range(len(chats))

    def length(places: Sequence[int]) -> int:
        return asking.measure(_history([chats[place] for place in sorted(places)])[0])

    whole = length(everything)
    if whole <= asking.context_tokens:
        return [*everything]
    kept = [place for place in everything if chats[place][1] in wanted]
    used = length(kept)
    if used > asking.context_tokens:
        raise ValueError(
            f"LongMemEval's {item} needs {used} tokens for the chats that hold its answer, but a context "
            f"has {asking.context_tokens}: give more (context_tokens), or {whole} for the whole history."
        )
    others = [place for place in everything if place not in set(kept)]
    random.Random(item).shuffle(others)
    opening = asking.measure(_OPENING)
    for place in others:
        more = length([place]) - opening
        if used + more <= asking.context_tokens:
            kept.append(place)
            used += more
    # Tokens of pieces do not quite add up to tokens of the whole.
    while length(kept) > asking.context_tokens:
        kept.pop()
    return sorted(kept)


longmemeval = RowTask(_source, _write, _answerable)
GENERATORS = {"longmemeval": longmemeval}

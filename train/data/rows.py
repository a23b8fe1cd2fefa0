"""Turns a row of a data set into a document: reads its columns, encodes them, cuts them.

A row has `text`, or `context` + `question` + `answer`, or `messages` (+ `tools`), or `context_ids` (+
`appendix_ids`), under these names or those of `data.columns`. Nothing is guessed: a row that can be read in
two ways, lacks a column, or holds something else in it is an error that names the row.
"""

import string
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from retain.registry import nearest, suggest
from retain.train.data.chat import Chat, half_character, shown, tools_of, turns
from retain.train.data.document import Document, Encode, fraction_of
from retain.train.data.sources import Row
from retain.train.rules import broken

ROLES = ("text", "context", "question", "answer", "messages", "tools", "context_ids", "appendix_ids")
# How a row can be read: the column that holds the context, and those that may go with it.
FORMS: dict[str, tuple[str, ...]] = {
    "context_ids": ("appendix_ids",),
    "messages": ("tools",),
    "text": (),
    "context": ("question", "answer"),
}
# Tokens are kept in 64 bits with a sign.
LARGEST_ID = 2**63 - 1
CONVERSATIONS = "conversations"  # what ShareGPT calls `messages`
KINDS = (
    "`text`, or `context` + `question` + `answer`, or `messages` (and `tools`), or `context_ids` (and "
    "`appendix_ids`)"
)
# Of a text that is cut, the characters that are encoded for each token that is kept, at first; and tokens
# before the end of what is encoded that the end may have changed.
CHARACTERS = 16
MARGIN = 64
# What a row may leave empty.
OPTIONAL = ("appendix_ids", "tools")


@dataclass(frozen=True)
class Reader:
    """Turns rows into documents.

    Args:
        encode: the model's tokenizer; may be None if rows hold token ids already.
        chat: encodes conversations with the model's template; may be None if there are none.
        columns: role -> column. Empty: columns are looked for under the roles' own names.
        appendix: template of what is written after a context, with `{question}` and `{answer}`.
        max_tokens: longest context.
        max_appendix_tokens: longest appendix (0 = any); longer ones are cut.
        lengths: lengths that text is cut to, one drawn for each document by its hash; empty: `max_tokens`.
        length_weights: how often each of them; empty: alike.
        long: what is done with a context that is longer than it may be: `cut`, `skip`, `error`.
    """

    encode: Encode | None
    chat: Chat | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    appendix: str = "\n{question}\n{answer}"
    max_tokens: int = 2**62
    max_appendix_tokens: int = 0
    lengths: Sequence[int] = ()
    length_weights: Sequence[float] = ()
    long: Literal["cut", "skip", "error"] = "cut"

    def document(self, row: Row) -> Document | None:
        """The row as a document; None if it is too long and such rows are skipped.

        Raises:
            ValueError: naming the row, what is wrong with it, and what to do.
        """
        form, values = self._read(row)
        if form == "context_ids":
            context_ids = _ids(row, "context_ids", values["context_ids"])
            appendix_ids = _ids(row, "appendix_ids", values.get("appendix_ids") or ())
        elif form == "messages":
            context_ids, appendix_ids = self._conversation(row, values["messages"], values.get("tools"))
        else:
            if self.encode is None:
                raise ValueError(
                    f"{row.where} holds text, and the model has no tokenizer to encode it with: give "
                    "context_ids, or save a tokenizer beside the model."
                )
            # One token more than may be kept, so that what is too long shows.
            context_ids = _encoded(self.encode, _text(row, form, values[form]), True, self.max_tokens + 1)
            appendix_ids = ()
            if "answer" in values:
                after = self.appendix.format(
                    question=_text(row, "question", values.get("question", "")),
                    answer=_text(row, "answer", values["answer"]),
                )
                appendix_ids = _encoded(self.encode, after, False, self.max_appendix_tokens)
        if self.max_appendix_tokens:
            appendix_ids = appendix_ids[: self.max_appendix_tokens]
        cut_ids = self._cut(row, form, context_ids)
        return None if cut_ids is None else Document(cut_ids, appendix_ids, row.where)

    def _read(self, row: Row) -> tuple[str, dict[str, Any]]:
        """Which kind of row it is, and the values by role."""
        columns = {**self.columns}
        if not columns:
            columns = {role: role for role in ROLES if role in row.columns}
            if CONVERSATIONS in row.columns and "messages" not in columns:
                columns["messages"] = CONVERSATIONS
            forms = [form for form in FORMS if form in columns]
            needed = set(template_fields(self.appendix))
            if forms == ["context"] and not needed <= columns.keys():
                forms = []
            if not forms:
                near = {role: nearest(role, row.columns) for role in ("text", "messages", "context")}
                role = next((role for role in near if near[role]), "text")
                raise ValueError(
                    f"{row.where} has columns {sorted(row.columns)}; wanted {KINDS}. Name the columns with "
                    f"data.columns, for instance data.columns={{{role}: {near[role] or 'body'}}}."
                )
            if len(forms) > 1:
                raise ValueError(
                    f"{row.where} can be read in {len(forms)} ways, by its columns {forms}: say which with "
                    f"data.columns, for instance data.columns={{{forms[0]}: {columns[forms[0]]}}}."
                )
        missing = [role for role, column in columns.items() if column not in row.columns]
        if missing:
            role = missing[0]
            raise ValueError(
                f"{row.where} has no column {columns[role]!r} (data.columns.{role})"
                f"{suggest(columns[role], row.columns)}; it has {sorted(row.columns)}. Set data.columns to "
                "columns that every row has."
            )
        form = next(form for form in FORMS if form in columns)
        roles = [role for role in (form, *FORMS[form]) if role in columns]
        if form == "context" and "answer" not in roles:
            roles = ["context"]  # a context alone is text
        values = {role: row.values.get(columns[role]) for role in roles}
        empty = [role for role in values if values[role] is None and role not in OPTIONAL]
        if empty:
            raise ValueError(
                f"{row.where}: column {columns[empty[0]]!r} is null. Leave such rows out, or name another "
                "column in data.columns."
            )
        return form, values

    def _conversation(self, row: Row, messages: Any, tools: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            said, known = turns(messages), tools_of(tools)
            if self.chat is None:
                raise ValueError("the model has no tokenizer to encode a conversation with")
            context_ids, appendix_ids = self.chat(said, known) if known else self.chat(said)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}.") from error
        return tuple(context_ids), tuple(appendix_ids)

    def _cut(self, row: Row, form: str, context_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(context_ids) > self.max_tokens:
            if self.long == "skip":
                return None
            # Of a long text no more than one token too many is known.
            least = "at least " if len(context_ids) == self.max_tokens + 1 else ""
            too_long = (
                f"{row.where} has {least}{len(context_ids)} tokens, and data.max_tokens={self.max_tokens}: "
            )
            if self.long == "error":
                raise ValueError(too_long + "raise it, or set data.long to cut or skip.")
            if form == "messages":
                raise ValueError(
                    too_long + "a conversation cannot be cut, as its last question would be lost; set "
                    "data.long=skip, or raise data.max_tokens."
                )
        if form == "messages" or not self.lengths:
            return context_ids[: self.max_tokens]
        return context_ids[: self._length(context_ids[: self.max_tokens])]

    def _length(self, context_ids: tuple[int, ...]) -> int:
        """One of the lengths, drawn by weight with the context's hash: the same in any order and run."""
        ends = list(accumulate(self.length_weights or [1.0] * len(self.lengths)))
        place = bisect(ends, fraction_of(context_ids, "length") * ends[-1])
        return self.lengths[min(place, len(self.lengths) - 1)]


def template_fields(template: str) -> list[str]:
    """The names in braces of a format string.

    Raises:
        ValueError: it is no format string.
    """
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def check_columns(columns: Mapping[str, str], appendix: str) -> list[str]:
    """Problems of `data.columns` and `data.appendix`."""
    try:
        fields = template_fields(appendix)
    except ValueError as error:
        return [f"data.appendix={appendix!r} is no template ({error}): write braces twice to have them"]
    strange = sorted(set(fields) - {"question", "answer"})
    unknown = [role for role in columns if role not in ROLES]
    forms = [form for form in FORMS if form in columns]
    known = (forms[0], *FORMS[forms[0]]) if len(forms) == 1 else ROLES
    loose = [role for role in columns if role in ROLES and role not in known]
    one = len(forms) == 1
    return broken(
        (strange, f"data.appendix has {{{', '.join(strange[:1])}}}; it knows {{question}} and {{answer}}"),
        *(
            (True, f"data.columns.{role}: unknown{suggest(role, ROLES)}; known: {', '.join(ROLES)}")
            for role in unknown
        ),
        (
            columns and not one and not unknown,
            f"data.columns names {forms or 'no context'}: wanted exactly one of {', '.join(FORMS)} in it",
        ),
        (loose, f"data.columns.{', '.join(loose[:1])} does not go with data.columns.{', '.join(forms)}"),
        (
            one and "question" in columns and "answer" not in columns,
            "data.columns.question needs data.columns.answer beside it",
        ),
        (
            one and "answer" in columns and "question" in fields and "question" not in columns,
            "data.columns.answer without data.columns.question needs a data.appendix without {question}, "
            'such as "\\n{answer}"',
        ),
    )


def _encoded(encode: Encode, text: str, special: bool, wanted: int) -> tuple[int, ...]:
    """The first tokens of a text: all of them, or at least as many as are wanted (0: all).

    A text much longer than that is encoded from its beginning on, in pieces that double and end before a
    blank: what is beyond would be cut away, and costs a tokenizer hundreds of bytes a character. Tokens do
    not depend on what follows a few words later, so that the first ones are those of the whole text.
    """
    size = CHARACTERS * (wanted + MARGIN)
    while wanted and size < len(text):
        end = max(text.rfind(" ", size // 2, size), text.rfind("\n", size // 2, size))
        ids = encode(text[: end if end > 0 else size], special)
        if len(ids) >= wanted + MARGIN:
            return tuple(ids[:wanted])
        size *= 2
    return tuple(encode(text, special))


def _ids(row: Row, role: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(type(item) is int and item >= 0 for item in value):
        largest = max(value, default=0)
        if largest > LARGEST_ID:
            raise ValueError(
                f"{row.where}: {role} holds {shown(largest)}, which is no token id: they fit into 63 bits. "
                "Name another column in data.columns, or encode the data again."
            )
        return tuple(value)
    raise ValueError(f"{row.where}: {role} must be a list of token ids from 0, got {shown(value)}.")


def _text(row: Row, role: str, value: Any) -> str:
    if role == "answer" and isinstance(value, int | float):
        value = str(value)
    if role == "answer" and isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if isinstance(value, str):
        if (half := half_character(value)) is not None:
            raise ValueError(f"{row.where}: {role} holds {half}.")
        return value
    raise ValueError(
        f"{row.where}: {role} must be text, got {shown(value)}. Name another column in data.columns, or "
        "write the data again with text in it."
    )

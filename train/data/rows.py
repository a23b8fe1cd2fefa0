"""Turns a row of a data set into a document: reads its columns, encodes them, cuts them.

A row has `text`, or `context` + `question` + `answer`, or `messages` (+ `tools`), or `context_ids` (+
`appendix_ids`), under these names or those of `data.columns`. Nothing is guessed: a row that can be read in
two ways, lacks a column, or holds something else in it is an error that names the row.
"""

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from retain.process.registry import nearest, suggest
from retain.train.data.chat import Chat, half_character, shown, tools_of, turns
from retain.train.data.document import Document, Encode, fraction_of
from retain.train.data.settings import FORMS, ROLES, DataSettings, template_fields
from retain.train.data.sources import Row

# Tokens are kept in 64 bits with a sign.
LARGEST_ID = 2**63 - 1
CONVERSATIONS = "conversations"  # ShareGPT's name of `messages`
KINDS = (
    "`text`, or `context` + `question` + `answer`, or `messages` (and `tools`), or `context_ids` (and "
    "`appendix_ids`)"
)
# Of a text that is cut: characters that are encoded at first for each token that is kept, and tokens before
# the end of an encoded piece that its end may have changed.
CHARACTERS = 16
MARGIN = 64
# Columns that a row may leave empty.
OPTIONAL = ("appendix_ids", "tools")


@dataclass(frozen=True)
class Reader:
    """Turns rows into documents: text by the model's tokenizer (`encode`), conversations by its template
    (`chat`), each None where there is none."""

    settings: DataSettings
    encode: Encode | None
    chat: Chat | None = None

    def document(self, row: Row) -> Document | None:
        """Returns the row as a document; None if it is too long and such rows are skipped.

        Raises:
            ValueError: naming the row, what is wrong with it, and what to do.
        """
        settings = self.settings
        form, values = self._read(row)
        if form == "context_ids":
            context_ids = _ids(row, "context_ids", values["context_ids"])
            appendix_ids = _ids(row, "appendix_ids", values.get("appendix_ids") or ())
        elif form == "messages":
            context_ids, appendix_ids = self._conversation(row, values["messages"], values.get("tools"))
        elif self.encode is None:
            raise ValueError(
                f"{row.where} holds text, and the model has no tokenizer to encode it with: give "
                "context_ids, or save a tokenizer beside the model."
            )
        else:
            # One token more than may be kept, so that what is too long shows.
            wanted = settings.max_tokens + 1
            context_ids = _encoded(self.encode, _text(row, form, values[form]), True, wanted)
            appendix_ids = ()
            if "answer" in values:
                answer = _text(row, "answer", values["answer"])
                asked = {"question": _text(row, "question", values.get("question", ""))}
                appendix = settings.appendix.format(answer=answer, **asked)
                appendix_ids = _encoded(self.encode, appendix, False, settings.max_appendix_tokens)
        if settings.max_appendix_tokens:
            appendix_ids = appendix_ids[: settings.max_appendix_tokens]
        cut_ids = self._cut(row, form, context_ids)
        if cut_ids is None:
            return None
        return Document(cut_ids, appendix_ids, row.where)

    def _read(self, row: Row) -> tuple[str, dict[str, Any]]:
        """The form of a row, and its values by role."""
        columns = {**self.settings.columns} or self._found_columns(row)
        missing = [role for role, column in columns.items() if column not in row.values]
        if missing:
            role = missing[0]
            raise ValueError(
                f"{row.where} has no column {columns[role]!r} (data.columns.{role})"
                f"{suggest(columns[role], row.values)}; it has {sorted(row.values)}. Set data.columns to "
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

    def _found_columns(self, row: Row) -> dict[str, str]:
        """Role -> column of a row whose columns have the roles' own names."""
        columns = {role: role for role in ROLES if role in row.values}
        if CONVERSATIONS in row.values:
            columns.setdefault("messages", CONVERSATIONS)
        forms = [form for form in FORMS if form in columns]
        if forms == ["context"] and not set(template_fields(self.settings.appendix)) <= columns.keys():
            forms = []
        if not forms:
            near = {role: nearest(role, row.values) for role in ("text", "messages", "context")}
            role = next((role for role in near if near[role]), "text")
            raise ValueError(
                f"{row.where} has columns {sorted(row.values)}; wanted {KINDS}. Name the columns with "
                f"data.columns, for instance data.columns={{{role}: {near[role] or 'body'}}}."
            )
        if len(forms) > 1:
            raise ValueError(
                f"{row.where} can be read in {len(forms)} ways, by its columns {forms}: say which with "
                f"data.columns, for instance data.columns={{{forms[0]}: {columns[forms[0]]}}}."
            )
        return columns

    def _conversation(self, row: Row, messages: Any, tools: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            said, known = turns(messages), tools_of(tools)
            if self.chat is None:
                raise ValueError("the model has no tokenizer to encode a conversation with")
            context_ids, appendix_ids = self.chat(said, known)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}.") from error
        return tuple(context_ids), tuple(appendix_ids)

    def _cut(self, row: Row, form: str, context_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """The context at its length; None: it is skipped. Mixed lengths are drawn by weight with the
        context's hash, the same in any order and run."""
        settings, most = self.settings, self.settings.max_tokens
        if len(context_ids) > most:
            if settings.long == "skip":
                return None
            # Of a long text no more than one token too many is known.
            least = "at least " if len(context_ids) == most + 1 else ""
            too_long = f"{row.where} has {least}{len(context_ids)} tokens, and data.max_tokens={most}: "
            if settings.long == "error":
                raise ValueError(too_long + "raise it, or set data.long to cut or skip.")
            if form == "messages":
                raise ValueError(
                    too_long + "a conversation cannot be cut, as its last question would be lost; set "
                    "data.long=skip, or raise data.max_tokens."
                )
        lengths = settings.lengths
        if form == "messages" or not lengths:
            return context_ids[:most]
        ends = list(accumulate(settings.length_weights or [1.0] * len(lengths)))
        place = bisect(ends, fraction_of(context_ids[:most], "length") * ends[-1])
        return context_ids[: min(most, lengths[min(place, len(lengths) - 1)])]


def _encoded(encode: Encode, text: str, special: bool, wanted: int) -> tuple[int, ...]:
    """The first tokens of a text: all of them, or at least as many as are wanted (0: all).

    A text much longer than that is encoded from its beginning on, in pieces that double and end before a
    blank: a tokenizer takes hundreds of bytes a character. Tokens do not depend on what follows a few words
    later, so that the first ones are those of the whole text.
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
    if not isinstance(value, str):
        raise ValueError(
            f"{row.where}: {role} must be text, got {shown(value)}. Name another column in data.columns, or "
            "write the data again with text in it."
        )
    if (half := half_character(value)) is not None:
        raise ValueError(f"{row.where}: {role} holds {half}.")
    return value

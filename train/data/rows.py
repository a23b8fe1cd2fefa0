"""Turns a row of a data set into a document: reads its columns, encodes them, cuts them.

A row has `text`, or `context` + `question` + `answer`, or `messages`, or `context_ids` (+ `appendix_ids`),
under these names or those of `data.columns`. Nothing is guessed: a row that can be read in two ways, lacks a
column, or holds something else in it is an error that names the row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from retain.process.registry import suggest
from retain.train.data.chat import Chat, turns
from retain.train.data.document import Document, Encode, fraction_of
from retain.train.data.settings import FORMS, ROLES, DataSettings
from retain.train.data.sources import Row

# How a question and its answer are written after a context.
APPENDIX = "\n{question}\n{answer}"
# Of a text that is cut: characters that are encoded at first for each token that is kept, and tokens before
# the end of an encoded piece that its end may have changed.
CHARACTERS = 16
MARGIN = 64


@dataclass(frozen=True)
class Reader:
    """Turns rows into documents: text by the model's tokenizer (`encode`), conversations by its template
    (`chat`), each None where there is none."""

    settings: DataSettings
    encode: Encode | None
    chat: Chat | None = None

    def document(self, row: Row) -> Document | None:
        """Returns the row as a document; None if it is a conversation that is too long, and such rows are
        skipped.

        Raises:
            ValueError: naming the row, what is wrong with it, and what to do.
        """
        try:
            form, values = self._read(row.values)
            context_ids, appendix_ids = self._encoded(form, values)
            cut_ids = self._cut(form, context_ids)
        except ValueError as error:
            raise ValueError(f"{row.where}: {str(error).rstrip('.')}.") from error
        return None if cut_ids is None else Document(cut_ids, appendix_ids, row.where)

    def _read(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The form of a row, and its values by role."""
        columns = self.settings.columns or {role: role for role in ROLES if role in row}
        forms = [form for form in FORMS if form in columns]
        loose = self.settings.columns.keys() - {*forms, *(FORMS[forms[0]] if forms else ())}
        if len(forms) != 1 or loose:
            raise ValueError(
                f"columns are {sorted(row)}; wanted exactly one of {', '.join(FORMS)} and what goes with it: "
                f"name it with data.columns, for instance {{text: body}} (got {self.settings.columns})"
            )
        places = {role: columns.get(role, role) for role in (forms[0], *FORMS[forms[0]])}
        for role, column in places.items():
            if row.get(column) is None and role != "appendix_ids":
                raise ValueError(
                    f"column {column!r} (data.columns.{role}) is {'null' if column in row else 'not there'}"
                    f"{suggest(column, row)}; columns are {sorted(row)}. Leave such rows out, or set "
                    "data.columns to columns that every row has"
                )
        return forms[0], {role: row.get(column) for role, column in places.items()}

    def _encoded(self, form: str, values: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of context and appendix."""
        encode, chat = self.encode, self.chat
        if form == "context_ids":
            return _ids(form, values[form]), _ids("appendix_ids", values["appendix_ids"] or ())
        if form == "messages" and chat is not None:
            context, appendix = chat(turns(values[form]))
            return tuple(context), tuple(appendix)
        if form == "messages" or encode is None:
            raise ValueError(
                f"it holds {form}, and the model has no tokenizer to encode it with: give context_ids, or "
                "save a tokenizer beside the model"
            )
        for role, value in values.items():
            if not isinstance(value, str):
                raise ValueError(f"{role} must be text, got {shown(value)} ({type(value).__name__})")
            value.encode()  # half of a surrogate pair, which JSON can hold, is an error that says where
        context_ids = _first_tokens(encode, values.pop(form), self.settings.max_tokens)
        return context_ids, tuple(encode(APPENDIX.format(**values), False)) if values else ()

    def _cut(self, form: str, context_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """The context at its length; None: it is skipped. Mixed lengths are drawn with the context's hash,
        the same in any order and run."""
        settings, most, lengths = self.settings, self.settings.max_tokens, self.settings.lengths
        if form == "messages" and len(context_ids) > most:
            if settings.short == "skip":
                return None
            raise ValueError(
                f"it has {len(context_ids)} tokens, and data.max_tokens={most}: a conversation cannot be "
                "cut, as its last question would be lost; set data.short=skip, or raise data.max_tokens"
            )
        if form == "messages" or not lengths:
            return context_ids[:most]
        return context_ids[: lengths[int(fraction_of(context_ids[:most], "length") * len(lengths))]]


def _first_tokens(encode: Encode, text: str, wanted: int) -> tuple[int, ...]:
    """The first tokens of a text: all of them, or at least as many as are wanted.

    A text much longer than that is encoded from its beginning on, in pieces that double and end before a
    blank: a tokenizer takes hundreds of bytes a character. Tokens do not depend on what follows a few words
    later, so that the first ones are those of the whole text.
    """
    size = CHARACTERS * (wanted + MARGIN)
    while size < len(text):
        end = max(text.rfind(" ", size // 2, size), text.rfind("\n", size // 2, size))
        ids = encode(text[: end if end > 0 else size], True)
        if len(ids) >= wanted + MARGIN:
            return tuple(ids[:wanted])
        size *= 2
    return tuple(encode(text, True))


def _ids(role: str, value: Any) -> tuple[int, ...]:
    # Tokens are kept in 64 bits with a sign.
    if isinstance(value, list | tuple) and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return tuple(value)
    raise ValueError(f"{role} must be a list of token ids from 0, got {shown(value)}")

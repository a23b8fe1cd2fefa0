"""Defines which documents a run reads, and checks that before anything is read."""

import math
import string
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from retain.config import Count, Positive, ProperShare, Tokens, Whole
from retain.process.registry import suggest
from retain.train.settings import broken, refuse, section

ROLES = ("text", "context", "question", "answer", "messages", "tools", "context_ids", "appendix_ids")
# How a row can be read: the column that holds the context, and those that may go with it.
FORMS: dict[str, tuple[str, ...]] = {
    "context_ids": ("appendix_ids",),
    "messages": ("tools",),
    "text": (),
    "context": ("question", "answer"),
}
# The generator writes at most so many times as many documents as are asked for.
MOST_GENERATED = 100


@section
class DataSettings:
    """The source of documents, their split and their lengths."""

    source: Literal["reference", "jsonl", "parquet", "text", "hub"] = "reference"
    """`reference` (generated, seen families only), `jsonl`, `parquet` or `text` (local files), or `hub` (a
    data set by name)."""
    path: str | None = None
    """A local file, a folder or a pattern such as `data/**/*.jsonl`; or the hub data set's name."""
    subset: str | None = None
    """Configuration of the hub data set."""
    split: str = "train"
    """Split of the hub data set."""
    revision: str | None = None
    """Of the hub data set; state it, and the artifact records it."""
    columns: dict[str, str] = field(default_factory=dict)
    """Which column holds `text`, or `context` + `question` + `answer`, or `messages` (+ `tools`), or
    `context_ids` (+ `appendix_ids`): `{text: body}`. Empty: columns have these names."""
    separator: Literal[""] | None = None
    """`text` files: "" splits at blank lines; null: a file is a document."""
    streaming: bool = False
    """Read documents as they are needed, for data that does not fit into memory."""
    shuffle_rows: Count = 1024
    """Streaming: rows that are shuffled among themselves and held in memory."""
    documents: Annotated[int, Field(ge=0, le=10**6)] = 1600
    """How many to train on (`reference`: generated; else at most, the first that there are; 0 = all).
    Streaming reads as many as the steps need, and wants 0."""
    held_out: Annotated[int, Field(ge=0, le=10**6)] = 32
    """How many held-out documents are looked at, for the overlap that is reported."""
    held_out_share: ProperShare = 0.05
    """Share of all contexts, by their hash, that is never trained on. If fewer than `held_out` fall into it,
    the `held_out` of the smallest hash are held out (not of a stream)."""
    min_tokens: Tokens = 256
    """`reference`: shortest context; else: shorter ones are refused or skipped."""
    max_tokens: Tokens = 768
    """Longest context."""
    lengths: tuple[Tokens, ...] = ()
    """Mixed lengths: text is cut to one of these, drawn for each document by its hash; empty: `max_tokens`
    for all."""
    length_weights: tuple[Positive, ...] = ()
    """How often each of `lengths` is drawn; empty: alike."""
    short: Literal["error", "skip"] = "error"
    """A context that is too short is an `error`, or is left out (`skip`)."""
    long: Literal["cut", "skip", "error"] = "cut"
    """A context longer than `max_tokens` is `cut`, left out (`skip`) or an `error`; a conversation is never
    cut."""
    appendix: str = "\n{question}\n{answer}"
    """How a question and its answer are written after the context."""
    max_appendix_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Longest appendix; longer ones are cut (0 = any)."""
    pack_tokens: Whole = 0
    """Most tokens of the documents that share a forward pass (0 = any; `training.micro_batch` bounds their
    number); a longer document has its own."""

    @property
    def documents_needed(self) -> float:
        """Expected number of generated documents that fill both sides of the split."""
        share = self.held_out_share
        return (
            self.documents / (1 - share) + self.held_out / share if self.held_out else float(self.documents)
        )

    def share_longer(self, shortest: int) -> float:
        """Share of generated contexts that are longer than `shortest` tokens."""
        if not self.lengths:
            there = self.max_tokens - max(shortest, self.min_tokens - 1)
            return there / (self.max_tokens - self.min_tokens + 1)
        weights = self.length_weights or (1.0,) * len(self.lengths)
        longer = [weight for weight, n in zip(weights, self.lengths, strict=True) if n > shortest]
        return math.fsum(longer) / math.fsum(weights)


def check_data(settings: DataSettings) -> None:
    """Raises ValueError with all settings that contradict each other, before anything is read."""
    source, lengths, weights = settings.source, settings.lengths, settings.length_weights
    reference, least, most = source == "reference", settings.min_tokens, settings.max_tokens
    # Which keys mean something for some sources only.
    only = {
        **dict.fromkeys(("path", "columns", "streaming"), ("jsonl", "parquet", "text", "hub")),
        **{"subset": ("hub",), "revision": ("hub",), "separator": ("text",)},
    }
    outside = [n for n in lengths if not least <= n <= most]
    generated = settings.documents_needed > MOST_GENERATED * (settings.documents + settings.held_out)
    refuse(
        *(
            (
                getattr(settings, name) not in (None, False, {}) and source not in sources,
                f"data.{name} means nothing for data.source={source}, only for {', '.join(sources)}: leave "
                "it out",
            )
            for name, sources in only.items()
        ),
        (
            not reference and not settings.path,
            f"data.source={source} needs data.path (a local file, folder or pattern, or a hub data set's "
            "name)",
        ),
        (
            reference and settings.documents < 1,
            f"data.documents={settings.documents}: the generator needs to know how many, at least 1",
        ),
        (
            source == "text" and settings.columns,
            "data.columns means nothing for data.source=text: a text file has no columns",
        ),
        (
            settings.streaming and settings.documents,
            "data.streaming reads as many documents as the steps need: set data.documents=0 (got "
            f"{settings.documents})",
        ),
        (least > most, f"data.min_tokens={least} must be at most data.max_tokens={most}"),
        (
            outside,
            f"data.lengths has {', '.join(map(str, outside[:1]))}; all must be between "
            f"data.min_tokens={least} and data.max_tokens={most}",
        ),
        (
            weights and len(weights) != len(lengths),
            f"data.length_weights has {len(weights)} numbers and data.lengths has {len(lengths)}",
        ),
        (
            reference and generated,
            f"data.held_out_share={settings.held_out_share:g}: too many documents would have to be "
            f"generated for data.held_out={settings.held_out} and data.documents={settings.documents}: "
            "take 0.05",
        ),
        found=_check_columns(settings.columns, settings.appendix),
    )


def check_lengths(settings: DataSettings, horizon: int) -> None:
    """Raises ValueError where no context would be longer than the horizon, before anything is read."""
    lengths = settings.lengths or (settings.max_tokens,)
    name = "data.lengths" if settings.lengths else "data.max_tokens"
    if max(lengths) <= horizon:
        raise ValueError(
            f"{name}={max(lengths)} and target.horizon={horizon}: no context would be longer than the "
            "horizon, and nearer entries are never evicted. Raise the one, or lower the other."
        )
    longer = settings.share_longer(horizon)
    if settings.source == "reference" and longer < (1 if settings.short == "error" else 1 / MOST_GENERATED):
        name = name if settings.lengths else "data.min_tokens"
        raise ValueError(
            f"{name} and target.horizon={horizon}: of the contexts that would be generated {longer:.1%} are "
            "longer than the horizon. Raise the one, lower the other, or set data.short=skip."
        )


def template_fields(template: str) -> list[str]:
    """Returns the names in braces of a format string; raises ValueError if it is none."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def _check_columns(columns: Mapping[str, str], appendix: str) -> list[str]:
    """Problems of `data.columns` and `data.appendix`."""
    try:
        fields = template_fields(appendix)
    except ValueError as error:
        return [f"data.appendix={appendix!r} is no template ({error}): write braces twice to have them"]
    strange = sorted(set(fields) - {"question", "answer"})
    unknown = [role for role in columns if role not in ROLES]
    forms = [form for form in FORMS if form in columns]
    one = len(forms) == 1
    known = (forms[0], *FORMS[forms[0]]) if one else ROLES
    loose = [role for role in columns if role in ROLES and role not in known]
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

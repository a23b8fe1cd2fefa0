"""Defines which documents a run reads, and checks that before anything is read."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from retain.config import Count, ProperShare, Tokens, Whole
from retain.train.settings import refuse, section

# How a row can be read: the column that holds the context, and those that go with it.
FORMS: dict[str, tuple[str, ...]] = {
    "context_ids": ("appendix_ids",),
    "messages": (),
    "text": (),
    "context": ("question", "answer"),
}
ROLES = tuple(role for form, others in FORMS.items() for role in (form, *others))


@section
class DataSettings:
    """The source of documents, their split and their lengths."""

    source: Literal["reference", "jsonl", "hub"] = "reference"
    """`reference` (generated, seen families only), `jsonl` (local files), or `hub` (a data set by name, or a
    local folder, of parquet for instance, as `datasets` loads it)."""
    path: str | None = None
    """jsonl: a file, a folder or a pattern such as `data/**/*.jsonl`; hub: a name or a folder."""
    subset: str | None = None
    """Configuration of the hub data set."""
    split: str = "train"
    """Split of the hub data set."""
    revision: str | None = None
    """Of the hub data set; state it, and the artifact records it."""
    columns: dict[str, str] = field(default_factory=dict)
    """Which column holds `text`, or `context` (+ `question`, `answer`), or `messages`, or `context_ids` (+
    `appendix_ids`): `{text: body}`. Empty: columns have these names."""
    streaming: bool = False
    """Read documents as they are needed, for data that does not fit into memory."""
    shuffle_rows: Count = 1024
    """Streaming: rows that are shuffled among themselves and held in memory."""
    documents: Annotated[int, Field(ge=0, le=10**6)] = 1600
    """How many to train on (`reference`: generated; else at most, the first that there are; 0 = all).
    Streaming reads as many as the steps need, and wants 0."""
    held_out: Annotated[int, Field(ge=0, le=10**6)] = 32
    """How many held-out documents are looked at."""
    held_out_share: ProperShare = 0.05
    """Share of all contexts, by their hash, that is never trained on. If fewer than `held_out` fall into it,
    the `held_out` of the smallest hash are held out (not of a stream)."""
    min_tokens: Tokens = 256
    """`reference`: shortest context; else: shorter ones are refused or skipped."""
    max_tokens: Tokens = 768
    """Longest context; a longer one is cut, but for a conversation, whose question would be lost."""
    lengths: tuple[Tokens, ...] = ()
    """Mixed lengths: text is cut to one of these, drawn for each document by its hash (one that is listed
    twice, twice as often); empty: `max_tokens` for all."""
    short: Literal["error", "skip"] = "error"
    """A context that is too short, or a conversation that is too long, is an `error` or left out (`skip`)."""
    pack_tokens: Whole = 0
    """Most tokens of the documents that share a forward pass (0 = any; `training.micro_batch` bounds their
    number); a longer document has its own."""


def check_data(settings: DataSettings) -> None:
    """Raises ValueError with all settings that contradict each other, before anything is read."""
    source, least, most = settings.source, settings.min_tokens, settings.max_tokens
    reference = source == "reference"
    # Which keys mean something for some sources only.
    only = {"path": "jsonl, hub", "lengths": "jsonl, hub", "columns": "jsonl, hub"}
    only |= dict.fromkeys(("subset", "revision", "streaming"), "hub")
    outside = [n for n in settings.lengths if not least <= n <= most]
    refuse(
        *(
            (
                getattr(settings, name) and source not in sources,
                f"data.{name} means nothing for data.source={source}, only for {sources}: leave it out",
            )
            for name, sources in only.items()
        ),
        (
            not reference and not settings.path,
            f"data.source={source} needs data.path (files of jsonl, or a data set's name or folder)",
        ),
        (
            reference and settings.documents < 1,
            f"data.documents={settings.documents}: the generator needs to know how many, at least 1",
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
    )

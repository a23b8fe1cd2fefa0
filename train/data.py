"""Documents to learn from: where they come from, which of them are held out, and in which order they are
read.

In: settings (`data:` of a run's YAML) and the model's tokenizer. Out: a corpus, in memory or streaming, of
tokenised `Document`s. The one decision taken here: which side of the split a document falls on depends on its
context's tokens alone.

What is guaranteed of the split, with a given `data.held_out_share` > 0 and `data.held_out` > 0: no context is
on both sides, so the same context with another question or answer is on the same side; and a held-out context
stays so in any order of the data, when data is added or taken away, for other seeds, and for any number of
processes. What is not: two contexts that differ in one token are two contexts. So after another tokenizer,
template, `max_tokens` or `lengths` the sides are drawn anew; one conversation's first turns may be on the
other side than the whole of it; and documents of the reference generator take their filler from windows of
one stream of text, which can overlap.

The pieces: `documents` (what a document is), `sources` (rows), `rows` and `chat` (from a row to a document),
`corpus` and `streaming` (the order), `packing` (which process, which forward pass). This module is where
they are put together, and where others import them from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, assert_never

import numpy as np
from tqdm import tqdm

from retain.train.chat import Chat, chat_of
from retain.train.corpus import Corpus
from retain.train.documents import Batch, Document, Encode, collate, held_out_fraction
from retain.train.packing import num_packs, packs, share_of
from retain.train.rows import Reader, check_columns
from retain.train.sources import Hub, LocalFiles, Source
from retain.train.streaming import StreamingCorpus

__all__ = [
    "AnyCorpus",
    "Batch",
    "Chat",
    "Corpus",
    "DataSettings",
    "Document",
    "Encode",
    "StreamingCorpus",
    "chat_of",
    "check_data",
    "collate",
    "held_out_fraction",
    "load_corpus",
    "num_packs",
    "packs",
    "share_of",
]

AnyCorpus = Corpus | StreamingCorpus
Check = Callable[[Document], None]


@dataclass(frozen=True)
class DataSettings:
    """Where documents come from.

    Args:
        source: `reference` (generated, seen families only), `jsonl`, `parquet` or `text` (local files), or
            `hub` (a data set by name).
        path: a local file, a folder or a pattern such as `data/**/*.jsonl`; or the hub data set's name.
        subset: configuration of the hub data set.
        split: split of the hub data set.
        revision: of the hub data set; state it, and the artifact records it.
        columns: which column holds `text`, or `context` + `question` + `answer`, or `messages` (+
            `tools`), or `context_ids` (+ `appendix_ids`): `{text: body}`. Empty: the columns have these
            very names.
        separator: `text` files: where one document ends (none: a file is a document; "": at blank lines).
        streaming: read documents as they are needed, for data that does not fit into memory.
        shuffle_rows: streaming: rows that are shuffled among themselves and held in memory.
        documents: how many to train on (`reference`: generated; else at most, the first that there are;
            0 = all). Streaming reads as many as the steps need, and wants 0.
        held_out: how many held-out documents are looked at, for the overlap that is reported.
        held_out_share: share of all contexts, by their hash, that is never trained on.
        min_tokens: `reference`: shortest context; else: shorter ones are refused or skipped.
        max_tokens: longest context.
        lengths: mixed lengths: text is cut to one of these, drawn for each document by its hash; empty:
            `max_tokens` for all.
        length_weights: how often each of `lengths` is drawn; empty: alike.
        short: what to do with a context that is too short: `error` or `skip`.
        long: what to do with a context longer than `max_tokens`: `cut`, `skip` or `error`; a conversation is
            never cut.
        appendix: how a question and its answer are written after the context.
        max_appendix_tokens: longest appendix; longer ones are cut (0 = any).
        pack_tokens: most tokens of the documents that share a forward pass (0 = any; `training.micro_batch`
            bounds their number); a longer document has its own.
    """

    source: Literal["reference", "jsonl", "parquet", "text", "hub"] = "reference"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    separator: str | None = None
    streaming: bool = False
    shuffle_rows: int = 1024
    documents: int = 1600
    held_out: int = 32
    held_out_share: float = 0.05
    min_tokens: int = 256
    max_tokens: int = 768
    lengths: tuple[int, ...] = ()
    length_weights: tuple[float, ...] = ()
    short: Literal["error", "skip"] = "error"
    long: Literal["cut", "skip", "error"] = "cut"
    appendix: str = "\n{question}\n{answer}"
    max_appendix_tokens: int = 0
    pack_tokens: int = 0


def check_data(settings: DataSettings) -> None:
    """Settings that contradict each other, before anything is read.

    Raises:
        ValueError: with all problems.
    """
    local = settings.source in ("jsonl", "parquet", "text")
    problems = check_columns(settings.columns, settings.appendix)
    if settings.source != "reference" and not settings.path:
        problems.append(
            f"data.source={settings.source} needs data.path (a local file, folder or pattern, or a hub data "
            "set's name)"
        )
    if settings.source == "reference":
        if settings.documents < 1:
            problems.append(
                f"data.documents={settings.documents}: the generator needs to know how many, at least 1"
            )
        for name in ("streaming", "columns", "path"):
            if getattr(settings, name):
                problems.append(
                    f"data.{name} means nothing for generated documents: set data.source "
                    "(jsonl, parquet, text, hub), or leave it out"
                )
    if settings.separator is not None and settings.source != "text":
        problems.append(f"data.separator is for data.source=text, not {settings.source}")
    if settings.separator and "\n" in settings.separator:
        problems.append('data.separator must be within a line; "" splits at blank lines')
    if settings.source == "text" and settings.columns:
        problems.append("data.columns means nothing for data.source=text: a text file has no columns")
    if local and (settings.subset or settings.revision):
        problems.append(f"data.subset and data.revision are for data.source=hub, not {settings.source}")
    if settings.streaming and settings.documents:
        problems.append(
            f"data.streaming reads as many documents as the steps need: set data.documents=0 (got "
            f"{settings.documents})"
        )
    if settings.shuffle_rows < 1:
        problems.append(f"data.shuffle_rows={settings.shuffle_rows} must be at least 1 (1 = no shuffling)")
    if not 1 <= settings.min_tokens <= settings.max_tokens:
        problems.append(
            f"data.min_tokens={settings.min_tokens} must be between 1 and "
            f"data.max_tokens={settings.max_tokens}"
        )
    outside = [n for n in settings.lengths if not settings.min_tokens <= n <= settings.max_tokens]
    if outside:
        problems.append(
            f"data.lengths has {outside[0]}; all must be between data.min_tokens={settings.min_tokens} and "
            f"data.max_tokens={settings.max_tokens}"
        )
    weights = settings.length_weights
    if weights and len(weights) != len(settings.lengths):
        problems.append(
            f"data.length_weights has {len(weights)} numbers and data.lengths has {len(settings.lengths)}"
        )
    if weights and not all(0 < weight < float("inf") for weight in weights):
        problems.append(f"data.length_weights={list(weights)} must be positive")
    for name in ("documents", "held_out", "max_appendix_tokens", "pack_tokens"):
        if getattr(settings, name) < 0:
            problems.append(f"data.{name}={getattr(settings, name)} must not be negative")
    if not 0 < settings.held_out_share < 1:
        problems.append(
            f"data.held_out_share={settings.held_out_share} must be between 0 and 1 (data.held_out=0 holds "
            "nothing out)"
        )
    if problems:
        raise ValueError("; ".join(problems) + ".")


def load_corpus(
    settings: DataSettings,
    *,
    shortest: int,
    seed: int,
    batch_documents: int = 1,
    encode: Encode | None,
    chat: Chat | None = None,
    check: Check | None = None,
    progress: bool = False,
) -> AnyCorpus:
    """Read or generate all documents, or begin a stream of them.

    Args:
        settings: where from.
        shortest: a context must be longer than this (the horizon: nearer entries are never evicted).
        seed: of the generator and of the order; not of the split.
        batch_documents: documents of a step, over all processes.
        encode: the model's tokenizer; may be None if rows hold token ids already.
        chat: encodes conversations (`chat_of(tokenizer)`); may be None if there are none.
        check: called with every document when it is read (a stream's: during training); raises what the model
            cannot take.
        progress: show a bar.

    Returns:
        a corpus; duplicates of context and appendix are dropped, but for those of a stream.

    Raises:
        ValueError: an empty data set, a file that is damaged, a document that is too short, rows without the
            columns that are needed, a hub that cannot be reached.
        FileNotFoundError: a file that is not there.
    """
    check_data(settings)
    shortest = max(shortest, settings.min_tokens - 1)
    if not settings.streaming:
        documents = _documents(settings, seed, encode, chat)
        return _in_memory(settings, documents, shortest, seed, batch_documents, check, progress)

    def usable(document: Document) -> bool:
        if len(document.context_ids) <= shortest:
            if settings.short == "skip":
                return False
            raise ValueError(f"{_too_short(document, shortest)} {_LONGER}")
        if check is not None:
            check(document)
        return True

    deciding = ("columns", "lengths", "length_weights", "short", "long", "appendix", "max_appendix_tokens")
    return StreamingCorpus(
        _source(settings),
        _reader(settings, encode, chat),
        usable,
        held_out=settings.held_out,
        held_out_share=settings.held_out_share,
        batch_documents=batch_documents,
        shuffle_rows=settings.shuffle_rows,
        seed=seed,
        settings={
            **{name: getattr(settings, name) for name in deciding},
            "tokens": [shortest + 1, settings.max_tokens],
            "held_out": [settings.held_out, settings.held_out_share],
            "order": [settings.shuffle_rows, batch_documents, seed],
        },
        progress=progress,
    )


_LONGER = (
    "(target.horizon, data.min_tokens: nearer entries are never evicted). Use longer documents, "
    "data.short=skip, or a smaller target.horizon."
)


def _too_short(document: Document, shortest: int) -> str:
    return (
        f"{document.origin} is too short: its context has {len(document.context_ids)} tokens, and more than "
        f"{shortest} are needed"
    )


def _in_memory(
    settings: DataSettings,
    documents: Iterator[Document],
    shortest: int,
    seed: int,
    batch_documents: int,
    check: Check | None,
    progress: bool,
) -> Corpus:
    """Read until both sides have what they want, or to the end."""
    share = settings.held_out_share if settings.held_out else 0.0
    train: dict[Document, None] = {}
    held_out: dict[Document, None] = {}
    short: list[Document] = []
    read = 0
    total = settings.documents + settings.held_out if settings.documents else None
    with tqdm(total=total, desc="documents", disable=not progress, leave=False) as bar:
        for document in documents:
            read += 1
            if len(document.context_ids) <= shortest:
                short.append(document)
                continue
            side = held_out if held_out_fraction(document.context_ids) < share else train
            full = side is train and settings.documents and len(train) >= settings.documents
            if not full and document not in side:
                if check is not None:
                    check(document)
                side[document] = None
                bar.update()
            if settings.documents and len(train) >= settings.documents and len(held_out) >= settings.held_out:
                break
    if short and settings.short == "error":
        raise ValueError(
            f"{len(short)} of {read} documents are too short: {_too_short(short[0], shortest)} {_LONGER}"
        )
    if not train and not held_out:
        raise ValueError(
            f"empty data set: {settings.path or 'the generator'!r} gives {read} documents, none of them "
            "usable. Check data.path, data.min_tokens, data.short and data.long."
        )
    if not train or len(held_out) < settings.held_out:
        raise ValueError(_too_few(settings, [*train, *held_out], len(held_out)))
    looked_at = sorted(held_out, key=lambda document: (held_out_fraction(document.context_ids), document.key))
    return Corpus(tuple(train), tuple(looked_at[: settings.held_out]), batch_documents, seed)


def _too_few(settings: DataSettings, documents: list[Document], held_out: int) -> str:
    """Says which share would hold enough out, if any does."""
    fractions = sorted(held_out_fraction(document.context_ids) for document in documents)
    start = (
        f"too few documents: data.held_out_share={settings.held_out_share:g} of {len(documents)} usable "
        f"documents from {settings.path or 'the generator'!r} holds out {held_out}, leaving "
        f"{len(documents) - held_out} to train on; data.held_out={settings.held_out} documents are wanted, "
        "and at least one to train on. "
    )
    if settings.held_out < len(fractions) and fractions[settings.held_out - 1] < fractions[settings.held_out]:
        share = np.ceil(fractions[settings.held_out - 1] * 1000 + 1) / 1000
        if share <= fractions[settings.held_out]:
            return start + f"data.held_out_share={share:g} does for these."
    return start + "Use more documents, another data.held_out_share, or hold out fewer."


def _documents(
    settings: DataSettings, seed: int, encode: Encode | None, chat: Chat | None
) -> Iterator[Document]:
    if settings.source == "reference":
        yield from _reference_documents(settings, seed)
        return
    reader = _reader(settings, encode, chat)
    for row in _source(settings).open():
        document = reader.document(row)
        if document is not None:
            yield document


def _reader(settings: DataSettings, encode: Encode | None, chat: Chat | None) -> Reader:
    return Reader(
        encode,
        chat,
        columns=settings.columns,
        appendix=settings.appendix,
        max_tokens=settings.max_tokens,
        max_appendix_tokens=settings.max_appendix_tokens,
        lengths=settings.lengths,
        length_weights=settings.length_weights,
        long=settings.long,
    )


def _source(settings: DataSettings) -> Source:
    path = settings.path or ""
    match settings.source:
        case "hub":
            return Hub(path, settings.subset, settings.split, settings.revision)
        case "jsonl" | "parquet" | "text":
            wanted = tuple(settings.columns.values())
            return LocalFiles(path, settings.source, separator=settings.separator, wanted=wanted)
        case "reference":
            raise AssertionError("generated documents have no rows")
        case never:
            assert_never(never)


def _reference_documents(settings: DataSettings, seed: int) -> Iterator[Document]:
    """Documents without end: the split's hash decides how many are needed."""
    from retain.reference.documents import Writer, distill_document

    writer = Writer(split="train", seed=seed)
    draws = np.random.default_rng([seed, 2])
    weights = np.array(settings.length_weights or [1.0] * len(settings.lengths))
    number = 0
    while True:
        if settings.lengths:
            length = int(draws.choice(settings.lengths, p=weights / weights.sum()))
        else:
            length = int(draws.integers(settings.min_tokens, settings.max_tokens + 1))
        written = distill_document(writer, length)
        number += 1
        yield Document(
            tuple(written.context_ids), tuple(written.appendix_ids), f"generated document {number}"
        )

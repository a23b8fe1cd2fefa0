"""Loads the documents of a run as a corpus: in memory or streaming, split into trained-on and held-out.

A document's side of the split depends on its context's tokens alone. With a given `data.held_out_share` > 0
and `data.held_out` > 0, no context is on both sides, and a held-out context stays so in any order of the
data, when data is added or removed, for other seeds, and for any number of processes. (A set too small for
that share to hold out `data.held_out` documents holds out more; when data is added they may be trained on.)
Two contexts that differ in one token are two contexts: after another tokenizer, template, `max_tokens` or
`lengths` the sides are drawn anew, one conversation's first turns may be on the other side than the whole of
it, and documents of the reference generator take their filler from windows of one text, which can overlap.

This module puts `document`, `sources`, `rows`, `chat`, `corpus` and `packing` together; others import them
from here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

import numpy as np
from tqdm import tqdm

from retain.config import Count, Positive, ProperShare, Range, Tokens, Whole
from retain.train.data.chat import Chat, chat_of
from retain.train.data.corpus import Corpus, StreamingCorpus
from retain.train.data.document import Batch, Document, Encode, collate, held_out_fraction
from retain.train.data.packing import num_packs, packs, share_of
from retain.train.data.rows import Reader, check_columns
from retain.train.data.sources import Hub, LocalFiles, Source
from retain.train.rules import broken, refuse

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
    """The source of documents, their split and their lengths.

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
        held_out_share: share of all contexts, by their hash, that is never trained on. Where that holds out
            fewer than `held_out`, as many as that are, those of the smallest hash (not of a stream).
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
    shuffle_rows: Count = 1024
    documents: Annotated[int, Range(least=0, most=10**6)] = 1600
    held_out: Annotated[int, Range(least=0, most=10**6)] = 32
    held_out_share: ProperShare = 0.05
    min_tokens: Tokens = 256
    max_tokens: Tokens = 768
    lengths: tuple[Tokens, ...] = ()
    length_weights: tuple[Positive, ...] = ()
    short: Literal["error", "skip"] = "error"
    long: Literal["cut", "skip", "error"] = "cut"
    appendix: str = "\n{question}\n{answer}"
    max_appendix_tokens: Annotated[int, Range(least=0, most=2**24)] = 0
    pack_tokens: Whole = 0


def check_data(settings: DataSettings) -> None:
    """Settings that contradict each other, before anything is read.

    Raises:
        ValueError: with all problems.
    """
    reference, local = settings.source == "reference", settings.source in ("jsonl", "parquet", "text")
    outside = [n for n in settings.lengths if not settings.min_tokens <= n <= settings.max_tokens]
    weights, wanted = settings.length_weights, settings.documents + settings.held_out
    refuse(
        check_columns(settings.columns, settings.appendix)
        + broken(
            (
                not reference and not settings.path,
                f"data.source={settings.source} needs data.path (a local file, folder or pattern, or a hub "
                "data set's name)",
            ),
            (
                reference and settings.documents < 1,
                f"data.documents={settings.documents}: the generator needs to know how many, at least 1",
            ),
            *(
                (
                    reference and getattr(settings, name),
                    f"data.{name} means nothing for generated documents: set data.source "
                    "(jsonl, parquet, text, hub), or leave it out",
                )
                for name in ("streaming", "columns", "path")
            ),
            (
                settings.separator is not None and settings.source != "text",
                f"data.separator is for data.source=text, not {settings.source}",
            ),
            (
                "\n" in (settings.separator or ""),
                'data.separator must be within a line; "" splits at blank lines',
            ),
            (
                settings.source == "text" and settings.columns,
                "data.columns means nothing for data.source=text: a text file has no columns",
            ),
            (
                local and (settings.subset or settings.revision),
                f"data.subset and data.revision are for data.source=hub, not {settings.source}",
            ),
            (
                settings.streaming and settings.documents,
                "data.streaming reads as many documents as the steps need: set data.documents=0 (got "
                f"{settings.documents})",
            ),
            (
                settings.min_tokens > settings.max_tokens,
                f"data.min_tokens={settings.min_tokens} must be at most "
                f"data.max_tokens={settings.max_tokens}",
            ),
            (
                outside,
                f"data.lengths has {', '.join(map(str, outside[:1]))}; all must be between "
                f"data.min_tokens={settings.min_tokens} "
                f"and data.max_tokens={settings.max_tokens}",
            ),
            (
                weights and len(weights) != len(settings.lengths),
                f"data.length_weights has {len(weights)} numbers and data.lengths has "
                f"{len(settings.lengths)}",
            ),
            (
                reference and _documents_needed(settings) > MOST_GENERATED * wanted,
                f"data.held_out_share={settings.held_out_share:g}: too many documents would have to be "
                f"generated for data.held_out={settings.held_out} and data.documents={settings.documents}: "
                "take 0.05",
            ),
        )
    )


def check_lengths(settings: DataSettings, horizon: int) -> None:
    """Refuse lengths of which no context is longer than the horizon, before anything is read.

    Raises:
        ValueError: saying which.
    """
    lengths = settings.lengths or (settings.max_tokens,)
    name = "data.lengths" if settings.lengths else "data.max_tokens"
    if max(lengths) <= horizon:
        raise ValueError(
            f"{name}={max(lengths)} and target.horizon={horizon}: no context would be longer than the "
            "horizon, and nearer entries are never evicted. Raise the one, or lower the other."
        )
    longer = _share_longer(settings, horizon)
    if settings.source == "reference" and longer < (1 if settings.short == "error" else 1 / MOST_GENERATED):
        name = name if settings.lengths else "data.min_tokens"
        raise ValueError(
            f"{name} and target.horizon={horizon}: of the contexts that would be generated {longer:.1%} are "
            "longer than the horizon. Raise the one, lower the other, or set data.short=skip."
        )


# Of what is asked for, how many times as many documents are generated at most.
MOST_GENERATED = 100


def _documents_needed(settings: DataSettings) -> float:
    """Expected number of generated documents that fill both sides of the split."""
    if not settings.held_out:
        return float(settings.documents)
    share = settings.held_out_share
    return settings.documents / (1 - share) + settings.held_out / share


def _share_longer(settings: DataSettings, shortest: int) -> float:
    """Share of generated contexts that are longer than this."""
    if not settings.lengths:
        there = settings.max_tokens - max(shortest, settings.min_tokens - 1)
        return there / (settings.max_tokens - settings.min_tokens + 1)
    weights = settings.length_weights or (1.0,) * len(settings.lengths)
    longer = [own for own, n in zip(weights, settings.lengths, strict=True) if n > shortest]
    return math.fsum(longer) / math.fsum(weights)


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
    short, first_short, read = 0, None, 0
    # Generated documents have no end, and some are too short, or were written before.
    most = math.inf
    if settings.source == "reference":
        most = (4 * _documents_needed(settings) + 1000) / max(
            _share_longer(settings, shortest), 1 / MOST_GENERATED
        )
    total = settings.documents + settings.held_out if settings.documents else None
    with tqdm(total=total, desc="documents", disable=not progress, leave=False) as bar:
        for document in documents:
            if read >= most:
                break
            read += 1
            if len(document.context_ids) <= shortest:
                short, first_short = short + 1, first_short or document
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
    if first_short is not None and settings.short == "error":
        raise ValueError(
            f"{short} of {read} documents are too short: {_too_short(first_short, shortest)} {_LONGER}"
        )
    if not train and not held_out:
        raise ValueError(
            f"empty data set: {settings.path or 'the generator'!r} gives {read} documents, none of them "
            "usable. Check data.path, data.min_tokens, data.short and data.long."
        )
    if read >= most and (len(train) < settings.documents or len(held_out) < settings.held_out):
        raise ValueError(
            f"too few documents: of {read} that were generated, {len(train)} can be trained on and "
            f"{len(held_out)} held out, beside those that are alike; data.documents={settings.documents} and "
            f"data.held_out={settings.held_out} are wanted. Ask for fewer, or raise data.max_tokens."
        )
    usable = sorted((*train, *held_out), key=lambda one: (held_out_fraction(one.context_ids), one.key))
    if 0 < settings.held_out < len(usable) and (not train or len(held_out) < settings.held_out):
        # As many as are asked for, and what has the same context as the last of them.
        last = held_out_fraction(usable[settings.held_out - 1].context_ids)
        everything = (*train, *held_out)
        held_out = {one: None for one in usable if held_out_fraction(one.context_ids) <= last}
        train = {one: None for one in everything if one not in held_out}
        if progress:
            tqdm.write(
                f"data.held_out_share={settings.held_out_share:g} of {len(usable)} documents does not give "
                f"data.held_out={settings.held_out}: {len(held_out)} are held out, {len(train)} trained on"
            )
    if not train or len(held_out) < settings.held_out:
        raise ValueError(
            f"too few documents: {settings.path or 'the generator'!r} gives {len(usable)} that are usable "
            f"and differ, data.held_out={settings.held_out} are to be held out, and one at least is needed "
            "to train on. Use more documents, or hold out fewer (0: none)."
        )
    looked_at = [one for one in usable if one in held_out]
    return Corpus(tuple(train), tuple(looked_at[: settings.held_out]), batch_documents, seed)


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

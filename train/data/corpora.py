"""Loads the documents of a run as a corpus: in memory or streaming, split into trained-on and held-out.

A document's side of the split depends on its context's tokens alone. With a given `data.held_out_share` > 0
and `data.held_out` > 0, no context is on both sides, and a held-out context stays so in any order of the
data, when data is added or removed, for other seeds, and for any number of processes. (A set too small for
that share to hold out `data.held_out` documents holds out more; when data is added they may be trained on.)
Two contexts that differ in one token are two contexts: after another tokenizer, template, `max_tokens` or
`lengths` the sides are drawn anew, one conversation's first turns may be on the other side than the whole of
it, and documents of the reference generator take their filler from windows of one text, which can overlap.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from retain.train.data.chat import Chat
from retain.train.data.corpus import Corpus, StreamingCorpus
from retain.train.data.document import Document, Encode, held_out_fraction
from retain.train.data.rows import Reader
from retain.train.data.settings import MOST_GENERATED, DataSettings, check_data
from retain.train.data.sources import Hub, LocalFiles, Source

AnyCorpus = Corpus | StreamingCorpus
Check = Callable[[Document], None]
_LONGER = (
    "(target.horizon, data.min_tokens: nearer entries are never evicted). Use longer documents, "
    "data.short=skip, or a smaller target.horizon."
)


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
    """Reads or generates all documents, or begins a stream of them; duplicates of context and appendix are
    dropped, but for those of a stream.

    Args:
        shortest: a context must be longer than this (the horizon: nearer entries are never evicted).
        seed: of the generator and of the order; not of the split.
        batch_documents: documents of a step, over all processes.
        encode: the model's tokenizer; may be None if rows hold token ids already.
        chat: encodes conversations (`chat_of(tokenizer)`); may be None if there are none.
        check: called with every document when it is read (a stream's: during training); raises what the model
            cannot take.

    Raises:
        ValueError: an empty data set, a file that is damaged, a document that is too short, rows without the
            columns that are needed, a hub that cannot be reached.
        FileNotFoundError: a file that is not there.
    """
    check_data(settings)
    shortest = max(shortest, settings.min_tokens - 1)
    reader = Reader(settings, encode, chat)

    def usable(document: Document) -> bool:
        if len(document.context_ids) <= shortest:
            if settings.short == "skip":
                return False
            raise ValueError(f"{_too_short(document, shortest)} {_LONGER}")
        if check is not None:
            check(document)
        return True

    if settings.streaming:
        return StreamingCorpus(
            _source(settings),
            reader,
            usable,
            tokens=(shortest + 1, settings.max_tokens),
            batch_documents=batch_documents,
            seed=seed,
            progress=progress,
        )
    source = None if settings.source == "reference" else _source(settings)
    documents = _documents(reader, source, seed)
    train, held_out = _both_sides(settings, documents, shortest, check, progress)
    usable_ones = sorted((*train, *held_out), key=lambda one: (held_out_fraction(one.context_ids), one.key))
    if 0 < settings.held_out < len(usable_ones) and (not train or len(held_out) < settings.held_out):
        # As many as are asked for, and what has the same context as the last of them.
        last = held_out_fraction(usable_ones[settings.held_out - 1].context_ids)
        everything = (*train, *held_out)
        held_out = {one: None for one in usable_ones if held_out_fraction(one.context_ids) <= last}
        train = {one: None for one in everything if one not in held_out}
        if progress:
            tqdm.write(
                f"data.held_out_share={settings.held_out_share:g} of {len(usable_ones)} documents does not "
                f"give data.held_out={settings.held_out}: {len(held_out)} are held out, {len(train)} trained "
                "on"
            )
    if not train or len(held_out) < settings.held_out:
        raise ValueError(
            f"too few documents: {settings.path or 'the generator'!r} gives {len(usable_ones)} that are "
            f"usable and differ, data.held_out={settings.held_out} are to be held out, and one at least is "
            "needed to train on. Use more documents, or hold out fewer (0: none)."
        )
    looked_at = [one for one in usable_ones if one in held_out]
    commit = None if source is None else source.commit
    return Corpus(tuple(train), tuple(looked_at[: settings.held_out]), batch_documents, seed, commit)


def _too_short(document: Document, shortest: int) -> str:
    return (
        f"{document.origin} is too short: its context has {len(document.context_ids)} tokens, and more than "
        f"{shortest} are needed"
    )


def _both_sides(
    settings: DataSettings, documents: Iterator[Document], shortest: int, check: Check | None, progress: bool
) -> tuple[dict[Document, None], dict[Document, None]]:
    """Training and held-out documents: read until both sides have as many as are wanted, or to the end."""
    wanted, wanted_held_out = settings.documents, settings.held_out
    share = settings.held_out_share if wanted_held_out else 0.0
    train: dict[Document, None] = {}
    held_out: dict[Document, None] = {}
    short, first_short, read = 0, None, 0
    # Generated documents have no end, and some are too short, or were written before.
    most = math.inf
    if settings.source == "reference":
        longer = max(settings.share_longer(shortest), 1 / MOST_GENERATED)
        most = (4 * settings.documents_needed + 1000) / longer
    total = wanted + wanted_held_out if wanted else None
    with tqdm(total=total, desc="documents", disable=not progress, leave=False) as bar:
        for document in documents:
            if read >= most:
                break
            read += 1
            if len(document.context_ids) <= shortest:
                short, first_short = short + 1, first_short or document
                continue
            side = held_out if held_out_fraction(document.context_ids) < share else train
            full = side is train and wanted and len(train) >= wanted
            if not full and document not in side:
                if check is not None:
                    check(document)
                side[document] = None
                bar.update()
            if wanted and len(train) >= wanted and len(held_out) >= wanted_held_out:
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
    if read >= most and (len(train) < wanted or len(held_out) < wanted_held_out):
        raise ValueError(
            f"too few documents: of {read} that were generated, {len(train)} can be trained on and "
            f"{len(held_out)} held out, beside those that are alike; data.documents={wanted} and "
            f"data.held_out={wanted_held_out} are wanted. Ask for fewer, or raise data.max_tokens."
        )
    return train, held_out


def _documents(reader: Reader, source: Source | None, seed: int) -> Iterator[Document]:
    if source is None:
        yield from _reference_documents(reader.settings, seed)
        return
    for row in source.open():
        if (document := reader.document(row)) is not None:
            yield document


def _source(settings: DataSettings) -> Source:
    path = settings.path or ""
    if settings.source == "hub":
        return Hub(path, settings.subset, settings.split, settings.revision)
    assert settings.source != "reference", "generated documents have no rows"
    wanted = tuple(settings.columns.values())
    return LocalFiles(path, settings.source, separator=settings.separator, wanted=wanted)


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
        origin = f"generated document {number}"
        yield Document(written.context_ids, written.appendix_ids, origin)

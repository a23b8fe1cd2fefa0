"""Loads documents, splits them into trained-on and held-out, and draws those of each step.

**Split.** A document's side depends on its context's tokens alone: its hash against `data.held_out_share`. So
a held-out context stays so in any order of the data, when data is added or removed, for other seeds, and for
any number of processes. (A set too small for that share to hold out `data.held_out` documents holds out
more.) Two contexts that differ in one token are two contexts: after another tokenizer, template, `max_tokens`
or `lengths` the sides are drawn anew.

**Order.** In memory, the documents of a step are a pure function of (seed, step), so a resumed run reads on
without any state. A stream is cut into blocks of `shuffle_rows` rows, and block b of pass e is read in the
order of a permutation drawn from (seed, e, b): the state is where the block began and how far it has been
read, at the price of reading at most one block again. (The shuffle buffer of `datasets` would have to be
saved with its content.) Every process reads the same rows and works on its share of their documents.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from retain.train.data.chat import Chat
from retain.train.data.document import Document, Encode, held_out_fraction, tokens_digest
from retain.train.data.rows import Reader
from retain.train.data.settings import MOST_GENERATED, DataSettings, check_data
from retain.train.data.sources import Dataset, JsonLines, Row, Source

FIRST_DOCUMENTS = 16  # by which a stream is known, besides its settings
# Settings that decide which documents a stream has.
DECIDING = ("columns", "lengths", "length_weights", "short", "long", "appendix", "max_appendix_tokens")

Usable = Callable[[Document], bool]
Check = Callable[[Document], None]
_LONGER = (
    "(target.horizon, data.min_tokens: nearer entries are never evicted). Use longer documents, "
    "data.short=skip, or a smaller target.horizon."
)


@dataclass(frozen=True)
class Corpus:
    """All documents at once; `batch_documents` a step, over all processes, in an order by the seed. `commit`
    is that of the hub data set they were read from; None: not known, or another source."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    batch_documents: int = 1
    seed: int = 0
    commit: str | None = None

    @property
    def num_documents(self) -> int:
        return len(self.train)

    def documents_of(self, step: int) -> list[Document]:
        """Documents of step `step` (from 0), over all processes: a new shuffle each time through the
        corpus."""
        count = len(self.train)
        places = range(step * self.batch_documents, (step + 1) * self.batch_documents)
        epochs = range(places[0] // count, places[-1] // count + 1)
        order = {epoch: np.random.default_rng([self.seed, 3, epoch]).permutation(count) for epoch in epochs}
        return [self.train[order[place // count][place % count]] for place in places]

    def state(self) -> dict[str, Any]:
        """Nothing has to be kept: a step needs no history."""
        return {"kind": "in memory"}

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Accepts the state of a corpus in memory; ValueError: that of a stream."""
        _check_kind(state, "in memory")

    def describe(self) -> str:
        """Returns the SHA-256 of all tokens of both sides, in order."""
        sides = tokens_digest(self.train) + tokens_digest(self.held_out)
        return hashlib.sha256(sides.encode()).hexdigest()


class StreamingCorpus:
    """Documents of a stream, pass after pass.

    Args:
        reader: turns rows into documents; of its settings held_out, held_out_share and shuffle_rows count.
        usable: False for a document that is to be skipped; raises for one that is an error.
        tokens: fewest and most of a context.

    Raises:
        ValueError: the stream holds fewer documents than are wanted, or one that cannot be read.
    """

    def __init__(
        self,
        source: Source,
        reader: Reader,
        usable: Usable,
        *,
        tokens: tuple[int, int],
        batch_documents: int,
        seed: int,
        progress: bool = False,
    ) -> None:
        settings = reader.settings
        held_out = settings.held_out
        self.source, self.reader, self.usable = source, reader, usable
        self.held_out_share = settings.held_out_share if held_out else 0.0
        self.batch_documents, self.shuffle_rows, self.seed = batch_documents, settings.shuffle_rows, seed
        first: list[Document] = []
        kept: dict[Document, None] = {}
        trained_on = False
        with tqdm(total=held_out, desc="held-out documents", disable=not progress, leave=False) as bar:
            for row in source.open():
                document = self._document(row)
                if document is None:
                    continue
                if len(first) < FIRST_DOCUMENTS:
                    first.append(document)
                if self._is_held_out(document):
                    if len(kept) < held_out and document not in kept:
                        kept[document] = None
                        bar.update()
                else:
                    trained_on = True
                if trained_on and len(kept) >= held_out and len(first) == FIRST_DOCUMENTS:
                    break
        if not trained_on or len(kept) < held_out:
            raise ValueError(
                f"too few documents: a whole pass over the stream gives {len(kept)} held-out documents, of "
                f"data.held_out={held_out} that are wanted (a share of {self.held_out_share:g} is held out), "
                f"and {'some' if trained_on else 'no'} other usable documents. Check data.min_tokens, "
                "data.short and data.long, raise data.held_out_share, or hold out fewer."
            )
        self.held_out = tuple(kept)
        described = {
            **{"source": source.describe(), "first": tokens_digest(first), "tokens": list(tokens)},
            **{name: getattr(settings, name) for name in DECIDING},
            "held_out": [held_out, settings.held_out_share],
            "order": [settings.shuffle_rows, batch_documents, seed],
        }
        self._sha256 = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        start = {"step": 0, "epoch": 0, "block": 0, "rows_of_block": 0, "source": None}
        self.restore_({"kind": "streaming", **start})

    @property
    def num_documents(self) -> None:
        return None

    @property
    def commit(self) -> str | None:
        """Commit of the hub data set that is read; None: not known, or another source."""
        return self.source.commit

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: that of a corpus in memory.
        """
        _check_kind(state, "streaming")
        self._place = {name: value for name, value in state.items() if name != "kind"}
        self._last_step, self._last = -1, list[Document]()
        self._documents = self._training_documents()

    def documents_of(self, step: int) -> list[Document]:
        """Returns the documents of step `step`, over all processes: the next step, or once more the last;
        ValueError: a row that cannot be read, a hub that broke off."""
        if step == self._last_step:
            return list(self._last)
        assert step == self._place["step"], f"step {step} of a stream that is at step {self._place['step']}"
        self._last = list(islice(self._documents, self.batch_documents))
        self._last_step = step
        self._place["step"] = step + 1
        return list(self._last)

    def state(self) -> dict[str, Any]:
        """The position where the next step begins, for JSON; the same on every process."""
        return {"kind": "streaming", **self._place}

    def describe(self) -> str:
        """SHA-256 of the source, the settings and the first documents.

        A stream is not read to its end to be hashed: rows further on can be changed between a run and its
        resumption without being noticed, for better (a damaged row is mended) or worse (rows are put in, and
        the position means another row).
        """
        return self._sha256

    def _training_documents(self) -> Iterator[Document]:
        """All that is trained on, from `_place` on, for ever; keeps `_place` up to date."""
        place = self._place
        while True:
            found = place["epoch"] == 0 or place["block"] > 0 or place["rows_of_block"] > 0
            cursor = self.source.open(place["source"])
            while rows := list(islice(cursor, self.shuffle_rows)):
                after = cursor.state()
                seed = [self.seed, 4, place["epoch"], place["block"]]
                order = np.random.default_rng(seed).permutation(len(rows))
                for i in order[place["rows_of_block"] :]:
                    place["rows_of_block"] += 1
                    document = self._document(rows[i])
                    if document is not None and not self._is_held_out(document):
                        found = True
                        yield document
                place.update(block=place["block"] + 1, rows_of_block=0, source=after)
            if not found:
                raise ValueError(
                    "empty data set: a whole pass over the stream gave no document to train on, though an "
                    "earlier one did: the data was changed while it was read."
                )
            place.update(epoch=place["epoch"] + 1, block=0, rows_of_block=0, source=None)

    def _document(self, row: Row) -> Document | None:
        document = self.reader.document(row)
        return document if document is not None and self.usable(document) else None

    def _is_held_out(self, document: Document) -> bool:
        return held_out_fraction(document.context_ids) < self.held_out_share


def _check_kind(state: Mapping[str, Any], wanted: str) -> None:
    """Refuse a checkpoint of another kind of corpus."""
    if state.get("kind") != wanted:
        raise ValueError(
            f"the checkpoint is of a corpus that is {state.get('kind', 'not named')!r}, and this run's is "
            f"{wanted!r}: set data.streaming as it was, or start again with overwrite=true."
        )


AnyCorpus = Corpus | StreamingCorpus


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
    if settings.source == "jsonl":
        return JsonLines(path)
    of_hub: dict[str, Any] = {name: getattr(settings, name) for name in ("subset", "split", "revision")}
    return Dataset(settings.source, path, separator=settings.separator, **of_hub)


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

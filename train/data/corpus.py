"""Loads documents, splits them into trained-on and held-out, and draws those of each step.

**Split.** A document's side depends on its context's tokens alone: its hash against `data.held_out_share`. So
a held-out context stays so in any order of the data, when data is added or removed, for other seeds, and for
any number of processes. (A set too small for that share to hold out `data.held_out` documents holds out
more.) After another tokenizer, template, `max_tokens` or `lengths` the sides are drawn anew.

**Order.** In memory, the documents of a step are a pure function of (seed, step), so a resumed run reads on
without any state. A stream is cut into blocks of `shuffle_rows` rows, and block b of pass e is read in the
order of a permutation drawn from (seed, e, b); a resumed run reads it again up to its step. Every process
reads the same rows and works on its share of their documents.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice

import numpy as np
from tqdm import tqdm

from retain.train.data.chat import Chat
from retain.train.data.document import Document, Encode, held_out_fraction, tokens_digest
from retain.train.data.rows import Reader
from retain.train.data.settings import DataSettings, check_data
from retain.train.data.sources import Dataset, Row, read_jsonl

# Documents by which a stream is known, besides its settings.
FIRST_DOCUMENTS = 16
# The generator writes at most so many times as many documents as are asked for.
MOST_GENERATED = 100


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
        size = len(self.train)
        places = range(step * self.batch_documents, (step + 1) * self.batch_documents)
        epochs = range(places[0] // size, places[-1] // size + 1)
        order = {epoch: np.random.default_rng([self.seed, 3, epoch]).permutation(size) for epoch in epochs}
        return [self.train[order[place // size][place % size]] for place in places]

    def describe(self) -> str:
        """Returns the SHA-256 of all tokens of both sides, in order."""
        sides = tokens_digest(self.train) + tokens_digest(self.held_out)
        return hashlib.sha256(sides.encode()).hexdigest()


class StreamingCorpus:
    """Documents of a stream, pass after pass.

    Args:
        source: read anew in each pass.
        read: a row as a document; None: it is skipped.
        settings: of which held_out, held_out_share and shuffle_rows count.

    Raises:
        ValueError: the stream holds fewer documents than are wanted, or one that cannot be read.
    """

    num_documents = None

    def __init__(
        self,
        source: Dataset,
        read: Callable[[Row], Document | None],
        settings: DataSettings,
        *,
        batch_documents: int,
        seed: int,
    ) -> None:
        self.source, self.read = source, read
        self.held_out_share = settings.held_out_share if settings.held_out else 0.0
        self.batch_documents, self.shuffle_rows, self.seed = batch_documents, settings.shuffle_rows, seed
        first: list[Document] = []
        kept: dict[Document, None] = {}
        trained_on = False
        for document in filter(None, map(read, source.rows())):
            if len(first) < FIRST_DOCUMENTS:
                first.append(document)
            if not self._is_held_out(document):
                trained_on = True
            elif len(kept) < settings.held_out:
                kept.setdefault(document)
            if trained_on and len(kept) >= settings.held_out and len(first) == FIRST_DOCUMENTS:
                break
        if not trained_on or len(kept) < settings.held_out:
            raise ValueError(
                f"too few documents: a whole pass over the stream gives {len(kept)} held-out documents, of "
                f"data.held_out={settings.held_out} that are wanted (a share of {self.held_out_share:g} is "
                f"held out), and {'some' if trained_on else 'no'} other usable documents. Check "
                "data.min_tokens and data.short, raise data.held_out_share, or hold out fewer."
            )
        self.held_out = tuple(kept)
        known = asdict(settings) | {"first": tokens_digest(first), "order": [batch_documents, seed]}
        known["commit"] = self.commit = source.commit  # None: not known, or another source
        self._sha256 = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        self._documents, self._last, self._next = self._training_documents(), list[Document](), 0

    def documents_of(self, step: int) -> list[Document]:
        """Returns the documents of step `step`, over all processes: once more the last, or a later one, up to
        which the stream is read on. ValueError: a row that cannot be read, a hub that broke off."""
        assert step >= self._next - 1, f"step {step} of a stream that is at step {self._next}"
        while self._next <= step:
            self._last = list(islice(self._documents, self.batch_documents))
            self._next += 1
        return list(self._last)

    def describe(self) -> str:
        """SHA-256 of the source, the settings and the first documents; changes of later rows go unnoticed."""
        return self._sha256

    def _training_documents(self) -> Iterator[Document]:
        """All that is trained on, for ever."""
        for epoch in count():
            stream, block, found = self.source.rows(), 0, False
            while rows := list(islice(stream, self.shuffle_rows)):
                for i in np.random.default_rng([self.seed, 4, epoch, block]).permutation(len(rows)):
                    document = self.read(rows[i])
                    if document is not None and not self._is_held_out(document):
                        found = True
                        yield document
                block += 1
            if not found:
                raise ValueError(
                    "empty data set: a whole pass over the stream gave no document to train on, though an "
                    "earlier one did: the data was changed while it was read."
                )

    def _is_held_out(self, document: Document) -> bool:
        return held_out_fraction(document.context_ids) < self.held_out_share


AnyCorpus = Corpus | StreamingCorpus


def load_corpus(
    settings: DataSettings,
    *,
    shortest: int,
    seed: int,
    batch_documents: int = 1,
    encode: Encode | None,
    chat: Chat | None = None,
    check: Callable[[Document], None] | None = None,
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

    def usable(document: Document | None) -> Document | None:
        if document is None:
            return None
        if len(document.context_ids) <= shortest:
            if settings.short == "skip":
                return None
            raise ValueError(
                f"{document.origin} is too short: its context has {len(document.context_ids)} tokens, and "
                f"more than {shortest} are needed (target.horizon, data.min_tokens: nearer entries are never "
                "evicted). Use longer documents, data.short=skip, or a smaller target.horizon."
            )
        if check is not None:
            check(document)
        return document

    source: Dataset | None = None
    if settings.source == "reference":
        most = MOST_GENERATED * (settings.documents + settings.held_out)
        documents: Iterable[Document | None] = islice(_reference_documents(settings, seed), most)
    elif settings.source == "jsonl":
        documents = map(reader.document, read_jsonl(settings.path or ""))
    else:
        source = Dataset(
            settings.path or "", subset=settings.subset, split=settings.split, revision=settings.revision
        )
        if settings.streaming:
            how = {"batch_documents": batch_documents, "seed": seed}
            return StreamingCorpus(source, lambda row: usable(reader.document(row)), settings, **how)
        documents = map(reader.document, source.rows())
    bar = tqdm(documents, desc="documents", disable=not progress, leave=False)
    train, held_out = _split(filter(None, map(usable, bar)), settings)
    commit = source.commit if source else None
    return Corpus(tuple(train), tuple(held_out), batch_documents, seed, commit)


def _split(documents: Iterator[Document], settings: DataSettings) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and those of the held-out ones that are looked at, by their hash: read until
    both sides have as many as are wanted, or to the end."""
    wanted, wanted_held_out = settings.documents, settings.held_out
    share = settings.held_out_share if wanted_held_out else 0.0
    train: dict[Document, None] = {}
    held_out: dict[Document, None] = {}
    for document in documents:
        side = held_out if held_out_fraction(document.context_ids) < share else train
        if side is held_out or not wanted or len(train) < wanted:
            side.setdefault(document)
        if wanted and len(train) >= wanted and len(held_out) >= wanted_held_out:
            break
    usable = sorted((*train, *held_out), key=lambda one: (held_out_fraction(one.context_ids), one.key))
    if 0 < wanted_held_out < len(usable) and (not train or len(held_out) < wanted_held_out):
        # As many as are asked for, and what has the same context as the last of them.
        last = held_out_fraction(usable[wanted_held_out - 1].context_ids)
        everything = (*train, *held_out)
        held_out = {one: None for one in usable if held_out_fraction(one.context_ids) <= last}
        train = {one: None for one in everything if one not in held_out}
    if not train or len(held_out) < wanted_held_out:
        raise ValueError(
            f"too few documents: {settings.path or 'the generator'!r} gives {len(usable)} that are usable "
            f"and differ, data.held_out={wanted_held_out} are to be held out, and at least one is needed to "
            "train on. Use more documents, hold out fewer (0: none), or check data.min_tokens and data.short."
        )
    return list(train), [one for one in usable if one in held_out][:wanted_held_out]


def _reference_documents(settings: DataSettings, seed: int) -> Iterator[Document]:
    """Documents without end: the split's hash decides how many are needed."""
    from retain.reference.documents import Writer, distill_document

    writer = Writer(split="train", seed=seed)
    draws = np.random.default_rng([seed, 2])
    number = 0
    while True:
        written = distill_document(writer, int(draws.integers(settings.min_tokens, settings.max_tokens + 1)))
        number += 1
        yield Document(written.context_ids, written.appendix_ids, f"generated document {number}")

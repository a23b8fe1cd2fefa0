"""Holds a corpus, in memory or as a stream, and draws the documents of each step.

In memory they are a pure function of (seed, step), so a resumed run reads on without any state.

A stream is larger than memory, and a sliding shuffle buffer (as `datasets` has) would have to be saved with
its content. Instead the stream is cut into blocks of `shuffle_rows` rows, and block b of pass e is read in
the order of a permutation drawn from (seed, e, b). The state is where the block began and how far it has been
read; a resumed run reads the same documents as an uninterrupted one, at the price of reading at most one
block again. Every process reads the same rows and works on its share of their documents.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from retain.train.data.document import Document, held_out_fraction, tokens_digest
from retain.train.data.rows import Reader
from retain.train.data.sources import Row, Source

FIRST_DOCUMENTS = 16  # by which a stream is known, besides its settings
# Settings that decide which documents a stream has.
DECIDING = ("columns", "lengths", "length_weights", "short", "long", "appendix", "max_appendix_tokens")

Usable = Callable[[Document], bool]


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

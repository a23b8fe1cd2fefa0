"""Shared documents, on the scheduler's side: prompts that were compressed once and stay in the pool, so that
later prompts that begin with them take their blocks by reference.

A document is the full pages of a prompt, evicted from as if it ended there. It is known by its length and the
sha256 of its tokens, for requests of the same budget (and cache salt and adapter); policy, gates and page are
those of the engine. The request that makes it may go on: tokens behind the full pages that are computed in
the same step as the last of them still see all of it, later ones see what stayed.

A document's own reference on its blocks keeps them from the pool's free list, so that it is in use exactly
while its blocks have more references than that one: nothing is counted apart, and aborts, preemptions and
ends of requests need no word here. Documents that no request uses go by least recent use, where they hold
more than their share, or where the pool is short of blocks. One that has a file stays known, and is read
again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from retain.budget.statement import Budget
from retain.cache.prompt_file import HeldPrompt
from retain.vllm.settings import Cut


@runtime_checkable
class Pool(Protocol):
    """What is asked of the engine's block pool."""

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...
    def touch(self, blocks: list[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterator[Any]) -> None: ...


@dataclass(frozen=True)
class Terms:
    """Requests that may share a document agree in these.

    Args:
        budget: of the document.
        salt: of the prefix cache, which keeps users apart.
        adapter: name of the LoRA adapter.
    """

    budget: Budget
    salt: str | None = None
    adapter: str | None = None


Key = tuple[Terms, int, bytes]


@dataclass(eq=False)
class Document:
    """A compressed document.

    Args:
        key: terms, number of tokens, and their sha256.
        cut: how much of it stays; its length is a whole number of pages.
        serial: by which workers know it.
        blocks: the pool's, that hold it; None: it is in its file.
        path: of its file; None: it has none.
    """

    key: Key
    cut: Cut
    serial: int
    blocks: list[Any] | None = None
    path: Path | None = None
    # What was read of its file and is not in the pool yet.
    held: HeldPrompt | None = field(default=None, repr=False)

    @property
    def unused(self) -> bool:
        """Whether it is in the pool and no request uses it."""
        return self.blocks is not None and self.blocks[0].ref_cnt == 1


@dataclass(frozen=True)
class Load:
    """A document that workers write into its blocks.

    Args:
        serial: of the document.
        full: its full pages.
        blocks: ids of its blocks.
        held: its entries.
    """

    serial: int
    full: int
    blocks: tuple[int, ...]
    held: HeldPrompt


@dataclass(frozen=True, eq=False)
class Save:
    """A file that a worker writes of a document.

    Args:
        path: of the file.
        tokens_T: of the document.
        rule: as in the file's header.
        seed: of the draw.
        blocks: ids of the document's blocks; None: it lies in its request's own.
    """

    path: Path
    tokens_T: Int[Tensor, " T"]
    rule: Mapping[str, Any]
    seed: int
    blocks: tuple[int, ...] | None = None


@dataclass(eq=False)
class Ask:
    """A request that may use a document, or makes one.

    Args:
        terms: of the documents that it may use.
        tokens_T: of its prompt.
        cut: of its prompt where it uses none; of a request that makes a document, the document's.
        serial: under which workers remember the document that it makes; None: it makes none.
        path: of the file that the document is saved to.
    """

    terms: Terms
    tokens_T: np.ndarray
    cut: Cut
    serial: int | None = None
    path: Path | None = None
    # The document that it uses since it was last admitted.
    document: Document | None = None
    # Whether the pool has the document that it made.
    settled: bool = False
    _digests: dict[int, bytes] = field(default_factory=dict, repr=False)

    def key(self, length: int) -> Key:
        """Key of the document that its first tokens are."""
        if length not in self._digests:
            self._digests[length] = digest_of(self.tokens_T[:length])
        return self.terms, length, self._digests[length]


def digest_of(tokens_T: np.ndarray) -> bytes:
    """sha256 of token ids."""
    return sha256(np.ascontiguousarray(tokens_T, dtype="<i8").tobytes()).digest()


class Documents:
    """The documents of an engine.

    Args:
        pool: of blocks.
        most_blocks: that documents may hold while no request uses them.
        count: adds to the engine's counters.
        read: what the file of a document holds; None where it is refused, which was said then.
    """

    def __init__(
        self,
        pool: Pool,
        most_blocks: int,
        count: Callable[..., None],
        read: Callable[[Document], HeldPrompt | None],
    ):
        self.pool, self.most_blocks, self.count, self.read = pool, most_blocks, count, read
        self.known: dict[Key, Document] = {}
        # Those that are in the pool.
        self.pooled: OrderedDict[Key, Document] = OrderedDict()
        self.lengths: dict[Terms, Counter[int]] = {}
        self.asks: dict[str, Ask] = {}
        self.serials = 0
        # What workers are to be told at the next step.
        self.loads: list[Load] = []
        self.dropped: list[int] = []

    def new_serial(self) -> int:
        """A number that no document had before."""
        self.serials += 1
        return self.serials

    def add(self, document: Document) -> None:
        """A document that was not known."""
        self.known[document.key] = document
        self.lengths.setdefault(document.key[0], Counter())[document.key[1]] += 1

    # ---- admission of a request ----

    def choose(self, request_id: str) -> Document | None:
        """The longest document that the prompt of a waiting request begins with, and goes on behind.

        A request that makes a document uses that very one if it is there, and no shorter one.
        """
        ask = self.asks[request_id]
        ask.document = None
        lengths = self.lengths.get(ask.terms, Counter())
        tried = [ask.cut.length] if ask.serial is not None else sorted(lengths, reverse=True)
        for length in tried:
            if length < len(ask.tokens_T) and lengths.get(length):
                document = self.known.get(ask.key(length))
                if document is not None and self._is_there(document):
                    ask.document = document
                    break
        return ask.document

    def _is_there(self, document: Document) -> bool:
        """Whether a document can be used; its file is read once the pool has room for it."""
        if document.blocks is None and document.held is None and document.cut.kept < self._within_reach():
            document.held = self.read(document)
            if document.held is None:
                self._forget(document)
                return False
        return True

    def blocks_needed(self, request_id: str, count: int, *, admitted: bool) -> int:
        """Blocks that a request takes from the free ones; makes room if there are too few.

        Args:
            request_id: of the request.
            count: blocks that it would take without documents.
            admitted: whether it has its first blocks.
        """
        ask = self.asks.get(request_id)
        document = None if ask is None or admitted else ask.document
        if document is not None:
            count += (document.cut.kept if document.blocks is None else 0) - document.cut.full
        self._make_room(count - self.pool.get_num_free_blocks(), document)
        return count

    def take(self, request_id: str) -> tuple[list[Any], int]:
        """Blocks of the document that a request uses, with a reference for it, and the document's pages."""
        document = self.asks[request_id].document
        assert document is not None
        if document.blocks is None:
            assert document.held is not None, "the pool had room for it when it was chosen"
            document.blocks = self.pool.get_new_blocks(document.cut.kept)
            blocks = tuple(block.block_id for block in document.blocks)
            self.loads.append(Load(document.serial, document.cut.full, blocks, document.held))
            document.held = None
            self.pooled[document.key] = document
            self.count(documents_loaded=1)
        self.pool.touch(document.blocks)
        self.pooled.move_to_end(document.key)
        self.count(documents_used=1)
        return document.blocks, document.cut.full

    def settle(self, request_id: str, blocks: list[Any]) -> None:
        """The document that a request makes lies packed in the first of its blocks: keep them."""
        ask = self.asks.get(request_id)
        if ask is None or ask.serial is None or ask.settled or ask.document is not None:
            return
        ask.settled = True
        document = self.known.get(ask.key(ask.cut.length))
        if document is not None and document.blocks is not None:
            return
        if document is None:
            document = Document(ask.key(ask.cut.length), ask.cut, ask.serial, path=ask.path)
            self.add(document)
        document.serial, document.held = ask.serial, None
        document.blocks = list(blocks[: ask.cut.kept])
        self.pool.touch(document.blocks)
        self.pooled[document.key] = document
        self.count(documents_compressed=1)

    def finish(self, request_id: str) -> None:
        """A request is over."""
        ask = self.asks.pop(request_id, None)
        if ask is not None and ask.serial is not None:
            made = self.known.get(ask.key(ask.cut.length))
            if made is None or made.serial != ask.serial:
                self.dropped.append(ask.serial)

    # ---- room ----

    def unused(self) -> list[Document]:
        """Documents in the pool that no request uses, least recently used first, but behind all others those
        that a waiting request begins with."""
        unused = [document for document in self.pooled.values() if document.unused]
        wanted = {id(ask.document) for ask in self.asks.values()} if unused else set()
        return sorted(unused, key=lambda document: id(document) in wanted)

    def _within_reach(self) -> int:
        """Blocks that are free, or would be without unused documents."""
        return self.pool.get_num_free_blocks() + sum(one.cut.kept for one in self.unused())

    def _make_room(self, lacking: int, spared: Document | None) -> None:
        """Drop unused documents for so many blocks, if that is enough."""
        if lacking <= 0:
            return
        candidates = [one for one in self.unused() if one is not spared]
        if sum(one.cut.kept for one in candidates) < lacking:
            return
        for document in candidates:
            if lacking > 0:
                lacking -= document.cut.kept
                self._drop(document)

    def trim(self) -> None:
        """Drop unused documents beyond their share of the pool."""
        if sum(document.cut.kept for document in self.pooled.values()) <= self.most_blocks:
            return
        unused = self.unused()
        held = sum(document.cut.kept for document in unused)
        for document in unused:
            if held > self.most_blocks:
                held -= document.cut.kept
                self._drop(document)

    def reset(self) -> None:
        """Drop all documents that no request uses; those in files are known on."""
        for document in self.unused():
            self._drop(document)

    def _drop(self, document: Document) -> None:
        """Give a document's blocks back."""
        assert document.unused and document.blocks is not None
        self.pool.free_blocks(reversed(document.blocks))
        self.dropped.append(document.serial)
        del self.pooled[document.key]
        self.count(documents_dropped=1)
        document.blocks, document.serial = None, self.new_serial()
        if document.path is None:
            self._forget(document)

    def _forget(self, document: Document) -> None:
        """A document that can be used no more."""
        del self.known[document.key]
        terms, length, _ = document.key
        self.lengths[terms][length] -= 1
        if not self.lengths[terms][length]:
            del self.lengths[terms][length]
        if not self.lengths[terms]:
            del self.lengths[terms]

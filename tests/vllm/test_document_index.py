"""The index of shared documents against a pool of blocks, without an engine."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from retain.budget.statement import Budget
from retain.cache.prompt_file import HeldPrompt
from retain.vllm.documents import Ask, Document, Documents, Terms, digest_of
from retain.vllm.settings import Cut

TERMS = Terms(Budget(keep_ratio=0.25, page=4))
HELD = HeldPrompt(torch.tensor([[8]]), torch.ones(8, 2), torch.ones(8, 2), torch.arange(8))


class Block:
    def __init__(self, block_id: int):
        self.block_id, self.ref_cnt = block_id, 0


class Pool:
    """Blocks that are counted, as the engine's pool does."""

    def __init__(self, size: int):
        self.blocks = [Block(number) for number in range(size)]

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        found = [block for block in self.blocks if block.ref_cnt == 0][:num_blocks]
        assert len(found) == num_blocks
        self.touch(found)
        return found

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterator[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0


class Index:
    """Documents of 8 pages of 4 tokens that keep 2, and requests that make and use them."""

    def __init__(self, size: int = 20, most_blocks: int = 100):
        self.pool, self.counts = Pool(size), Counter[str]()
        self.readable: HeldPrompt | None = HELD

        def count(**counts: int) -> None:
            self.counts.update(counts)

        self.documents = Documents(self.pool, most_blocks, count, lambda document: self.readable)
        self.blocks: dict[str, list[Block]] = {}

    def tokens(self, text: int, length: int = 32) -> np.ndarray:
        return np.full(length, text, dtype=np.int64)

    def make(self, name: str, text: int) -> None:
        """A request that makes a document, as far as its step is settled."""
        ask = Ask(TERMS, self.tokens(text), Cut(32, 8, 2), serial=self.documents.new_serial())
        self.documents.asks[name] = ask
        assert self.documents.choose(name) is None
        self.blocks[name] = self.pool.get_new_blocks(self.documents.blocks_needed(name, 8, admitted=False))
        self.documents.settle(name, self.blocks[name])

    def use(self, name: str, text: int, terms: Terms = TERMS) -> bool:
        """A request whose prompt begins with a text; whether it uses a document."""
        tokens = np.concatenate([self.tokens(text), self.tokens(99, 3)])
        self.documents.asks[name] = Ask(terms, tokens, Cut(35, 8, 2))
        used = self.documents.choose(name) is not None
        needed = self.documents.blocks_needed(name, 9, admitted=False)
        self.blocks[name] = []
        if used:
            held, full = self.documents.take(name)
            assert full == 8
            self.blocks[name] += held
            needed -= len(self.documents.loads[-1].blocks) if self.documents.loads else 0
        self.blocks[name] += self.pool.get_new_blocks(1 if used else needed)
        return used

    def end(self, *names: str) -> None:
        for name in names:
            self.documents.finish(name)
            self.pool.free_blocks(reversed(self.blocks.pop(name)))
            self.documents.trim()

    @property
    def held(self) -> int:
        return len(self.pool.blocks) - self.pool.get_num_free_blocks()


def test_a_document_outlives_its_request_and_has_its_users() -> None:
    index = Index()
    index.make("a", 1)
    index.end("a")
    assert index.held == 2
    assert index.use("u", 1) and index.use("v", 1) and not index.use("w", 2)
    assert index.held == 2 + 1 + 1 + 9
    index.end("u", "v", "w")
    assert index.held == 2 and not index.documents.asks
    index.documents.reset()
    assert index.held == 0 and not index.documents.known and not index.documents.lengths
    assert index.documents.dropped == [1]
    assert not index.use("x", 1)


@pytest.mark.parametrize("terms", [Terms(Budget(keep_ratio=0.5, page=4)), Terms(TERMS.budget, "salt")])
def test_other_terms_share_nothing(terms: Terms) -> None:
    index = Index()
    index.make("a", 1)
    assert not index.use("u", 1, terms) and index.use("v", 1)


def test_of_two_that_make_the_same_one_is_kept() -> None:
    index = Index()
    index.make("a", 1)
    index.make("b", 2)
    # One that was sent before the first was there.
    index.documents.asks["c"] = Ask(
        TERMS, index.tokens(1), Cut(32, 8, 2), serial=index.documents.new_serial()
    )
    index.documents.settle("c", [])
    index.documents.finish("c")
    assert index.counts["documents_compressed"] == 2 and index.documents.dropped == [3]


def test_least_recent_use_and_what_is_in_use_stays() -> None:
    index = Index(40, most_blocks=4)
    for number, name in enumerate("abc"):
        index.make(name, number)
    index.use("u", 0)
    index.end("b", "c", "a")
    # Of three, the first is in use and the others are not more than their share.
    assert index.counts["documents_dropped"] == 0
    index.make("d", 3)
    index.end("d")
    assert index.counts["documents_dropped"] == 1 and not index.use("v", 1)
    index.end("u", "v")
    assert index.counts["documents_dropped"] == 2 and not index.use("w", 2)
    assert index.use("x", 0) and index.use("y", 3)


def test_room_is_made_only_if_it_is_enough_and_the_wanted_go_last() -> None:
    index = Index(20)
    for number, name in enumerate("ab"):
        index.make(name, number)
        index.end(name)
    waiting = Ask(TERMS, np.concatenate([index.tokens(0), index.tokens(9, 1)]), Cut(33, 8, 2))
    index.documents.asks["w"] = waiting
    first = index.documents.choose("w")
    index.documents.blocks_needed("n", 21, admitted=False)
    assert index.counts["documents_dropped"] == 0
    index.documents.blocks_needed("n", 17, admitted=False)
    assert index.counts["documents_dropped"] == 1 and first is not None and first.blocks is not None
    # Its own document makes no room for the request that waits for it: 2 of 20 blocks cannot be taken.
    index.documents.blocks_needed("w", 8 + 19, admitted=False)
    assert index.counts["documents_dropped"] == 1
    index.documents.blocks_needed("n", 20, admitted=False)
    assert index.counts["documents_dropped"] == 2


def test_a_file_is_read_when_there_is_room_and_again_after_it_was_dropped() -> None:
    index = Index(11)
    key = TERMS, 32, digest_of(index.tokens(1))
    index.documents.add(Document(key, Cut(32, 8, 2), index.documents.new_serial(), path=Path("file")))
    index.use("u", 5)
    index.documents.asks["v"] = Ask(
        TERMS, np.concatenate([index.tokens(1), index.tokens(9, 1)]), Cut(33, 8, 2)
    )
    document = index.documents.choose("v")
    assert document is not None and document.held is None, "two blocks are free, and three are wanted"
    assert index.documents.blocks_needed("v", 9, admitted=False) == 3
    index.end("u")
    assert index.use("v", 1) and index.counts["documents_loaded"] == 1
    (load,) = index.documents.loads
    assert load.held is HELD and len(load.blocks) == 2 and document.held is None
    index.end("v")
    index.documents.reset()
    assert index.held == 0 and index.documents.known and document.serial != load.serial
    index.documents.loads.clear()
    assert index.use("w", 1) and index.counts["documents_loaded"] == 2


def test_a_refused_file_is_forgotten() -> None:
    index = Index()
    index.readable = None
    key = TERMS, 32, digest_of(index.tokens(1))
    index.documents.add(Document(key, Cut(32, 8, 2), index.documents.new_serial(), path=Path("file")))
    assert not index.use("u", 1) and not index.documents.known and not index.documents.lengths


def test_the_longest_wins() -> None:
    index = Index()
    short = TERMS, 16, digest_of(index.tokens(1, 16))
    index.documents.add(Document(short, Cut(16, 4, 1), 7, path=Path("file")))
    index.make("a", 1)
    assert index.use("u", 1) and index.documents.asks["u"].document.key[1] == 32  # type: ignore[union-attr]
    # A prompt of just the longer one uses the shorter one: a token is left to compute.
    index.documents.asks["v"] = Ask(TERMS, index.tokens(1), Cut(32, 8, 2))
    chosen = index.documents.choose("v")
    assert chosen is not None and chosen.key == short

"""Memory as an engine has it, and its steps, without an engine.

Blocks are given and taken, keys and values of every token are written through a block table, and the worker
packs them.

A block's keys are stored transposed, as the engine's CPU kernel has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from retain.capability import problems
from retain.policy import load_policy
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.tables import Layout, build_tables
from retain.vllm.packing.worker import Arrival, Part, Worker
from tests.evictions import EVICTING
from tests.vllm.engine import places_of

# Presets that need nothing but a prompt, and those with gates.
SERVED = tuple(
    name
    for name in EVICTING
    if not (policy := load_policy(name)).weights and not policy.learned and not problems(policy, ("vllm",))
)
SERVED += ("gate", "learned")


def make_store(layout: Layout, head_dim: int) -> PageStore:
    """Zeroed pages of all layers.

    Args:
        layout: of the pages.
        head_dim: D.
    """
    L, blocks, H, page = layout
    whole = torch.zeros(L, blocks, H, page, 2 * head_dim)
    return PageStore(list(whole), write)


def write(keys: Tensor, values: Tensor, cache: Tensor) -> None:
    """Write keys and values `[page, H, D]` into the first block of a cache."""
    _, H, page, width = cache.shape
    for h in range(H):
        flat = cache[0, h].view(-1)
        flat[: page * width // 2].view(width // 2, page).copy_(keys[:, h].T)
        flat[page * width // 2 :].view(page, width // 2).copy_(values[:, h])


def read_page(store: PageStore, page_number: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[page, D]` of a page, by the layout of `write`."""
    flat, page, D = store.pages[page_number], store.layout.page, store.head_dim
    return flat[: page * D].view(D, page).T, flat[page * D :].view(page, D)


@dataclass
class Served:
    """A request: its tokens' tensors, its blocks, and how far it has come; None: it is not evicted from."""

    keys_LHTD: Tensor
    values_LHTD: Tensor
    queries_LQTD: Tensor
    hidden_TE: Tensor
    arrival: Arrival | None
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def evicted(self) -> bool:
        """True once its prompt was computed."""
        return self.arrival is not None and self.done >= self.arrival.length


class Steps:
    """An engine's steps on one worker.

    Args:
        worker: over pages of `make_store`.
    """

    def __init__(self, worker: Worker):
        self.worker, self.layout = worker, worker.layout
        # Block 0 stands for freed ones, as in the engine.
        self.pool = list(range(1, self.layout.num_blocks))
        self.requests: dict[str, Served] = {}
        self.finished: set[str] = set()
        # Request -> length of its prompt, and the places that each head of each layer kept.
        self.kept: dict[str, tuple[int, list[list[list[int]]]]] = {}
        worker.watch = self._watch
        self.counts = {"evictions": 0, "evictions_failed": 0}

    def _watch(self, request_id: str, keeps: list[Tensor]) -> None:
        self.kept[request_id] = keeps[0].shape[1], places_of(keeps)

    def add(self, request_id: str, length: int, arrival: Arrival | None, *, seed: int, new: int = 40) -> None:
        """A request of so many tokens, `new` more of which may come; without an arrival it is untouched."""
        draw = torch.Generator().manual_seed(seed)
        L, _, H, _ = self.layout
        Q, D, T = 2 * H, self.worker.pages.head_dim, length + new

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        if arrival is not None and arrival.kept == length // self.layout.page:
            arrival = None
        tensors = random(L, H, T, D), random(L, H, T, D), random(L, Q, T, D), random(T, 5)
        self.requests[request_id] = Served(*tensors, arrival)

    def finish(self, request_id: str) -> None:
        """A request ends, or is aborted; the worker hears of it in the next step."""
        self.give_back(request_id)
        del self.requests[request_id]
        self.finished.add(request_id)

    def preempt(self, request_id: str) -> None:
        """A request loses its blocks, and begins again."""
        self.give_back(request_id)
        self.requests[request_id].done = 0

    def give_back(self, request_id: str) -> None:
        request = self.requests[request_id]
        # The next request gets the blocks that were freed last.
        self.pool += [block for block in request.blocks if block]
        request.blocks = []

    def step(self, counts: Mapping[str, int]) -> None:
        """Compute so many tokens of each request."""
        worker, page = self.worker, self.layout.page
        parts, rows = [], list(counts)
        for request_id, count in counts.items():
            request = self.requests[request_id]
            stop = request.done + count
            while len(request.blocks) * page < stop:
                request.blocks.append(self.pool.pop())
            if request.arrival is not None:
                last = request.blocks[(stop - 1) // page]
                parts.append(Part(request.arrival, last, request.done, stop))
        worker.begin(parts, self.finished)
        self.finished = set()
        starts = [0, *accumulate(counts.values())]
        blocks_RB = self.block_table(rows)
        lengths_R = torch.tensor([self.requests[one].done + counts[one] for one in rows], dtype=torch.int32)
        if parts:
            worker.read_batch(blocks_RB, starts, lengths_R)
        for place, name in enumerate(worker.layers):
            spans = [slice(self.requests[one].done, self.requests[one].done + counts[one]) for one in rows]
            self._write(place, rows, spans)
            pairs = [(self.requests[one], span) for one, span in zip(rows, spans, strict=True)]
            queries = torch.cat([request.queries_LQTD[place][:, span] for request, span in pairs], 1)
            worker.observe_(name, queries.transpose(0, 1))
            if worker.gates is not None:
                hidden = torch.cat([request.hidden_TE[span] for request, span in pairs])
                worker.score_tokens_(name, hidden_NE=hidden)
        for name, count in worker.evict().items():
            self.counts[name] += count
        for one in rows:
            request = self.requests[one]
            request.done += counts[one]
            if request.evicted:
                for place in range(request.arrival.kept, request.arrival.length // page):
                    self.pool += [request.blocks[place]] if request.blocks[place] else []
                    request.blocks[place] = 0

    def _write(self, place: int, rows: Sequence[str], spans: Sequence[slice]) -> None:
        """Write keys and values of the step's tokens, one by one."""
        _, blocks, H, page = self.layout
        store, D = self.worker.pages, self.worker.pages.head_dim
        for one, span in zip(rows, spans, strict=True):
            request = self.requests[one]
            for t in range(span.start, span.stop):
                for h in range(H):
                    number = (place * blocks + request.blocks[t // page]) * H + h
                    there = read_page(store, number)
                    given = request.keys_LHTD[place, h, t], request.values_LHTD[place, h, t]
                    for page_ED, x in zip(there, given, strict=True):
                        assert page_ED.shape[1] == D
                        page_ED[t % page] = x

    def block_table(self, rows: Sequence[str]) -> Tensor:
        """Block tables, padded as the engine's are."""
        width = max(len(self.requests[one].blocks) for one in rows) + 2
        return torch.tensor(
            [self.requests[one].blocks + [0] * (width - len(self.requests[one].blocks)) for one in rows],
            dtype=torch.int32,
        )

    def held(self, request_id: str) -> list[list[tuple[Tensor, Tensor]]]:
        """Keys and values that each head of each layer of a request reads, in order, through its table in the
        next step's attention."""
        request, page = self.requests[request_id], self.layout.page
        full, starts = 0, torch.zeros(self.layout.per_block + 1, dtype=torch.int32)
        if request.evicted:
            full, starts = request.arrival.length // page, self.worker.starts[request_id]
        columns = torch.tensor([request.done]), torch.tensor([full]), starts[None]
        tables = build_tables(self.layout, self.block_table([request_id]), *columns)
        read = []
        for pages_HW, lengths_H in zip(*tables, strict=True):
            heads = []
            for pages, length in zip(pages_HW.tolist(), lengths_H.tolist(), strict=True):
                both = [read_page(self.worker.pages, number) for number in pages[: -(-length // page)]]
                heads.append(tuple(torch.cat(part)[:length] for part in zip(*both, strict=True)))
            read.append(heads)
        return read

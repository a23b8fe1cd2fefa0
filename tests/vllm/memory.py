"""Memory as an engine has it, and its steps, without an engine.

Blocks are given and taken, keys and values of every token are written through a block table, and the worker
packs them.

A block's keys are stored transposed, as the engine's CPU kernel has them.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from retain.budget.statement import Budget
from retain.capability import problems
from retain.policy import load_policy
from retain.vllm.packing.pages import Layout, PageStore, build_tables
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
    """A request: its tokens' tensors, its blocks, and tokens computed; without an arrival it is untouched."""

    keys_LHTD: Tensor
    values_LHTD: Tensor
    queries_LQTD: Tensor
    hidden_TE: Tensor
    arrival: Arrival | None
    blocks: list[int] = field(default_factory=list)
    done: int = 0


class Steps:
    """An engine's steps on one worker: in each of them every head reads the entries that it kept and then all
    later ones, and nothing else.

    Args:
        worker: over pages of `make_store`.
    """

    def __init__(self, worker: Worker):
        self.worker, self.layout = worker, worker.layout
        # Block 0 stands for freed ones, as in the engine.
        self.pool = list(range(1, self.layout.num_blocks))
        self.requests: dict[str, Served] = {}
        self.finished: set[str] = set()
        # Request -> the places that each head of each layer kept.
        self.kept: dict[str, list[list[list[int]]]] = {}
        worker.watch = lambda request_id, keeps: self.kept.update({request_id: places_of(keeps)})
        self.counts = {"evictions": 0, "evictions_failed": 0}

    def add(self, request_id: str, length: int, budget: Budget | None, *, seed: int, new: int = 40) -> None:
        """A request of so many tokens, `new` more of which may come; without a budget it is untouched."""
        draw = torch.Generator().manual_seed(seed)
        (L, _, H, page), D, T = self.layout, self.worker.pages.head_dim, length + new
        kept = length // page if budget is None else self.worker.rules.kept(length, budget)
        arrival = (
            Arrival(request_id, length, kept, budget, seed) if budget and kept < length // page else None
        )
        shapes = (L, H, T, D), (L, H, T, D), (L, 2 * H, T, D), (T, 5)
        tensors = [torch.randn(shape, generator=draw) for shape in shapes]
        self.requests[request_id] = Served(*tensors, arrival)

    def preempt(self, request_id: str) -> None:
        """A request loses its blocks, and begins again; the next one gets the blocks that were freed last."""
        request = self.requests[request_id]
        self.pool += [block for block in request.blocks if block]
        request.blocks, request.done = [], 0
        self.kept.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """A request ends, or is aborted; the worker hears of it in the next step."""
        self.preempt(request_id)
        del self.requests[request_id]
        self.finished.add(request_id)

    def step(self, counts: Mapping[str, int]) -> None:
        """Compute so many tokens of each request."""
        worker, page, parts = self.worker, self.layout.page, []
        rows = {one: (self.requests[one], self.requests[one].done + count) for one, count in counts.items()}
        for request, stop in rows.values():
            request.blocks += [self.pool.pop() for _ in range(-(-stop // page) - len(request.blocks))]
            if request.arrival is not None:
                parts.append(Part(request.arrival, request.blocks[-1], request.done, stop))
        worker.begin(parts, self.finished)
        self.finished = set()
        width = max(len(request.blocks) for request, _ in rows.values()) + 2
        padded = [request.blocks + [0] * (width - len(request.blocks)) for request, _ in rows.values()]
        columns = torch.tensor(padded), torch.tensor([stop for _, stop in rows.values()])
        blocks_RB, lengths_R = (column.int() for column in columns)
        packed = worker.read_batch(blocks_RB, [0, *accumulate(counts.values())], lengths_R) if parts else None
        for place, name in enumerate(worker.layers):
            self._write(place, rows.values())
            new = [(request, slice(request.done, stop)) for request, stop in rows.values()]
            queries = torch.cat([request.queries_LQTD[place][:, span] for request, span in new], 1)
            worker.observe_(name, queries.transpose(0, 1))
            if worker.gates is not None:
                worker.score_tokens_(name, torch.cat([request.hidden_TE[span] for request, span in new]))
        if packed is not None:
            tables = build_tables(self.layout, blocks_RB, lengths_R, *packed)
            assert all(each.dtype == torch.int32 and each.is_contiguous() for each in tables)
            for r, (request_id, (request, stop)) in enumerate(rows.items()):
                self._check(
                    request_id, request, stop, *(each.unflatten(1, (len(rows), -1))[:, r] for each in tables)
                )
        for name, count in worker.evict().items():
            self.counts[name] += count
        for request, stop in rows.values():
            request.done = stop
            if request.arrival is not None and stop >= request.arrival.length:
                for place in range(request.arrival.kept, request.arrival.length // page):
                    self.pool += [request.blocks[place]] if request.blocks[place] else []
                    request.blocks[place] = 0

    def _write(self, place: int, rows: Iterable[tuple[Served, int]]) -> None:
        """Write keys and values of the step's tokens of a layer, one by one."""
        _, blocks, H, page = self.layout
        for request, stop in rows:
            for t, h in itertools.product(range(request.done, stop), range(H)):
                number = (place * blocks + request.blocks[t // page]) * H + h
                keys_ED, values_ED = read_page(self.worker.pages, number)
                keys_ED[t % page], values_ED[t % page] = (
                    request.keys_LHTD[place, h, t],
                    request.values_LHTD[place, h, t],
                )

    def _check(
        self, request_id: str, request: Served, stop: int, pages_LHW: Tensor, lengths_LH: Tensor
    ) -> None:
        """Each head reads through its table what it kept and then all later tokens."""
        kept = self.kept.get(request_id)
        for place, h in itertools.product(range(self.layout.num_layers), range(self.layout.num_heads)):
            positions = (
                [*range(stop)] if kept is None else [*kept[place][h], *range(request.arrival.length, stop)]
            )
            assert positions == sorted(set(positions)) and int(lengths_LH[place, h]) == len(positions)
            used = -(-len(positions) // self.layout.page)
            pages = [read_page(self.worker.pages, number) for number in pages_LHW[place, h].tolist()]
            for part, given in zip(
                zip(*pages[:used], strict=True), (request.keys_LHTD, request.values_LHTD), strict=True
            ):
                assert torch.equal(torch.cat(part)[: len(positions)], given[place, h, positions])

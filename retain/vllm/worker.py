"""What a worker knows of the requests that are evicted from, and the eviction itself.

The scheduler says of each step which of its requests are evicted from, how far their prompts have come, and
which block each of them writes last: a block that no other request has, by which rows of the batch are told
apart. When a step has computed a prompt to its end, what its policy keeps is packed into the first of its
blocks (`retain.vllm.tables`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.statement import Budget
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.vllm.decide import Layer, Shown, decide
from retain.vllm.pages import PageStore
from retain.vllm.settings import Cut, Rules
from retain.vllm.tables import packed_pages, page_numbers


@dataclass(frozen=True)
class Arrival:
    """A request that is evicted from, as the scheduler announces it.

    Args:
        request_id: its id.
        cut: how much of its prompt stays.
        budget: of its prompt.
        seed: of the draw.
        keep_positions: whether the worker remembers which entries stayed.
    """

    request_id: str
    cut: Cut
    budget: Budget
    seed: int
    keep_positions: bool = False


@dataclass(frozen=True)
class Part:
    """A request's part of a step.

    Args:
        request_id: its id.
        last_block: the block that its last token of the step is written to.
        start: tokens computed before.
        stop: tokens computed after.
    """

    request_id: str
    last_block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Capture:
    """Queries of a step that a window observes.

    Args:
        window_LQSD: where they go.
        rows: of the step's tokens.
        places: in the window.
    """

    window_LQSD: Float[Tensor, "L Q S D"]
    rows: slice
    places: slice


@dataclass
class Batch:
    """The rows of one step's batch, as tables and captures need them.

    Args:
        evicted: whether any row was evicted from.
        full_R, starts_RP: as in `retain.vllm.tables.build_tables`.
        captures: queries to remember.
        reads_prompt: whether tokens of prompts that will be evicted from are computed.
    """

    evicted: bool
    full_R: Int32[Tensor, " R"]
    starts_RP: Int32[Tensor, "R P"]
    captures: list[Capture] = field(default_factory=list)
    reads_prompt: bool = False


class Requests:
    """What is known of each request, in tensors with one row a request.

    Args:
        num_pages: P - 1, pages of a block over all layers and heads.
        num_blocks: of the pool.
        device: of the tables.
    """

    def __init__(self, num_pages: int, num_blocks: int, device: torch.device):
        self.arrivals: dict[str, Arrival] = {}
        self.rows: dict[str, int] = {}
        self.free: list[int] = []
        # The row behind the last stands for requests that are served in full.
        self.full_S = torch.zeros(1, dtype=torch.int32, device=device)
        self.starts_SP = torch.zeros(1, num_pages + 1, dtype=torch.int32, device=device)
        self.row_of_block = torch.zeros(num_blocks, dtype=torch.int64, device=device)

    def add(self, arrival: Arrival) -> None:
        """A request, or one that is known and begins anew."""
        self.arrivals[arrival.request_id] = arrival
        if arrival.request_id not in self.rows:
            if not self.free:
                have = len(self.full_S)
                self.free = list(range(have, 2 * have))
                self.full_S = torch.cat([self.full_S, torch.zeros_like(self.full_S)])
                self.starts_SP = torch.cat([self.starts_SP, torch.zeros_like(self.starts_SP)])
            self.rows[arrival.request_id] = self.free.pop()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Requests that are over."""
        for request_id in request_ids:
            if self.arrivals.pop(request_id, None) is not None:
                self.free.append(self.rows.pop(request_id))


class Worker:
    """The requests of one worker, and its part of every layer that evicts.

    Args:
        rules: the policy, on the heads here.
        layers: what is known of each layer, in order.
        names: their names in the engine.
        pages: the memory.
        gates: of a learned policy.
        rotary: of gates that look at queries and keys before RoPE.
    """

    def __init__(
        self,
        rules: Rules,
        layers: Sequence[Layer],
        names: Sequence[str],
        pages: PageStore,
        gates: GateSet | None = None,
        rotary: Rotary | None = None,
    ):
        self.rules, self.layers, self.pages, self.gates, self.rotary = rules, layers, pages, gates, rotary
        self.order = {name: place for place, name in enumerate(names)}
        self.layout = pages.layout
        device = pages.pages.device
        self.places_L = torch.tensor(pages.places, device=device)
        self.requests = Requests(self.layout.per_block, self.layout.num_blocks, device)
        # What gates noted of the token in each slot.
        slots = self.layout.num_blocks * self.layout.page
        shape = (len(names), slots, self.layout.num_heads)
        self.noted_LSH = torch.zeros(shape, device=device) if gates is not None else None
        self.windows: dict[str, Tensor] = {}
        self.parts: list[Part] = []
        self.batch: Batch | None = None
        self.due: list[tuple[Arrival, Tensor]] = []
        self.entries_freed = self.prompts = 0
        # Called with every decision, for those who compare.
        self.watch: Callable[[str, list[Bool[Tensor, "B H T"]]], None] | None = None
        self.positions: dict[str, Int64[Tensor, " N"]] = {}

    def begin(self, arrivals: Sequence[Arrival], parts: Sequence[Part], finished: Iterable[str]) -> None:
        """A step begins, before its tables are built."""
        finished = set(finished)
        for request_id in finished:
            self.windows.pop(request_id, None)
            self.positions.pop(request_id, None)
        self.requests.drop(finished)
        for arrival in arrivals:
            self.requests.add(arrival)
        self.parts, self.batch, self.due = list(parts), None, []

    def read_batch(
        self, blocks_RB: Int[Tensor, "R B"], starts: Sequence[int], lengths_R: Int[Tensor, " R"]
    ) -> Batch:
        """Find the step's rows, and what is to be done with each.

        Args:
            blocks_RB: block tables.
            starts: where the tokens of each row begin, and where the last row's end.
            lengths_R: tokens of each row, those of this step included.
        """
        known, device = self.requests, blocks_RB.device
        R = len(lengths_R)
        last_R = (lengths_R.long() - 1).clamp_min(0) // self.layout.page
        last_R = blocks_RB[torch.arange(R, device=device), last_R].long()
        parts = {part.last_block: part for part in self.parts}
        evicted = [part for part in self.parts if part.start >= known.arrivals[part.request_id].cut.length]
        if evicted:
            blocks = torch.tensor([part.last_block for part in evicted], device=device)
            rows = [known.rows[part.request_id] for part in evicted]
            known.row_of_block[blocks] = torch.tensor(rows, device=device)
            rows_R = known.row_of_block[last_R]
            known.row_of_block[blocks] = 0
        else:
            rows_R = torch.zeros(R, dtype=torch.int64, device=device)
        batch = Batch(bool(evicted), known.full_S[rows_R], known.starts_SP[rows_R])
        if len(evicted) < len(self.parts):
            batch.reads_prompt = True
            for row, block in enumerate(last_R.tolist()):
                part = parts.get(block)
                if part is not None and part.start < known.arrivals[part.request_id].cut.length:
                    self._read_prompt(batch, part, blocks_RB[row], starts[row])
        self.batch = batch
        return batch

    def _read_prompt(self, batch: Batch, part: Part, blocks_B: Tensor, first_row: int) -> None:
        """A row that computes tokens of a prompt: its window's queries, and whether the prompt ends."""
        arrival = self.requests.arrivals[part.request_id]
        length, window = arrival.cut.length, self.rules.window
        first = max(part.start, length - window)
        stop = min(part.stop, length)
        if first < stop:
            if part.request_id not in self.windows:
                self.windows[part.request_id] = self._new_window(window)
            rows = slice(first_row + first - part.start, first_row + stop - part.start)
            places = slice(first - (length - window), stop - (length - window))
            batch.captures.append(Capture(self.windows[part.request_id], rows, places))
        if part.stop >= length:
            used = -(-length // self.layout.page)
            self.due.append((arrival, blocks_B[:used].long().clone()))

    def _new_window(self, window: int) -> Tensor:
        """Room for the queries of a window."""
        Q = self.layers[0].num_queries
        shape = (self.layout.num_layers, Q, window, self.pages.head_dim)
        return torch.empty(shape, dtype=self.pages.pages.dtype, device=self.pages.pages.device)

    def capture_(self, place: int, queries_NQD: Float[Tensor, "N Q D"]) -> None:
        """Remember queries of a layer that windows observe."""
        for capture in self.batch.captures if self.batch is not None else ():
            capture.window_LQSD[place, :, capture.places] = queries_NQD[capture.rows].transpose(0, 1)

    @torch.no_grad()
    def note_(self, place: int, slots_N: Int[Tensor, " N"], **seen: Any) -> None:
        """Store what the gate says of a layer's tokens, beside their keys and values.

        Args:
            place: of the layer.
            slots_N: where the tokens are written, -1: nowhere.
            **seen: fields of the evidence that the gate looks at.
        """
        assert self.gates is not None and self.noted_LSH is not None
        layer, N = self.layers[place], len(slots_N)
        hidden = next(iter(seen.values()))
        keys = seen.pop("keys_BHTD", None)
        if keys is None:
            keys = hidden.new_zeros(1, layer.all_heads, N, 1)
        queries = seen.pop("queries_BQSD", keys[:, :1, :1])
        evidence = Evidence(
            layer_idx=layer.layer_idx,
            queries_BQSD=queries,
            keys_BHTD=keys,
            values_BHTD=seen.pop("values_BHTD", keys),
            # No gate looks at it.
            output_weight_QDE=hidden.new_zeros(1, 1, 1).expand(
                queries.shape[1], keys.shape[-1], seen["hidden_BTE"].shape[-1] if "hidden_BTE" in seen else 1
            ),
            scaling=layer.scaling,
            positions_BT=seen.pop("positions_BT", torch.zeros(1, N, dtype=torch.int64, device=keys.device)),
            valid_BT=torch.ones(1, N, dtype=torch.bool, device=keys.device),
            rotary=self.rotary,
            **seen,
        )
        here = slice(layer.first_head, layer.first_head + self.layout.num_heads)
        noted_NH = self.gates.noted(evidence)[0, here].T
        real_N = slots_N >= 0
        self.noted_LSH[place, slots_N[real_N]] = noted_NH[real_N]

    def evict(self) -> None:
        """Pack what stays of every prompt that this step has computed to its end."""
        due, self.due = self.due, []
        for arrival, blocks_B in due:
            window = self.windows.pop(arrival.request_id, None)
            masks = decide(
                self.rules,
                self.layers,
                partial(self._show, blocks_B, window, arrival.cut.length),
                length=arrival.cut.length,
                budget=arrival.budget,
                seed=arrival.seed,
                gates=self.gates,
            )
            if self.watch is not None:
                self.watch(arrival.request_id, masks)
            self._pack(arrival, blocks_B, masks)

    def _show(
        self, blocks_B: Int64[Tensor, " blocks"], window: Tensor | None, length: int, place: int
    ) -> Shown:
        """One layer's entries of a prompt, and its window."""
        H, page, device = self.layout.num_heads, self.layout.page, blocks_B.device
        t = torch.arange(length, device=device)
        heads_H1 = torch.arange(H, device=device)[:, None]
        pages_HT = page_numbers(self.layout, blocks_B[t // page], self.places_L[place], heads_H1)
        keys, values = self.pages.read(pages_HT.flatten(), (t % page).repeat(H))
        noted_BHT = None
        if self.noted_LSH is not None:
            noted_BHT = self.noted_LSH[place, blocks_B[t // page] * page + t % page].T[None]
        queries = keys.new_zeros(1, self.layers[place].num_queries, 1, self.pages.head_dim)
        if window is not None:
            queries = window[place][None]
        D = self.pages.head_dim
        return Shown(keys.view(1, H, length, D), values.view(1, H, length, D), queries, noted_BHT)

    def _pack(
        self, arrival: Arrival, blocks_B: Int64[Tensor, " blocks"], masks: list[Bool[Tensor, "B H T"]]
    ) -> None:
        """Move what stays of a prompt's full pages into the first of its blocks."""
        cut, page, device = arrival.cut, self.layout.page, blocks_B.device
        keep_LHT = torch.cat(masks)[:, :, : cut.full * page].to(device)
        counts_LH = keep_LHT.sum(-1)
        total = int(counts_LH.sum())
        assert not (counts_LH % page).any(), "heads keep whole pages"
        assert total == cut.kept * self.layout.per_block * page, "a prompt keeps what was announced"
        layer_N, head_N, t_N = keep_LHT.nonzero(as_tuple=True)
        source = page_numbers(self.layout, blocks_B[t_N // page], self.places_L[layer_N], head_N)
        order = torch.arange(total, device=device)
        target = packed_pages(self.layout, order // page, blocks_B[order // page // self.layout.per_block])
        self.pages.write_(target, order % page, *self.pages.read(source, t_N % page))
        row = self.requests.rows[arrival.request_id]
        self.requests.full_S[row] = cut.full
        self.requests.starts_SP[row, 1:] = (counts_LH.flatten() // page).cumsum(0).int()
        if arrival.keep_positions:
            self.positions[arrival.request_id] = t_N
        self.prompts += 1
        self.entries_freed += int(keep_LHT.numel()) - total

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
from retain.cache.prompt_file import HeldPrompt, write_prompt
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.vllm.decide import Layer, Shown, decide
from retain.vllm.documents import Load, Save
from retain.vllm.pages import PageStore
from retain.vllm.settings import Cut, Rules
from retain.vllm.tables import packed_pages, page_numbers


@dataclass(frozen=True)
class Arrival:
    """A request that is evicted from, as the scheduler announces it.

    Args:
        request_id: its id.
        cut: how much of its prompt stays, or of the document that it begins with.
        budget: of its prompt.
        seed: of the draw.
        keep_positions: whether the worker remembers which entries stayed.
        serial: of the document that it makes; None: it makes none.
        document: serial of the one that it begins with, which the cut is of; None: it begins with none.
        save: a file that is written of either.
    """

    request_id: str
    cut: Cut
    budget: Budget
    seed: int
    keep_positions: bool = False
    serial: int | None = None
    document: int | None = None
    save: "Save | None" = None


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


@dataclass(frozen=True)
class Packed:
    """Where a prompt that was evicted from lies in its blocks.

    Args:
        full: full pages a head of it.
        starts_P: as in `retain.vllm.tables`.
        positions_N: the token of each entry; None where no file may be written of it.
    """

    full: int
    starts_P: Int32[Tensor, " P"]
    positions_N: Int32[Tensor, " N"] | None


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

    def pack(self, request_id: str, packed: Packed) -> None:
        """What stays of a request's prompt lies packed."""
        row = self.rows[request_id]
        self.full_S[row] = packed.full
        self.starts_SP[row] = packed.starts_P


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
        # Shared documents by their serials; those that this step brings into the pool.
        self.documents: dict[int, Packed] = {}
        self.loads: list[Load] = []
        self.saves: list[Arrival] = []
        self.fingerprint: dict[str, Any] | None = None
        self.files_written = 0
        self.unwritten: list[str] = []

    def begin(
        self,
        arrivals: Sequence[Arrival],
        parts: Sequence[Part],
        finished: Iterable[str],
        *,
        loads: Sequence[Load] = (),
        dropped: Iterable[int] = (),
    ) -> None:
        """A step begins, before its tables are built."""
        finished = set(finished)
        for serial in dropped:
            self.documents.pop(serial, None)
        self.loads, self.saves = list(loads), []
        for load in loads:
            ends = (load.held.counts_LH.flatten() // self.layout.page).cumsum(0)
            starts_P = torch.cat([ends.new_zeros(1), ends]).int().to(self.places_L.device)
            self.documents[load.serial] = Packed(load.full, starts_P, load.held.positions_N.int())
        for request_id in finished:
            self.windows.pop(request_id, None)
            self.positions.pop(request_id, None)
        self.requests.drop(finished)
        for arrival in arrivals:
            self.requests.add(arrival)
            if arrival.document is not None:
                self.requests.pack(arrival.request_id, self.documents[arrival.document])
                if arrival.save is not None:
                    self.saves.append(arrival)
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
        evidence = Evidence(
            layer_idx=layer.layer_idx,
            queries_BQSD=seen.pop("queries_BQSD", keys[:, :1, :1]),
            keys_BHTD=keys,
            values_BHTD=seen.pop("values_BHTD", keys),
            output_weight_QDE=keys.new_zeros(1, 1, 1),
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

    def load_(self) -> None:
        """Write the documents that this step brings into the pool, before its forward pass."""
        loads, self.loads = self.loads, []
        for load in loads:
            blocks_K = torch.tensor(load.blocks, device=self.places_L.device)
            pages_N, entries_N = self._where(blocks_K, len(load.held.positions_N))
            like = self.pages.pages
            self.pages.write_(pages_N, entries_N, load.held.keys_ND.to(like), load.held.values_ND.to(like))

    def _where(
        self, blocks_K: Int64[Tensor, " K"], total: int
    ) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
        """Pages of all entries of a packed prompt, in order, and their places in them."""
        order_N = torch.arange(total, device=blocks_K.device)
        pages_N = order_N // self.layout.page
        blocks_N = blocks_K[pages_N // self.layout.per_block]
        return packed_pages(self.layout, pages_N, blocks_N), order_N % self.layout.page

    def _save(self, save: Save, packed: Packed, blocks_K: Int64[Tensor, " K"]) -> None:
        """Write a document to its file; that the disk takes no more stops no request."""
        assert packed.positions_N is not None and self.fingerprint is not None
        keys, values = self.pages.read(*self._where(blocks_K, len(packed.positions_N)))
        shape = (self.layout.num_layers, self.layout.num_heads)
        counts_LH = (packed.starts_P.diff() * self.layout.page).view(shape)
        try:
            write_prompt(
                save.path,
                HeldPrompt(counts_LH, keys, values, packed.positions_N),
                save.tokens_T,
                rule=save.rule,
                seed=save.seed,
                fingerprint=self.fingerprint,
                layers=[layer.layer_idx for layer in self.layers],
            )
            self.files_written += 1
        except OSError as error:
            self.unwritten.append(str(error))

    def evict(self) -> None:
        """Pack what stays of every prompt that this step has computed to its end."""
        for arrival in self.saves:
            assert arrival.save is not None and arrival.save.blocks is not None
            assert arrival.document is not None
            blocks_K = torch.tensor(arrival.save.blocks, device=self.places_L.device)
            self._save(arrival.save, self.documents[arrival.document], blocks_K)
        self.saves = []
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

    def _show(self, blocks_B: Int64[Tensor, " B"], window: Tensor | None, length: int, place: int) -> Shown:
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
        self, arrival: Arrival, blocks_B: Int64[Tensor, " B"], masks: list[Bool[Tensor, "B H T"]]
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
        self.pages.write_(*self._where(blocks_B, total), *self.pages.read(source, t_N % page))
        starts_P = torch.zeros(self.layout.per_block + 1, dtype=torch.int32, device=device)
        starts_P[1:] = (counts_LH.flatten() // page).cumsum(0)
        packed = Packed(cut.full, starts_P, t_N.int().cpu() if arrival.keep_positions else None)
        self.requests.pack(arrival.request_id, packed)
        if arrival.keep_positions:
            self.positions[arrival.request_id] = t_N
        if arrival.serial is not None:
            self.documents[arrival.serial] = packed
            if arrival.save is not None:
                self._save(arrival.save, packed, blocks_B[: cut.kept])
        self.prompts += 1
        self.entries_freed += int(keep_LHT.numel()) - total

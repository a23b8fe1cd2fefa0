"""What a worker knows of the requests that are evicted from, and of the tokens of a step.

The scheduler says of each step which of its requests may be evicted from, how far they have come, which of
them are evicted from when it ends, and which block each of them writes last: a block that no other request
has, by which rows of the batch are told apart. After the forward pass what is due is evicted
(`retain.vllm.packing.eviction`).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.vllm.packing.decide import Layer
from retain.vllm.packing.eviction import Memory, evict
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Arrival
from retain.vllm.settings import Rules

# As vLLM's own, so that its settings of what is logged hold.
logger = logging.getLogger("vllm.retain")


@dataclass(frozen=True)
class Part:
    """A request's part of a step.

    Args:
        request_id: its id.
        last_block: the block that its last token of the step is written to.
        start, stop: tokens computed before and after.
        evicted: whether it was evicted from before.
        evicts: whether it is when the step ends.
    """

    request_id: str
    last_block: int
    start: int
    stop: int
    evicted: bool
    evicts: bool


@dataclass
class Batch:
    """The rows of one step's batch.

    Args:
        packed: whether any row was evicted from.
        full_R, starts_RP: as in `retain.vllm.packing.tables.build_tables`.
        notes: whether gates look at the step's tokens.
        observed: queries to remember: rows among the step's tokens, their requests' windows, places in them.
        positions_N: of the step's tokens, where a gate looks at their queries and keys.
    """

    packed: bool
    full_R: Int32[Tensor, " R"]
    starts_RP: Int32[Tensor, "R P"]
    notes: bool = False
    observed: tuple[Tensor, Tensor, Tensor] | None = None
    positions_N: Int64[Tensor, " N"] | None = None


class Pool:
    """Rows of tensors that requests take and give back; there are twice as many when they run out.

    Args:
        *tensors: with one row each, the first one for requests without a row of their own.
    """

    def __init__(self, *tensors: Tensor):
        self.tensors = list(tensors)
        self.rows: dict[str, int] = {}
        self.free: list[int] = []

    def take(self, request_id: str) -> int:
        """The request's row, zeroed when it is new."""
        if request_id not in self.rows:
            if not self.free:
                have = len(self.tensors[0])
                self.free = list(range(have, 2 * have))
                self.tensors = [torch.cat([own, torch.zeros_like(own)]) for own in self.tensors]
            self.rows[request_id] = self.free.pop()
            for own in self.tensors:
                own[self.rows[request_id]] = 0
        return self.rows[request_id]

    def drop(self, request_id: str) -> None:
        """Give the request's row back, if it has one."""
        if request_id in self.rows:
            self.free.append(self.rows.pop(request_id))


class Worker:
    """The requests of one worker, and its part of every layer that evicts.

    Args:
        rules: the policy, on the heads here.
        layers: what is known of each layer, in order.
        names: their names in the engine.
        pages: the memory.
        gates: of a learned policy.
    """

    def __init__(
        self,
        rules: Rules,
        layers: Sequence[Layer],
        names: Sequence[str],
        pages: PageStore,
        gates: GateSet | None = None,
    ):
        self.rules, self.layers, self.gates = rules, layers, gates
        self.order = {name: place for place, name in enumerate(names)}
        self.memory = Memory(pages, notes=gates is not None)
        self.layout = pages.layout
        device = pages.pages.device
        self.places_L = torch.tensor(pages.places, device=device)
        self.arrivals: dict[str, Arrival] = {}
        self.requests = Pool(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, self.layout.per_block + 1, dtype=torch.int32, device=device),
        )
        shape = (1, len(layers), max(1, rules.window), layers[0].num_queries, pages.head_dim)
        self.windows = Pool(torch.zeros(shape, dtype=pages.pages.dtype, device=device))
        self.row_of_block = torch.zeros(self.layout.num_blocks, dtype=torch.int64, device=device)
        self.parts: list[Part] = []
        self.batch: Batch | None = None
        self.due: list[tuple[str, Tensor]] = []
        # Since the start: evictions, those that failed, entries that went.
        self.counts = {"evictions": 0, "evictions_failed": 0, "entries_freed": 0}
        # Called with every decision, for those who compare: request, length of its prompt, what heads keep.
        self.watch: Callable[[str, int, list[list[list[int]]]], None] | None = None

    @property
    def reads_heads(self) -> bool:
        """Whether gates look at queries, keys or values, rather than at the attention input."""
        return self.gates is not None and "hidden" not in self.gates.inputs

    def begin(self, arrivals: Sequence[Arrival], parts: Sequence[Part], finished: Iterable[str]) -> None:
        """A step begins, before its tables are built."""
        for request_id in finished:
            self.arrivals.pop(request_id, None)
            self.requests.drop(request_id)
            self.windows.drop(request_id)
        self.arrivals |= {arrival.request_id: arrival for arrival in arrivals}
        for part in parts:
            if part.evicted:
                self.windows.drop(part.request_id)
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
        device, R = blocks_RB.device, len(lengths_R)
        last_R = (lengths_R.long() - 1).clamp_min(0) // self.layout.page
        last_R = blocks_RB[torch.arange(R, device=device), last_R].long()
        rows_R = torch.zeros(R, dtype=torch.int64, device=device)
        packed = [part for part in self.parts if part.evicted]
        if packed:
            blocks = torch.tensor([part.last_block for part in packed], device=device)
            rows = [self.requests.take(part.request_id) for part in packed]
            self.row_of_block[blocks] = torch.tensor(rows, device=device)
            rows_R = self.row_of_block[last_R]
            self.row_of_block[blocks] = 0
        full_S, starts_SP = self.requests.tensors
        batch = Batch(bool(packed), full_S[rows_R], starts_SP[rows_R])
        reading = [part for part in self.parts if not part.evicted]
        looked = [part for part in reading if part.evicts or part.stop > self._observed(part.request_id)]
        batch.notes = self.gates is not None and bool(reading)
        if batch.notes and self.reads_heads:
            batch.positions_N = positions_of(starts, lengths_R)
        if looked:
            place_of = {block: place for place, block in enumerate(last_R.tolist())}
            self._look(batch, [(part, place_of[part.last_block]) for part in looked], blocks_RB, starts)
        self.batch = batch
        return batch

    def _observed(self, request_id: str) -> int:
        """First token of a prompt whose query the eviction observes."""
        return self.arrivals[request_id].length - self.rules.window

    def _look(
        self, batch: Batch, parts: list[tuple[Part, int]], blocks_RB: Tensor, starts: Sequence[int]
    ) -> None:
        """Rows whose queries an eviction observes, and rows that are evicted from at the end."""
        observed: list[tuple[int, int, int]] = []
        window = self.rules.window
        for part, place in parts:
            length = self.arrivals[part.request_id].length
            if part.evicts:
                used = -(-length // self.layout.page)
                self.due.append((part.request_id, blocks_RB[place, :used].long().clone()))
            first, stop = max(part.start, self._observed(part.request_id)), min(part.stop, length)
            if first < stop:
                slot, shift = self.windows.take(part.request_id), starts[place] - part.start
                observed += [(shift + token, slot, token % window) for token in range(first, stop)]
        if observed:
            rows, slots, places = torch.tensor(observed, device=blocks_RB.device).T
            batch.observed = rows, slots, places

    def observe_(self, place: int, queries_NQD: Float[Tensor, "N Q D"]) -> None:
        """Remember queries of a layer that an eviction may observe."""
        if self.batch is not None and self.batch.observed is not None:
            rows, slots, places = self.batch.observed
            self.windows.tensors[0][slots, place, places] = queries_NQD[rows]

    def note_heads_(
        self,
        place: int,
        slots_N: Int[Tensor, " N"],
        queries_NQD: Float[Tensor, "N Q D"],
        keys_NHD: Float[Tensor, "N H D"],
        values_NHD: Float[Tensor, "N H D"],
    ) -> None:
        """Store what a gate says that looks at a layer's queries, keys or values."""
        assert self.batch is not None and self.batch.positions_N is not None
        heads = [each.transpose(0, 1)[None] for each in (queries_NQD, keys_NHD, values_NHD)]
        self.note_(
            place,
            slots_N,
            queries_BQSD=heads[0],
            keys_BHTD=heads[1],
            values_BHTD=heads[2],
            positions_BT=self.batch.positions_N[None],
        )

    @torch.no_grad()
    def note_(self, place: int, slots_N: Int[Tensor, " N"], **seen: Any) -> None:
        """Store what the gate says of a layer's tokens, beside their keys and values.

        Args:
            place: of the layer.
            slots_N: where the tokens are written, -1: nowhere.
            **seen: fields of the evidence that the gate looks at.
        """
        assert self.gates is not None
        layer, N = self.layers[place], len(slots_N)
        keys = seen.pop("keys_BHTD", None)
        if keys is None:
            keys = seen["hidden_BTE"].new_zeros(1, layer.all_heads, N, 1)
        queries = seen.pop("queries_BQSD", keys[:, :1, :1])
        width = seen["hidden_BTE"].shape[-1] if "hidden_BTE" in seen else 1
        evidence = Evidence(
            layer_idx=layer.layer_idx,
            queries_BQSD=queries,
            keys_BHTD=keys,
            values_BHTD=seen.pop("values_BHTD", keys),
            # No gate looks at it.
            output_weight_QDE=keys.new_zeros(1, 1, 1).expand(queries.shape[1], keys.shape[-1], width),
            scaling=layer.scaling,
            positions_BT=seen.pop("positions_BT", torch.zeros(1, N, dtype=torch.int64, device=keys.device)),
            valid_BT=torch.ones(1, N, dtype=torch.bool, device=keys.device),
            rotary=layer.rotary,
            **seen,
        )
        here = slice(layer.first_head, layer.first_head + self.layout.num_heads)
        noted_NH = self.gates.noted(evidence)[0, here].T
        real_N = slots_N >= 0
        self.memory.note_(self.places_L[place], slots_N[real_N].long(), noted_NH[real_N])

    def evict(self) -> None:
        """Evict what is due at the end of the step."""
        due, self.due = self.due, []
        self.counts["evictions"] += len(due)
        for request_id, blocks_B in due:
            self._evict(self.arrivals[request_id], blocks_B)

    def _evict(self, asked: Arrival, blocks_B: Int64[Tensor, " blocks"]) -> None:
        """Evict from one request."""
        given = self.layers, self.memory, blocks_B, self._window(asked), asked
        try:
            starts_P, keeps = evict(self.rules, *given, self.gates)
        except ValueError as error:
            self.counts["evictions_failed"] += 1
            logger.error(
                "The policy could not decide what to keep of request %s; its last entries were kept: %s",
                asked.request_id,
                error,
            )
            starts_P, keeps = evict(self.rules.last_resort, *given)
        row, full = self.requests.take(asked.request_id), asked.length // self.layout.page
        full_S, starts_SP = self.requests.tensors
        full_S[row], starts_SP[row] = full, starts_P
        self.counts["entries_freed"] += (full - asked.kept) * self.layout.per_block * self.layout.page
        if self.watch is not None:
            places = [[head.nonzero()[:, 0].tolist() for head in keep_HT] for keep_HT in keeps]
            self.watch(asked.request_id, asked.length, places)

    def _window(self, asked: Arrival) -> Float[Tensor, "L Q S D"] | None:
        """The last queries of a prompt, in order; None where the policy observes none."""
        size, (windows,) = self.rules.window, self.windows.tensors
        if not size:
            return None
        order = torch.arange(asked.length - size, asked.length, device=windows.device) % size
        return windows[self.windows.take(asked.request_id)][:, order].transpose(1, 2)


def positions_of(starts: Sequence[int], lengths_R: Int[Tensor, " R"]) -> Int64[Tensor, " N"]:
    """Positions of a step's tokens.

    Args:
        starts: where the tokens of each row begin, and where the last row's end.
        lengths_R: tokens of each row, those of this step included.
    """
    first_R1 = torch.tensor(starts, device=lengths_R.device)
    counts_R = first_R1.diff()
    before_R = lengths_R.long() - counts_R - first_R1[:-1]
    N = starts[-1]
    return torch.arange(N, device=lengths_R.device) + before_R.repeat_interleave(counts_R, output_size=N)

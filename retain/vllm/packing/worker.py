"""What a worker knows of the requests that are evicted from, and of the tokens of a step.

The scheduler says of each step which of its requests may be evicted from, how far they have come, which of
them are evicted from when it ends, and which block each of them writes last: a block that no other request
has, by which rows of the batch are told apart. After the forward pass what is due is evicted
(`retain.vllm.packing.eviction`).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.gates.base import GateSet
from retain.vllm.packing.eviction import Layer, Memory, decide, last_entries, pack_
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
        full_R, starts_RP: as in `retain.vllm.packing.tables.build_tables`.
        packed: whether any row was evicted from.
        notes: whether gates look at the step's tokens.
        observed: queries to remember: rows among the step's tokens, the window of their request, places in
            it.
        positions_N: of the step's tokens.
    """

    full_R: Int32[Tensor, " R"]
    starts_RP: Int32[Tensor, "R P"]
    packed: bool
    notes: bool
    observed: list[tuple[slice, Float[Tensor, "L S Q D"], slice]]
    positions_N: Int64[Tensor, " N"]


@dataclass
class Request:
    """A request that is evicted from.

    Args:
        asked: as announced.
        window_LSQD: its prompt's last queries, while it is read and the policy observes any.
        starts_P: once it was evicted from (`retain.vllm.packing.tables`).
        blocks_B: of its prompt, in the step after which it is evicted from.
    """

    asked: Arrival
    window_LSQD: Float[Tensor, "L S Q D"] | None = None
    starts_P: Int32[Tensor, " P"] | None = None
    blocks_B: Int64[Tensor, " blocks"] | None = None


@dataclass
class Worker:
    """The requests of one worker, and its part of every layer that evicts.

    Args:
        rules: the policy, on the heads here.
        layers: what is known of each layer, in order.
        names: their names in the engine.
        pages: the memory.
        gates: of a learned policy.
        watch: called with every decision, for those who compare: request, and what each layer keeps.
    """

    rules: Rules
    layers: Sequence[Layer]
    names: Sequence[str]
    pages: PageStore
    gates: GateSet | None = None
    watch: Callable[[str, list[Bool[Tensor, "H T"]]], None] | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    batch: Batch | None = None

    def __post_init__(self) -> None:
        self.order = {name: place for place, name in enumerate(self.names)}
        self.memory, self.layout = Memory(self.pages, notes=self.gates is not None), self.pages.layout
        self.places_L = torch.tensor(self.pages.places, device=self.pages.pages.device)
        # Since the start: evictions, those that failed, entries that went.
        self.counts = {"evictions": 0, "evictions_failed": 0, "entries_freed": 0}
        # Whether gates look at queries, keys or values, rather than at the attention input.
        self.reads_heads = self.gates is not None and "hidden" not in self.gates.inputs

    def begin(self, arrivals: Sequence[Arrival], parts: Sequence[Part], finished: Iterable[str]) -> None:
        """A step begins, before its tables are built."""
        for request_id in finished:
            self.requests.pop(request_id, None)
        self.requests |= {asked.request_id: Request(asked) for asked in arrivals}
        self.parts, self.batch = list(parts), None

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
        last_R = blocks_RB[torch.arange(R, device=device), last_R]
        row_of = {block: row for row, block in enumerate(last_R.tolist())}
        full_R = torch.zeros(R, dtype=torch.int32, device=device)
        starts_RP = full_R.new_zeros(R, self.layout.per_block + 1)
        observed = []
        for part in self.parts:
            row, request = row_of[part.last_block], self.requests[part.request_id]
            if part.evicted:
                assert request.starts_P is not None
                full_R[row] = request.asked.length // self.layout.page
                starts_RP[row] = request.starts_P
                continue
            if part.evicts:
                used = -(-request.asked.length // self.layout.page)
                request.blocks_B = blocks_RB[row, :used].long()
            observed += self._observed(request, part, starts[row] - part.start)
        evicted = [part.evicted for part in self.parts]
        notes = self.gates is not None and not all(evicted)
        positions_N = positions_of(starts, lengths_R)
        self.batch = Batch(full_R, starts_RP, any(evicted), notes, observed, positions_N)
        return self.batch

    def _observed(
        self, request: Request, part: Part, shift: int
    ) -> list[tuple[slice, Float[Tensor, "L S Q D"], slice]]:
        """Queries of a part that the eviction observes, if any; token `t` is in row `t + shift`."""
        length, window = request.asked.length, self.rules.window
        first, stop = max(part.start, length - window), min(part.stop, length)
        if first >= stop:
            return []
        if request.window_LSQD is None:
            shape = (len(self.layers), window, self.layers[0].num_queries, self.pages.head_dim)
            request.window_LSQD = self.pages.pages.new_zeros(shape)
        begins = length - window
        rows, places = slice(first + shift, stop + shift), slice(first - begins, stop - begins)
        return [(rows, request.window_LSQD, places)]

    def observe_(self, place: int, queries_NQD: Float[Tensor, "N Q D"]) -> None:
        """Remember queries of a layer that an eviction may observe."""
        for rows, window_LSQD, places in self.batch.observed if self.batch is not None else ():
            window_LSQD[place, places] = queries_NQD[rows]

    @torch.no_grad()
    def note_(self, place: int, slots_N: Int[Tensor, " N"], **seen: Tensor) -> None:
        """Store what the gate says of a layer's tokens, beside their keys and values.

        Args:
            place: of the layer.
            slots_N: where the tokens are written, -1: nowhere.
            **seen: what the gate looks at: `hidden_NE`, or `queries_NQD`, `keys_NHD` and `values_NHD`.
        """
        assert self.gates is not None and self.batch is not None
        layer, N, fields = self.layers[place], len(slots_N), dict[str, Any]()
        if "hidden_NE" in seen:
            fields = {"hidden_BTE": seen["hidden_NE"][None]}
            keys = seen["hidden_NE"].new_zeros(1, layer.all_heads, N, 1)
        else:
            names = ("queries_NQD", "keys_NHD", "values_NHD")
            queries, keys, values = (seen[name].transpose(0, 1)[None] for name in names)
            positions = self.batch.positions_N[None]
            fields = {"queries_BQSD": queries, "values_BHTD": values, "positions_BT": positions}
        # No gate looks at the output projection.
        evidence = layer.evidence(keys, output_weight_QDE=None, **fields)
        here = slice(layer.first_head, layer.first_head + self.layout.num_heads)
        noted_NH, real_N = self.gates.noted(evidence)[0, here].T, slots_N >= 0
        self.memory.note_(place, slots_N[real_N].long(), noted_NH[real_N])

    def evict(self) -> None:
        """Evict what is due at the end of the step."""
        for part in self.parts:
            if part.evicts:
                self._evict(self.requests[part.request_id])
        self.parts = []

    def _evict(self, request: Request) -> None:
        """Evict from one request."""
        asked, blocks_B, window = request.asked, request.blocks_B, request.window_LSQD
        assert blocks_B is not None

        def shown(place: int) -> Any:
            queries = {} if window is None else {"queries_BQSD": window[place].transpose(0, 1)[None]}
            return self.layers[place].evidence(**self.memory.show(place, blocks_B, asked.length), **queries)

        self.counts["evictions"] += 1
        try:
            keeps = decide(self.rules, map(shown, range(len(self.layers))), asked, self.gates)
        except ValueError as error:
            self.counts["evictions_failed"] += 1
            logger.error(
                "The policy could not decide what to keep of request %s; its last entries were kept: %s",
                asked.request_id,
                error,
            )
            keeps = last_entries(self.rules, asked)
        request.starts_P = pack_(self.memory, blocks_B, asked.kept, keeps)
        request.window_LSQD = request.blocks_B = None
        gone = asked.length // self.layout.page - asked.kept
        self.counts["entries_freed"] += gone * self.layout.per_block * self.layout.page
        if self.watch is not None:
            self.watch(asked.request_id, keeps)


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

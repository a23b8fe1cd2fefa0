"""Holds what a worker knows of the requests that are evicted from, and of the tokens of a step.

The scheduler says of each step which of its requests may be evicted from, how far they have come, which of
them are evicted from when it ends, and which block each of them writes last: a block that no other request
has, by which rows of the batch are told apart. After the forward pass what is due is evicted
(`retain.vllm.packing.eviction`).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.vllm.packing.eviction import decide, last_entries, pack_, with_tokens
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.progress import Arrival
from retain.vllm.settings import Rules

# Below vLLM's logger, so that its log settings apply.
logger = logging.getLogger("vllm.retain")


@dataclass(frozen=True)
class Part:
    """A request's part of a step, which computes tokens `start` to `stop`, the last into `last_block`.

    It was evicted from before (`evicted`), or is when the step ends (`evicts`).
    """

    asked: Arrival
    last_block: int
    start: int
    stop: int
    evicted: bool
    evicts: bool


@dataclass
class Request:
    """State of a request that is evicted from.

    Args:
        window_LSQD: its prompt's last queries, while it is read.
        learned_LHT: gates' scores of its prompt's tokens, while it is read.
        starts_P: once it was evicted from (`retain.vllm.packing.tables`).
        blocks_B: of its prompt, in the step after which it is evicted from.
    """

    window_LSQD: Float[Tensor, "L S Q D"]
    learned_LHT: Float[Tensor, "L H T"]
    starts_P: Int32[Tensor, " P"] | None = None
    blocks_B: Int64[Tensor, " blocks"] | None = None


class Reading(NamedTuple):
    """A prompt's tokens `start` to `stop`; token `t` is in row `t + shift` of the step's."""

    asked: Arrival
    request: Request
    start: int
    stop: int
    shift: int


@dataclass
class Worker:
    """The requests of one worker, and its part of every layer that evicts.

    Args:
        rules: the policy, on the heads here.
        layers: each layer, in order, without tokens.
        names: their names in the engine.
        pages: the memory.
        gates: of a learned policy.
        watch: called with every decision, for those who compare: request, and what each layer keeps.
    """

    rules: Rules
    layers: Sequence[Evidence]
    names: Sequence[str]
    pages: PageStore
    gates: GateSet | None = None
    watch: Callable[[str, list[Bool[Tensor, "H T"]]], None] | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    reading: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = {name: place for place, name in enumerate(self.names)}
        self.layout = self.pages.layout
        self.places_L = torch.tensor(self.pages.places, device=self.pages.pages.device)
        self.num_tokens = 0  # of this step

    def begin(self, parts: Sequence[Part], finished: Iterable[str]) -> None:
        """A step begins, before its tables are built."""
        for request_id in finished:
            self.requests.pop(request_id, None)
        self.parts, self.reading = list(parts), []

    def read_batch(
        self, blocks_RB: Int[Tensor, "R B"], starts: Sequence[int], lengths_R: Int[Tensor, " R"]
    ) -> tuple[Int32[Tensor, " R"], Int32[Tensor, "R P"]] | None:
        """Find the step's rows, and what is to be done with each.

        Args:
            blocks_RB: block tables.
            starts: where the tokens of each row begin, and where the last row's end.
            lengths_R: tokens of each row, those of this step included.

        Returns:
            pages and starts of `build_tables`; None: no row was evicted from.
        """
        device, R = blocks_RB.device, len(lengths_R)
        last_R = (lengths_R.long() - 1).clamp_min(0) // self.layout.page
        last_R = blocks_RB[torch.arange(R, device=device), last_R]
        row_of = {block: row for row, block in enumerate(last_R.tolist())}
        full_R = torch.zeros(R, dtype=torch.int32, device=device)
        starts_RP = full_R.new_zeros(R, self.layout.per_block + 1)
        for part in self.parts:
            asked, row = part.asked, row_of[part.last_block]
            if part.evicted:
                starts_P = self.requests[asked.request_id].starts_P
                assert starts_P is not None
                full_R[row], starts_RP[row] = asked.length // self.layout.page, starts_P
                continue
            request = self.requests.get(asked.request_id)
            if request is None or part.start == 0:
                request = self.requests[asked.request_id] = self._begun(asked)
            if part.evicts:
                request.blocks_B = blocks_RB[row, : -(-asked.length // self.layout.page)].long()
            stop, shift = min(part.stop, asked.length), starts[row] - part.start
            self.reading.append(Reading(asked, request, part.start, stop, shift))
        self.num_tokens = starts[-1]
        return (full_R, starts_RP) if any(part.evicted for part in self.parts) else None

    def _begun(self, asked: Arrival) -> Request:
        """A request whose prompt begins to be read."""
        L, numbers, tokens = len(self.layers), self.pages.pages, asked.length if self.gates else 0
        window = (L, self.rules.window, self.layers[0].queries_BQSD.shape[1], self.pages.head_dim)
        learned_LHT = torch.zeros(L, self.layout.num_heads, tokens, device=numbers.device)
        return Request(numbers.new_zeros(window), learned_LHT)

    def observe_(self, place: int, queries_NQD: Float[Tensor, "N Q D"]) -> None:
        """Remember queries of a layer that an eviction observes."""
        for asked, request, start, stop, shift in self.reading:
            begins = asked.length - self.rules.window
            if (first := max(begins, start)) < stop:
                queries_SQD = queries_NQD[first + shift : stop + shift]
                request.window_LSQD[place, first - begins : stop - begins] = queries_SQD

    @torch.no_grad()
    def score_tokens_(self, place: int, hidden_NE: Float[Tensor, "N E"]) -> None:
        """Store the gates' scores of a layer's tokens, by their attention inputs; `place` is the layer's."""
        assert self.gates is not None
        shape = (1, self.layout.num_heads, len(hidden_NE), self.pages.head_dim)
        layer = with_tokens(
            self.layers[place], hidden_NE.new_zeros(1).expand(shape), hidden_BTE=hidden_NE[None]
        )
        score_HN = self.gates.learned(layer)[0]
        for _, request, start, stop, shift in self.reading:
            request.learned_LHT[place, :, start:stop] = score_HN[:, start + shift : stop + shift]

    def evict(self) -> dict[str, int]:
        """Evict what is due at the end of the step: evictions, those that failed, entries that went."""
        due, self.parts = [part.asked for part in self.parts if part.evicts], []
        if not due:
            return {}
        failed = sum([not self._evict(asked, self.requests[asked.request_id]) for asked in due])
        L, _, H, page = self.layout
        freed = sum(asked.length // page - asked.kept for asked in due) * L * H * page
        return {"evictions": len(due), "evictions_failed": failed, "entries_freed": freed}

    def _evict(self, asked: Arrival, request: Request) -> bool:
        """Evict from one request; whether the policy could decide."""
        blocks_B, decided = request.blocks_B, True
        assert blocks_B is not None

        def shown(place: int) -> Evidence:
            numbers_HB = self.pages.numbers(place, blocks_B)
            keys, values = (
                part.view(1, len(numbers_HB), -1, self.pages.head_dim)[:, :, : asked.length]
                for part in self.pages.read(numbers_HB.flatten())
            )
            seen = {"queries_BQSD": request.window_LSQD[place].transpose(0, 1)[None], "values_BHTD": values}
            if self.gates is not None:
                seen["learned_BHT"] = request.learned_LHT[place][None]
            return with_tokens(self.layers[place], keys, **seen)

        try:
            keeps = decide(self.rules, map(shown, range(len(self.layers))), asked, self.gates)
        except ValueError as error:
            message = "The policy could not decide what to keep of request %s; its last entries were kept: %s"
            logger.error(message, asked.request_id, error)
            keeps, decided = last_entries(self.rules, asked), False
        starts_P = pack_(self.pages, blocks_B, asked.kept, keeps)
        # Queries and scores are not needed any more: if it is preempted, its prompt is read again.
        none = request.window_LSQD[:, :0].clone(), request.learned_LHT[..., :0].clone()
        self.requests[asked.request_id] = Request(*none, starts_P)
        if self.watch is not None:
            self.watch(asked.request_id, keeps)
        return decided

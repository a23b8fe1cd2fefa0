"""Holds what a worker knows of the requests that are evicted from, and of the tokens of a step.

The scheduler says of each step which of its requests may be evicted from, how far they have come, and which
block each of them writes last: a block that no other request has, by which rows of the batch are told apart.
After the forward pass prompts that were computed to their end are evicted from: a policy is shown their
entries, and those that it keeps are packed. A request that begins anew was preempted, and is evicted from as
before.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from retain.budget.statement import Budget
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, score_entries
from retain.vllm.packing.pages import PageStore
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.settings import Rules

# Below vLLM's logger, so that its log settings apply.
logger = logging.getLogger("vllm.retain")


@dataclass(frozen=True)
class Arrival:
    """A request that is evicted from when the last token of its prompt has been computed.

    All of it follows from the request's length and budget, so that scheduler and workers agree: what stays of
    its `length // page` full pages a head is packed into its first `kept` blocks, and the others are free.

    Args:
        request_id: its id.
        length: tokens of its prompt.
        kept: pages a head, in the mean, that stay of its full ones.
        budget: what it may keep.
        seed: of the draw.
    """

    request_id: str
    length: int
    kept: int
    budget: Budget
    seed: int


@dataclass(frozen=True)
class Part:
    """A request's part of a step, which computes tokens `start` to `stop`, the last into `last_block`."""

    asked: Arrival
    last_block: int
    start: int
    stop: int


@dataclass
class Prompt:
    """A prompt that is being read.

    Args:
        asked: its request.
        window_LSQD: its last queries.
        learned_LHT: gates' scores of its tokens.
        start, stop: its tokens in this step.
        shift: token `t` is in row `t + shift` of the step's.
        blocks_B: its blocks so far.
    """

    asked: Arrival
    window_LSQD: Float[Tensor, "L S Q D"]
    learned_LHT: Float[Tensor, "L H T"]
    start: int = 0
    stop: int = 0
    shift: int = 0
    blocks_B: Int64[Tensor, " blocks"] = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def with_tokens(
    layer: Evidence, keys_BHTD: Float[Tensor, "B H T D"], values_BHTD: Float[Tensor, "B H T D"], **seen: Any
) -> Evidence:
    """Evidence of a layer's tokens, B = 1; fields that no method reads stay empty.

    Args:
        layer: the same without tokens.
        keys_BHTD, values_BHTD: of the tokens.
        **seen: further fields.
    """
    positions_BT = torch.arange(keys_BHTD.shape[2], device=keys_BHTD.device)[None]
    seen |= {"positions_BT": positions_BT, "valid_BT": torch.ones_like(positions_BT, dtype=torch.bool)}
    return replace(layer, keys_BHTD=keys_BHTD, values_BHTD=values_BHTD, **seen)


@dataclass
class Worker:
    """The requests of one worker, and its part of every layer that evicts.

    Args:
        rules: the policy, on the heads here.
        layers: name in the engine -> the layer without tokens; in order.
        pages: the memory.
        gates: of a learned policy.
        watch: called with every decision, for those who compare: request, and what each layer keeps.
    """

    rules: Rules
    layers: Mapping[str, Evidence]
    pages: PageStore
    gates: GateSet | None = None
    watch: Callable[[str, list[Bool[Tensor, "H T"]]], None] | None = None

    def __post_init__(self) -> None:
        self.order = {name: place for place, name in enumerate(self.layers)}
        self.layout = self.pages.layout
        self.prompts: dict[str, Prompt] = {}
        # Request -> its starts among packed pages (`retain.vllm.packing.pages`), once it was evicted from.
        self.starts: dict[str, Int32[Tensor, " starts"]] = {}
        # The step: what it computes, the prompts that it reads, and its tokens.
        self.parts: list[Part] = []
        self.reading: list[Prompt] = []
        self.num_tokens = 0

    def begin(self, parts: Sequence[Part], finished: Iterable[str]) -> None:
        """A step begins, before its tables are built."""
        for request_id in finished:
            self.prompts.pop(request_id, None)
            self.starts.pop(request_id, None)
        self.parts, self.reading = list(parts), []

    def read_batch(
        self, blocks_RB: Int[Tensor, "R B"], starts: Sequence[int], lengths_R: Int[Tensor, " R"]
    ) -> tuple[Int32[Tensor, " R"], Int32[Tensor, "R starts"]] | None:
        """Find the step's rows, and what is to be done with each.

        Args:
            blocks_RB: block tables.
            starts: where the tokens of each row begin, and where the last row's end.
            lengths_R: tokens of each row, those of this step included.

        Returns:
            pages and starts of `build_tables`; None: no row was evicted from.
        """
        device, page = blocks_RB.device, self.layout.page
        last_R1 = (lengths_R.long() - 1).clamp_min(0)[:, None] // page
        row_of = {block: row for row, block in enumerate(blocks_RB.gather(1, last_R1)[:, 0].tolist())}
        full_R = torch.zeros(len(lengths_R), dtype=torch.int32, device=device)
        starts_RP1 = full_R.new_zeros(len(lengths_R), self.layout.per_block + 1)
        for part in self.parts:
            asked, row = part.asked, row_of[part.last_block]
            if part.start == 0:
                self.starts.pop(asked.request_id, None)
                self.prompts[asked.request_id] = self._begun(asked)
            elif asked.request_id in self.starts:
                full_R[row], starts_RP1[row] = asked.length // page, self.starts[asked.request_id]
                continue
            prompt = self.prompts[asked.request_id]
            prompt.start, prompt.stop = part.start, min(part.stop, asked.length)
            prompt.shift = starts[row] - part.start
            prompt.blocks_B = blocks_RB[row, : -(-prompt.stop // page)].long()
            self.reading.append(prompt)
        self.num_tokens = starts[-1]
        return (full_R, starts_RP1) if len(self.reading) < len(self.parts) else None

    def _begun(self, asked: Arrival) -> Prompt:
        """A prompt that begins to be read."""
        L, numbers, tokens = len(self.layers), self.pages.pages, asked.length if self.gates else 0
        num_queries = next(iter(self.layers.values())).queries_BQSD.shape[1]
        learned_LHT = torch.zeros(L, self.layout.num_heads, tokens, device=numbers.device)
        return Prompt(
            asked, numbers.new_zeros(L, self.rules.window, num_queries, self.pages.head_dim), learned_LHT
        )

    def observe_(self, layer_name: str, queries_NQD: Float[Tensor, "N Q D"]) -> None:
        """Remember queries of a layer that an eviction observes; nothing of a layer that does not evict."""
        for prompt in self.reading if layer_name in self.order else ():
            begins = prompt.asked.length - self.rules.window
            if (first := max(begins, prompt.start)) < prompt.stop:
                queries_SQD = queries_NQD[first + prompt.shift : prompt.stop + prompt.shift]
                window_SQD = prompt.window_LSQD[self.order[layer_name]]
                window_SQD[first - begins : prompt.stop - begins] = queries_SQD

    @torch.no_grad()
    def score_tokens_(self, layer_name: str, hidden_NE: Float[Tensor, "N E"]) -> None:
        """Store the gates' scores of a layer's tokens, by their attention inputs."""
        if not self.reading or layer_name not in self.order:
            return
        assert self.gates is not None
        hidden_NE = hidden_NE[: self.num_tokens]
        shape = (1, self.layout.num_heads, len(hidden_NE), self.pages.head_dim)
        unread = hidden_NE.new_zeros(1).expand(shape)
        layer = with_tokens(self.layers[layer_name], unread, unread, hidden_BTE=hidden_NE[None])
        score_HN = self.gates.learned(layer)[0]
        for prompt in self.reading:
            rows = slice(prompt.start + prompt.shift, prompt.stop + prompt.shift)
            prompt.learned_LHT[self.order[layer_name], :, prompt.start : prompt.stop] = score_HN[:, rows]

    def evict(self) -> dict[str, int]:
        """Evict what is due at the end of the step: evictions, and those that failed."""
        due = [prompt for prompt in self.reading if prompt.stop == prompt.asked.length]
        self.parts, self.reading = [], []
        failed = sum([not self._evict(prompt) for prompt in due])
        return {"evictions": len(due), "evictions_failed": failed}

    @torch.no_grad()
    def _evict(self, prompt: Prompt) -> bool:
        """Evict from one request; whether the policy could decide.

        Where it could not (a score is not finite) the last pages of every head stay: the scheduler frees the
        others all the same, and one request may not stop an engine.
        """
        asked, page, decided = prompt.asked, self.layout.page, True
        try:
            keeps = self._decide(prompt)
        except ValueError as error:
            message = "The policy could not decide what to keep of request %s; its last entries were kept: %s"
            logger.error(message, asked.request_id, error)
            last_T = torch.arange(asked.length) >= (asked.length // page - asked.kept) * page
            keeps, decided = [last_T.expand(self.layout.num_heads, -1)] * len(self.layers), False
        self.starts[asked.request_id] = self.pages.pack_(prompt.blocks_B, asked.kept, keeps)
        # If it is preempted, its prompt is read again.
        del self.prompts[asked.request_id]
        if self.watch is not None:
            self.watch(asked.request_id, keeps)
        return decided

    @torch.no_grad()
    def _decide(self, prompt: Prompt) -> list[Bool[Tensor, "H T"]]:
        """Keep masks of all layers, which are shown one by one: one layer's copy of its keys and values
        exists at a time."""
        asked, policy = prompt.asked, self.rules.policy
        plan, candidates = self.rules.plan(asked.length, asked.budget), []
        for place, layer in enumerate(self.layers.values()):
            numbers_HB = self.pages.numbers(place, prompt.blocks_B)
            keys, values = (
                part.view(1, len(numbers_HB), -1, self.pages.head_dim)[:, :, : asked.length]
                for part in self.pages.read(numbers_HB.flatten())
            )
            shown = with_tokens(
                layer,
                keys,
                values,
                queries_BQSD=prompt.window_LSQD[place].transpose(0, 1)[None],
                learned_BHT=prompt.learned_LHT[place][None] if self.gates else None,
            )
            learned = self.gates.score(shown) if self.gates else None
            score = score_entries(policy, shown, learned=learned, seeds_B=[asked.seed])
            candidates.append(candidates_of(plan, score))
        return [keep_BHT[0] for keep_BHT in keep_pages(plan, candidates, self.rules.page)]

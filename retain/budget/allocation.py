"""Defines how a budget is spread over layers and heads, and what is known of that before any layer comes.

*Guaranteed* entries (protected ones, a first stage, one entry a head) lie inside a share; only the rest is
shared, by weights (`retain.budget.largest_remainder`): ones, a line over depth (PyramidKV, arXiv 2406.02069),
a number for each head that was measured beforehand (`retain.attention.head_weights`), or a number for each
layer that its score gives (CAKE, arXiv 2503.12491; LAVa, arXiv 2509.09754). Where heads compete, the best
entries win (`retain.budget.joint`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.attention.head_weights import read_weights
from retain.budget.joint import Bids, Won
from retain.budget.largest_remainder import exact, largest_remainder
from retain.budget.statement import Budget, Totals
from retain.presets import Policy, Pyramid
from retain.shapes import axis_of


@dataclass(frozen=True)
class Plan:
    """Totals, protection and shares, known before any layer comes.

    Args:
        policy: how it splits a budget.
        budget: as it was stated; under a threshold the totals are all that exists, and no budget decides.
        totals: entries of each sequence, over all layers.
        protected_BT: of all tokens seen, True where protected, in every layer.
    """

    policy: Policy
    budget: Budget
    totals: Totals
    protected_BT: Bool[Tensor, "B T"]

    @cached_property
    def protected_B(self) -> tuple[int, ...]:
        """Entries of every head that are protected by their place."""
        return tuple(self.protected_BT.sum(-1).tolist())

    def select_batch(self, rows: Sequence[int]) -> "Plan":
        """Select some of the sequences; once totals are known, sequences are independent."""
        each = {
            name: tuple(values[row] for row in rows)
            for name, values in vars(self.totals).items()
            if axis_of(name, "B") == 0
        }
        return replace(self, totals=replace(self.totals, **each), protected_BT=self.protected_BT[list(rows)])

    def hold_whole(self, rows: Sequence[int], valid_BT: Bool[Tensor, "B T"]) -> "Plan":
        """Hold these sequences whole: all their entries are protected, and in the budget."""
        protected_BT = self.protected_BT.clone()
        protected_BT[list(rows)] = valid_BT[list(rows)]
        return replace(self, totals=self.totals.hold_whole(rows), protected_BT=protected_BT)

    @property
    def crosses_layers(self) -> bool:
        """True where the keep set of a layer depends on other layers."""
        return self.budget.threshold is None and self.policy.crosses_layers

    @cached_property
    def least_B(self) -> list[int]:
        """Entries that every head keeps whatever the scores: protected, of a safeguard, and at least one."""
        guard = self.policy.guard
        share = exact(guard.safeguard_share) if guard.safeguard == "guaranteed" else 0
        return [
            max(1, protected, min(math.floor(mean), protected + math.floor(share * mean)))
            for protected, mean in zip(self.protected_B, self.totals.per_head_B, strict=True)
        ]

    @cached_property
    def fixed_LB(self) -> list[list[int]] | None:
        """Entries of each layer and sequence, if scores do not decide them: as stated, or all it holds."""
        if self.crosses_layers:
            return None
        rows = self.totals.equal_BL
        if isinstance(self.policy.allocation, Pyramid):
            rows = tuple(map(self._pyramid, range(len(rows))))
        rows_BL = [map(min, *each) for each in zip(rows, self.totals.held_BL, strict=True)]
        return [list(column) for column in zip(*rows_BL, strict=True)]

    def _pyramid(self, row: int) -> tuple[int, ...]:
        """Entries of each layer of a sequence: a line over depth, in entries a head."""
        heads_L, protected, allocation = self.totals.heads_L, self.protected_B[row], self.policy.allocation
        assert isinstance(allocation, Pyramid)
        length, mean = self.totals.lengths_B[row], self.totals.per_head_B[row] - protected
        line = allocation.line(mean, Fraction(length - protected), len(heads_L))
        inside, least, most = (
            [bound * heads for heads in heads_L]
            for bound in (protected, min(length, max(protected, self.least_B[row])), length)
        )
        weights = [share * heads for share, heads in zip(line, heads_L, strict=True)]
        total = self.totals.stated_B[row]
        return tuple(largest_remainder(total, weights, most, protected=inside, least=least))

    @cached_property
    def alike_LBH(self) -> list[list[list[int]]]:
        """Entries of each head by its weight, while heads of a layer hold the same."""
        return self.by_head_LBH(None)

    def by_head_LBH(self, capacity_LBH: Sequence[Sequence[Sequence[int]]] | None) -> list[list[list[int]]]:
        """Entries of each head by its weight, of heads that hold so many; None: alike in a layer."""
        path, heads_L = self.policy.weights, self.totals.heads_L
        assert path is not None
        weights = [exact(weight) for row in read_weights(path).values() for weight in row]
        flat_B = []
        for row, stated in enumerate(self.totals.stated_B):
            if capacity_LBH is None:
                layers = zip(self.totals.held_BL[row], heads_L, strict=True)
                held = [count // heads for count, heads in layers for _ in range(heads)]
            else:
                held = [count for rows_BH in capacity_LBH for count in rows_BH[row]]
            if stated < sum(held):
                # A head that holds less than is protected (few tokens) has nothing that competes.
                inside, least = (
                    [min(bound, count) for count in held]
                    for bound in (self.protected_B[row], self.least_B[row])
                )
                held = largest_remainder(stated, weights, held, protected=inside, least=least)
            flat_B.append(iter(held))
        return [[[next(budgets) for _ in range(heads)] for budgets in flat_B] for heads in heads_L]

    @property
    def covers_B(self) -> list[bool]:
        """Which sequences keep everything whatever the scores: their budget holds all, or, under a threshold,
        all of it is protected. They need no score."""
        kept_B = self.totals.total_B
        if self.budget.threshold is not None:
            kept_B = [protected * sum(self.totals.heads_L) for protected in self.protected_B]
        elif self.fixed_LB is not None and self.policy.weights is None:
            kept_B = [sum(column) for column in zip(*self.fixed_LB, strict=True)]
        return [kept == sum(held) for kept, held in zip(kept_B, self.totals.held_BL, strict=True)]


@dataclass(frozen=True)
class Candidates:
    """Entries of a layer with scores and guaranteed entries, before any budget.

    Args:
        score_BHT: orders each head; -inf where the head holds no entry.
        kept_BHT: kept in any case: protected, or in a first stage by mass.
        held_B: entries of each sequence, over all heads.
        guaranteed_BH, guaranteed_B: entries that each head keeps in any case, and their sum.
        first_BHT: score of a first stage by budget; None without one.
        bids: entries with which the heads compete; None if they do not.
        free_BHT: which entries bid, row after row in the order of the bids; None if heads do not compete.
        weight_B: weight of the layer in a shared budget, per sequence; empty if layers get fixed shares.
    """

    score_BHT: Float[Tensor, "B H T"]
    kept_BHT: Bool[Tensor, "B H T"]
    held_B: tuple[int, ...]
    guaranteed_BH: Int64[Tensor, "B H"]
    guaranteed_B: tuple[int, ...]
    first_BHT: Float[Tensor, "B H T"] | None = None
    bids: Bids | None = None
    free_BHT: Bool[Tensor, "B H T"] | None = None
    weight_B: tuple[Fraction, ...] = ()

    @cached_property
    def capacity_BH(self) -> Int64[Tensor, "B H"]:
        """Entries that each head holds."""
        return (self.score_BHT > float("-inf")).sum(-1)

    def cut(self, keep_BHT: Bool[Tensor, "B H T"], won: Won, held_B: Sequence[int]) -> "Candidates":
        """The entries that stay, `held_B` of each sequence, and the bids that may still win when more layers
        come: each head's stand in front, in order, and -inf behind them."""
        width = int(keep_BHT.sum(-1).max())
        front_BHK = (~keep_BHT).sort(dim=-1, stable=True).indices[..., :width]
        there_BHK = keep_BHT.gather(-1, front_BHK)

        def front(values_BHT: Any, empty: float | bool) -> Any:
            return None if values_BHT is None else values_BHT.gather(-1, front_BHK).where(there_BHK, empty)

        bids = self.bids if self.bids is None or won.won_N is None else self.bids.select(won.won_N)
        return replace(
            self,
            score_BHT=front(self.score_BHT, float("-inf")),
            kept_BHT=front(self.kept_BHT, False),
            held_B=tuple(held_B),
            first_BHT=front(self.first_BHT, float("-inf")),
            bids=bids,
            free_BHT=front(self.free_BHT, False),
        )


def allocate_uniform(total_B: Sequence[int], capacity_BH: Int64[Tensor, "B H"]) -> Int64[Tensor, "B H"]:
    """Give every head of a layer the same, the remainder to the lowest heads, capped at what a head has.

    `budget[b, h] = min(capacity[b, h], level_b)`, plus one for the first heads that can hold it, until the
    sum is `total_b`, which is at most what the heads have. On the device of the entries, without waiting.
    """
    capacity, _ = capacity_BH.sort(dim=-1)
    below = capacity.cumsum(-1) - capacity
    others = torch.arange(capacity.shape[1], 0, -1, device=capacity.device).expand_as(capacity)
    # With the i smallest heads full, the others share the rest; it is right for the first i that it fits.
    total_B1 = torch.tensor(total_B, device=capacity.device)[:, None]
    rest = total_B1 - below
    first_B1 = (rest <= capacity * others).int().argmax(-1, keepdim=True)
    level_B1 = rest.gather(-1, first_B1) // others.gather(-1, first_B1)
    budget_BH = torch.minimum(capacity_BH, level_B1)
    left_B1 = total_B1 - budget_BH.sum(-1, keepdim=True)
    more_BH = capacity_BH > budget_BH
    return budget_BH + (more_BH & (more_BH.cumsum(-1) <= left_B1)).long()

"""Defines how a budget is shared before any layer comes (`Shares`), and one layer's `Candidates` for it.

`retain.budget.cascade` decides between them, at once or layer by layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.budget.allocation import Allocation, Bids, pyramid
from retain.budget.head_budgets import share_budgets
from retain.budget.largest_remainder import exact, fill, round_shares
from retain.budget.priority_sampling import Draw
from retain.budget.statement import Totals, select_rows
from retain.head_weights import check_weights
from retain.two_stage import FirstStage


@dataclass(frozen=True)
class Split:
    """How a policy splits a budget: scope, allocation, first stage, draw.

    Args:
        scope: `head`, `layer` or `model`.
        allocation: over layers and heads.
        first_stage: None for selection in one stage.
        draw: None where all goes by score.
    """

    scope: str
    allocation: Allocation = Allocation()
    first_stage: FirstStage | None = None
    draw: Draw | None = None

    @property
    def drawn_share(self) -> float | None:
        """Share of a shared budget that is drawn; None: nothing."""
        return None if self.draw is None else self.draw.share

    @property
    def crosses_layers(self) -> bool:
        """Whether the keep set of a layer depends on other layers."""
        return self.scope == "model" or self.allocation.layers in ("cake", "entropy")

    @property
    def two_stages(self) -> bool:
        """Whether a head's first stage depends on its budget."""
        return self.first_stage is not None and self.first_stage.by == "budget"


@dataclass(frozen=True)
class Shares:
    """Totals and shares that are known before any layer comes.

    Args:
        split: the policy's.
        totals: entries of each sequence, over all layers.
        protected_B: entries of every head that are protected by their place.
        threshold: of admission; then the totals are all that exists, and no budget decides.
    """

    split: Split
    totals: Totals
    protected_B: tuple[int, ...]
    threshold: float | None = None

    @cached_property
    def least_B(self) -> list[int]:
        """Entries that every head keeps whatever the scores: protected, of a safeguard, and at least one."""
        own = self.split.allocation
        least = []
        for protected, mean in zip(self.protected_B, self.totals.per_head_B, strict=True):
            guarded = protected
            if own.safeguard == "guaranteed":
                guarded = min(math.floor(mean), protected + math.floor(exact(own.safeguard_share) * mean))
            least.append(max(1, protected, guarded))
        return least

    @cached_property
    def fixed_LB(self) -> list[list[int]] | None:
        """Entries of each layer and sequence, if scores do not decide them: as stated, or all it holds."""
        if self.split.crosses_layers:
            return None
        rows = self.totals.equal_BL
        if self.split.allocation.layers == "pyramid":
            rows = tuple(map(self._pyramid, range(len(rows))))
        held = self.totals.capacity_BL
        rows_BL = [map(min, own, most) for own, most in zip(rows, held, strict=True)]
        return [list(column) for column in zip(*rows_BL, strict=True)]

    def _pyramid(self, row: int) -> tuple[int, ...]:
        """One sequence's entries of each layer: a line over depth, in entries a head."""
        heads_L, protected = self.totals.heads_L, self.protected_B[row]
        room = self.totals.lengths_B[row] - protected
        least = min(room, max(0, self.least_B[row] - protected))
        free = self.totals.stated_B[row] - protected * sum(heads_L)
        mean = Fraction(free, sum(heads_L))
        line = pyramid(mean, Fraction(room), len(heads_L), self.split.allocation.beta)
        weights = [share * heads for share, heads in zip(line, heads_L, strict=True)]
        bounds = [[bound * heads for heads in heads_L] for bound in (least, room)]
        shares = round_shares(fill(free, weights, *bounds))
        return tuple(share + protected * heads for share, heads in zip(shares, heads_L, strict=True))

    @property
    def by_capacity(self) -> bool:
        """Whether budgets of heads depend on what each head holds: by weights."""
        return self.split.allocation.weights is not None

    @cached_property
    def static_LBH(self) -> list[list[list[int]]]:
        """Entries of each head by its weight while heads of a layer hold the same."""
        heads_L, held_BL = self.totals.heads_L, self.totals.capacity_BL
        return self.static_of(
            [[[row[idx] // heads] * heads for row in held_BL] for idx, heads in enumerate(heads_L)]
        )

    def static_of(self, capacity_LBH: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
        """Entries of each head by its weight.

        Args:
            capacity_LBH: entries that each head holds.
        """
        path = self.split.allocation.weights
        assert path is not None
        weights = [exact(own) for row in check_weights(path, self.totals.heads_L) for own in row]
        budgets_BLH = []
        for row, stated in enumerate(self.totals.stated_B):
            capacity_LH = [list(rows_BH[row]) for rows_BH in capacity_LBH]
            if stated < sum(map(sum, capacity_LH)):
                bounds = {"protected": self.protected_B[row], "least": self.least_B[row]}
                capacity_LH = share_budgets(weights, stated, **bounds, capacity_LH=capacity_LH)
            budgets_BLH.append(capacity_LH)
        return [list(layer) for layer in zip(*budgets_BLH, strict=True)]

    @property
    def covers_B(self) -> list[bool]:
        """Whether each sequence keeps everything, whatever the scores."""
        totals, heads = self.totals, sum(self.totals.heads_L)
        held_B = [sum(row) for row in totals.capacity_BL]
        if self.threshold is not None:
            kept_B = [protected * heads for protected in self.protected_B]
        elif self.fixed_LB is not None and not self.by_capacity:
            kept_B = [sum(column) for column in zip(*self.fixed_LB, strict=True)]
        else:
            kept_B = totals.total_B
        return [kept == held for kept, held in zip(kept_B, held_B, strict=True)]

    def select_batch(self, rows: Sequence[int]) -> "Shares":
        """Select some of the sequences; their totals no longer depend on the others."""
        return replace(select_rows(self, rows), totals=self.totals.select_batch(rows))


@dataclass(frozen=True)
class Candidates:
    """One layer's entries with scores and guaranteed entries, before any budget.

    Args:
        score_BHT: orders each head; -inf where the head holds no entry.
        kept_BHT: kept in any case: protected, or in a first stage by mass.
        held_B: entries of each sequence, over all heads.
        guaranteed_BH: entries that each head keeps in any case.
        guaranteed_B: their sum of each sequence.
        first_BHT: score of a first stage by budget; None without one.
        bids: entries with which the heads compete; None if they do not.
        weight_B: weight of the layer in a shared budget, per sequence; None if layers get fixed shares.
    """

    score_BHT: Float[Tensor, "B H T"]
    kept_BHT: Bool[Tensor, "B H T"]
    held_B: tuple[int, ...]
    guaranteed_BH: Int64[Tensor, "B H"]
    guaranteed_B: tuple[int, ...]
    first_BHT: Float[Tensor, "B H T"] | None = None
    bids: Bids | None = None
    weight_B: tuple[Fraction, ...] | None = None

    @cached_property
    def capacity_BH(self) -> Int64[Tensor, "B H"]:
        """Entries that each head holds."""
        return (self.score_BHT > float("-inf")).sum(-1)

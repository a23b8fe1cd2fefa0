"""Settings of how a policy splits a budget over layers, heads and stages.

`Split.contradictions` refuses settings that nothing would read.
"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from retain.config import STRICT, Share


@dataclass(frozen=True, config=STRICT)
class FirstStage:
    """Size of a first stage.

    Args:
        by: `budget`: a share of each head's budget (CriticalKV's alpha). `mass`: the entries that hold a
            share of all observed attention (DefensiveKV as its text has it).
        share: of the budget, or of the mass, in [0, 1].
    """

    by: Literal["budget", "mass"] = "budget"
    share: Share = 0.5


@dataclass(frozen=True, config=STRICT)
class Draw:
    """How much of a budget is drawn.

    Args:
        share: of the shared budget apart from the guaranteed entries, in [0, 1]; the rest goes by score. A
            part of an entry goes by score.
    """

    share: Share = 0.2


@dataclass(frozen=True, config=STRICT)
class Allocation:
    """How a budget is spread over layers and heads.

    Args:
        layers: `uniform`: every layer gets the same. `pyramid`: shares fall linearly with depth (PyramidKV).
            `cake`, `entropy`: shares go by a weight that the score gives, CAKE's preference or the entropy of
            the scores that compete (LAVa).
        beta: of a pyramid, at least 1: the last layer gets `1 / beta` of the mean.
        weights: a file of a number for each KV head, in proportion to which the heads of all layers share the
            entries that are not protected (`retain.budget.head_weights`; DuoAttention, HeadKV).
        safeguard: of heads that share: `guaranteed`: each keeps its first unprotected entries,
            `safeguard_share` of the mean budget; None: one entry a head.
        safeguard_share: in [0, 1].
        compete_by: heads that share compete by their `score`, or by the score of their `first` stage (AdaKV
            under CriticalKV).
    """

    layers: Literal["uniform", "pyramid", "cake", "entropy"] = "uniform"
    beta: Annotated[float, Field(ge=1)] = 20.0
    weights: str | None = None
    safeguard: Literal["guaranteed"] | None = None
    safeguard_share: Share = 0.2
    compete_by: Literal["score", "first"] = "score"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Split:
    """How a policy splits a budget.

    Args:
        scope: `head` gives each head the same budget, `layer` lets the heads of a layer share by score,
            `model` the heads of all layers.
        allocation: how a budget is spread over layers and heads.
        first_stage: entries that are kept before the score ranks the rest; None for one stage.
        draw: share of a budget that heads share which is drawn by lot, in proportion to observed risk
            (`retain.budget.joint`); None: all of it goes by score.
    """

    scope: Literal["head", "layer", "model"] = "head"
    allocation: Allocation = Allocation()
    first_stage: FirstStage | None = None
    draw: Draw | None = None

    @property
    def contradictions(self) -> list[str]:
        """Settings that nothing would read, or of which one would make another one empty."""
        allocation, problems = self.allocation, []
        by_first = allocation.compete_by == "first"
        shared = {"draw": self.draw, "allocation.safeguard": allocation.safeguard}
        shared["allocation.compete_by"] = by_first
        if self.scope == "head" and (unread := [name for name, stated in shared.items() if stated]):
            problems.append(f"{', '.join(unread)} wants heads that share: take scope 'layer' or 'model'")
        if self.scope != "head" and allocation.weights is not None:
            problems.append("allocation.weights says what each head gets: take scope 'head'")
        if allocation.beta != Allocation.beta and allocation.layers != "pyramid":
            problems.append("allocation.beta is of layers that share by pyramid: leave it out")
        if allocation.layers != "uniform" and (self.scope == "model" or allocation.weights is not None):
            problems.append(
                f"allocation.layers {allocation.layers!r} would not be read: take scope 'layer' or "
                "'head', and no weights"
            )
        if self.draw is not None and (self.first_stage is not None or by_first):
            problems.append(
                "draw wants one stage by score: take first_stage null, allocation.compete_by 'score'"
            )
        by_mass = self.first_stage is not None and self.first_stage.by == "mass"
        if by_mass and (allocation.layers == "pyramid" or allocation.weights is not None):
            problems.append(
                "a first stage by mass may take a head's whole mean budget, and layers by pyramid and "
                "allocation.weights may give it less: take first_stage by 'budget'"
            )
        return problems

    @property
    def drawn_share(self) -> float | None:
        """Share of a shared budget that is drawn; None: nothing."""
        return None if self.draw is None else self.draw.share

    @property
    def crosses_layers(self) -> bool:
        """True where the keep set of a layer depends on other layers."""
        return self.scope == "model" or self.weighs_layers

    @property
    def weighs_layers(self) -> bool:
        """True where layers share a budget by weights that their scores give."""
        return self.allocation.layers in ("cake", "entropy")

    @property
    def two_stages(self) -> bool:
        """True where a head's first stage depends on its budget."""
        return self.first_stage is not None and self.first_stage.by == "budget"

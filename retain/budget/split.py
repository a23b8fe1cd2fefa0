"""Settings of how a policy splits a budget over layers, heads and stages.

A setting lives in the object that reads it, so that one that nothing would read cannot be stated.
"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from retain.config import STRICT, Share

Scope = Literal["head", "layer", "model"]


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
class Uniform:
    """Every layer gets the same."""

    layers: Literal["uniform"] = "uniform"


@dataclass(frozen=True, config=STRICT)
class Pyramid:
    """Shares of layers fall linearly with depth (PyramidKV); the last layer gets `1 / beta` of the mean."""

    layers: Literal["pyramid"]
    beta: Annotated[float, Field(ge=1)] = 20.0


@dataclass(frozen=True, config=STRICT)
class ByScore:
    """Shares of layers go by a weight that the score gives: `cake`, CAKE's preference; `entropy`, the entropy
    of the scores that compete (LAVa)."""

    layers: Literal["cake", "entropy"]


@dataclass(frozen=True, config=STRICT)
class ByHead:
    """The heads of all layers share what is not protected in proportion to a number for each, of a file
    (`retain.budget.head_weights`; DuoAttention, HeadKV)."""

    weights: str


@dataclass(frozen=True, config=STRICT)
class Guard:
    """How heads share a budget.

    Args:
        safeguard: `guaranteed`: each head keeps its first entries beside the protected ones,
            `safeguard_share` of the mean budget; None: one entry a head.
        safeguard_share: in [0, 1].
        compete_by: heads compete by their `score`, or by the score of their `first` stage (AdaKV under
            CriticalKV).
    """

    safeguard: Literal["guaranteed"] | None = None
    safeguard_share: Share = 0.2
    compete_by: Literal["score", "first"] = "score"


@dataclass(frozen=True, config=STRICT)
class SharedUniform(Guard, Uniform):
    """Every layer gets the same, and its heads share it."""


@dataclass(frozen=True, config=STRICT)
class SharedPyramid(Guard, Pyramid):
    """Shares of layers fall with depth, and the heads of a layer share its own."""


@dataclass(frozen=True, config=STRICT)
class SharedByScore(Guard, ByScore):
    """Shares of layers go by their scores, and the heads of a layer share its own."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Split:
    """How a policy splits a budget; `retain.presets` has one class for each scope.

    Args:
        scope: `head` gives each head the same budget, `layer` lets the heads of a layer share by score,
            `model` the heads of all layers.
        allocation: how a budget is spread over layers and heads.
        first_stage: entries that are kept before the score ranks the rest; None for one stage.
        draw: share of a budget that heads share which is drawn by lot, in proportion to what was observed
            (`retain.budget.joint`); None: all of it goes by score.
    """

    scope: Scope = "head"
    allocation: Uniform | Pyramid | ByScore | ByHead = Uniform()
    first_stage: FirstStage | None = None
    draw: Draw | None = None

    @property
    def guard(self) -> Guard:
        """How heads share."""
        return self.allocation if isinstance(self.allocation, Guard) else Guard()

    @property
    def layers(self) -> str:
        """The rule by which layers get their shares."""
        return "uniform" if isinstance(self.allocation, ByHead) else self.allocation.layers

    @property
    def weights(self) -> str | None:
        """File of the weights of heads; None without."""
        return self.allocation.weights if isinstance(self.allocation, ByHead) else None

    @property
    def drawn_share(self) -> float | None:
        """Share of a shared budget that is drawn; None: nothing."""
        return None if self.draw is None else self.draw.share

    @property
    def crosses_layers(self) -> bool:
        """True where the keep set of a layer depends on other layers."""
        return self.scope == "model" or isinstance(self.allocation, ByScore)

    @property
    def two_stages(self) -> bool:
        """True where a head's first stage depends on its budget."""
        return self.first_stage is not None and self.first_stage.by == "budget"

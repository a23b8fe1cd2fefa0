"""Declares an observed score with its function: unit, evidence that it reads, settings, paper."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from retain.attention.received import advance
from retain.config import checked
from retain.evidence import Evidence, RunningStatistics, Score

Function = TypeVar("Function", bound=Callable[..., Score])


@dataclass(frozen=True)
class ScoreFamily:
    """Entry of the registry of observed scores.

    Args:
        function: `(evidence, **settings) -> Score`; annotations are the settings' types and bounds.
        unit: of the score.
        paper: title and arXiv id, or where the idea comes from.
        needs: the evidence that it reads beyond keys, values, padding and places: `window` (as many last
            queries as its setting of that name says, else one), `queries` (as many as there are, one at
            least), `running` (statistics of all queries, or every query to make them from), `value_norm`
            (`value_norm_BQT`, or an output projection to make it with), `output_weight`, `rotary`, `hidden`,
            `seeds` (one integer a sequence, passed as `seeds_B`). A cache that evicts again
            keeps exactly this for the next eviction.
        reads: of an entry, `keys` and `values` or one of them; a cache that evicts again shows NaN in place
            of the other.
        two_stages: True with a score of a first stage.
        weighs_layers: True with a weight of the layer.
        where: fields that are others under certain settings: (setting, value, or its type) -> them.
        fold: folds queries into the running statistics that it reads, with those settings that it names.
    """

    function: Callable[..., Score]
    unit: str
    paper: str
    needs: Collection[str] = ()
    reads: Collection[str] = ("keys", "values")
    two_stages: bool = False
    weighs_layers: bool = False
    where: Mapping[tuple[str, Any], Mapping[str, Any]] = field(default_factory=dict)
    fold: Callable[..., RunningStatistics] = advance

    def under(self, settings: Mapping[str, Any]) -> "ScoreFamily":
        """The declaration that holds under these settings."""
        changes = []
        for (name, value), fields in self.where.items():
            given = settings.get(name)
            if isinstance(given, value) if isinstance(value, type) else given == value:
                changes.append(fields)
        return replace(self, **changes[0]) if changes else self

    def window(self, settings: Mapping[str, Any]) -> int:
        """Last queries that it observes under these settings."""
        if "window" not in self.under(settings).needs:
            return 0
        stated = inspect.signature(self.function).parameters.get("window")
        return 1 if stated is None else settings.get("window", stated.default)

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """List what of these settings does not fit the function."""
        return checked(settings, self.function, self.function.__name__, ("evidence", "seeds_B"))[1]

    def counted(self, evidence: Evidence, settings: Mapping[str, Any]) -> Evidence:
        """The evidence with running statistics that count its queries."""
        named = inspect.signature(self.fold).parameters
        chosen = {name: value for name, value in settings.items() if name in named}
        return replace(evidence, running=self.fold(evidence, evidence.running, **chosen))


# Families by the names of their functions, as their modules are imported.
FAMILIES: dict[str, ScoreFamily] = {}


def family(unit: str, *, paper: str, **declared: Any) -> Callable[[Function], Function]:
    """Decorates the function of a score, which is registered by its name (`ScoreFamily` has the fields)."""

    def declare(function: Function) -> Function:
        FAMILIES[function.__name__] = ScoreFamily(function, unit, paper, **declared)
        return function

    return declare

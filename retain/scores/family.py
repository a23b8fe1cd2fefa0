"""Declares an observed score with its function: unit, evidence that it reads, paper."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from retain.attention.received import advance
from retain.evidence import Evidence, RunningStatistics, Score

Function = TypeVar("Function", bound=Callable[..., Score])


@dataclass(frozen=True)
class ScoreFamily:
    """Entry of the registry of observed scores.

    Args:
        function: `(evidence, **settings) -> Score`.
        unit: the unit under default settings (`retain.scores.trial` finds it under others).
        needs: the evidence that the function reads beyond keys, values, padding and places, under default
            settings: `window` (as many last queries as the `Score` says, one at least), `queries` (as many as
            there are, one at least), `running` (statistics of all queries, or every query to make them from),
            `value_norm` (`value_norm_BQT`, or an output projection to make it with), `rotary`, `hidden`,
            `seeds` (one integer a sequence, passed as `seeds_B`). A cache that evicts again
            keeps exactly this for the next eviction.
        paper: title and arXiv id, or where the idea comes from.
        needs_where: other needs under certain settings: (name, value, or a type of values) -> needs.
        fold: folds queries into the running statistics that it reads, with those settings that it names.
    """

    function: Callable[..., Score]
    unit: str
    needs: frozenset[str]
    paper: str
    needs_where: Mapping[tuple[str, Any], frozenset[str]] = field(default_factory=dict)
    fold: Callable[..., RunningStatistics] = advance

    def needs_with(self, settings: Mapping[str, Any]) -> frozenset[str]:
        """Needs under these settings."""
        for (name, value), needs in self.needs_where.items():
            stated = settings.get(name)
            if stated == value or (isinstance(value, type) and isinstance(stated, value)):
                return needs
        return self.needs

    def counted(self, evidence: Evidence, settings: Mapping[str, Any]) -> Evidence:
        """The evidence with running statistics that count its queries."""
        named = inspect.signature(self.fold).parameters
        chosen = {name: value for name, value in settings.items() if name in named}
        return replace(evidence, running=self.fold(evidence, evidence.running, **chosen))


# Families by the names of their functions, as their modules are imported.
FAMILIES: dict[str, ScoreFamily] = {}


def family(
    unit: str,
    *,
    paper: str,
    needs: Collection[str] = (),
    needs_where: Mapping[tuple[str, Any], Collection[str]] | None = None,
    fold: Callable[..., RunningStatistics] = advance,
) -> Callable[[Function], Function]:
    """Decorates the function of a score, which is registered by its name (`ScoreFamily` has the fields)."""

    def declare(function: Function) -> Function:
        where = {key: frozenset(names) for key, names in (needs_where or {}).items()}
        FAMILIES[function.__name__] = ScoreFamily(function, unit, frozenset(needs), paper, where, fold)
        return function

    return declare

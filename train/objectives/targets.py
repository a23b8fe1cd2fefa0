"""Composes the targets of gates: how much future queries use each entry of a document.

The settings say which queries stand for the future (the document's own, from the distance at which an entry
can have been evicted; a question and its answer; the document repeated; the model's continuation), and with
which weight. `retain/future.py` computes what their attention makes of an entry.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Literal

from jaxtyping import Bool, Float32
from torch import Tensor

from retain.config import Positive, Tokens
from retain.future import SOURCES, future_use
from retain.train.settings import refuse, section, unknown
from retain.train.teacher import View


@section
class TargetSettings:
    """Which future the gates learn."""

    kind: str = "future_use"
    """A name in `retain.train.objectives.targets.TARGETS`."""
    sources: dict[str, Positive] = field(default_factory=lambda: {"own": 1.0, "appendix": 1.0})
    """Weight of each kind of query: `own` (the context's later tokens), `appendix` (question and answer),
    `repeat` (the context once more, after a prompt that asks for it), `continuation` (what the model writes
    greedily after the context)."""
    aggregate: Literal["max", "mean"] = "max"
    """Of the queries' attention."""
    weight: Literal["none", "value_norm", "value_norm_over_hidden"] = "value_norm"
    """Of the attention paid: `none`, `value_norm` (times the norm of the projected value), or
    `value_norm_over_hidden` (that over the norm of the query's attention input)."""
    horizon: Tokens = 8
    """Distance in tokens from which an own query counts; the recent window that is protected at inference."""
    floor: Positive = 2e-3
    """Added to the target before the logarithm, as a share of the head's mean; below it all targets are
    alike."""
    repeat_prompt: str = "\n\nRepeat the previous context exactly."
    """What asks for the context once more (KVzip's words)."""
    repeat_next_prompt: str = "\n\nRepeat the part of the previous context exactly, starting with"
    """The same for every chunk but the first, followed by the last tokens of the chunk before (KVzip's)."""
    repeat_chunk: Tokens = 2048
    """Tokens of the context that are repeated at once."""
    continuation_tokens: Tokens = 64
    """How many the model writes at most."""


def check_targets(settings: TargetSettings) -> None:
    """Raises ValueError with all sources that there are none of."""
    nothing = (not settings.sources, f"target.sources is empty: name some of {', '.join(SOURCES)}")
    found = unknown([settings.kind], TARGETS, what="target", key="target.kind")
    found += unknown(settings.sources, SOURCES, what="source", key="target.sources")
    refuse(nothing, found=found)


def target_unit(settings: TargetSettings) -> str:
    """Returns the target's unit, as scores name units: `mass` (attention alone, 1 a query at most), `risk`
    (times the norm of the projected value), or `rank` (over the norm of the query's input too: only the order
    means anything beside other layers)."""
    return {"none": "mass", "value_norm": "risk"}.get(settings.weight, "rank")


def layer_target(view: View, settings: TargetSettings) -> tuple[Float32[Tensor, "H T"], Bool[Tensor, "H T"]]:
    """Returns the target of one layer's entries of one document, at least 0 and 0 where it is not defined,
    and whether it is defined for an entry."""
    return TARGETS[settings.kind](view, settings)


def future_target(view: View, settings: TargetSettings) -> tuple[Tensor, Tensor]:
    """`retain.future.future_use`: an entry is reached by the queries of the chosen sources; those that the
    view has no branch of are left out."""
    use_BHT, reached_BHT = future_use(
        view.document,
        view.branches,
        sources=settings.sources,
        aggregate=settings.aggregate,
        weight=settings.weight,
        horizon=settings.horizon,
    )
    return use_BHT[0], reached_BHT[0]


# Name of `target.kind` -> (view, settings) -> target and where it is defined, `[H, T]` each.
TARGETS: dict[str, Callable[[View, TargetSettings], tuple[Tensor, Tensor]]] = {"future_use": future_target}

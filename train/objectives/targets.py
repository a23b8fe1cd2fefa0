"""Composes the targets of gates: how much future queries use each entry of a document.

The settings say which queries stand for the future (the document's own, from the distance at which an entry
can have been evicted; a question and its answer; the document repeated; the model's continuation), and with
which weight. `retain/future.py` computes what their attention makes of an entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from retain.config import Count, Positive, Tokens
from retain.future import SOURCES, future_use
from retain.gates import GateInputs
from retain.kernels.value_norm import value_norm
from retain.train.data.document import Reading
from retain.train.objectives.case import keyed_generator
from retain.train.objectives.losses import head_overlaps
from retain.train.rules import refuse, unknown
from retain.train.settings import section
from retain.train.teacher import Frozen, View, walk

Granularity = Literal["head", "layer", "token"]


@section
class TargetSettings:
    """Which future the gates learn."""

    sources: dict[str, Positive] = field(default_factory=lambda: {"own": 1.0, "appendix": 1.0})
    """Weight of each kind of query: `own` (the context's later tokens), `appendix` (question and answer),
    `repeat` (the context once more, after a prompt that asks for it), `continuation` (what the model writes
    greedily after the context)."""
    aggregate: Literal["max", "mean", "block_max", "mass"] = "max"
    """Of the queries' attention: `max`, `mean`, `block_max` (the largest of the means over blocks of queries)
    or `mass` (the sum)."""
    block: Count = 128
    """Queries of a block, for `block_max`."""
    weight: Literal["none", "value_norm", "value_norm_over_hidden"] = "value_norm"
    """Of the attention paid: `none`, `value_norm` (times the norm of the projected value), or
    `value_norm_over_hidden` (that over the norm of the query's attention input)."""
    granularity: Granularity = "head"
    """`head` (each KV head its own), `layer` (the mean over heads, for all heads of a layer) or `token` (the
    mean over heads and layers, for all)."""
    horizon: Tokens = 8
    """Distance in tokens from which an own query counts; the recent window that is protected at inference."""
    floor: Positive = 2e-3
    """Added to the target before the logarithm, as a share of the head's mean; below it all targets are
    alike."""
    chunk: Count | None = None
    """Queries at a time; bounds the memory, changes no number. None: as many as are quick, in bounded
    memory."""
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
    nothing = (not settings.sources, f"target.sources is empty: name some of {', '.join(SOURCES)}.")
    refuse(nothing, found=unknown(settings.sources, SOURCES, what="target.sources"), separator=" ", end="")


def target_unit(settings: TargetSettings) -> str:
    """Returns the target's unit, as scores name units: `mass` (attention alone, 1 a query at most), `risk`
    (times the norm of the projected value), or `rank` (over the norm of the query's input too: only the order
    means anything beside other layers)."""
    return {"none": "mass", "value_norm": "risk"}.get(settings.weight, "rank")


def layer_target(view: View, settings: TargetSettings) -> tuple[Float32[Tensor, "H T"], Bool[Tensor, "H T"]]:
    """Returns the target of one layer's entries of one document (`retain.future.future_use`), 0 where it is
    not defined, and whether some query of the chosen sources can reach the entry.

    With granularity `layer`, the mean over KV heads, the same for all; with `token` likewise, and
    `token_target` takes the mean over layers of it. Sources that the view has no branch of are left out.
    """
    use_BHT, reached_BHT = future_use(
        view.document,
        view.branches,
        sources=settings.sources,
        aggregate=settings.aggregate,
        weight=settings.weight,
        horizon=settings.horizon,
        block=settings.block,
        chunk=settings.chunk,
    )
    use_HT, reached_HT = use_BHT[0], reached_BHT[0]
    if settings.granularity != "head":
        use_HT = use_HT.mean(0, keepdim=True).expand_as(use_HT)
    return use_HT, reached_HT


def joined_for(settings: TargetSettings) -> tuple[str, ...]:
    """Returns the evidence of a branch that `layer_target` needs beside queries, keys, values (`joined` of
    `walk`)."""
    return ("hidden",) if settings.weight == "value_norm_over_hidden" else ()


def token_target(
    layers: Sequence[tuple[Float[Tensor, "H T"], Bool[Tensor, "H T"]]],
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Mean over layers and KV heads: `r_i = 1/L sum_l 1/H sum_h r_lh[i]`; an entry that any layer reaches is
    reached. On the device of the first layer, where layers lie on several.

    DynTS (arXiv 2601.18383): one number a token, by which all heads of all layers can evict alike.
    """
    device = layers[0][0].device
    means_LT = torch.stack([use_HT.mean(0).to(device) for use_HT, _ in layers])
    reached_LT = torch.stack([reached_HT.any(0).to(device) for _, reached_HT in layers])
    return means_LT.mean(0), reached_LT.any(0)


def token_targets(
    frozen: Frozen, readings: Sequence[Reading], settings: TargetSettings
) -> list[tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]]:
    """Returns `token_target` of every reading, by a walk of its own: no layer's target is known before the
    last."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in readings]

    def see(views: list[View]) -> None:
        for view in views:
            use_HT, reached_HT = layer_target(view, settings)
            # One row of each layer: as much as a token's own number.
            found[view.row].append((use_HT.mean(0, keepdim=True), reached_HT[:1]))

    walk(frozen, readings, see, joined=joined_for(settings))
    return [token_target(layers) for layers in found]


def baseline_overlaps(
    values_BHTD: Float[Tensor, "1 H T D"],
    output_weight_QDE: Float[Tensor, "Q D E"],
    target_HT: Float[Tensor, "H T"],
    reached_HT: Bool[Tensor, "H T"],
    key: tuple[int, ...],
) -> dict[str, float]:
    """Overlap with the target's top fifth that costs no training, of one layer and one document.

    `overlap_random` (chance, from `key`), `overlap_recency` (later is better), `overlap_value_norm`
    (`||v W_O||_1` alone, largest of the group).
    """
    H, T = target_HT.shape
    norm_BQT = value_norm(values_BHTD, output_weight_QDE)
    scores = {
        "overlap_random": torch.rand(H, T, generator=keyed_generator(key)).to(target_HT.device),
        "overlap_recency": torch.arange(T, device=target_HT.device).float().expand(H, T),
        "overlap_value_norm": norm_BQT[0].unflatten(0, (H, -1)).amax(1),
    }
    return {
        name: float(head_overlaps(score_HT.float(), target_HT, reached_HT).mean())
        for name, score_HT in scores.items()
    }


@dataclass(frozen=True)
class Example:
    """Inputs and target of one layer's gate on one document.

    Args:
        row: place of the document among those that were asked for.
        inputs: of the gate, one sequence.
        target_HT: in the target's own unit, float32.
        reached_HT: where it is defined.
        view: the layer as the teacher showed it.
    """

    layer_idx: int
    row: int
    key: int
    inputs: GateInputs
    target_HT: Float[Tensor, "H T"]
    reached_HT: Bool[Tensor, "H T"]
    view: View


def baselines_of(example: Example, seed: int) -> dict[str, float]:
    """Returns `baseline_overlaps` of an example, with chance keyed by seed, document and layer."""
    shown = example.view.document
    return baseline_overlaps(
        shown.values_BHTD,
        shown.output_weight_QDE,
        example.target_HT,
        example.reached_HT,
        (seed, example.key, example.layer_idx),
    )

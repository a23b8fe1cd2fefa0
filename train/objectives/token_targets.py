"""Computes one target a token, for all heads and layers alike (`target.granularity: token`)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.train.data.document import Reading
from retain.train.objectives.targets import TargetSettings, layer_target
from retain.train.teacher import Frozen, View, walk


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

    walk(frozen, readings, see)
    return [token_target(layers) for layers in found]

"""Computes the losses of layer-local training.

A loss is a weighted sum of named terms (`loss.terms`), each a function of one `Case`; so every published gate
loss is a row of one table, and they mix. A term is one number a document, so that the mean over documents is
the same however they are spread over micro-batches and processes.

The ranking matters only where the budget cuts. So besides the regression, by default, pairs are drawn from
just above and just below each head's boundary and must come out in the right order (`ranked_losses`).
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from retain.gates import Gate
from retain.train.objectives.case import Case, LossSettings, mean_over_reached
from retain.train.objectives.layer_output import layer_output_loss
from retain.train.objectives.ranked_losses import (
    bce_loss,
    boundary_loss,
    listwise_loss,
    pair_loss,
    smoothness,
)


def local_losses(
    output_HT: Float[Tensor, "H T"],
    gate: Gate,
    target_HT: Float[Tensor, "H T"],
    reached_HT: Bool[Tensor, "H T"],
    view: Any,
    settings: LossSettings,
    key: tuple[int, ...],
    *,
    horizon: int,
) -> dict[str, Float[Tensor, ""]]:
    """Returns every term of `settings.terms`, unweighted, of one layer and one document: all 0, with a
    gradient of 0, where no entry is reached. Arguments are those of `Case`, without its batch axis.
    ValueError: `layer_output` without a view."""
    output_BHT = output_HT.to(torch.promote_types(output_HT.dtype, torch.float32))[None]
    case = Case(output_BHT, target_HT[None], reached_HT[None], gate, settings, key, view, horizon)
    return {name: TERMS[name](case)[0] for name in settings.terms}


def total_loss(found: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """`sum_k weight_k term_k`, in the order of the settings; a term of weight 0 is only reported."""
    return reduce(add, [weight * found[name] for name, weight in settings.terms.items() if weight])


def regression_loss(loss: Callable[..., Tensor], case: Case, **settings: float) -> Float[Tensor, " B"]:
    """A loss of torch's on `d = predicted - target`, mean over a head's reached entries, then over heads:
    `d^2` (`mse_loss`); `d^2 / 2` up to `|d| = delta` and `delta (|d| - delta / 2)` beyond (`huber_loss`);
    `d^2 / (2 beta)` up to `|d| = beta` and `|d| - beta / 2` beyond (`smooth_l1_loss`: Locret, arXiv
    2410.01805, on mass or risk itself, beside `.0025` of `smoothness`)."""
    known_BHT, wanted_BHT = case.reached_of(case.output_BHT), case.reached_of(case.target_own_BHT)
    return mean_over_reached(loss(known_BHT, wanted_BHT, reduction="none", **settings), case.reached_BHT)


TERMS: dict[str, Callable[[Case], Float[Tensor, " B"]]] = {
    "mse": partial(regression_loss, functional.mse_loss),
    "huber": lambda case: regression_loss(functional.huber_loss, case, delta=case.settings.huber_delta),
    "bce": bce_loss,
    "smooth_l1": lambda case: regression_loss(
        functional.smooth_l1_loss, case, beta=case.settings.smooth_l1_beta
    ),
    "smooth": smoothness,
    "pairwise": pair_loss,
    "hinge": partial(pair_loss, hinge=True),
    "boundary": boundary_loss,
    "listwise": listwise_loss,
    "layer_output": lambda case: layer_output_loss(case)[None],
}

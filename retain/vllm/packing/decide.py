"""Decides which entries of a prompt stay, from what the engine holds of it: keys and values, the queries of
its last tokens, and what the gates noted of each token when it came.

The stages are those of `retain.policy`; layers are shown one by one, so that one layer's copy of its keys and
values exists at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, score_entries
from retain.vllm.packing.progress import Arrival
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.settings import Rules


@dataclass(frozen=True)
class Layer:
    """What is known of a layer that evicts before any request comes.

    Args:
        layer_idx: index in the model.
        num_queries: query heads here.
        scaling: factor on the attention logits.
        soft_cap: of the logits; None: none.
        output_weight_QDE: the output projection of the query heads here; None where no score reads it.
        first_head: number of the first KV head here, of `all_heads` in the model (tensor parallelism).
        all_heads: KV heads of the layer in the model.
        rotary: of its queries and keys; None if it is not understood.
    """

    layer_idx: int
    num_queries: int
    scaling: float
    soft_cap: float | None = None
    output_weight_QDE: Float[Tensor, "Q D E"] | None = None
    first_head: int = 0
    all_heads: int = 1
    rotary: Rotary | None = None


@dataclass(frozen=True)
class Shown:
    """What a layer holds of a prompt; B = 1.

    Args:
        keys_BHTD, values_BHTD: of its tokens.
        queries_BQSD: of the last tokens; None where none are observed.
        noted_BHT: of the gates; None without any.
    """

    keys_BHTD: Float[Tensor, "B H T D"]
    values_BHTD: Float[Tensor, "B H T D"]
    queries_BQSD: Float[Tensor, "B Q S D"] | None
    noted_BHT: Float[Tensor, "B H T"] | None


@torch.no_grad()
def decide(
    rules: Rules,
    layers: Sequence[Layer],
    show: Callable[[int], Shown],
    *,
    asked: Arrival,
    gates: GateSet | None = None,
) -> list[Bool[Tensor, "H T"]]:
    """Keep masks of a prompt, of all layers.

    Args:
        rules: the policy.
        layers: those that evict, in order.
        show: the place of a layer among them -> what it holds.
        asked: the request.
        gates: of a learned policy.

    Raises:
        ValueError: the budget cannot hold what is protected, or a score is NaN.
    """
    scores = []
    for place, layer in enumerate(layers):
        evidence = _evidence(layer, show(place))
        learned = gates.score(evidence) if gates is not None else None
        scores.append(score_entries(rules.policy, evidence, learned=learned, seeds_B=[asked.seed]))
    plan = rules.plan(asked.length, asked.budget)
    keeps = keep_pages(plan, [candidates_of(plan, score) for score in scores], rules.page)
    return [keep_BHT[0] for keep_BHT in keeps]


def _evidence(layer: Layer, shown: Shown) -> Evidence:
    """The layer at this moment."""
    keys = shown.keys_BHTD
    B, _, T, D = keys.shape
    queries = shown.queries_BQSD
    if queries is None:
        queries = keys.new_zeros(B, layer.num_queries, 0, D)
    weight = layer.output_weight_QDE
    if weight is None:
        weight = keys.new_zeros(1, 1, 1).expand(layer.num_queries, D, 1)
    return Evidence(
        layer_idx=layer.layer_idx,
        queries_BQSD=queries,
        keys_BHTD=keys,
        values_BHTD=shown.values_BHTD,
        output_weight_QDE=weight,
        scaling=layer.scaling,
        positions_BT=torch.arange(T, device=keys.device)[None],
        valid_BT=torch.ones(B, T, dtype=torch.bool, device=keys.device),
        soft_cap=layer.soft_cap,
        rotary=layer.rotary,
        learned_BHT=shown.noted_BHT,
        first_head=layer.first_head,
    )

"""Decides which entries of a prompt stay, from what the engine holds of it: its keys and values, the queries
of its last tokens, and what the gates noted of each token when it came.

The stages are those of `retain.policy`; layers are shown one by one, so that one layer's copy of its keys and
values exists at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.cascade import Candidates
from retain.budget.quotas import Quotas, quotas_of
from retain.budget.statement import Budget
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, keep_masks, score_entries
from retain.vllm.settings import Rules


@dataclass(frozen=True)
class Layer:
    """What is known of a layer that evicts before any prompt comes.

    Args:
        layer_idx: index in the model.
        num_queries: query heads here.
        scaling: factor on the attention logits.
        soft_cap: of the logits; None: none.
        sinks_Q: sink logits; None: none.
        output_weight_QDE: the output projection of the query heads here; None where no score reads it.
        first_head: number of the first KV head here, of `all_heads` in the model (tensor parallelism).
        rotary: of its queries and keys; None if it is not understood.
        all_heads: KV heads of the layer in the model.
    """

    layer_idx: int
    num_queries: int
    scaling: float
    soft_cap: float | None = None
    sinks_Q: Float[Tensor, " Q"] | None = None
    output_weight_QDE: Float[Tensor, "Q D E"] | None = None
    first_head: int = 0
    all_heads: int = 1
    rotary: Rotary | None = None


@dataclass(frozen=True)
class Shown:
    """What a layer holds of a prompt.

    Args:
        keys_BHTD, values_BHTD: of all its tokens, B = 1.
        queries_BQSD: of the last ones.
        noted_BHT: of the gates; None without any.
    """

    keys_BHTD: Float[Tensor, "B H T D"]
    values_BHTD: Float[Tensor, "B H T D"]
    queries_BQSD: Float[Tensor, "B Q S D"]
    noted_BHT: Float[Tensor, "B H T"] | None = None


@torch.no_grad()
def decide(
    rules: Rules,
    layers: Sequence[Layer],
    show: Callable[[int], Shown],
    *,
    length: int,
    budget: Budget,
    seed: int,
    gates: GateSet | None = None,
) -> list[Bool[Tensor, "B H T"]]:
    """Keep masks of all layers, of one prompt.

    Args:
        rules: the policy.
        layers: those that evict, in order.
        show: the place of a layer among them -> what it holds.
        length: T, tokens of the prompt.
        budget: of the prompt, in pages.
        seed: of the draw.
        gates: of a learned policy.

    Raises:
        ValueError: the budget cannot hold what is protected, or a score is NaN.
    """
    plan = rules.plan(length, budget)
    policy = rules.policy
    candidates: list[Candidates] = []
    quotas: Quotas | None = None
    if policy.allocation.quotas is not None and gates is not None:
        quotas = quotas_of(
            gates.quotas, {one.layer_idx: heads for one, heads in zip(layers, rules.heads_L, strict=True)}
        )
        plan = rules.plan(length, budget, quotas)
    for place, layer in enumerate(layers):
        evidence = _evidence(layer, show(place))
        learned = gates.score(evidence) if gates is not None else None
        score = score_entries(policy, evidence, learned=learned, seeds_B=[seed])
        candidates.append(candidates_of(plan, score))
    return keep_masks(plan, candidates)


def _evidence(layer: Layer, shown: Shown) -> Evidence:
    """The layer at the end of the prompt."""
    keys = shown.keys_BHTD
    B, _, T, D = keys.shape
    weight = layer.output_weight_QDE
    if weight is None:
        weight = keys.new_zeros(1, 1, 1).expand(shown.queries_BQSD.shape[1], D, 1)
    return Evidence(
        layer_idx=layer.layer_idx,
        queries_BQSD=shown.queries_BQSD,
        keys_BHTD=keys,
        values_BHTD=shown.values_BHTD,
        output_weight_QDE=weight,
        scaling=layer.scaling,
        positions_BT=torch.arange(T, device=keys.device).expand(B, T),
        valid_BT=torch.ones(B, T, dtype=torch.bool, device=keys.device),
        soft_cap=layer.soft_cap,
        sinks_Q=layer.sinks_Q,
        learned_BHT=shown.noted_BHT,
        first_head=layer.first_head,
    )

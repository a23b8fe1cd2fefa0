"""Decides which entries of a request stay, from what the engine holds of it: keys and values, the queries of
its last tokens, and what the gates noted of each token when it came.

The stages are those of `retain.policy`; layers are shown one by one, so that one layer's copy of its keys and
values exists at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from retain.attention.rotary import Rotary
from retain.budget.shares import Candidates
from retain.budget.statement import Stock
from retain.evidence import Evidence
from retain.gates.base import GateSet
from retain.policy import candidates_of, keep_masks, score_entries
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
    """What a layer holds of a request, on columns: tokens that any of its heads holds.

    Args:
        keys_BHTD, values_BHTD: B = 1; undefined where a head does not hold the column.
        queries_BQSD: of the last tokens; None where none are observed.
        noted_BHT: of the gates; None without any.
        held_BHT: which head holds which column.
        tokens_BT: the token of each column.
        column_N: the column of each entry, head after head, in order of time.
    """

    keys_BHTD: Float[Tensor, "B H T D"]
    values_BHTD: Float[Tensor, "B H T D"]
    queries_BQSD: Float[Tensor, "B Q S D"] | None
    noted_BHT: Float[Tensor, "B H T"] | None
    held_BHT: Bool[Tensor, "B H T"]
    tokens_BT: Int64[Tensor, "B T"]
    column_N: Int64[Tensor, " N"]


@torch.no_grad()
def decide(
    rules: Rules,
    layers: Sequence[Layer],
    show: Callable[[int], tuple[Shown, Any]],
    *,
    seen: int,
    asked: Any,
    gates: GateSet | None = None,
) -> list[Bool[Tensor, " N"]]:
    """Keep masks of the entries of all layers, of one request.

    Args:
        rules: the policy.
        layers: those that evict, in order.
        show: the place of a layer among them -> what it holds, and its entries.
        seen: tokens of the request.
        asked: its prompt's `length`, its `budget` and `seed`.
        gates: of a learned policy.

    Raises:
        ValueError: the budget cannot hold what is protected, or a score is NaN.
    """
    policy = rules.policy
    scores, held, columns = [], [], []
    for place, layer in enumerate(layers):
        shown, own = show(place)
        evidence = _evidence(layer, shown, seen)
        learned = gates.score(evidence) if gates is not None else None
        scores.append(score_entries(policy, evidence, learned=learned, seeds_B=[asked.seed]))
        held.append(shown.held_BHT)
        columns.append((shown.tokens_BT, own.heads_N, shown.column_N))
    # Tokens that every head of every layer holds can be protected.
    counts_T = torch.zeros(seen, dtype=torch.int64, device=held[0].device)
    for (tokens_BT, _, _), held_BHT in zip(columns, held, strict=True):
        counts_T[tokens_BT[0]] += held_BHT[0].sum(0)
    stock = None
    if not bool((counts_T == sum(rules.heads_L)).all()):
        held_BL = (tuple(int(own.sum()) for own in held),)
        stock = Stock(held_BL, (seen,), (counts_T == sum(rules.heads_L))[None], (min(seen, asked.length),))
    plan = rules.plan(seen, asked.budget, stock=stock)
    candidates: list[Candidates] = []
    for score, (tokens_BT, _, _) in zip(scores, columns, strict=True):
        if stock is None:
            candidates.append(candidates_of(plan, score))
            continue
        protected_BT = plan.protected_BT.to(tokens_BT.device).gather(1, tokens_BT)
        candidates.append(candidates_of(plan, score, protected_BT, place_BT=tokens_BT))
    keeps = keep_masks(plan, candidates)
    return [
        keep_BHT[0, heads_N, column_N]
        for keep_BHT, (_, heads_N, column_N) in zip(keeps, columns, strict=True)
    ]


def _evidence(layer: Layer, shown: Shown, seen: int) -> Evidence:
    """The layer at this moment."""
    keys = shown.keys_BHTD
    B, _, T, D = keys.shape
    queries = shown.queries_BQSD
    if queries is None:
        queries = keys.new_zeros(B, layer.num_queries, 0, D)
    weight = layer.output_weight_QDE
    if weight is None:
        weight = keys.new_zeros(1, 1, 1).expand(layer.num_queries, D, 1)
    evidence = Evidence(
        layer_idx=layer.layer_idx,
        queries_BQSD=queries,
        keys_BHTD=keys,
        values_BHTD=shown.values_BHTD,
        output_weight_QDE=weight,
        scaling=layer.scaling,
        positions_BT=shown.tokens_BT,
        valid_BT=torch.ones(B, T, dtype=torch.bool, device=keys.device),
        soft_cap=layer.soft_cap,
        rotary=layer.rotary,
        learned_BHT=shown.noted_BHT,
        first_head=layer.first_head,
    )
    if seen == T and bool(shown.held_BHT.all()):
        return evidence
    return replace(evidence, held_BHT=shown.held_BHT, place_BT=shown.tokens_BT)

"""Errors of layers, measured: how much an eviction changes what a layer's attention writes (CompressKV)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from retain.attention.chunked import truncate
from retain.eval.diagnose.head_importance import probe_of
from retain.eval.tasks.suite import Item
from retain.evidence import Evidence, attention_probs
from retain.hf.intercept.observe import observe
from retain.ranking import rank_entries
from retain.scores.compresskv import vote, voters_of

EPSILON = 1e-5


@torch.no_grad()
def measure_layer_errors(
    model: Any,
    items: Iterable[Item],
    heads_LQ: Sequence[Sequence[float]],
    *,
    entries: int = 32,
    window: int = 8,
    num_voters: int = 4,
) -> tuple[Float64[Tensor, "L 1"], list[int]]:
    """Error of every layer under eviction, scaled so that the largest is 1.

    `e_l = sum_items sum_j ||o_j' - o_j||_2 / (||o_j||_2 + 1e-5)`, over the tokens j of the answer: `o_j` is
    the output of the layer's attention, without bias, and `o_j'` the same where of context and question only
    the last `window` entries are left and the `entries - window` others that CompressKV scores highest. Every
    layer reads what it reads without an eviction: errors do not add up over layers.

    CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation, arXiv
    2508.02401; as in its released code, which lets the model write the answer, and takes the mean over data
    sets.

    Args:
        items: with answers.
        heads_LQ: the table of retrieval heads, a row for each layer that evicts.
        entries: left of every head, more than the window.
        window, num_voters: of the score.

    Returns:
        errors, one for each layer that evicts, and the indices of these layers.

    Raises:
        ValueError: no items, one whose prompt has no more than `entries` tokens, or a table of another model.
    """
    if not 0 < window < entries:
        raise ValueError(
            f"of {entries} entries that are left, {window} are the window: leave more than a window."
        )
    total: dict[int, float] = {}
    for item in items:
        probe = probe_of(item)
        if len(probe.prompt_ids) <= entries:
            raise ValueError(
                f"an item's prompt has {len(probe.prompt_ids)} tokens, and {entries} entries would be left: "
                "pass longer contexts."
            )
        ids = torch.tensor([[*probe.prompt_ids, *probe.answer_ids]], device=model.device)
        shown = observe(model, ids)
        _check(shown, heads_LQ)
        for evidence, row_Q in zip(shown, heads_LQ, strict=True):
            voters = voters_of(row_Q, num_voters)
            error = _error(evidence, len(probe.prompt_ids), voters, entries, window)
            total[evidence.layer_idx] = total.get(evidence.layer_idx, 0.0) + error
    if not total:
        raise ValueError("errors of layers are measured on items, and there are none: pass one at least.")
    errors_L1 = torch.tensor([*total.values()], dtype=torch.float64)[:, None]
    return errors_L1 / errors_L1.amax().clamp_min(torch.finfo(torch.float64).tiny), [*total]


def _check(shown: Sequence[Evidence], heads_LQ: Sequence[Sequence[float]]) -> None:
    """Refuse a table of another model."""
    heads = [evidence.queries_BQSD.shape[1] for evidence in shown]
    if [len(row_Q) for row_Q in heads_LQ] != heads:
        raise ValueError(
            f"retrieval heads are given for {len(heads_LQ)} layers of {len(heads_LQ[0])} query heads, and "
            f"the model evicts from {len(heads)} of {heads[0]}: measure those of this model."
        )


def _error(evidence: Evidence, prompt: int, voters: Sequence[int], entries: int, window: int) -> float:
    """Sum over the tokens behind the prompt."""
    read = truncate(evidence, prompt)
    vote_T = vote(read, voters, window=window, pool="avg", pool_size=5)[0].clone()
    vote_T[prompt - window :] = float("inf")
    held_T = torch.ones(evidence.num_seen, dtype=torch.bool, device=vote_T.device)
    held_T[:prompt] = rank_entries(vote_T) < entries
    held_BHT = held_T.expand(1, evidence.num_heads, -1)
    whole_sE = _outputs(evidence, prompt)
    change_sE = _outputs(replace(evidence, held_BHT=held_BHT), prompt) - whole_sE
    return float((change_sE.norm(dim=-1) / (whole_sE.norm(dim=-1) + EPSILON)).sum())


def _outputs(evidence: Evidence, start: int) -> Float[Tensor, "s E"]:
    """What the attention writes for the queries from `start` on."""
    probs_BQsT = attention_probs(evidence, start, evidence.num_queries)
    dtype, group = probs_BQsT.dtype, evidence.group
    values_QTD = evidence.values_BHTD[0].to(dtype).repeat_interleave(group, dim=0)
    return ((probs_BQsT[0] @ values_QTD) @ evidence.output_weight_QDE.to(dtype)).sum(0)

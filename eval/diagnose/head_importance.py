"""Importance of query heads, measured: how much of their attention finds the needle while the answer is read.

HeadKV's measure, over items with needles (`Suite.probes`). The right answer is read token by token; a step is
the query that should produce the next one. The released code lets the model write the answer, and counts an
item only where it is right.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from retain.attention.chunked import attention_chunks
from retain.eval.tasks.suite import Item
from retain.hf.intercept.observe import observe


@dataclass(frozen=True)
class Probe:
    """One item as it is read.

    Args:
        prompt_ids: context and question.
        answer_ids: the right answer, without an end.
        needle: places in the context that hold it.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    needle: tuple[int, ...]


def probe_of(item: Item) -> Probe:
    """The first question of an item, with its answer.

    Raises:
        ValueError: it names no needle, or has no answer.
    """
    asked = item.asked[0]
    answer_ids = tuple(token for token in asked.gold_ids[: asked.generate] if token not in item.end_ids)
    needle = tuple(sorted({place for start, stop in item.needles for place in range(start, stop)}))
    if not needle or not answer_ids:
        raise ValueError(
            f"an item has {len(needle)} tokens of a needle and {len(answer_ids)} of an answer: heads are "
            "measured on items that have both, such as those of niah/grid."
        )
    return Probe((*item.context_ids, *asked.question_ids), answer_ids, needle)


@torch.no_grad()
def measure_head_importance(
    model: Any, items: Iterable[Item], *, chunk: int = 128
) -> tuple[Float64[Tensor, "L Q"], list[int]]:
    """Importance of every query head, scaled so that the largest is 1.

    With the needle's places N and `a_j` the attention at step j, the mean over items of
    `sum_j sum_{i in N and among the |N| largest of a_j} a_j[i] / |N|`.

    Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    arXiv 2410.19258; its HeadKV-R2.

    Args:
        items: with needles; every item counts the same.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        importances, one row for each layer that evicts, and the indices of these layers.

    Raises:
        ValueError: no items, one without a needle, or layers with unlike query heads.
    """
    total: dict[int, Tensor] = {}
    count = 0
    for item in items:
        probe = probe_of(item)
        ids = torch.tensor([*probe.prompt_ids, *probe.answer_ids])
        first, needle = len(probe.prompt_ids) - 1, torch.tensor(probe.needle)
        for evidence in observe(model, ids[None, :-1].to(model.device)):
            own_Q = torch.zeros(evidence.queries_BQSD.shape[1], dtype=torch.float64)
            for _, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                own_Q += _importance(probs_BQsK[0].double().cpu(), needle)
            total[evidence.layer_idx] = total.get(evidence.layer_idx, torch.zeros(())) + own_Q
        count += 1
    if not count:
        raise ValueError("importance is measured on items with needles, and there are none: pass one.")
    if len({len(row_Q) for row_Q in total.values()}) > 1:
        raise ValueError(
            f"layers have {', '.join(str(len(row_Q)) for row_Q in total.values())} query heads, and heads "
            "are compared over layers of as many: state budgets another way than by weights of heads."
        )
    mean_LQ = torch.stack([*total.values()]) / count
    return mean_LQ / mean_LQ.amax().clamp_min(torch.finfo(torch.float64).tiny), [*total]


def _importance(probs_QsK: Float[Tensor, "Q s K"], needle: Tensor) -> Float64[Tensor, " Q"]:
    """Sum over some steps."""
    there_K = torch.zeros(probs_QsK.shape[-1], dtype=torch.bool)
    there_K[needle] = True
    values_Qsn, places_Qsn = probs_QsK.topk(len(needle), dim=-1)
    return (values_Qsn * there_K[places_Qsn]).sum((-1, -2)) / len(needle)

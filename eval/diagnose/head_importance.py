"""Importance of query heads, measured: how much of their attention finds the needle while the answer is read.

Three published measures, over items with needles (`Suite.probes`). The right answer is read token by token;
a step is the query that should produce the next one. The released codes let the model write the answer, and
count an item only where it is right.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from retain.attention.chunked import attention_chunks
from retain.eval.tasks.suite import Item
from retain.hf.intercept.observe import observe
from retain.registry import lookup


@dataclass(frozen=True)
class Measure:
    """One way to measure importance.

    Args:
        about: in words, for a command's output.
        paper: where it comes from.
    """

    about: str
    paper: str


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "retrieval_reasoning": Measure(
            "attention on the needle, of as many largest as it has tokens", "HeadKV-R2, arXiv 2410.19258"
        ),
        "retrieval": Measure(
            "steps whose largest attention is on the token of the needle that comes next",
            "HeadKV-R, arXiv 2410.19258",
        ),
        "semantic": Measure(
            "attention on the needle at steps whose next token is in it", "CompressKV, arXiv 2508.02401"
        ),
    }
)


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
    model: Any, items: Iterable[Item], measure: str, *, chunk: int = 128
) -> tuple[Float64[Tensor, "L Q"], list[int]]:
    """Importance of every query head, scaled so that the largest is 1.

    With the needle's places N, `a_j` the attention at step j, and y_j the token that comes next, the mean
    over items of

    - `retrieval_reasoning`: `sum_j sum_{i in N and among the |N| largest of a_j} a_j[i] / |N|`;
    - `retrieval`: `sum_j [argmax_i a_j[i] in N, and its token is y_j] / |N|`;
    - `semantic`: `sum_j #{i in N whose token is y_j} * sum_{i in N} a_j[i]`.

    Args:
        items: with needles; every item counts the same.
        measure: a name in `MEASURES`.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        importances, one row for each layer that evicts, and the indices of these layers.

    Raises:
        ValueError: no items, one without a needle, an unknown measure, or layers with unlike query heads.
    """
    lookup(measure, MEASURES, what="measure of importance")
    total: dict[int, Tensor] = {}
    count = 0
    for item in items:
        probe = probe_of(item)
        ids = torch.tensor([*probe.prompt_ids, *probe.answer_ids])
        first, needle = len(probe.prompt_ids) - 1, torch.tensor(probe.needle)
        # matches[j, n]: the needle's n-th token is the one that comes next.
        matches_jn = ids[first + 1 :, None] == ids[needle]
        for evidence in observe(model, ids[None, :-1].to(model.device)):
            own_Q = torch.zeros(evidence.queries_BQSD.shape[1], dtype=torch.float64)
            for start, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                probs_QsK = probs_BQsK[0].double().cpu()
                here = slice(start - first, start - first + probs_QsK.shape[1])
                own_Q += _importance(probs_QsK, needle, matches_jn[here], measure)
            total[evidence.layer_idx] = total.get(evidence.layer_idx, torch.zeros(())) + own_Q
        count += 1
    if not count:
        raise ValueError("importance is measured on items with needles, and there are none: pass one.")
    if len({len(row_Q) for row_Q in total.values()}) > 1:
        raise ValueError(
            f"layers have {', '.join(str(len(row_Q)) for row_Q in total.values())} query heads, and a table "
            "has as many in every row: take a policy without a table of heads."
        )
    mean_LQ = torch.stack([*total.values()]) / count
    return mean_LQ / mean_LQ.amax().clamp_min(torch.finfo(torch.float64).tiny), [*total]


def _importance(
    probs_QsK: Float[Tensor, "Q s K"], needle: Tensor, matches_sn: Tensor, measure: str
) -> Float64[Tensor, " Q"]:
    """Sum over some steps."""
    there_K = torch.zeros(probs_QsK.shape[-1], dtype=torch.bool)
    there_K[needle] = True
    if measure == "semantic":
        return (probs_QsK[..., needle].sum(-1) * matches_sn.sum(-1)).sum(-1)
    if measure == "retrieval":
        match_sK = torch.zeros(len(matches_sn), len(there_K), dtype=torch.float64)
        match_sK[:, needle] = matches_sn.double()
        best_Qs1 = probs_QsK.argmax(-1, keepdim=True)
        return match_sK.expand(len(probs_QsK), -1, -1).gather(-1, best_Qs1).sum((-1, -2)) / len(needle)
    values_Qsn, places_Qsn = probs_QsK.topk(len(needle), dim=-1)
    return (values_Qsn * there_K[places_Qsn]).sum((-1, -2)) / len(needle)

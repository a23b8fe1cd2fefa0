"""Agreement of RoPE pairs, measured: how well the product over two channels finds what the whole head finds.

FASA (arXiv 2602.03152) calls it contextual agreement, and takes the pairs of a head that agree best to choose
what is read (`retain.reading.fasa`). Measured over items with needles (`Suite.probes`): the right answer is
read token by token, and each step's query is asked. The released code lets the model write the answer, and
averages over all its tokens, on one data set; it has a table for each budget, of the K that the budget is.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from retain.eval.diagnose.head_importance import probe_of
from retain.eval.tasks.suite import Item
from retain.evidence import Evidence
from retain.hf.intercept.observe import observe
from retain.ranking import rank_entries

# Tokens that are to be found, at most.
TOP = 128


@torch.no_grad()
def measure_dominant_pairs(
    model: Any, items: Iterable[Item], *, top: int = TOP
) -> tuple[Float64[Tensor, "L C"], list[int]]:
    """Agreement of every RoPE pair of every KV head, head after head.

    `agreement[h, f] = mean over items, steps and query heads g of h of |top_K(q_g . k) & top_K(q_g[f] k[f]
    + q_g[f + F] k[f + F])| / K`, over all keys that a step's query sees, after RoPE, with K the less of `top`
    and a quarter of what is seen, at least 1. Of equal products the later token comes first.

    Args:
        items: with needles; every item counts the same.
        top: K, at most.

    Returns:
        agreements in 0..1, one row for each layer that evicts, and the indices of these layers.

    Raises:
        ValueError: no items, one without a needle, or a rotary embedding that is not understood.
    """
    total: dict[int, Tensor] = {}
    count = 0
    for item in items:
        probe = probe_of(item)
        ids, first = [*probe.prompt_ids, *probe.answer_ids][:-1], len(probe.prompt_ids) - 1
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            own_HF = _agreement(evidence, first, top)
            total[evidence.layer_idx] = total.get(evidence.layer_idx, torch.zeros(())) + own_HF
        count += 1
    if not count:
        raise ValueError("agreement is measured on items with needles, and there are none: pass one.")
    return torch.stack([own.flatten() for own in total.values()]) / count, [*total]


def _agreement(evidence: Evidence, first: int, top: int) -> Float64[Tensor, "H F"]:
    """Of one item and layer, mean over the queries from `first` on."""
    if evidence.rotary is None:
        raise ValueError(
            "RoPE pairs agree where RoPE turns them, and this model's rotary embedding is not understood: "
            "take 'quest', which needs no table."
        )
    width, heads = len(evidence.rotary.inverse_frequencies_F), evidence.num_heads
    keys_HTD, queries_QSD = evidence.keys_BHTD[0].double(), evidence.queries_BQSD[0].double()
    shift, found = evidence.num_seen - evidence.num_queries, []
    for step in range(first, evidence.num_seen):
        query_HGD = queries_QSD[:, step - shift].unflatten(0, (heads, -1))
        seen_HTD = keys_HTD[:, : step + 1]
        most = max(1, min(top, (step + 1) // 4))
        whole_HGT = rank_entries(query_HGD @ seen_HTD.transpose(1, 2)) < most
        product_HGTD = query_HGD[:, :, None] * seen_HTD[:, None]
        pair_HGTF = product_HGTD[..., :width] + product_HGTD[..., width : 2 * width]
        part_HGFT = rank_entries(pair_HGTF.transpose(2, 3)) < most
        shared_HGF = (part_HGFT & whole_HGT[:, :, None]).sum(-1).double() / most
        found.append(shared_HGF.mean(1).cpu())
    return torch.stack(found).mean(0)

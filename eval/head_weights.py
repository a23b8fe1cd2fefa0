"""Measures a number for each KV head of a model, by which duoattention and headkv share a budget.

    python -m retain.eval.head_weights --policy duoattention --model reference:0 --output duoattention.json
    python -m retain.eval.head_weights --policy headkv --model reference:0 --output headkv.json

It writes JSON that `allocation.weights` names (`retain.attention.head_weights`). Heads are measured on texts
with a needle, of which none is in a comparison.

For `duoattention` it *measures attention*: a head is a retrieval head if much of its attention goes far back.
DuoAttention (arXiv 2410.10819) *optimises* a gate of each head, so that the model's output on synthetic
passkeys survives when gated heads stream; it needs gradients and a training run. A head that looks far back
without any effect on the output is a retrieval head here and none there.

For `headkv` it measures how much of a head's attention finds the needle while the right answer is read. The
released code lets the model write the answer, and counts an item only if it is right.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.attention.head_weights import format_weights
from retain.eval.config import resolve_device
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.sources import load_rows
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.models.named import load, reference_seed
from retain.process.command import command
from retain.process.provenance import write_text

DUO, HEADKV = "duoattention", "headkv"
# Tasks of which items for headkv are written, and what is added to the seed, so that no comparison asks them.
REFERENCE_TASK, TASK, SEED = "reference_probes", "niah/grid", 10**6
# First and last entries that a streaming head holds.
SINKS, RECENT = 4, 32
# 1 / beta of a budget goes by importance; HeadKV's scripts try 1.005 to 10.
BETA = 1.5
# Queries whose attention exists at once.
CHUNK = 128


@torch.no_grad()
def measure_far_attention(
    model: Any,
    documents: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    sinks: int = SINKS,
    recent: int = RECENT,
) -> Float64[Tensor, "L H"]:
    """Share of each head's attention that a streaming head could not pay.

    `share[l, h] = mean_documents mean_j max_{q in group(h)} sum_{sinks <= i <= j - recent} a_qj[i]`, over the
    queries j of what comes after the context.

    Args:
        documents: tokens of a context, and of what came after it (question and answer); every document counts
            the same.
        sinks, recent: first and last entries that a streaming head holds; the query's is one of the last.

    Returns:
        shares in [0, 1], one row for each layer that evicts.

    Raises:
        ValueError: a document that is no longer than what a streaming head holds.
    """
    shares: list[Tensor] = []
    for number, (context, appendix) in enumerate(documents):
        ids = [*context, *appendix]
        if len(ids) <= sinks + recent:
            raise ValueError(
                f"document {number} has {len(ids)} tokens, and a streaming head holds {sinks} + {recent} "
                "of them: nothing is far. Pass longer documents."
            )
        rows = []
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            far_H = torch.zeros(evidence.num_heads, dtype=torch.float64)
            for start, probs_BQsK in attention_chunks(evidence, CHUNK, first=len(context)):
                entry_K = torch.arange(probs_BQsK.shape[3], device=probs_BQsK.device)
                query_s1 = torch.arange(start, start + probs_BQsK.shape[2], device=probs_BQsK.device)[:, None]
                held_sK = (entry_K < sinks) | (entry_K > query_s1 - recent)
                far_Qs = probs_BQsK[0].masked_fill(held_sK, 0.0).sum(-1)
                far_H += far_Qs.unflatten(0, (len(far_H), -1)).amax(1).sum(-1).double().cpu()
            rows.append(far_H / len(appendix))
        shares.append(torch.stack(rows))
    return torch.stack(shares).mean(0)


@torch.no_grad()
def measure_head_importance(model: Any, items: Iterable[tuple[Encoded, int]]) -> Float64[Tensor, "L Q"]:
    """Importance of every query head, scaled so that the largest is 1.

    With the needle's places N and `a_j` the attention at step j (the query that should produce the j-th token
    of the right answer), the mean over items of
    `sum_j sum_{i in N and among the |N| largest of a_j} a_j[i] / |N|`.

    Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    arXiv 2410.19258; its HeadKV-R2.

    Args:
        items: with their needles as evidence, and the most tokens of an answer; every item counts the same.

    Returns:
        importances, one row for each layer that evicts.

    Raises:
        ValueError: an item without a needle or answer.
    """
    found: list[Tensor] = []
    for item, longest in items:
        answer = [token for token in item.answer_ids[:longest] if token not in item.end_ids]
        places = sorted({place for start, stop in item.evidence for place in range(start, stop)})
        if not places or not answer:
            raise ValueError(
                f"an item has {len(places)} tokens of a needle and {len(answer)} of an answer: heads are "
                "measured on items that have both, such as those of niah/grid."
            )
        ids = torch.tensor([[*item.context_ids, *item.question_ids, *answer][:-1]], device=model.device)
        first, needle = ids.shape[1] - len(answer), torch.tensor(places)
        rows = []
        for evidence in observe(model, ids):
            found_Q = torch.zeros(evidence.queries_BQSD.shape[1], dtype=torch.float64)
            for _, probs_BQsK in attention_chunks(evidence, CHUNK, first=first):
                values_Qsn, places_Qsn = probs_BQsK[0].double().cpu().topk(len(needle), dim=-1)
                found_Q += (values_Qsn * torch.isin(places_Qsn, needle)).sum((-1, -2)) / len(needle)
            rows.append(found_Q)
        found.append(torch.stack(rows))
    mean_LQ = torch.stack(found).mean(0)
    return mean_LQ / mean_LQ.amax().clamp_min(torch.finfo(torch.float64).tiny)


def class_weights(shares_LH: Float[Tensor, "L H"]) -> Float64[Tensor, "L H"]:
    """1 for a retrieval head, 0 for a streaming head: the half of the heads with the largest shares retrieve
    (of an odd number, the larger half). Of equal shares the later head has the higher place."""
    place = shares_LH.flatten().argsort(stable=True).argsort().cpu()
    return (place >= shares_LH.numel() // 2).double().view(shares_LH.shape)


def importance_weights(
    importance_LQ: Float64[Tensor, "L Q"], num_heads: int, beta: float = BETA
) -> Float64[Tensor, "L H"]:
    """HeadKV's part of each of N KV heads: `(beta - 1) * sum(s) + N * s_h`, with `s_h` the mean importance of
    the query heads of its group.

    In proportion to them, `1 / beta` of a budget goes by importance and the rest equally; beta is at least 1.
    HeadKV's released code caches each *query* head by itself; a KV head here gets the mean of what its query
    heads get there.
    """
    mean_LH = importance_LQ.unflatten(1, (num_heads, -1)).mean(-1)
    return (beta - 1) * mean_LH.sum() + mean_LH.numel() * mean_LH


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, and writes."""
    about = "Measure a number for each KV head of a model, by which a policy shares its budget."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--policy", choices=(DUO, HEADKV), required=True, help="the preset that reads them")
    parser.add_argument("--model", required=True, help="a name, or a hub id or folder")
    parser.add_argument("--output", type=Path, required=True, help="the file, e.g. duoattention.json")
    parser.add_argument("--context-tokens", type=int, default=1000, help="tokens of a context (default 1000)")
    parser.add_argument("--documents", type=int, default=64, help="texts with a needle (default 64)")
    parser.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    model, tokenizer = load(given.model)
    if tokenizer is None:
        raise ValueError(f"model={given.model!r} has no tokenizer, and documents are texts.")
    model = model.to(device).requires_grad_(False)
    task, seed = (TASK, SEED) if reference_seed(given.model) is None else (REFERENCE_TASK, 0)
    size = {"context_tokens": given.context_tokens, "items": given.documents}
    rows = tqdm(load_rows(task, tokenizer, seed=seed, **size), unit="item")
    items = ((encode(row, tokenizer, model), row.max_new_tokens) for row in rows)
    specs = describe(model)
    if len({(spec.num_kv_heads, spec.num_heads) for spec in specs}) > 1:
        raise ValueError(
            "layers have unlike numbers of heads, and heads are compared over layers of as many."
        )
    if given.policy == DUO:
        documents = ((item.context_ids, (*item.question_ids, *item.answer_ids)) for item, _ in items)
        weights_LH = class_weights(measure_far_attention(model, documents))
    else:
        weights_LH = importance_weights(measure_head_importance(model, items), specs[0].num_kv_heads)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    layers = [spec.layer_idx for spec in specs]
    write_text(given.output, format_weights(dict(zip(layers, weights_LH.tolist(), strict=True))))
    print(f"Weights: {given.output}\nPass allocation={{'weights': '{given.output}'}}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

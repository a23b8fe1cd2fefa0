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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.attention.head_weights import format_weights
from retain.eval.run.plan import load_model
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.sources import load_rows
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.models.named import REFERENCE
from retain.process.command import command
from retain.process.provenance import write_text

DUO, HEADKV = "duoattention", "headkv"
# Tasks whose items heads are measured on, and their seed, which no comparison asks.
REFERENCE_TASK, TASK, SEED = "reference/multikey", "niah/grid", 10**6
# First and last entries that a streaming head holds.
SINKS, RECENT = 4, 32
# 1 / beta of a budget goes by importance; HeadKV's scripts try 1.005 to 10.
BETA = 1.5
# Queries whose attention exists at once.
CHUNK = 128


def summed(
    model: Any, ids: Sequence[int], first: int, measured: Callable[[int, int, Tensor], Tensor]
) -> Float64[Tensor, "L heads"]:
    """`measured(KV heads, first query, attention [Q, s, K])`, summed over chunks of the queries from `first`
    on; a row for each layer that evicts."""
    rows = []
    for evidence in observe(model, torch.tensor([ids], device=model.device)):
        chunks = attention_chunks(evidence, CHUNK, first=first)
        parts = [measured(evidence.num_heads, start, probs[0]).double().cpu() for start, probs in chunks]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@torch.no_grad()
def measure_far_attention(
    model: Any, items: Iterable[Encoded], *, sinks: int = SINKS, recent: int = RECENT
) -> Float64[Tensor, "L H"]:
    """Share of each head's attention that a streaming head, which holds its first and last entries, could not
    pay: in [0, 1], a row for each layer that evicts.

    `share[l, h] = mean_items mean_j max_{q in group(h)} sum_{sinks <= i <= j - recent} a_qj[i]`, over the
    queries j of question and answer. ValueError: an item that is no longer than what a streaming head holds.
    """

    def far(num_heads: int, start: int, probs_QsK: Tensor) -> Tensor:
        entry_K = torch.arange(probs_QsK.shape[2], device=probs_QsK.device)
        query_s1 = torch.arange(start, start + probs_QsK.shape[1], device=probs_QsK.device)[:, None]
        held_sK = (entry_K < sinks) | (entry_K > query_s1 - recent)
        far_Qs = probs_QsK.masked_fill(held_sK, 0.0).sum(-1)
        return far_Qs.unflatten(0, (num_heads, -1)).amax(1).sum(-1)

    shares = []
    for item in items:
        ids, first = [*item.context_ids, *item.question_ids, *item.answer_ids], len(item.context_ids)
        if len(ids) <= sinks + recent:
            raise ValueError(
                f"a document has {len(ids)} tokens, and a streaming head holds {sinks} + {recent} of them: "
                "nothing is far. Pass longer documents."
            )
        shares.append(summed(model, ids, first, far) / (len(ids) - first))
    return torch.stack(shares).mean(0)


@torch.no_grad()
def measure_head_importance(model: Any, items: Iterable[Encoded]) -> Float64[Tensor, "L Q"]:
    """Importance of every query head, scaled so that the largest is 1; a row for each layer that evicts.

    With the needle's places N and `a_j` the attention at step j (the query that should produce the j-th token
    of the right answer), the mean over items of
    `sum_j sum_{i in N and among the |N| largest of a_j} a_j[i] / |N|`.

    Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    arXiv 2410.19258; its HeadKV-R2. ValueError: an item without a needle or answer.
    """
    found = []
    for item in items:
        answer = [token for token in item.answer_ids if token not in item.end_ids]
        needle = torch.tensor(sorted({i for start, stop in item.evidence for i in range(start, stop)}))
        if not len(needle) or not answer:
            raise ValueError(
                f"an item has {len(needle)} tokens of a needle and {len(answer)} of an answer: heads are "
                "measured on items that have both, such as those of niah/grid."
            )

        def hits(num_heads: int, start: int, probs_QsK: Tensor, needle: Tensor = needle) -> Tensor:
            values_Qsn, places_Qsn = probs_QsK.double().cpu().topk(len(needle), dim=-1)
            return (values_Qsn * torch.isin(places_Qsn, needle)).sum((-1, -2)) / len(needle)

        ids = [*item.context_ids, *item.question_ids, *answer][:-1]
        found.append(summed(model, ids, len(ids) - len(answer), hits))
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
    model, tokenizer = load_model(given.model, given.device)
    task = REFERENCE_TASK if given.model == REFERENCE else TASK
    rows = load_rows(task, tokenizer, seed=SEED, context_tokens=given.context_tokens, items=given.documents)
    items = ((encode(row, tokenizer, model), row.max_new_tokens) for row in tqdm(rows, unit="item"))
    specs = describe(model)
    if len({(spec.num_kv_heads, spec.num_heads) for spec in specs}) > 1:
        raise ValueError(
            "layers have unlike numbers of heads, and heads are compared over layers of as many."
        )
    if given.policy == DUO:
        weights_LH = class_weights(measure_far_attention(model, (item for item, _ in items)))
    else:
        # The reference model's answers have an end token that is none of theirs.
        cut = (replace(item, answer_ids=item.answer_ids[:longest]) for item, longest in items)
        weights_LH = importance_weights(measure_head_importance(model, cut), specs[0].num_kv_heads)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    layers = [spec.layer_idx for spec in specs]
    write_text(given.output, format_weights(dict(zip(layers, weights_LH.tolist(), strict=True))))
    print(f"Weights: {given.output}\nPass allocation={{'weights': '{given.output}'}}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures a number for each KV head of a model, by which duoattention and headkv share a budget.

    python -m retain.eval.head_weights --policy duoattention --model reference:0 --output duoattention.json
    python -m retain.eval.head_weights --policy headkv --model reference:0 --output headkv.json

It writes JSON that `allocation.weights` names (`retain.budget.head_weights`).

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

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.budget.head_weights import format_weights
from retain.eval.config import resolve_device
from retain.eval.tasks.encode import Encoded, encode
from retain.eval.tasks.sources import load_rows
from retain.eval.text_pieces import cut, opening_of, read_text
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.models.named import load, reference_seed
from retain.process.command import command
from retain.process.provenance import write_text

DUO, HEADKV = "duoattention", "headkv"
# Tasks of which items for headkv are written, and what is added to the seed, so that no comparison asks them.
REFERENCE_TASK, TASK, SEED = "reference_probes", "niah/grid", 10**6
# Stream of the reference model's documents for duoattention.
STREAM = 11
# Options of one policy, with their defaults. HeadKV's scripts try a beta of 1.005 to 10.
OPTIONS: dict[str, dict[str, tuple[type, Any, str]]] = {
    DUO: {
        "text": (str, None, "UTF-8 file to cut documents from (default for reference:0: its probes)"),
        "sinks": (int, 4, "first entries that a streaming head holds"),
        "recent": (int, 32, "last entries that it holds, the query's included"),
        "threshold": (float, 0.5, "place among the heads, in 0..1, from which on they retrieve"),
    },
    HEADKV: {"beta": (float, 1.5, "1 / beta of the budget goes by importance")},
}
Measured = tuple[Float64[Tensor, "L C"], list[int]]


def _stacked(rows: Sequence[Tensor], what: str) -> Tensor:
    """A row a layer; ValueError: layers with unlike numbers of heads."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"layers have {', '.join(str(len(row)) for row in rows)} {what}, and heads are compared over "
            "layers of as many: state budgets another way than by weights of heads."
        )
    return torch.stack([*rows])


@torch.no_grad()
def measure_far_attention(
    model: Any,
    documents: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    sinks: int = 4,
    recent: int = 32,
    chunk: int = 128,
) -> Float64[Tensor, "L H"]:
    """Share of each head's attention that a streaming head could not pay.

    `share[l, h] = mean_documents mean_j max_{q in group(h)} sum_{sinks <= i <= j - recent} a_qj[i]`, over the
    queries j of what comes after the context; if nothing does, over those of the context that are further
    than `sinks + recent` from its beginning, for which a streaming head has lost something.

    Args:
        documents: tokens of a context, and of what came after it (question and answer); every document counts
            the same.
        sinks, recent: first and last entries that a streaming head holds; the query's is one of the last.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        shares in [0, 1], one row for each layer that evicts.

    Raises:
        ValueError: no documents, one that is no longer than what a streaming head holds, or layers with
            unlike numbers of KV heads.
    """
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"a streaming head holds sinks >= 0 and recent >= 1 entries; got sinks={sinks}, recent={recent}."
        )
    shares: list[Tensor] = []
    for number, (context, appendix) in enumerate(documents):
        ids = [*context, *appendix]
        if len(ids) <= sinks + recent:
            raise ValueError(
                f"document {number} has {len(ids)} tokens, and a streaming head holds {sinks} + {recent} "
                "of them: nothing is far. Pass longer documents, or fewer sinks and recent entries."
            )
        first = len(context) if appendix else sinks + recent
        rows = []
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            far_H = torch.zeros(evidence.num_heads, dtype=torch.float64)
            for start, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                entry_K = torch.arange(probs_BQsK.shape[3], device=probs_BQsK.device)
                query_s1 = torch.arange(start, start + probs_BQsK.shape[2], device=probs_BQsK.device)[:, None]
                held_sK = (entry_K < sinks) | (entry_K > query_s1 - recent)
                far_Qs = probs_BQsK[0].masked_fill(held_sK, 0.0).sum(-1)
                far_H += far_Qs.unflatten(0, (len(far_H), -1)).amax(1).sum(-1).double().cpu()
            rows.append(far_H / (len(ids) - first))
        shares.append(_stacked(rows, "KV heads"))
    if not shares:
        raise ValueError("heads are measured on documents, and there are none: pass at least one.")
    return torch.stack(shares).mean(0)


@torch.no_grad()
def measure_head_importance(
    model: Any, items: Iterable[tuple[Encoded, int]], *, chunk: int = 128
) -> Measured:
    """Importance of every query head, scaled so that the largest is 1.

    With the needle's places N and `a_j` the attention at step j (the query that should produce the j-th token
    of the right answer), the mean over items of
    `sum_j sum_{i in N and among the |N| largest of a_j} a_j[i] / |N|`.

    Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    arXiv 2410.19258; its HeadKV-R2.

    Args:
        items: with their needles as evidence, and the most tokens of an answer; every item counts the same.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        importances, one row for each layer that evicts, and the indices of these layers.

    Raises:
        ValueError: no items, one without a needle or answer, or layers with unlike query heads.
    """
    total: dict[int, Tensor] = {}
    count = 0
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
        for evidence in observe(model, ids):
            found_Q = torch.zeros(evidence.queries_BQSD.shape[1], dtype=torch.float64)
            for _, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                values_Qsn, places_Qsn = probs_BQsK[0].double().cpu().topk(len(needle), dim=-1)
                found_Q += (values_Qsn * torch.isin(places_Qsn, needle)).sum((-1, -2)) / len(needle)
            total[evidence.layer_idx] = total.get(evidence.layer_idx, torch.zeros(())) + found_Q
        count += 1
    if not count:
        raise ValueError("importance is measured on items with needles, and there are none: pass one.")
    mean_LQ = _stacked([*total.values()], "query heads") / count
    return mean_LQ / mean_LQ.amax().clamp_min(torch.finfo(torch.float64).tiny), [*total]


def class_weights(shares_LH: Float[Tensor, "L H"], threshold: float) -> Float64[Tensor, "L H"]:
    """1 for a retrieval head, 0 for a streaming head.

    A head is a retrieval head if its place among all heads in order of their shares, scaled to 0..1, is at or
    above the threshold: 0.5 makes it half of them (of an odd number, the larger half). Of equal shares the
    later head has the higher place.
    """
    order = shares_LH.flatten().argsort(stable=True).cpu()
    place = order.argsort().double() / max(1, shares_LH.numel() - 1)
    place = place if shares_LH.numel() > 1 else torch.ones_like(place)
    return (place >= threshold).double().view(shares_LH.shape)


def importance_weights(
    importance_LQ: Float64[Tensor, "L Q"], num_heads: int, beta: float
) -> Float64[Tensor, "L H"]:
    """HeadKV's part of each of N KV heads: `(beta - 1) * sum(s) + N * s_h`, with `s_h` the mean importance of
    the query heads of its group.

    In proportion to them, `1 / beta` of a budget goes by importance and the rest equally; beta is at least 1.
    HeadKV's released code caches each *query* head by itself; a KV head here gets the mean of what its query
    heads get there.
    """
    mean_LH = importance_LQ.unflatten(1, (num_heads, -1)).mean(-1)
    return (beta - 1) * mean_LH.sum() + mean_LH.numel() * mean_LH


def documents_of(given: argparse.Namespace, tokenizer: Any) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Documents for duoattention: pieces of a text, or those that the reference model's gates train on."""
    if given.text is not None:
        size = {"context_tokens": given.context_tokens, "behind": 0, "documents": given.documents}
        return [(piece, ()) for piece in cut(read_text(given.text, tokenizer), opening_of(tokenizer), **size)]
    seed = reference_seed(given.model)
    if seed is None:
        raise ValueError(f"model={given.model!r} comes with no documents: pass --text, a file in UTF-8.")
    from retain.reference.documents import Writer, distill_document

    writer = Writer("train", int(np.random.SeedSequence([STREAM, seed]).generate_state(1)[0]))
    made = [distill_document(writer, given.context_tokens) for _ in range(given.documents)]
    return [(document.context_ids, document.appendix_ids) for document in made]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description="Measure a number for each KV head of a model, by which a policy shares its budget."
    )
    made.add_argument("--policy", choices=tuple(OPTIONS), required=True, help="the preset that reads them")
    made.add_argument("--model", required=True, help="reference:0, or a hub id or folder")
    made.add_argument("--output", type=Path, required=True, help="the file, e.g. duoattention.json")
    made.add_argument("--context-tokens", type=int, default=1000, help="tokens of a context (default 1000)")
    made.add_argument("--documents", type=int, default=64, help="documents or items (default 64)")
    made.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    for policy, options in OPTIONS.items():
        group = made.add_argument_group(policy)
        for name, (kind, default, about) in options.items():
            shown = "" if default is None else f" (default {default})"
            group.add_argument(f"--{name}", type=kind, help=f"{about}{shown}")
    return made


def checked(given: argparse.Namespace) -> argparse.Namespace:
    """Options with their defaults; ValueError: one of the other policy, or one out of range."""
    (others,) = (options for policy, options in OPTIONS.items() if policy != given.policy)
    if strange := [f"--{name}" for name in others if getattr(given, name) is not None]:
        raise ValueError(f"{', '.join(strange)}: not read for --policy {given.policy}; leave it out.")
    for name, (_, default, _) in OPTIONS[given.policy].items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    if given.policy == DUO and not 0 <= given.threshold <= 1:
        raise ValueError(f"--threshold {given.threshold}: wanted a place among the heads, in 0..1.")
    if given.policy == HEADKV and given.beta < 1:
        raise ValueError(f"--beta {given.beta}: wanted a number of at least 1.")
    return given


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes, and shows what was measured."""
    given = checked(parser().parse_args(arguments))
    device = resolve_device(given.device)
    model, tokenizer = load(given.model)
    if tokenizer is None:
        raise ValueError(f"model={given.model!r} has no tokenizer, and documents are texts.")
    model = model.to(device).requires_grad_(False)
    if given.policy == DUO:
        found = tqdm(documents_of(given, tokenizer), unit="document")
        measured_LC = measure_far_attention(model, iter(found), sinks=given.sinks, recent=given.recent)
        layers = [spec.layer_idx for spec in describe(model)]
        weights_LH = class_weights(measured_LC, given.threshold)
        what = f"Attention beyond {given.sinks} first and {given.recent} last entries of each KV head"
        what += " (measured; DuoAttention optimises its gates instead)"
    else:
        reference = reference_seed(given.model) is not None
        task, seed = (REFERENCE_TASK, 0) if reference else (TASK, SEED)
        size = {"context_tokens": given.context_tokens, "items": given.documents}
        rows = tqdm(load_rows(task, tokenizer, seed=seed, **size), unit="item")
        items = ((encode(row, tokenizer, model), row.max_new_tokens) for row in rows)
        measured_LC, layers = measure_head_importance(model, items)
        weights_LH = importance_weights(measured_LC, describe(model)[0].num_kv_heads, given.beta)
        what = "Importance of each query head, the largest 1"
    given.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.output, format_weights(dict(zip(layers, weights_LH.tolist(), strict=True))))
    print(f"{what}, by layer:")
    for idx, row in zip(layers, measured_LC.tolist(), strict=True):
        print(f"  {idx:3}  " + "  ".join(f"{cell:.3f}" for cell in row))
    print(f"Weights: {given.output}\nPass allocation={{'weights': '{given.output}'}}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures a number for each KV head of a model, by which duoattention and headkv share a budget.

    python -m retain.eval.diagnose.head_weights --policy duoattention --model reference:0 --output duo.json
    python -m retain.eval.diagnose.head_weights --policy headkv --model reference:0 --output headkv.json

It writes JSON that `allocation.weights` names (`retain.head_weights`).

For `duoattention` it *measures attention*: a head is a retrieval head if much of its attention goes far back.
DuoAttention (arXiv 2410.10819) *optimises* a gate of each head, so that the model's output on synthetic
passkeys survives when gated heads stream; it needs gradients and a training run. A head that looks far back
without any effect on the output is a retrieval head here and none there. For `headkv` heads are measured on
items with needles (`retain.eval.diagnose.head_importance`).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.eval.diagnose import documents
from retain.eval.diagnose.head_importance import measure_head_importance
from retain.eval.tasks.suites import load_suite
from retain.head_weights import format_weights
from retain.hf.intercept.observe import observe
from retain.hf.model.decoder import describe
from retain.models.named import reference_seed
from retain.process.command import command
from retain.process.provenance import write_text
from retain.reference.documents import Document

SINKS, RECENT, THRESHOLD = 4, 32, 0.5
# HeadKV's default; its scripts try 1.005 to 10.
BETA = 1.5
# Options that are read for one policy alone.
ONLY = {"duoattention": ("jsonl", "sinks", "recent", "threshold"), "headkv": ("beta", "device")}
APPENDIX = "\n{question}\n{answer}"
Encode = Callable[[str, bool], list[int]]  # (text, with the tokenizer's own special tokens) -> ids


@torch.no_grad()
def measure_far_attention(
    model: Any, documents: Iterable[Document], *, sinks: int = SINKS, recent: int = RECENT, chunk: int = 128
) -> Float64[Tensor, "L H"]:
    """Share of each head's attention that a streaming head could not pay.

    `share[l, h] = mean_documents mean_j max_{q in group(h)} sum_{sinks <= i <= j - recent} a_qj[i]`, over the
    queries j of what comes after the context (question and answer); where nothing does, over those of the
    context that are further than `sinks + recent` from its beginning, for which a streaming head has lost
    something.

    Args:
        documents: contexts with what came after them; every document counts the same.
        sinks: first entries that a streaming head holds.
        recent: last entries that it holds, the query's own included; at least 1.
        chunk: queries at a time; changes memory, not the result.

    Returns:
        shares in [0, 1], one row for each layer that evicts.

    Raises:
        ValueError: if there are no documents, one is no longer than what a streaming head holds, or layers
            have unlike numbers of KV heads.
    """
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"a streaming head holds sinks >= 0 and recent >= 1 entries; got sinks={sinks}, recent={recent}."
        )
    shares: list[Tensor] = []
    for number, document in enumerate(documents):
        ids = [*document.context_ids, *document.appendix_ids]
        if len(ids) <= sinks + recent:
            raise ValueError(
                f"document {number} has {len(ids)} tokens, and a streaming head holds {sinks} + {recent} "
                "of them: nothing is far. Pass longer documents, or fewer sinks and recent entries."
            )
        first = len(document.context_ids) if document.appendix_ids else sinks + recent
        rows = []
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            far_H = torch.zeros(evidence.num_heads, dtype=torch.float64)
            for start, probs_BQsK in attention_chunks(evidence, chunk, first=first):
                entry_K = torch.arange(probs_BQsK.shape[3], device=probs_BQsK.device)
                own_s1 = torch.arange(start, start + probs_BQsK.shape[2], device=probs_BQsK.device)[:, None]
                held_sK = (entry_K < sinks) | (entry_K > own_s1 - recent)
                far_Qs = probs_BQsK[0].masked_fill(held_sK, 0.0).sum(-1)
                far_H += far_Qs.unflatten(0, (len(far_H), -1)).amax(1).sum(-1).double().cpu()
            rows.append(far_H / (len(ids) - first))
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"layers have {', '.join(str(len(row)) for row in rows)} KV heads, and heads are "
                "compared over layers of as many: state budgets another way than by weights of heads."
            )
        shares.append(torch.stack(rows))
    if not shares:
        raise ValueError("heads are measured on documents, and there are none: pass at least one.")
    return sum(shares[1:], shares[0]) / len(shares)


def class_weights(shares_LH: Float[Tensor, "L H"], threshold: float) -> Float64[Tensor, "L H"]:
    """1 for a retrieval head, 0 for a streaming head.

    A head is a retrieval head if its place among all heads in order of their shares, scaled to 0..1, is at or
    above the threshold: 0.5 makes it half of them (of an odd number, the larger half).

    Args:
        shares_LH: of `measure_far_attention`; of equal shares the later head has the higher place.
        threshold: in 0..1.
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

    In proportion to them, `1 / beta` of a budget goes by importance and the rest equally. HeadKV's released
    code caches each *query* head by itself; a KV head here gets the mean of what its query heads get there.

    Args:
        importance_LQ: of `measure_head_importance`.
        num_heads: KV heads of a layer.
        beta: at least 1.
    """
    own_LH = importance_LQ.unflatten(1, (num_heads, -1)).mean(-1)
    return (beta - 1) * own_LH.sum() + own_LH.numel() * own_LH


def write_weights(weights_LH: Float[Tensor, "L H"], layers: Sequence[int], path: str | Path) -> Path:
    """Writes the file that a policy reads.

    Args:
        layers: index in the model of each row's layer.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_weights(dict(zip(layers, weights_LH.tolist(), strict=True))))
    return path


def read_documents(path: str | Path, encode: Encode, context_tokens: int) -> Iterator[Document]:
    """Documents of a JSONL file: rows of `text`, or of `context`, `question` and `answer`; contexts are cut
    to `context_tokens`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no such row.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"documents file {str(path)!r} does not exist: pass --jsonl, one row a line.")
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}.") from None
            fields = row if isinstance(row, dict) else {}
            if isinstance(fields.get("text"), str):
                text, appendix = fields["text"], ""
            elif {"context", "question", "answer"} <= fields.keys():
                text, appendix = str(fields["context"]), APPENDIX.format(**fields)
            else:
                got = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{path}, line {number} holds {got}; wanted 'text', or 'context', 'question' and "
                    "'answer'."
                )
            context_ids = tuple(encode(text, True)[:context_tokens])
            yield Document(context_ids, tuple(encode(appendix, False)) if appendix else ())


def load(name: str, jsonl: str | None, count: int, context_tokens: int) -> tuple[Any, Iterable[Document]]:
    """A model, and at most `count` documents for it: of a JSONL file, or without one of the reference suite.

    Raises:
        ValueError: a hub model without documents, or a model that cannot be loaded.
        FileNotFoundError: no such file of documents.
    """
    seed = reference_seed(name)
    if seed is None and jsonl is None:
        raise ValueError(
            f"documents for {name!r} are read from a file: pass --jsonl, rows of 'text', or of 'context', "
            "'question' and 'answer'."
        )
    model, tokenizer = documents.load(name)
    if seed is not None and jsonl is None:
        return model, load_suite("reference").documents(seed, count, context_tokens)

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    return model, islice(read_documents(str(jsonl), encode, context_tokens), count)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes, and shows what was measured."""
    parser = argparse.ArgumentParser(
        description="Measure a number for each KV head of a model, by which a policy shares its budget."
    )
    parser.add_argument("--policy", choices=tuple(ONLY), required=True, help="the preset that reads them")
    parser.add_argument("--model", required=True, help="reference:0, or a hub id or folder")
    parser.add_argument("--output", required=True, help="the file, e.g. duoattention.json")
    parser.add_argument("--context-tokens", type=int, default=1000, help="tokens of a context")
    parser.add_argument("--documents", type=int, default=64, help="documents or items: how many at most")
    duo = parser.add_argument_group("duoattention")
    duo.add_argument("--jsonl", help="documents: rows of 'text', or of 'context', 'question', 'answer'")
    duo.add_argument("--sinks", type=int, help=f"first entries that a streaming head holds ({SINKS})")
    duo.add_argument("--recent", type=int, help=f"last entries that it holds ({RECENT})")
    duo.add_argument("--threshold", type=float, help=f"place from which on heads retrieve ({THRESHOLD})")
    headkv = parser.add_argument_group("headkv, which is measured on needles in prose")
    headkv.add_argument("--beta", type=float, help=f"1 / beta of the budget goes by importance ({BETA})")
    headkv.add_argument("--device", help="of a hub model, e.g. cuda:0 (default cpu)")
    given = parser.parse_args(arguments)
    (others,) = (only for policy, only in ONLY.items() if policy != given.policy)
    if strange := [f"--{name}" for name in others if getattr(given, name) is not None]:
        raise ValueError(f"{', '.join(strange)}: not read for --policy {given.policy}; leave it out.")
    threshold, beta = given.threshold, given.beta
    if not 0 <= (threshold := THRESHOLD if threshold is None else threshold) <= 1:
        raise ValueError(f"--threshold {threshold}: wanted a place among the heads, in 0..1.")
    if not (beta := BETA if beta is None else beta) >= 1:
        raise ValueError(f"--beta {beta}: wanted a number of at least 1.")
    if given.policy == "duoattention":
        measured_LC, layers, what = _far_attention(given)
        weights_LH = class_weights(measured_LC, threshold)
    else:
        measured_LC, layers, heads, what = _importance(given)
        weights_LH = importance_weights(measured_LC, heads, beta)
    path = write_weights(weights_LH, layers, given.output)
    print(f"{what}, by layer:")
    for idx, row in zip(layers, measured_LC.tolist(), strict=True):
        print(f"  {idx:3}  " + "  ".join(f"{cell:.3f}" for cell in row))
    print(f"Weights: {path}\nPass allocation={{'weights': '{path}'}}.")
    return 0


def _far_attention(given: argparse.Namespace) -> tuple[Tensor, list[int], str]:
    """Shares of attention that a streaming head could not pay, their layers, and what they are in words."""
    model, found = load(given.model, given.jsonl, given.documents, given.context_tokens)
    shown = iter(tqdm(found, total=given.documents, desc="documents", unit="document"))
    sinks = SINKS if given.sinks is None else given.sinks
    recent = RECENT if given.recent is None else given.recent
    shares_LH = measure_far_attention(model, shown, sinks=sinks, recent=recent)
    what = f"Attention beyond {sinks} first and {recent} last entries of each KV head"
    what += " (measured; DuoAttention optimises its gates instead)"
    return shares_LH, [spec.layer_idx for spec in describe(model)], what


def _importance(given: argparse.Namespace) -> tuple[Tensor, list[int], int, str]:
    """Importances of query heads, their layers, the KV heads of a layer, and what they are in words."""
    seed = reference_seed(given.model)
    if seed is not None and given.device is not None:
        raise ValueError(f"--device {given.device}: a reference model runs on the CPU; leave it out.")
    placed = {} if given.device is None else {"device": given.device}
    suite = load_suite("reference" if seed is not None else "text", model=given.model, **placed)
    model = suite.load_model(seed or 0)
    found = suite.probes(seed or 0, given.documents, given.context_tokens)
    shown = iter(tqdm(found, total=given.documents, desc="items", unit="item"))
    importance_LQ, layers = measure_head_importance(model, shown)
    heads = describe(model)[0].num_kv_heads
    return importance_LQ, layers, heads, "Importance of each query head, the largest 1"


if __name__ == "__main__":
    sys.exit(main())

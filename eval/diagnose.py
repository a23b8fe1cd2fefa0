"""Measures what an eviction costs, without scoring an answer: on any text, or on the rows of a task.

    retain diagnose --model smollm2-135m --text book.txt --policies snapkv merge --keep-ratio 0.1 0.2
    retain diagnose --model reference:0 --task reference/multikey --policies snapkv gate --gates FOLDER

A document is a context, a question behind it, and a continuation, which is read token by token ("steps"): of
a text the text itself, of a task's row the right answer. Each policy reads the context and evicts, at each
budget, and then reads the question and the continuation. At each step are measured:

    KL, top-1, perplexity   of the next token, against the model without any cache of this library
    coverage                share of the attention to the context that goes to kept entries
    oracle                  share of the kept entries that one which knows the future keeps too

Coverage is of the full cache's queries, so that errors of lower layers do not add up in it; they do in the
divergence. The full cache is measured through the same code: its row must read coverage 1, KL 0 and top-1 1,
or no other can be trusted.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from retain.attention.chunked import attention_chunks
from retain.attention.ranking import rank_entries
from retain.eval.record import text_table, write_record
from retain.eval.run.memory import positions_held
from retain.eval.run.plan import load_model
from retain.eval.run.scores import oracle
from retain.eval.tasks.encode import Encoded, encode, opening_ids
from retain.eval.tasks.sources import load_rows
from retain.evidence import Evidence
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.models.named_gates import load_gates
from retain.presets import Policy, load_policy
from retain.process.command import command

FULL = "full"
# Steps whose attention exists at once.
CHUNK = 8


def coverage(
    probs_BQST: Float[Tensor, "B Q S seen"], keep_BHT: Bool[Tensor, "B H T"]
) -> Float[Tensor, "B H S"]:
    """Share of the attention to context entries that goes to kept ones.

    `cov[h] = sum_{i in S, i < T} I_h[i] / sum_{i < T} I_h[i]`, `I_h[i] = max_{q in group(h)} a_q[i]`. A query
    that pays the context nothing is covered: 1.

    Taming the Fragility of KV Cache Eviction in LLM Inference (DefensiveKV), arXiv 2510.13334. The paper does
    not say whether recent tokens are in its denominator: here only the context's entries are.

    Args:
        probs_BQST: attention of S queries over all entries seen, the context's first.
        keep_BHT: of the context's entries, True where kept.

    Returns:
        coverage in [0, 1].
    """
    H, T = keep_BHT.shape[1:]
    paid_BHST = probs_BQST[..., :T].unflatten(1, (H, -1)).amax(2)
    total_BHS = paid_BHST.sum(-1)
    lost_BHS = paid_BHST.masked_fill(keep_BHT[:, :, None], 0.0).sum(-1)
    # By what is lost, so that keeping everything is 1 exactly.
    return 1.0 - torch.where(total_BHS > 0, lost_BHS / total_BHS, 0.0).clamp(0.0, 1.0)


def oracle_overlap(keep_BHT: Bool[Tensor, "B H T"], risk_BHT: Float[Tensor, "B H T"]) -> Float[Tensor, "B H"]:
    """Share of a kept set that the oracle would keep too, with as many entries in the same head.

    `|S and top_k(r)| / k`, `k = |S|`, `r` the true future risk (`retain.future`); of equal risks the later
    position first; 1 where nothing is kept. The risk is -inf where there is no entry.
    """
    count_BH = keep_BHT.sum(-1)
    shared_BH = (keep_BHT & (rank_entries(risk_BHT) < count_BH[..., None])).sum(-1)
    return torch.where(count_BH > 0, shared_BH.double() / count_BH.clamp_min(1), 1.0)


def divergence(logits_SV: Float[Tensor, "S V"], other_SV: Float[Tensor, "S V"]) -> Float[Tensor, " S"]:
    """`KL(p || p')` in nats and float64, never below 0; `p` is of the first logits, the full cache's."""
    pair = (Categorical(logits=logits.double()) for logits in (logits_SV, other_SV))
    return kl_divergence(*pair).clamp_min(0.0)


def policies_of(typed: Sequence[str], keep_ratios: Sequence[float]) -> dict[str, Policy]:
    """The policies that were typed, changes behind commas, as in `snapkv,protection.recent=8`. ValueError: a
    policy or a keep_ratio that cannot be."""
    if wrong := [ratio for ratio in keep_ratios if not 0 < ratio <= 1]:
        raise ValueError(f"keep_ratio is kept / seen, above 0 and at most 1, got {wrong}.")
    split = {one: one.split(",") for one in typed}
    return {one: load_policy(name, more) for one, (name, *more) in split.items()}


@torch.inference_mode()
def diagnose(
    model: Any,
    document: Encoded,
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    *,
    gates: Any = None,
) -> list[dict[str, Any]]:
    """Measures every policy at every budget on one document: a row each, of means over its steps and heads
    (`coverage_worst` is the least single number), the full cache's first.

    Memory: the evidence of the document (linear in its length), and attention of a few steps at a time.

    Args:
        model: an attached causal language model.
        document: context, question, and the continuation as the right answer.
        policies: `policies_of`.
        keep_ratios: kept / seen, in (0, 1].
        gates: for policies that take them: loaded gates, a folder, or a hub id; None: those that ship.

    Raises:
        ValueError: a policy cannot hold what it protects, or finds no gates.
    """
    context, target_S = document.context_ids, torch.tensor(document.answer_ids)
    tail, count = (*document.question_ids, *document.answer_ids[:-1]), len(target_S)
    context_1T, whole_1T = ids_on(model, context), ids_on(model, (*context, *tail))
    teacher = Cache(model, policy=None).prefill(whole_1T, evict=False, hold_evidence=True).evidence
    assert teacher is not None
    risks = oracle([teacher], len(context))
    full_SV = model(input_ids=whole_1T, use_cache=False, logits_to_keep=count).logits[0].float().cpu()
    made = []
    for name, ratio in ((FULL, 1.0), *((name, ratio) for name in policies for ratio in keep_ratios)):
        how: dict[str, Any] = {"policy": None}
        if name != FULL:
            how = {"policy": policies[name], "keep_ratio": ratio, "short": "raise"}
            how["gates"] = gates if policies[name].learned else None
        cache = Cache(model, **how).prefill(context_1T)
        heads = positions_held(cache)
        keep_NT = torch.zeros(len(heads), len(context), dtype=torch.bool)
        for keep_T, positions in zip(keep_NT, heads, strict=True):
            keep_T[positions.cpu()] = True
        keeps = [keep_HT[None] for keep_HT in keep_NT.split([layer.num_heads for layer in teacher])]
        held = cache.report().total.bytes_held / 2**20
        output = model(input_ids=ids_on(model, tail), use_cache=True, **{CACHE: cache})
        logits_SV, covered_NS = output.logits[0, -count:].float().cpu(), coverage_of(teacher, keeps, count)
        overlaps = [
            oracle_overlap(*pair) for pair in zip(keeps, (one.values_BHT.cpu() for one in risks), strict=True)
        ]
        made.append(
            {
                "policy": name,
                "keep_ratio": ratio,
                "coverage": float(covered_NS.double().mean()),
                "coverage_worst": float(covered_NS.min()),
                "oracle_overlap": float(torch.cat(overlaps, 1).mean()),
                "kl": float(divergence(full_SV, logits_SV).mean()),
                "agreement": float((logits_SV.argmax(-1) == full_SV.argmax(-1)).double().mean()),
                "loss": float(cross_entropy(logits_SV.double(), target_S)),
                "kept": float(keep_NT.double().mean()),
                "mib_held": held,
            }
        )
    return made


def coverage_of(
    teacher: Sequence[Evidence], keeps: Sequence[Bool[Tensor, "1 H T"]], steps: int
) -> Float[Tensor, "N S"]:
    """Coverage of a kept set (a mask a layer) by the queries of the last `steps` tokens that were read;
    `teacher` is every layer over all that was read, with nothing evicted."""
    layers = []
    for layer, keep_1HT in zip(teacher, keeps, strict=True):
        chunks = attention_chunks(layer, CHUNK, first=layer.num_seen - steps)
        layers.append(torch.cat([coverage(probs, keep_1HT.to(probs.device))[0] for _, probs in chunks], -1))
    return torch.cat(layers).cpu()


def ids_on(model: Any, tokens: Sequence[int]) -> Int[Tensor, "1 S"]:
    """Tokens as a batch of one, on the model's device."""
    return torch.tensor([list(tokens)], dtype=torch.int64, device=model.get_input_embeddings().weight.device)


def summarise(readings: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each policy and budget: means over documents, the least number of coverage, the standard
    error of KL (None: of one document), and the perplexity over that of the first row, the full cache's."""
    rows: list[dict[str, Any]] = []
    for same in zip(*readings, strict=True):
        (first, *_), numbers = same, [*same[0]][2:]
        row = {**first, **{name: fmean(one[name] for one in same) for name in numbers}}
        kl_D, row["perplexity"] = [one["kl"] for one in same], math.exp(row.pop("loss"))
        row["coverage_worst"] = min(one["coverage_worst"] for one in same)
        row["kl_se"] = stdev(kl_D) / len(same) ** 0.5 if len(same) > 1 else None
        row["perplexity_ratio"] = row["perplexity"] / (rows[0] if rows else row)["perplexity"]
        rows.append(row)
    return rows


def documents_of(given: argparse.Namespace, model: Any, tokenizer: Any) -> list[Encoded]:
    """The documents that the command line asks for: rows of a task, or pieces spread over all of a text, none
    overlapping, each with the tokens that open a text.

    The first token behind a piece's context is read and not measured: it is predicted before the eviction,
    and would count as unharmed. ValueError: an unknown task, or a text that cannot be read or is too short.
    """
    at, steps, count = given.context_tokens, given.steps, given.documents
    if steps < 1:
        raise ValueError(f"steps is at least 1, got {steps}.")
    if given.task is not None:
        rows = load_rows(given.task, tokenizer, context_tokens=at, items=count)
        encoded = (encode(row, tokenizer, model) for row in rows)
        return [replace(one, answer_ids=one.answer_ids[:steps]) for one in encoded]
    try:
        text = Path(given.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {given.text} cannot be read: {error}. Pass a file in UTF-8.") from error
    ids, opening = tokenizer(text, add_special_tokens=False)["input_ids"], opening_ids(tokenizer)
    size = at - len(opening) + 1 + steps
    if count < 1 or at <= len(opening) or len(ids) < count * size:
        raise ValueError(
            f"{len(ids)} tokens cannot be cut into {count} documents of {at} tokens ({len(opening)} "
            f"of them special) and {1 + steps} behind: pass a longer text, or ask for fewer or shorter ones."
        )
    starts = [number * (len(ids) // count) for number in range(count)]
    pieces = [(*opening, *ids[start : start + size]) for start in starts]
    return [Encoded(piece[:at], piece[at : at + 1], piece[at + 1 :], ()) for piece in pieces]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("retain diagnose", description="Measure what an eviction costs.")
    made.add_argument("--model", required=True, help="a name, a local folder, or a hub id")
    made.add_argument("--policies", nargs="+", required=True, metavar="NAME[,key=value]")
    made.add_argument("--keep-ratio", nargs="+", type=float, default=[0.2], help="kept / seen (default 0.2)")
    made.add_argument(
        "--gates", help="folder or hub id, of policies that take them; default: those that ship"
    )
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="UTF-8 file to cut documents from")
    source.add_argument("--task", help="task whose rows are the documents, such as niah/grid")
    made.add_argument("--documents", type=int, default=8, help="how many (default 8)")
    made.add_argument("--context-tokens", type=int, default=1000, help="length of a context (default 1000)")
    made.add_argument("--steps", type=int, default=32, help="steps a document, at most (default 32)")
    made.add_argument("--dtype", default="auto", help="of the weights, as torch calls it (default auto)")
    made.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    made.add_argument("--output", type=Path, help="JSON file for the rows and how they were made")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, shows the table, and writes it if a file was named."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(typed)
    policies = policies_of(given.policies, given.keep_ratio)
    model, tokenizer = load_model(given.model, given.device, dtype=given.dtype)
    gates = None if given.gates is None else load_gates(given.gates, model)
    documents = tqdm(documents_of(given, model, tokenizer), unit="document")
    rows = summarise([diagnose(model, one, policies, given.keep_ratio, gates=gates) for one in documents])
    print(text_table(rows))
    if given.output is not None:
        write_record(given.output, rows, ["retain", "diagnose", *typed], str(model.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())

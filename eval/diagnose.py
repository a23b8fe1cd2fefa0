"""Measures what an eviction costs, without scoring an answer: on any text, or on the rows of a task.

    retain diagnose --model reference:0 --policies snapkv merge oracle --keep-ratio 0.1 0.2 --gates FOLDER
    retain diagnose --model FOLDER --text book.txt --policies snapkv --keep-ratio 0.2 --continuation given
    retain diagnose --model FOLDER --task niah/grid --policies snapkv --keep-ratio 0.2 --out results/diagnosed

A document is a context, a question behind it, and a continuation, which is read token by token ("steps"):

    generated   the full cache's greedy answer
    given       the right answer of a row; of a text, the text itself

The context is read once. Each policy evicts from a copy of that cache, at each budget, and then reads the
question and the *same* continuation, without evicting again. At each step are measured:

    KL, top-1, perplexity   of the next token, against the model without any cache of this library
    coverage                share of the attention to the context that goes to kept entries
    oracle                  share of the kept entries that the oracle keeps too (`oracle_overlap`)

Coverage is of one layer whose queries are the full cache's, so that errors of lower layers do not add up in
it; they do in the divergence. The policy `oracle` ranks entries by the attention that they are really paid.

The full cache is measured like a policy, through the same code. Its row must read coverage 1, KL 0 and top-1
1. If it does not, no other row can be trusted.
"""

import argparse
import inspect
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from retain.attention.chunked import attention_chunks, truncate
from retain.budget.ranking import rank_entries
from retain.budget.statement import Budget
from retain.eval.config import resolve_device
from retain.eval.run.scores import first_entries, gate_scores
from retain.eval.text_pieces import cut, opening_of, read_text
from retain.eval.text_table import Column, text_table
from retain.evidence import Evidence
from retain.future import future_risk
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.gates import load_gates
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from retain.models.named import load, reference_seed
from retain.policy import Policy, decide_layers, score_entries
from retain.presets import load_policy
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import code_state, environment, now, write_json
from retain.process.registry import lookup
from retain.scores import Score

FILE, SCHEMA = "diagnostics.json", 2
FULL, ORACLE = "full", "oracle"
QUESTIONS, CONTINUATIONS = ("unknown", "known"), ("generated", "given")
# A query with less coverage than this is an outlier (DefensiveKV).
OUTLIER = 0.5
# Floats of attention that exist at once.
FLOATS_AT_ONCE = 2**24
COLUMNS = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", "g"), Column("coverage", "coverage_mean")),
    *(Column("worst step", "coverage_worst_step"), Column("worst", "coverage_worst")),
    *(Column("outliers", "coverage_outliers"), Column("oracle", "oracle_overlap")),
    *(Column("KL (nats)", "kl", ".4f"), Column("top-1", "agreement"), Column("ppl", "perplexity")),
    *(Column("ppl ratio", "perplexity_ratio"), Column("kept", "kept_share")),
)


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

    Examples:
        >>> probs = torch.tensor([[[[0.6, 0.3, 0.1]]]])
        >>> coverage(probs, torch.tensor([[[True, False]]])).item()  # the third entry came after the context
        0.6666666865348816
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
    """`KL(p || p') = sum_v p[v] (log p[v] - log p'[v])` in nats and float64, never below 0; `p` is of the
    first logits, which are those of the full cache for KL(full || evicted)."""
    log_p, log_other = (x.double().log_softmax(-1) for x in (logits_SV, other_SV))
    # A token of probability 0 (a logit of -inf) adds nothing.
    terms = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_other), 0.0)
    return terms.sum(-1).clamp_min(0.0)


def token_loss(logits_SV: Float[Tensor, "S V"], tokens_S: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Negative log-probability of each token, in nats and float64."""
    return cross_entropy(logits_SV.double(), tokens_S, reduction="none")


@dataclass(frozen=True)
class Document:
    """A context and what is read behind it.

    Args:
        name: in the record.
        context_ids: what is evicted from.
        question_ids: what is read next; at least one token. Logits before its end are not measured.
        continuation_ids: what is read then; None: what the full cache generates.
    """

    name: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reading:
    """Measures of a policy at one budget on one document: `N` (layer, KV head) pairs, `S` steps, `T` entries.

    Args:
        policy: as asked for, or `full`.
        keep_ratio: kept / seen as asked for; 1 for the full cache.
        coverage_NS, overlap_N, keep_NT: coverage, overlap with the oracle, and what is kept.
        kl_S, agree_S: KL(full || evicted) in nats, and whether both have the same most likely token.
        loss_S, loss_full_S: negative log-probability of the continuation's token, with this cache and by the
            model without a cache of this library.
    """

    policy: str
    keep_ratio: float
    coverage_NS: Float[Tensor, "N S"]
    overlap_N: Float[Tensor, " N"]
    keep_NT: Bool[Tensor, "N T"]
    kl_S: Float[Tensor, " S"]
    agree_S: Bool[Tensor, " S"]
    loss_S: Float[Tensor, " S"]
    loss_full_S: Float[Tensor, " S"]


def policy_of(typed: str) -> Policy:
    """The policy of that name, changes behind commas, as in `snapkv,protection.recent=8`; the oracle is the
    preset `gate` with another score. ValueError: an unknown policy or setting, one that keeps everything, or
    one that holds entries in fewer bits."""
    name, *changes = typed.split(",")
    if name == ORACLE:
        return replace(load_policy("gate", changes), name=ORACLE, variants={})
    policy = replace(load_policy(name, changes), variants={})
    if policy.precision is not None:
        raise ValueError(
            f"policy {typed!r} has a precision, and policies are compared here at equal numbers of entries: "
            "take eval/compare.py, which compares at equal bytes."
        )
    if policy.keeps_all:
        raise ValueError(
            f"policy {typed!r} keeps everything, and the full cache is always measured: leave it out."
        )
    return policy


def policies_of(typed: Sequence[str], keep_ratios: Sequence[float], gates: Any) -> dict[str, Policy]:
    """The policies that were typed; ValueError: one or a keep_ratio that cannot be, or gates are missing."""
    if FULL in typed or len({*typed}) < len(typed) or not typed:
        raise ValueError(f"policies: pass at least one, each once, and not {FULL!r}; got {' '.join(typed)}.")
    if (wrong := [ratio for ratio in keep_ratios if not 0 < ratio <= 1]) or not keep_ratios:
        raise ValueError(f"keep_ratio is kept / seen, above 0 and at most 1, got {wrong or 'none'}.")
    policies = {name: policy_of(name) for name in typed}
    needy = [name for name, policy in policies.items() if policy.learned and policy.name != ORACLE]
    if needy and gates is None:
        raise ValueError(f"{', '.join(needy)} takes a gate's score and there is none: pass gates (--gates).")
    return policies


@torch.inference_mode()
def diagnose(
    model: Any,
    documents: Sequence[Document],
    policies: Sequence[str],
    keep_ratios: Sequence[float],
    *,
    question: str = "unknown",
    steps: int = 32,
    seed: int = 0,
    gates: Any = None,
) -> Iterator[list[Reading]]:
    """Measures every policy at every budget, document by document; the full cache first.

    Memory: the evidence of one document (linear in its length), and attention of a few steps at a time.

    Args:
        model: a causal language model; it stays attached.
        policies: presets, with changes behind commas (`snapkv,protection.recent=8`), or `oracle`.
        keep_ratios: kept / seen, in (0, 1].
        question: `unknown` (arrives after the eviction) or `known` (scores have observed it; its last token
            is read again, so that the first token of the continuation comes from kept entries too).
        steps: tokens of a continuation that are measured, at most.
        seed: of scores that draw.
        gates: loaded gates, if a policy takes them.

    Raises:
        ValueError: bad settings, or a policy that cannot hold what it protects.
    """
    lookup(question, dict.fromkeys(QUESTIONS), what="question")
    if steps < 1:
        raise ValueError(f"steps is at least 1, got {steps}.")
    chosen = policies_of(policies, keep_ratios, gates)
    attach(model)
    for number, document in enumerate(documents):
        if not document.context_ids or not document.question_ids:
            raise ValueError(f"document {document.name!r} needs a context and a question.")
        yield _read(model, document, (seed, number), chosen, keep_ratios, question == "known", steps, gates)


def _read(
    model: Any,
    document: Document,
    seed: Sequence[int],
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    known: bool,
    steps: int,
    gates: Any,
) -> list[Reading]:
    """All readings of one document."""
    asked = document.question_ids
    seen = (*document.context_ids, *(asked[:-1] if known else ()))
    behind = asked[-1:] if known else asked
    base = read_context(model, seen)
    continuation = document.continuation_ids
    if continuation is None:
        continuation = generate(model, base.fork(), behind, steps)
    target_S = torch.tensor(continuation[:steps])
    tail, count = (*behind, *continuation[: len(target_S) - 1]), len(target_S)
    whole = (*seen, *tail)
    teacher = read_context(model, whole, evidence=True, gates=gates).evidence
    assert teacher is not None
    observed = [truncate(layer, len(seen) + known) for layer in teacher]
    risks = [future_risk(one, document_tokens=len(seen), sources=("appendix",))[0] for one in teacher]
    by_gates = None
    if any(one.learned and one.name != ORACLE for one in policies.values()):
        prompt = whole[: len(seen) + known]
        by_gates = gate_scores(model, gates, observed, lambda: read_context(model, prompt))
    keeps = keep_sets(policies, keep_ratios, len(seen), observed, risks, by_gates, seed)
    coverages = coverage_of(teacher, [*keeps.values()], count)
    del teacher, observed
    full_SV = read_plainly(model, whole, count)
    made = []
    for (name, ratio), coverage_NS in zip(keeps, coverages, strict=True):
        layers = keeps[name, ratio]
        correction = None if name == FULL else policies[name].correction
        cache = base.fork().evict_with(layers, correction=correction)
        logits_SV = read_on(model, cache, tail)[-count:]
        overlap = [oracle_overlap(keep, risk)[0] for keep, risk in zip(layers, risks, strict=True)]
        made.append(
            Reading(
                policy=name,
                keep_ratio=ratio,
                coverage_NS=coverage_NS,
                overlap_N=torch.cat(overlap).cpu(),
                keep_NT=torch.cat([keep[0] for keep in layers]).cpu(),
                kl_S=divergence(full_SV, logits_SV),
                agree_S=logits_SV.argmax(-1) == full_SV.argmax(-1),
                loss_S=token_loss(logits_SV, target_S),
                loss_full_S=token_loss(full_SV, target_S),
            )
        )
    return made


def keep_sets(
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    num_seen: int,
    observed: Sequence[Evidence],
    risks: Sequence[Tensor],
    by_gates: Sequence[Score] | None,
    seed: Sequence[int],
) -> dict[tuple[str, float], list[Bool[Tensor, "B H T"]]]:
    """Entries that each policy keeps of each layer's first `num_seen`, the full cache first. Scores look at
    `observed`, which may be longer; `risks` and `by_gates` are the oracle's scores and the gates'."""
    evidence = [truncate(layer, num_seen) for layer in observed]
    seeds = [int(np.random.SeedSequence([*seed]).generate_state(1)[0])]
    made = {(FULL, 1.0): [layer.exists_BHT for layer in evidence]}
    for name, policy in policies.items():
        learned: Sequence[Score | None] = by_gates or [None] * len(observed)
        if policy.name == ORACLE:
            learned = [Score(risk_BHT, "risk") for risk_BHT in risks]
        pairs = zip(observed, learned, strict=True)
        scored = [score_entries(policy, layer, learned=one, seeds_B=seeds) for layer, one in pairs]
        scores = [first_entries(score, num_seen) for score in scored]
        for ratio in keep_ratios:
            decided = decide_layers(policy, evidence, Budget(keep_ratio=ratio), scores=scores)
            made[name, float(ratio)] = [layer.keep_BHT for layer in decided]
    for ratio in keep_ratios:
        held = {
            (policy.metadata_bytes, sum(int(keep.sum()) for keep in made[name, float(ratio)]))
            for name, policy in policies.items()
        }
        assert len(held) == len(dict(held)), f"policies hold unlike numbers of entries at {ratio}: {held}"
    return made


def coverage_of(
    teacher: Sequence[Evidence], keeps: Sequence[Sequence[Tensor]], steps: int
) -> list[Float[Tensor, "N S"]]:
    """Coverage of several kept sets (per layer a mask of the context's entries) by the queries of the last
    `steps` tokens that were read; `teacher` is every layer over all that was read, with nothing evicted."""
    layers: list[list[Tensor]] = [[] for _ in keeps]
    for place, layer in enumerate(teacher):
        chunk = max(1, FLOATS_AT_ONCE // (layer.queries_BQSD.shape[1] * layer.num_seen))
        parts: list[list[Tensor]] = [[] for _ in keeps]
        for _, probs_BQsT in attention_chunks(layer, chunk, first=layer.num_seen - steps):
            for masks, found in zip(keeps, parts, strict=True):
                found.append(coverage(probs_BQsT, masks[place])[0].cpu())
        for covered, found in zip(layers, parts, strict=True):
            covered.append(torch.cat(found, -1))
    return [torch.cat(covered) for covered in layers]


def read_context(model: Any, tokens: Sequence[int], *, evidence: bool = False, gates: Any = None) -> Cache:
    """A cache that has read tokens and evicted nothing, with what gates look at as evidence if asked for."""
    wanted = () if gates is None else gates.inputs
    cache = Cache(model, policy=None, slack=0)
    return cache.prefill(ids_on(model, tokens), evict=False, hold_evidence=evidence, wanted=wanted)


def generate(model: Any, cache: Cache, tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """The likeliest tokens behind `tokens`, up to an end token, which is the last of them."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = model.config.get_text_config().eos_token_id if found is None else found
    ends = {found} if found is None or isinstance(found, int) else {*found}
    made: list[int] = []
    while len(made) < most and not (made and made[-1] in ends):
        logits_SV = read_on(model, cache, made[-1:] or tokens)
        made.append(int(logits_SV[-1].argmax()))
    return tuple(made)


def read_on(model: Any, cache: Cache, tokens: Sequence[int]) -> Float[Tensor, "S V"]:
    """Reads tokens behind what a cache has seen; their logits, float32 on the CPU."""
    output = model(input_ids=ids_on(model, tokens), use_cache=True, **{CACHE: cache})
    return output.logits[0].float().cpu()


def read_plainly(model: Any, tokens: Sequence[int], last: int) -> Float[Tensor, "S V"]:
    """Logits of the last tokens of a text, with no cache at all, float32 on the CPU."""
    keep = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_on(model, tokens), use_cache=False, **keep).logits[0, -last:].float().cpu()


def ids_on(model: Any, tokens: Sequence[int]) -> Int[Tensor, "1 S"]:
    """Tokens as a batch of one, on the model's device."""
    return torch.tensor([list(tokens)], dtype=torch.int64, device=model.get_input_embeddings().weight.device)


def summarise(readings: Sequence[Sequence[Reading]]) -> list[dict[str, Any]]:
    """A row for each policy and budget, in the order of the first document.

    Means are over the steps of all documents together; overlap and entries, which have no steps, are means
    over documents. `coverage_worst_step` is the least mean over all pairs at a step, `coverage_worst` the
    least single number, `coverage_outliers` the share of single numbers below 0.5: DefensiveKV prints a mean,
    a worst case and a count of outliers, and does not say which worst case it means.

    Intervals (95 %, a document is a cluster) are given for two documents or more, of equally many steps; each
    document is compared with itself in the full cache, and the interval of the perplexity ratio is the
    exponential of that of the mean difference of losses.
    """
    rows = []
    for same in zip(*readings, strict=True):
        cells = torch.cat([one.coverage_NS.double().flatten() for one in same])
        loss = torch.cat([one.loss_S for one in same]).mean()
        loss_full = torch.cat([one.loss_full_S for one in same]).mean()
        kept = sum(int(one.keep_NT.sum()) for one in same)
        rows.append(
            {
                "policy": same[0].policy,
                "keep_ratio": same[0].keep_ratio,
                "documents": len(same),
                "steps": sum(len(one.kl_S) for one in same),
                "coverage_mean": float(cells.mean()),
                "coverage_worst_step": min(float(one.coverage_NS.double().mean(0).min()) for one in same),
                "coverage_worst": float(cells.min()),
                "coverage_outliers": float((cells < OUTLIER).double().mean()),
                "oracle_overlap": float(torch.cat([one.overlap_N for one in same]).double().mean()),
                "kl": float(torch.cat([one.kl_S for one in same]).mean()),
                "agreement": float(torch.cat([one.agree_S for one in same]).double().mean()),
                "perplexity": math.exp(float(loss)),
                "perplexity_ratio": math.exp(float(loss - loss_full)),
                "kept_entries": kept / len(same),
                "kept_share": kept / sum(one.keep_NT.numel() for one in same),
                "intervals": _intervals(same),
            }
        )
    return rows


def _intervals(same: Sequence[Reading]) -> dict[str, list[float] | None]:
    """Intervals of a row over documents."""
    from retain.eval.stats.interval import paired_interval

    values = {
        "kl": [float(one.kl_S.mean()) for one in same],
        "agreement": [float(one.agree_S.double().mean()) for one in same],
        "perplexity_ratio": [float((one.loss_S - one.loss_full_S).mean()) for one in same],
    }
    made: dict[str, list[float] | None] = dict.fromkeys(values)
    if len(same) > 1 and len({len(one.kl_S) for one in same}) == 1:
        for name, means in values.items():
            found = paired_interval([np.array(means)])
            how = math.exp if name == "perplexity_ratio" else float
            made[name] = None if found.undefined else [how(found.low), how(found.high)]
    return made


def documents_of(given: argparse.Namespace, model: Any, tokenizer: Any) -> list[Document]:
    """The documents that the command line asks for. ValueError: an unknown task, or a text that cannot be
    read or is too short."""
    answered = given.continuation == "given"
    if given.task is not None:
        from retain.eval.tasks.encode import encode
        from retain.eval.tasks.sources import load_rows

        how = {"context_tokens": given.context_tokens, "seed": given.seed, "first_item": 0}
        made = []
        for row in load_rows(given.task, tokenizer, **how, items=given.documents):
            one = encode(row, tokenizer, model)
            name, right = f"{row.task}, item {row.item}", one.answer_ids if answered else None
            made.append(Document(name, one.context_ids, one.question_ids, right))
        return made
    if given.text is None:
        from retain.reference.corpus import stream

        name, ids = "the reference corpus", stream("eval").tolist()
    else:
        name, ids = Path(given.text).name, read_text(given.text, tokenizer)
    # The first token behind the context is read and not measured: what predicts it is computed before the
    # eviction, and would count as unharmed whatever was evicted.
    behind = 1 + given.steps if answered else 1
    size = {"context_tokens": given.context_tokens, "behind": behind, "documents": given.documents}
    made = []
    for number, piece in enumerate(cut(ids, opening_of(tokenizer), **size)):
        context, rest = piece[: given.context_tokens], piece[given.context_tokens :]
        made.append(Document(f"{name}, piece {number}", context, rest[:1], rest[1:] if answered else None))
    return made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="retain diagnose",
        description="Measure what an eviction costs without scoring an answer: divergence from the full "
        "cache, perplexity, coverage of the attention, likeness to the oracle.",
    )
    made.add_argument("--model", required=True, help="reference:0, a local folder, or a hub id")
    made.add_argument("--policies", nargs="+", required=True, metavar="NAME[,key=value]", help="and oracle")
    made.add_argument("--keep-ratio", nargs="+", type=float, default=[0.2], help="kept / seen (default 0.2)")
    made.add_argument("--gates", help="folder or hub id of trained gates, for policies that take them")
    source = made.add_mutually_exclusive_group()
    source.add_argument(
        "--text", help="UTF-8 file to cut documents from (default for reference:0: its corpus)"
    )
    source.add_argument("--task", help="task whose rows are the documents, such as niah/grid")
    made.add_argument("--documents", type=int, default=8, help="how many (default 8)")
    made.add_argument("--context-tokens", type=int, default=1000, help="length of a context (default 1000)")
    made.add_argument("--steps", type=int, default=32, help="steps a document, at most (default 32)")
    made.add_argument("--question", default=QUESTIONS[0], choices=QUESTIONS, help="when scores observe")
    made.add_argument("--continuation", default=CONTINUATIONS[0], choices=CONTINUATIONS, help="what is read")
    made.add_argument("--seed", type=int, default=0, help="of rows, and of scores that draw (default 0)")
    made.add_argument("--dtype", default="auto", help="of the weights, as torch calls it (default auto)")
    made.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    made.add_argument("--out", help=f"folder for {FILE}; an older one is not overwritten")
    return made


def run(given: argparse.Namespace, typed: str) -> dict[str, Any]:
    """Loads, measures, and writes the record if a folder was named; ValueError: nothing was written."""
    path = None if given.out is None else Path(given.out) / FILE
    if path is not None and path.exists():
        raise ValueError(f"{path} exists and is not overwritten: pass another --out, or remove it.")
    policies_of(given.policies, given.keep_ratio, given.gates)
    if given.text is None and given.task is None and reference_seed(given.model) is None:
        raise ValueError(f"model={given.model!r} comes with no text: pass --text FILE or --task NAME.")
    require("eval", "scipy", what="a diagnosis with its intervals")
    started = now()
    device = resolve_device(given.device)
    model, tokenizer = load(given.model, dtype=given.dtype)
    if tokenizer is None:
        raise ValueError(f"model={given.model!r} has no tokenizer, and documents are texts.")
    model = model.to(device).requires_grad_(False)
    gates = None if given.gates is None else load_gates(given.gates, model)
    documents = documents_of(given, model, tokenizer)
    how = {"question": given.question, "steps": given.steps, "seed": given.seed, "gates": gates}
    reads = diagnose(model, documents, given.policies, given.keep_ratio, **how)
    readings = list(tqdm(reads, total=len(documents), unit="document"))
    record = {
        "schema": SCHEMA,
        "command": typed,
        "made": {
            **vars(given),
            "text": None if given.text is None else Path(given.text).name,
            "model_sha": fingerprint(model)["sha256"],
            "code": code_state(Path(__file__).parent),
            "environment": environment(str(device), torch.get_num_threads()),
            "started": started,
            "finished": now(),
        },
        "documents": [
            {"name": document.name, "entries": read[0].keep_NT.shape[1], "steps": len(read[0].kl_S)}
            for document, read in zip(documents, readings, strict=True)
        ],
        "rows": summarise(readings),
    }
    # JSON has no infinity and no NaN: null.
    record = json.loads(json.dumps(record), parse_constant=lambda _: None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    return record


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, and shows the table."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(typed)
    record = run(given, shlex.join(["retain", "diagnose", *typed]))
    print("\n".join(text_table(COLUMNS, record["rows"])))
    steps = sum(one["steps"] for one in record["documents"])
    print(f"\n{len(record['documents'])} documents, {steps} steps.")
    if given.out is not None:
        print(f"Record: {Path(given.out) / FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command: what policies do to one model on some documents, without a benchmark.

    python -m retain.eval.diagnose --model reference:0 --policies snapkv fused random --keep-ratio 0.2
        --gates runs/gates-seed0 --documents 8 --steps 32 --out results/diagnostics

It takes a model (`reference:SEED`, a folder or a hub id), policies, one budget and documents (of the
reference generator, or pieces of a text file), writes `diagnostics.json` (`retain.eval.diagnose.record`) and
prints a table. The definitions are `retain.eval.diagnose.measures`.

A document is a context and the turns that are asked of it. The full cache answers each turn greedily; every
policy evicts from the same context (one eviction, after the prompt: nothing goes while an answer is written)
and is then shown the same turns and the *full cache's* answers, so that all see the same queries. A step is
one token of those answers, and its query the one that it is predicted at. Besides, every policy answers the
turns by itself, which shows loops and answers without end.

The full cache is one of the policies, through the same store and code, and what is compared with is the model
without any cache of ours. Its row must read coverage 1, losses 0, divergence 0, agreement 1; where it does
not, no other row is to be believed.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks, truncate
from retain.budget.largest_remainder import exact
from retain.eval.config import FULL, labelled_policy
from retain.eval.diagnose import measures, teacher_forced
from retain.eval.diagnose.documents import Asked, load, reference_asked, text_asked
from retain.eval.diagnose.measures import AGGREGATES, TIGHT
from retain.eval.diagnose.record import (
    FILE,
    BoundaryRead,
    DocumentRead,
    LayerRead,
    PolicyRead,
    boundary_table,
    record_of,
    table,
)
from retain.eval.diagnose.teacher_forced import (
    compare_logits,
    correction_of,
    keep_sets,
    made_by,
    read_context,
    read_on,
    read_plainly,
    refuse_without_gates,
    respond,
    split,
    transcript,
)
from retain.eval.run.baselines import oracle
from retain.eval.run.scoring import gate_scores
from retain.evidence import Evidence
from retain.future import future_risk
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import describe
from retain.hf.model.gates import load_gates
from retain.hf.model.named import reference_seed
from retain.policy import Policy
from retain.process.command import command
from retain.process.provenance import now, write_json
from retain.protection import Protection, protected_mask
from retain.registry import lookup
from retain.scores.value_norm import value_norms

REGIMES = ("context_only", "query_aware")
ORACLE = "oracle"
# Ends of a prompt, by what protects them: the first four entries (attention sinks), the default prefix and
# suffix. A policy's own protection may differ.
BOUNDARIES = {
    "sinks": Protection(prefix_fraction=0.0, suffix_fraction=0.0),
    "prefix": Protection(suffix_fraction=0.0),
    "suffix": Protection(sinks=0, prefix_fraction=0.0),
}
# Floats of attention that exist at once.
FLOATS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Setting:
    """Settings of a diagnosis.

    Args:
        policies: presets (`snapkv`, `snapkv:paper`), with changes (`snapkv,protection.recent=8`), or
            `oracle`, which knows the queries that will come.
        keep_ratio: kept / seen, in (0, 1].
        regime: `context_only` (no turn was seen before the eviction) or `query_aware` (scores have observed
            the first one; what is evicted from is all but its last token).
        steps: tokens of the full cache's answers that are measured, at most, a document; and the longest that
            a single answer may be.
        aggregate: of `retain.eval.diagnose.measures.AGGREGATES`, for coverage.
        seed: of scores that draw.
        tight: a bound of the perturbation is tight in a head that loses at least this part of it, in (0, 1].
    """

    policies: Sequence[str]
    keep_ratio: float
    regime: str = "context_only"
    steps: int = 32
    aggregate: str = "max"
    seed: int = 0
    tight: float = TIGHT

    def __post_init__(self) -> None:
        lookup(self.regime, dict.fromkeys(REGIMES), what="regime")
        lookup(self.aggregate, AGGREGATES, what="aggregate over query heads")
        ratio = self.keep_ratio
        wrong = {
            "no policy is named: name at least one": not self.policies,
            "'full' is always measured: leave it out": FULL in self.policies,
            f"policies repeat: {' '.join(self.policies)}": len({*self.policies}) < len(self.policies),
            f"keep_ratio is kept / seen, above 0 and at most 1, got {ratio}": not 0 < ratio <= 1,
            f"steps is 1 or more, got {self.steps}": self.steps < 1,
            f"tight is above 0 and at most 1, got {self.tight}": not 0 < self.tight <= 1,
        }
        if problems := [said for said, found in wrong.items() if found]:
            raise ValueError(f"diagnostics: {'; '.join(problems)}.")


def policy_of(typed: str) -> Policy:
    """The policy of that name, changes behind commas; the oracle is the gate's pipeline with its own score.

    Raises:
        ValueError: an unknown policy or setting, or a policy that keeps everything.
    """
    name, *changes = typed.split(",")
    if name == ORACLE:
        return labelled_policy(ORACLE, ("gate", *changes))
    return teacher_forced.policy_of(typed)


@torch.inference_mode()
def diagnose(
    model: Any, documents: Sequence[Asked], setting: Setting, *, gates: Any = None, texts_of: Any = None
) -> Iterator[DocumentRead]:
    """Measures every policy, document by document.

    Memory: the evidence of one document (linear in its length), and attention of a few steps at a time.

    Args:
        model: a causal language model; it stays attached.
        gates: loaded gates, if a policy takes them.
        texts_of: ids -> their texts, for the view of the first document; None: their numbers.

    Raises:
        ValueError: a policy cannot be meant, takes gates that are not there, or cannot hold what it protects.
    """
    policies = {typed: policy_of(typed) for typed in setting.policies}
    refuse_without_gates(_by_gates(policies), gates)
    attach(model)
    for number, document in enumerate(documents):
        read = _measure(model, document, number, setting, policies, gates)
        if number == 0:
            ids = read.seen_ids
            read = replace(read, texts=tuple(map(str, ids) if texts_of is None else texts_of(ids)))
        yield read


def _by_gates(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policies that take a gate's score."""
    return {name: own for name, own in policies.items() if own.learned and own.name != ORACLE}


def _measure(
    model: Any, document: Asked, number: int, setting: Setting, policies: Mapping[str, Policy], gates: Any
) -> DocumentRead:
    seen, turns = split(document, setting.regime)
    base = read_context(model, seen)
    answers = respond(model, _kept_whole(base), seen, turns, setting.steps, total=setting.steps)
    tail, asks, targets = transcript(turns, answers, setting.steps)
    whole = (*seen, *tail)
    teacher = read_context(model, whole, evidence=True, gates=gates).evidence
    assert teacher is not None
    num_observed = len(seen) + (setting.regime == "query_aware")
    observed = [truncate(layer, num_observed) for layer in teacher]
    learned = {name: oracle(teacher, len(seen)) for name, own in policies.items() if own.name == ORACLE}
    if taking := _by_gates(policies):
        scores = gate_scores(model, gates, observed, lambda: read_context(model, whole[:num_observed]))
        learned |= dict.fromkeys(taking, scores)
    evidence = [truncate(layer, len(seen)) for layer in teacher]
    made = keep_sets(policies, [setting.keep_ratio], evidence, observed, learned, (setting.seed, number))
    keeps = {name: own for name, _, own in made}
    layers = read_layers(teacher, keeps, len(seen), asks, setting.aggregate)
    boundaries = read_boundaries(teacher, len(seen), asks, setting.keep_ratio)
    del teacher, observed, evidence

    target_S, full_SV = torch.tensor(targets), read_plainly(model, whole, len(tail))[list(asks)]
    reads: dict[str, PolicyRead] = {}
    for name, own in keeps.items():
        cache = base.fork().evict_with(own, correction=correction_of(policies, name))
        read = compare_logits(full_SV, read_on(model, cache.fork(), tail)[list(asks)], target_S)
        spoken = answers
        if name != FULL:
            spoken = respond(model, cache, seen, turns[: len(answers)], setting.steps)
        outputs, ended = tuple(answer.tokens for answer in spoken), sum(answer.ended for answer in spoken)
        reads[name] = PolicyRead(**vars(read), layers=layers[name], outputs=outputs, ended=ended)
    held = {name: sum(int(one.sum()) for one in own) for name, own in keeps.items() if name != FULL}
    counts = {(policies[name].beside_bytes, count) for name, count in held.items()}
    assert len(counts) == len({beside for beside, _ in counts}), (
        f"policies of one keep_ratio hold {held} entries"
    )
    return DocumentRead(document.name, number, seen, len(asks), reads, boundaries)


def _kept_whole(base: Cache) -> Cache:
    """A fork that holds everything in the store that evicted caches hold theirs in."""
    valid_BT, specs = base.state.valid_BT, base.state.specs
    return base.fork().evict_with([valid_BT[:, None].expand(-1, spec.num_kv_heads, -1) for spec in specs])


@torch.no_grad()
def read_layers(
    teacher: Sequence[Evidence],
    keeps: Mapping[str, Sequence[Tensor]],
    num_seen: int,
    asks: Sequence[int],
    aggregate: str = "max",
) -> dict[str, list[LayerRead]]:
    """Measures what eviction does to each layer's attention at the steps, given the full cache's queries.

    Args:
        teacher: every layer over `[what was evicted from; what was read after]`, one sequence, all queries.
        keeps: policy -> per layer what it keeps of the first `num_seen` entries, which were evicted from.
        asks: the steps' places behind them, ascending.

    Returns:
        policy -> one reading per layer, on the CPU.
    """
    made: dict[str, list[LayerRead]] = {name: [] for name in keeps}
    for place, layer in enumerate(teacher):
        norm_BQT = value_norms(layer)
        risk_BHT, _ = future_risk(layer, document_tokens=num_seen, sources=("appendix",))
        parts: dict[str, list[dict[str, Tensor]]] = {name: [] for name in keeps}
        for probs_BQsT in _step_attention(layer, num_seen, asks):
            known = probs_BQsT.shape[3]
            values_BHTD = layer.values_BHTD[:, :, :known].to(probs_BQsT.dtype)
            weight_QDE = layer.output_weight_QDE.to(probs_BQsT.dtype)
            for name, own in keeps.items():
                keep_BHT = own[place]
                shown = (probs_BQsT, values_BHTD, weight_QDE, keep_BHT)
                covered = partial(measures.coverage, probs_BQsT, keep_BHT, aggregate=aggregate)
                norms = (probs_BQsT, norm_BQT[..., :known], keep_BHT)
                parts[name].append(
                    {
                        "coverage_HS": covered(),
                        "value_coverage_HS": covered(norm_BQT=norm_BQT[..., :num_seen]),
                        "perturbation_QS": measures.head_perturbation(*shown),
                        "bound_QS": measures.head_perturbation_bound(*norms),
                        "relaxed_bound_QS": measures.head_perturbation_relaxed_bound(*norms),
                        "loss_l1_S": measures.layer_output_loss(*shown, p=1),
                        "loss_l2_S": measures.layer_output_loss(*shown, p=2),
                        "loss_bound_S": measures.layer_output_bound(*shown),
                    }
                )
        for name, own in keeps.items():
            found = parts[name]
            whole = {key: torch.cat([part[key] for part in found], -1)[0].cpu() for key in found[0]}
            overlap_H = measures.oracle_overlap(own[place], risk_BHT)[0].cpu()
            made[name].append(LayerRead(**whole, overlap_H=overlap_H, keep_HT=own[place][0].cpu()))
    return made


@torch.no_grad()
def read_boundaries(
    teacher: Sequence[Evidence], num_seen: int, asks: Sequence[int], keep_ratio: float
) -> dict[str, BoundaryRead]:
    """Measures what the steps' queries pay the ends of a prompt (`BOUNDARIES`).

    An end is as long as the default protection makes it at this budget: a tenth of `keep_ratio` times the
    prompt, at least 4 entries.

    Args:
        teacher, num_seen, asks: as `read_layers` takes them.
        keep_ratio: kept / seen.
    """
    valid_BT, budget = teacher[0].valid_BT[:, :num_seen], [exact(keep_ratio) * num_seen]
    ends = {name: protected_mask(own, valid_BT, budget, short_B=[True]) for name, own in BOUNDARIES.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in ends}
    for layer in teacher:
        found: dict[str, list[Tensor]] = {name: [] for name in ends}
        for probs_BQsT in _step_attention(layer, num_seen, asks):
            for name, end_BT in ends.items():
                found[name].append(measures.boundary_mass(probs_BQsT, end_BT)[0].cpu())
        for name, own in found.items():
            parts[name].append(torch.cat(own, -1))
    shares = {name: float(end_BT.sum() / valid_BT.sum()) for name, end_BT in ends.items()}
    return {name: BoundaryRead(shares[name], own) for name, own in parts.items()}


def _step_attention(layer: Evidence, num_seen: int, asks: Sequence[int]) -> Iterator[Tensor]:
    """Attention of the steps' queries, a few at a time, over all entries that they know."""
    chunk = max(1, FLOATS_AT_ONCE // (layer.queries_BQSD.shape[1] * layer.num_seen))
    for start, probs_BQsT in attention_chunks(layer, chunk, first=num_seen + asks[0]):
        stop = start + probs_BQsT.shape[2]
        if rows := [num_seen + ask - start for ask in asks if start <= num_seen + ask < stop]:
            yield probs_BQsT[:, :, rows]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = argparse.ArgumentParser(
        prog="python -m retain.eval.diagnose",
        description="Diagnose KV-cache eviction policies without a benchmark: coverage of the attention over "
        "decoding steps, perturbation of the output, likeness of kept sets, divergence, repetition.",
    )
    own.add_argument("--model", required=True, help="reference:0, a local folder, or a hub id")
    own.add_argument("--policies", nargs="+", required=True, metavar="NAME[,key=value]", help="and oracle")
    own.add_argument("--keep-ratio", type=float, default=0.2, help="kept / seen (default 0.2)")
    own.add_argument("--gates", help="folder or hub id of trained gates, for policies that take them")
    own.add_argument("--documents", type=int, default=8, help="how many (default 8)")
    own.add_argument("--context-tokens", type=int, default=1000, help="length of a context (default 1000)")
    own.add_argument("--text", help="UTF-8 file to cut documents from; required unless reference:SEED")
    own.add_argument("--steps", type=int, default=32, help="decoding steps a document (default 32)")
    own.add_argument("--regime", default="context_only", help=f"{' or '.join(REGIMES)} (default the first)")
    own.add_argument("--aggregate", default="max", help=f"{' or '.join(AGGREGATES)} over query heads")
    own.add_argument(
        "--tight", type=float, default=TIGHT, help=f"part of a bound that a head loses (default {TIGHT})"
    )
    own.add_argument("--seed", type=int, default=0, help="of scores that draw (default 0)")
    own.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    own.add_argument("--out", required=True, help=f"folder for {FILE}; an older one is not overwritten")
    return own


def run(given: argparse.Namespace, command: str) -> tuple[Path, dict[str, Any]]:
    """Loads, measures, and writes the record.

    Raises:
        ValueError: anything that the user can mend; nothing was written.
    """
    path = Path(given.out) / FILE
    if path.exists():
        raise ValueError(f"{path} exists and is not overwritten: pass another --out, or remove it.")
    setting = Setting(**{field.name: getattr(given, field.name) for field in fields(Setting)})
    taking = _by_gates({typed: policy_of(typed) for typed in setting.policies})
    refuse_without_gates(taking, given.gates)
    if given.documents < 1 or given.context_tokens < 2:
        raise ValueError(
            f"--documents is 1 or more and --context-tokens 2 or more; got {given.documents} and "
            f"{given.context_tokens}."
        )
    seed = reference_seed(given.model)
    if given.text is None and seed is None:
        raise ValueError(f"documents for {given.model!r} are cut from a text: pass --text FILE.")
    started = now()
    model, tokenizer = load(given.model, device=given.device)
    gates = load_gates(given.gates, model) if taking else None
    size = (given.documents, given.context_tokens)
    if given.text is None and seed is not None:
        documents = [*reference_asked(seed, *size)]
    else:
        documents = [*text_asked(given.text, tokenizer, *size)]
    specs = describe(model)
    reads = diagnose(model, documents, setting, gates=gates, texts_of=partial(map, tokenizer.decode))
    made = {
        **made_by(given, model, started),
        "layers": [spec.layer_idx for spec in specs],
        "kv_heads": [spec.num_kv_heads for spec in specs],
        "query_heads": [spec.num_heads for spec in specs],
    }
    shown = iter(tqdm(reads, total=len(documents), unit="document"))
    record = record_of(shown, made, command, tight=setting.tight)
    record["made"]["finished"] = now()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return path, record


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes, and shows the table."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    path, record = run(
        parser().parse_args(typed), shlex.join(["python", "-m", "retain.eval.diagnose", *typed])
    )
    documents = record["documents"]
    steps = sum(own["steps"] for own in documents)
    print(f"{table(record)}\n\n{boundary_table(record)}\n\n{len(documents)} documents, {steps} steps.")
    print(f"Record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

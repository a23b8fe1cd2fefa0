"""The command: what policies do to one model on some documents, without a benchmark.

    python -m retain.eval.diagnose --model reference:0 --policies snapkv fused random --keep-ratio 0.2
        --gates runs/gates-seed0 --documents 8 --steps 32 --out results/diagnostics

In: a model (`reference:SEED`, a folder or a hub id), policies, one budget, documents (of the reference
generator, or pieces of a text file). Out: `diagnostics.json` (`retain.eval.diagnose.record` says what is in
it) and a table. The definitions are `retain.eval.diagnose.measures`.

A document is a context and the turns that are asked of it. The full cache answers each turn greedily; every
policy evicts from the same context (one eviction, after the prompt: nothing goes while an answer is written)
and is then shown the same turns and the *full cache's* answers, so that all see the same queries. A step is
one token of those answers, and its query the one that it is predicted at. Besides, every policy answers the
turns by itself, which shows loops and answers without end.

The one decision taken here: the full cache is one of the policies, through the same store and code, and what
is compared with is the model without any cache of ours. Its row must read coverage 1, losses 0, divergence 0,
agreement 1; where it does not, no other row is to be believed.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from retain.attention.chunked import attention_chunks, truncate
from retain.budget.statement import Budget
from retain.eval.config import control_policy
from retain.eval.diagnose.documents import REFERENCE, load, reference_asked, text_asked
from retain.eval.diagnose.measures import (
    AGGREGATES,
    agreement,
    coverage,
    divergence,
    head_perturbation,
    head_perturbation_bound,
    layer_output_bound,
    layer_output_loss,
    oracle_overlap,
    token_loss,
)
from retain.eval.diagnose.record import FILE, FULL, DocumentRead, LayerRead, PolicyRead, record_of, table
from retain.eval.diagnose.teacher_forced import (
    Asked,
    ids_on,
    read_on,
    read_plainly,
    respond,
    split,
    transcript,
)
from retain.eval.run.baselines import oracle
from retain.eval.run.scoring import first_entries
from retain.evidence import Evidence
from retain.future import future_risk
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.hf.model.decoder import describe, fingerprint
from retain.hf.model.gates import load_gates
from retain.policy import Policy, decide_layers, score_entries
from retain.presets import load_policy
from retain.process.command import command
from retain.process.provenance import code_state, environment, now, write_json
from retain.registry import lookup
from retain.scores import Score
from retain.scores.value_norm import value_norms

REGIMES = ("context_only", "query_aware")
ORACLE = "oracle"
# Floats of attention that exist at once.
FLOATS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        policies: presets (`snapkv`, `defensivekv:code`), with changes (`snapkv,protection.recent=8`), or
            `oracle`, which knows the queries that will come.
        keep_ratio: kept / seen, in (0, 1].
        regime: `context_only` (no turn was seen before the eviction) or `query_aware` (scores have observed
            the first one; what is evicted from is all but its last token).
        steps: tokens of the full cache's answers that are measured, at most, a document; and the longest that
            a single answer may be.
        aggregate: of `retain.eval.diagnose.measures.AGGREGATES`, for coverage.
        seed: of scores that draw.
    """

    policies: tuple[str, ...]
    keep_ratio: float
    regime: str = "context_only"
    steps: int = 32
    aggregate: str = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        lookup(self.regime, {name: name for name in REGIMES}, what="regime")
        lookup(self.aggregate, AGGREGATES, what="aggregate over query heads")
        problems = []
        if not self.policies:
            problems.append("no policy is named: name at least one")
        if FULL in self.policies:
            problems.append("'full' is always measured: leave it out")
        if len({*self.policies}) < len(self.policies):
            problems.append(f"policies repeat: {' '.join(self.policies)}")
        if not 0 < self.keep_ratio <= 1:
            problems.append(f"keep_ratio is kept / seen, above 0 and at most 1, got {self.keep_ratio}")
        if self.steps < 1:
            problems.append(f"steps is 1 or more, got {self.steps}")
        if problems:
            raise ValueError(f"diagnostics: {'; '.join(problems)}.")


def policy_of(typed: str) -> Policy:
    """The policy of that name, changes behind commas.

    Raises:
        ValueError: an unknown policy or setting.
    """
    name, *changes = typed.split(",")
    if name == ORACLE:
        return control_policy(ORACLE, changes)
    policy = replace(load_policy(name, changes), variants={})
    if policy.keeps_all:
        raise ValueError(
            f"policy {typed!r} keeps everything, and the full cache is always measured: leave it out."
        )
    return policy


@torch.inference_mode()
def diagnose(
    model: Any, documents: Sequence[Asked], setting: Setting, *, gates: Any = None, texts_of: Any = None
) -> Iterator[DocumentRead]:
    """Measure every policy, document by document.

    Memory: the evidence of one document (linear in its length), and attention of a few steps at a time.

    Args:
        model: a causal language model; it stays attached.
        documents: what is read and asked.
        setting: what is measured.
        gates: loaded gates, if a policy takes them.
        texts_of: ids -> their texts, for the view of the first document; None: their numbers.

    Raises:
        ValueError: a policy cannot be meant, takes gates that are not there, or cannot hold what it protects.
    """
    policies = {typed: policy_of(typed) for typed in setting.policies}
    needy = [typed for typed, own in policies.items() if own.learned and own.name != ORACLE]
    if needy and gates is None:
        raise ValueError(f"{', '.join(needy)} takes a gate's score and there is none: pass gates.")
    attach(model)
    for number, document in enumerate(documents):
        read = _measure(model, document, number, setting, policies, gates)
        if number == 0:
            ids = read.seen_ids
            read = replace(read, texts=tuple(map(str, ids) if texts_of is None else texts_of(ids)))
        yield read


def _measure(
    model: Any,
    document: Asked,
    number: int,
    setting: Setting,
    policies: Mapping[str, Policy],
    gates: Any,
) -> DocumentRead:
    """One document."""
    seen, turns = split(document, setting.regime)
    base = Cache(model, policy=None, slack=0)
    base.prefill(ids_on(model, seen), evict=False)
    answers = respond(model, _kept_whole(base), turns, setting.steps, total=setting.steps)
    tail, asks, targets = transcript(turns, answers, setting.steps)
    wanted = () if gates is None else gates.inputs
    whole = Cache(model, policy=None, slack=0)
    whole.prefill(ids_on(model, (*seen, *tail)), evict=False, hold_evidence=True, wanted=wanted)
    assert whole.evidence is not None
    teacher = list(whole.evidence)
    observed_tokens = len(document.context_ids)
    if setting.regime == "query_aware":
        observed_tokens += len(document.turns[0])
    observed = [truncate(layer, observed_tokens) for layer in teacher]
    if getattr(gates, "extension", None) is not None:
        asked_behind = Cache(model, policy=None, slack=0)
        asked_behind.prefill(ids_on(model, (*seen, *tail)[:observed_tokens]), evict=False)
        observed = look_ahead(model, gates, asked_behind.engine.read_only(), observed)
    keeps = _decide(teacher, observed, len(seen), number, setting, policies, gates)
    layers = read_layers(teacher, keeps, len(seen), asks, setting.aggregate)
    del whole, teacher, observed

    target_S = torch.tensor(targets)
    full_SV = read_plainly(model, (*seen, *tail), len(tail))[list(asks)].float().cpu()
    reads: dict[str, PolicyRead] = {}
    for name, own in keeps.items():
        cache = base.fork()
        cache.evict_with(own)
        logits_SV = read_on(model, cache.fork(), tail)[list(asks)].float().cpu()
        spoken = answers
        if name != FULL:
            spoken = respond(model, cache, turns[: len(answers)], setting.steps)
        reads[name] = PolicyRead(
            layers=layers[name],
            kl_S=divergence(full_SV, logits_SV),
            kl_reverse_S=divergence(logits_SV, full_SV),
            agree_S=agreement(full_SV, logits_SV),
            loss_S=token_loss(logits_SV, target_S),
            outputs=tuple(answer.tokens for answer in spoken),
            ended=sum(answer.end is not None for answer in spoken),
        )
    counts = {sum(int(one.sum()) for one in own) for name, own in keeps.items() if name != FULL}
    assert len(counts) <= 1, f"policies of one keep_ratio hold {sorted(counts)} entries"
    return DocumentRead(document.name, number, seen, len(asks), reads)


def _decide(
    teacher: Sequence[Evidence],
    observed: Sequence[Evidence],
    num_seen: int,
    number: int,
    setting: Setting,
    policies: Mapping[str, Policy],
    gates: Any,
) -> dict[str, list[Tensor]]:
    """What each policy keeps of each layer, the full cache first."""
    evidence = [truncate(layer, num_seen) for layer in teacher]
    learned: Sequence[Score | None] = [None] * len(observed)
    if gates is not None:
        learned = [gates.score(layer) for layer in observed]
    seeds_B = [int(np.random.SeedSequence([setting.seed, number]).generate_state(1)[0])]
    keeps = {FULL: [layer.exists_BHT for layer in evidence]}
    for name, policy in policies.items():
        own: Sequence[Score | None] = oracle(teacher, num_seen) if policy.name == ORACLE else learned
        scores = [
            first_entries(score_entries(policy, layer, learned=score, seeds_B=seeds_B), num_seen)
            for layer, score in zip(observed, own, strict=True)
        ]
        made = decide_layers(policy, evidence, Budget(keep_ratio=setting.keep_ratio), scores=scores)
        keeps[name] = [one.keep_BHT for one in made]
    return keeps


@torch.no_grad()
def read_layers(
    teacher: Sequence[Evidence],
    keeps: Mapping[str, Sequence[Tensor]],
    num_seen: int,
    asks: Sequence[int],
    aggregate: str = "max",
) -> dict[str, list[LayerRead]]:
    """What eviction does to each layer's attention at the steps, given the full cache's queries.

    Args:
        teacher: every layer over `[what was evicted from; what was read after]`, one sequence, all queries.
        keeps: policy -> per layer what it keeps of the first `num_seen` entries.
        num_seen: entries that were evicted from.
        asks: the steps' places behind them, ascending.
        aggregate: over query heads, for coverage.

    Returns:
        policy -> one reading per layer, on the CPU.
    """
    made: dict[str, list[LayerRead]] = {name: [] for name in keeps}
    for place, layer in enumerate(teacher):
        norm_BQT = value_norms(layer)
        risk_BHT, _ = future_risk(layer, document_tokens=num_seen, sources=("appendix",))
        parts: dict[str, list[dict[str, Tensor]]] = {name: [] for name in keeps}
        chunk = max(1, FLOATS_AT_ONCE // (layer.queries_BQSD.shape[1] * layer.num_seen))
        for start, probs_BQsT in attention_chunks(layer, chunk, first=num_seen + asks[0]):
            stop, known = start + probs_BQsT.shape[2], probs_BQsT.shape[3]
            rows = [num_seen + ask - start for ask in asks if start <= num_seen + ask < stop]
            if not rows:
                continue
            probs_BQsT = probs_BQsT[:, :, rows]
            norms_BQT = norm_BQT[..., :num_seen]
            values_BHTD = layer.values_BHTD[:, :, :known].to(probs_BQsT.dtype)
            weight_QDE = layer.output_weight_QDE.to(probs_BQsT.dtype)
            for name, own in keeps.items():
                keep_BHT = own[place]
                shown = (probs_BQsT, values_BHTD, weight_QDE, keep_BHT)
                covered = partial(coverage, probs_BQsT, keep_BHT, aggregate=aggregate)
                parts[name].append(
                    {
                        "coverage_HS": covered(),
                        "value_coverage_HS": covered(norm_BQT=norms_BQT),
                        "perturbation_QS": head_perturbation(*shown),
                        "bound_QS": head_perturbation_bound(probs_BQsT, norm_BQT[..., :known], keep_BHT),
                        "loss_l1_S": layer_output_loss(*shown, p=1),
                        "loss_l2_S": layer_output_loss(*shown, p=2),
                        "loss_bound_S": layer_output_bound(*shown),
                    }
                )
        for name, own in keeps.items():
            found = parts[name]
            whole = {key: torch.cat([part[key] for part in found], -1)[0].cpu() for key in found[0]}
            overlap_H = oracle_overlap(own[place], risk_BHT)[0].cpu()
            made[name].append(LayerRead(**whole, overlap_H=overlap_H, keep_HT=own[place][0].cpu()))
    return made


def _kept_whole(base: Cache) -> Cache:
    """A fork that holds everything in the store that evicted caches hold theirs in."""
    fork = base.fork()
    heads = [spec.num_kv_heads for spec in fork.state.specs]
    fork.evict_with([fork.state.valid_BT[:, None].expand(-1, own, -1) for own in heads])
    return fork


def describe_made(
    name: str, model: Any, gates: str | None, setting: Setting, device: str, count: int, started: str
) -> dict[str, Any]:
    """What a record was made from."""
    specs = describe(model)
    return {
        "model": name,
        "model_sha": fingerprint(model)["sha256"],
        "gates": gates,
        "regime": setting.regime,
        "keep_ratio": setting.keep_ratio,
        "policies": list(setting.policies),
        "documents": count,
        "steps": setting.steps,
        "seed": setting.seed,
        "aggregate": setting.aggregate,
        "layers": [spec.layer_idx for spec in specs],
        "kv_heads": [spec.num_kv_heads for spec in specs],
        "query_heads": [spec.num_heads for spec in specs],
        "code": code_state(Path(__file__).parent),
        "environment": environment(device, torch.get_num_threads()),
        "started": started,
    }


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
    own.add_argument("--seed", type=int, default=0, help="of scores that draw (default 0)")
    own.add_argument("--device", default="cpu", help="e.g. cuda:0 (default cpu)")
    own.add_argument("--out", required=True, help=f"folder for {FILE}; an older one is not overwritten")
    return own


def run(given: argparse.Namespace, command: str) -> tuple[Path, dict[str, Any]]:
    """Load, measure, and write the record.

    Raises:
        ValueError, FileNotFoundError: anything that the user can mend; nothing was written.
    """
    path = Path(given.out) / FILE
    if path.exists():
        raise ValueError(f"{path} exists and is not overwritten: pass another --out, or remove it.")
    setting = Setting(
        tuple(given.policies), given.keep_ratio, given.regime, given.steps, given.aggregate, given.seed
    )
    policies = [own for own in map(policy_of, setting.policies) if own.name != ORACLE]
    if given.documents < 1 or given.context_tokens < 2:
        raise ValueError(
            f"--documents is 1 or more and --context-tokens 2 or more; got {given.documents} and "
            f"{given.context_tokens}."
        )
    is_reference = given.model.startswith(REFERENCE)
    if given.text is None and not is_reference:
        raise ValueError(f"documents for {given.model!r} are cut from a text: pass --text FILE.")
    if given.gates is None and any(own.learned for own in policies):
        needy = ", ".join(own.name for own in policies if own.learned)
        raise ValueError(f"{needy} takes a gate's score: pass --gates, a folder or hub id.")
    started = now()
    model, tokenizer = load(given.model, given.device)
    gates = load_gates(given.gates, model) if any(own.learned for own in policies) else None
    if given.text is None:
        seed = int(given.model.removeprefix(REFERENCE))
        documents = list(reference_asked(seed, given.documents, given.context_tokens))
    else:
        documents = list(text_asked(given.text, tokenizer, given.documents, given.context_tokens))
    reads = diagnose(model, documents, setting, gates=gates, texts_of=partial(texts, tokenizer))
    made = describe_made(given.model, model, given.gates, setting, given.device, len(documents), started)
    record = record_of(iter(tqdm(reads, total=len(documents), unit="document")), made, command)
    record["made"]["finished"] = now()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return path, record


def texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as text."""
    return [tokenizer.decode([token]) for token in ids]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write, and show the table."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(typed)
    path, record = run(given, shlex.join(["python", "-m", "retain.eval.diagnose", *typed]))
    print(table(record))
    print(
        f"\n{len(record['documents'])} documents, {sum(own['steps'] for own in record['documents'])} steps."
    )
    print(f"Record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

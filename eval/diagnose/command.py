"""The command: what policies do to one model on some documents, without a benchmark.

    python -m retain.eval.diagnose --model reference:0 --policies snapkv fused random --keep-ratio 0.2
        --gates runs/gates-seed0 --documents 8 --steps 32 --out results/diagnostics

It takes a model (`reference:SEED`, a folder or a hub id), policies, one budget and documents (of the
reference generator, or pieces of a text file), writes `diagnostics.json` (`retain.eval.diagnose.record`) and
prints a table. The definitions are `retain.eval.diagnose.measures`.

A document is a context and the turns that are asked of it. The full cache answers each turn greedily; every
policy evicts from the same context (one eviction, after the prompt: nothing goes while an answer is written)
and is then shown the same turns and the *full cache's* answers, so that all see the same queries. A step is
one token of those answers, and its query the one that it is predicted at.

The full cache is one of the policies, through the same store and code, and what is compared with is the model
without any cache of ours. Its row must read coverage 1, divergence 0, agreement 1; where it does not, no
other row is to be believed.
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
from retain.eval.config import FULL, labelled_policy
from retain.eval.diagnose import teacher_forced
from retain.eval.diagnose.documents import Asked, load, reference_asked, text_asked
from retain.eval.diagnose.measures import coverage, oracle_overlap
from retain.eval.diagnose.record import (
    FILE,
    DocumentRead,
    LayerRead,
    PolicyRead,
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
from retain.models.named import reference_seed
from retain.policy import Policy
from retain.process.command import command
from retain.process.provenance import now, write_json
from retain.registry import lookup

REGIMES = ("context_only", "query_aware")
ORACLE = "oracle"
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
        seed: of scores that draw.
    """

    policies: Sequence[str]
    keep_ratio: float
    regime: str = "context_only"
    steps: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        lookup(self.regime, dict.fromkeys(REGIMES), what="regime")
        ratio = self.keep_ratio
        wrong = {
            "no policy is named: name at least one": not self.policies,
            "'full' is always measured: leave it out": FULL in self.policies,
            f"policies repeat: {' '.join(self.policies)}": len({*self.policies}) < len(self.policies),
            f"keep_ratio is kept / seen, above 0 and at most 1, got {ratio}": not 0 < ratio <= 1,
            f"steps is 1 or more, got {self.steps}": self.steps < 1,
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
    layers = read_layers(teacher, keeps, len(seen), asks)
    del teacher, observed, evidence

    target_S, full_SV = torch.tensor(targets), read_plainly(model, whole, len(tail))[list(asks)]
    reads: dict[str, PolicyRead] = {}
    for name, own in keeps.items():
        cache = base.fork().evict_with(own, correction=correction_of(policies, name))
        read = compare_logits(full_SV, read_on(model, cache, tail)[list(asks)], target_S)
        reads[name] = PolicyRead(**vars(read), layers=layers[name])
    held = {name: sum(int(one.sum()) for one in own) for name, own in keeps.items() if name != FULL}
    counts = {(policies[name].beside_bytes, count) for name, count in held.items()}
    assert len(counts) == len({beside for beside, _ in counts}), (
        f"policies of one keep_ratio hold {held} entries"
    )
    return DocumentRead(document.name, number, seen, len(asks), reads)


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
) -> dict[str, list[LayerRead]]:
    """Measures what eviction takes from each layer's attention at the steps, given the full cache's queries.

    Args:
        teacher: every layer over `[what was evicted from; what was read after]`, one sequence, all queries.
        keeps: policy -> per layer what it keeps of the first `num_seen` entries, which were evicted from.
        asks: the steps' places behind them, ascending.

    Returns:
        policy -> one reading per layer, on the CPU.
    """
    made: dict[str, list[LayerRead]] = {name: [] for name in keeps}
    for place, layer in enumerate(teacher):
        risk_BHT, _ = future_risk(layer, document_tokens=num_seen, sources=("appendix",))
        parts: dict[str, list[Tensor]] = {name: [] for name in keeps}
        for probs_BQsT in _step_attention(layer, num_seen, asks):
            for name, own in keeps.items():
                parts[name].append(coverage(probs_BQsT, own[place])[0].cpu())
        for name, own in keeps.items():
            overlap_H = oracle_overlap(own[place], risk_BHT)[0].cpu()
            made[name].append(LayerRead(torch.cat(parts[name], -1), overlap_H, own[place][0].cpu()))
    return made


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
        "decoding steps, likeness of kept sets, divergence from the full cache.",
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
    record = record_of(shown, made, command)
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
    print(f"{table(record)}\n\n{len(documents)} documents, {steps} steps.")
    print(f"Record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

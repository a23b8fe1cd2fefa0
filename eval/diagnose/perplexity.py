"""Perplexity and divergence against the full cache, on any text.

    python -m retain.eval.diagnose.perplexity --model reference:0 --policies snapkv streaming_llm --keep-ratio
    0.2 0.4 python -m retain.eval.diagnose.perplexity --model FOLDER --text book.txt --policies snapkv
    --keep-ratio 0.2
        --context-tokens 4096 --scored-tokens 512 --documents 16 --out results/perplexity.json

In: a model, a text, policies, budgets. The text is cut into pieces `[context | one token | scored tokens]`.
Per piece the context is prefilled once; every policy evicts from a fork of that cache, at every budget, and
then reads what follows, teacher-forced, without evicting any more. Out: perplexity of the scored tokens, its
ratio to that of the full cache, `KL(full || evicted)` per token in nats, top-1 agreement, each with an
interval over pieces (a piece is a cluster); a JSON record and a table. Definitions:
`eval/diagnose/measures.py`.

The one decision taken here: the token behind the context is read but not scored. What predicts it was
computed before the eviction, and would count as unharmed whatever was evicted. The full cache's logits come
from the model without any cache of ours; the same model through our store, nothing evicted, is measured
besides (`control_kl`), and where that is not about 0, no other number is to be believed.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.diagnose.documents import cut, opening_of
from retain.eval.diagnose.measures import agreement, divergence, token_loss
from retain.eval.diagnose.teacher_forced import ids_on, read_on, read_plainly
from retain.eval.stats.significance import Interval, paired_interval
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import look_ahead
from retain.hf.model.decoder import fingerprint
from retain.hf.model.gates import load_gates
from retain.hf.model.named import load_named, reference_seed
from retain.policy import Policy, decide_layers, score_entries
from retain.presets import load_policy
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import code_state, environment, now, write_json

FULL = "full"


@dataclass(frozen=True)
class Reading:
    """One piece read with one cache.

    Attributes:
        document: Number of the piece.
        policy: As asked for; "full": the full cache through our own store.
        keep_ratio: As asked for; 1 for the full cache.
        loss: Mean negative log-probability of the scored tokens, in nats.
        loss_full: The same without any cache of ours.
        kl: Mean `KL(full || evicted)`, in nats a token.
        agreement: Share of tokens at which both have the same most likely token.
        kept_entries: After the eviction, over layers and heads.
        seen_entries: Before it.
        tokens: Scored.
    """

    document: int
    policy: str
    keep_ratio: float
    loss: float
    loss_full: float
    kl: float
    agreement: float
    kept_entries: int
    seen_entries: int
    tokens: int


@torch.inference_mode()
def read_pieces(
    model: Any,
    pieces: Sequence[Sequence[int]],
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    *,
    context_tokens: int,
    gates: Any = None,
    seed: int = 0,
) -> Iterator[Reading]:
    """Measure every policy at every budget, piece by piece; the full cache first.

    Args:
        model: A causal language model; it stays attached.
        pieces: `[context | one token | scored tokens]`, as `diagnose_documents.cut` makes them.
        policies: By the name in tables.
        keep_ratios: Kept / seen, in (0, 1].
        context_tokens: Of each piece.
        gates: Loaded, if a policy takes them.
        seed: Of scores that draw.

    Raises:
        ValueError: a policy takes gates that are not there, or a budget is out of range.
    """
    needy = [name for name, policy in policies.items() if policy.learned]
    if needy and gates is None:
        raise ValueError(f"{', '.join(needy)} takes a gate's score and there is none: pass gates.")
    wrong = [ratio for ratio in keep_ratios if not 0 < ratio <= 1]
    if wrong or not keep_ratios:
        raise ValueError(f"keep_ratio is kept / seen, above 0 and at most 1, got {wrong or 'none'}.")
    attach(model)
    for number, piece in enumerate(pieces):
        context, tail, targets = piece[:context_tokens], piece[context_tokens:-1], piece[context_tokens + 1 :]
        target_S = torch.tensor(targets)
        full_SV = read_plainly(model, piece[:-1], len(tail)).float().cpu()
        loss_full = float(token_loss(full_SV, target_S).mean())
        base = Cache(model, policy=None, slack=0)
        wanted = () if gates is None else gates.inputs
        base.prefill(ids_on(model, context), evict=False, hold_evidence=True, wanted=wanted)
        assert base.evidence is not None
        evidence = [truncate(layer, context_tokens) for layer in base.evidence]
        observed = evidence
        if getattr(gates, "extension", None) is not None:
            observed = look_ahead(model, gates, base.fork().engine.read_only(), observed)
        learned = [None] * len(observed) if gates is None else [gates.score(layer) for layer in observed]
        seeds_B = [int(np.random.SeedSequence([seed, number]).generate_state(1)[0])]
        seen = sum(layer.num_heads * layer.num_seen for layer in evidence)
        keeps: list[tuple[str, float, list[Tensor]]] = [(FULL, 1.0, [layer.exists_BHT for layer in evidence])]
        for name, policy in policies.items():
            scores = [
                score_entries(policy, layer, learned=score, seeds_B=seeds_B)
                for layer, score in zip(observed, learned, strict=True)
            ]
            for ratio in keep_ratios:
                made = decide_layers(policy, evidence, Budget(keep_ratio=ratio), scores=scores)
                keeps.append((name, ratio, [one.keep_BHT for one in made]))
        for name, ratio, own in keeps:
            fork = base.fork()
            fork.evict_with(own)
            logits_SV = read_on(model, fork, tail).float().cpu()
            yield Reading(
                document=number,
                policy=name,
                keep_ratio=float(ratio),
                loss=float(token_loss(logits_SV, target_S).mean()),
                loss_full=loss_full,
                kl=float(divergence(full_SV, logits_SV).mean()),
                agreement=float(agreement(full_SV, logits_SV).double().mean()),
                kept_entries=sum(int(one.sum()) for one in own),
                seen_entries=seen,
                tokens=len(targets),
            )


def summarise(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """One row per policy and budget, in the order they were read.

    Intervals are paired (each piece is compared with itself in the full cache) and over pieces; that of the
    ratio is the exponential of that of the mean difference of losses.

    Args:
        readings: Of every policy and budget, on the same pieces.

    Raises:
        ValueError: cells were read on different pieces.
    """
    cells: dict[tuple[str, float], list[Reading]] = {}
    for one in readings:
        cells.setdefault((one.policy, one.keep_ratio), []).append(one)
    pieces = {key: sorted(one.document for one in own) for key, own in cells.items()}
    if len({tuple(own) for own in pieces.values()}) > 1:
        raise ValueError(f"cells were read on different pieces: {pieces}. Read all of them on the same.")
    rows = []
    for (policy, ratio), own in cells.items():
        worse = paired_interval([np.array([one.loss - one.loss_full for one in own])])
        rows.append(
            {
                "policy": policy,
                "keep_ratio": ratio,
                "documents": len(own),
                "tokens": sum(one.tokens for one in own),
                "perplexity": math.exp(float(np.mean([one.loss for one in own]))),
                "perplexity_full": math.exp(float(np.mean([one.loss_full for one in own]))),
                "perplexity_ratio": _between(worse, math.exp),
                "kl": _between(paired_interval([np.array([one.kl for one in own])])),
                "agreement": _between(paired_interval([np.array([one.agreement for one in own])])),
                "kept_entries": sum(one.kept_entries for one in own),
                "seen_entries": sum(one.seen_entries for one in own),
            }
        )
    return rows


def _between(interval: Interval, of: Any = float) -> dict[str, Any]:
    ends = (None, None) if interval.undefined else (of(interval.low), of(interval.high))
    return {
        "estimate": of(interval.estimate),
        "low": ends[0],
        "high": ends[1],
        "level": interval.level,
        "method": interval.method,
    }


def _spelled(own: Mapping[str, Any]) -> str:
    return f"{own['estimate']:.4f} " + (
        "no interval" if own["low"] is None else f"[{own['low']:.4f}, {own['high']:.4f}]"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, one line each."""
    wide = max([len("policy"), *(len(row["policy"]) for row in rows)])
    lines = [f"{'policy':{wide}} {'keep':>5} {'ppl':>9} {'ratio':>23} {'KL (nats)':>25} {'agreement':>23}"]
    for row in rows:
        ratio, kl, agree = (_spelled(row[name]) for name in ("perplexity_ratio", "kl", "agreement"))
        lines.append(
            f"{row['policy']:{wide}} {row['keep_ratio']:5.2f} {row['perplexity']:9.3f} {ratio:>23} {kl:>25} "
            f"{agree:>23}"
        )
    return "\n".join(lines)


def text_ids(path: str | None, model: str, tokenizer: Any) -> list[int]:
    """Token ids of a text file; without one, of the reference model's held-out text.

    Raises:
        ValueError: no file where one is needed, one that cannot be read, or a model without a tokenizer.
    """
    if path is None:
        if reference_seed(model) is None:
            raise ValueError(f"model={model!r} has no text of its own: pass --text, a file in UTF-8.")
        from retain.reference.corpus import stream

        return stream("eval").tolist()
    if tokenizer is None:
        raise ValueError(f"model={model!r} has no tokenizer, and a text needs one.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read: {error}. Pass a file in UTF-8.") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m retain.eval.diagnose.perplexity", description=__doc__.split("\n")[0]
    )
    made.add_argument("--model", default="reference:0", help="reference:<seed>, a folder or a hub name")
    made.add_argument("--text", help="file in UTF-8; reference models have a text of their own")
    made.add_argument("--policies", nargs="+", required=True, help="presets, changes behind commas")
    made.add_argument("--keep-ratio", nargs="+", type=float, required=True, help="kept / seen, (0, 1]")
    made.add_argument("--gates", help="folder or file of gates, for policies that take them")
    made.add_argument("--context-tokens", type=int, default=768, help="evicted from (tokens)")
    made.add_argument("--scored-tokens", type=int, default=128, help="predicted afterwards (tokens)")
    made.add_argument("--documents", type=int, default=16, help="pieces of the text")
    made.add_argument("--seed", type=int, default=0, help="of scores that draw")
    made.add_argument("--dtype", default="auto", help="of the weights, as torch calls it")
    made.add_argument("--device", default="cpu", help="where the model runs")
    made.add_argument("--out", help="JSON file to write; it must not exist")
    return made


def run(given: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure what the command line asks for, and write the record.

    Raises:
        ValueError: bad input; says what was wanted.
    """
    require("eval", "scipy", what="a perplexity with its intervals")
    if given.out is not None and Path(given.out).exists():
        raise ValueError(f"{given.out} exists, and nothing is overwritten: pass another --out.")
    if given.scored_tokens < 1:
        raise ValueError(f"perplexity: scored_tokens is 1 or more, got {given.scored_tokens}.")
    policies = {}
    for typed in given.policies:
        name, *changes = typed.split(",")
        policies[typed] = replace(load_policy(name, changes), variants={})
    started = now()
    model, tokenizer = load_named(given.model, dtype=given.dtype)
    model = model.to(given.device)
    gates = None if given.gates is None else load_gates(given.gates, model)
    pieces = cut(
        text_ids(given.text, given.model, tokenizer),
        () if tokenizer is None else opening_of(tokenizer),
        context_tokens=given.context_tokens,
        behind=1 + given.scored_tokens,
        documents=given.documents,
    )
    readings = list(
        read_pieces(
            model,
            pieces,
            policies,
            given.keep_ratio,
            context_tokens=given.context_tokens,
            gates=gates,
            seed=given.seed,
        )
    )
    rows = summarise(readings)
    record = {
        "schema": 1,
        "command": command,
        "made": {
            "model": given.model,
            "model_sha": fingerprint(model)["sha256"],
            "text": None if given.text is None else Path(given.text).name,
            "gates": given.gates,
            "context_tokens": given.context_tokens,
            "scored_tokens": given.scored_tokens,
            "documents": given.documents,
            "seed": given.seed,
            "device": given.device,
            "code": code_state(Path(__file__).parent),
            "environment": environment(given.device, torch.get_num_threads()),
            "started": started,
            "finished": now(),
        },
        "control_kl": max(one.kl for one in readings if one.policy == FULL),
        "rows": [row for row in rows if row["policy"] != FULL],
        "readings": [asdict(one) for one in readings],
    }
    if given.out is not None:
        Path(given.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(given.out), record)
    return record


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, and show the table."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(typed)
    record = run(given, shlex.join(["python", "-m", "retain.eval.diagnose.perplexity", *typed]))
    print(table(record["rows"]))
    print(f"\n{given.documents} pieces; control: KL of our own full cache is {record['control_kl']:.2e}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

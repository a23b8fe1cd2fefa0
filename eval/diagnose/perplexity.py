"""Perplexity and divergence against the full cache, on any text.

    python -m retain.eval.diagnose.perplexity --model reference:0 --policies snapkv streaming_llm
        --keep-ratio 0.2 0.4
    python -m retain.eval.diagnose.perplexity --model FOLDER --text book.txt --policies snapkv
        --keep-ratio 0.2 --context-tokens 4096 --scored-tokens 512 --out results/perplexity.json

The text is cut into pieces `[context | one token | scored tokens]`. Per piece the context is prefilled once;
every policy evicts from a fork of that cache, at every budget, and then reads what follows, teacher-forced,
without evicting any more. Reported are perplexity of the scored tokens, its ratio to that of the full cache,
`KL(full || evicted)` per token in nats and top-1 agreement, each with an interval over pieces (a piece is a
cluster), as a JSON record and a table. Definitions: `eval/diagnose/measures.py`.

The token behind the context is read but not scored: what predicts it was computed before the eviction, and
would count as unharmed whatever was evicted. The full cache's logits come from the model without any cache of
ours; the same model through our store, nothing evicted, is measured besides (`control_kl`), and where that is
not about 0, no other number is to be believed.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from retain.attention.chunked import truncate
from retain.eval.config import FULL
from retain.eval.diagnose.documents import cut, load, opening_of, text_ids
from retain.eval.diagnose.measures import token_loss
from retain.eval.diagnose.teacher_forced import (
    compare_logits,
    correction_of,
    keep_sets,
    made_by,
    policy_of,
    read_context,
    read_on,
    read_plainly,
    refuse_without_gates,
)
from retain.eval.report.grid import Column, grid
from retain.eval.run.scoring import gate_scores
from retain.eval.stats.significance import Interval, paired_interval
from retain.hf.intercept.attach import attach
from retain.hf.model.gates import load_gates
from retain.models.named import reference_seed
from retain.policy import Policy
from retain.process.command import command
from retain.process.extras import require
from retain.process.provenance import now, write_json

COLUMNS = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", ".2f"), Column("ppl", "perplexity")),
    *(Column("ratio", "perplexity_ratio"), Column("KL (nats)", "kl"), Column("agreement", "agreement")),
)


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
    pieces: Iterable[Sequence[int]],
    policies: Mapping[str, Policy],
    keep_ratios: Sequence[float],
    *,
    context_tokens: int,
    gates: Any = None,
    seed: int = 0,
) -> Iterator[Reading]:
    """Measures every policy at every budget, piece by piece; the full cache first.

    Args:
        model: A causal language model; it stays attached.
        pieces: `[context | one token | scored tokens]`, as `retain.eval.diagnose.documents.cut` makes them.
        keep_ratios: Kept / seen, in (0, 1].
        gates: Loaded, if a policy takes them.
        seed: Of scores that draw.

    Raises:
        ValueError: a policy takes gates that are not there, or a budget is out of range.
    """
    refuse_without_gates(policies, gates)
    wrong = [ratio for ratio in keep_ratios if not 0 < ratio <= 1]
    if wrong or not keep_ratios:
        raise ValueError(f"keep_ratio is kept / seen, above 0 and at most 1, got {wrong or 'none'}.")
    attach(model)
    for number, piece in enumerate(pieces):
        tail, target_S = piece[context_tokens:-1], torch.tensor(piece[context_tokens + 1 :])
        full_SV = read_plainly(model, piece[:-1], len(tail))
        base = read_context(model, piece[:context_tokens], evidence=True, gates=gates)
        assert base.evidence is not None
        evidence = [truncate(layer, context_tokens) for layer in base.evidence]
        learned = {}
        if gates is not None:
            learned = dict.fromkeys(policies, gate_scores(model, gates, evidence, base.fork))
        for name, ratio, keeps in keep_sets(
            policies, keep_ratios, evidence, evidence, learned, (seed, number)
        ):
            cache = base.fork().evict_with(keeps, correction=correction_of(policies, name))
            read = compare_logits(full_SV, read_on(model, cache, tail), target_S)
            yield Reading(
                document=number,
                policy=name,
                keep_ratio=float(ratio),
                loss=float(read.loss_S.mean()),
                loss_full=float(token_loss(full_SV, target_S).mean()),
                kl=float(read.kl_S.mean()),
                agreement=float(read.agree_S.double().mean()),
                kept_entries=sum(int(keep_BHT.sum()) for keep_BHT in keeps),
                seen_entries=sum(layer.num_heads * layer.num_seen for layer in evidence),
                tokens=len(target_S),
            )


def summarise(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """One row per policy and budget, in the order they were read.

    Intervals are paired (each piece is compared with itself in the full cache) and over pieces; that of the
    ratio is the exponential of that of the mean difference of losses.

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
        of = {each.name: np.array([getattr(one, each.name) for one in own]) for each in fields(Reading)}
        rows.append(
            {
                "policy": policy,
                "keep_ratio": ratio,
                "documents": len(own),
                "perplexity": math.exp(of["loss"].mean()),
                "perplexity_full": math.exp(of["loss_full"].mean()),
                "perplexity_ratio": _between(paired_interval([of["loss"] - of["loss_full"]]), math.exp),
                "kl": _between(paired_interval([of["kl"]])),
                "agreement": _between(paired_interval([of["agreement"]])),
                **{name: int(of[name].sum()) for name in ("tokens", "kept_entries", "seen_entries")},
            }
        )
    return rows


def _between(interval: Interval, of: Any = float) -> dict[str, Any]:
    low, high = (None, None) if interval.undefined else (of(interval.low), of(interval.high))
    how = {"level": interval.level, "method": interval.method}
    return {"estimate": of(interval.estimate), "low": low, "high": high, **how}


def _spelled(own: Mapping[str, Any]) -> str:
    ends = "no interval" if own["low"] is None else f"[{own['low']:.4f}, {own['high']:.4f}]"
    return f"{own['estimate']:.4f} {ends}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, one line each."""
    judged = ("perplexity_ratio", "kl", "agreement")
    return "\n".join(
        grid(COLUMNS, [{**row, **{name: _spelled(row[name]) for name in judged}} for row in rows])
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m retain.eval.diagnose.perplexity", description=__doc__.split("\n")[0]
    )
    made.add_argument("--model", default="reference:0", help="reference:0, a folder or a hub name")
    made.add_argument("--text", help="file in UTF-8; the reference model has a text of its own")
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
    from retain.reference.corpus import stream

    if given.out is not None and Path(given.out).exists():
        raise ValueError(f"{given.out} exists, and nothing is overwritten: pass another --out.")
    if given.scored_tokens < 1:
        raise ValueError(f"perplexity: scored_tokens is 1 or more, got {given.scored_tokens}.")
    seed = reference_seed(given.model)
    if given.text is None and seed is None:
        raise ValueError(f"model={given.model!r} has no text of its own: pass --text, a file in UTF-8.")
    policies = {typed: policy_of(typed) for typed in given.policies}
    started = now()
    model, tokenizer = load(given.model, dtype=given.dtype, device=given.device)
    gates = None if given.gates is None else load_gates(given.gates, model)
    pieces = cut(
        stream("eval").tolist() if given.text is None else text_ids(given.text, tokenizer),
        opening_of(tokenizer),
        context_tokens=given.context_tokens,
        behind=1 + given.scored_tokens,
        documents=given.documents,
    )
    how = {"context_tokens": given.context_tokens, "gates": gates, "seed": given.seed}
    shown = iter(tqdm(pieces, desc="pieces", unit="piece"))
    readings = list(read_pieces(model, shown, policies, given.keep_ratio, **how))
    rows = summarise(readings)
    record = {
        "schema": 1,
        "command": command,
        "made": made_by(given, model, started),
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

"""Runs that nobody ran, for claims: rates of right answers in, rows, manifests and parts out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retain.eval.claims.check import check_claim
from retain.eval.claims.claim import CheckedClaim, Line, Parts, load_claims
from retain.eval.claims.runs import parts_of
from retain.eval.stats.summary import Scores, gather
from tests.eval.made_rows import make_row

FAMILY = {"copy": "seen", "pair": "seen", "odd": "held-out"}
SEEDS = (0, 1, 2)
# (regime, policy, budget) -> share of right answers on each task, in steps of 1 / 40.
Place = tuple[str, str, float]
Rates = Mapping[Place, tuple[float, float, float]]
RATES: Rates = {
    ("context_only", "full", 1.0): (1.0, 1.0, 1.0),
    **{
        ("context_only", policy, budget): rates
        for budget in (0.1, 0.2)
        for policy, rates in {
            "snapkv": (0.2, 0.4, 0.5),
            "keydiff": (0.4, 0.3, 0.1),
            "gate": (0.5, 0.6, 0.3),
            "fused": (0.9, 0.8, 0.7),
            "oracle": (0.9, 0.9, 0.8),
        }.items()
    },
    ("query_aware", "full", 1.0): (1.0, 1.0, 1.0),
    ("query_aware", "snapkv", 0.4): (0.9, 0.9, 0.9),
    ("query_aware", "keydiff", 0.4): (0.4, 0.9, 0.9),
    ("query_aware", "gate", 0.4): (0.5, 0.9, 0.9),
    ("query_aware", "fused", 0.4): (0.9, 0.9, 0.9),
    ("query_aware", "oracle", 0.4): (1.0, 0.9, 0.9),
}
SIDES = ("fused", "gate", "oracle")
FILE = load_claims()
CLAIMS = {claim.name: claim for claim in FILE.claims}
WANTED_IN, WANTED_AT = CLAIMS["not worse"].rows[0].regimes, CLAIMS["not worse"].rows[0].keep_ratios


def make_rows(rates: Rates, items: int = 40, seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    """Item i is right for whoever has a rate above `((7 i + 3 seed) mod items) / items`: skills nest."""
    return [
        make_row(*cell, task, family, seed, item, (7 * item + 3 * seed) % items < rate * items - 1e-9)
        for cell, own in rates.items()
        for (task, family), rate in zip(FAMILY.items(), own, strict=True)
        for seed in seeds
        for item in range(items)
    ]


def changed(**policies: tuple[float, float, float]) -> dict[Place, tuple[float, float, float]]:
    """The rates of context_only alone, with those of some policies replaced."""
    kept = {cell: own for cell, own in RATES.items() if cell[0] == "context_only"}
    return {cell: policies.get(cell[1], own) for cell, own in kept.items()}


def scores_of(rates: Rates, **options: Any) -> Scores:
    return gather(make_rows(rates, **options), list(FAMILY))


def named(scores: Scores, **more: Any) -> Parts:
    manifests = more.pop("manifests", [{}])
    return parts_of(scores, manifests, **{"policy": "fused", "gate": "gate", "oracle": "oracle"} | more)


def checked(name: str, scores: Scores, parts: Parts | None = None) -> CheckedClaim:
    """A claim of configs/claims/fused.yaml on a run."""
    return check_claim(CLAIMS[name], scores, named(scores) if parts is None else parts, resamples=500)


def complete(rates: Rates) -> Rates:
    """With what is wanted and is not there: places where everybody answers alike, without an oracle where
    there can be none."""
    found = {}
    for regime in WANTED_IN:
        found[regime, "full", 1.0] = (1.0, 1.0, 1.0)
        for budget in WANTED_AT:
            for name in ("snapkv", "keydiff", "gate", "fused", "oracle"):
                if name != "oracle" or regime in ("context_only", "query_aware"):
                    found[regime, name, budget] = (0.9, 0.9, 0.9)
    return {**found, **rates}


def line_of(claim: CheckedClaim, *place: Any) -> Line:
    """The line of a regime, budget, task family and, where there are several, opponent."""
    (found,) = [
        line
        for line in claim.lines
        if (line.regime, line.budget, line.family, line.against)[: len(place)] == place
    ]
    return found


def make_manifest(**changes: Any) -> dict[str, Any]:
    tasks = {
        name: {"family": family, "metric": "exact match", "primary": "exact", "version": 1}
        for name, family in FAMILY.items()
    }
    return {
        "run": "made",
        "config": {"suite": "stub", "first_item": FILE.conditions.first_item},
        "tasks": tasks,
        "identity": {"gates": {str(seed): {"sha256": f"{seed}" * 64} for seed in SEEDS}},
        "code_states": [{"commit": "a" * 40, "clean": True}],
        "finished": "2026-01-02T03:04:05+00:00",
        **changes,
    }


def write_run(folder: Path, manifest: dict[str, Any], rates: Rates, items: int) -> Path:
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = [json.dumps(row) for row in make_rows(rates, items)]
    (folder / "items.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


SCORES = scores_of(RATES)
PARTS = named(SCORES)

"""A run that nobody ran: rows, manifest and side files of two regimes, by a rule that can be worked out."""

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from retain.eval.run.results_store import ITEMS, MANIFEST, REFERENCES, Reference, Row, tokens_sha
from retain.eval.tasks.suite import Task

HOSTILE = "<script>alert('kept')</script>"
TASKS = {
    "copy": Task("copy", "seen", "three tokens, in order"),
    "pair": Task("pair", "seen", "two tokens"),
    "ruler/vt": Task(
        *("ruler/vt", "held-out", "variables on a chain"),
        metric="ruler_all",
        provenance="ruler-like",
        source="https://example.org/ruler & others",
        licence="Apache-2.0",
    ),
    "niah/grid": Task(
        "niah/grid", "held-out", "one needle", metric="ruler_all", provenance="synthetic", source="generated"
    ),
}
REGIMES = ("context_only", "query_aware")
BUDGETS = (0.1, 0.2, 0.4)
# How often of 100 a policy is right at the middle budget; `h2o` and `snapkv` answer alike.
SKILL = {"random": 15, "recency": 25, "snapkv": 55, "h2o": 55, "gate": 80, "duoattention": 60, "oracle": 93}
SKILL[f"odd{HOSTILE}"] = 50
ITEMS_PER_TASK = 11


def right(policy: str, task: str, seed: int, item: int, regime: str, budget: float) -> bool:
    """Whether a policy answers an item; skills nest, so that a better policy is right wherever a worse is.
    Only duoattention is right elsewhere: it differs often, and both ways."""
    place = (item * 37 + seed * 11 + 7 * list(TASKS).index(task) + 50 * (policy == "duoattention")) % 100
    if policy == "full":
        return place < 96
    skill = SKILL[policy] * {0.1: 0.7, 0.2: 1.0, 0.4: 1.25}[budget] + 8 * (regime == "query_aware")
    return place < min(95, skill)


def make_rows(policies: tuple[str, ...] = tuple(SKILL)) -> list[Row]:
    """Every row of the run."""
    return [
        _row(seed, task, item, regime, policy, budget)
        for seed, task, item, regime in product((0, 1), TASKS, range(ITEMS_PER_TASK), REGIMES)
        for policy in ("full", *policies)
        for budget in ((1.0,) if policy == "full" else BUDGETS)
    ]


def _row(seed: int, task: str, item: int, regime: str, policy: str, budget: float) -> Row:
    hit = right(policy, task, seed, item, regime, budget)
    null = policy == "random" and item == 3 and budget == 0.1 and not hit
    kept = round(8000 * budget)
    about: dict[str, str | float] = {}
    if task == "niah/grid":
        about = {"depth": (item % 11) / 10, "length": float(250 * (1 + item % 4))}
    tokens = () if null else (item, int(hit))
    values: dict[str, Any] = {
        **{"run": "made", "unit": f"seed{seed}/{task}/{item}"},
        "unit_rows": len(REGIMES) * (1 + len(SKILL) * len(BUDGETS)),
        **{"seed": seed, "task": task, "family": TASKS[task].family, "item": item, "question": 0},
        **{"regime": regime, "policy": policy, "base_policy": policy, "protection": "preset"},
        **{"budget": budget, "keep_ratio": kept / 8000},
        **dict.fromkeys(("score", "exact", "partial"), float(hit)),
        **{"null": null, "ended": True, "num_prompt": 1010, "num_generated": len(tokens)},
        **{"kept_entries": kept, "seen_entries": 8000, "peak_entries": kept + 16},
        **{"bytes_held": 128 * kept, "bytes_full": 128 * 8000},
        "gate_bytes": 4096 if policy == "gate" else 0,
        "gates": "f" * 12 if policy == "gate" else "",
        "trained": policy == "gate",
        **{"tokens": tokens, "tokens_sha": tokens_sha(tokens)},
        "text": "" if null else ("right" if hit else HOSTILE),
        "about": about,
        "needles_kept": budget if task == "niah/grid" else None,
    }
    return Row(**values)


def make_manifest(*, clean: bool = True, run: str = "made") -> dict[str, Any]:
    """Of the run."""
    return {
        "run": run,
        "command": "python eval/compare.py --config configs/compare/made.yaml",
        "config": {
            "run": run,
            "results": "results",
            "seeds": [0, 1],
            "suite": "stub",
            "model": "reference:0",
            "gates": "runs/gates-seed{seed}",
            "policies": ["random", "recency", "snapkv", "h2o", "gate", "oracle"],
            "keep_ratios": list(BUDGETS),
            "context_tokens": 1000,
            "control_documents": 20,
            "margin_points": 2.0,
            "resamples": 300,
            "note": HOSTILE,
        },
        "identity_sha": "0123456789abcdef",
        "identity": {"models": {"0": "ab" * 32, "1": "cd" * 32}},
        "tasks": {
            name: {
                part: getattr(task, part)
                for part in ("family", "metric", "primary", "provenance", "source", "licence", "version")
            }
            for name, task in TASKS.items()
        },
        "code_states": [{"commit": "a" * 40, "clean": clean}],
        "environment": {
            "python": "3.11.7",
            "device": "cpu",
            "processor": "a processor",
            "versions": {"retain": "0.1.0", "torch": "2", "triton": None},
        },
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        "started": "2026-01-02T03:00:00+00:00",
        "finished": "2026-01-02T03:04:05+00:00",
    }


def make_kept() -> dict[str, Any]:
    """Two documents of which policies kept some: (place, policy) decide."""
    documents = []
    for number in range(2):
        words = f"{HOSTILE} The key of door {number} is 7 4 1 .\n  Then it rained .".split(" ") * 12
        tokens = [f" {word}" for word in words]
        kept = []
        for policy in (*SKILL,):
            for budget in BUDGETS:
                layers = [
                    [
                        min(2, (place * 7 + 3 * layer + len(policy)) % 11 // round(11 * (1 - budget)) * 2)
                        for place in range(len(tokens))
                    ]
                    for layer in range(4)
                ]
                rows = [sum(own) for own in zip(*layers, strict=True)]
                kept.append({"policy": policy, "budget": budget, "rows": rows, "layers": layers})
        documents.append(
            {
                "name": f"copy, seed 0, item {number}",
                "tokens": tokens,
                "question": f"what opens {HOSTILE}?",
                "references": ["7 4 1"],
                "needles": [[1, 9]],
                "of": 8,
                "heads": [2, 2, 2, 2],
                "kept": kept,
            }
        )
    command = "python -m retain.eval.report.kept --config configs/compare/made.yaml"
    return {"schema": 1, "command": command, "made": {"layers": [0, 1, 2, 3]}, "documents": documents}


def make_diagnostics() -> dict[str, Any]:
    """Two policies over four steps, two layers of two heads."""
    names = ["snapkv", "gate"]
    curve = {
        "coverage_mean": [0.9, 0.8, 0.7, 0.6],
        "coverage_min": [0.5, 0.4, 0.3, 0.2],
        "kl": [0.1, 0.2, None, 0.4],
    }
    return {
        "schema": 1,
        "command": "python -m retain.eval.diagnose --model reference:0 --out results/made",
        "made": {
            "model": "reference:0",
            "regime": "context_only",
            "keep_ratio": 0.2,
            "policies": names,
            "documents": 2,
            "layers": [0, 3],
            "kv_heads": [2, 2],
        },
        "documents": [{"document": 0, "name": "first"}],
        "summary": {
            name: {"coverage_mean": 0.75, "coverage_worst": 0.2, "kl": None, "agreement": 0.9}
            for name in ("full", *names)
        },
        "curves": dict.fromkeys(names, curve),
        "curves_documents": [2, 2, 2, 1],
        "maps": {name: {"kept_share": [[0.1, 0.3], [0.25, 0.15]]} for name in ("full", *names)},
        "jaccard": {
            "policies": names,
            "mean": [[1.0, 0.25], [0.25, 1.0]],
            "identical": [[1.0, 0.0], [0.0, 1.0]],
        },
        "documents_view": {
            "document": 0,
            "tokens": ["a", " b", HOSTILE],
            "of": 4,
            "kept": {"full": [4, 4, 4], "snapkv": [0, 2, 4], "gate": [1, 0, 3]},
        },
    }


def make_speed() -> dict[str, Any]:
    """Full cache and one policy, two batches, and one that ran out of memory."""

    def spread(value: float) -> dict[str, Any]:
        own = {"median": value, "p5": value * 0.8, "p20": value * 0.9, "p80": value * 1.1, "p95": value * 1.2}
        return own | {"all": [value]}

    def row(policy: str, ratio: float, batch: int) -> dict[str, Any]:
        full = policy == "full"
        return {
            "policy": policy,
            "kind": "full" if full else "policy",
            "keep_ratio": ratio,
            "batch": batch,
            "failed": "",
            "achieved_keep_ratio": ratio,
            "ttft_ms": spread(20.0 + 4 * (not full)),
            "token_ms": spread(3.0 + ratio),
            "tokens_per_s": spread(batch * 1000 / (3.0 + ratio)),
            "ttft_over_plain": spread(1.1),
            "token_over_plain": spread(0.9),
            "ttft_over_full": None,
            "token_over_full": None,
            "peak_bytes": {"prefill": 9_000_000, "decode": None},
            "cache_bytes": {"held": round(1e6 * ratio * batch), "allocated": 1_000_000, "full": 1_000_000},
        }

    rows = [
        row(name, ratio, batch)
        for batch in (1, 4)
        for name, ratio in (("full", 1.0), ("snapkv", 0.1), ("snapkv", 0.2), ("snapkv", 0.4))
    ]
    lost = {"policy": "gate", "kind": "policy", "keep_ratio": 0.2, "batch": 4, "failed": "out of memory"}
    return {
        "what": "serving",
        "date": "2026-01-02",
        "command": "python -m retain.eval.speed --output results/made/speed.json",
        "model": {"name": "random", "parameters": 1_000_000},
        "peak_of": "process: resident memory beyond the weights",
        "rows": [*rows, lost],
    }


def make_run(
    folder: Path, *, clean: bool = True, measured: bool = True, policies: tuple[str, ...] = tuple(SKILL)
) -> Path:
    """Write the run's folder; with `measured`, its side files too."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(asdict(row)) for row in make_rows(policies))
    (folder / ITEMS).write_text("".join(f"{line}\n" for line in lines))
    asked = [
        Reference(seed, task, item, 0, "0" * 12, 1000, (1, 2), (item, 1), ("right",))
        for seed in (0, 1)
        for task in TASKS
        for item in range(ITEMS_PER_TASK)
    ]
    (folder / REFERENCES).write_text("".join(f"{json.dumps(asdict(own))}\n" for own in asked))
    (folder / MANIFEST).write_text(json.dumps(make_manifest(clean=clean)))
    if measured:
        files = {"diagnostics": make_diagnostics(), "speed": make_speed(), "kept": make_kept()}
        for name, made in files.items():
            (folder / f"{name}.json").write_text(json.dumps(made))
    return folder

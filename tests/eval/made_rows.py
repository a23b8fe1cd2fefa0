"""One row of `items.jsonl` that nobody measured."""

from typing import Any


def make_row(
    regime: str, policy: str, budget: float, task: str, family: str, seed: int, item: int, right: float
) -> dict[str, Any]:
    return {
        "unit": f"{task}/{seed}",
        **{"regime": regime, "policy": policy, "budget": budget, "keep_ratio": budget},
        **{"task": task, "family": family, "seed": seed, "item": item, "question": 0},
        **dict.fromkeys(("score", "exact", "partial"), float(right)),
        **{"kept_entries": round(1000 * budget), "seen_entries": 1000},
        **{"bytes_held": round(64000 * budget), "bytes_full": 64000},
    }

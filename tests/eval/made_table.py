"""Makes a run's folder whose scores are known: five policies, two budgets, two tasks of 20 items."""

import json
from pathlib import Path
from typing import Any

# Share of items that a policy answers right, by budget.
RIGHT = {
    "full": {1.0: 0.9},
    "random": {0.1: 0.2, 0.2: 0.3},
    "snapkv": {0.1: 0.4, 0.2: 0.6},
    "gate": {0.1: 0.7, 0.2: 0.6},
    "learned": {0.1: 0.9, 0.2: 0.9},
    "oracle": {0.1: 1.0, 0.2: 1.0},
}
GATED = ("gate", "learned")
ITEMS, ENTRIES = 20, 1000


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Lines of the table, as `retain.eval.run.table.Line` has them."""
    return [
        {
            **{"run": "made", "model": "reference:0", "gates": "gates" if policy in GATED else None},
            **{"policy": policy, "keep_ratio": ratio, "budget": f"keep_ratio={ratio:g}"},
            **{"when": "prefill", "question": "unknown", "protection": "own", "task": task, "stratum": task},
            **{"item": item, "context_id": f"{task}-{item}", "seed": 0},
            "score": float(item < share * ITEMS),
            **{"entries_held": int(ratio * ENTRIES), "entries_seen": ENTRIES},
            **{"bytes_held": int(ratio * ENTRIES) * 64, "bytes_seen": ENTRIES * 64},
            **{"seconds": 0.1, "tokens": 3, "text": f"answer {item}", "identity": "0" * 16},
            **changes,
        }
        for policy, shares in RIGHT.items()
        for ratio, share in shares.items()
        for task in ("facts/number", "niah_grid")
        for item in range(ITEMS)
    ]


def write(folder: Path, lines: list[dict[str, Any]] | None = None, asked: Any = None, **config: Any) -> Path:
    """A folder with `results.jsonl` and `manifest.json`, whose config asks for the rows `asked`, or all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in (rows() if lines is None else lines))
    (folder / "results.jsonl").write_text(text, encoding="utf-8")
    manifest = {
        "config": {"run": "made", "margin_points": 2.0, "resamples": 500, "context_tokens": 900, **config},
        "identity": {},
        **({} if asked is None else {"rows": asked}),
        "model": "reference:0",
        "code": {"commit": "0123456789abcdef", "clean": False},
        "versions": {"torch": "2.13.0", "triton": None},
        "command": "retain compare reference:0",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder

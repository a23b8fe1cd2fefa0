"""A small comparison on the reference model, and its lines without a folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import retain
from retain.eval.compare import identity_of_run
from retain.eval.config import CompareConfig
from retain.eval.run.checks import load_checked
from retain.eval.run.measure import measure
from retain.eval.run.plan import Context, units_of
from retain.eval.run.table import Line
from retain.eval.tryout import TEXT
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.reference import load_model

HEADS = 4 * 2  # of all layers of the reference model
ENTRY_BYTES = 2 * 64 * 4


def small(folder: Path, **changes: Any) -> CompareConfig:
    """Two items of two tasks, two policies, one budget; `folder` holds results, and `gates` if it has any."""
    config = CompareConfig(
        run="small",
        tasks=("reference/single", "reference/lists"),
        policies=("random", "snapkv"),
        keep_ratios=(0.5,),
        items_per_task=2,
        context_tokens=150,
        gates=str(folder / "gates"),
        resamples=200,
        results=str(folder / "results"),
    )
    return replace(config, **changes)


def save_small_gates(folder: Path, seed: int = 0, family: str = "linear", **settings: Any) -> Path:
    """Untrained gates of the reference model that tell entries apart."""
    model = load_model()
    gates = retain.new_gates(model, family, seed=seed, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in gates.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    save_gates(gates, folder, fingerprint=fingerprint(model))
    return folder


def save_table(path: Path, *, questions: int = 1, shorter: int = 0, new_tokens: int = 4) -> str:
    """Three contexts of a text, each `shorter` characters shorter than the one before, with questions."""
    text = TEXT.read_text(encoding="utf-8")
    asked = ("What comes next?", "Who waits at the pier, and for whom?", "When?")[:questions]
    rows = [
        {"context": text[500 * i : 500 * i + 400 - shorter * i], "question": f"\n{question}\n"}
        for i in range(3)
        for question in asked
    ]
    more = {"answers": ["the ferry"], "max_new_tokens": new_tokens}
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    return str(path)


def lines_of(config: CompareConfig, change: Callable[[Context], Context] = lambda same: same) -> list[Line]:
    """Measures a comparison in this process, without its folder; times are left out."""
    loaded, contexts = load_checked(config)
    identity = identity_of_run(config, loaded) | {"tasks": dict.fromkeys(contexts, {})}
    changed = [change(context) for of_task in contexts.values() for context in of_task]
    units = units_of(config, changed, identity)
    return [replace(line, seconds=0.0) for unit in units for line in measure(config, loaded, unit, ())]

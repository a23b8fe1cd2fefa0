"""What each policy keeps of a few documents, token by token: `kept.json`, for the document view of a page.

    python -m retain.eval.report.kept --config configs/compare/report.yaml [key=value ...] [--documents 3]

It holds the tokens of the first item of a few tasks, and for every policy and budget how many (layer, KV
head) pairs keep each, in all and by layer. Scores and decisions come from the functions that the comparison
itself evicts with, on the same items, seeds and prefill: what is shown is what was measured.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from retain.config import load
from retain.eval.config import SHARED, CompareConfig, lines_of, suite_of, with_all_tasks
from retain.eval.run.caches import Batch, Prefill
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import EvaluatedModel, Unit, load_evaluated
from retain.eval.tasks.suite import Item, Suite
from retain.process.command import command
from retain.process.provenance import code_state, environment, now, write_text

KEPT = "kept.json"


@torch.inference_mode()
def collect(
    config: CompareConfig,
    suite: Suite,
    texts_of: Callable[[Sequence[int]], list[str]],
    *,
    command: str,
    documents: int = 3,
) -> dict[str, Any]:
    """Prefill the first item of a few tasks, those that say where their needles are first, and decide.

    Args:
        config: Checked before (`retain.eval.run.checks.check`).
        suite: That it names.
        texts_of: What each token of a sequence says.
        command: The line that was typed.
        documents: How many, at most one a task.

    Returns:
        What `kept.json` holds.

    Raises:
        ValueError: If the config has no regime that evicts once.
    """
    regime = next((own for own in config.regimes if own in SHARED), None)
    if regime is None:
        raise ValueError(
            f"{KEPT} shows what is kept by one eviction behind the prompt, and regimes are "
            f"{', '.join(config.regimes)}: add one of {', '.join(SHARED)} (regimes=[context_only])."
        )
    if documents < 1:
        raise ValueError(f"documents must be at least 1, got {documents}.")
    seed = config.seeds[0]
    first = config.first_item
    items = {
        task: suite.item(task, seed, first, config.context_tokens) for task in with_all_tasks(config, suite)
    }
    chosen = sorted(items, key=lambda task: not items[task].needles)[:documents]
    evaluated = load_evaluated(config, suite, seed)
    started = now()
    made = [_document(config, suite, evaluated, task, items[task], regime, texts_of) for task in chosen]
    return {
        "schema": 1,
        "command": command,
        "made": {
            "run": config.run,
            "seed": seed,
            "regime": regime,
            "layers": made[0].pop("layer_idx"),
            "code": code_state(Path(__file__).parent),
            "environment": environment(evaluated.device.type, 0),
            "started": started,
            "finished": now(),
        },
        "documents": [{name: own for name, own in one.items() if name != "layer_idx"} for one in made],
    }


def _document(
    config: CompareConfig,
    suite: Suite,
    evaluated: EvaluatedModel,
    task: str,
    item: Item,
    regime: str,
    texts_of: Callable[[Sequence[int]], list[str]],
) -> dict[str, Any]:
    index = config.first_item
    unit = Unit(evaluated.seed, task, index, index + 1)
    step = next(Prefill(Batch(config, suite, evaluated, unit, {index: item})).evictions(regime))
    kept = []
    for line in lines_of(config, regime):
        for budget in config.budgets:
            layers_LT = torch.stack([keep_BHT[0].sum(0).cpu() for keep_BHT in step.keeps(line, budget)])
            kept.append(
                {
                    "policy": line.name,
                    "budget": budget,
                    "rows": layers_LT.sum(0).tolist(),
                    "layers": layers_LT.tolist(),
                }
            )
    heads = [layer.num_heads for layer in step.evidence]
    asked = item.asked[0]
    right = list(asked.references) or ["".join(texts_of(asked.gold_ids)).strip()]
    return {
        "name": f"{task}, seed {evaluated.seed}, item {index}, {regime}",
        "task": task,
        "seed": evaluated.seed,
        "item": index,
        "regime": regime,
        "tokens": texts_of([*item.context_ids, *item.question_ids][: step.evidence[0].num_seen]),
        "question": "".join(texts_of(asked.question_ids)).strip(),
        "references": right,
        "needles": [list(span) for span in item.needles],
        "of": sum(heads),
        "heads": heads,
        "kept": kept,
        "layer_idx": [layer.layer_idx for layer in step.evidence],
    }


def token_texts(config: CompareConfig) -> Callable[[Sequence[int]], list[str]]:
    """What each token says to the model of a config, one by one; a part of a character is shown as such."""
    if config.suite == "text":
        from retain.hf.model.named import load_named_tokenizer

        name = config.model.replace("{seed}", str(config.seeds[0]))
        own = config.text
        tokenizer = load_named_tokenizer(name, revision=own.revision, trust_remote_code=own.trust_remote_code)
    elif config.suite == "reference":
        from retain.reference import load_tokenizer

        tokenizer = load_tokenizer()
    else:
        return lambda ids: [f" {token}" for token in ids]
    return lambda ids: [tokenizer.decode([token]) for token in ids]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, decide, write."""
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = argparse.ArgumentParser(description="Write what each policy keeps of a few documents.")
    parser.add_argument("--config", required=True, help="YAML of the comparison")
    parser.add_argument("--documents", type=int, default=3, help="at most one a task (default 3)")
    parser.add_argument("--out", type=Path, help=f"file (default: {KEPT} in the run's folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    given = parser.parse_intermixed_args(arguments)
    config = load(given.config, CompareConfig, given.overrides)
    suite = suite_of(config)
    check(config, suite)
    command = shlex.join(["python", "-m", "retain.eval.report.kept", *typed])
    made = collect(config, suite, token_texts(config), command=command, documents=given.documents)
    path = given.out or config.folder / KEPT
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(made, separators=(",", ":")) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

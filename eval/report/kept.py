"""Records the tokens that each policy keeps of a few documents: `kept.json`, for the document view of a page.

    python -m retain.eval.report.kept --config configs/compare/report.yaml [key=value ...] [--documents 3]

It holds the tokens of the first item of a few tasks, and for every policy and budget how many (layer, KV
head) pairs keep each, in all and by layer. Scores and decisions come from the functions that the comparison
itself evicts with, on the same items, seeds and prefill.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from retain.config import load
from retain.eval.config import SHARED, CompareConfig, config_parser, lines_of, suite_of, with_all_tasks
from retain.eval.run.caches import Batch, Prefill
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import Unit, load_evaluated
from retain.eval.tasks.suite import Suite
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
        texts_of: The text of each token of a sequence.
        documents: How many, at most one a task.

    Returns:
        The content of `kept.json`.

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
    seed, index = config.seeds[0], config.first_item
    items = {
        task: suite.item(task, seed, index, config.context_tokens) for task in with_all_tasks(config, suite)
    }
    evaluated = load_evaluated(config, suite, seed)
    started, made = now(), []
    for task in sorted(items, key=lambda task: not items[task].needles)[:documents]:
        item, unit = items[task], Unit(seed, task, index, index + 1)
        step = next(Prefill(Batch(config, suite, evaluated, unit, {index: item})).evictions(regime))
        kept = []
        for line in lines_of(config, regime):
            for budget in config.budgets:
                layers_LT = torch.stack([keep_BHT[0].sum(0).cpu() for keep_BHT in step.keeps(line, budget)])
                counts = {"rows": layers_LT.sum(0).tolist(), "layers": layers_LT.tolist()}
                kept.append({"policy": line.name, "budget": budget, **counts})
        heads, asked = [layer.num_heads for layer in step.evidence], item.asked[0]
        made.append(
            {
                "name": f"{task}, seed {seed}, item {index}, {regime}",
                "task": task,
                "seed": seed,
                "item": index,
                "regime": regime,
                "tokens": texts_of([*item.context_ids, *item.question_ids][: step.evidence[0].num_seen]),
                "question": "".join(texts_of(asked.question_ids)).strip(),
                "references": list(asked.references) or ["".join(texts_of(asked.gold_ids)).strip()],
                "needles": [list(span) for span in item.needles],
                "of": sum(heads),
                "heads": heads,
                "kept": kept,
            }
        )
        layers = [layer.layer_idx for layer in step.evidence]
    about = {
        "run": config.run,
        "seed": seed,
        "regime": regime,
        "layers": layers,
        "code": code_state(Path(__file__).parent),
        "environment": environment(evaluated.device.type, 0),
        "started": started,
        "finished": now(),
    }
    return {"schema": 1, "command": command, "made": about, "documents": made}


def token_texts(config: CompareConfig) -> Callable[[Sequence[int]], list[str]]:
    """A function that decodes token ids one by one, with the tokenizer of a config's model."""
    if config.suite == "text":
        from retain.models.named import load_named_tokenizer

        own, name = config.text, config.model
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
    about = "Write what each policy keeps of a few documents."
    parser = config_parser(CompareConfig, "configs/compare/report.yaml", description=about)
    parser.add_argument("--documents", type=int, default=3, help="at most one a task (default 3)")
    parser.add_argument("--out", type=Path, help=f"file (default: {KEPT} in the run's folder)")
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

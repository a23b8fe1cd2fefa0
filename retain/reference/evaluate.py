"""Measures full-cache accuracy by generation: `python -m retain.reference.evaluate --seed 0`.

Prints exact match and its standard error a task, for a seed of the reference model or a folder (`--model`).
The answer's length is given (`<eos>` is not taken before), its tokens are not: nothing is teacher-forced,
because a task can be 92 % right forced and 0 % right free.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from retain.process.command import command
from retain.reference.documents import Writer
from retain.reference.items import TASKS, write_item
from retain.reference.model import load_folder, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Exact match that a shipped model reaches.
MINIMUM = dict.fromkeys(("single", "multikey", "multiquery", "tracing"), 0.98)
MINIMUM |= {"multivalue": 0.92, "common": 0.88}


@torch.inference_mode()
def accuracy(
    model: PreTrainedModel,
    *,
    items: int = 200,
    context_tokens: int = 1000,
    seed: int = 7,
    tasks: tuple[str, ...] = TASKS,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Measure exact and partial match a task (`TASKS`), on text of the `eval` split.

    Args:
        model: A reference model.
        items: Items a task.
        context_tokens: Length of each context; question and answer come on top.
        seed: Of the documents.
        tasks: Names in `TASKS`.
        batch_size: Items that are read together.
    """
    results = {}
    for task in tqdm(tasks, desc="full cache"):
        writer = Writer("eval", seed)
        drawn = [write_item(writer, task, context_tokens) for _ in range(items)]
        scores: list[tuple[float, float]] = []
        # Prompts of a task have the same length.
        for start in range(0, items, batch_size):
            chosen = drawn[start : start + batch_size]
            prompt = torch.tensor([context + asked.ids for context, asked in chosen], device=model.device)
            count = max(asked.generate for _, asked in chosen)
            output = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
            generated = output[:, prompt.shape[1] :].tolist()
            scores += [asked.score(own) for (_, asked), own in zip(chosen, generated, strict=True)]
        exact = sum(score for score, _ in scores) / items
        results[task] = {
            "exact": round(exact, 4),
            "standard_error": round((exact * (1 - exact) / items) ** 0.5, 4),
            "partial": round(sum(score for _, score in scores) / items, 4),
            "items": items,
        }
    return results


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print accuracies, and whether they reach the required ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the reference model")
    parser.add_argument("--items", type=int, default=200, help="a task")
    parser.add_argument("--context-tokens", type=int, default=1000)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--model", type=Path, default=None, help="folder of `retain.reference.train --size`")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:1 (default cpu)")
    parser.add_argument("--batch-size", type=int, default=8, help="items read together")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    given = parser.parse_args(arguments)
    model: Any = load_model(given.seed) if given.model is None else load_folder(given.model)
    results = accuracy(
        model.to(given.device),
        items=given.items,
        context_tokens=given.context_tokens,
        tasks=tuple(given.tasks),
        batch_size=given.batch_size,
    )
    for task, row in results.items():
        least = MINIMUM.get(task, 0.0)
        verdict = f"  below {least:.2f}" if row["exact"] < least else "  ok" if least else ""
        print(
            f"{task:12s} exact {row['exact']:.3f} +- {row['standard_error']:.3f}  "
            f"partial {row['partial']:.3f}{verdict}"
        )
    if given.output is not None:
        record = {
            "seed": given.seed if given.model is None else None,
            "model": None if given.model is None else str(given.model),
            "context_tokens": given.context_tokens,
            "tasks": results,
        }
        given.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

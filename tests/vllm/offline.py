"""What `retain.Cache` does with documents outside any engine, in a process of its own (as
`tests.vllm.oracle`, whose cases it answers too).

python -m tests.vllm.offline TASKS.json RESULTS.json
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.vllm.oracle import answer

ROOT = Path(__file__).resolve().parents[2]


def ask(tasks: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Do tasks in a process of their own.

    Args:
        tasks: see `do`.
        folder: for what is said and answered.
    """
    asked, answered = folder / "tasks.json", folder / "results.json"
    asked.write_text(json.dumps(tasks))
    command = [sys.executable, "-m", "tests.vllm.offline", str(asked), str(answered)]
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(answered.read_text())


def do(task: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """One task.

    Args:
        task: `make`, the seed of a reference model that is saved to `model`; or `save`, the path of a file
            that a cache with the settings `cache` of the tokens `document` is saved to; or `load`, the path
            of one that goes on with the tokens `rest` and `new` others; or a case of the oracle.
        models: those that were loaded, by their folders.
    """
    import retain

    if "make" in task:
        from retain.reference.model import load_model
        from retain.reference.tokenizer import load_tokenizer

        load_model(task["make"]).save_pretrained(task["model"])
        load_tokenizer().save_pretrained(task["model"])
        return {}
    if task["model"] not in models:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
        retain.attach(model)
        models[task["model"]] = model
    model = models[task["model"]]
    if "save" in task:
        cache = retain.Cache(model, **task["cache"])
        cache.prefill(torch.tensor([task["document"]])).save(task["save"])
        return {}
    if "load" in task:
        return {"tokens": _go_on(model, retain.Cache.load(task["load"], model), task["rest"], task["new"])}
    return answer(model, task)


@torch.no_grad()
def _go_on(model: Any, cache: Any, rest: Sequence[int], new: int) -> list[int]:
    """Greedy tokens behind what a cache holds and the rest of a prompt."""
    tokens: list[int] = []
    logits = model(input_ids=torch.tensor([list(rest)]), past_key_values=cache).logits
    while len(tokens) < new:
        tokens.append(int(logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache).logits
    return tokens


def main(tasks_file: str, results_file: str) -> None:
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    results = [do(task, models) for task in json.loads(Path(tasks_file).read_text())]
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

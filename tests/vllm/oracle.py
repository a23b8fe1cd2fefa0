"""Answers cases with transformers and `retain.Cache`, in a process of its own, since vLLM changes classes of
transformers in its process.

`python -m tests.vllm.oracle` reads a JSON task a line and prints its result. A task is a case (`answer`), or
makes what cases need (`make`).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.vllm.engine import PAGE, places_of

ROOT = Path(__file__).resolve().parents[2]


@cache
def model_in(folder: str) -> Any:
    """The model in a folder, attached."""
    from transformers import AutoModelForCausalLM

    import retain

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    retain.attach(model)
    return model


@lru_cache(maxsize=256)  # 10 MB a prompt
def read(folder: str, tokens: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    """A cache that holds a prompt whole with all that policies look at, and the logits behind it."""
    import retain

    model, ids = model_in(folder), torch.tensor([tokens])
    whole = retain.Cache(model, "recency", keep_ratio=0.5)
    whole.prefill(ids, evict=False, hold_evidence=True)
    return whole, model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]


@torch.no_grad()
def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens, the margins between the first two, and the positions that each head keeps.

    Args:
        case: `model`, a folder; `cache`, the settings of the plug-in, None for a full cache; `prompt`; `new`,
            tokens to generate; `entries`, lists of layer, head and position of which is asked whether noise
            moves them.
    """
    model, prompt = model_in(case["model"]), case["prompt"]
    whole, logits = read(case["model"], tuple(prompt))
    fragile = fragile_entries(case, whole.evidence) if "entries" in case else []
    held = whole.fork()
    masks = keep_masks(case, held.evidence)
    held.evict_with(masks)
    found: dict[str, Any] = {"length": len(prompt), "tokens": [], "margins": []}
    found |= {"kept": places_of([mask[0] for mask in masks]), "fragile": fragile}
    for _ in range(case["new"]):
        logits = logits.float()
        top = logits.topk(2)
        found["tokens"].append(int(top.indices[0, 0]))
        found["margins"].append(float(top.values[0, 0] - top.values[0, 1]))
        logits = model(input_ids=top.indices[:, :1], past_key_values=held).logits[:, -1]
    return found


def fragile_entries(case: dict[str, Any], shown: Sequence[Any]) -> list[bool]:
    """Which of the entries asked for are kept or not by noise of 1e-5 in what they are ranked by.

    Where heads share a budget and a share of it is drawn, two numbers that are almost alike in one head can
    move the cut of another.
    """
    draws = [keep_masks(case, shown, noise=1e-5, seed=seed) for seed in range(16)]
    return [
        len({bool(masks[layer][0, head, place]) for masks in draws}) == 2
        for layer, head, place in case["entries"]
    ]


def keep_masks(
    case: dict[str, Any], shown: Sequence[Any], noise: float = 0.0, seed: int = 0
) -> list[torch.Tensor]:
    """Keep masks `[1, H, T]` of a prompt, one per layer.

    Args:
        case: as of `answer`.
        shown: the evidence of each layer.
        noise: relative, of the scores.
        seed: of the noise.
    """
    import retain
    from retain.budget.statement import Budget
    from retain.policy import candidates_of, load_policy, score_entries, shape_of
    from retain.vllm.packing.whole_pages import keep_pages
    from retain.vllm.settings import Rules

    settings, T = case["cache"], len(case["prompt"])
    whole = [layer.exists_BHT for layer in shown]
    if settings is None:
        return whole
    budget = Budget(settings.get("keep_ratio"), settings.get("tokens_per_head"))
    policy, gates = load_policy(settings["policy"], settings.get("overrides", ())), settings.get("gates")
    gates = gates and retain.load_gates(gates, model_in(case["model"]))
    rules = Rules(policy, PAGE, [shape_of(layer) for layer in shown])
    if rules.kept(T, budget) == T // PAGE:
        return whole
    draw, plan, candidates = torch.Generator().manual_seed(seed), rules.plan(T, budget), []

    def shaken(values: Any) -> Any:
        return None if values is None else values * (1 + noise * torch.randn(values.shape, generator=draw))

    for layer in shown:
        learned = gates.score(layer) if gates else None
        score = score_entries(policy, layer, learned=learned, seeds_B=[0])
        fields = {name: shaken(getattr(score, name)) for name in ("values_BHT", "draw_BHT")}
        candidates.append(candidates_of(plan, replace(score, **fields)))
    return keep_pages(plan, candidates, PAGE)


def make(task: dict[str, Any]) -> dict[str, Any]:
    """Make in `folder` the `reference` model, a `tiny` model of a family of `tests.tiny`, or untrained
    `gates` of a family for a model."""
    folder, settings = task["folder"], task.get("settings") or {}
    if task["make"] == "reference":
        from retain.reference import load_model, load_tokenizer

        load_model().save_pretrained(folder)
        load_tokenizer().save_pretrained(folder)
    elif task["make"] == "tiny":
        from tests.tiny import tiny_model

        tiny_model(task["family"], **settings).save_pretrained(folder)
    else:
        import retain
        from retain.gates.artifact import save_gates
        from retain.hf.model.identity import fingerprint

        model = model_in(task["model"])
        gates = retain.new_gates(model, task["family"], seed=1, **settings)
        save_gates(gates, folder, fingerprint=fingerprint(model))
    return {"folder": folder}


class Oracle:
    """A process that does tasks; a task that was done is not sent again."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        command = [sys.executable, "-m", "tests.vllm.oracle"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, task: dict[str, Any]) -> Any:
        """Result of a task."""
        line = json.dumps(task)
        if line not in self.known:
            assert self.process.stdin and self.process.stdout
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            result = self.process.stdout.readline()
            assert result, f"the oracle's process ended; its error is above. It was asked {line:.300}"
            self.known[line] = json.loads(result)
        return self.known[line]

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def main() -> None:
    torch.set_num_threads(1)
    results, sys.stdout = sys.stdout, sys.stderr  # what is printed on the way is no result
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(make(task) if "make" in task else answer(task)), file=results, flush=True)


if __name__ == "__main__":
    main()

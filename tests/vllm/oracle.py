"""What `retain.Cache` with pages generates and keeps: run in a process of its own, since vLLM changes the
classes of transformers in its own process.

python -m tests.vllm.oracle CASES.json RESULTS.pt
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import retain


def answer(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens, the smallest margin between the first two, and the positions that each head keeps.

    Args:
        model: attached.
        case: `cache`, the settings of `retain.Cache`; `prompt`; `new`, tokens to generate; `document`, tokens
            of the prompt that are read and evicted from before the rest comes (None: all of it is).
    """
    cache = retain.Cache(model, capacity=None, **case["cache"])
    prompt, document = case["prompt"], case.get("document")
    T = len(prompt) if document is None else document
    tokens: list[int] = []
    margins: list[float] = []
    moments: dict[int, list[list[list[int]]]] = {}
    ids = torch.tensor([prompt])
    chunk = case.get("chunk") or T
    with torch.no_grad():
        for start in range(0, T, chunk):
            logits = model(input_ids=ids[:, start : min(start + chunk, T)], past_key_values=cache).logits
            moments[min(start + chunk, T)] = kept_positions(cache, T)
        kept = kept_positions(cache, T)
        if document is not None:
            logits = model(input_ids=ids[:, T:], past_key_values=cache).logits
        while len(tokens) < case["new"]:
            top = logits[0, -1].float().topk(2)
            tokens.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            logits = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache).logits
            seen = len(prompt) + len(tokens)
            if "decode" in case["cache"].get("regime", ""):
                moments[seen] = kept_positions(cache, seen)
    return {"tokens": tokens, "margins": margins, "kept": kept, "moments": moments}


def kept_positions(cache: Any, length: int) -> list[list[list[int]]]:
    """Positions below `length` that each head of each layer holds, ascending."""
    kept = []
    for store in cache.state.stores:
        if store is None:
            kept.append([list(range(length))])
            continue
        rows = []
        for offset, held in zip(store.offsets_R1.tolist(), store.lengths_R.tolist(), strict=False):
            own = store.positions_C[offset : offset + held]
            rows.append(sorted(own[own < length].tolist()))
        kept.append(rows)
    return kept


def main(cases_file: str, results_file: str) -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(cases_file).read_text())
    models: dict[str, Any] = {}
    results = []
    for case in cases:
        if case["model"] not in models:
            model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32).eval()
            retain.attach(model)
            models[case["model"]] = model
        results.append(answer(models[case["model"]], case))
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

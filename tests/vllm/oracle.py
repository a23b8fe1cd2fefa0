"""What `retain.Cache` with pages generates and keeps: run in a process of its own, since vLLM changes the
classes of transformers in its own process.

python -m tests.vllm.oracle CASES.json RESULTS.json, or without arguments: a JSON line a task on its standard
input, one with its result on its standard output. A task is a case, or makes what cases need.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]


def answer(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens, their logprobs, the margins between the first two, and the positions that each head
    keeps.

    Args:
        model: attached.
        case: `cache`, the settings of `retain.Cache`, None for a full one; `prompt`; `new`, tokens to
            generate; `document`, tokens of the prompt that are read and evicted from before the rest comes
            (None: all of it is); `again`, numbers of tokens answered at which the request lost its blocks, so
            that entries of the answer are computed anew, from the full prompt; `entries`, lists of layer,
            head and place whose scores are asked for; `ranks`, over which the heads are spread, each with a
            budget of its own.
    """
    import retain

    settings, scores, fragile = case["cache"], [], []
    if "ranks" in case:
        decided = decided_by_ranks(model, case)
        if "entries" in case:
            fragile = fragile_entries(model, case)
    elif "entries" in case:
        scores = scores_of(model, case)
    if settings is None:
        cache = retain.Cache(model, None)
    elif "ranks" in case:
        cache = retain.Cache(model, decided)
    else:
        cache = retain.Cache(model, capacity=None, **settings)
    prompt, document = case["prompt"], case.get("document")
    T = len(prompt) if document is None else document
    tokens: list[int] = []
    margins: list[float] = []
    moments: dict[int, list[list[list[int]]]] = {}
    logprobs: list[float] = []
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
            logprobs.append(float(logits[0, -1].float().log_softmax(-1).max()))
            if len(tokens) in case.get("again", ()):
                logits = recompute_(model, cache, prompt, tokens)
            else:
                logits = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache).logits
            seen = len(prompt) + len(tokens)
            if "decode" in (case["cache"] or {}).get("regime", ""):
                moments[seen] = kept_positions(cache, seen)
    found = {"length": T, "tokens": tokens, "margins": margins, "logprobs": logprobs}
    return {**found, "kept": kept, "moments": moments, "scores": scores, "fragile": fragile}


def fragile_entries(model: Any, case: dict[str, Any]) -> list[bool]:
    """Which of the entries asked for are kept or not by noise of 1e-5 in what they are ranked by.

    Where heads share a budget and a share of it is drawn, two numbers that are almost alike in one head can
    move the cut of another.
    """
    kept = []
    for seed in range(16):
        keeps = decided_by_ranks(model, case, noise=1e-5, seed=seed)
        kept.append([bool(keeps.masks[layer][0, head, place]) for layer, head, place in case["entries"]])
    return [len(set(own)) == 2 for own in zip(*kept, strict=True)]


def decided_by_ranks(model: Any, case: dict[str, Any], noise: float = 0.0, seed: int = 0) -> Any:
    """What each rank keeps of its own heads of a prompt, as a policy of `retain.Cache`.

    Args:
        model: attached.
        case: as of `answer`.
        noise: relative, of the scores.
        seed: of the noise.
    """
    import retain
    from retain.budget.statement import Budget
    from retain.config import build, to_mapping
    from retain.policy import Policy, decide_layers, load_policy, score_entries

    own = dict(case["cache"])
    budget = Budget(keep_ratio=own.pop("keep_ratio"), page=own.pop("page"))
    policy, gates = load_policy(own.pop("policy")), own.pop("gates", None)
    policy = build({**to_mapping(policy), **own}, Policy)
    gates = None if gates is None else retain.load_gates(gates, model)
    shown: list[Any] = []

    def show(evidence: Any) -> Any:
        shown.append(evidence)
        return evidence.exists_BHT

    with torch.no_grad():
        model(input_ids=torch.tensor([case["prompt"]]), past_key_values=retain.Cache(model, show))
    draw = torch.Generator().manual_seed(seed)

    def shaken(values: Any) -> Any:
        return None if values is None else values * (1 + noise * torch.randn(values.shape, generator=draw))

    masks = []
    for rank in range(case["ranks"]):
        layers, scores = [], []
        for layer in shown:
            heads, G = layer.num_heads // case["ranks"], layer.group
            here = slice(rank * heads, (rank + 1) * heads)
            asking = slice(here.start * G, here.stop * G)
            layers.append(
                replace(
                    layer,
                    keys_BHTD=layer.keys_BHTD[:, here],
                    values_BHTD=layer.values_BHTD[:, here],
                    queries_BQSD=layer.queries_BQSD[:, asking],
                    output_weight_QDE=layer.output_weight_QDE[asking],
                    first_head=here.start,
                )
            )
        try:
            for layer, part in zip(shown, layers, strict=True):
                learned = None if gates is None else gates.score(layer)
                if learned is not None:
                    own_heads = slice(part.first_head, part.first_head + part.num_heads)
                    learned = replace(learned, values_BHT=learned.values_BHT[:, own_heads])
                score = score_entries(policy, part, learned=learned, seeds_B=[0])
                values, drawn = shaken(score.values_BHT), shaken(score.draw_BHT)
                scores.append(replace(score, values_BHT=values, draw_BHT=drawn))
            decisions = decide_layers(policy, layers, budget, scores=scores)
        except ValueError:
            if len(case["prompt"]) > 256:
                raise
            return lambda evidence: evidence.exists_BHT  # too short for its budget: held whole
        masks.append([decision.keep_BHT for decision in decisions])
    whole = [torch.cat(parts, dim=1) for parts in zip(*masks, strict=True)]
    return Decided([one.layer_idx for one in shown], whole)


class Decided:
    """A policy that keeps what was decided.

    Args:
        layers: indices in the model.
        masks: of each, what is kept.
    """

    def __init__(self, layers: list[int], masks: list[torch.Tensor]):
        self.layers, self.masks = layers, masks

    def __call__(self, evidence: Any) -> torch.Tensor:
        return self.masks[self.layers.index(evidence.layer_idx)]


def scores_of(model: Any, case: dict[str, Any]) -> list[list[float]]:
    """What a prompt's entries were ranked by: the score of each, and what it is drawn by (else 0).

    Args:
        model: attached.
        case: as of `answer`.
    """
    import retain
    from retain.hf.cache import eviction_request as module

    made, own = [], module.score_entries

    def record(*args: Any, **how: Any) -> Any:
        made.append(own(*args, **how))
        return made[-1]

    with patch.object(module, "score_entries", record), torch.no_grad():
        cache = retain.Cache(model, capacity=None, **case["cache"])
        model(input_ids=torch.tensor([case["prompt"]]), past_key_values=cache)
    return [
        [0.0 if own is None else float(own[0, head, place]) for own in (one.values_BHT, one.draw_BHT)]
        for one, head, place in ((made[layer], head, place) for layer, head, place in case["entries"])
    ]


def recompute_(model: Any, cache: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Compute prompt and answer in one go, without any eviction, and put the answer's entries in the place
    of those in the cache; returns the logits after them.
    """
    import retain

    T, whole = len(prompt), retain.Cache(model, None)
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), past_key_values=whole).logits
    # The last token's entries are not there yet.
    model(input_ids=torch.tensor([list(tokens[-1:])]), past_key_values=cache)
    for own, full in zip(cache.state.stores, whole.state.stores, strict=True):
        for row in range(len(own.lengths_R)):
            here, there = (
                slice(int(one.offsets_R1[row]), int(one.offsets_R1[row]) + int(one.lengths_R[row]))
                for one in (own, full)
            )
            mine, theirs = own.positions_C[here] >= T, full.positions_C[there] >= T
            assert torch.equal(own.positions_C[here][mine], full.positions_C[there][theirs])
            for name in ("keys_CD", "values_CD"):
                getattr(own, name)[here][mine] = getattr(full, name)[there][theirs]
    return logits


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


class Answers:
    """Does tasks, and keeps the models that were loaded."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def model(self, folder: str) -> Any:
        """The model in a folder, attached."""
        from transformers import AutoModelForCausalLM

        import retain

        if folder not in self.models:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            retain.attach(model)
            self.models[folder] = model
        return self.models[folder]

    def do(self, task: dict[str, Any]) -> dict[str, Any]:
        """Answer a case, or make what `make` names in `folder`: the `reference` model, a `tiny` model of a
        family of `tests.tiny`, or untrained `gates` of a family for a model."""
        made = task.get("make")
        if made is None:
            return answer(self.model(task["model"]), task)
        folder, settings = task["folder"], task.get("settings") or {}
        if made == "reference":
            from retain.reference.model import load_model
            from retain.reference.tokenizer import load_tokenizer

            load_model(0).save_pretrained(folder)
            load_tokenizer().save_pretrained(folder)
        elif made == "tiny":
            from tests.tiny import tiny_model

            tiny_model(task["family"], **settings).save_pretrained(folder)
        else:
            import retain
            from retain.gates.artifact import save_gates
            from retain.hf.model.decoder import fingerprint

            model = self.model(task["model"])
            gates = retain.new_gates(model, task["family"], seed=1, **settings)
            save_gates(gates, folder, fingerprint=fingerprint(model))
        return {"folder": folder}


class Oracle:
    """A process that answers; what it was asked once it is not asked again."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.process: subprocess.Popen[str] | None = None

    def ask(self, tasks: Sequence[dict[str, Any]]) -> list[Any]:
        """Results of tasks, in order."""
        return [self.ask_one(task) for task in tasks]

    def ask_one(self, task: dict[str, Any]) -> Any:
        """Result of a task."""
        line = json.dumps(task)
        if line not in self.known:
            if self.process is None:
                command = [sys.executable, "-m", "tests.vllm.oracle"]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                self.process = subprocess.Popen(command, cwd=ROOT, **pipes)  # type: ignore[call-overload]
            assert self.process is not None and self.process.stdin and self.process.stdout
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            result = self.process.stdout.readline()
            assert result, f"the oracle's process ended; see its error above. It was asked {line:.300}"
            self.known[line] = json.loads(result)
        return self.known[line]

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


def main(*files: str) -> None:
    torch.set_num_threads(1)
    answers = Answers()
    if files:
        cases_file, results_file = files
        results = [answers.do(task) for task in json.loads(Path(cases_file).read_text())]
        Path(results_file).write_text(json.dumps(results))
        return
    # What is printed on the way is no result.
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answers.do(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

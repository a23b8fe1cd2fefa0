"""What transformers generates from the entries that the same policy keeps: run in a process of its own, since
vLLM changes the classes of transformers in its own process.

python -m tests.vllm.oracle: a JSON line of tasks of one kind on its standard input, one with their results on
its standard output. A task is a case, or makes what cases need.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = 32
# Prompts that are decoded at once; and those that are remembered, 10 MB each, with the prompts themselves.
BATCH, MOST_READ = 20, 256
READ: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}


@dataclass
class Begun:
    """A prompt that was read and evicted from.

    Attributes:
        case: whose it is; see `answer`.
        cache: of the prompt.
        logits: behind its last token.
        found: what will be said of it.
        padding: tokens that stand before the prompt.
    """

    case: dict[str, Any]
    cache: Any
    logits: torch.Tensor
    found: dict[str, Any]
    padding: int


def answer(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens, their logprobs, the margins between the first two, and the positions that each head
    keeps.

    Args:
        model: attached.
        case: `cache`, the settings of the plug-in, None for a full cache; `prompt`; `new`, tokens to
            generate; `again`, numbers of tokens answered at which the request lost its blocks, so that
            entries of the answer are computed anew, from the full prompt; `entries`, lists of layer, head and
            place, of which is asked whether noise moves them; `ranks`, over which the heads are spread, each
            with a budget of its own.
    """
    return go_on(model, [begin(model, case)])[0]


def answer_all(model: Any, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to cases. Each prompt is read alone; those that only go on are decoded in batches, which is
    where the time goes."""
    found: dict[int, dict[str, Any]] = {}
    batches: dict[int, list[int]] = {}
    for place, case in enumerate(cases):
        if case.get("again") or "entries" in case:
            found[place] = answer(model, case)
        else:
            batches.setdefault(case["new"], []).append(place)
    for places in batches.values():
        places.sort(key=lambda place: len(cases[place]["prompt"]))
        for start in range(0, len(places), BATCH):
            some = places[start : start + BATCH]
            width = max(len(cases[place]["prompt"]) for place in some)
            begun = [begin(model, cases[place], width) for place in some]
            found |= zip(some, go_on(model, begun), strict=True)
    return [found[place] for place in range(len(cases))]


@torch.no_grad()
def begin(model: Any, case: dict[str, Any], width: int = 0) -> Begun:
    """Read a prompt and evict from it.

    Args:
        model: attached.
        case: as of `answer`.
        width: tokens that the prompt is padded to, on the left.
    """
    prompt = case["prompt"]
    padding = max(0, width - len(prompt))
    fragile = fragile_entries(model, case) if "entries" in case else []
    whole, logits = read(model, prompt, padding)
    cache = whole.fork()
    cache.evict_with(decided(model, case, cache.evidence))
    found = {"length": len(prompt), "tokens": [], "margins": [], "logprobs": []}
    found |= {"kept": kept_positions(cache, len(prompt)), "fragile": fragile}
    return Begun(case, cache, logits, found, padding)


def read(model: Any, tokens: list[int], padding: int) -> tuple[Any, torch.Tensor]:
    """A cache that holds tokens whole with all that policies look at, and the logits behind the last. It is
    remembered: each policy evicts from a fork of it."""
    import retain

    key = id(model), padding, *tokens
    if key not in READ:
        ids, mask = torch.tensor([[0] * padding + tokens]), torch.ones(1, padding + len(tokens))
        mask[:, :padding] = 0
        whole = retain.Cache(model, "recency", keep_ratio=0.5)
        whole.prefill(ids, mask.long(), evict=False, hold_evidence=True)
        logits = model(input_ids=torch.tensor([tokens]), logits_to_keep=1, use_cache=False).logits[:, -1]
        while len(READ) >= MOST_READ:
            del READ[next(iter(READ))]
        READ[key] = whole, logits
    return READ[key]


@torch.no_grad()
def go_on(model: Any, begun: Sequence[Begun]) -> list[dict[str, Any]]:
    """Answer prompts of one width as one batch; alone, those that lose their blocks."""
    import retain

    (new,) = {one.case["new"] for one in begun}
    cache = begun[0].cache if len(begun) == 1 else retain.Cache.concat([one.cache for one in begun])
    logits = torch.cat([one.logits for one in begun]).float()
    lengths = torch.tensor([len(one.case["prompt"]) for one in begun])
    width = int(lengths[0]) + begun[0].padding
    for number in range(1, new + 1):
        top = logits.topk(2)
        chosen = top.indices[:, :1]
        margins, best = top.values[:, 0] - top.values[:, 1], logits.log_softmax(-1).amax(-1)
        for one, *values in zip(begun, chosen[:, 0].tolist(), margins.tolist(), best.tolist(), strict=True):
            for name, value in zip(("tokens", "margins", "logprobs"), values, strict=True):
                one.found[name].append(value)
        case = begun[0].case
        if number in (case.get("again") or ()):
            logits = recompute_(model, cache, case["prompt"], begun[0].found["tokens"])[:, -1].float()
            continue
        seen = torch.arange(width + number)
        given = {"attention_mask": (seen >= width - lengths[:, None]).long(), "past_key_values": cache}
        where = lengths[:, None] + number - 1
        logits = model(input_ids=chosen, position_ids=where, **given).logits[:, -1].float()
    return [one.found for one in begun]


def fragile_entries(model: Any, case: dict[str, Any]) -> list[bool]:
    """Which of the entries asked for are kept or not by noise of 1e-5 in what they are ranked by.

    Where heads share a budget and a share of it is drawn, two numbers that are almost alike in one head can
    move the cut of another.
    """
    kept = []
    shown = read(model, case["prompt"], 0)[0].evidence
    for seed in range(16):
        masks = decided(model, case, shown, noise=1e-5, seed=seed)
        kept.append([bool(masks[layer][0, head, place]) for layer, head, place in case["entries"]])
    return [len(set(own)) == 2 for own in zip(*kept, strict=True)]


def decided(
    model: Any, case: dict[str, Any], shown: Sequence[Any], noise: float = 0.0, seed: int = 0
) -> list[torch.Tensor]:
    """What each rank keeps of its own heads of a prompt: masks `[B, H, T]`, one per layer.

    Args:
        model: attached.
        case: as of `answer`.
        shown: the evidence of each layer, of the prompt and padding before it.
        noise: relative, of the scores.
        seed: of the noise.
    """
    import retain
    from retain.budget.statement import Budget
    from retain.policy import candidates_of, load_policy, score_entries, shape_of
    from retain.vllm.packing.whole_pages import keep_pages
    from retain.vllm.settings import Rules

    whole = [layer.exists_BHT for layer in shown]
    if case["cache"] is None:
        return whole
    own, ranks, T = case["cache"], case.get("ranks", 1), len(case["prompt"])
    budget = Budget(own.get("keep_ratio"), own.get("tokens_per_head"))
    policy = load_policy(own["policy"], own.get("overrides", ()))
    gates = None if own.get("gates") is None else retain.load_gates(own["gates"], model)
    draw = torch.Generator().manual_seed(seed)

    def shaken(values: Any) -> Any:
        return None if values is None else values * (1 + noise * torch.randn(values.shape, generator=draw))

    heads_L = tuple(layer.num_heads // ranks for layer in shown)
    rules = Rules(policy, PAGE, heads_L, shape_of(shown[0]).entry_bytes, ranks)
    if rules.kept(T, budget) == T // PAGE:
        return whole
    plan, masks = rules.plan(T, budget), []
    for rank in range(ranks):
        scores = []
        for layer, heads in zip(shown, heads_L, strict=True):
            here, G = slice(rank * heads, (rank + 1) * heads), layer.group
            asking = slice(here.start * G, here.stop * G)
            part = replace(
                layer,
                keys_BHTD=layer.keys_BHTD[:, here],
                values_BHTD=layer.values_BHTD[:, here],
                queries_BQSD=layer.queries_BQSD[:, asking],
                output_weight_QDE=layer.output_weight_QDE[asking],
                first_head=here.start,
            )
            learned = None if gates is None else gates.score(layer)
            if learned is not None:
                learned = replace(learned, values_BHT=learned.values_BHT[:, here])
            score = score_entries(policy, part, learned=learned, seeds_B=[0])
            fields = {name: getattr(score, name) for name in ("values_BHT", "draw_BHT")}
            fields = {name: shaken(values) for name, values in fields.items()}
            scores.append(replace(score, **fields))
        padding = shown[0].num_seen - T
        candidates = [candidates_of(plan, without_padding(score, padding)) for score in scores]
        kept = keep_pages(plan, candidates, PAGE)
        masks.append([torch.nn.functional.pad(mask, (padding, 0)) for mask in kept])
    return [torch.cat(parts, dim=1) for parts in zip(*masks, strict=True)]


def without_padding(score: Any, count: int) -> Any:
    """A score without the padding that stands before the prompt."""
    names = ("values_BHT", "draw_BHT", "first_BHT")
    given = {name: getattr(score, name) for name in names}
    return replace(score, **{name: own[..., count:] for name, own in given.items() if own is not None})


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

    def do_all(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Do tasks of one kind: cases of one model, or what is to be made."""
        if any("make" in task for task in tasks):
            return [self.do(task) for task in tasks]
        (folder,) = {task["model"] for task in tasks}
        return answer_all(self.model(folder), tasks)

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
            from retain.hf.model.identity import fingerprint

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
        """Results of tasks of one kind, in order."""
        lines = [json.dumps(task) for task in tasks]
        new = {line: task for line, task in zip(lines, tasks, strict=True) if line not in self.known}
        if new:
            if self.process is None:
                command = [sys.executable, "-m", "tests.vllm.oracle"]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                self.process = subprocess.Popen(command, cwd=ROOT, **pipes)  # type: ignore[call-overload]
            assert self.process is not None and self.process.stdin and self.process.stdout
            asked = json.dumps(list(new.values()))
            self.process.stdin.write(asked + "\n")
            self.process.stdin.flush()
            results = self.process.stdout.readline()
            assert results, f"the oracle's process ended; see its error above. It was asked {asked:.300}"
            self.known |= zip(new, json.loads(results), strict=True)
        return [self.known[line] for line in lines]

    def ask_one(self, task: dict[str, Any]) -> Any:
        """Result of a task."""
        return self.ask([task])[0]

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


def main() -> None:
    torch.set_num_threads(1)
    # What is printed on the way is no result.
    answers, out, sys.stdout = Answers(), sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answers.do_all(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()

"""A suite without a trained model: a tiny random one, tasks of random tokens, gates that know nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retain.eval.config import CompareConfig
from retain.eval.tasks import Suite, Task
from retain.gates import build_gates
from retain.gates.store import save_gates
from retain.hf.model import describe, fingerprint
from tests.tiny import VOCAB, tiny_model

TASKS = {
    "copy": Task("copy", "seen", "three tokens, in order", single_key=True),
    "pair": Task("pair", "seen", "two tokens"),
    "odd": Task("odd", "held-out", "one token, after a question of another length in every item"),
}


@dataclass(frozen=True)
class StubItem:
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    generate: int

    def score(self, generated: Any) -> tuple[float, float]:
        hits = [a == b for a, b in zip(generated, self.gold_ids, strict=False)]
        return float(all(hits)), sum(hits) / len(hits)


@dataclass(frozen=True)
class StubDocument:
    context_ids: tuple[int, ...]
    appendix_ids: tuple[int, ...]


def _tokens(count: int, *key: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return tuple(torch.randint(2, VOCAB, (count,), generator=generator).tolist())


def stub_item(task: str, seed: int, index: int, context_tokens: int) -> StubItem:
    place = list(TASKS).index(task)
    generate = 3 - place
    question = 3 + (index % 3 if task == "odd" else 0)
    key = (seed, place, index)
    return StubItem(
        _tokens(context_tokens, *key, 0), _tokens(question, *key, 1), _tokens(generate + 1, *key, 2), generate
    )


def stub_documents(seed: int, count: int, context_tokens: int) -> Iterator[StubDocument]:
    for i in range(count):
        yield StubDocument(_tokens(context_tokens, seed, i, 8), _tokens(6, seed, i, 9))


def stub_model(seed: int) -> Any:
    return tiny_model("qwen3", seed=seed)


STUB = Suite(
    name="stub",
    tasks=TASKS,
    item=stub_item,
    documents=stub_documents,
    load_model=stub_model,
    seeds=(0, 1),
    train_gates="train gates of seed {seed} into {gates}",
)


def stub_config(folder: Path, **changes: Any) -> CompareConfig:
    """A comparison of two items a task, in this process."""
    config = CompareConfig(
        run="stub",
        seeds=(0,),
        items_per_task=2,
        gates=str(folder / "gates-seed{seed}"),
        suite="stub",
        keep_ratios=(0.45, 0.6),
        context_tokens=100,
        control_documents=2,
        batch_items=2,
        workers=0,
        resamples=200,
        results=str(folder / "results"),
    )
    return replace(config, **changes)


def save_stub_gates(folder: Path, seeds: tuple[int, ...] = (0,)) -> None:
    """Untrained gates of each seed's model."""
    for seed in seeds:
        model = stub_model(seed)
        dims = {spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads} for spec in describe(model)}
        torch.manual_seed(seed)
        save_gates(build_gates("linear", dims), folder / f"gates-seed{seed}", fingerprint=fingerprint(model))

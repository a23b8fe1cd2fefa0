"""A suite without a trained model: a tiny random one, tasks of random tokens, gates that know nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import retain
from retain.eval.config import CompareConfig
from retain.eval.tasks.suite import Asked, Item, Suite, Task
from retain.gates import GATES, GateSet
from retain.gates.artifact import save_gates
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.model.identity import fingerprint
from retain.reference.documents import Document
from tests.tiny import VOCAB, tiny_model

TASKS = {
    "copy": Task("copy", "seen", "three tokens, in order"),
    "pair": Task("pair", "seen", "two tokens"),
    "odd": Task("odd", "held-out", "one token, after a question of another length in every item"),
}
# Beside what a report is made of: contexts of unlike lengths, several questions, answers that end early.
MORE = {
    "ragged": Task("ragged", "seen", "contexts of unlike lengths", num_items=3),
    "turns": Task("turns", "held-out", "three questions on one context, of which a part is a needle"),
    "open": Task("open", "seen", "answers that end where they like", primary="partial"),
}


def share_right(gold: tuple[int, ...], generated: Sequence[int]) -> tuple[float, float]:
    hits = [a == b for a, b in zip(generated, gold, strict=False)]
    return float(bool(hits) and all(hits)), sum(hits) / max(1, len(hits))


def _tokens(count: int, *key: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return tuple(torch.randint(2, VOCAB, (count,), generator=generator).tolist())


def stub_item(task: str, seed: int, index: int, context_tokens: int) -> Item:
    if task in MORE:
        return _more(task, seed, index, context_tokens)
    place = list(TASKS).index(task)
    generate = 3 - place
    question = 3 + (index % 3 if task == "odd" else 0)
    key = (seed, place, index)
    return Item(
        _tokens(context_tokens, *key, 0),
        (_asked(_tokens(question, *key, 1), _tokens(generate + 1, *key, 2), generate),),
    )


def _asked(question: tuple[int, ...], gold: tuple[int, ...], generate: int, **more: Any) -> Asked:
    return Asked(question, gold, generate, partial(share_right, gold), **more)


def _more(task: str, seed: int, index: int, context_tokens: int) -> Item:
    key = (seed, list(MORE).index(task) + 10, index)
    length = context_tokens - (17 * (index % 3) if task == "ragged" else 0)
    context, gold = _tokens(length, *key, 0), _tokens(6, *key, 2)
    if task == "ragged":
        asked = (_asked(_tokens(4, *key, 1), gold[:3], 2),)
        return Item(context, asked, needles=((10, 14), (length - 5, length)), about={"length": float(length)})
    if task == "turns":
        asked = tuple(
            _asked(_tokens(3 + turn, *key, 1, turn), gold[:3], 2, about={"turn": float(turn)})
            for turn in range(3)
        )
        return Item(context, asked, needles=((0, 4), (50, 60)))
    # A third of the vocabulary ends an answer: some end at once, some late, some never.
    asked = (_asked(_tokens(5, *key, 1), gold, 6, text=spoken, references=(spoken(gold),)),)
    return Item(context, asked, end_ids=tuple(range(0, VOCAB, 3)))


def spoken(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def stub_documents(seed: int, count: int, context_tokens: int) -> Iterator[Document]:
    for i in range(count):
        yield Document(_tokens(context_tokens, seed, i, 8), _tokens(6, seed, i, 9))


def stub_probes(seed: int, count: int, context_tokens: int) -> Iterator[Item]:
    for i in range(count):
        yield replace(stub_item("copy", seed, 100 + i, context_tokens), needles=((10, 14),))


def stub_model(seed: int) -> Any:
    return tiny_model("qwen3", seed=seed)


def gates_of(family: str, seed: int = 1) -> GateSet:
    """Untrained gates of the stub's model."""
    model = stub_model(0)
    torch.manual_seed(seed)
    if GATES[family].extension is not None:
        return lookahead_gates(model, num_tokens=4, rank=2)
    gates = retain.new_gates(model, family, seed=seed)
    for parameter in gates.parameters():  # fresh ones say the same of every entry, some of them
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return gates


STUB = Suite(
    name="stub",
    tasks=TASKS,
    item=stub_item,
    documents=stub_documents,
    probes=stub_probes,
    load_model=stub_model,
    seeds=(0, 1),
    train_gates="train gates of seed {seed} into {gates}",
)
MORE_STUB = replace(STUB, tasks={**TASKS, **MORE})


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
        unit_items=2,
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
        gates = retain.new_gates(model, "linear", seed=seed)
        save_gates(gates, folder / f"gates-seed{seed}", fingerprint=fingerprint(model))

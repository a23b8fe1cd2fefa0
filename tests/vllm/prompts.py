"""Prompts of the reference model's own tasks."""

import torch

from retain.reference.documents import Writer
from retain.reference.items import write_item

TASKS = ("single", "multikey", "lists", "tracing", "quote")


def write_prompts(count: int, *, seed: int = 0, shortest: int = 100, longest: int = 1500) -> list[list[int]]:
    """Token ids of contexts of random length, each with its question."""
    lengths = torch.randint(shortest, longest, (count,), generator=torch.Generator().manual_seed(seed))
    prompts = []
    for place, length in enumerate(lengths.tolist()):
        context, question = write_item(Writer("eval", 1000 * seed + place), TASKS[place % len(TASKS)], length)
        prompts.append([*map(int, context), *map(int, question.ids)])
    return prompts

"""Generates answers from a cache, greedily or with noise alike for all policies, and cuts them at their end.

What a checkpoint says of generation (penalties, suppressed tokens, sampling) is set aside: the likeliest
token is taken, whichever model answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from retain.eval.run.evaluated_model import Unit
from retain.eval.run.results_store import Reference, tokens_sha
from retain.eval.tasks.suite import Item
from retain.hf.version_names import CACHE
from retain.scores.random import gumbel_of, hashed

# Stands where a shorter context has nothing; masked, so that it matters nowhere.
PAD = 0


@dataclass(frozen=True)
class Answer:
    """A generated answer: its tokens, and the end token behind them; None where it was cut off."""

    tokens: tuple[int, ...]
    end: int | None = None

    @property
    def ended(self) -> bool:
        """Whether an end token came."""
        return self.end is not None

    @property
    def generated(self) -> tuple[int, ...]:
        """All generated tokens, one a forward: the end token is among them."""
        return self.tokens if self.end is None else (*self.tokens, self.end)


class Noise(LogitsProcessor):
    """Adds Gumbel noise to logits, so that the likeliest token is one sampled at a temperature.

    `argmax_v (x_v + t g_v)` is distributed as `softmax(x / t)` where the g are independent and Gumbel(0, 1).
    Here `g` is a hash of (seed of the sequence, place in the answer, token), the same whatever cache the
    logits come from: policies that agree in their logits agree in their answers.

    Args:
        temperature: t, above 0.
        seeds: one for each sequence.
        read: tokens before the answer, padding included.
    """

    def __init__(self, temperature: float, seeds: Sequence[int], read: int):
        self.temperature, self.seeds, self.read = temperature, list(seeds), read

    def __call__(self, input_ids: Int[Tensor, "N T"], scores: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        seed_N = torch.tensor(self.seeds, dtype=torch.int64, device=scores.device)
        state_N = hashed(hashed(seed_N) + (input_ids.shape[1] - self.read))
        token_V = torch.arange(scores.shape[1], device=scores.device)
        return scores + self.temperature * gumbel_of(state_N[:, None] + token_V).to(scores.dtype)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids, left-padded to the longest, and the mask that says which are real."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def respond(
    model: Any,
    cache: Any,
    input_ids: Int[Tensor, "N T"],
    attention_mask: Int[Tensor, "N T"],
    *,
    new_tokens: int,
    end_ids: Sequence[int] = (),
    watch: Any = None,
    noise: Noise | None = None,
) -> list[Answer]:
    """Generates of every forward the likeliest token, whatever the checkpoint's own `generation_config` asks
    for (`generate` fills what it is not told from there).

    Args:
        cache: What the cache has not seen of the ids is read first.
        input_ids: All that each sequence has read, left-padded, the question last.
        attention_mask: 1 on tokens, 0 on padding.
        new_tokens: Most tokens to generate; without end tokens, exactly so many.
        end_ids: Tokens that end an answer.
        watch: Called behind every forward, as a stopping criterion of transformers.
        noise: Added to logits; None for greedy answers.
    """
    ends = {"eos_token_id": list(end_ids)} if end_ids else {"eos_token_id": model.config.eos_token_id}
    least = {} if end_ids else {"min_new_tokens": new_tokens}
    how = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, use_cache=True, pad_token_id=PAD, **least, **ends
    )
    given = {"input_ids": input_ids, "attention_mask": attention_mask, CACHE: cache}
    given |= {} if watch is None else {"stopping_criteria": [watch]}
    given |= {} if noise is None else {"logits_processor": [noise]}
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(**given, generation_config=how)
    finally:
        model.generation_config = before
    return [cut(tokens, end_ids) for tokens in output[:, input_ids.shape[1] :].tolist()]


def cut(tokens: Sequence[int], end_ids: Sequence[int]) -> Answer:
    """The answer in what was generated: the tokens before the first that ends it."""
    for place, token in enumerate(tokens):
        if token in end_ids:
            return Answer(tuple(tokens[:place]), token)
    return Answer(tuple(tokens))


def references_of(unit: Unit, items: dict[int, Item]) -> list[Reference]:
    """References of a unit's items."""
    return [
        Reference(
            seed=unit.seed,
            task=unit.task,
            item=index,
            question=place,
            context_sha=tokens_sha(item.context_ids),
            num_context=len(item.context_ids),
            question_ids=tuple(asked.question_ids),
            gold_ids=tuple(asked.gold_ids),
            references=tuple(asked.references),
        )
        for index, item in items.items()
        for place, asked in enumerate(item.asked)
    ]


def alike(items: Mapping[int, Item], *, alone: bool = False, chunked: bool = False) -> list[dict[int, Item]]:
    """Groups items that can be read together: what follows their contexts is equally long, and ends alike.
    Contexts may differ in length, and are padded.

    Args:
        items: By index.
        alone: Whether an item whose answer ends where it likes stands alone: a cache that evicts again
            would count what a finished sequence is filled up with.
        chunked: Whether contexts must be equally long: padding would move the borders of chunks.
    """
    groups: dict[Any, dict[int, Item]] = {}
    for index, item in items.items():
        tails = tuple((len(one.question_ids), one.generate) for one in item.asked)
        answers = tuple(len(read_back(item, question)) for question in range(len(item.asked)))
        own = index if alone and item.end_ids else None
        width = len(item.context_ids) if chunked else None
        groups.setdefault((tails, answers, item.end_ids, own, width), {})[index] = item
    return list(groups.values())


def read_back(item: Item, question: int = 0) -> tuple[int, ...]:
    """The part of a right answer that generation reads: all but its last generated token, which nothing comes
    after, and what is never generated (an end token). None of it, where one token is generated."""
    asked = item.asked[question]
    return tuple(asked.gold_ids[: asked.generate - 1])

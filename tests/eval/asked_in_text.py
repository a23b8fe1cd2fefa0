"""Shared by tests of tasks: an asking with the reference tokenizer, cards of a group, checks of an item."""

from collections.abc import Callable
from functools import cache, partial

import torch

from retain.eval.tasks.rendering import render
from retain.eval.tasks.suite import Item
from retain.eval.tasks.task_card import Asking, TextItem
from retain.eval.tasks.text_suite import cards, generators
from retain.reference import load_model, load_tokenizer


@cache
def tokenizer():
    return load_tokenizer()


def measure(text: str) -> int:
    return len(tokenizer()(text, add_special_tokens=False)["input_ids"])


def asking(seed: int = 0, index: int = 0, context_tokens: int = 1000) -> Asking:
    return Asking(seed, index, context_tokens, partial(measure), tokenizer())


def words(text: str) -> int:
    return len(text.split())


def asking_words(index: int = 0, tokens: int = 10_000, seed: int = 0) -> Asking:
    """An asking that counts words as tokens."""
    return Asking(seed, index, tokens, words)


def made(task: str, seed: int = 0, index: int = 0, context_tokens: int = 1000, **changes) -> TextItem:
    card = cards()[task]
    return generators()[card.generator](asking(seed, index, context_tokens), **{**card.settings, **changes})


def held(item: TextItem) -> list[str]:
    """The texts of its needles."""
    return [item.context[start:stop] for start, stop in item.needles]


def check_scored(name: str, item: TextItem) -> Item:
    """An item in tokens; its right answers score one, fit the card, and an empty answer scores nothing."""
    whole = render(item, cards()[name], tokenizer(), chat=True)
    for asked in whole.asked:
        assert asked.score(asked.gold_ids) == (1.0, 1.0) and asked.score(whole.end_ids[:1]) == (0.0, 0.0)
        assert len(asked.gold_ids) <= cards()[name].max_new_tokens
    return whole


def check_own(name: str, **how) -> TextItem:
    """An item that the same request gives again, and no other index or seed."""
    item = made(name, **how)
    assert item == made(name, **how)
    assert item.context not in (made(name, index=1).context, made(name, seed=1).context)
    return item


def check_item(make: Callable[..., Item], task: str, index: int, others: int, tokens: int) -> Item:
    """An item of a suite that the same request gives again, and no other index or seed, scored as it says."""
    item, again = (make(task, 1, index, tokens) for _ in range(2))
    assert (item.context_ids, item.needles, item.about) == (again.context_ids, again.needles, again.about)
    for seed, other in ((1, others), (2, index)):
        assert make(task, seed, other, tokens).context_ids != item.context_ids
    for asked, same in zip(item.asked, again.asked, strict=True):
        assert (asked.question_ids, asked.gold_ids) == (same.question_ids, same.gold_ids)
        assert len(asked.question_ids) >= 2
        assert asked.score(asked.gold_ids) == (1.0, 1.0) and asked.score(()) == (0.0, 0.0)
        assert asked.score([*asked.gold_ids[: asked.generate - 1], 0])[0] == 0.0
    return item


def answered(items: list[Item], seed: int) -> float:
    """Mean share of right answers of a reference model with the full cache."""
    model, scores = load_model(seed), []
    for item in items:
        for asked in item.asked:
            ids = torch.tensor([[*item.context_ids, *asked.question_ids]])
            exact = {"max_new_tokens": asked.generate, "min_new_tokens": asked.generate, "pad_token_id": 0}
            with torch.inference_mode():
                output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **exact)
            scores.append(asked.score(output[0, ids.shape[1] :].tolist())[1])
    return sum(scores) / len(scores)

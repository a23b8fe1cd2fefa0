"""What tests of tasks in text share: an asking with the reference tokenizer, and the cards of a group."""

from functools import cache, partial

from retain.eval.tasks.task_card import Asking, Card, TextItem
from retain.eval.tasks.text_suite import cards, generators
from retain.reference import load_tokenizer


@cache
def tokenizer():
    return load_tokenizer()


def measure(text: str) -> int:
    return len(tokenizer()(text, add_special_tokens=False)["input_ids"])


def asking(seed: int = 0, index: int = 0, context_tokens: int = 1000) -> Asking:
    return Asking(seed, index, context_tokens, partial(measure), tokenizer())


def made(task: str, seed: int = 0, index: int = 0, context_tokens: int = 1000, **changes) -> TextItem:
    card = cards()[task]
    return generators()[card.generator](asking(seed, index, context_tokens), **{**card.settings, **changes})


def of_group(group: str) -> dict[str, Card]:
    return {name: card for name, card in cards().items() if name.startswith(f"{group}/")}


def held(item: TextItem) -> list[str]:
    """The texts of its needles."""
    return [item.context[start:stop] for start, stop in item.needles]

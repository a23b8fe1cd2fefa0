"""Finds a suite of tasks by its name."""

from collections.abc import Callable, Mapping
from typing import Any

from retain.eval.tasks.reference_basic import reference_suite
from retain.eval.tasks.reference_more import reference_more_suite
from retain.eval.tasks.suite import Suite, Task
from retain.eval.tasks.text_suite import cards, text_suite
from retain.registry import lookup

# Tasks in the reference model's own vocabulary; further ones; every task of `retain.eval.tasks.cards`, for
# any model.
SUITES: Mapping[str, Callable[..., Suite]] = {
    "reference": reference_suite,
    "reference_more": reference_more_suite,
    "text": text_suite,
}


def load_suite(name: str, **how: Any) -> Suite:
    """Find a suite by its name.

    Args:
        name: Of `SUITES`.
        how: Settings of `text`: those of `retain.eval.tasks.text_suite.TextSettings`; of the others `model`,
            as `retain.eval.tasks.reference_basic.reference_suite` takes it.

    Raises:
        ValueError: If there is none of that name, or it takes no such settings.
    """
    return lookup(name, SUITES, what="suite of tasks")(**how)


def tasks_of(manifest: Mapping[str, Any]) -> Mapping[str, Task]:
    """The tasks of a run's suite, without its model; a suite that only a program made has none here."""
    suite = manifest["config"]["suite"]
    if suite == "reference":
        return load_suite("reference").tasks
    known = cards() if suite == "text" else {}
    return {
        name: Task(name, about=card.about if card else "", **own)
        for name, own in manifest.get("tasks", {}).items()
        for card in (known.get(name),)
    }

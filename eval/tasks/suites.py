"""Finds a suite of tasks by its name."""

from collections.abc import Callable, Mapping
from typing import Any

from retain.eval.tasks.reference_basic import reference_suite
from retain.eval.tasks.reference_more import reference_more_suite
from retain.eval.tasks.reference_shift import reference_shift_suite
from retain.eval.tasks.suite import Suite, Task
from retain.eval.tasks.text_suite import cards, text_suite
from retain.registry import lookup


def load_suite(name: str, **how: Any) -> Suite:
    """Find a suite by its name.

    Args:
        name: "reference": tasks in the reference model's own vocabulary; "reference_more": further ones;
            "reference_shift": on documents that differ from those that gates are trained on; "text": every
            task of `retain.eval.tasks.cards`, for any model.
        how: Settings of `text`: those of `retain.eval.tasks.text_suite.TextSettings`; of the others `model`,
            as `retain.eval.tasks.reference_basic.reference_suite` takes it.

    Raises:
        ValueError: If there is none of that name, or it takes no such settings.
    """
    suites: dict[str, Callable[..., Suite]] = {
        "reference": reference_suite,
        "reference_more": reference_more_suite,
        "reference_shift": reference_shift_suite,
        "text": text_suite,
    }
    return lookup(name, suites, what="suite of tasks")(**how)


def tasks_of(manifest: Mapping[str, Any]) -> Mapping[str, Task]:
    """The tasks of a run's suite, without its model; a suite that only a program made has none here."""
    suite = manifest["config"]["suite"]
    if suite == "reference":
        return load_suite("reference").tasks
    known = cards() if suite == "text" else {}
    return {
        name: Task(
            name,
            about=known[name].about if name in known else "",
            single_key=name in known and known[name].single_key,
            **own,
        )
        for name, own in manifest.get("tasks", {}).items()
    }

"""Finds a suite of tasks by its name."""

from collections.abc import Callable
from typing import Any

from retain.eval.tasks.reference import reference_suite
from retain.eval.tasks.reference_more import reference_more_suite
from retain.eval.tasks.reference_shift import reference_shift_suite
from retain.eval.tasks.suite import Suite
from retain.eval.tasks.text import text_suite
from retain.registry import lookup


def load_suite(name: str, **how: Any) -> Suite:
    """Find a suite by its name.

    Args:
        name: "reference": tasks in the reference model's own vocabulary; "reference_more": further ones;
            "reference_shift": on documents that differ from those that gates are trained on; "text": every
            task of `retain.eval.tasks.cards`, for any model.
        how: Settings of `text`: those of `retain.eval.tasks.text.TextSettings`; of the others `model`, as
            `retain.eval.tasks.reference.reference_suite` takes it.

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

"""Names the argument by which transformers takes a cache: `past_key_values`, and `cache` from 5.24 on.

The newer versions still take the former name, with a warning, until they do not. An attached model takes a
cache of ours by either name under any version, without a warning.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

NAMES = ("cache", "past_key_values")
_known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# As the installed version calls it, in arguments and in outputs.
CACHE = next(name for name in NAMES if name in _known)


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by whichever name; None: there is none."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which a cache has the name of the installed version."""
    others = {name: value for name, value in given.items() if name not in NAMES}
    return others if (cache := cache_in(given)) is None else {**others, CACHE: cache}


def checkpoints(model: Any) -> bool:
    """Whether a model computes activations again in its backward pass (a property that was renamed too)."""
    newer = hasattr(PreTrainedModel, "is_activation_checkpointing")
    name = "is_activation_checkpointing" if newer else "is_gradient_checkpointing"
    return bool(getattr(model, name, False))

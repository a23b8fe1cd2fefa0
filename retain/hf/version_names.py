"""Gives names that differ between versions of transformers.

From 5.24 on a cache is the argument `cache`, before it was `past_key_values`; and what computes activations
again is activation checkpointing, before it was gradient checkpointing. The newer versions still take the
former names, with a warning. An attached model takes a cache of ours by either name, without a warning.
"""

import inspect
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

NAMES = ("cache", "past_key_values")
_known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# As the installed version calls it, in arguments and in outputs.
CACHE = next(name for name in NAMES if name in _known)
_newer = hasattr(PreTrainedModel, "is_activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if _newer else "gradient_checkpointing"


def checkpoints(model: Any) -> bool:
    """True if a model computes activations again in its backward pass."""
    return bool(getattr(model, f"is_{CHECKPOINTING}", False))


def set_checkpointing_(model: Any, on: bool, **how: Any) -> None:
    """Lets a model compute activations again in its backward pass, or keep them; `how` is torch's."""
    if on:
        getattr(model, f"{CHECKPOINTING}_enable")(how or None)
    else:
        getattr(model, f"{CHECKPOINTING}_disable")()

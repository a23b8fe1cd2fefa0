"""Gives names that differ between versions of transformers.

From 5.24 on a cache is the argument `cache`, before it was `past_key_values`; and what computes activations
again is activation checkpointing, before it was gradient checkpointing.
"""

import inspect

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

NAMES = ("cache", "past_key_values")
_known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# As the installed version calls it, in arguments and in outputs.
CACHE = next(name for name in NAMES if name in _known)
_newer = hasattr(PreTrainedModel, "is_activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if _newer else "gradient_checkpointing"

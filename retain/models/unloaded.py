"""Makes a model that is not loaded: its config is read, its weights are not.

It stands on the meta device, where it takes no memory: enough to count parameters, to describe layers
(`retain.hf.model.decoder.layout_of(model, on_meta=True)`) and to plan, and nothing can be computed with it.
"""

from typing import Any, Literal

import torch
from torch import nn

from retain.models.named import instead_of, located, reference_seed, said_of

Precision = Literal["auto", "float32", "bfloat16", "float16"]


def meta_model_of(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> nn.Module:
    """Makes a model without weights of a config; ValueError: transformers makes no such model of it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(said_of(config.name_or_path, error)) from error


def named_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Reads the config of a model as transformers does; its weights are not looked at.

    Raises:
        ValueError: it cannot be read.
    """
    from transformers import AutoConfig

    if reference_seed(name) is not None:
        from retain.reference.model import config as reference_config

        return reference_config()
    try:
        return AutoConfig.from_pretrained(
            located(name), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r} cannot be loaded: {said_of(name, error)} {instead_of(name)}"
        ) from error


def named_precision(config: Any) -> torch.dtype | None:
    """The precision that a config names, of a multimodal model for all of it; None: it names none."""
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)


def precision_of(config: Any) -> torch.dtype:
    """Returns the precision that "auto" gives a model's weights when they are read."""
    return named_precision(config) or torch.float32

"""Registers attention functions in transformers' tables, and points configurations to them.

A name, once it is registered, stays in transformers' tables, where it does nothing to a model that does not
point to it, so that nobody's undo depends on anybody else's.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What a model may have attended with before, and what we then call ours while it is attached.
PREVIOUS = {"sdpa": "retain_sdpa", "eager": "retain_eager"}


def previous_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of that name; `eager` lives beside each architecture's attention module.

    Args:
        name: in transformers' table, or `eager`.
        module: the attention module that it is for.
    """
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def register(
    name: str, attention: Callable[..., tuple[Tensor, Tensor | None]], mask: Callable[..., Tensor | None]
) -> None:
    """Put an attention and a mask function of ours into transformers' tables, unless they are there.

    Args:
        name: of both.
        attention: under transformers' signature.
        mask: the same.
    """
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, attention)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask)


def configs_of(base: nn.Module) -> list[Any]:
    """The configurations that modules of a model read their attention's name from, each once."""
    return list({id(part.config): part.config for part in base.modules() if hasattr(part, "config")}.values())


def point(configs: Iterable[Any], name: str, *, only: Collection[str] | None = None) -> list[tuple[Any, str]]:
    """Point configurations to a name; what `point_back` takes: each, and what it said before.

    Args:
        configs: of `configs_of`.
        name: a registered one.
        only: of those that say one of these; None: all.
    """
    before = [(config, config._attn_implementation) for config in configs]
    for config, _ in before:
        # Looked at again: setting one configuration may set another, which it holds.
        if only is None or config._attn_implementation in only:
            config._attn_implementation = name
    return before


def point_back(before: Iterable[tuple[Any, str]]) -> None:
    """Undo `point`."""
    for config, previous in before:
        if config._attn_implementation != previous:
            config._attn_implementation = previous


@contextmanager
def pointed_to(configs: Iterable[Any], name: str) -> Iterator[None]:
    """Inside, configurations point to a name.

    Args:
        configs: of `configs_of`.
        name: a registered one.
    """
    before = point(configs, name)
    try:
        yield
    finally:
        point_back(before)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer, or its attention, is called with: by name, or in the first place."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

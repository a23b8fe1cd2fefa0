"""Registers attention functions in transformers' tables, and points configurations to them.

A name, once it is registered, stays in transformers' tables, where it does nothing to a model that does not
point to it, so that nobody's undo depends on anybody else's.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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


# Keyword under which a step travels from an attention module's hook to the attention function.
STEP = "retain_step"


class AttentionStep:
    """What stands before one layer's attention in one forward."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Callable[[], Any], given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's attention, `[B, S, Q, D]`.

        Args:
            query, key, value: `[B, heads, S, D]`, after norm and RoPE.
            dense: runs what the model would have run.
            given: the further arguments of transformers' function.
        """
        raise NotImplementedError


def intercepted(previous: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function that leaves a layer to the `AttentionStep` in its arguments.

    Args:
        previous: name of the function for calls without such a step; None: there are none.
    """

    def retain_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        step = kwargs.pop(STEP, None)

        def dense() -> tuple[Tensor, Tensor | None]:
            if previous is None:
                raise ValueError(
                    f"{type(module).__name__} attends, and nothing is known of its layer: this model cannot "
                    "be read packed. Please report its architecture."
                )
            return previous_attention(previous, module)(module, query, key, value, attention_mask, **kwargs)

        return step.attend(query, key, value, dense, kwargs) if isinstance(step, AttentionStep) else dense()

    return retain_attention


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

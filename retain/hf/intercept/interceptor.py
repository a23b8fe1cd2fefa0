"""Stands between a model and its attention: functions in transformers' tables, and caches that hear of it.

A name stays in transformers' tables once it is registered, and does nothing to a model that does not point to
it. `retain.hf.intercept.attach` calls the engine of an `InterceptedCache` and knows nothing else of a cache:
that of `retain.Cache` evicts, that of `retain.hf.intercept.lookahead_pass.ReadCache` only reads.

torch.compile breaks its graphs at the functions `outside_graphs`, and leaves alone what they call: what is
held changes from token to token, and a graph of it would be compiled for each.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What a model may have attended with before, and what we then call ours while it is attached.
PREVIOUS = {"sdpa": "retain_sdpa", "eager": "retain_eager"}
# Keyword under which a step travels from an attention module's hook to the attention function.
STEP = "retain_step"

outside_graphs = torch.compiler.disable(reason="retain.Cache runs outside of graphs")


def intercepted(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function that leaves a layer to the step in its arguments: an object with a method
    `attend(query, key, value, dense, given)`, which gives the layer's attention, `[B, S, Q, D]`.

    Of it, `query`, `key` and `value` are `[B, heads, S, D]`, after norm and RoPE, `dense()` runs what the
    model would have run, and `given` are the further arguments of transformers' function.

    Args:
        previous: name of the function for calls without such a step.
    """

    def retain_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        attend = getattr(kwargs.pop(STEP, None), "attend", None)

        def dense() -> tuple[Tensor, Tensor | None]:
            # `eager` is a function in each architecture's module.
            function: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            if previous != "eager":
                function = ALL_ATTENTION_FUNCTIONS.get_interface(previous, function)
            return function(module, query, key, value, attention_mask, **kwargs)

        return dense() if attend is None else attend(query, key, value, dense, kwargs)

    return retain_attention


# Layers of which no masks are made (`masks_unmade`); None: all have theirs.
_UNMADE: ContextVar[str | None] = ContextVar("retain_masks_unmade", default=None)


@contextmanager
def masks_unmade(which: str) -> Iterator[None]:
    """Inside, forwards of attached models make no masks of T x T: of `all` layers, or those of `full`
    attention."""
    token = _UNMADE.set(which)
    try:
        yield
    finally:
        _UNMADE.reset(token)


def mask_function(previous: str) -> Callable[..., Tensor | None]:
    """A mask function that makes none where nothing reads it: as `masks_unmade` says, and in a later forward
    on our cache, a square over the new tokens alone (`Layer.get_mask_sizes`)."""

    def retain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Steps that are one graph have their masks; torch.compile cannot trace a context variable.
        unmade = None if torch.compiler.is_compiling() else _UNMADE.get()
        if unmade == "all" or unmade == "full" and kwargs.get("local_size") is None:
            return None
        if kwargs.get("kv_offset") and kwargs.get("q_length") == kwargs["kv_length"]:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return retain_mask


def check_pointed(decoder: Any) -> None:
    """Refuse (ValueError) an attached model whose config points to other attention than ours."""
    said = decoder.config._attn_implementation
    if said not in PREVIOUS.values():
        raise ValueError(
            "the model's attention implementation was changed after retain.attach: its config says "
            f"{said!r} now. Set 'sdpa' or 'eager', and call retain.attach(model) again."
        )


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer, or its attention, is called with: by name, or in the first place."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


@dataclass(frozen=True, eq=False)
class Step:
    """Travels from an attention module's hook to the attention function.

    Args:
        engine: of the cache, which computes the layer's attention.
        layer_idx: index of the layer in the model.
        hidden_BSE: attention input, after the input layer norm.
        stream_BSE: the same before that norm; None when nobody asked for it.
    """

    engine: Any
    layer_idx: int
    hidden_BSE: Tensor
    stream_BSE: Tensor | None = None

    @outside_graphs
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dense: Callable[[], Any], given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        return self.engine.attention(self, query, key, value, dense)


class InterceptedCache(TransformersCache):
    """A cache of transformers' kind that an attached model shows its attention to.

    Its `engine` (`retain.hf.cache.engine.Engine`) is told when a forward begins and ends, gives a `Step` for
    each attention module that runs, and computes that layer's attention. While `is_static` or `is_quick`, the
    layers of the cache append and attend themselves.
    """

    engine: Any
    state: Any

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        quick = not torch.compiler.is_compiling() and self.engine.is_quick
        if quick and hasattr(self.layers[layer_idx], "quick") or self.engine.is_static:
            return key_states, value_states
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    # Models call it themselves, with a layer's number, for each of which a graph would be compiled.
    @outside_graphs
    def _update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*args, **kwargs)

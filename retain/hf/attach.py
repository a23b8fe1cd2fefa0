"""Connect a model to `retain.Cache`, and disconnect it again.

In: a causal language model. Out: a handle, also a context manager, that undoes everything. Mechanism, the
public extension points of transformers only: an attention function and a mask function registered under a
name of ours, which the model's config then points to; a forward pre-hook on each attention module that hands
our function the cache and the attention input; and hooks on the decoder that show the cache what the call was
given (2D mask, token ids, positions). A method of the instance stands before the model's `generate` and
refuses what would get round a budget.

The one decision taken here: all of it is inert unless the forward's `past_key_values` is a `retain.Cache`.
Any other cache, or none, reaches the implementation that the model had before. No state is kept here; it is
the cache's. What outlives a handle is two names in tables of transformers, under which a function without
state stands that no model is pointed to: so the copies of an attached model depend on no one else's undo.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retain.hf.cache import Cache
from retain.hf.call import Step
from retain.hf.model import base_model, describe, rotary_of
from retain.rotary import Rotary

# What the model may have used before, and what we then call ours.
PREVIOUS = {"sdpa": "retain_sdpa", "eager": "retain_eager"}
# Keyword under which a step travels from the attention module's hook to the attention function.
STEP = "retain_step"


def _previous_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of that name; `eager` lives beside each architecture's attention module."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _attention_function(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def retain_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        step: Step | None = kwargs.pop(STEP, None)

        def dense() -> tuple[Tensor, Tensor | None]:
            return _previous_attention(previous, module)(module, query, key, value, attention_mask, **kwargs)

        if step is None:
            return dense()
        return step.cache.attention(
            step, query, key, value, dense, scaling=kwargs.get("scaling"), soft_cap=kwargs.get("softcap")
        )

    return retain_attention


def _mask_function(previous: str) -> Callable[..., Tensor | None]:
    def retain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return retain_mask


class _BeforeModel:
    """Decoder pre-hook: shows our cache what this forward was given. Also how an attached model is
    recognised."""

    def __init__(self, handle: "Handle", base: nn.Module):
        self.handle = handle
        self.names = list(inspect.signature(base.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        if isinstance(cache, Cache):
            cache.begin(
                input_ids=given.get("input_ids"),
                inputs_embeds=given.get("inputs_embeds"),
                attention_mask=given.get("attention_mask"),
                position_ids=given.get("position_ids"),
                rotary=self.handle.rotary,
            )


def _after_model(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Decoder hook: the forward went through; the cache counts the tokens as seen."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = next((value for value in args if isinstance(value, Cache)), None)
    if isinstance(cache, Cache):
        cache.finish()


def _before_attention(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Attention pre-hook: lets the cache and the attention input travel to the attention function."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, Cache):
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return args, {**kwargs, STEP: cache.expect(module.layer_idx, hidden)}


_ASSISTED = (
    "assisted decoding does not work with retain.Cache: its first forward holds prompt and speculated "
    "tokens, and eviction would see both. Generate without it."
)
# What `generate` may be told, in its arguments or a config, that our cache cannot go along with, and why.
REFUSED = {
    "prefill_chunk_size": "does not work with retain.Cache: it would evict from the first chunk alone and "
    "keep all others whole, whatever the budget. Set it to None, or read the context with "
    "cache.prefill(input_ids, attention_mask) and generate from there.",
    "prompt_lookup_num_tokens": f"asks for assisted decoding: {_ASSISTED}",
    "assistant_model": f"asks for assisted decoding: {_ASSISTED}",
}


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of an attached model: its class's, with what cannot work on our cache refused first.

    Raises:
        ValueError: something of `REFUSED` with a `retain.Cache`.
    """
    if isinstance(kwargs.get("past_key_values"), Cache):
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        for name, reason in REFUSED.items():
            places = {
                name: kwargs.get(name),
                f"generation_config.{name}": getattr(given, name, None),
                f"model.generation_config.{name}": getattr(model.generation_config, name, None),
            }
            for place, value in places.items():
                if value is not None:
                    shown = f"={value}" if isinstance(value, int) else ""
                    raise ValueError(f"{place}{shown} {reason}")
    return type(model).generate(model, *args, **kwargs)


class Handle:
    """Undoes `attach`: call `undo()`, or use it as a context manager."""

    def __init__(self, model: nn.Module):
        specs, base = describe(model), base_model(model)
        previous = str(base.config._attn_implementation)
        if previous not in PREVIOUS:
            raise ValueError(
                f"attention implementation {previous!r} is not supported: call "
                "model.set_attn_implementation('sdpa') "
                f"(or one of {', '.join(map(repr, PREVIOUS))}) before retain.attach(model)."
            )
        self.base = base
        self.previous = previous
        self.name = PREVIOUS[previous]
        if self.name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(self.name, _attention_function(previous))
        if self.name not in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(self.name, _mask_function(previous))
        base.set_attn_implementation(self.name)
        self.model = model
        if hasattr(type(model), "generate") and "generate" not in vars(model):
            # A bound method, so that a deep copy of the model gets one of its own.
            vars(model)["generate"] = MethodType(generate, model)
        self.hooks: list[RemovableHandle] = [
            base.register_forward_pre_hook(_BeforeModel(self, base), with_kwargs=True),
            base.register_forward_hook(_after_model, with_kwargs=True),
            *(spec.module.register_forward_pre_hook(_before_attention, with_kwargs=True) for spec in specs),
        ]

    @cached_property
    def rotary(self) -> Rotary | None:
        """The model's rotary embedding, looked at once, where it is understood."""
        return rotary_of(self.model)

    def undo(self) -> None:
        """Put the model back as it was: hooks gone, its own attention implementation selected. Harmless
        twice."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.base.config._attn_implementation == self.name:
            self.base.set_attn_implementation(self.previous)
        if getattr(vars(self.model).get("generate"), "__func__", None) is generate:
            del vars(self.model)["generate"]

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of an attached model, or None."""
    hooks = base_model(model)._forward_pre_hooks.values()
    return next((hook.handle for hook in hooks if isinstance(hook, _BeforeModel)), None)


def attach(model: nn.Module) -> Handle:
    """Let `retain.Cache` work on this model. Once is enough: a second call returns the same handle.

    Args:
        model: a causal language model of transformers (Llama, Qwen2, Qwen3 and relatives), using `sdpa` or
            `eager`.

    Returns:
        the handle that undoes it.

    Raises:
        ValueError: unsupported architecture or attention implementation; nothing was changed then.

    Example:
        >>> with retain.attach(model):  # doctest: +SKIP
        ...     model.generate(**inputs, past_key_values=retain.Cache(model, policy="snapkv", keep_ratio=0.2))
    """
    return handle_of(model) or Handle(model)


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Attach for the length of a `with`, and leave a model that already was attached as it is."""
    if handle_of(model) is not None:
        yield
        return
    with Handle(model):
        yield

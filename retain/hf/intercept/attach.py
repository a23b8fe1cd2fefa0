"""Connects a model to `retain.Cache`, and disconnects it again.

It uses the public extension points of transformers only: an attention function and a mask function under a
name of ours, which the model's config then points to; hooks on the decoder, its layers and their attention
modules, which show a cache what they are called with (`retain.hf.intercept.interceptor`); and a `generate` of
the instance, which refuses what would get round a budget.

All of it is inert unless the forward's `past_key_values` is an `InterceptedCache`. Any other cache, or none,
reaches the implementation that the model had before. No state is kept here; it is the cache's. What outlives
a handle is two names in tables of transformers, to which no model points: so the copies of an attached model
depend on no one else's undo. A model is attached once, however many ask for it, until the last of them has
undone its handle.
"""

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import StoppingCriteriaList
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from retain.attention.rotary import Rotary
from retain.hf.intercept.ended_sequences import Ended, fills
from retain.hf.intercept.interceptor import (
    PREVIOUS,
    STEP,
    InterceptedCache,
    Step,
    hidden_of,
    intercepted,
    outside_graphs,
    register,
)
from retain.hf.model.decoder import base_model, describe, refuse_prefix, rotary_of


@outside_graphs
def _begin(
    cache: InterceptedCache, decoder: nn.Module, given: dict[str, Any], attachment: "Attachment"
) -> None:
    cache.engine.begin(decoder, given, attachment.rotary)


@outside_graphs
def _expect(cache: InterceptedCache, module: Any, hidden_BSE: Tensor) -> Step:
    return cache.engine.expect(module.layer_idx, hidden_BSE)


@outside_graphs
def _show_stream(cache: InterceptedCache, layer_idx: int, stream_BSE: Tensor) -> None:
    cache.engine.show_stream(layer_idx, stream_BSE)


@outside_graphs
def _finish(cache: InterceptedCache) -> None:
    cache.engine.finish()


def _mask_function(previous: str) -> Callable[..., Tensor | None]:
    def retain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Of a later forward on our cache: a square over the new tokens alone, behind those that were seen
        # (`Layer.get_mask_sizes`), which nothing reads.
        if kwargs.get("kv_offset") and kwargs.get("q_length") == kwargs["kv_length"]:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return retain_mask


class _BeforeModel:
    """Decoder pre-hook: shows our cache what this forward was given. Also how an attached model is
    recognised."""

    def __init__(self, attachment: "Attachment", base: nn.Module):
        self.attachment = attachment
        self.names = list(inspect.signature(base.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        if isinstance(cache, InterceptedCache):
            _begin(cache, module, given, self.attachment)


def _after_model(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Decoder hook: the forward went through; the cache counts the tokens as seen."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = next((value for value in args if isinstance(value, InterceptedCache)), None)
    if isinstance(cache, InterceptedCache):
        _finish(cache)


def _before_layer(layer_idx: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Decoder-layer pre-hook: shows the cache the residual stream, if its gates look at that."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, InterceptedCache) and cache.engine.reads_stream:
        _show_stream(cache, layer_idx, hidden_of(args, kwargs))


def _before_attention(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Attention pre-hook: lets the cache and the attention input travel to the attention function."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, InterceptedCache):
        return None
    return args, {**kwargs, STEP: _expect(cache, module, hidden_of(args, kwargs))}


_ASSISTED = (
    "asks for assisted decoding, which does not work with retain.Cache: it reads tokens that it may have to "
    "forget again, and an eviction cannot be undone. Generate without it."
)
# What `generate` may be told, in its arguments or a config, that our cache cannot go along with, and why.
REFUSED = {
    "assistant_model": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "use_mtp": _ASSISTED,
    "penalty_alpha": "asks for contrastive search, which does not work with retain.Cache: it reads top_k "
    "candidates and forgets all but one of them, and an eviction cannot be undone. Generate without it.",
    "cache_implementation": "asks transformers for a cache of its own, and past_key_values is a "
    "retain.Cache, which grows and shrinks: pass one of the two.",
    "use_cache": "reads all tokens again for each new one, and past_key_values is a retain.Cache, which has "
    "read them: leave one of the two out.",
    "output_attentions": "asks for attention weights, and attention over ragged rows has no matrix of them: "
    "generate without it (cache.prefill(..., evict=False, hold_evidence=True) shows queries and keys).",
}
# Settings that ask for something where they are off.
OFF = ("use_cache",)
# Values that say nothing: `hybrid` is what checkpoints with sliding windows once had to name as their
# cache_implementation, and transformers takes it for nothing too.
UNSTATED = (None, "hybrid")


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of an attached model: its class's, with what cannot work on our cache refused first, and
    with our cache told how long a prompt is that comes in chunks.

    Raises:
        ValueError: something of `REFUSED` with a `retain.Cache`, or chunks that cannot be told apart; or,
            once it is over, our cache was never used.
    """
    own = type(model).generate
    names = list(inspect.signature(own).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = given.get("past_key_values")
    if not isinstance(cache, InterceptedCache):
        return own(model, *args, **kwargs)
    engine = cache.engine

    def stated(name: str) -> tuple[str, Any]:
        """Where a setting is given, and what it says; the first place that says something. An argument that
        is None overrides configs."""
        if name in given:
            return name, None if given[name] in UNSTATED else given[name]
        places = {
            f"generation_config.{name}": getattr(given.get("generation_config"), name, None),
            f"model.generation_config.{name}": getattr(model.generation_config, name, None),
        }
        return next(
            ((place, value) for place, value in places.items() if value not in UNSTATED), (name, None)
        )

    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    refuse_prefix(wrapper)  # of peft, which puts its own method here for as long as it generates
    for name, reason in REFUSED.items():
        place, value = stated(name)
        if value is not None and (value is False or value == 0) == (name in OFF):
            shown = f"={value!r}" if isinstance(value, int | float | str) else ""
            raise ValueError(f"{place}{shown} {reason}")
    place, chunk_size = stated("prefill_chunk_size")
    width = None
    if chunk_size is not None:
        ids = given.get("input_ids", given.get("inputs"))
        if not isinstance(ids, Tensor) or engine.num_seen:
            why = (
                f"on a cache that has seen {engine.num_seen} tokens makes transformers read the whole input "
                "again"
                if engine.num_seen
                else "needs input_ids: of embeddings transformers makes no chunks"
            )
            raise ValueError(
                f"{place}={chunk_size} {why}. Leave it out, or read a context with cache.prefill(input_ids, "
                "attention_mask, chunk_size=...) and generate from there."
            )
        width = ids.shape[1]
    engine.check_ids(given.get("input_ids", given.get("inputs")), given.get("attention_mask"))
    before, criteria = engine.num_seen, given.get("stopping_criteria")
    with engine.generating(width, given.get("attention_mask")) as hear_ends:
        if fills(stated("eos_token_id")[1], criteria):
            criteria, at = StoppingCriteriaList([*(criteria or ()), Ended(hear_ends)]), len(args)
            if "stopping_criteria" in names[:at]:
                at = names.index("stopping_criteria")
                args = (*args[:at], criteria, *args[at + 1 :])
            else:
                kwargs = {**kwargs, "stopping_criteria": criteria}
        output = own(model, *args, **kwargs)
    if engine.num_seen == before:
        raise ValueError(
            f"generate left past_key_values unread (it has seen {before} tokens, as before), so nothing was "
            "evicted: something stands between, which brings a cache of its own. Generate without it."
        )
    return output


def _generating(model: nn.Module) -> Any:
    """The model whose `generate` every other way to generate ends in (a peft wrapper's, a pipeline's); None
    if it has none."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if hasattr(type(inner), "generate") else None


class Attachment:
    """What connects one model: its hooks, its attention's name and the guard before its `generate`, put there
    once however many handles ask for it, and taken away with the last.

    A copy of an attached model, by `copy.deepcopy`, pickle or `torch.save`, in whatever process, is attached
    too, and no handle of the original is one of the copy.
    """

    def __init__(self, model: nn.Module):
        specs, base = describe(model), base_model(model)
        previous = str(base.config._attn_implementation)
        previous = next((name for name, ours in PREVIOUS.items() if ours == previous), previous)
        if previous not in PREVIOUS:
            raise ValueError(
                f"attention implementation {previous!r} is not supported: call "
                "model.set_attn_implementation('sdpa') "
                f"(or one of {', '.join(map(repr, PREVIOUS))}) before retain.attach(model)."
            )
        self.base = base
        self.previous = previous
        self.name = PREVIOUS[previous]
        self._connect()
        base.set_attn_implementation(self.name)
        self.model = model
        self.num_handles = 0
        self.generating: list[Any] = []
        self.hooks: list[RemovableHandle] = [
            base.register_forward_pre_hook(_BeforeModel(self, base), with_kwargs=True),
            base.register_forward_hook(_after_model, with_kwargs=True),
            *(spec.module.register_forward_pre_hook(_before_attention, with_kwargs=True) for spec in specs),
            *(
                base.layers[spec.layer_idx].register_forward_pre_hook(
                    partial(_before_layer, spec.layer_idx), with_kwargs=True
                )
                for spec in specs
            ),
        ]

    def _connect(self) -> None:
        """What is of the process, not of the model."""
        register(self.name, intercepted(self.previous), _mask_function(self.previous))
        _ATTACHED.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_handles": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def guard(self, model: nn.Module) -> None:
        """Put our `generate` before the model's own, if it has one."""
        inner = _generating(model)
        if inner is not None and "generate" not in vars(inner):
            # No method, which a copy would look up by its name.
            vars(inner)["generate"] = partial(generate, inner)
            self.generating.append(inner)

    @cached_property
    def rotary(self) -> Rotary | None:
        """The model's rotary embedding, looked at once, where it is understood."""
        return rotary_of(self.model)

    def undo(self) -> None:
        """Put the model back as it was: hooks gone, its own attention implementation selected."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        _ATTACHED.discard(self)
        config = self.base.config
        # Another attached model may have been made from the same config, and then goes by it still.
        shared = any(other.base.config is config for other in _ATTACHED)
        if config._attn_implementation == self.name and not shared:
            self.base.set_attn_implementation(self.previous)
        for model in self.generating:
            if getattr(vars(model).get("generate"), "func", None) is generate:
                del vars(model)["generate"]
        self.generating = []


# Models that are attached in this process, for those that share a config.
_ATTACHED: "WeakSet[Attachment]" = WeakSet()


class Handle:
    """Undoes one `attach`: call `undo()`, or use it as a context manager."""

    def __init__(self, attachment: Attachment):
        self._attachment: Attachment | None = attachment
        self.model = attachment.model
        attachment.num_handles += 1

    def undo(self) -> None:
        """Take this `attach` back; the model is as it was when the last of them was. Harmless twice."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        attachment.num_handles -= 1
        if attachment.num_handles < 1:
            attachment.undo()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def attachment_of(model: nn.Module) -> Attachment | None:
    """What an attached model is connected by, or None."""
    hooks = base_model(model)._forward_pre_hooks.values()
    return next((hook.attachment for hook in hooks if isinstance(hook, _BeforeModel)), None)


def attach(model: nn.Module) -> Handle:
    """Let `retain.Cache` work on this model. Once is enough; what asks again (a function that attaches for
    itself, say) gets a handle of its own, and the model stays attached until the last handle is undone.

    A copy of an attached model (`copy.deepcopy`, pickle, `torch.save` of the whole model, also in another
    process) is attached as well. It has no handle: the first one that is made of it and undone undoes it.

    Args:
        model: a causal language model of transformers (Llama, Qwen2, Qwen3 and relatives), using `sdpa` or
            `eager`.

    Returns:
        a handle, whose `undo()`, or the end of its `with`, takes this call back.

    Raises:
        ValueError: unsupported architecture or attention implementation; nothing was changed then.

    Example:
        >>> with retain.attach(model):  # doctest: +SKIP
        ...     model.generate(**inputs, past_key_values=retain.Cache(model, policy="snapkv", keep_ratio=0.2))
    """
    attachment = attachment_of(model) or Attachment(model)
    attachment.guard(model)  # it may have been its decoder that was attached
    return Handle(attachment)

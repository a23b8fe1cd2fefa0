"""Connects a model to `retain.Cache`, and disconnects it again.

It uses the public extension points of transformers only: an attention and a mask function under a name of
ours, which the model's config then points to; hooks on the decoder, its layers and their attention modules;
and a `generate` of the instance, which refuses what would get round a budget.

All of it is inert unless the forward's `past_key_values` is an `InterceptedCache`. No state is kept here; it
is the cache's. A model is attached once, however many ask for it, until the last of them has undone its
handle.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from retain.attention.rotary import Rotary
from retain.hf.intercept.interceptor import (
    PREVIOUS,
    STEP,
    InterceptedCache,
    hidden_of,
    intercepted,
    outside_graphs,
    register,
)
from retain.hf.model.decoder import base_model, describe, refuse_prefix, rotary_of
from retain.hf.model.latent import Latent, LatentCache
from retain.hf.version_names import CACHE, NAMES


@outside_graphs
def _outside_graphs(method: Callable[..., Any], *args: Any) -> Any:
    return method(*args)


def _mask_function(previous: str) -> Callable[..., Tensor | None]:
    def retain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Of a later forward on our cache: a square over the new tokens alone, behind those that were seen
        # (`Layer.get_mask_sizes`), which nothing reads.
        if kwargs.get("kv_offset") and kwargs.get("q_length") == kwargs["kv_length"]:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return retain_mask


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by whichever name; None: there is none.

    Raises:
        ValueError: two caches, one of them ours.
    """
    cache, former = map(given.get, NAMES)
    if cache is None or former is None or cache is former:
        return former if cache is None else cache
    if isinstance(cache, InterceptedCache) or isinstance(former, InterceptedCache):
        shown = f"cache={type(cache).__name__}, past_key_values={type(former).__name__}"
        raise ValueError(f"two caches were given, and a model reads one: {shown}. Pass one of the two.")
    return cache


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which a cache has the name of the installed version."""
    others = {name: value for name, value in given.items() if name not in NAMES}
    return others if (cache := cache_in(given)) is None else {**others, CACHE: cache}


def _name_cache(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Model pre-hook: gives our cache the name that the installed version has for it."""
    named_otherwise = any(name in kwargs for name in NAMES if name != CACHE)
    if named_otherwise and isinstance(cache_in(kwargs), InterceptedCache):
        return args, renamed(kwargs)
    return None


class _BeforeModel:
    """Decoder pre-hook: shows our cache what a forward was given. By it an attached model is recognised."""

    def __init__(self, attachment: "Attachment", base: nn.Module):
        self.attachment = attachment
        self.names = list(inspect.signature(base.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if isinstance(cache := cache_in(given), InterceptedCache):
            _outside_graphs(cache.engine.begin, module, given, self.attachment.rotary)
        return _name_cache(module, args, kwargs)


def _after_model(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Decoder hook: the forward went through; the cache counts the tokens as seen."""
    for cache in (cache_in(kwargs), *args):
        if isinstance(cache, InterceptedCache):
            _outside_graphs(cache.engine.finish)


def _before_layer(layer_idx: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Decoder-layer pre-hook: shows the cache the residual stream, if its gates look at that."""
    cache = cache_in(kwargs)
    if isinstance(cache, InterceptedCache) and cache.engine.reads_stream:
        _outside_graphs(cache.engine.show_stream, layer_idx, hidden_of(args, kwargs))


def _before_attention(
    latent: Latent | None, module: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict] | None:
    """Attention pre-hook: lets the cache and the attention input travel to the attention function."""
    cache = cache_in(kwargs)
    if not isinstance(cache, InterceptedCache):
        return None
    step = _outside_graphs(cache.engine.expect, module.layer_idx, hidden_of(args, kwargs))
    if latent is None:
        return args, {**kwargs, STEP: step}
    latents = LatentCache(latent, module, cache)
    return args, {**kwargs, STEP: replace(step, latents=latents), CACHE: latents}


_ASSISTED = (
    "asks for assisted decoding, which forgets tokens that it has read, and an eviction cannot be undone. "
    "Generate without it."
)
# What `generate` may be told, in its arguments or a config, that our cache cannot go along with, and why.
REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"), _ASSISTED
    ),
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


class _Ended(StoppingCriteria):
    """A criterion behind all others that ends nothing, and hears which sequences they have ended.

    `generate` goes on until the last sequence has ended, and its mask calls the pads behind the others
    tokens. Which have ended its criteria decide (end tokens, stop strings, a user's own), asked after every
    sampled token.
    """

    def __init__(self, hear: Callable[[Tensor], None]):
        self.hear = hear

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        nothing_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        answer_B = nothing_B.as_subclass(_Answer)
        answer_B.hear = self.hear
        return answer_B


class _Answer(Tensor):
    """The answer of `_Ended`. transformers joins answers as `earlier | answer`: so it hears the others."""

    hear: Callable[[Tensor], None]

    def __ror__(self, earlier_B: Tensor) -> Tensor:  # type: ignore[override]
        self.hear(earlier_B)
        return earlier_B


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
    cache = cache_in(given)
    if not isinstance(cache, InterceptedCache):
        return own(model, *args, **kwargs)
    engine = cache.engine

    def stated(name: str) -> tuple[str, Any]:
        """Where a setting is given first, and what it says. An argument that is None overrides configs."""
        if name in given:
            return name, None if given[name] in UNSTATED else given[name]
        places = {
            "generation_config": given.get("generation_config"),
            "model.generation_config": model.generation_config,
        }
        for place, config in places.items():
            if (value := getattr(config, name, None)) not in UNSTATED:
                return f"{place}.{name}", value
        return name, None

    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    refuse_prefix(wrapper)  # of peft, which puts its own method here for as long as it generates
    for name, reason in REFUSED.items():
        place, value = stated(name)
        if value is not None and (value is False or value == 0) == (name in OFF):
            shown = f"={value!r}" if isinstance(value, int | float | str) else ""
            raise ValueError(f"{place}{shown} {reason}")
    ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
    place, chunk_size = stated("prefill_chunk_size")
    if chunk_size is not None and (engine.num_seen or not isinstance(ids, Tensor)):
        why = "needs input_ids: of embeddings transformers makes no chunks"
        if engine.num_seen:
            why = f"on a cache that has seen {engine.num_seen} tokens makes transformers read all input again"
        raise ValueError(
            f"{place}={chunk_size} {why}. Leave it out, or read a context with cache.prefill(input_ids, "
            "attention_mask, chunk_size=...) and generate from there."
        )
    engine.check_ids(ids, mask)
    before, criteria = engine.num_seen, given.get("stopping_criteria")
    with engine.generating(None if chunk_size is None else ids.shape[1], mask) as hear_ends:
        # Padding comes behind ended sequences where some criterion has end tokens; else what is sampled there
        # is returned, and stored.
        ends = stated("eos_token_id")[1] is not None
        if ends or any(hasattr(criterion, "eos_token_id") for criterion in criteria or ()):
            given["stopping_criteria"] = StoppingCriteriaList([*(criteria or ()), _Ended(hear_ends)])
        by_place = [given.pop(name) for name in names[: len(args)]]
        output = own(model, *by_place, **renamed(given))
    if engine.num_seen == before:
        raise ValueError(
            f"generate left the cache unread (it has seen {before} tokens, as before), so nothing was "
            "evicted: something stands between, which brings a cache of its own. Generate without it."
        )
    return output


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
        cap = getattr(base.config, "attn_logit_softcapping", None)
        if cap is not None and previous == "sdpa":
            raise ValueError(
                f"{type(model).__name__} caps its attention logits at {cap:g} (attn_logit_softcapping), and "
                "transformers' sdpa leaves that out without a word, where attention over what is kept would "
                "not: call model.set_attn_implementation('eager') before retain.attach(model)."
            )
        self.model, self.base = model, base
        self.previous, self.name = previous, PREVIOUS[previous]
        self.num_handles = 0
        self.generating: list[Any] = []
        self._connect()
        base.set_attn_implementation(self.name)
        self.hooks: list[RemovableHandle] = [
            base.register_forward_pre_hook(_BeforeModel(self, base), with_kwargs=True),
            base.register_forward_hook(_after_model, with_kwargs=True),
        ]
        for spec in specs:
            before_layer = partial(_before_layer, spec.layer_idx)
            for module, hook in (
                (spec.module, partial(_before_attention, spec.latent)),
                (base.layers[spec.layer_idx], before_layer),
            ):
                self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

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
        """Put our `generate` before the one in which a peft wrapper's and a pipeline's end too."""
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        if hasattr(type(inner), "generate") and "generate" not in vars(inner):
            # No method, which a copy would look up by its name.
            vars(inner)["generate"] = partial(generate, inner)
            self.generating.append(inner)
            if inner is not self.base:
                self.hooks.append(inner.register_forward_pre_hook(_name_cache, with_kwargs=True))

    @cached_property
    def rotary(self) -> Rotary | None:
        """The model's rotary embedding, looked at once, where it is understood."""
        return rotary_of(self.model)

    def undo(self) -> None:
        """Put the model back as it was: hooks gone, its own attention implementation selected."""
        for hook in self.hooks:
            hook.remove()
        _ATTACHED.discard(self)
        config = self.base.config
        # Another attached model may have been made from the same config, and then goes by it still.
        shared = any(other.base.config is config for other in _ATTACHED)
        if config._attn_implementation == self.name and not shared:
            self.base.set_attn_implementation(self.previous)
        for model in self.generating:
            if getattr(vars(model).get("generate"), "func", None) is generate:
                del vars(model)["generate"]


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
        if attachment is not None:
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

    Examples:
        >>> with retain.attach(model):  # doctest: +SKIP
        ...     model.generate(**inputs, past_key_values=retain.Cache(model, policy="snapkv", keep_ratio=0.2))
    """
    attachment = attachment_of(model) or Attachment(model)
    attachment.guard(model)  # it may have been its decoder that was attached
    return Handle(attachment)

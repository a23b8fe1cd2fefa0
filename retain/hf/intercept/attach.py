"""Connects a model to `retain.Cache`, and disconnects it again.

It uses the public extension points of transformers only: an attention and a mask function under a name of
ours, which the model's config then points to; hooks on the decoder, its layers and their attention modules;
and a `generate` of the instance, which refuses what would get round a budget.

All of it is inert unless the forward's cache is an `InterceptedCache`. No state is kept here; it is the
cache's. A model is attached once, however many ask for it, until the last of them has undone its handle, or
`detach` has taken everything away. Whoever asks again has mended what was changed in between.
One lock lets one thread at a time attach, undo or detach.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
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
from retain.hf.model.decoder import base_model, describe, refuse_prefix, rotary_of, windowed
from retain.hf.model.layout import LayerSpec
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
            if cache.engine.is_static:
                return None
            _outside_graphs(_begin, cache, module, given, self.attachment)
        return _name_cache(module, args, kwargs)


def _begin(cache: InterceptedCache, decoder: Any, given: dict[str, Any], attachment: "Attachment") -> None:
    """Start a forward on our cache, unless it was asked for what the cache cannot do."""
    _refuse(given, {"model.config": decoder.config}, OF_A_FORWARD)
    if cache.engine.reads_stream:
        attachment.hook_layers()
    cache.engine.begin(decoder, given, attachment.rotary)


def _after_model(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Decoder hook: the forward went through; the cache counts the tokens as seen."""
    for cache in (cache_in(kwargs), *args):
        if isinstance(cache, InterceptedCache) and not cache.engine.is_static:
            _outside_graphs(cache.engine.finish)


def _before_layer(layer_idx: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Decoder-layer pre-hook: shows the cache the residual stream, if its gates look at that."""
    cache = cache_in(kwargs)
    if not isinstance(cache, InterceptedCache):
        return
    if cache.engine.is_static:
        cache.layers[layer_idx].static.show("stream", hidden_of(args, kwargs))
    elif cache.engine.reads_stream:
        _outside_graphs(cache.engine.show_stream, layer_idx, hidden_of(args, kwargs))


def _before_attention(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Attention pre-hook: lets the cache and the attention input travel to the attention function."""
    cache = kwargs[CACHE] if CACHE in kwargs else cache_in(kwargs)
    if not isinstance(cache, InterceptedCache):
        return None
    if not torch.compiler.is_compiling() and cache.engine.is_quick:
        return args, {**kwargs, STEP: cache.layers[module.layer_idx].quick}
    if cache.engine.is_static:
        rows = cache.layers[module.layer_idx].static
        rows.show("hidden", hidden_of(args, kwargs))
        return args, {**kwargs, STEP: rows}
    step = _outside_graphs(cache.engine.expect, module.layer_idx, hidden_of(args, kwargs))
    return args, {**kwargs, STEP: step}


def _before_window(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """The same of a layer that is left to transformers: it is the cache's while steps are one graph."""
    cache = cache_in(kwargs)
    if isinstance(cache, InterceptedCache) and cache.engine.is_static:
        return args, {**kwargs, STEP: cache.layers[module.layer_idx].static}
    return None


_ASSISTED = (
    "asks for assisted decoding, which forgets tokens that it has read, and an eviction cannot be undone. "
    "Leave it out."
)
# Settings of `generate`, in its arguments or a config, that our cache cannot go along with, and why.
REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"), _ASSISTED
    ),
    "penalty_alpha": "asks for contrastive search, which does not work with retain.Cache: it reads top_k "
    "candidates and forgets all but one of them, and an eviction cannot be undone. Leave it out.",
    "cache_implementation": f"asks transformers for a cache of its own, and {CACHE} is a retain.Cache, which "
    "grows and shrinks: pass one of the two.",
    "prefill_chunk_size": "reads a prompt in chunks, whose end the cache would not know: read the context "
    "with cache.prefill(input_ids, attention_mask, chunk_size=...), and generate from there.",
    "use_cache": "asks for no cache, so that generate reads all tokens again for each new one, and "
    f"{CACHE} is a retain.Cache, which has read them: leave one of the two out.",
}
# The same of a forward, which `generate` hands on.
OF_A_FORWARD = {
    "output_attentions": "asks for attention weights, and attention over ragged rows has no matrix of them: "
    "leave it out (cache.prefill(..., evict=False, hold_evidence=True) shows queries and keys).",
}
# Settings that ask for something where they are off.
OFF = ("use_cache",)
# Values that say nothing: `hybrid` is what checkpoints with sliding windows once had to name as their
# cache_implementation, and transformers takes it for nothing too.
UNSTATED = (None, "hybrid")


def _stated(name: str, given: Mapping[str, Any], configs: Mapping[str, Any]) -> tuple[str, Any]:
    """Where a setting is given first, and what it says. An argument that is None overrides configs."""
    if name in given:
        return name, None if given[name] in UNSTATED else given[name]
    for place, config in configs.items():
        if (value := getattr(config, name, None)) not in UNSTATED:
            return f"{place}.{name}", value
    return name, None


def _refuse(given: Mapping[str, Any], configs: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse what a call, or a config that it goes by, asks for and our cache cannot do."""
    for name, reason in reasons.items():
        place, value = _stated(name, given, configs)
        if value is not None and (value is False or value == 0) == (name in OFF):
            shown = f"={value!r}" if isinstance(value, int | float | str) else ""
            raise ValueError(f"{place}{shown} {reason}")


class _Heard(StoppingCriteria):
    """A criterion that ends nothing, and hears the ids behind every sampled token."""

    def __init__(self, hear: Callable[[Tensor], None]):
        self.hear = hear

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.hear(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of an attached model: its class's, with what cannot work on our cache refused first.

    Raises:
        ValueError: something of `REFUSED` with a `retain.Cache`; or our cache was never used.
    """
    own = type(model).generate
    names = list(inspect.signature(own).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_in(given)
    if not isinstance(cache, InterceptedCache):
        return own(model, *args, **kwargs)
    engine = cache.engine
    configs = {
        "generation_config": given.get("generation_config"),
        "model.generation_config": model.generation_config,
    }
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    refuse_prefix(wrapper)  # of peft, which puts its own method here for as long as it generates
    _refuse(given, configs, {**REFUSED, **OF_A_FORWARD})
    _refuse({}, {"model.config": base_model(model).config}, OF_A_FORWARD)  # no argument overrides it
    ids = given.get("inputs") if given.get("input_ids") is None else given["input_ids"]
    mask = given.get("attention_mask")
    engine.check_ids(ids, mask, given.get("inputs_embeds"))
    before, criteria = engine.num_seen, given.get("stopping_criteria")
    room = _room(model, given, configs, ids)
    with engine.generating(room) as hear:
        if room:
            given["stopping_criteria"] = StoppingCriteriaList([*(criteria or ()), _Heard(hear)])
        by_place = [given.pop(name) for name in names[: len(args)]]
        output = own(model, *by_place, **renamed(given))
    if engine.num_seen == before:
        raise ValueError(
            f"generate left the cache unread (it has seen {before} tokens, as before), so nothing was "
            "evicted: something stands between, which brings a cache of its own. Generate without it."
        )
    return output


def _room(model: Any, given: Mapping[str, Any], configs: Mapping[str, Any], ids: Any) -> int | None:
    """Tokens that a `generate` may add, where its steps are to be compiled, 0 where that was asked for and
    beams stand against it; None: they are not."""

    def stated(name: str) -> Any:
        return _stated(name, given, configs)[1]

    # On a GPU transformers would compile without being asked to: not until the kernel has met one.
    config = stated("compile_config")
    if config is None or stated("disable_compile"):
        return None
    if not (config._compile_all_devices or model.device.type == "cuda"):
        return None
    if (stated("num_beams") or 1) > 1:
        return 0
    if (most := stated("max_new_tokens")) is not None:
        return int(most)
    seen = ids.shape[1] if isinstance(ids, Tensor) else 0
    return max(1, int(stated("max_length") or 20) - seen)


# Held while a model is attached or detached, or an undo of a handle looks whether it is the last.
_LOCK = threading.RLock()
# Where a decoder keeps its attachment.
_PLACE = "_retain_attachment"


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    ours = (_after_model, _before_layer, _before_attention, _before_window, _name_cache, generate)
    return isinstance(function, _BeforeModel) or function in ours


def _take_away(modules: Iterable[nn.Module]) -> None:
    """Remove our hooks and our `generate` from modules."""
    for module in modules:
        for hooks, called in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for number in [number for number, hook in hooks.items() if _is_ours(hook)]:
                del hooks[number]
                called.pop(number, None)
        if _is_ours(vars(module).get("generate")):
            del vars(module)["generate"]


def _inner(model: Any) -> Any:
    """The model in which a peft wrapper's `generate` and a pipeline's end too."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _name_for(base: Any) -> str:
    """Our name for the attention that a decoder's config says, which may be ours already.

    Raises:
        ValueError: it is none of which ours can take the place.
    """
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
            f"{type(base).__name__} caps its attention logits at {cap:g} (attn_logit_softcapping), and "
            "transformers' sdpa leaves that out without a word, where attention over what is kept would "
            "not: call model.set_attn_implementation('eager') before retain.attach(model)."
        )
    return PREVIOUS[previous]


def _register() -> None:
    """Have our functions in transformers' tables."""
    for previous, name in PREVIOUS.items():
        register(name, intercepted(previous), _mask_function(previous))


class Attachment:
    """What connects one model: its hooks, its attention's name and the guard before its `generate`, put there
    once however many handles ask for it, and taken away with the last.

    A copy of an attached model, by `copy.deepcopy`, pickle or `torch.save`, in whatever process, is attached
    too, and no handle of the original is one of the copy.
    """

    def __init__(self, model: nn.Module):
        self.model, self.base = model, base_model(model)
        self.num_handles = 0
        self.generating: list[Any] = []  # models before whose `generate` ours stands
        self.hooks: list[RemovableHandle] = []  # empty once it was taken away
        self.evicting: list[int] = []  # layers that evict
        self.hooks_layers = False  # whether there are hooks on these layers too, beside those on attention

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_handles": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with _LOCK:
            _register()
            _ATTACHED.add(self)

    def mend(self, model: nn.Module) -> None:
        """Put there what is missing, and put in its place what is not as it was. Where all is well nothing is
        touched: a forward may be running.

        Raises:
            ValueError: unsupported architecture or attention implementation; nothing was changed then.
        """
        base, inner, name = self.base, _inner(model), _name_for(self.base)
        specs = None if self._is_whole() else describe(model)
        _register()
        if base.config._attn_implementation != name:
            base.set_attn_implementation(name)
            if base.config._attn_implementation != name:
                raise ValueError(
                    f"transformers does not let the attention implementation of {type(base).__name__} be "
                    "set, since its source cannot be read or does not use ALL_ATTENTION_FUNCTIONS: define "
                    "it in a file that does."
                )
        vars(base)[_PLACE] = self
        _ATTACHED.add(self)
        if specs is not None:
            generating, self.generating = self.generating, []
            _take_away([*base.modules(), *generating])
            self.hooks.clear()
            self._hook(specs)
            for own in generating:
                self._guard(own)
        self._guard(inner)  # it may have been its decoder that was attached

    def _is_whole(self) -> bool:
        """Whether all of our hooks and guards are there."""
        modules = {*self.base.modules(), *self.generating}
        there = {id(own) for one in modules for own in (one._forward_pre_hooks, one._forward_hooks)}
        found = [(hook.hooks_dict_ref(), hook.id) for hook in self.hooks]
        whole = all(hooks is not None and id(hooks) in there and number in hooks for hooks, number in found)
        return bool(found) and whole and all("generate" in vars(own) for own in self.generating)

    def _hook(self, specs: Iterable[LayerSpec]) -> None:
        base = self.base
        self.hooks += [
            base.register_forward_pre_hook(_BeforeModel(self, base), with_kwargs=True),
            base.register_forward_hook(_after_model, with_kwargs=True),
        ]
        self.evicting, self.hooks_layers = [], False
        for spec in specs:
            self.evicting.append(spec.layer_idx)
            self.hooks.append(spec.module.register_forward_pre_hook(_before_attention, with_kwargs=True))
        for module in windowed(base):
            self.hooks.append(module.register_forward_pre_hook(_before_window, with_kwargs=True))

    def hook_layers(self) -> None:
        """Have decoder layers show the residual stream, from the first cache on whose gates look at it: to
        others these hooks would be time alone."""
        with _LOCK:
            for layer_idx in () if self.hooks_layers or not self.hooks else self.evicting:
                hook, layer = partial(_before_layer, layer_idx), self.base.layers[layer_idx]
                self.hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            self.hooks_layers = True

    def _guard(self, inner: Any) -> None:
        """Put our `generate` before that of a model, unless it is there, or somebody else's is."""
        if not hasattr(type(inner), "generate") or any(own is inner for own in self.generating):
            return
        if "generate" in vars(inner):
            return
        # No method, which a copy would look up by its name.
        vars(inner)["generate"] = partial(generate, inner)
        self.generating.append(inner)
        if inner is not self.base:
            self.hooks.append(inner.register_forward_pre_hook(_name_cache, with_kwargs=True))

    @cached_property
    def rotary(self) -> Rotary | None:
        """The model's rotary embedding, looked at once, where it is understood."""
        return rotary_of(self.model)


# Models that are attached in this process, for those that share a config.
_ATTACHED: "WeakSet[Attachment]" = WeakSet()


class Handle:
    """Undoes one `attach`: call `undo()`, or use it as a context manager."""

    def __init__(self, attachment: Attachment):
        self._attachment: Attachment | None = attachment
        self.model = attachment.model
        attachment.num_handles += 1

    def undo(self) -> None:
        """Take this `attach` back; the model is as it was when the last of them was. Harmless twice, and once
        the model was detached."""
        with _LOCK:
            attachment, self._attachment = self._attachment, None
            if attachment is None or not attachment.hooks:
                return
            attachment.num_handles -= 1
            if attachment.num_handles < 1:
                detach(attachment.base)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def attachment_of(model: nn.Module) -> Attachment | None:
    """What an attached model is connected by, or None."""
    return vars(base_model(model)).get(_PLACE)


def attach(model: nn.Module) -> Handle:
    """Let `retain.Cache` work on this model. Once is enough; what asks again (a function that attaches for
    itself, say) gets a handle of its own, and the model stays attached until the last handle is undone, or
    `retain.detach(model)` needs none.

    Of a model that is attached it mends what was changed since: another attention implementation in the
    config (which takes its place under ours), or hooks that are gone. Threads may attach at once.

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
        ...     model.generate(**inputs, cache=retain.Cache(model, policy="snapkv", keep_ratio=0.2))
    """
    with _LOCK:
        attachment = attachment_of(model) or Attachment(model)
        attachment.mend(model)
        return Handle(attachment)


def detach(model: nn.Module) -> None:
    """Take away everything that `attach` put on a model, however often it was called. No handle is needed;
    those that exist do nothing from then on. Harmless where nothing is attached.

    The attention implementation is the one that the model had, or was last told.

    Args:
        model: the model, its decoder, or a wrapper of peft.

    Raises:
        ValueError: it is no decoder of transformers.

    Examples:
        >>> retain.attach(model)  # doctest: +SKIP
        >>> retain.detach(model)  # doctest: +SKIP
    """
    with _LOCK:
        base = base_model(model)
        attachment = vars(base).pop(_PLACE, None)
        modules = [*base.modules(), model, _inner(model)]
        if attachment is not None:
            modules += attachment.generating
            attachment.hooks.clear()
            _ATTACHED.discard(attachment)
        _take_away(modules)
        config = base.config
        own = {ours: previous for previous, ours in PREVIOUS.items()}.get(config._attn_implementation)
        # Another attached model may have been made from the same config, and then goes by it still.
        if own is not None and not any(other.base.config is config for other in _ATTACHED):
            base.set_attn_implementation(own)

"""Connects a model to `retain.Cache`, and disconnects it again.

It registers an attention and a mask function under a name of ours, to which the model's config then points;
puts hooks on the decoder, its layers and their attention modules; and gives the instance a `generate` that
refuses what would get round a budget. All of it is inert unless the forward's cache is an `InterceptedCache`,
which holds all state. A model is attached once, however many ask for it, until the last of them has undone
its handle, or `detach` has taken everything away. One lock lets one thread at a time attach, undo or detach.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, StoppingCriteriaList

from retain.hf.intercept.interceptor import (
    PREVIOUS,
    STEP,
    InterceptedCache,
    hidden_of,
    intercepted,
    mask_function,
    outside_graphs,
)
from retain.hf.model.decoder import base_model, layout_of, refuse_learned_prompt
from retain.hf.model.layout import Layout
from retain.hf.version_names import CACHE, NAMES


@outside_graphs
def _outside_graphs(method: Callable[..., Any], *args: Any) -> Any:
    return method(*args)


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by whichever name; None: there is none."""
    cache, former = map(given.get, NAMES)
    return former if cache is None else cache


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which a cache has the name of the installed version."""
    others = {name: value for name, value in given.items() if name not in NAMES}
    return others if (cache := cache_in(given)) is None else {**others, CACHE: cache}


def _before_model(attachment: "Attachment", module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Decoder pre-hook: shows our cache what a forward was given."""
    given = {**dict(zip(attachment.names, args, strict=False)), **kwargs}
    cache = cache_in(given)
    if isinstance(cache, InterceptedCache) and not cache.engine.is_static:
        _outside_graphs(_begin, cache, module, given, attachment)


def _begin(cache: InterceptedCache, decoder: Any, given: dict[str, Any], attachment: "Attachment") -> None:
    """Start a forward on our cache, unless it was asked for what the cache cannot do."""
    _refuse(given, {"model.config": decoder.config}, OF_A_FORWARD)
    if cache.engine.reads_stream:
        attachment.hook_layers()
    cache.engine.begin(decoder, given)


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
    static = isinstance(cache, InterceptedCache) and cache.engine.is_static
    return (args, {**kwargs, STEP: cache.layers[module.layer_idx].static}) if static else None


_ASSISTED = (
    "asks for assisted decoding, which forgets tokens that it has read, and an eviction cannot be undone. "
    "Leave it out."
)
# Settings of `generate`, in its arguments or a config, that our cache cannot go along with, and why.
REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"), _ASSISTED
    ),
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
# Values that say nothing: `hybrid` is what checkpoints with sliding windows once had to name as their
# cache_implementation, and transformers takes it for nothing too.
UNSTATED = (None, "hybrid")


def _stated(name: str, given: Mapping[str, Any], configs: Mapping[str, Any]) -> tuple[str, Any]:
    """The place where a setting is given first, and its value. An argument that is None overrides configs."""
    places = {f"{place}.{name}": getattr(config, name, None) for place, config in configs.items()}
    places = {name: given[name]} if name in given else places
    return next(((place, value) for place, value in places.items() if value not in UNSTATED), (name, None))


def _refuse(given: Mapping[str, Any], configs: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse what a call, or a config that it goes by, asks for and our cache cannot do."""
    for name, reason in reasons.items():
        place, value = _stated(name, given, configs)
        if value is not None and (value is False or value == 0) == (name == "use_cache"):
            shown = f"={value!r}" if isinstance(value, int | float | str) else ""
            raise ValueError(f"{place}{shown} {reason}")


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of an attached model: its class's, with what cannot work on our cache refused first.

    Raises:
        ValueError: something of `REFUSED` with a `retain.Cache`.
    """
    plain = type(model).generate
    names = list(inspect.signature(plain).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_in(given)
    if not isinstance(cache, InterceptedCache):
        return plain(model, *args, **kwargs)
    configs = {
        "generation_config": given.get("generation_config"),
        "model.generation_config": model.generation_config,
    }
    # Of peft, which puts a method on the model for as long as it generates.
    refuse_learned_prompt(getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None))
    _refuse(given, configs, {**REFUSED, **OF_A_FORWARD})
    ids = given.get("inputs") if given.get("input_ids") is None else given["input_ids"]
    cache.engine.check_ids(ids, given.get("attention_mask"), given.get("inputs_embeds"))
    room = _room(model, given, configs, ids)
    with cache.engine.generation.running(cache.state, room) as hear:
        if room:

            def listen(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
                hear()
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

            # A criterion that ends nothing, and counts sampled tokens.
            criteria = given.get("stopping_criteria") or ()
            given["stopping_criteria"] = StoppingCriteriaList([*criteria, cast(Any, listen)])
        return plain(model, **renamed(given))


def _room(model: Any, given: Mapping[str, Any], configs: Mapping[str, Any], ids: Any) -> int | None:
    """Tokens that a `generate` may add, where its steps are to be compiled, 0 where beams stand against it;
    None: they are not compiled."""
    names = ("compile_config", "disable_compile", "num_beams", "max_new_tokens", "max_length")
    config, disabled, beams, most, length = (_stated(name, given, configs)[1] for name in names)
    # As transformers has it for its StaticCache: by itself on a GPU, elsewhere where it is asked to.
    everywhere = config is not None and config._compile_all_devices
    if disabled or not (everywhere or model.device.type == "cuda"):
        return None
    if (beams or 1) > 1:
        return 0
    seen = ids.shape[1] if isinstance(ids, Tensor) else 0
    return int(most) if most is not None else max(1, int(length or 20) - seen)


# Held while a model is attached or detached, or an undo of a handle looks whether it is the last.
_LOCK = threading.RLock()
# Where a decoder keeps its attachment.
_PLACE = "_retain_attachment"


def _point(base: Any) -> None:
    """Register our attention, and have a decoder's config name it.

    Raises:
        ValueError: the config names attention of which ours cannot take the place; nothing was changed then.
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
    for former, name in PREVIOUS.items():
        AttentionInterface.register(name, intercepted(former))
        AttentionMaskInterface.register(name, mask_function(former))
    _point_to(base, PREVIOUS[previous])


def _point_to(base: nn.Module, name: str) -> None:
    """Have the configs that modules read their attention's name from say this one. (transformers' own method
    refuses the classes that FSDP makes.)"""
    for part in base.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = name


class Attachment:
    """Connects one model: its hooks and the guard before its `generate`, there once however many handles ask
    for it, and taken away with the last."""

    def __init__(self, model: nn.Module, layout: Layout):
        self.base: Any = base_model(model)
        self.num_handles = 0
        self.generating: list[Any] = []  # models before whose `generate` ours stands
        evicting = {spec.layer_idx: spec.module for spec in layout.evicting}
        self.unhooked: Iterable[int] = evicting  # decoder layers without hooks
        base = self.base
        self.names = list(inspect.signature(base.forward).parameters)  # of a forward's arguments
        self.hooks: list[RemovableHandle] = [
            base.register_forward_pre_hook(partial(_before_model, self), with_kwargs=True),
            base.register_forward_hook(_after_model, with_kwargs=True),
        ]
        windowed = [
            base.layers[idx].self_attn for idx, left in layout.alone.items() if left.window is not None
        ]
        for modules, hook in ((evicting.values(), _before_attention), (windowed, _before_window)):
            self.hooks += [one.register_forward_pre_hook(hook, with_kwargs=True) for one in modules]

    def hook_layers(self) -> None:
        """Have decoder layers show the residual stream, from the first cache on whose gates look at it: to
        others these hooks would be time alone."""
        with _LOCK:
            hooked, self.unhooked = self.unhooked, ()
            for layer_idx in hooked:
                hook, layer = partial(_before_layer, layer_idx), self.base.layers[layer_idx]
                self.hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def guard(self, model: Any) -> None:
        """Put our `generate` before that of the model in which a peft wrapper's `generate` ends too, unless
        it is there, or somebody else's is."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not hasattr(type(inner), "generate") or "generate" in vars(inner):
            return
        # No method, which a copy would look up by its name.
        vars(inner)["generate"] = partial(generate, inner)
        self.generating.append(inner)


class Handle(AbstractContextManager):
    """Undoes one `attach`: call `undo()`, or use it as a context manager."""

    def __init__(self, attachment: Attachment):
        self._attachment: Attachment | None = attachment
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

    def __exit__(self, *exc: object) -> None:
        self.undo()


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a model, or None."""
    return vars(base_model(model)).get(_PLACE)


def attach(model: nn.Module) -> Handle:
    """Let `retain.Cache` work on this model. Once is enough; a further call gets a handle as well, and the
    model stays attached until the last handle is undone, or `retain.detach(model)` needs none.

    After another attention implementation was set on an attached model, a further call takes its place again.
    Threads may attach at once. A copy of an attached model is attached, and `detach` takes that back.

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
        attachment, base = attachment_of(model), base_model(model)
        layout = layout_of(model)
        _point(base)
        if attachment is None:
            attachment = vars(base)[_PLACE] = Attachment(model, layout)
        attachment.guard(model)  # it may have been its decoder that was attached
        return Handle(attachment)


def detach(model: nn.Module) -> None:
    """Take away everything that `attach` put on a model, however often it was called. No handle is needed;
    those that exist do nothing from then on. Harmless where nothing is attached.

    The attention implementation is the one that the model had, or was last told.

    Args:
        model: the model, its decoder, or a wrapper of peft.

    Raises:
        ValueError: it is no decoder of transformers.
    """
    with _LOCK:
        base = base_model(model)
        attachment = vars(base).pop(_PLACE, None)
        if attachment is None:
            return
        for hook in attachment.hooks:
            hook.remove()
        attachment.hooks.clear()
        for inner in attachment.generating:
            vars(inner).pop("generate", None)
        names = {ours: previous for previous, ours in PREVIOUS.items()}
        if (name := names.get(base.config._attn_implementation)) is not None:
            _point_to(base, name)

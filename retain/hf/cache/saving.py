"""Saves a `retain.Cache` between two forwards, and loads it back to go on exactly.

The file (`retain.cache.file_format`) holds the entries as they are held (no slack) with their side columns,
the last tokens' queries and attention inputs that no eviction has looked at yet, the states of layers that
are left alone, and the history; its header says policy, budget, regime and counters. It has `bytes_held()`
bytes of keys and values, and on top 4 bytes an entry (its position), side columns, 4 bytes a row, 17 a token
seen, 8 a sequence, and a header below 1 KiB a layer, plus 8 KiB.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retain import config
from retain.cache.file_format import (
    COUNTERS,
    PRECISION,
    check_model,
    layer_store_of,
    layer_tensors,
    precision_of,
    read_file,
    within,
    write_file,
)
from retain.eviction import BoundPolicy
from retain.hf.cache.batch_context import pinned_of, pins_of, seeds_from
from retain.hf.cache.layer import Recent, joined
from retain.hf.cache.state import History
from retain.hf.model import pass_through_layers
from retain.hf.model.decoder import base_model, describe
from retain.hf.model.identity import identity_of, marks_of
from retain.presets import Policy
from retain.protection import spans_by_sequence

if TYPE_CHECKING:
    from retain.hf.cache.cache import Cache

# How a rule can be made again: from its settings, from its settings and a function, from a function, or from
# nothing.
NAMED, SCORER, FUNCTION, EVERYTHING = "named", "scorer", "function", "everything"


def save(cache: "Cache", path: str | os.PathLike[str]) -> Path:
    """Write a conversation to one file; an older one survives until the new one is complete on disk.

    Needs memory on the host for one copy of what is written.

    Args:
        cache: that has read something, between two forwards.
        path: of the file; its folder is made if missing.

    Returns:
        the path.

    Raises:
        ValueError: there is nothing to save yet, or a forward broke off, or the cache still holds a prefill
            densely; nothing was written.
        OSError: the disk takes no more; names the file.
    """
    state = cache.state
    if state.call is not None:
        raise ValueError("an earlier forward broke off and left this cache half-updated: it cannot be saved.")
    if state.history is None:
        raise ValueError(
            f"the cache has seen no tokens, so {path} would hold nothing: prefill or generate first."
        )
    if cache.evidence is not None or any(layer.store is None for layer in state.ragged):
        raise ValueError(
            "the cache holds its prefill densely, with whatever evict() will look at: evict first (or "
            "prefill with a policy of None to keep everything), then save."
        )
    path = Path(path)
    write_file(path, _header(cache), _tensors(cache))
    return path


def load(
    cls: "type[Cache]",
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    gates: Any = None,
    policy: Any = None,
) -> "Cache":
    """Read a conversation back: `retain.Cache.load`, which see."""
    header, tensors = read_file(Path(path))
    try:
        return _made(cls, header, tensors, path, model, gates=gates, policy=policy)
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None
    # Whole by its digest, which whoever writes other things into it can make too.
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{path} does not hold what cache.save writes ({type(error).__name__}: {error}): it was changed, "
            "or another program wrote it."
        ) from error


def _made(
    cls: "type[Cache]",
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: Any,
    model: nn.Module,
    *,
    gates: Any,
    policy: Any,
) -> "Cache":
    """The cache that a sound file describes."""
    layers = describe(model)
    check_model(header, identity_of(model), layers[0].dtype, path)
    seeds_from(header["seeds"])
    bound, regime = header["rule"], header["regime"]
    short, short_tokens = header["short"]
    cache = cls(
        model,
        **_request(bound, path, gates, policy),
        **regime,
        gates=gates,
        slack=header["slack"],
        short=short,
        short_tokens=short_tokens,
    )
    state = cache.state
    state.marks = marks_of(model)
    if bound["kind"] == EVERYTHING:
        state.bound_policy = BoundPolicy(bound["name"], precision=precision_of(bound))
    _check_gates(bound, state.bound_policy, path)
    state.stated = (state.bound_policy, state.regime, header["seeds"], header["pinned"])
    state.seeds, state.pinned = header["seeds"], header["pinned"]
    for name in COUNTERS:
        setattr(state, name, header[name])
    state.held_whole = header["held_whole"]
    _fill(cache, header, tensors, model)
    state.pinned = pins_of(state.pinned, cache.batch_size)
    pinned_of(state.pinned, state.valid_BT)  # refuses spans that are none
    return cache


def _tensors(cache: "Cache") -> Iterator[tuple[str, Tensor]]:
    """Everything that is no setting, by the name that it has in the file."""
    state = cache.state
    history = state.history
    assert history is not None
    yield "history.valid", history.valid_BT
    yield "history.positions", history.positions_BT
    yield "history.last", history.last_B
    if history.token_ids_BT is not None:
        yield "history.ids", history.token_ids_BT
    if state.announced_BT is not None:
        yield "history.announced", state.announced_BT
    for spec, layer in zip(state.specs, state.ragged, strict=True):
        where = f"layer.{spec.layer_idx}"
        assert layer.store is not None
        for name, tensor in layer_tensors(layer.store).items():
            yield f"{where}.{name}", tensor
        recent = layer.recent
        if recent.num_queries:
            yield f"{where}.recent.queries", recent.last_queries(recent.num_queries)
        for name in ("hidden", "stream"):
            if chunks := getattr(recent, name):
                yield f"{where}.recent.{name}", joined(chunks)
    for idx in state.layout.alone:
        for name, tensor in pass_through_layers.state(state.layers[idx]).items():
            yield f"layer.{idx}.state.{name}", tensor


def _header(cache: "Cache") -> dict[str, Any]:
    """Everything that is no tensor."""
    state = cache.state
    precision = next((store.precision for store in state.stores if store.precision is not None), None)
    seeds = None if state.seeds is None else [int(seed) for seed in state.seeds]
    return {
        "fingerprint": identity_of(cache.model),
        "dtype": str(state.specs[0].dtype),
        "rule": _described(state.bound_policy),
        "regime": {"regime": state.regime.name, "every": state.regime.every},
        "slack": state.slack,
        "short": list(cache._given_short),
        "held_whole": state.held_whole,
        "seeds": seeds,
        "pinned": _spans(state.pinned),
        PRECISION: None if precision is None else config.to_mapping(precision),
        **{name: getattr(state, name) for name in COUNTERS},
    }


def _described(bound: BoundPolicy) -> dict[str, Any]:
    """A rule, as far as a file can hold one."""
    if bound.policy is None or bound.budget is None:
        kind = EVERYTHING if bound.function is None else FUNCTION
        held_in = None if bound.precision is None else config.to_mapping(bound.precision)
        return {"kind": kind, "name": bound.name, PRECISION: held_in}
    stated = {name: value for name, value in config.to_mapping(bound.budget).items() if value is not None}
    return {
        "kind": NAMED if bound.scorer is None else SCORER,
        "name": bound.name,
        "policy": config.to_mapping(bound.policy),
        "budget": stated,
        "gates": getattr(bound.gates, "metadata", {}).get("sha256"),
    }


def _spans(pins: Any) -> Any:
    """Pinned spans as lists."""
    if pins is None:
        return None
    by_sequence = spans_by_sequence(pins)
    lists = [[[int(start), int(stop)] for start, stop in own] for own in by_sequence or [pins]]
    return lists[0] if by_sequence is None else lists


def _request(bound: Mapping[str, Any], path: Any, gates: Any, policy: Any) -> dict[str, Any]:
    """What the cache is asked for, as its constructor takes it.

    Raises:
        ValueError: a function is missing, or given where it would not be used.
    """
    kind = bound["kind"]
    if kind in (FUNCTION, SCORER) and not callable(policy):
        what = "policy" if kind == FUNCTION else "score (observed=)"
        raise ValueError(
            f"the {what} of the cache in {path} was the function {bound['name']!r}, and a function cannot be "
            f"saved: pass the same one as policy=; got {policy!r}."
        )
    if kind in (NAMED, EVERYTHING) and policy is not None:
        raise ValueError(
            f"the cache in {path} has its policy in it ({bound['name']!r}), so policy={policy!r} would not "
            "be used: leave it out."
        )
    if kind in (FUNCTION, EVERYTHING):
        if gates is not None:
            raise ValueError(f"the cache in {path} has no policy that takes gates: leave gates out.")
        return {"policy": policy}
    chosen = config.build(bound["policy"], Policy)
    return {"policy": chosen, **bound["budget"], **({} if kind == NAMED else {"observed": policy})}


def _check_gates(saved: Mapping[str, Any], bound: BoundPolicy, path: Any) -> None:
    """Refuse gates that are not those that scored the entries which are held."""
    then = saved.get("gates")
    now = getattr(bound.gates, "metadata", {}).get("sha256")
    if then is not None and now is not None and then != now:
        raise ValueError(
            f"the cache in {path} was evicted with gates {then[:12]}, and these are {now[:12]} (sha256): "
            "pass the gates that it was made with."
        )


def _fill(cache: "Cache", header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put what was saved where it belongs, each layer's on its layer's device."""
    state = cache.state
    base = base_model(model)
    inputs = base.get_input_embeddings().weight.device
    past = {name: tensors[f"history.{name}"].to(inputs) for name in ("valid", "positions", "last")}
    ids, announced = tensors.get("history.ids"), tensors.get("history.announced")
    state.announced_BT = None if announced is None else announced.to(inputs)
    state.history = History(
        past["valid"], [past["positions"]], None if ids is None else [ids.to(inputs)], past["last"]
    )
    for spec, layer in zip(state.specs, state.ragged, strict=True):
        saved = within(tensors, f"layer.{spec.layer_idx}.")
        own = {name: tensor.to(spec.device) for name, tensor in saved.items()}
        sizes = spec.num_kv_heads, spec.head_dim, spec.dtype
        layer.store, layer.seen = layer_store_of(header, own, *sizes, state.slack), cache.num_seen
        layer.lazy_initialization(layer.store.plain.keys_CD, layer.store.plain.values_CD)
        kinds = ("queries", "hidden", "stream")
        shown = {name: [own[f"recent.{name}"]] for name in kinds if f"recent.{name}" in own}
        layer.recent = Recent(**shown)
    for idx in state.layout.alone:
        device = next(base.layers[idx].parameters()).device
        saved = within(tensors, f"layer.{idx}.state.")
        pass_through_layers.load_state(
            state.layers[idx], {name: tensor.to(device) for name, tensor in saved.items()}
        )

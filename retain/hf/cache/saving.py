"""A conversation in one file: everything that a cache needs to go on exactly, and nothing else.

In: a `retain.Cache` between two forwards. Out: a `.safetensors` file, or the cache back, on a model that the
file names by its fingerprint. The file holds the entries as they are (no slack), what stands beside them,
what the last tokens showed and no eviction has looked at yet, the states of layers that are left alone, and
the history; a JSON header says policy, budget, regime and counters. Nothing in it is code.

The one decision taken here: a file is believed whole or not at all. Its header carries a sha256 over
everything else, which is checked before a byte of it is used, and it is written in full beside an older one
before it is renamed over it. So a full disk, a kill, a cut copy and a flipped bit are noticed, and leave what
there was.

A file has `bytes_held()` bytes of keys and values. On top: 4 bytes an entry (its position) and what the
policy keeps beside it, 4 bytes a row, 17 a token seen, 8 a sequence, the queries and attention inputs that
the next eviction will look at (regimes that evict again), the states of layers left alone, and a header below
1 KiB a layer plus 8 KiB.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from retain import config
from retain.budget.capacity import CapacityGuard
from retain.cache.store import RaggedStore
from retain.gates.store import save_beside
from retain.hf.cache import pass_through_layers as foreign
from retain.hf.cache.batch_context import pinned_of, pins_of, seeds_from
from retain.hf.cache.bound_policy import Rule
from retain.hf.cache.capacity_guard import AUTO
from retain.hf.cache.history import History
from retain.hf.cache.recent_queries import Recent
from retain.hf.model.decoder import base_model, describe, fingerprint
from retain.hf.model.layout import LayerSpec
from retain.presets import Policy
from retain.protection import spans_by_sequence

if TYPE_CHECKING:
    from retain.hf.cache.cache import Cache

SCHEMA_VERSION = 1
FORMAT = "retain.cache.store"
# Beyond what any model reads: tables of positions are made.
MOST_POSITIONS = 2**24
# Counters of `retain.hf.cache.engine.Engine` that go into the header as they are.
COUNTERS = ("_width", "_prompt_B", "_moments", "_noted", "evictions", "evicted_at")
# How a rule can be made again: from its settings, from its settings and a function, from a function, or from
# nothing.
NAMED, SCORER, FUNCTION, EVERYTHING = "named", "scorer", "function", "everything"


def save(cache: "Cache", path: str | os.PathLike[str]) -> Path:
    """Write a conversation to one file; an older one survives until the new one is complete on disk.

    Needs memory on the host for one copy of what is held.

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
    if cache._call is not None:
        raise ValueError("an earlier forward broke off and left this cache half-updated: it cannot be saved.")
    if cache.history is None:
        raise ValueError(
            f"the cache has seen no tokens, so {path} would hold nothing: prefill or generate first."
        )
    if cache.evidence is not None or any(layer.store is None for layer in cache.ragged):
        raise ValueError(
            "the cache holds its prefill densely, with whatever evict() will look at: evict first (or "
            "prefill with a policy of None to keep everything), then save."
        )
    path = Path(path)
    tensors = {name: _plain(tensor) for name, tensor in _tensors(cache)}
    header = json.dumps(_header(cache))
    record = {
        "schema_version": SCHEMA_VERSION,
        "sha256": _digest(header, tensors.items()),
        "header": header,  # as text, of which the digest is
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(save_beside(path, tensors, {FORMAT: json.dumps(record)}), path)
    return path


def load(
    cls: "type[Cache]",
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    gates: Any = None,
    tokenizer: Any = None,
    policy: Any = None,
) -> "Cache":
    """Read a conversation back: `retain.Cache.load`, which see."""
    header, tensors = read_saved(Path(path))
    try:
        return _made(cls, header, tensors, path, model, gates=gates, tokenizer=tokenizer, policy=policy)
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
    tokenizer: Any,
    policy: Any,
) -> "Cache":
    """The cache that a sound file describes."""
    _check_model(header, model, path)
    if wrong := next(_wrong(header, tensors, describe(model)), None):
        raise ValueError(f"{path} holds {wrong}: it was changed, or another program wrote it.")
    rule, regime = header["rule"], header["regime"]
    # Files that do not say were written when short sequences were refused.
    short, short_tokens = header.get("short", ("raise", 256))
    cache = cls(
        model,
        **_request(rule, path, gates, policy),
        **regime,
        gates=gates,
        tokenizer=tokenizer,
        slack=header["slack"],
        short=short,
        short_tokens=short_tokens,
        # Files that do not say leave it to the gates.
        capacity=_guard(header.get("given_capacity", header.get("capacity", AUTO))),
    )
    if "capacity" in header:
        cache.guard = _guard(header["capacity"])
    if rule["kind"] == EVERYTHING:
        cache.rule = Rule(rule["name"])
    _check_gates(rule, cache.rule, path)
    cache._given = (cache.rule, cache.regime, header["seeds"], header["pinned"])
    cache.seeds, cache._pins = header["seeds"], header["pinned"]
    for name in COUNTERS:
        setattr(cache, name, header[name.lstrip("_")])
    cache.held_whole = header.get("held_whole", [])
    _fill(cache, tensors, model)
    cache._pins = pins_of(cache._pins, cache.batch_size)
    pinned_of(cache._pins, cache.valid_BT)  # refuses spans that are none
    return cache


def _tensors(cache: "Cache") -> Iterator[tuple[str, Tensor]]:
    """Everything that is no setting, by the name that it has in the file."""
    history = cache.history
    assert history is not None
    yield "history.valid", history.valid_BT
    yield "history.positions", history.positions_BT
    yield "history.last", history.last_B
    if history.token_ids_BT is not None:
        yield "history.ids", history.token_ids_BT
    if cache._announced_BT is not None:
        yield "history.announced", cache._announced_BT
    for spec, layer in zip(cache.specs, cache.ragged, strict=True):
        where = f"layer.{spec.layer_idx}"
        for name, tensor in layer.store.tensors().items():
            yield f"{where}.store.{name}", tensor
        recent = layer.recent
        if recent.num_queries:
            yield f"{where}.recent.queries", recent.last_queries(recent.num_queries)
        if recent.hidden:
            yield f"{where}.recent.hidden", recent.last_hidden()
        if recent.stream:
            yield f"{where}.recent.stream", recent.last_stream()
        for seen, queries in recent.marks.items():
            yield f"{where}.recent.mark.{seen}", queries
    for idx in cache.layout.alone:
        for name, tensor in foreign.state(cache.layers[idx]).items():
            yield f"layer.{idx}.state.{name}", tensor


def _header(cache: "Cache") -> dict[str, Any]:
    """Everything that is no tensor."""
    seeds = None if cache.seeds is None else [int(seed) for seed in cache.seeds]
    return {
        "fingerprint": fingerprint(cache.model),
        "dtype": str(cache.specs[0].dtype),
        "rule": _described(cache.rule),
        "regime": {"regime": cache.regime.name, "every": cache.regime.every},
        "slack": cache.slack,
        "capacity": _as_stated(cache.guard),
        "given_capacity": _as_stated(cache._given_guard[0]),
        "short": list(cache._given_short),
        "held_whole": cache.held_whole,
        "seeds": seeds,
        "pinned": _spans(cache._pins),
        **{name.lstrip("_"): getattr(cache, name) for name in COUNTERS},
    }


def _described(rule: Rule) -> dict[str, Any]:
    """A rule, as far as a file can hold one."""
    if rule.request is None:
        return {"kind": EVERYTHING if rule.function is None else FUNCTION, "name": rule.name}
    request = rule.request
    stated = {name: value for name, value in config.to_mapping(request.budget).items() if value is not None}
    return {
        "kind": NAMED if request.scorer is None else SCORER,
        "name": rule.name,
        "policy": config.to_mapping(request.policy),
        "budget": stated,
        "gates": getattr(request.gates, "metadata", {}).get("sha256"),
    }


def _as_stated(capacity: Any) -> Any:
    """What is done where an eviction cannot be afforded, as a file holds it."""
    return config.to_mapping(capacity) if isinstance(capacity, CapacityGuard) else capacity


def _guard(stated: Any) -> Any:
    """The same, back from a file."""
    return CapacityGuard(**stated) if isinstance(stated, Mapping) else stated


def _spans(pins: Any) -> Any:
    """Pinned spans as lists."""
    if pins is None:
        return None
    by_sequence = spans_by_sequence(pins)
    lists = [[[int(start), int(stop)] for start, stop in own] for own in by_sequence or [pins]]
    return lists[0] if by_sequence is None else lists


def _plain(tensor: Tensor) -> Tensor:
    """A copy on the host that shares its storage with nothing."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _digest(header: str, tensors: Any) -> str:
    """sha256 over the header and all tensors, in the order of their names."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_saved(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that is sound.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is cut, changed, of a newer schema, or no cache.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the path that cache.save(path) was given.")
    corrupt = f"{path} is truncated or corrupt ({{}}): copy it again, or read the context again."
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            tensors = {name: file.get_tensor(name) for name in ([] if text is None else file.keys())}
        record = json.loads(text) if text is not None else {}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(corrupt.format(error)) from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by cache.save(path): it holds no retain.Cache.")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this retain reads up to {SCHEMA_VERSION}: upgrade retain "
            "to load it."
        )
    header = str(record.get("header"))
    if _digest(header, tensors.items()) != record.get("sha256"):
        raise ValueError(corrupt.format("the sha256 differs"))
    try:
        return json.loads(header), tensors
    except (ValueError, RecursionError) as error:
        raise ValueError(corrupt.format(error)) from None


def _check_model(header: Mapping[str, Any], model: nn.Module, path: Any) -> None:
    """Refuse another model than the one that the entries are of."""
    saved, at_hand = header["fingerprint"], json.loads(json.dumps(fingerprint(model)))
    differ = [key for key in sorted(saved.keys() | at_hand.keys()) if saved.get(key) != at_hand.get(key)]
    if differ:
        listing = ", ".join(f"{key} {saved.get(key)!r} -> {at_hand.get(key)!r}" for key in differ)
        raise ValueError(
            f"the cache in {path} is of another model ({listing}; saved -> at hand): load it with the model "
            "that it was saved from."
        )
    dtype = str(describe(model)[0].dtype)
    if header["dtype"] != dtype:
        raise ValueError(
            f"the cache in {path} is of a model in {header['dtype']}, and this one is in {dtype}: load the "
            f"model with dtype={header['dtype']}, or read the context again."
        )


def _wrong(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: Sequence[LayerSpec]
) -> Iterator[str]:
    """What of a file cannot be: counters that are no numbers, tensors of other shapes or kinds."""
    for name in (own.lstrip("_") for own in COUNTERS):
        value = header[name]
        several = name in ("prompt_B", "moments")
        counts = value if several and isinstance(value, list) else [value]
        empty = value is None and name in ("width", "prompt_B")
        whole = all(type(one) is int and 0 <= one <= MOST_POSITIONS for one in counts)
        if not empty and (not whole or several is not isinstance(value, list)):
            yield f"{name} {value!r:.60}"
    B, T = tensors["history.valid"].shape
    for name in ("prompt_B", "seeds"):
        if header[name] is not None and len(header[name]) != B:
            yield f"{name} for {len(header[name])} sequences, and {B} sequences"
    seeds_from(header["seeds"])
    given = _guard(header.get("capacity"))
    if given is not None and not isinstance(given, CapacityGuard):
        yield f"capacity {given!r:.60}"
    shapes: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "history.valid": ("bool", (B, T)),
        "history.positions": ("whole", (B, T)),
        "history.last": ("whole", (B,)),
        "history.ids": ("whole", (B, T)),
        "history.announced": ("bool", (B, None)),
    }
    for spec in layers:
        store, recent = f"layer.{spec.layer_idx}.store.", f"layer.{spec.layer_idx}.recent."
        N, kind = int(tensors[f"{store}lengths"].sum()), str(spec.dtype).removeprefix("torch.")
        shapes |= {
            f"{store}keys": (kind, (N, spec.head_dim)),
            f"{store}values": (kind, (N, spec.head_dim)),
            f"{store}positions": ("whole", (N,)),
            f"{store}lengths": ("whole", (B * spec.num_kv_heads,)),
            f"{recent}queries": ("", (B, spec.num_heads, None, spec.head_dim)),
            f"{recent}hidden": ("", (B, None, spec.hidden_size)),
            f"{recent}stream": ("", (B, None, spec.hidden_size)),
        }
    positions_BT = tensors["history.positions"]
    limit = 1 + (int(positions_BT.max()) if positions_BT.numel() else 0)
    for name, tensor in sorted(tensors.items()):
        kind, shape = shapes.get(name, ("", ()))
        if shape and (
            tensor.ndim != len(shape)
            or any(own not in (got, None) for own, got in zip(shape, tensor.shape, strict=True))
        ):
            yield f"{name} of shape {tuple(tensor.shape)}"
        held = str(tensor.dtype).removeprefix("torch.")
        if kind and held != kind and not (kind == "whole" and held in ("int32", "int64")):
            yield f"{name} of {tensor.dtype}"
        if kind == "whole" and tensor.numel():
            least, most = int(tensor.min()), int(tensor.max())
            inside = name.endswith("store.positions")
            if least < (0 if inside else -1) or most >= (limit if inside else MOST_POSITIONS):
                yield f"{name} from {least} to {most}"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()) and ".state." not in name:
            yield f"{name} that is not finite"


def _request(rule: Mapping[str, Any], path: Any, gates: Any, policy: Any) -> dict[str, Any]:
    """What the cache is asked for, as its constructor takes it.

    Raises:
        ValueError: a function is missing, or given where it would not be used.
    """
    kind = rule["kind"]
    if kind in (FUNCTION, SCORER) and not callable(policy):
        what = "policy" if kind == FUNCTION else "score (observed=)"
        raise ValueError(
            f"the {what} of the cache in {path} was the function {rule['name']!r}, and a function cannot be "
            f"saved: pass the same one as policy=; got {policy!r}."
        )
    if kind in (NAMED, EVERYTHING) and policy is not None:
        raise ValueError(
            f"the cache in {path} has its policy in it ({rule['name']!r}), so policy={policy!r} would not be "
            "used: leave it out."
        )
    if kind in (FUNCTION, EVERYTHING):
        if gates is not None:
            raise ValueError(f"the cache in {path} has no policy that takes gates: leave gates out.")
        return {"policy": policy}
    chosen = config.build(rule["policy"], Policy)
    return {"policy": chosen, **rule["budget"], **({} if kind == NAMED else {"observed": policy})}


def _check_gates(saved: Mapping[str, Any], rule: Rule, path: Any) -> None:
    """Refuse gates that are not those that scored the entries which are held."""
    then = saved.get("gates")
    now = None if rule.request is None else getattr(rule.request.gates, "metadata", {}).get("sha256")
    if then is not None and now is not None and then != now:
        raise ValueError(
            f"the cache in {path} was evicted with gates {then[:12]}, and these are {now[:12]} (sha256): "
            "pass the gates that it was made with."
        )


def _fill(cache: "Cache", tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put what was saved where it belongs, each layer's on its layer's device."""
    base = base_model(model)
    inputs = base.get_input_embeddings().weight.device
    past = {name: tensors[f"history.{name}"].to(inputs) for name in ("valid", "positions", "last")}
    ids, announced = tensors.get("history.ids"), tensors.get("history.announced")
    cache._announced_BT = None if announced is None else announced.to(inputs)
    cache.history = History(
        past["valid"], [past["positions"]], None if ids is None else [ids.to(inputs)], past["last"]
    )
    for spec, layer in zip(cache.specs, cache.ragged, strict=True):
        saved = _within(tensors, f"layer.{spec.layer_idx}.")
        own = {name: tensor.to(spec.device) for name, tensor in saved.items()}
        store = RaggedStore.from_tensors(_within(own, "store."), spec.num_kv_heads, cache.slack)
        layer.store, layer.seen = store, cache.num_seen
        layer.lazy_initialization(store.keys_CD, store.values_CD)
        kinds = ("queries", "hidden", "stream")
        shown = {name: [own[f"recent.{name}"]] for name in kinds if f"recent.{name}" in own}
        marks = {int(seen): queries for seen, queries in _within(own, "recent.mark.").items()}
        layer.recent = Recent(**shown, marks=marks)
    for idx in cache.layout.alone:
        device = next(base.layers[idx].parameters()).device
        saved = _within(tensors, f"layer.{idx}.state.")
        foreign.load_state(cache.layers[idx], {name: tensor.to(device) for name, tensor in saved.items()})


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What is named with this prefix, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

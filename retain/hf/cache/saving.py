"""Saves a `retain.Cache` between two forwards, and loads it back to go on exactly.

The file (`retain.cache.file_format`) holds the entries as they are held (no slack), their metadata, the
queries and attention inputs that the next eviction will read, the states of layers that are left alone, and
the history; its header says policy, budget, when and counters. It has `bytes_held()` bytes of keys and
values; on top 4 bytes an entry (its position) and the metadata that the policy keeps, 4 bytes a row, 9 a
token seen, 8 a sequence, the queries and attention inputs (of caches that evict again), the states of layers
left alone, and a header below 1 KiB a layer, plus 8 KiB.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retain import config
from retain.attention.recent import AXES, Recent
from retain.cache.file_format import check_model, read_file, store_of, store_tensors, within, write_file
from retain.cache.precision import Precision
from retain.eviction import BoundPolicy
from retain.hf.cache.state import History
from retain.hf.model import pass_through_layers
from retain.hf.model.decoder import base_model, describe
from retain.hf.model.identity import identity_of
from retain.presets import Policy

if TYPE_CHECKING:
    from retain.hf.cache.cache import Cache

# Attributes of a state that are in the header as they are.
COUNTERS = ("prompt_read", "last_due", "recorded", "evictions", "evicted_at", "packed_at", "held_whole")


def save(cache: "Cache", path: str | os.PathLike[str]) -> Path:
    """Write a conversation to one file: `retain.Cache.save`, which see. Needs memory on the host for one copy
    of what is written.
    """
    state = cache.state
    if not state.num_seen:
        raise ValueError(
            f"the cache has seen no tokens, so {path} would hold nothing: prefill or generate first."
        )
    if cache.evidence is not None or any(layer.store is None for layer in state.ragged):
        raise ValueError(
            "the cache holds its prefill densely: evict first (or prefill with a policy of None to keep "
            "everything), then save."
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
    check_model(header, identity_of(model), describe(model)[0].dtype, path)
    rule = header["rule"]
    if rule["function"] != callable(policy) or not rule["function"] and policy is not None:
        raise ValueError(
            f"{path}: policy is {'a function' if rule['function'] else 'in the file'} ({rule['name']!r}), "
            f"and policy={policy!r} was passed: pass the same function, which a file cannot hold, or none."
        )
    asked = {"policy": policy}
    if rule["policy"] is not None:
        asked = {"policy": config.build(rule["policy"], Policy), **rule["budget"]}
    stated = {name: header[name] for name in ("when", "every", "seeds", "pinned", "short")}
    cache = cls(model, **asked, **stated, gates=gates)
    state = cache.state
    if rule["policy"] is None and not rule["function"]:
        state.bound_policy = BoundPolicy(rule["name"], precision=_precision_of(rule))
    then, now = rule["gates"], _digest(state.bound_policy)
    if then is not None and now is not None and then != now:
        raise ValueError(
            f"{path} was evicted with gates {then[:12]}, and these are {now[:12]} (sha256): pass the gates "
            "that it was made with."
        )
    for name in COUNTERS:
        setattr(state, name, header[name])
    _fill(cache, header, tensors, model)
    return cache


def _digest(bound: BoundPolicy) -> str | None:
    return None if bound.gates is None else bound.gates.metadata.get("sha256")


def _precision_of(record: Mapping[str, Any]) -> Precision | None:
    """The precision that a header, or the rule in it, says."""
    return None if record["precision"] is None else Precision(**record["precision"])


def _tensors(cache: "Cache") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a conversation, by their names in the file."""
    state, history = cache.state, cache.state.history
    yield "history.valid", history.valid_BT
    yield "history.positions", history.positions_BT
    yield "history.last", history.last_B
    for spec, layer in zip(state.specs, state.ragged, strict=True):
        assert layer.store is not None
        for name, tensor in store_tensors(layer.store).items():
            yield f"layer.{spec.layer_idx}.{name}", tensor
        for kind, tensor in layer.recent.tensors().items():
            yield f"layer.{spec.layer_idx}.recent.{kind}", tensor
    for idx in state.layout.alone:
        for name, tensor in pass_through_layers.state(state.layers[idx]).items():
            yield f"layer.{idx}.state.{name}", tensor


def _header(cache: "Cache") -> dict[str, Any]:
    """Everything that is no tensor."""
    state, bound = cache.state, cache.state.bound_policy
    precision = next((store.precision for store in state.stores if store.precision is not None), None)
    # A score of the caller's evicts once (`retain.capability`): what is loaded keeps everything from then on.
    policy = None if bound.scorer is not None else bound.policy
    budget = config.to_mapping(bound.budget) if policy is not None else {}
    rule = {
        "name": bound.name,
        "function": bound.function is not None,
        "policy": None if policy is None else config.to_mapping(policy),
        "budget": {name: value for name, value in budget.items() if value is not None},
        "gates": _digest(bound),
        "precision": None if bound.precision is None else config.to_mapping(bound.precision),
    }
    pinned = state.pinned and [[[int(start), int(stop)] for start, stop in spans] for spans in state.pinned]
    return {
        "fingerprint": identity_of(cache.model),
        "dtype": str(state.specs[0].dtype),
        "rule": rule,
        "when": state.when.name,
        "every": state.when.every,
        "short": cache.short,
        "seeds": None if state.seeds is None else [int(seed) for seed in state.seeds],
        "pinned": pinned,
        "precision": None if precision is None else config.to_mapping(precision),
        **{name: getattr(state, name) for name in COUNTERS},
    }


def _fill(cache: "Cache", header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put the tensors where they belong, each layer's on its layer's device."""
    state, base = cache.state, base_model(model)
    device = base.get_input_embeddings().weight.device
    past = {name: tensor.to(device) for name, tensor in within(tensors, "history.").items()}
    state.history = History(past["valid"], past["positions"], past["last"])
    precision = _precision_of(header)
    for spec, layer in zip(state.specs, state.ragged, strict=True):
        saved = within(tensors, f"layer.{spec.layer_idx}.")
        saved = {name: tensor.to(spec.device) for name, tensor in saved.items()}
        sizes = spec.num_kv_heads, spec.head_dim
        layer.store = store_of(saved, precision, *sizes)
        recent = within(saved, "recent.")
        layer.recent = Recent({kind: [recent[kind]] if kind in recent else [] for kind in AXES})
    for idx in state.layout.alone:
        device = next(base.layers[idx].parameters()).device
        saved = within(tensors, f"layer.{idx}.state.")
        pass_through_layers.load_state(
            state.layers[idx], {name: tensor.to(device) for name, tensor in saved.items()}
        )

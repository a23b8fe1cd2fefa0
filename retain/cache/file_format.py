"""The file of a conversation: a `.safetensors` file with a JSON header.

A file is believed whole or not at all. Its header carries a sha256 over everything else, which is checked
before a byte of it is used, and it is written in full beside an older one before it is renamed over it. So a
full disk, a kill, a cut copy and a flipped bit are noticed, and leave what there was. Nothing in it is code.

Header: the model's `fingerprint` and `dtype`; the counters of `COUNTERS`; `seeds`; whatever else the engine
needs to go on. Tensors: `history.valid`, `.positions`, `.last`, `.ids`, `.announced`; of each layer that
evicts `layer.N.store.NAME` (`tensors_of`) and `layer.N.recent.NAME`, its last tokens' queries and hidden
states; of other layers `layer.N.state.NAME`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retain import config
from retain.budget.statement import Budget
from retain.cache.store import LOG_WEIGHT, SLACK, RaggedStore
from retain.process.disk import save_beside

# Files of entries whose logits get something added have version 2: an older reader would add nothing. Those
# with codes have version 3 (`retain.cache.tier_file`).
SCHEMA_VERSION = 3
FORMAT = "retain.cache"
BESIDE = "beside."
CORRUPT = "{} is truncated or corrupt ({}): copy it again, or read the context again."
# Beyond what any model reads: tables of positions are made.
MOST_POSITIONS = 2**24
# Keys of a header whose file holds codes.
CODES = {"tiers", "coded"}
# A rule that can be made again from its settings.
NAMED = "named"
# Fields of a policy that older readers do not know.
LATER_SETTINGS = ("precision",)
# Counters of a conversation, in the header as they are.
COUNTERS = ("width", "prompt_B", "moments", "noted", "evictions", "evicted_at", "packed_at")
# Those that older files do not have, and what they were; left out of the header where they still are.
LATER = {"packed_at": 0}
# By name of a tensor: its kind (`whole`: integers) and its shape; None: any.
Shapes = dict[str, tuple[str, tuple[int | None, ...]]]


@runtime_checkable
class LayerSizes(Protocol):
    """Sizes of a layer that evicts."""

    @property
    def layer_idx(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def write_file(path: Path, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file; an older one survives until the new one is complete on disk.

    Needs memory on the host for one copy of the tensors, which may be on any device.

    Raises:
        OSError: the disk takes no more; names the file.
    """
    # Copies share their storage with nothing, as safetensors demands.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors
    }
    text = json.dumps(header)
    # The header as text, of which the digest is.
    version = 2 if any(name.endswith(BESIDE + LOG_WEIGHT) for name in plain) else 1
    version = SCHEMA_VERSION if CODES & header.keys() else version
    record = {"schema_version": version, "sha256": digest(text, plain.items()), "header": text}
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(save_beside(path, plain, {FORMAT: json.dumps(record)}), path)


def digest(header: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over the header and all tensors, in the order of their names."""
    found = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that is sound.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is cut, changed, of a newer schema, or no cache.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the path that cache.save(path) was given.")
    record, tensors = _opened(path)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by cache.save(path): it holds no retain.Cache.")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this retain reads up to {SCHEMA_VERSION}: upgrade retain "
            "to load it."
        )
    header = str(record.get("header"))
    if digest(header, tensors.items()) != record.get("sha256"):
        raise ValueError(CORRUPT.format(path, "the sha256 differs"))
    return _header(header, path), tensors


def _opened(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The record of a file, and its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            there = [] if text is None else file.keys()
            tensors = {name: file.get_tensor(name) for name in there}
        return json.loads(text) if text is not None else {}, tensors
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(CORRUPT.format(path, error)) from None


def _header(text: str, path: Path) -> dict[str, Any]:
    """The header, from its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(CORRUPT.format(path, error)) from None


def check_model(
    header: Mapping[str, Any], fingerprint: Mapping[str, Any], dtype: torch.dtype, path: Any
) -> None:
    """Refuse another model than the one that the entries are of.

    Raises:
        ValueError: the fingerprint or dtype of the model at hand is not that in the header.
    """
    saved, at_hand = header["fingerprint"], json.loads(json.dumps(fingerprint))
    differ = [key for key in sorted(saved.keys() | at_hand.keys()) if saved.get(key) != at_hand.get(key)]
    if differ:
        listing = ", ".join(f"{key} {saved.get(key)!r} -> {at_hand.get(key)!r}" for key in differ)
        what, step = "another model", "load it with the model that it was saved from"
        if differ == ["adapters"]:
            what, step = "this model with other adapters", "switch to those that were active when it was read"
        raise ValueError(f"the cache in {path} is of {what} ({listing}; saved -> at hand): {step}.")
    if header["dtype"] != str(dtype):
        raise ValueError(
            f"the cache in {path} is of a model in {header['dtype']}, and this one is in {dtype}: load the "
            f"model with dtype={header['dtype']}, or read the context again."
        )


def counters_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of a header."""
    return {name: header.get(name, LATER[name]) if name in LATER else header[name] for name in COUNTERS}


def wrong_counters(header: Mapping[str, Any], batch_size: int) -> Iterator[str]:
    """Yield counters and seeds of a header that are impossible."""
    for name, value in counters_of(header).items():
        several = name in ("prompt_B", "moments")
        counts = value if several and isinstance(value, list) else [value]
        empty = value is None and name in ("width", "prompt_B")
        whole = all(type(one) is int and 0 <= one <= MOST_POSITIONS for one in counts)
        if not empty and (not whole or several is not isinstance(value, list)):
            yield f"{name} {value!r:.60}"
    for name in ("prompt_B", "seeds"):
        if header[name] is not None and len(header[name]) != batch_size:
            yield f"{name} for {len(header[name])} sequences, and {batch_size} sequences"


def wrong_tensors(
    tensors: Mapping[str, Tensor], layers: Sequence[LayerSizes], more: Shapes | None = None
) -> Iterator[str]:
    """Yield tensors of other shapes or kinds than a model with these evicting layers has.

    Args:
        tensors: of the file.
        layers: of the model.
        more: of further tensors, or of some in place of what is usual.
    """
    B, T = tensors["history.valid"].shape
    shapes: Shapes = {
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
            f"{store}{BESIDE}{LOG_WEIGHT}": ("float32", (N,)),
            f"{recent}queries": ("", (B, spec.num_heads, None, spec.head_dim)),
            f"{recent}hidden": ("", (B, None, spec.hidden_size)),
            f"{recent}stream": ("", (B, None, spec.hidden_size)),
        }
    shapes |= more or {}
    positions_BT = tensors["history.positions"]
    limit = 1 + (int(positions_BT.max()) if positions_BT.numel() else 0)
    for name, tensor in sorted(tensors.items()):
        kind, shape = shapes.get(name, ("", ()))
        if shape and (
            tensor.ndim != len(shape)
            or any(want not in (got, None) for want, got in zip(shape, tensor.shape, strict=True))
        ):
            yield f"{name} of shape {tuple(tensor.shape)}"
        held = str(tensor.dtype).removeprefix("torch.")
        if kind and held != kind and not (kind == "whole" and held in ("int32", "int64")):
            yield f"{name} of {tensor.dtype}"
        if kind == "whole" and tensor.numel():
            least, most = int(tensor.min()), int(tensor.max())
            inside = ".store." in name and name.endswith(".positions")
            if least < (0 if inside else -1) or most >= (limit if inside else MOST_POSITIONS):
                yield f"{name} from {least} to {most}"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()) and ".state." not in name:
            yield f"{name} that is not finite"


def named_rule(policy: Any, budget: Budget, gates: str | None) -> dict[str, Any]:
    """A policy with its budget, as a header holds them under `rule`.

    Args:
        policy: a `retain.presets.Policy`.
        budget: as it was stated.
        gates: sha256 of the gates' artifact, of a learned policy.
    """
    stated = {name: value for name, value in config.to_mapping(budget).items() if value is not None}
    settings = {
        name: value
        for name, value in config.to_mapping(policy).items()
        if value is not None or name not in LATER_SETTINGS
    }
    return {
        "kind": NAMED,
        "name": policy.name,
        "policy": settings,
        "budget": stated,
        "gates": gates,
    }


def tensors_of(store: RaggedStore) -> dict[str, Tensor]:
    """Tensors of a store: exactly the entries held, row after row, and the rows' lengths.

    Returns:
        "keys" and "values" `[N, D]`, "positions" `[N]`, "lengths" `[R]`, and
        "beside.NAME" `[N, ...]`.
    """
    index_N = store.index_N()
    columns = {"keys": store.keys_CD, "values": store.values_CD, "positions": store.positions_C}
    columns |= {BESIDE + name: column for name, column in store.beside.items()}
    entries = {name: column[index_N] for name, column in columns.items()}
    return {**entries, "lengths": store.lengths_R.clone()}


def store_of(tensors: Mapping[str, Tensor], num_heads: int, slack: int = SLACK) -> RaggedStore:
    """Rebuild a store from `tensors_of` it.

    Args:
        tensors: of one store.
        num_heads: H.
        slack: free entries given to each row, at least.

    Raises:
        ValueError: a tensor is missing, or lengths and entries do not fit together.
    """
    names = ("keys", "values", "positions", "lengths")
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(
            f"a saved store lacks {', '.join(missing)} among {', '.join(sorted(tensors)) or 'nothing'}: "
            "save it again, with tensors_of()."
        )
    check_entries(tensors, num_heads)
    keys_ND, values_ND = tensors["keys"], tensors["values"]
    beside, lengths_R = within(tensors, BESIDE), tensors["lengths"]
    return RaggedStore(keys_ND, values_ND, tensors["positions"], lengths_R, num_heads, slack, beside)


def check_entries(tensors: Mapping[str, Tensor], num_heads: int) -> None:
    """Refuse columns of another length than `lengths` says.

    Raises:
        ValueError: lengths and entries do not fit together.
    """
    lengths_R = tensors["lengths"]
    N = int(lengths_R.sum())
    wrong = [
        f"{name} {tuple(value.shape)}"
        for name, value in tensors.items()
        if name != "lengths" and value.shape[:1] != (N,)
    ]
    if lengths_R.shape[0] % num_heads or bool((lengths_R < 0).any()):
        wrong.append(f"{lengths_R.shape[0]} rows")
    if wrong:
        raise ValueError(
            f"a saved store has lengths of {N} entries for {num_heads} KV heads, but {', '.join(wrong)}: "
            "the file was cut, or is another model's; save it again, with tensors_of()."
        )


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with this prefix, named without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

"""The file of a conversation: a `.safetensors` file with a JSON header.

A file is believed whole or not at all. Its header carries a sha256 over everything else, which is checked
before a byte of it is used, and it is written in full beside an older one before it is renamed over it. So a
full disk, a kill, a cut copy and a flipped bit are noticed, and leave what there was. Nothing in it is code.

Header: the model's `fingerprint` and `dtype`; the counters of `COUNTERS`; `seeds`; the `precision` by which
layers are packed; whatever else the engine needs to go on. Tensors: `history.valid`, `.positions`, `.last`,
`.ids`, `.announced`; of each layer that evicts `layer.N.store.NAME` of its plain entries and
`layer.N.packed.NAME` of the packed ones (`tensors_of`; nothing is encoded anew), and `layer.N.recent.NAME`,
its last tokens' queries and hidden states; of other layers `layer.N.state.NAME`.

`cache.save(path, bits=4)` writes plain entries as codes, which `load` decodes (`coded`). The error of that is
measured as the file is written, and stands in the header. An entry of such a file, with D channels, takes
`2 * D * bits / 8` bytes of codes, `4 * D / 32` bytes of scales of its values, and as many of its keys where
32 entries share them; the last group of a row may have fewer. With D = 128 and 4 bits that is 160 bytes,
where bfloat16 takes 512; its position takes 4 in both.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retain import config
from retain.budget.statement import Budget
from retain.cache.codec import GROUPS, VALUE_SCALES, Codec, groups_of
from retain.cache.layer_store import Store
from retain.cache.store import LOG_WEIGHT, SLACK, RaggedStore
from retain.gates.artifact import save_beside
from retain.kernels.codes import BITS, bytes_wide
from retain.precision import GROUP, Precision

# Others are refused.
SCHEMA_VERSION = 4
FORMAT = "retain.cache"
BESIDE = "beside."
CORRUPT = "{} is truncated or corrupt ({}): copy it again, or read the context again."
# Beyond what any model reads: tables of positions are made.
MOST_POSITIONS = 2**24
# A rule that can be made again from its settings.
NAMED = "named"
# Counters of a conversation, in the header as they are.
COUNTERS = ("width", "prompt_B", "moments", "noted", "evictions", "evicted_at", "packed_at")
# Keys of the header: how layers are packed, and the bits and errors of a file whose plain entries are codes.
PRECISION, CODED = "precision", "coded"
# The scales that keys of a store of codes share.
KEY_SCALES = "key_scales"
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
    record = {"schema_version": SCHEMA_VERSION, "sha256": digest(text, plain.items()), "header": text}
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
        ValueError: it is cut, changed, of another schema, or no cache.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the path that cache.save(path) was given.")
    record, tensors = _opened(path)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by cache.save(path): it holds no retain.Cache.")
    if version != SCHEMA_VERSION:
        older = "read the context again and save it, or load the file with the retain that wrote it"
        raise ValueError(
            f"{path} has schema version {version}, this retain reads {SCHEMA_VERSION}: "
            f"{'upgrade retain to load it' if version > SCHEMA_VERSION else older}."
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


def wrong_counters(header: Mapping[str, Any], batch_size: int) -> Iterator[str]:
    """Yield counters and seeds of a header that are impossible."""
    for name, value in ((name, header[name]) for name in COUNTERS):
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
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: Sequence[LayerSizes]
) -> Iterator[str]:
    """Yield codes that nobody writes, and tensors of other shapes, kinds or numbers than a model with these
    evicting layers has.

    Raises:
        ValueError: a precision that there is not.
    """
    bits, precision = _bits(header), precision_of(header)
    if CODED in header and (type(bits) is not int or bits not in BITS):
        yield f"codes of {bits!r:.60} bits (known are {BITS})"
    B, T = tensors["history.valid"].shape
    shapes: Shapes = {
        "history.valid": ("bool", (B, T)),
        "history.positions": ("whole", (B, T)),
        "history.last": ("whole", (B,)),
        "history.ids": ("whole", (B, T)),
        "history.announced": ("bool", (B, None)),
    }
    for spec in layers:
        layer = f"layer.{spec.layer_idx}."
        shapes |= _shapes_of_entries(f"{layer}store.", bits, spec, tensors)
        if within(tensors, f"{layer}packed."):
            if precision is None:
                yield f"{layer}packed entries, and no precision"
                return
            shapes |= _shapes_of_entries(f"{layer}packed.", precision.bits, spec, tensors)
        shapes |= {
            f"{layer}recent.queries": ("", (B, spec.num_heads, None, spec.head_dim)),
            f"{layer}recent.hidden": ("", (B, None, spec.hidden_size)),
            f"{layer}recent.stream": ("", (B, None, spec.hidden_size)),
        }
    positions_BT = tensors["history.positions"]
    limit = 1 + (int(positions_BT.max()) if positions_BT.numel() else 0)
    for name, tensor in sorted(tensors.items()):
        yield from _wrong_tensor(name, tensor, shapes, limit)
    for where in (name.removesuffix(KEY_SCALES) for name in tensors if name.endswith(f".{KEY_SCALES}")):
        yield from _wrong_groups(where, within(tensors, where))


def _shapes_of_entries(
    where: str, bits: int | None, spec: LayerSizes, tensors: Mapping[str, Tensor]
) -> Shapes:
    """Kind and shape of each tensor of entries, as codes of so many bits, or as they are."""
    lengths_R, D = tensors[where + "lengths"], spec.head_dim
    N, kind = int(lengths_R.sum()), str(spec.dtype).removeprefix("torch.")
    numbers = (kind, (N, D)) if bits is None else ("uint8", (N, bytes_wide(D, bits)))
    shapes: Shapes = {
        "keys": numbers,
        "values": numbers,
        "positions": ("whole", (N,)),
        "lengths": ("whole", (len(tensors["history.valid"]) * spec.num_kv_heads,)),
        BESIDE + LOG_WEIGHT: ("float32", (N,)),
        VALUE_SCALES: ("float16", (N, 2, -(-D // min(GROUP, D)))),
        GROUPS: ("int32", (N,)),
        KEY_SCALES: ("float16", (None, 2, D)),
    }
    return {where + name: shape for name, shape in shapes.items()}


def _wrong_tensor(name: str, tensor: Tensor, shapes: Shapes, limit: int) -> Iterator[str]:
    """Yield what is wrong with one tensor; `limit`: of positions of entries."""
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
        if name.startswith("layer.") and name.endswith(".lengths") and least < 0:
            yield f"{name} below 0"
        inside = name.startswith("layer.") and name.endswith(".positions")
        if least < (0 if inside else -1) or most >= (limit if inside else MOST_POSITIONS):
            yield f"{name} from {least} to {most}"
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()) and ".state." not in name:
        yield f"{name} that is not finite"


def _wrong_groups(where: str, own: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield groups of keys that point beyond the scales that there are."""
    count, groups_N = len(own[KEY_SCALES]), own.get(GROUPS)
    if groups_N is None:
        wanted = int(((own["lengths"].long() + GROUP - 1) // GROUP).sum())
        if count != wanted:
            yield f"{where}{KEY_SCALES} of other groups than the {wanted} that its lengths make"
    elif groups_N.numel() and (int(groups_N.min()) < 0 or int(groups_N.max()) >= count):
        yield f"{where}{GROUPS} from {int(groups_N.min())} to {int(groups_N.max())}, of {count}"


def named_rule(policy: Any, budget: Budget, gates: str | None) -> dict[str, Any]:
    """A policy with its budget, as a header holds them under `rule`.

    Args:
        policy: a `retain.presets.Policy`.
        budget: as it was stated.
        gates: sha256 of the gates' artifact, of a learned policy.
    """
    stated = {name: value for name, value in config.to_mapping(budget).items() if value is not None}
    return {
        "kind": NAMED,
        "name": policy.name,
        "policy": config.to_mapping(policy),
        "budget": stated,
        "gates": gates,
    }


def tensors_of(store: RaggedStore) -> dict[str, Tensor]:
    """Tensors of a store: exactly the entries held, row after row, and the rows' lengths.

    Returns:
        "keys" and "values" `[N, ...]`, "positions" `[N]`, "lengths" `[R]`, "beside.NAME" `[N, ...]`, and of
        codes "value_scales", "groups" and "key_scales".
    """
    index_N = store.index_N()
    columns = {**store.columns, **{BESIDE + name: column for name, column in store.beside.items()}}
    found = {name: column[index_N] for name, column in columns.items()}
    table = {} if store.key_scales_G2D is None else {KEY_SCALES: store.key_scales_G2D}
    return {**found, "lengths": store.lengths_R.clone(), **table}


def store_of(
    tensors: Mapping[str, Tensor], num_heads: int, slack: int = SLACK, codec: Codec | None = None
) -> RaggedStore:
    """Rebuild a store from `tensors_of` it.

    Args:
        tensors: of one store.
        num_heads: H.
        slack: free entries given to each row, at least.
        codec: of its keys and values.

    Raises:
        ValueError: a tensor is missing, or lengths and entries do not fit together.
    """
    names = ["keys", "values", "positions", *([] if codec is None else [VALUE_SCALES, GROUPS])]
    missing = [name for name in (*names, "lengths") if name not in tensors]
    if missing:
        raise ValueError(
            f"a saved store lacks {', '.join(missing)} among {', '.join(sorted(tensors)) or 'nothing'}: "
            "save it again, with tensors_of()."
        )
    lengths_R, table = tensors["lengths"], tensors.get(KEY_SCALES)
    beside, entries = within(tensors, BESIDE), {name: tensors[name] for name in names}
    N = int(lengths_R.sum())
    wrong = [
        f"{name} {tuple(one.shape)}" for name, one in {**entries, **beside}.items() if one.shape[:1] != (N,)
    ]
    if lengths_R.shape[0] % num_heads or bool((lengths_R < 0).any()):
        wrong.append(f"{lengths_R.shape[0]} rows")
    if wrong:
        raise ValueError(
            f"a saved store has lengths of {N} entries for {num_heads} KV heads, but {', '.join(wrong)}: "
            "the file was cut, or is another model's; save it again, with tensors_of()."
        )
    return RaggedStore(
        entries, lengths_R, num_heads, slack=slack, beside=beside, codec=codec, key_scales_G2D=table
    )


class Coded(NamedTuple):
    """Plain entries as codes for a file.

    Args:
        tensors: of each layer, on the host.
        record: what the header says: `bits`; `keys` and `values`, the relative root mean square error over
            all layers, `sqrt(sum (x - decoded)^2 / sum x^2)`; `largest`, the largest absolute error of both.
    """

    tensors: list[dict[str, Tensor]]
    record: dict[str, Any]


def coded(stores: Sequence[Store], bits: int) -> Coded:
    """Encode the plain entries of each layer, one layer at a time.

    Raises:
        ValueError: numbers that float16 does not hold.
    """
    tensors: list[dict[str, Tensor]] = []
    wrong: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    largest = 0.0
    for plain in (store.plain for store in stores):
        held = tensors_of(plain)
        keys_ND, values_NV = held["keys"], held["values"]
        codec = Codec(bits, keys_ND.shape[1], values_NV.shape[1], plain.dtype)
        columns, table = codec.encode(keys_ND, values_NV, plain.lengths_R)
        decoded = codec.decoded(columns, table)
        for name, own, back in zip(("keys", "values"), (keys_ND, values_NV), decoded, strict=True):
            error = (back.double() - own.double()).abs()
            wrong[name] += float(error.square().sum())
            whole[name] += float(own.double().square().sum())
            largest = max(largest, float(error.max()) if error.numel() else 0.0)
        del columns[GROUPS]  # lengths say them
        tensors.append({name: one.cpu() for name, one in {**held, **columns, KEY_SCALES: table}.items()})
    errors = {name: math.sqrt(wrong[name] / whole[name]) if whole[name] else 0.0 for name in whole}
    return Coded(tensors, {"bits": bits, **errors, "largest": largest})


def precision_of(record: Mapping[str, Any]) -> Precision | None:
    """The precision that a header, or a rule in it, says.

    Raises:
        ValueError: settings that there are not.
    """
    return config.build({PRECISION: record.get(PRECISION)}, _Packed).precision


@dataclass(frozen=True)
class _Packed:
    precision: Precision | None = None


def _bits(header: Mapping[str, Any]) -> Any:
    return header[CODED]["bits"] if CODED in header else None


def layer_store_of(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], spec: LayerSizes, slack: int
) -> Store:
    """The store of a layer, which `wrong_tensors` found nothing wrong with.

    Args:
        header: of the file.
        tensors: of the layer, by their names in `layer.N`.
        spec: its sizes.
        slack: free entries of a row for new tokens.
    """
    H, D, precision = spec.num_kv_heads, spec.head_dim, precision_of(header)
    plain, packed = within(tensors, "store."), within(tensors, "packed.")
    if (bits := _bits(header)) is not None:
        columns = {**plain, GROUPS: groups_of(plain["lengths"]).to(torch.int32)}
        keys_ND, values_NV = Codec(bits, D, D, spec.dtype).decoded(columns, columns[KEY_SCALES])
        plain = {name: own for name, own in plain.items() if name not in (VALUE_SCALES, KEY_SCALES)}
        plain |= {"keys": keys_ND, "values": values_NV}
    store = Store(store_of(plain, H, slack), precision)
    if packed and precision is not None:
        store.packed = store_of(packed, H, 0, Codec(precision.bits, D, D, spec.dtype))
    return store


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with this prefix, named without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

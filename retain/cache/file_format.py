"""The file of a conversation: a `.safetensors` file with a JSON header.

Its header carries a sha256 over everything else, which is checked before a byte of it is used, and it is
written in full beside an older one before it is renamed over it. Nothing in it is code.

Header: the model's `fingerprint` and `dtype`, and all that the engine needs to go on. Tensors:
`history.valid`, `.positions`, `.last`; of each layer that evicts `layer.N.store.NAME` of its plain
entries, `layer.N.packed.NAME` of the packed ones, and `layer.N.recent.NAME`, queries and hidden states of its
last tokens; of other layers `layer.N.state.NAME`. Nothing is encoded anew.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retain.cache.precision import Codec, Precision
from retain.cache.store import SLACK, RaggedStore
from retain.process.disk import save_new

# Others are refused.
SCHEMA_VERSION = 6
FORMAT = "retain.cache"
CORRUPT = "{} is truncated or corrupt ({}): copy it again, or read the context again."
# Tensors of a store that are no columns: lengths of rows, and the scales that keys of codes share.
LENGTHS, KEY_SCALES = "lengths", "key_scales"


def write_file(path: Path, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file; an older one survives until the new one is complete on disk.

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
    os.replace(save_new(path, plain, {FORMAT: json.dumps(record)}), path)


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
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get(FORMAT, "{}"))
            version = record.get("schema_version")
            tensors = {name: file.get_tensor(name) for name in (file.keys() if version else [])}
    except (SafetensorError, OSError, ValueError, RecursionError, AttributeError) as error:
        raise ValueError(CORRUPT.format(path, error)) from None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by cache.save(path): it holds no retain.Cache.")
    if version != SCHEMA_VERSION:
        older = "read the context again and save it, or load the file with the retain that wrote it"
        raise ValueError(
            f"{path} has schema version {version}, this retain reads {SCHEMA_VERSION}: "
            f"{'upgrade retain to load it' if version > SCHEMA_VERSION else older}."
        )
    if digest(str(record.get("header")), tensors.items()) != record.get("sha256"):
        raise ValueError(CORRUPT.format(path, "the sha256 differs"))
    return json.loads(record["header"]), tensors


def check_model(
    header: Mapping[str, Any], identity: Mapping[str, Any], dtype: torch.dtype, path: Any
) -> None:
    """Refuse another model than the one that the entries are of: a ValueError."""
    saved = {**header["fingerprint"], "dtype": header["dtype"]}
    at_hand = json.loads(json.dumps({**identity, "dtype": str(dtype)}))
    differ = [key for key in sorted(saved.keys() | at_hand.keys()) if saved.get(key) != at_hand.get(key)]
    if differ:
        listing = ", ".join(f"{key} {saved.get(key)!r} -> {at_hand.get(key)!r}" for key in differ)
        raise ValueError(
            f"the cache in {path} is of another model ({listing}; saved -> at hand): load it with the model "
            "that it was saved from, in the same precision and with the same adapters."
        )


def store_tensors(store: RaggedStore) -> dict[str, Tensor]:
    """Tensors of a layer, by their names in `layer.N`: of each part columns `[N, ...]` of exactly the entries
    held, row after row, "lengths" `[R]` of the rows, and of codes "key_scales"."""
    found: dict[str, Tensor] = {}
    for where, part in zip(("packed.", "store.")[-len(store.parts) :], store.parts, strict=True):
        index_N = part.index_N()
        found |= {where + name: column[index_N] for name, column in part.columns.items()}
        found[where + LENGTHS] = part.lengths_R
        if part.key_scales_G2D is not None:
            found[where + KEY_SCALES] = part.key_scales_G2D
    return found


def store_of(
    tensors: Mapping[str, Tensor], precision: Precision | None, num_heads: int, head_dim: int
) -> RaggedStore:
    """The store of a layer, of the tensors named in `layer.N`."""

    def part(where: str, slack: int, codec: Codec | None = None) -> RaggedStore:
        found = within(tensors, where)
        lengths_R, table = found.pop(LENGTHS), found.pop(KEY_SCALES, None)
        return RaggedStore.from_rows(found, lengths_R, num_heads, slack, codec, table)

    store = part("store.", SLACK)
    store.precision = precision
    if within(tensors, "packed."):
        assert precision is not None
        store.packed = part("packed.", 0, Codec(precision.bits, head_dim, head_dim, store.dtype))
    return store


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with this prefix, named without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

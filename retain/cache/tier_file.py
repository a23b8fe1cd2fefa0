"""Tiers of a store in the file of a conversation (`retain.cache.file_format`), and files in few bits.

Two things make a file one of version 3. A layer held in tiers (`retain.cache.tiered_store`) is written
exactly as it is held: codes, scales, groups. Nothing is decoded, nothing is quantised anew. And
`cache.save(path, bits=4)` writes the entries that the cache holds as they are (all of them, or its plain
tier) as codes, which `load` decodes: keys by channel over 32 entries, values by entry over 32 channels (KIVI,
arXiv 2402.02750). The error of that is measured as the file is written, and stands in the header.

An entry of such a file, with D channels, takes `2 * D * bits / 8` bytes of codes, `4 * D / 32` bytes of
scales of its values, and as many of its keys where 32 entries share them; the last group of a row may have
fewer. With D = 128 and 4 bits that is 160 bytes, where bfloat16 takes 512; its position takes 4 in both.

Header: `tiers`, for each layer in tiers its `precision`; `coded`, the bits and errors of a file in few bits.
Tensors: `layer.N.store.packed.NAME` of the packed tier of layer N; the plain tier as that of other layers.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retain import config
from retain.cache.file_format import (
    BESIDE,
    LayerSizes,
    Shapes,
    check_entries,
    store_of,
    tensors_of,
    within,
    wrong_tensors,
)
from retain.cache.packed_store import GROUPS, VALUE_SCALES, Form, PackedStore, groups_of
from retain.cache.store import LOG_WEIGHT
from retain.cache.tiered_store import Store, TieredStore, plain_of
from retain.kernels.codes import BITS, bytes_wide
from retain.precision import GROUP, Precision

# Keys of the header.
TIERS, CODED = "tiers", "coded"
# Names of tensors: of a packed tier, and of the scales that its keys share.
PACKED, KEY_SCALES = "packed.", "table.key_scales"


@dataclass(frozen=True)
class Tiers:
    """How a layer in tiers is held, in the header."""

    precision: Precision


class Coded(NamedTuple):
    """Entries that are held as they are, as codes for a file.

    Args:
        tensors: of each layer, on the host.
        record: what the header says: `bits`; `keys` and `values`, the relative root mean square error over
            all layers, `sqrt(sum (x - decoded)^2 / sum x^2)`; `largest`, the largest absolute error of both.
    """

    tensors: list[dict[str, Tensor]]
    record: dict[str, Any]


def coded(stores: Sequence[Store], bits: int) -> Coded:
    """Encode the plain tier of each layer, one layer at a time.

    Raises:
        ValueError: numbers that float16 does not hold.
    """
    tensors: list[dict[str, Tensor]] = []
    wrong: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    largest = 0.0
    for store in map(plain_of, stores):
        keys_ND, values_NV, positions_N, _ = store.flat()
        form = Form(bits, keys_ND.shape[1], values_NV.shape[1], store.dtype)
        beside = {name: column[store.index_N()] for name, column in store.beside.items()}
        packed = PackedStore.encoded(
            form, keys_ND, values_NV, positions_N, store.lengths_R, store.num_heads, beside=beside
        )
        index_N = packed.index_N()
        for name, own, back in zip(("keys", "values"), (keys_ND, values_NV), packed.decoded(), strict=True):
            error = (back[index_N].double() - own.double()).abs()
            wrong[name] += float(error.square().sum())
            whole[name] += float(own.double().square().sum())
            largest = max(largest, float(error.max()) if error.numel() else 0.0)
        held = _tensors_of_packed(packed)
        del held[GROUPS]  # lengths say them
        tensors.append({name: tensor.cpu() for name, tensor in held.items()})
    errors = {name: math.sqrt(wrong[name] / whole[name]) if whole[name] else 0.0 for name in whole}
    return Coded(tensors, {"bits": bits, **errors, "largest": largest})


def tier_tensors(store: Store, plain: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Tensors of a store, exactly what it holds.

    Args:
        store: of a layer.
        plain: those of its plain tier; None: as it is held.
    """
    found = dict(tensors_of(plain_of(store)) if plain is None else plain)
    if isinstance(store, TieredStore) and store.packed is not None:
        found |= {PACKED + name: own for name, own in _tensors_of_packed(store.packed).items()}
    return found


def tier_header(stores: Mapping[int, Store]) -> dict[str, Any]:
    """What the header says of layers in tiers, by their indices; nothing where there are none."""
    tiers = {
        str(idx): {"precision": config.to_mapping(store.precision)}
        for idx, store in stores.items()
        if isinstance(store, TieredStore)
    }
    return {TIERS: tiers} if tiers else {}


def precision_of(record: Mapping[str, Any]) -> Precision:
    """The precision that a header says.

    Raises:
        ValueError: settings that there are not.
    """
    return config.build({"precision": record["precision"]}, Tiers).precision


def tiered_store_of(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], spec: LayerSizes, slack: int
) -> Store:
    """The store of a layer, which `wrong_tiers` found nothing wrong with.

    Args:
        header: of the file.
        tensors: of the layer, by their names in `layer.N.store`.
        spec: its sizes.
        slack: free entries of a row for new tokens.
    """
    H, D = spec.num_kv_heads, spec.head_dim
    plain = {name: own for name, own in tensors.items() if not name.startswith(PACKED)}
    if CODED in header:
        form = Form(header[CODED]["bits"], D, D, spec.dtype)
        groups_N = groups_of(plain["lengths"].long()).to(torch.int32)
        codes = _packed_of({**plain, GROUPS: groups_N}, form, H)
        keys_CD, values_CV = codes.decoded()
        index_N = codes.index_N()
        entries = {name: own for name, own in plain.items() if name in ("positions", "lengths")}
        entries |= {name: own for name, own in plain.items() if name.startswith(BESIDE)}
        plain = {**entries, "keys": keys_CD[index_N], "values": values_CV[index_N]}
    store = store_of(plain, H, slack)
    record = header.get(TIERS, {}).get(str(spec.layer_idx))
    if record is None:
        return store
    precision, tier = precision_of(record), within(tensors, PACKED)
    form = Form(precision.bits, D, D, spec.dtype)
    return TieredStore(store, precision, _packed_of(tier, form, H) if tier else None)


def wrong_tiers(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: Sequence[LayerSizes]
) -> Iterator[str]:
    """Yield what cannot be in a file with layers of these sizes: codes that nobody writes, and all of
    `retain.cache.file_format.wrong_tensors`.

    Raises:
        ValueError: a precision that there is not.
    """
    bits = header[CODED]["bits"] if CODED in header else None
    if CODED in header and (type(bits) is not int or bits not in BITS):
        yield f"codes of {bits!r:.60} bits (known are {BITS})"
    specs = {str(spec.layer_idx): spec for spec in layers}
    shapes: Shapes = {}
    packed: list[str] = []
    files: list[str] = []
    for idx, record in header.get(TIERS, {}).items():
        if idx not in specs:
            yield f"tiers of layer {idx!r:.60}, which evicts nothing"
        where = f"layer.{idx}.store.{PACKED}"
        precision = precision_of(record)
        if within(tensors, where):
            packed.append(where)
            shapes |= _named_shapes(where, precision.bits, specs[idx], tensors)
    if bits is not None:
        for idx, spec in specs.items():
            files.append(f"layer.{idx}.store.")
            shapes |= _named_shapes(files[-1], bits, spec, tensors)
    yield from wrong_tensors(tensors, layers, shapes)
    for where in packed:
        yield from _wrong_values(where, within(tensors, where))
    for where in files:
        lengths_R = tensors[where + "lengths"].long()
        wanted = int(((lengths_R + GROUP - 1) // GROUP).sum())
        if bool((lengths_R < 0).any()) or len(tensors[where + KEY_SCALES]) != wanted:
            yield f"{where}{KEY_SCALES} of other groups than the {wanted} that its lengths make"


def _named_shapes(where: str, bits: int, spec: LayerSizes, tensors: Mapping[str, Tensor]) -> Shapes:
    """Kind and shape of each tensor of entries in few bits, by its name in the file."""
    lengths_R, D = tensors[where + "lengths"], spec.head_dim
    N = int(lengths_R.sum())
    shapes: Shapes = {
        "positions": ("whole", (N,)),
        "lengths": ("whole", (len(tensors["history.valid"]) * spec.num_kv_heads,)),
        BESIDE + LOG_WEIGHT: ("float32", (N,)),
        "keys": ("uint8", (N, bytes_wide(D, bits))),
        "values": ("uint8", (N, bytes_wide(D, bits))),
        VALUE_SCALES: ("float16", (N, 2, -(-D // min(GROUP, D)))),
        GROUPS: ("int32", (N,)),
        KEY_SCALES: ("float16", (None, 2, D)),
    }
    return {where + name: shape for name, shape in shapes.items()}


def _wrong_values(where: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield numbers of a tier that point beyond what there is."""
    if bool((tensors["lengths"] < 0).any()):
        yield f"{where}lengths below 0"
    groups_N, count = tensors[GROUPS], len(tensors[KEY_SCALES])
    if groups_N.numel() and (int(groups_N.min()) < 0 or int(groups_N.max()) >= count):
        yield f"{where}{GROUPS} from {int(groups_N.min())} to {int(groups_N.max())}, of {count}"


def _tensors_of_packed(tier: PackedStore) -> dict[str, Tensor]:
    """Tensors of a packed tier: exactly the entries held, row after row, and what decodes them."""
    keys, values = tier.keys, tier.values
    assert keys.groups_C is not None
    columns = {"keys": keys.codes_CW, "values": values.codes_CW, "positions": tier.positions_C}
    columns |= {VALUE_SCALES: values.scales_G2N, GROUPS: keys.groups_C}
    columns |= {BESIDE + name: column for name, column in tier.beside.items()}
    index_N = tier.index_N()
    found = {name: column[index_N] for name, column in columns.items()}
    return found | {"lengths": tier.lengths_R.clone(), KEY_SCALES: tier.key_scales_G2D}


def _packed_of(tensors: Mapping[str, Tensor], form: Form, num_heads: int) -> PackedStore:
    """Rebuild a packed tier from `_tensors_of_packed` it.

    Raises:
        ValueError: lengths and entries do not fit together.
    """
    columns = {name: own for name, own in tensors.items() if name != KEY_SCALES}
    check_entries(columns, num_heads)
    names = ("keys", "values", "positions", VALUE_SCALES, GROUPS)
    return PackedStore.of_columns(
        form,
        {name: columns[name] for name in names},
        columns["lengths"],
        num_heads,
        beside=within(columns, BESIDE),
        key_scales=tensors[KEY_SCALES],
    )

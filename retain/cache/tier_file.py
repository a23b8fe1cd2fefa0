"""Tiers of a store in the file of a conversation (`retain.cache.file_format`), and files in few bits.

Two things make a file one of version 3. A layer held in tiers (`retain.cache.tiered_store`) is written
exactly as it is held: codes, scales, groups, tables of rows. Nothing is decoded, nothing is quantised anew.
And `cache.save(path, bits=4)` writes the entries that the cache holds as they are (all of them, or its plain
tier) as codes, which `load` decodes: keys by channel over 32 entries, values by entry over 32 channels (KIVI,
arXiv 2402.02750). The error of that is measured as the file is written, and stands in the header.

An entry of such a file, with D channels, takes `2 * D * bits / 8` bytes of codes, `4 * D / 32` bytes of
scales of its values, and as many of its keys where 32 entries share them; the last group of a row may have
fewer. With D = 128 and 4 bits that is 160 bytes, where bfloat16 takes 512; its position takes 4 in both.

Header: `tiers`, for each layer in tiers its `precision` and the `forms` of its packed tiers; `coded`, the
bits and errors of a file in few bits. Tensors: `layer.N.store.tier.K.NAME` of the Kth packed tier of layer N;
`layer.N.store.rows.NAME`, how its queries say that keys are held; the plain tier as that of other layers.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from retain.cache.packed_store import (
    BALANCE,
    CHANNELS,
    GROUPS,
    KEY_SCALES,
    VALUE_SCALES,
    Form,
    PackedStore,
    groups_of,
)
from retain.cache.store import LOG_WEIGHT
from retain.cache.tiered_store import Rows, Store, TieredStore, plain_of
from retain.kernels.codes import BITS, Codes, bytes_wide
from retain.precision import Precision

# Keys of the header.
TIERS, CODED = "tiers", "coded"
TIER, TABLE, ROWS = "tier.", "table.", "rows."
# Entries that share a scale of keys in a file in few bits, and channels that share one of values.
GROUP = 32


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
        form = _file_form(bits, keys_ND.shape[1], values_NV.shape[1], store.dtype)
        beside = {name: column[store.index_N()] for name, column in store.beside.items()}
        packed = PackedStore.encoded(
            form, keys_ND, values_NV, positions_N, store.lengths_R, store.num_heads, beside=beside, rows={}
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
    if isinstance(store, TieredStore):
        said = zip((BALANCE, CHANNELS), store.rows, strict=True)
        found |= {ROWS + name: table for name, table in said if table is not None}
        for number, tier in enumerate(store.packed):
            found |= {f"{TIER}{number}.{name}": own for name, own in _tensors_of_packed(tier).items()}
    return found


def tier_header(stores: Mapping[int, Store]) -> dict[str, Any]:
    """What the header says of layers in tiers, by their indices; nothing where there are none."""
    tiers = {
        str(idx): {
            "precision": config.to_mapping(store.precision),
            "forms": [_record_of(tier.form) for tier in store.packed],
        }
        for idx, store in stores.items()
        if isinstance(store, TieredStore)
    }
    return {TIERS: tiers} if tiers else {}


def tiered_store_of(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    spec: LayerSizes,
    slack: int,
    *,
    one_vector: bool = False,
) -> Store:
    """The store of a layer, which `wrong_tiers` found nothing wrong with.

    Args:
        header: of the file.
        tensors: of the layer, by their names in `layer.N.store`.
        spec: its sizes.
        slack: free entries of a row for new tokens.
        one_vector: whether the keys are the values too.
    """
    H, D = spec.num_kv_heads, spec.head_dim
    plain = {name: own for name, own in tensors.items() if not name.startswith((TIER, ROWS))}
    if CODED in header:
        form = _file_form(header[CODED]["bits"], D, D, spec.dtype)
        groups_N = groups_of(plain["lengths"].long(), GROUP).to(torch.int32)
        packed = _packed_of({**plain, GROUPS: groups_N}, form, H)
        keys_CD, values_CV = packed.decoded()
        index_N = packed.index_N()
        entries = {name: own for name, own in plain.items() if name in ("positions", "lengths")}
        entries |= {name: own for name, own in plain.items() if name.startswith(BESIDE)}
        plain = {**entries, "keys": keys_CD[index_N], "values": values_CV[index_N]}
    store = store_of(plain, H, slack, one_vector=one_vector)
    record = header.get(TIERS, {}).get(str(spec.layer_idx))
    if record is None:
        return store
    said = within(tensors, ROWS)
    rows = Rows(said.get(BALANCE), said.get(CHANNELS))
    tiered = TieredStore(store, config.build(record["precision"], Precision), rows)
    for number, form in enumerate(record["forms"]):
        tiered.packed.append(_packed_of(within(tensors, f"{TIER}{number}."), _form_of(form, spec), H))
    return tiered


def wrong_tiers(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: Sequence[LayerSizes]
) -> Iterator[str]:
    """Yield what cannot be in a file with layers of these sizes: forms and codes that nobody writes, and all
    of `retain.cache.file_format.wrong_tensors`."""
    bits = header[CODED]["bits"] if CODED in header else None
    if CODED in header and (type(bits) is not int or bits not in BITS):
        yield f"codes of {bits!r:.60} bits (known are {BITS})"
    specs = {str(spec.layer_idx): spec for spec in layers}
    shapes: Shapes = {}
    packed: list[tuple[str, Form]] = []
    for idx, record in header.get(TIERS, {}).items():
        if idx not in specs:
            yield f"tiers of layer {idx!r:.60}, which evicts nothing"
        for number, mapping in enumerate(record["forms"]):
            if (reason := _misfit(mapping, specs[idx])) is not None:
                yield f"tier {number} of layer {idx} with {reason}"
            packed.append((f"layer.{idx}.store.{TIER}{number}.", _form_of(mapping, specs[idx])))
        rows = f"layer.{idx}.store.{ROWS}"
        R, D = len(tensors[f"layer.{idx}.store.lengths"]), specs[idx].head_dim
        shapes |= {rows + BALANCE: ("float32", (R, D)), rows + CHANNELS: ("bool", (R, D))}
    files = [
        (f"layer.{idx}.store.", _file_form(bits, spec.head_dim, spec.head_dim, spec.dtype))
        for idx, spec in specs.items()
        if bits is not None
    ]
    for where, form in packed + files:
        spec = specs[where.split(".")[1]]
        shapes |= {where + name: own for name, own in _shapes(form, tensors[where + "lengths"]).items()}
        shapes[where + "lengths"] = ("whole", (len(tensors["history.valid"]) * spec.num_kv_heads,))
    yield from wrong_tensors(tensors, layers, shapes)
    for idx in header.get(TIERS, {}):
        said = within(tensors, f"layer.{idx}.store.{ROWS}")
        if BALANCE in said and not bool((said[BALANCE] > 0).all()):
            yield f"layer.{idx}.store.{ROWS}{BALANCE} that is not above 0"
        if CHANNELS in said and not bool(said[CHANNELS].any(1).all()):
            yield f"layer.{idx}.store.{ROWS}{CHANNELS} of a row without any"
    for where, form in packed:
        yield from _wrong_values(where, form, within(tensors, where))
    for where, _ in files:
        lengths_R = tensors[where + "lengths"].long()
        wanted = int(((lengths_R + GROUP - 1) // GROUP).sum())
        if bool((lengths_R < 0).any()) or len(tensors[where + TABLE + KEY_SCALES]) != wanted:
            yield f"{where}{TABLE}{KEY_SCALES} of other groups than the {wanted} that its lengths make"


class Tier(NamedTuple):
    """Entries of one form in a file, over all layers.

    Args:
        entries: how many.
        size: bytes of their keys and values in the file: codes, scales, groups and tables of rows count.
        whole: bytes of these in the model's precision.
    """

    entries: int
    size: int
    whole: int

    def __str__(self) -> str:
        return f"{self.entries:,} entries, {self.size:,} bytes"


def tiers_in(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tier]:
    """What a file holds in which form, by the form in words."""
    itemsize = getattr(torch, header["dtype"].removeprefix("torch.")).itemsize
    columns = ("keys", "values", KEY_SCALES, VALUE_SCALES, GROUPS)
    found: dict[str, Tier] = {}
    for name in tensors:
        where, _, kind = name.rpartition(".")
        if kind != "lengths" or ".store" not in where:
            continue
        _, idx, _, *tier = where.split(".")
        own = within(tensors, where + ".")
        size = sum(one.nbytes for key, one in own.items() if key in columns or key.startswith(TABLE))
        if tier:
            record = header[TIERS][idx]["forms"][int(tier[-1])]
            words = str(Form(**record, dtype=torch.float32))
            width = record["head_dim"] + record["value_dim"]
        elif CODED in header:
            words, width = f"{header[CODED]['bits']} bits in the file", 2 * own[TABLE + KEY_SCALES].shape[-1]
        else:
            words, width = (
                "as they are",
                sum(own[name].shape[1] for name in ("keys", "values") if name in own),
            )
        count = int(own["lengths"].sum())
        before = found.get(words, Tier(0, 0, 0))
        found[words] = Tier(
            before.entries + count, before.size + size, before.whole + count * width * itemsize
        )
    return found


def _file_form(bits: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Form:
    """How `save(path, bits=)` holds entries."""
    return Form(
        bits=bits,
        by="channel",
        group=GROUP,
        span=min(GROUP, value_dim),
        width=head_dim,
        head_dim=head_dim,
        value_dim=value_dim,
        balanced=False,
        dtype=dtype,
    )


def _record_of(form: Form) -> dict[str, Any]:
    """A form as the header holds it; its dtype is the model's."""
    names = ("bits", "by", "group", "span", "width", "head_dim", "value_dim", "balanced")
    return {name: getattr(form, name) for name in names}


def _form_of(record: Mapping[str, Any], spec: LayerSizes) -> Form:
    return Form(**record, dtype=spec.dtype)


def _misfit(record: Mapping[str, Any], spec: LayerSizes) -> str | None:
    """Why a record is no form of this layer; None if it is one."""
    bits, by = record["bits"], record["by"]
    if bits is not None and (type(bits) is not int or bits not in BITS):
        return f"codes of {bits!r:.60} bits (known are {BITS})"
    if by not in ("channel", "token") or type(record["balanced"]) is not bool:
        return f"scales of keys by {by!r:.60}, balanced {record['balanced']!r:.60}"
    sizes = {name: record[name] for name in ("group", "span", "width", "head_dim", "value_dim")}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        return f"sizes {sizes}"
    D = spec.head_dim
    if sizes["head_dim"] != D or sizes["value_dim"] != D or sizes["width"] > D:
        return f"{sizes}, where a head has {D} channels"
    return None


def _shapes(form: Form, lengths_R: Tensor) -> Shapes:
    """Kind and shape of each tensor of a tier."""
    R, N, V, width = len(lengths_R), int(lengths_R.sum()), form.value_dim, form.width
    kind = str(form.dtype).removeprefix("torch.")
    shapes: Shapes = {
        "positions": ("whole", (N,)),
        BESIDE + LOG_WEIGHT: ("float32", (N,)),
        TABLE + CHANNELS: ("int16", (R, width)),
        TABLE + BALANCE: ("float32", (R, form.head_dim)),
    }
    if form.bits is None:
        return shapes | {"keys": (kind, (N, width)), "values": (kind, (N, V))}
    shapes |= {
        "keys": ("uint8", (N, bytes_wide(width, form.bits))),
        "values": ("uint8", (N, bytes_wide(V, form.bits))),
        VALUE_SCALES: ("float16", (N, 2, -(-V // form.span))),
        GROUPS: ("int32", (N,)),
        TABLE + KEY_SCALES: ("float16", (None, 2, width)),
        KEY_SCALES: ("float16", (N, 2, -(-width // form.group))),
    }
    return shapes


def _wrong_values(where: str, form: Form, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield numbers of a tier that point beyond what there is, or decode to nothing."""
    if bool((tensors["lengths"] < 0).any()):
        yield f"{where}lengths below 0"
    if GROUPS in tensors and tensors[GROUPS].numel():
        groups_N, count = tensors[GROUPS], len(tensors[TABLE + KEY_SCALES])
        if int(groups_N.min()) < 0 or int(groups_N.max()) >= count:
            yield f"{where}{GROUPS} from {int(groups_N.min())} to {int(groups_N.max())}, of {count}"
    if form.width < form.head_dim:
        held_RK = tensors[TABLE + CHANNELS].long()
        inside = bool(((held_RK >= 0) & (held_RK < form.head_dim)).all())
        # Rows of other widths have zeros, and no entries.
        ascending_R = (held_RK.diff(dim=1) > 0).all(1) | (tensors["lengths"] == 0)
        if not inside or not bool(ascending_R.all()):
            yield f"{where}{TABLE}{CHANNELS} that are not ascending within 0 .. {form.head_dim - 1}"
    if form.balanced and not bool((tensors[TABLE + BALANCE] > 0).all()):
        yield f"{where}{TABLE}{BALANCE} that are not above 0"


def _tensors_of_packed(tier: PackedStore) -> dict[str, Tensor]:
    """Tensors of a packed tier: exactly the entries held, row after row, and what decodes them."""
    keys, values = tier.keys, tier.values
    columns = {"positions": tier.positions_C}
    columns |= {BESIDE + name: column for name, column in tier.beside.items()}
    if isinstance(keys, Codes) and isinstance(values, Codes):
        columns |= {"keys": keys.codes_CW, "values": values.codes_CW, VALUE_SCALES: values.scales_G2N}
        if keys.groups_C is None:
            columns[KEY_SCALES] = keys.scales_G2N
        else:
            columns[GROUPS] = keys.groups_C
    elif isinstance(keys, Tensor) and isinstance(values, Tensor):
        columns |= {"keys": keys, "values": values}
    index_N = tier.index_N()
    found = {name: column[index_N] for name, column in columns.items()}
    found["lengths"] = tier.lengths_R.clone()
    return found | {TABLE + name: table for name, table in tier.tables.items()}


def _packed_of(tensors: Mapping[str, Tensor], form: Form, num_heads: int) -> PackedStore:
    """Rebuild a packed tier from `_tensors_of_packed` it.

    Raises:
        ValueError: lengths and entries do not fit together.
    """
    columns = {name: own for name, own in tensors.items() if not name.startswith(TABLE)}
    check_entries(columns, num_heads)
    names = ["keys", "values", "positions"]
    if form.bits is not None:
        names += [VALUE_SCALES, GROUPS if form.by == "channel" else KEY_SCALES]
    return PackedStore.of_columns(
        form,
        {name: columns[name] for name in names},
        columns["lengths"],
        num_heads,
        beside=within(columns, BESIDE),
        tables=within(tensors, TABLE),
    )

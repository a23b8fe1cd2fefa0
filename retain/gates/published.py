"""Imports published gates: KVzap, Fast KVzip, TRIM-KV and DBTrimKV, DMS.

The result is a `GateSet` whose score is what the authors' code computes (tested against it). Tensors are
found by name, so that of a checkpoint with the whole model merged in only the gates are read. Pickled
releases are read by torch's restricted unpickler, which runs none of a file's code.

| kind | released as | tensors of layer l | our family |
|---|---|---|---|
| `kvzap` | safetensors | `layers.<l>.weight`, `bias`; MLP `layers.<l>.0.`, `.2.` | `linear`, `mlp` |
| `fastkvzip` | pickle | `module[l]`: `q_proj`, `k_proj`, `q_norm`, `k_norm`, `k_base`, `b` | `lowrank` |
| `trimkv` | pickle | `<a>.retention_gate`: `linear1`, `linear2`, `bias` | `decay` |
| `trimkv` (DBTrimKV) | pickle | the same, with `linear3` | `decay_shared`, untied |
| `dms` | safetensors, in the model | `<a>.dms_proj_alpha_norm.weight`, `<a>.dms_proj_alpha` | `dms` |
| `dms_query` | safetensors, in the model | one neuron of `<a>.q_proj`, with `<a>.q_norm` | `dms` |

with `<a>` for `model.layers.<l>.self_attn`. Layouts are those of the authors' code; none of the released
weights were available when this was written. `retain.models.named_gates.import_gates` fetches them.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from torch import Tensor

from retain.gates.artifact import check_tensors
from retain.gates.base import GateSet
from retain.gates.families import build_gates, dims_for
from retain.process.registry import lookup

PICKLES = (".bin", ".pt", ".pth", ".pkl")
CONFIG_FILE = "config.json"

Sizes = Mapping[str, int]
Config = Mapping[str, Any]
# Tensors of one layer's gate, by name.
Parts = dict[str, Tensor]
# Our family, its settings, and a layer's tensors by our names.
Release = tuple[str, dict[str, Any], Parts]


@dataclass(frozen=True)
class Kind:
    """A published format of gates.

    Args:
        paper: title and arXiv id.
        pattern: of a tensor's name: layer index, and the part of the gate.
        gate_of: a layer's parts (those that it takes are popped), the config of the language model, the
            layer's sizes -> what was released.
        score_unit: unit of the score, where it is another than the family's.
        stated_by: entry of the config without which such tensors are no gates; None: the names tell.
        note: for users of these gates.
    """

    paper: str
    pattern: str
    gate_of: Callable[[Parts, Config, Sizes], Release]
    score_unit: str | None = None
    stated_by: str | None = None
    note: str = ""


def _named(parts: Parts, **names: str) -> Parts:
    """Take linear modules' parts: our module (two underscores for a dot) -> their weight and bias."""
    found = {}
    for module, theirs in names.items():
        found[f"{module}.weight"] = parts.pop(f"{theirs}weight")
        if f"{theirs}bias" in parts:
            found[f"{module}.bias"] = parts.pop(f"{theirs}bias")
    return found


def _kvzap(parts: Parts, config: Config, sizes: Sizes) -> tuple[str, dict[str, Any], Parts]:
    if "0.weight" not in parts:
        return "linear", {}, _named(parts, out="")
    F = len(parts["0.weight"])
    return "mlp", {"F": F}, _named(parts, up="0.", out="2.")


def _fastkvzip(parts: Parts, config: Config, sizes: Sizes) -> tuple[str, dict[str, Any], Parts]:
    settings = {"rank": len(parts["q_norm.weight"]), "sinks": parts["k_base"].shape[2]}
    found = _named(parts, queries="q_proj.", keys="k_proj.", query_norm="q_norm.", key_norm="k_norm.")
    # Published with an axis of 1 for the entries: [H, 1, sinks, rank] and [H, 1, G].
    found |= {"sink_keys": parts.pop("k_base").squeeze(1), "bias": parts.pop("b").squeeze(1)}
    return "lowrank", settings, found


def _trimkv(parts: Parts, config: Config, sizes: Sizes) -> tuple[str, dict[str, Any], Parts]:
    variant = config.get("retention_gate")
    if variant not in (None, "rg", "rg10"):
        raise ValueError(
            f"TRIM-KV gates of the variant {variant!r} are not read here, only `rg` (of the attention input) "
            "and `rg10` (DBTrimKV), which are what was released."
        )
    # The model's activation, by either name that transformers has for it.
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    settings = {"F": len(parts["linear1.weight"]), "activation": activation}
    out = {"out.bias": parts.pop("bias")}
    if "linear3.weight" not in parts:
        return "decay", settings, out | _named(parts, up="linear1.", out="linear2.")
    found = _named(parts, up="linear1.", middle="linear2.", out="linear3.")
    return "decay_shared", {**settings, "tied": False}, out | found


def _dms_settings(config: Config, bias: bool) -> dict[str, Any]:
    """Settings of both releases of DMS; one that is not stated has the default of their config class."""
    if (per := config.get("dms_alpha_per", "head")) != "head":
        raise ValueError(
            f"DMS gates with one decision per {per} (dms_alpha_per) are not read here, only those with one "
            "per KV head, their default."
        )
    return {
        "scale": config.get("dms_alpha_scale", 100.0),
        "offset": config.get("dms_initial_alpha_offset", 5.0),
        "eps": config.get("rms_norm_eps", 1e-6),
        "decides": "next",
        "bias": bias,
    }


def _dms(parts: Parts, config: Config, sizes: Sizes) -> Release:
    found = _named(parts, norm="dms_proj_alpha_norm.", out="dms_proj_alpha.")
    return "dms", _dms_settings(config, "out.bias" in found), found


def _dms_query(parts: Parts, config: Config, sizes: Sizes) -> tuple[str, dict[str, Any], Parts]:
    H, Q, D = sizes["H"], sizes["Q"], sizes["D"]
    found = _named(parts, norm="q_norm.", out="q_proj.")
    for name in [name for name in found if name.startswith("out.")]:
        first_of_group = found[name].unflatten(0, (H, Q // H, D))[:, 0]
        found[name] = first_of_group.flatten(0, 1)
    return "dms", {**_dms_settings(config, "out.bias" in found), "query_width": D}, found


KINDS: dict[str, Kind] = {
    "kvzap": Kind(
        paper="KVzap, arXiv 2601.07891",
        pattern=r"(?:layers|module_list)\.(0|[1-9][0-9]{0,5})\.(.+)",
        gate_of=_kvzap,
        # They predict log KVzip+, max a ||W_O v|| / ||h||: over a hidden norm, it is no risk.
        score_unit="rank",
        note="the score is KVzip+ itself: their threshold tau on its logarithm is exp(tau) here",
    ),
    "fastkvzip": Kind(
        paper="Fast KVzip, arXiv 2601.17668",
        pattern=r"(?:module\.)?(0|[1-9][0-9]{0,5})\.(.+)",
        gate_of=_fastkvzip,
        note="as at their inference, the bias counts once (their training added it twice)",
    ),
    "trimkv": Kind(
        paper="TRIM-KV, arXiv 2512.03324; DBTrimKV, arXiv 2605.09649",
        pattern=r"(?:.*\.)?layers\.(0|[1-9][0-9]{0,5})\.self_attn\.retention_gate\.(.+)",
        gate_of=_trimkv,
    ),
    "dms": Kind(
        paper="DMS, arXiv 2506.05345",
        pattern=r"(?:.*\.)?layers\.(0|[1-9][0-9]{0,5})\.self_attn\.(dms_proj_alpha.*)",
        gate_of=_dms,
        note="they evict a score below 0 that has left their window (dms_window_size); the model beside "
        "these gates was frozen",
    ),
    "dms_query": Kind(
        paper="DMS, arXiv 2506.05345",
        pattern=r"(?:.*\.)?layers\.(0|[1-9][0-9]{0,5})\.self_attn\.(q_(?:proj|norm)\..+)",
        gate_of=_dms_query,
        stated_by="dms_alpha_scale",
        note="they evict a score below 0 that has left their window (dms_window_size); the paper trains "
        "all weights of the model with these gates, so that they fit no other, and its own code sets the "
        "neuron that they read to zero in attention, which transformers' does not",
    ),
}


def import_published(
    path: str | os.PathLike[str], sizes: Mapping[int, Sizes], *, kind: str = "auto"
) -> GateSet:
    """Read published gates, in float32 on the CPU.

    Args:
        path: a file of weights, or a folder with some (and the `config.json` of the release, if it has one).
        sizes: of the model: layer index -> E, H, Q, D, for each layer that evicts.
        kind: a name in `KINDS`, or `auto`: found by the tensors' names.

    Returns:
        the gates, with their origin in `metadata`, for `save_gates`.

    Raises:
        ValueError: nothing readable is there, it is of another kind, a tensor is missing or left over, or it
            is of another width than the model's.
    """
    path = Path(path)
    config, stored = _config(path if path.is_dir() else path.parent), _stored(weights_of(path))
    kind = _kind_of(stored, config, path) if kind == "auto" else kind
    published = lookup(kind, KINDS, what="kind of published gates")
    family, settings = "", dict[str, Any]()
    found: Parts = {}
    for layer, names in _layers(kind, stored, sizes, path).items():
        parts = {part: stored[name]() for part, name in names.items()}
        try:
            family, settings, renamed = published.gate_of(parts, config, sizes[layer])
        except (LookupError, RuntimeError, ArithmeticError) as error:
            raise ValueError(
                f"{path} is not of this model, or incomplete: layer {layer} has {sorted(names)}, which are "
                f"no {kind} gate of its sizes ({type(error).__name__}: {error})."
            ) from None
        if parts:
            raise ValueError(f"{path}: {min(parts)!r} of layer {layer} is no part of {kind} gates.")
        found |= {f"gates.{layer}.{name}": tensor for name, tensor in renamed.items()}
    try:
        gates = build_gates(family, dims_for(family, sizes, settings))
    except ValueError as error:
        raise ValueError(f"{path}, with its {CONFIG_FILE}, describes gates of no kind: {error}") from None
    found = {**dict(gates.named_buffers()), **found}  # statistics of the input are ours alone
    check_tensors(gates.state_dict(), found, path)
    gates.load_state_dict(found)
    gates.metadata = {"published": {"kind": kind, "paper": published.paper, "note": published.note}}
    if published.score_unit is not None:
        gates.metadata["score_unit"] = published.score_unit
    return gates.eval().requires_grad_(False)


def weights_of(path: Path) -> list[Path]:
    """Files of weights of a release: its safetensors, else its pickles; a ValueError if it has neither."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    for suffixes in ((".safetensors",), PICKLES):
        if found := [file for file in files if file.suffix in suffixes]:
            return found
    raise ValueError(
        f"there are no published gates at {path}: it is no file of weights, and no folder with one. Pass "
        "what the authors released, or a hub id."
    )


def _config(folder: Path) -> dict[str, Any]:
    """Config of a release's language model (of a multimodal one its `text_config`); empty without one."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}): fetch it again.") from None
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _stored(files: list[Path]) -> dict[str, Callable[[], Tensor]]:
    """Tensors by name, each read when it is called for."""
    stored: dict[str, Callable[[], Tensor]] = {}
    for path in files:
        try:
            if path.suffix in PICKLES:
                found = {name: tensor.detach for name, tensor in _flat(_unpickled(path))}
            else:
                file = safe_open(path, "pt")
                found = {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # the unpickler raises whatever a broken file leads it to
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"{path} is corrupt, or more than tensors ({type(error).__name__}: {reason}): fetch it again."
            ) from None
        if twice := sorted(stored.keys() & found):
            raise ValueError(f"{path} and a file next to it both hold {twice[0]!r}: name the one to import.")
        stored |= found
    return stored


def _unpickled(path: Path) -> Any:
    """Content of a file that `torch.save` wrote, of tensors, numpy arrays, lists and mappings."""
    array = numpy.zeros(1)
    reconstruct = array.__reduce__()[0]
    # Fast KVzip keeps its loss curves, numpy arrays, with the gates.
    arrays: list[Any] = [
        *(reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct"), numpy.ndarray, numpy.dtype),
        *(type(numpy.dtype(name)) for name in ("float32", "float64", "int64")),
    ]
    with torch.serialization.safe_globals(arrays):
        return torch.load(path, map_location="cpu", weights_only=True)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested lists and mappings, by dotted name."""
    if isinstance(value, Tensor):
        yield prefix.removesuffix("."), value
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(inner, f"{prefix}{key}.")


def _kind_of(names: Collection[str], config: Config, path: Path) -> str:
    """The kind that a release's tensor names and config fit."""
    for kind, published in KINDS.items():
        stated = published.stated_by is None or published.stated_by in config
        if stated and any(re.fullmatch(published.pattern, name) for name in names):
            return kind
    some = ", ".join(sorted(names)[:3]) or "none"
    raise ValueError(
        f"{path} holds no gates of a kind that is known (its tensors: {some}, ...): known are "
        f"{', '.join(sorted(KINDS))}. If it is one of them, say which with kind=."
    )


def _layers(
    kind: str, names: Collection[str], sizes: Mapping[int, Sizes], path: Path
) -> dict[int, dict[str, str]]:
    """Names of tensors by layer and part, for the layers of the model."""
    layers: dict[int, dict[str, str]] = {}
    for name in names:
        if (match := re.fullmatch(KINDS[kind].pattern, name)) is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = name
    # Some train a gate for every layer; those that a model leaves alone (sliding windows) need none.
    leaves_alone = sorted(sizes) != list(range(len(sizes)))
    if sizes.keys() - layers.keys() or (layers.keys() - sizes.keys() and not leaves_alone):
        raise ValueError(
            f"{path} is not of this model: it has {kind} gates for layers {sorted(layers)}, and "
            f"the model's layers are {sorted(sizes)}. Name the model that these gates were trained on."
        )
    return {layer: layers[layer] for layer in sorted(sizes)}

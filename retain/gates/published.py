"""Imports published gates: KVzap, Fast KVzip, TRIM-KV and DBTrimKV, Locret, WG-KV, DMS.

The result is a `GateSet` whose score is what the authors' code computes (tested against it). Weights are read
from safetensors alone, and by name, so that of a checkpoint with the whole model merged in only the gates are
read. `retain.gates.unpickle` rewrites pickled releases once; it is a command of its own, because a pickle can
run code.

| kind | released as | tensors of layer l | our family |
|---|---|---|---|
| `kvzap` | safetensors | `layers.<l>.weight`, `bias`; MLP `layers.<l>.0.`, `.2.` | `linear`, `mlp` |
| `fastkvzip` | pickle | `module[l]`: `q_proj`, `k_proj`, `q_norm`, `k_norm`, `k_base`, `b` | `lowrank` |
| `trimkv` | pickle | `<a>.retention_gate`: `linear1`, `linear2`, `bias` | `decay` |
| `trimkv` (DBTrimKV) | pickle | the same, with `linear3` | `decay_shared`, untied |
| `locret` | safetensors, in the model | `<a>.fc1.weight`, `<a>.fc2.weight` | `qkv` |
| `wgkv` | pickle | `<a>.g_predictors`: `pre_key_norm`, `post_key_norm`, `conv1`, `conv2` | `admission` |
| `dms` | safetensors, in the model | `<a>.dms_proj_alpha_norm.weight`, `<a>.dms_proj_alpha` | `dms` |
| `dms_query` | safetensors, in the model | one neuron of `<a>.q_proj`, with `<a>.q_norm` | `dms` |

with `<a>` for `model.layers.<l>.self_attn`. Layouts are those of the authors' code; none of the released
weights were available when this was written. `python -m retain.hf.model.published` is the command
line.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from retain.gates.base import GateSet
from retain.gates.families import build_gates, dims_for
from retain.process.registry import lookup

__all__ = ["KINDS", "Kind", "import_published", "kind_of", "read_config", "safetensors_at", "to_convert"]

PICKLES = (".bin", ".pt", ".pth", ".pkl")
CONFIG_FILE = "config.json"

Sizes = Mapping[str, int]
Shapes = Mapping[str, tuple[int, ...]]


class Part(NamedTuple):
    """A tensor of a published gate.

    Args:
        ours: our name of it.
        shape: that it is published in.
        take: what of it our gate holds; None: all.
    """

    ours: str
    shape: tuple[int, ...]
    take: Callable[[Tensor], Tensor] | None = None


# Name of a part in the release -> the part.
Parts = dict[str, Part]
# Our family, its settings, and the parts of a layer by its sizes.
Release = tuple[str, dict[str, Any], Callable[[Sizes], Parts]]


@dataclass(frozen=True)
class Kind:
    """A published format of gates.

    Args:
        name: its name for users.
        paper: title and arXiv id.
        pattern: of a tensor's name: layer index, and the part of the gate.
        merged: whether other tensors may lie beside the gates'.
        gate_of: shapes of the first layer's parts, config, sizes of that layer -> what was released.
        score_unit: unit of the score, where it is another than the family's.
        stated_by: entry of the config without which such tensors are no gates; None: the names tell.
        note: for users of these gates.
    """

    name: str
    paper: str
    pattern: re.Pattern[str]
    merged: bool
    gate_of: Callable[[Shapes, Mapping[str, Any], Sizes], Release]
    score_unit: str | None = None
    stated_by: str | None = None
    note: str = ""


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Config of the language model of a release; for a multimodal one its `text_config`."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _activation(config: Mapping[str, Any]) -> str:
    """The model's activation, by either name that transformers has for it; SiLU if not stated."""
    text = _text_config(config)
    named = text.get("hidden_activation") or text.get("hidden_act") or "silu"
    if not isinstance(named, str):
        raise ValueError(f"{CONFIG_FILE} of the release gives the activation {named!r:.60}: wanted a name.")
    return named


def _linear(name: str, ours: str, out: int, inner: int, bias: str | None = None) -> Parts:
    """A linear module's parts."""
    parts: Parts = {f"{name}weight": Part(f"{ours}.weight", (out, inner))}
    if bias is not None:
        parts[bias] = Part(f"{ours}.bias", (out,))
    return parts


def _kvzap(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    if "0.weight" not in shapes:
        return "linear", {}, lambda sizes: _linear("", "out", sizes["H"], sizes["E"], "bias")
    F = shapes["0.weight"][0]

    def parts(sizes: Sizes) -> Parts:
        return _linear("0.", "up", F, sizes["E"], "0.bias") | _linear("2.", "out", sizes["H"], F, "2.bias")

    return "mlp", {"F": F}, parts


def _fastkvzip(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    rank, sinks = shapes["q_norm.weight"][0], shapes["k_base"][2]

    def parts(sizes: Sizes) -> Parts:
        E, H, Q = sizes["E"], sizes["H"], sizes["Q"]
        return {
            **_linear("q_proj.", "queries", Q * rank, E, "q_proj.bias"),
            **_linear("k_proj.", "keys", H * rank, E),
            "q_norm.weight": Part("query_norm.weight", (rank,)),
            "k_norm.weight": Part("key_norm.weight", (rank,)),
            "k_base": Part("sink_keys", (H, 1, sinks, rank)),
            "b": Part("bias", (H, 1, Q // H)),
        }

    return "lowrank", {"rank": rank, "sinks": sinks}, parts


def _trimkv(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    variant = _text_config(config).get("retention_gate")
    if variant not in (None, "rg", "rg10"):
        raise ValueError(
            f"TRIM-KV gates of the variant {variant!r} are not read here, only `rg` (of the attention input) "
            "and `rg10` (DBTrimKV), which are what was released."
        )
    F, shared = shapes["linear1.weight"][0], "linear3.weight" in shapes

    def parts(sizes: Sizes) -> Parts:
        middle = _linear("linear2.", "middle", F, F, "linear2.bias") if shared else {}
        last = _linear("linear3." if shared else "linear2.", "out", sizes["H"], F, "bias")
        return _linear("linear1.", "up", F, sizes["E"], "linear1.bias") | middle | last

    settings: dict[str, Any] = {"F": F, "activation": _activation(config)}
    return ("decay_shared", {**settings, "tied": False}, parts) if shared else ("decay", settings, parts)


def _locret(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    F = shapes["fc1.weight"][0]

    def parts(sizes: Sizes) -> Parts:
        wide = (sizes["Q"] + 2 * sizes["H"]) * sizes["D"]
        return _linear("fc1.", "up", F, wide) | _linear("fc2.", "out", sizes["H"], F)

    return "qkv", {"F": F, "activation": _activation(config), "rope": "before"}, parts


def _wgkv(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    text, expand = _text_config(config), shapes["conv1.weight"][0] / first["H"] / first["D"]

    def parts(sizes: Sizes) -> Parts:
        H, D = sizes["H"], sizes["D"]
        F = round(expand * D)
        return {
            "pre_key_norm.weight": Part("norm_before.weight", (D,)),
            "post_key_norm.weight": Part("norm_after.weight", (D,)),
            "conv1.weight": Part("up_weight", (H * F, 2 * D, 1)),
            "conv1.bias": Part("up_bias", (H * F,)),
            "conv2.weight": Part("out_weight", (H, F, 1)),
            "conv2.bias": Part("out_bias", (H,)),
        }

    settings = {"activation": text.get("g_act_fn", "gelu"), "floor": text.get("g_epsilon", 1e-3)}
    return "admission", {"expand": expand, **settings}, parts


def _dms_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of both releases of DMS; one that is not stated has the default of their config class."""
    text = _text_config(config)
    if (per := text.get("dms_alpha_per", "head")) != "head":
        raise ValueError(
            f"DMS gates with one decision per {per} (dms_alpha_per) are not read here, only those with one "
            "per KV head, their default."
        )
    return {
        "scale": text.get("dms_alpha_scale", 100.0),
        "offset": text.get("dms_initial_alpha_offset", 5.0),
        "eps": text.get("rms_norm_eps", 1e-6),
        "decides": "next",
    }


def _dms(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    bias = "dms_proj_alpha.bias" if "dms_proj_alpha.bias" in shapes else None

    def parts(sizes: Sizes) -> Parts:
        norm = {"dms_proj_alpha_norm.weight": Part("norm.weight", (sizes["E"],))}
        return norm | _linear("dms_proj_alpha.", "out", sizes["H"], sizes["E"], bias)

    return "dms", {**_dms_settings(config), "bias": bias is not None}, parts


def _dms_query(shapes: Shapes, config: Mapping[str, Any], first: Sizes) -> Release:
    bias = "q_proj.bias" in shapes

    def parts(sizes: Sizes) -> Parts:
        E, H, Q, D = sizes["E"], sizes["H"], sizes["Q"], sizes["D"]

        def first_of_group(heads: Tensor) -> Tensor:
            return heads.unflatten(0, (H, Q // H, D))[:, 0]

        taken = {
            "q_norm.weight": Part("norm.weight", (D,)),
            "q_proj.weight": Part("out.weight", (Q * D, E), first_of_group),
        }
        return taken | ({"q_proj.bias": Part("out.bias", (Q * D,), first_of_group)} if bias else {})

    return "dms", {**_dms_settings(config), "bias": bias, "query_width": first["D"]}, parts


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="kvzap",
            paper="KVzap, arXiv 2601.07891",
            pattern=re.compile(r"^(?:layers|module_list)\.([0-9]{1,6})\.(.+)$"),
            merged=False,
            gate_of=_kvzap,
            # They predict log KVzip+, max a ||W_O v|| / ||h||: over a hidden norm, it is no risk.
            score_unit="rank",
            note="the score is KVzip+ itself: their threshold tau on its logarithm is exp(tau) here",
        ),
        Kind(
            name="fastkvzip",
            paper="Fast KVzip, arXiv 2601.17668",
            pattern=re.compile(r"^(?:module\.)?([0-9]{1,6})\.(.+)$"),
            merged=False,
            gate_of=_fastkvzip,
            note="as at their inference, the bias counts once (their training added it twice)",
        ),
        Kind(
            name="trimkv",
            paper="TRIM-KV, arXiv 2512.03324; DBTrimKV, arXiv 2605.09649",
            pattern=re.compile(r"^(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.retention_gate\.(.+)$"),
            merged=True,
            gate_of=_trimkv,
        ),
        Kind(
            name="locret",
            paper="Locret, arXiv 2410.01805",
            pattern=re.compile(r"^(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.(fc\d\..+)$"),
            merged=True,
            gate_of=_locret,
        ),
        Kind(
            name="wgkv",
            paper="KV Admission (WG-KV), arXiv 2512.17452",
            pattern=re.compile(r"^(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.g_predictors\.(.+)$"),
            merged=True,
            gate_of=_wgkv,
            note="the score is log g: their rule g > 0.1 is a threshold of log 0.1",
        ),
        Kind(
            name="dms",
            paper="DMS, arXiv 2506.05345",
            pattern=re.compile(r"^(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.(dms_proj_alpha.*)$"),
            merged=True,
            gate_of=_dms,
            note="they evict a score below 0 that has left their window (dms_window_size); the model beside "
            "these gates was frozen",
        ),
        Kind(
            name="dms_query",
            paper="DMS, arXiv 2506.05345",
            pattern=re.compile(r"^(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.(q_(?:proj|norm)\..+)$"),
            merged=True,
            gate_of=_dms_query,
            stated_by="dms_alpha_scale",
            note="they evict a score below 0 that has left their window (dms_window_size); the paper trains "
            "all weights of the model with these gates, so that they fit no other, and its own code sets the "
            "neuron that they read to zero in attention, which transformers' does not",
        ),
    )
}


def import_published(
    path: str | os.PathLike[str], sizes: Mapping[int, Sizes], *, kind: str = "auto"
) -> GateSet:
    """Read published gates, in float32 on the CPU.

    Args:
        path: a safetensors file, or a folder with some (and the `config.json` of the release, if it has one).
        sizes: of the model: layer index -> E, H, Q, D, for each layer that evicts.
        kind: a name in `KINDS`, or `auto`: found by the tensors' names.

    Returns:
        the gates, with their origin in `metadata`, for `save_gates`.

    Raises:
        ValueError: nothing readable is there, it is of another kind, a tensor is missing or left over, or it
            is of another width than the model's.
    """
    path = Path(path)
    where = _names(safetensors_at(path))
    file = (path if path.is_dir() else path.parent) / CONFIG_FILE
    config = read_config(file) if file.is_file() else {}
    published = kind_of(where, config, kind, path)
    layers = _layers(published, where, sizes, path)
    tensors = _read(where, [name for parts in layers.values() for name in parts.values()])
    shapes = {
        layer: {part: tuple(tensors[name].shape) for part, name in parts.items()}
        for layer, parts in layers.items()
    }
    first = min(shapes)
    try:
        family, settings, parts_of = published.gate_of(shapes[first], config, sizes[first])
        wanted = {layer: parts_of(sizes[layer]) for layer in layers}
    except (LookupError, ArithmeticError) as error:
        raise ValueError(
            f"{path} holds no gates of kind {published.name!r} that could be understood "
            f"({type(error).__name__}: {error}); layer {first} has {shapes[first]}. See "
            "retain.gates.published for what was released."
        ) from None
    # All shapes first: nothing is allocated that the files do not hold.
    for layer, parts in wanted.items():
        _check(path, layer, shapes[layer], {name: part.shape for name, part in parts.items()})
    try:
        gates = build_gates(family, dims_for(family, {layer: sizes[layer] for layer in layers}, settings))
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"{path}, with its {CONFIG_FILE}, describes {published.name} gates that cannot be built: {error}"
        ) from None
    state = gates.state_dict()
    for layer, names in layers.items():
        for name, part in wanted[layer].items():
            tensor, ours = tensors[names[name]], f"gates.{layer}.{part.ours}"
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ValueError(f"{path}: {names[name]!r} holds no finite fractions: fetch it again.")
            tensor = tensor if part.take is None else part.take(tensor)
            state[ours] = tensor.float().reshape(state[ours].shape)
    gates.load_state_dict(state)
    gates.metadata = {"published": {"kind": published.name, "paper": published.paper, "note": published.note}}
    if published.score_unit is not None:
        gates.metadata["score_unit"] = published.score_unit
    return gates.eval().requires_grad_(False)


def safetensors_at(path: Path) -> list[Path]:
    """The safetensors files of a release; a ValueError without any, with the way to convert a pickle."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path]
        pickles = [path] if path.suffix in PICKLES else []
    else:
        files = sorted(path.glob("*.safetensors"))
        if files:
            return files
        pickles = sorted(each for each in path.glob("*") if each.suffix in PICKLES)
    if pickles:
        file, listing = to_convert([str(each) for each in pickles])
        target = Path(file).with_suffix(".safetensors")
        what = f"{file} is a pickle, which is a program,"
        if len(pickles) > 1:
            what = f"{path} holds pickles ({listing}), which are programs,"
        raise ValueError(
            f"{what} and weights are read from safetensors alone: convert the one for your model once with "
            f"`python -m retain.hf.model.published --convert {file} --out {target}`, and import {target}."
        )
    raise ValueError(
        f"there are no published gates at {path}: it is no safetensors file, and no folder with one. Pass "
        "what the authors released, or a hub id."
    )


def to_convert(pickles: Sequence[str]) -> tuple[str, str]:
    """The file that a hint asks to convert (`FILE` if there are several pickles), and all their names."""
    return (pickles[0] if len(pickles) == 1 else "FILE"), ", ".join(pickles)


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """File that holds each tensor, by name."""
    where: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupt ({error}): fetch it again.") from None
        if twice := sorted(where.keys() & {*names}):
            raise ValueError(
                f"{path} and {where[twice[0]].name} beside it both hold {twice[0]!r}, and nothing says which "
                "is meant: pass one file, or a folder with one release."
            )
        where.update(dict.fromkeys(names, path))
    return where


def _read(where: Mapping[str, Path], names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of these names; each file is opened once."""
    found: dict[str, Tensor] = {}
    for path in sorted({where[name] for name in names}):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in names if where[name] == path}
    return found


def kind_of(names: Collection[str], config: Mapping[str, Any], kind: str, path: object) -> Kind:
    """The requested kind, or the one that a release's tensor names and config fit; a ValueError if none."""
    if kind != "auto":
        return lookup(kind, KINDS, what="kind of published gates")
    for published in KINDS.values():
        if published.stated_by is not None and published.stated_by not in _text_config(config):
            continue
        matched = [name for name in names if published.pattern.match(name)]
        if matched and (published.merged or len(matched) == len(names)):
            return published
    some = ", ".join(sorted(names)[:3]) or "none"
    raise ValueError(
        f"{path} holds no gates of a kind that is known (its tensors: {some}, ...): known are "
        f"{', '.join(sorted(KINDS))}. If it is one of them, say which with kind=."
    )


def read_config(file: Path) -> dict[str, Any]:
    """A release's `config.json`; a ValueError if it is none."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}): fetch it again.") from None
    return config if isinstance(config, dict) else {}


def _layers(
    published: Kind, names: Mapping[str, Path], sizes: Mapping[int, Sizes], path: Path
) -> dict[int, dict[str, str]]:
    """Names of tensors by layer and part, for the layers of the model."""
    layers: dict[int, dict[str, str]] = {}
    for name in names:
        match = published.pattern.match(name)
        if match is not None:
            other = layers.setdefault(int(match[1]), {}).setdefault(match[2], name)
            if other != name:
                raise ValueError(
                    f"{path} holds {other!r} and {name!r}, the same part of layer {int(match[1])}: pass the "
                    "file with one set of gates."
                )
        elif not published.merged:
            raise ValueError(
                f"{path} holds {name!r}, which is no part of {published.name} gates: pass the file with the "
                "gates alone, or another kind."
            )
    if not layers:
        raise ValueError(
            f"{path} holds no {published.name} gates: no tensor's name is like "
            f"{published.pattern.pattern!r}. Pass the file with the gates, or another kind."
        )
    missing = sorted(sizes.keys() - layers.keys())
    # Some train a gate for every layer; those that a model leaves alone (sliding windows) need none.
    leaves_alone = sorted(sizes) != list(range(len(sizes)))
    extra = [] if leaves_alone else sorted(layers.keys() - sizes.keys())
    if missing or extra:
        what = f"has no gate for layers {missing}" if missing else f"has gates for layers {extra} beyond it"
        raise ValueError(
            f"{path} is not of this model: it {what}; the model's layers are {sorted(sizes)}. Name the "
            "model that these gates were trained on."
        )
    return {layer: layers[layer] for layer in sorted(sizes)}


def _check(path: Path, layer: int, got: Shapes, wanted: Shapes) -> None:
    """Check that a layer's parts are complete, known, and of the model's sizes."""
    differ = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
    if differ:
        raise ValueError(
            f"{path} is not of this model, or incomplete: {differ[0]!r} of layer {layer} is "
            f"{got.get(differ[0], 'missing')}, and the model's sizes want "
            f"{wanted.get(differ[0], 'none of it')}. Name the model that these gates were trained on, or "
            "fetch them again."
        )

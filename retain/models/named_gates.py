"""Gates for a model: read by folder or hub id and checked against it (`retain.load_gates`), or untrained ones
of its sizes (`retain.new_gates`).

`retain.gates.artifact` reads an artifact and knows no model; this adds one.
"""

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retain.gates import GATES, GateSet, build_gates, dims_for
from retain.gates.artifact import check_fingerprint
from retain.gates.artifact import load_gates as read_gates
from retain.gates.hub import fetch
from retain.gates.published import CONFIG_FILE, PICKLES, import_published
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.models.shipped import FOLDER, match_of, shipped
from retain.process.registry import check_choice, lookup

# The best training-free presets on a real model (eval/findings, 2026-11-29).
TRAINING_FREE_UNKNOWN, TRAINING_FREE_KNOWN = "layer_defensivekv", "lava"

# Behind the name of gates, in a report.
SHIPS = " (they ship with retain)"


def load_gates(
    path_or_hub_id: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    revision: str | None = None,
    allow_other_weights: bool = False,
) -> GateSet:
    """Load trained gates in float32, on the CPU; each moves to its layer's device when it first scores.

    Args:
        path_or_hub_id: the folder that `train/distill.py` wrote, the id of a hub repository that holds it, or
            the name of a model that gates ship for (`smollm2-135m`).
        model: the model on which they will be used; None skips the check that they were trained on it.
        revision: of the hub repository.
        allow_other_weights: take a model of the same dimensions with other weights: a fine-tune, or the same
            checkpoint quantised. What the gates are worth there is for you to measure.

    Returns:
        the gates, with what the artifact says of itself in `metadata`.

    Raises:
        ValueError: nothing is there; an artifact is incomplete, corrupt or of a newer schema; or it was
            trained on another model.

    Examples:
        >>> cache = retain.Cache(model, gates=retain.load_gates("runs/gates-seed0", model))  # doctest: +SKIP
    """
    named = os.fspath(path_or_hub_id)
    ships = named in shipped() and not os.path.isdir(named)
    folder = FOLDER / named if ships else fetch(path_or_hub_id, revision)
    known = None if model is None else fingerprint(model)
    gates = read_gates(folder, fingerprint=known, allow_other_weights=allow_other_weights)
    gates.source = f"{named}{SHIPS}" if ships else named
    return gates


def import_gates(
    path_or_hub_id: str | os.PathLike[str],
    model: nn.Module,
    *,
    kind: str = "auto",
    revision: str | None = None,
) -> GateSet:
    """Import gates that others published (`retain.gates.published`), for the model that they were trained on.

    `retain.gates.artifact.save_gates(gates, folder, fingerprint=fingerprint(model))` keeps them.

    Args:
        path_or_hub_id: a file of weights, a folder with some, or a hub repository.
        kind: of `retain.gates.published.KINDS`; `auto`: told by the tensors' names.

    Raises:
        ValueError: nothing is there, it is of an unknown kind, incomplete, or of another model.
    """
    path = Path(path_or_hub_id)
    if not path.exists():
        files = (CONFIG_FILE, "*.safetensors", *(f"*{end}" for end in PICKLES))
        path = fetch(path_or_hub_id, revision, files=files)
    gates = import_published(path, {spec.layer_idx: spec.sizes for spec in describe(model)}, kind=kind)
    gates.metadata["published"]["source"] = os.fspath(path_or_hub_id)
    gates.metadata["base_model"] = getattr(model.config, "name_or_path", "") or "(not stated)"
    return gates


def shipped_gates(model: nn.Module, policy: str) -> GateSet:
    """The gates that ship for a model, known by its weights.

    Args:
        policy: that takes them, for the message.

    Raises:
        ValueError: there are none for these weights; says what there is instead.
    """
    name = getattr(model.config, "_name_or_path", "") or "NAME"
    if (found := match_of(fingerprint(model))) is not None:
        gates = load_gates(FOLDER / found, model)  # whatever lies in the working directory
        gates.source = f"{found}{SHIPS}"
        return gates
    steps = [
        "import gates that others have published for it, if there are any (docs/gates.md): "
        "gates=retain.models.named_gates.import_gates('owner/name', model)",
        f"train your own: retain train {name} FILE.jsonl output=gates, then gates='gates'",
        f"take no gates: policy={TRAINING_FREE_UNKNOWN!r} where the question comes after the eviction, "
        f"policy={TRAINING_FREE_KNOWN!r} where it is read before (docs/choose.md has the evidence)",
    ]
    listed = "".join(f"\n  {number}. {step}" for number, step in enumerate(steps, 1))
    shown = type(model).__name__ if name == "NAME" else name
    raise ValueError(f"policy {policy!r} needs gates, and none ship for {shown}. You can:{listed}")


def new_gates(model: nn.Module, family: str = "mlp", *, seed: int = 0, **settings: Any) -> GateSet:
    """Untrained gates for a model, one for each layer that evicts, in float32 on the CPU.

    Training begins with them. The random numbers of the caller are left alone.

    Args:
        model: a causal language model of transformers, attached or not.
        family: of `retain.gates.GATES` (docs/gates.md): `linear`, `mlp`, `lowrank`, `qkv`, `decay`, ...
        seed: of the first weights.
        **settings: of the family, e.g. `F=64` hidden units (those of its class, docs/gates.md);
            of `lookahead`, those of `retain.hf.intercept.lookahead_pass.lookahead_gates`.

    Raises:
        ValueError: unsupported architecture, an unknown family, or settings that it does not have, all in one
            message.

    Examples:
        >>> gates = retain.new_gates(model, family="mlp")  # doctest: +SKIP
        >>> cache = retain.Cache(model, policy="learned", keep_ratio=0.2, gates=gates)  # doctest: +SKIP
    """
    if lookup(family, GATES, what="gate family").extension is not None:
        known = [one for one in inspect.signature(lookahead_gates).parameters if one not in ("model", "seed")]
        for name in settings:
            check_choice(f"setting of gate family {family!r}", name, known)
        return lookahead_gates(model, **settings, seed=seed)
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    dims = dims_for(family, sizes, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_gates(family, dims)


def gates_for(model: nn.Module, gates: Any) -> GateSet:
    """Loads what the user passed as `gates`, and checks it against the model.

    Args:
        gates: a folder, a hub id, or a `GateSet`.

    Raises:
        ValueError: if it is none of these, or gates of another model, by fingerprint or sizes.
    """
    if isinstance(gates, str | os.PathLike):
        gates = load_gates(gates, model)
    elif not isinstance(gates, GateSet):
        raise ValueError(
            f"gates are a folder, a hub id or a loaded GateSet; got {type(gates).__name__} ({gates!r:.80}): "
            "pass gates='path or hub id', or retain.load_gates(path, model)."
        )
    elif gates.metadata.get("fingerprint"):
        check_fingerprint(
            gates.metadata, fingerprint(model), "the GateSet given", allowed_on=gates.allowed_on
        )
    _check_sizes(model, gates)
    return gates


def _check_sizes(model: nn.Module, gates: GateSet) -> None:
    """Every layer has a gate of its sizes, as far as its family asks for them, and no gate is left over."""
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    for layer in sorted({*sizes, *gates.layers}):
        dims = gates[layer].dims() if layer in gates.layers else {}
        got = {name: size for name, size in dims.items() if name in ("E", "H", "Q", "D")}
        wanted = {name: size for name, size in sizes.get(layer, {}).items() if not dims or name in got}
        if got != wanted:
            raise ValueError(
                f"these gates do not fit {type(model).__name__}: layer {layer} has {got or 'nothing'} in the "
                f"gates and {wanted or 'nothing'} in the model (width E, KV heads H, query heads Q, head "
                "width D). Load gates that were trained on this model."
            )

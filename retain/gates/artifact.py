"""Saves and loads the gate artifact: a folder with `gates.safetensors` and `gates.json`.

Both files are written in full next to the old ones and then renamed, and the JSON carries the weights'
sha256: a full disk leaves the old artifact whole, and a torn or truncated one is refused. The fingerprint of
the model is passed in as a plain dict, so that reading needs no transformers.

Schema 2. Tensors: `gates.<layer>.<name>`, `calibrators.<layer>.<name>`, `extension.<name>`; tensors that
layers share are written once, under their first layer. JSON: `family`; `layers`, layer -> the keyword
arguments that build its gate; `calibration.layers`, layer -> the arguments of its calibrator; `extension`,
the arguments of the extension; `unit`, `score_unit` (unit of `GateSet.score` before a calibrator),
`fingerprint`, `sha256`; and further entries of the caller. Entries that were read are written again:
`gates.metadata` is carried over.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from retain.evidence import UNITS as SCORE_UNITS
from retain.gates.base import UNITS, GateSet
from retain.gates.calibrate import Calibrator
from retain.gates.families import GATES, dims_for
from retain.process.disk import write_new
from retain.process.registry import check_choice, lookup

SCHEMA_VERSION = 2
WEIGHTS_FILE = "gates.safetensors"
METADATA_FILE = "gates.json"
AGAIN = "Fetch or train the gates again"
Fingerprint = Mapping[str, Any]


def save_gates(
    gates: GateSet,
    folder: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint,
    metadata: Mapping[str, Any] | None = None,
    half: bool = False,
) -> Path:
    """Write the artifact; an older one in the same folder survives until the new one is complete on disk.

    Args:
        gates: the trained gates, with their calibrators and their extension, if they have any.
        folder: where; made if missing.
        fingerprint: of the base model (`retain.hf.model.identity.fingerprint`).
        metadata: JSON to keep with it: target and loss recipe, data revision, protected window, `score_unit`,
            `calibration`. It is added to the metadata that the gates were loaded with, and wins where both
            name something; what the artifact itself says wins over both.
        half: store matrices in float16, half the bytes, as those that ship; all else stays as it is.

    Returns:
        the folder.

    Raises:
        ValueError: a `score_unit` that is none.
        OSError: if the files could not be written; an older artifact is then as it was.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ties, state = _ties_of(gates), gates.state_dict()
    tensors = {name: state[name].detach().cpu().contiguous() for name in state if name not in ties}
    if half:
        matrices = {name for name, one in gates.named_parameters() if one.dim() > 1}
        tensors |= {name: tensors[name].half() for name in tensors if name in matrices}
    payload = save_tensors(tensors)
    kept, unit = {**gates.metadata, **(metadata or {})}, gates[gates.layers[0]].unit
    record = {
        "schema_version": SCHEMA_VERSION,
        "family": gates.family,
        "layers": {str(layer): gates[layer].dims() for layer in gates.layers},
        "unit": unit,
        "score_unit": kept.get("score_unit") or UNITS[unit],
        "fingerprint": dict(fingerprint),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    check_choice("score_unit", record["score_unit"], SCORE_UNITS)
    record |= {
        name: value for name, value in kept.items() if name not in (*record, "calibration", "extension")
    }
    if gates.extension is not None:
        record["extension"] = gates.extension.dims()
    # Without calibrators no `layers` may stand there, from which calibrators would be built.
    calibration = {name: value for name, value in (kept.get("calibration") or {}).items() if name != "layers"}
    if gates.calibrators:
        calibration["layers"] = {
            layer: cast(Calibrator, one).dims() for layer, one in gates.calibrators.items()
        }
    if calibration:
        record["calibration"] = calibration
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    weights = write_new(folder / WEIGHTS_FILE, payload)
    try:
        description = write_new(folder / METADATA_FILE, text.encode())
    except OSError:
        weights.unlink(missing_ok=True)
        raise
    os.replace(weights, folder / WEIGHTS_FILE)
    os.replace(description, folder / METADATA_FILE)
    return folder


def _ties_of(gates: GateSet) -> dict[str, str]:
    """Map names of shared tensors in the state dict, all but the first, to the first name of the same
    tensor."""
    first: dict[int, str] = {}
    named = [*gates.named_parameters(remove_duplicate=False), *gates.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


def read_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the artifact's JSON; a ValueError if it is missing, does not parse, or has another schema."""
    path = Path(folder) / METADATA_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a gate artifact: it has no {METADATA_FILE}. Pass the folder that "
            "train/distill.py wrote (`output:` of its config), or a hub id; a run that was killed leaves "
            "only checkpoints: start it again and it resumes."
        )
    try:
        metadata = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, no UTF-8, nesting beyond measure
        raise ValueError(f"{path} is not readable JSON ({error}). {AGAIN}.") from None
    if (version := metadata.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version!r}, this retain reads {SCHEMA_VERSION}: upgrade retain if "
            f"it is a later one. Or: {AGAIN.lower()}."
        )
    return metadata


def load_gates(
    folder: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint | None = None,
    allow_other_weights: bool = False,
) -> GateSet:
    """Read gates back, in float32 on the CPU, in eval mode and without gradients.

    Args:
        folder: the artifact.
        fingerprint: of the model that they are about to be used on; None skips the check.
        allow_other_weights: take a model of the same dimensions whose weights differ, such as a fine-tune.

    Returns:
        the gates, with the JSON's content in `metadata`.

    Raises:
        ValueError: if a file is missing, truncated, inconsistent or of another schema, or the model is
            another one.
    """
    folder = Path(folder)
    metadata = read_metadata(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has {METADATA_FILE} but no {WEIGHTS_FILE}. {AGAIN}.")
    payload = path.read_bytes()
    try:
        tensors = load_tensors(payload)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}). {AGAIN}.") from None
    if hashlib.sha256(payload).hexdigest() != metadata.get("sha256"):
        raise ValueError(
            f"{path} and {METADATA_FILE} do not belong together (the sha256 differs): a write was cut "
            f"between the two, or one was replaced. {AGAIN}."
        )
    gates = _build(metadata, tensors, path)
    if fingerprint is not None:
        gates.allowed_on = check_fingerprint(
            metadata, fingerprint, folder, allow_other_weights=allow_other_weights
        )
    gates.metadata = metadata
    return gates.eval().requires_grad_(False)


def _build(metadata: Mapping[str, Any], tensors: dict[str, torch.Tensor], path: Path) -> GateSet:
    """Build the gates that the JSON describes, with the tensors; allocates only after the shapes agree."""
    try:
        with torch.device("meta"):
            described = _described(metadata)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"{path.parent / METADATA_FILE} describes gates that this retain cannot build "
            f"({type(error).__name__}: {error}): upgrade retain. Or: {AGAIN.lower()}."
        ) from None
    ties, state = _ties_of(described), described.state_dict()
    check_tensors({name: tensor for name, tensor in state.items() if name not in ties}, tensors, path)
    gates = _described(metadata)
    gates.load_state_dict({**tensors, **{name: tensors[first] for name, first in ties.items()}})
    return gates


def check_tensors(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse tensors of a file that do not fill a state dict, or are not finite.

    Raises:
        ValueError: names a tensor that is wrong.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != got:
        wrong = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
        name = wrong[0]
        raise ValueError(
            f"{path} does not hold the tensors of these gates: {len(wrong)} differ, the first is {name!r}, "
            f"wanted {wanted.get(name)}, got {got.get(name)}: it is of another model, or incomplete. {AGAIN}."
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {name!r} holds numbers that are not finite fractions. {AGAIN}.")


def _described(metadata: Mapping[str, Any]) -> GateSet:
    """Build fresh gates from the JSON."""
    gate_class = lookup(metadata["family"], GATES, what="gate family")
    dims: dict[int, dict[str, Any]] = {}
    for layer, given in metadata["layers"].items():
        sizes = {name: given[name] for name in gate_class.sizes}
        settings = {name: value for name, value in given.items() if name not in sizes}
        dims |= dims_for(metadata["family"], {int(layer): sizes}, settings)
    check_choice("score_unit", metadata.get("score_unit"), (*SCORE_UNITS, None))
    curves = (metadata.get("calibration") or {}).get("layers", {})
    return GateSet(
        {layer: gate_class(**each) for layer, each in dims.items()},
        calibrators={int(layer): Calibrator(**curve) for layer, curve in curves.items()},
        extension=gate_class.extension(**metadata["extension"]) if "extension" in metadata else None,
    )


def check_fingerprint(
    metadata: Mapping[str, Any],
    fingerprint: Fingerprint,
    folder: Path | str,
    *,
    allow_other_weights: bool = False,
    allowed_on: str | None = None,
) -> str | None:
    """Compare the base model of an artifact with the one at hand.

    Args:
        metadata: of the artifact.
        fingerprint: of the model at hand.
        folder: of the artifact, for messages.
        allow_other_weights: take a model of the same dimensions whose weights differ.
        allowed_on: `sha256` of a model whose other weights were allowed before.

    Returns:
        `sha256` of the model, if its weights differ and that is allowed.

    Raises:
        ValueError: it is another model, by dimensions, or by weights where these may not differ; names the
            fields that differ.
    """
    trained = metadata.get("fingerprint")
    trained = trained if isinstance(trained, Mapping) else {}
    at_hand = json.loads(json.dumps(dict(fingerprint)))
    differ = [key for key in sorted(trained.keys() | at_hand.keys()) if trained.get(key) != at_hand.get(key)]
    if not differ:
        return None
    if differ == ["sha256"] and (allow_other_weights or at_hand["sha256"] == allowed_on):
        return str(at_hand["sha256"])
    listing = ", ".join(f"{key} {trained.get(key)!r} -> {at_hand.get(key)!r}" for key in differ)
    step = (
        "of the same dimensions but other weights: for a fine-tune of it, or the same checkpoint in other "
        "bits, pass gates=retain.load_gates(..., model, allow_other_weights=True), and measure them; or"
        if differ == ["sha256"]
        else "so they do not fit:"
    )
    raise ValueError(
        f"the gates in {folder} were trained on another model ({listing}; trained -> at hand), {step} "
        f"load the model named {metadata.get('base_model', '(not stated)')!r}, or train gates for this one "
        "with train/distill.py."
    )

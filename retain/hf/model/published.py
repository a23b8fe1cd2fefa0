"""Imports published gates for a model at hand: from a folder or the hub, checked against it, saved as ours.

`retain.gates.published` says what is read. The model's fingerprint is taken now, and stored; so gates that
were never told which model they are for are checked like all others ever after.

    python -m retain.hf.model.published --from nvidia/KVzap-mlp-Qwen3-8B --model Qwen/Qwen3-8B --out kvzap
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from retain.gates import GateSet
from retain.gates.artifact import save_gates
from retain.gates.hub import fetch
from retain.gates.published import CONFIG_FILE, KINDS, PICKLES, import_published, weights_of
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from retain.models.named import load_named_model
from retain.process.command import status_of


def published_gates(
    path_or_hub_id: str | os.PathLike[str],
    model: nn.Module,
    *,
    kind: str = "auto",
    revision: str | None = None,
) -> GateSet:
    """Published gates for this model.

    Args:
        path_or_hub_id: a file of weights, a folder with some, or a hub repository.
        model: the model that they were trained on.
        kind: of `retain.gates.published.KINDS`; `auto`: told by the tensors' names.
        revision: of the hub repository.

    Raises:
        ValueError: nothing is there, it is of an unknown kind, incomplete, or of another model.
    """
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    gates = import_published(_released_at(path_or_hub_id, revision), sizes, kind=kind)
    gates.metadata["published"]["source"] = os.fspath(path_or_hub_id)
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    gates.metadata["base_model"] = name or "(not stated)"
    return gates


def _released_at(path_or_hub_id: str | os.PathLike[str], revision: str | None) -> Path:
    """Returns the path of a release, fetched if it has to be, with weights in it."""
    path = Path(path_or_hub_id)
    if not path.exists():
        path = fetch(path_or_hub_id, revision, files=(CONFIG_FILE, "*.safetensors"))
        if not any(path.glob("*.safetensors")):
            path = fetch(path_or_hub_id, revision, files=(CONFIG_FILE, *(f"*{end}" for end in PICKLES)))
    weights_of(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if it worked."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.hf.model.published",
        description="Import published gates as an artifact of retain.",
    )
    parser.add_argument(
        "--from", dest="source", required=True, help="what the authors released: file, folder or hub id"
    )
    parser.add_argument("--kind", default="auto", choices=["auto", *sorted(KINDS)])
    parser.add_argument("--model", required=True, help="folder or hub id of the model of the gates")
    parser.add_argument("--out", required=True, help="folder of the artifact")
    parser.add_argument("--revision", help="of the gates' hub repository")
    given = parser.parse_args(arguments)
    try:
        # A release that cannot be read is told of before a model is loaded for it.
        _released_at(given.source, given.revision)
        model = load_named_model(given.model)
        gates = published_gates(given.source, model, kind=given.kind, revision=given.revision)
        folder = save_gates(gates, given.out, fingerprint=fingerprint(model))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    what = gates.metadata["published"]["kind"]
    print(f"wrote {folder}: {what}, as {gates.family}, {len(gates.layers)} layers")
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

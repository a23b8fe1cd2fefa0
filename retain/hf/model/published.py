"""Imports published gates for a model at hand: from a folder or the hub, checked against it, saved as ours.

`retain.gates.published` says what is read. The model's fingerprint is taken now, and stored; so gates that
were never told which model they are for are checked like all others ever after.

    python -m retain.hf.model.published --from nvidia/KVzap-mlp-Qwen3-8B --model Qwen/Qwen3-8B --out kvzap
    python -m retain.hf.model.published --convert trimkv_weights.pth --out trimkv/gates.safetensors
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from torch import nn

from retain.gates import GateSet
from retain.gates.artifact import save_gates
from retain.gates.hub import UNREACHABLE
from retain.gates.published import (
    CONFIG_FILE,
    KINDS,
    PICKLES,
    import_published,
    safetensors_at,
    to_convert,
)
from retain.gates.unpickle import unpickle
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
        path_or_hub_id: a safetensors file, a folder with some, or a hub repository.
        model: the model that they were trained on.
        kind: of `retain.gates.published.KINDS`; `auto`: told by the tensors' names.
        revision: of the hub repository.

    Raises:
        ValueError: nothing is there, it is a pickle, of an unknown kind, incomplete, or of another model.
    """
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    gates = import_published(_released_at(path_or_hub_id, revision), sizes, kind=kind)
    gates.metadata["published"]["source"] = os.fspath(path_or_hub_id)
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    gates.metadata["base_model"] = name or "(not stated)"
    return gates


def _released_at(path_or_hub_id: str | os.PathLike[str], revision: str | None) -> Path:
    """Returns the path of a release, fetched if it has to be, with safetensors in it."""
    path = Path(path_or_hub_id)
    if not path.exists():
        path = _download(os.fspath(path_or_hub_id), revision)
    safetensors_at(path)
    return path


def _download(hub_id: str, revision: str | None) -> Path:
    """Fetch the release's config and safetensors."""
    try:
        names = HfApi().list_repo_files(hub_id, revision=revision)
        weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        if not weights and (pickles := [name for name in names if name.endswith(PICKLES)]):
            file, listing = to_convert(sorted(pickles))
            raise ValueError(
                f"{hub_id} was released as pickles ({listing}), which are programs, and weights are read "
                f"from safetensors alone: fetch the one for your model (`hf download {hub_id} {file} "
                f"--local-dir FOLDER`), convert it once with `python -m retain.hf.model.published --convert "
                f"FOLDER/{file} --out FOLDER/gates.safetensors`, and import FOLDER/gates.safetensors."
            )
        if not weights:
            raise ValueError(
                f"{hub_id} has no safetensors with gates in them: pass what the authors released."
            )
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=[CONFIG_FILE, *weights]))
    except UNREACHABLE as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"there are no published gates at {hub_id!r}: nothing is here (seen from {str(Path.cwd())!r}), "
            f"and as a hub repository it could not be fetched ({type(error).__name__}: {reason}). Pass what "
            "the authors released, as a folder or a hub id."
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if it worked."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.hf.model.published",
        description="Import published gates as an artifact of retain.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", help="what the authors released: file, folder or hub id")
    source.add_argument("--convert", help="a pickled release, to be rewritten as safetensors")
    parser.add_argument("--kind", default="auto", choices=["auto", *sorted(KINDS)])
    parser.add_argument("--model", help="folder or hub id of the model that the gates are for")
    parser.add_argument("--out", required=True, help="folder of the artifact (with --convert: the file)")
    parser.add_argument("--revision", help="of the gates' hub repository")
    given = parser.parse_args(arguments)
    if given.source and not given.model:
        parser.error("--from needs --model: whose sizes the gates are checked against.")
    try:
        if given.convert:
            print(f"wrote {unpickle(given.convert, given.out)}")
            return 0
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

"""Keeps the teacher's inputs and targets on disk, for many epochs over one extraction.

    features.json              the recipe: model, targets, inputs, precision (`recipe_of`)
    shard-KEYS.safetensors     a few documents: `DOCUMENT/LAYER/FIELD`, written beside and renamed

Each shard names its documents in its own header; so extraction resumes wherever it was stopped, in any number
of processes, and features of another recipe are never read.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retain.config import Count
from retain.gates import GateInputs
from retain.gates.artifact import save_beside, write_beside
from retain.train.data.document import Document

RECIPE_FILE = "features.json"
SCHEMA = 2
_HEADER = "documents"
FIELDS = (*(part.name for part in fields(GateInputs)), "target_HT", "reached_HT")


@dataclass(frozen=True)
class FeatureSettings:
    """Settings of examples that are kept on disk.

    Args:
        folder: where; None: every step asks the teacher. Losses that look at more of a layer than a gate's
            inputs and its target (`layer_output`) need the teacher.
        target_dtype: of the targets. float16 halves them, loses digits, and takes risks below 6e-8 for 0.
        shard_documents: documents of a file.
    """

    folder: str | None = None
    target_dtype: Literal["float32", "float16"] = "float32"
    shard_documents: Count = 16


@dataclass(frozen=True)
class Example:
    """Inputs and target of one layer's gate on one document.

    Args:
        row: place of the document among those that were asked for.
        inputs: of the gate, one sequence.
        target_HT: in the target's own unit, float32.
        reached_HT: where it is defined.
        view: the layer as the teacher showed it; None: the example comes from disk.
    """

    layer_idx: int
    row: int
    key: int
    inputs: GateInputs
    target_HT: Float[Tensor, "H T"]
    reached_HT: Bool[Tensor, "H T"]
    view: Any | None = None


# A source of examples: calls the visitor with the examples of one layer at a time, layers ascending: of all
# the documents at once, or (models that are read a document at a time) of some.
Visit = Callable[[list[Example]], None]
Examples = Callable[[Sequence[Document], Visit], None]


def recipe_of(
    config: Mapping[str, Any], *, model_sha256: str, layers: Iterable[int], gate_inputs: Iterable[str]
) -> dict[str, Any]:
    """Returns the settings that decide features: two runs that agree in them may share features. Of the
    resolved config `dtype`, `target`, `seed` and `features.target_dtype` count. The choice of documents does
    not: each is looked up by its content."""
    features = config.get("features") or {}
    made = {
        "schema": SCHEMA,
        "model": model_sha256,
        "dtype": config.get("dtype"),
        "target": {name: value for name, value in (config.get("target") or {}).items() if name != "chunk"},
        "seed": config.get("seed"),
        "target_dtype": features.get("target_dtype", "float32"),
        "layers": sorted(layers),
        "inputs": sorted(gate_inputs),
    }
    return json.loads(json.dumps(made))


def fill_(
    folder: str | Path,
    documents: Sequence[Document],
    source: Examples,
    recipe: Mapping[str, Any],
    settings: FeatureSettings,
    *,
    process: int = 0,
    num_processes: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Writes the missing features of the documents, of which this process takes every `num_processes`-th;
    each must call it, and then wait for the others.

    The size, that of the first shard per token, times all tokens, is said (beside the free space) before
    anything is written.

    Raises:
        ValueError: the folder holds features of another recipe, or the disk has no room.
    """
    folder = Path(folder)
    _open(folder, recipe, make=True)
    there = _documents_in(folder)
    missing = list({one.name: one for one in documents if one.name not in there}.values())
    mine = missing[process::num_processes]
    if not missing:
        say(f"features: all {len(documents)} documents are in {folder}")
    for start in range(0, len(mine), settings.shard_documents):
        chunk = mine[start : start + settings.shard_documents]
        tensors = _extract(chunk, source, settings)
        if start == 0:
            size, fits = _size(folder, chunk, tensors, missing, len(documents))
            if process == 0:
                say(size)
            if fits is not None:
                raise ValueError(
                    f"{size}: they do not fit. Set features.folder on a larger disk, data.documents to about "
                    f"{fits}, or leave features.folder unset: then every step asks the teacher."
                )
        names = [document.name for document in chunk]
        name = hashlib.sha256("".join(names).encode()).hexdigest()[:16]
        final = folder / f"shard-{name}.safetensors"
        os.replace(save_beside(final, tensors, {_HEADER: json.dumps(names)}), final)


def _extract(documents: Sequence[Document], source: Examples, settings: FeatureSettings) -> dict[str, Tensor]:
    """The tensors of one shard, on the CPU."""
    tensors: dict[str, Tensor] = {}
    names = [document.name for document in documents]
    dtype = getattr(torch, settings.target_dtype)

    def take(examples: list[Example]) -> None:
        for example in examples:
            prefix = f"{names[example.row]}/{example.layer_idx}"
            for name, value in vars(example.inputs).items():
                if value is not None:
                    tensors[f"{prefix}/{name}"] = _copy(value)
            target_HT = example.target_HT.detach()
            if dtype == torch.float16 and float(target_HT.abs().max()) > torch.finfo(dtype).max:
                raise ValueError(
                    f"a target of {float(target_HT.abs().max()):.3g} (layer {example.layer_idx}) is beyond "
                    "float16: set features.target_dtype=float32."
                )
            tensors[f"{prefix}/target_HT"] = _copy(target_HT.to(dtype))
            tensors[f"{prefix}/reached_HT"] = _copy(example.reached_HT)

    source(documents, take)
    return tensors


def _copy(value: Tensor | float) -> Tensor:
    """A copy that shares nothing: views of one packed row would be written whole, or refused. A number is
    kept in full precision, without axes."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    return value.detach().to("cpu", copy=True).contiguous().clone()


def _size(
    folder: Path,
    chunk: Sequence[Document],
    tensors: Mapping[str, Tensor],
    missing: Sequence[Document],
    total: int,
) -> tuple[str, int | None]:
    """The size of the features, in words; and how many documents the disk has room for, if not for all."""
    per_token = sum(tensor.nbytes for tensor in tensors.values()) / sum(len(d.context_ids) for d in chunk)
    size = per_token * sum(len(document.context_ids) for document in missing)
    free = shutil.disk_usage(folder).free
    text = (
        f"features of {len(missing)} documents (of {total}; the others are there): {size / 2**30:.2f} GiB "
        f"({per_token / 1024:.1f} KiB a token) to {folder}, {free / 2**30:.1f} GiB free"
    )
    return text, int(len(missing) * free / size) if size > free else None


def _open(folder: Path, recipe: Mapping[str, Any], *, make: bool) -> None:
    """Check what a folder's features were made from; state it, if the folder is new."""
    path = folder / RECIPE_FILE
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        differ = [
            f"{name}: {found.get(name)!r} -> {recipe.get(name)!r}"
            for name in sorted(found.keys() | recipe.keys())
            if found.get(name) != recipe.get(name)
        ]
        if differ:
            raise ValueError(
                f"{folder} holds features of another recipe ({'; '.join(differ)}): choose another "
                "features.folder, or delete that one."
            )
        return
    if any(folder.glob("shard-*.safetensors")) or not make:
        raise ValueError(
            f"{folder} has no {RECIPE_FILE}, so that nothing says what its features were made from: choose "
            "another features.folder, or delete that one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(write_beside(path, (json.dumps({**recipe}, indent=2) + "\n").encode()), path)


def _documents_in(folder: Path) -> dict[str, Path]:
    """Document name -> its shard, from the headers of all shards."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(json.loads((file.metadata() or {})[_HEADER]), path)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is truncated or corrupt ({type(error).__name__}: {error}): delete it, and its "
                "documents are read again."
            ) from None
    return found


class CachedExamples:
    """Examples from disk, one layer of one document at a time; none of them has a view.

    Raises:
        ValueError: the folder holds none, or features of another recipe.
    """

    def __init__(
        self, folder: str | Path, recipe: Mapping[str, Any], *, device: torch.device | str = "cpu"
    ) -> None:
        self.folder, self.device = Path(folder), torch.device(device)
        _open(self.folder, recipe, make=False)
        self.layers: list[int] = list(recipe["layers"])
        self.shards = _documents_in(self.folder)
        # Of the shards that were read: `DOCUMENT/LAYER/FIELD`.
        self._keys: dict[Path, frozenset[str]] = {}

    def __call__(self, documents: Sequence[Document], visit: Visit) -> None:
        """Visits the examples of the documents; ValueError: a document is not there."""
        names = [document.name for document in documents]
        absent = [row for row, name in enumerate(names) if name not in self.shards]
        if absent:
            raise ValueError(
                f"{len(absent)} of {len(documents)} documents have no features in {self.folder} (the first "
                f"is number {absent[0]}): extract them with the same data settings (`fill_`)."
            )
        # Opened once a call: what is mapped into memory is read where it is needed.
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {self.shards[name] for name in names}
            }
            for path in opened.keys() - self._keys.keys():
                self._keys[path] = frozenset(opened[path].keys())
            for layer in self.layers:
                examples = []
                for row, document in enumerate(documents):
                    path, own = self.shards[document.name], dict[str, Any]()
                    for field in FIELDS:
                        if (key := f"{document.name}/{layer}/{field}") in self._keys[path]:
                            tensor = opened[path].get_tensor(key)
                            own[field] = tensor.to(self.device) if tensor.dim() else tensor.item()
                    target_HT, reached_HT = own.pop("target_HT").float(), own.pop("reached_HT")
                    inputs = GateInputs(**own)
                    examples.append(Example(layer, row, document.key, inputs, target_HT, reached_HT))
                visit(examples)

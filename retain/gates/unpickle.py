"""Rewrites a pickled release as safetensors, once, by torch's restricted unpickler."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from retain.process.disk import write_new

# A release nests a few lists and mappings.
DEEPEST, MOST_VALUES, MOST_COPIES = 64, 2**18, 128


def unpickle(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Rewrite a pickled release as safetensors: its tensors, under their names, and return the target.

    torch's restricted unpickler reads it, which runs none of a file's code (numpy arrays are let through, and
    left out of what is written). Nested lists and mappings give dotted names.

    Args:
        source: a file that `torch.save` wrote.
        target: the safetensors file to write.

    Raises:
        ValueError: it cannot be read that way, or holds no plain tensors; the target is the source, or is not
            named `.safetensors`.
        OSError: the target could not be written.
    """
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise ValueError(f"there is no file {source} to convert: pass the pickled release itself.")
    if target.suffix != ".safetensors" or (target.exists() and target.samefile(source)):
        raise ValueError(f"{target} must be another file, and end in .safetensors, to be found.")
    try:
        with torch.serialization.safe_globals(_numpy()):
            loaded = torch.load(source, map_location="cpu", weights_only=True)
        tensors = _flat(loaded)
        if sum(one.nbytes for one in tensors.values()) > MOST_COPIES * source.stat().st_size:
            raise ValueError("tensors of far more bytes than the file holds")
        # A copy of each: releases share tensors between layers, which safetensors does not write.
        payload = save_tensors({name: one.detach().clone().contiguous() for name, one in tensors.items()})
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source} could not be read without running its code, or holds more than plain tensors "
            f"({type(error).__name__}: {reason}): fetch it again, or save the gates' tensors as safetensors."
        ) from None
    if not tensors:
        raise ValueError(f"{source} holds no tensor: pass the file with the gates' weights.")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(write_new(target, payload), target)
    return target


def _numpy() -> list[Any]:
    """Types of a pickled numpy array (Fast KVzip keeps its loss curves beside the gates)."""
    arrays: list[Any] = [
        torch.zeros(1, dtype=each).numpy() for each in (torch.float32, torch.float64, torch.int64)
    ]
    reconstruct = arrays[0].__reduce__()[0]
    older = (reconstruct, "numpy.core.multiarray._reconstruct")
    any_dtype = type(arrays[0].dtype).__mro__[-2]
    return [reconstruct, older, type(arrays[0]), any_dtype, *(type(array.dtype) for array in arrays)]


def _flat(loaded: Any) -> dict[str, Tensor]:
    """Tensors of nested lists and mappings, by dotted name; a ValueError: too deep, or too many."""
    found: dict[str, Tensor] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), loaded)]
    for _ in range(MOST_VALUES):
        if not waiting:
            return found
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            if found.setdefault(".".join(path), value) is not value:
                raise ValueError(f"two tensors of the name {'.'.join(path)!r}")
        elif isinstance(value, Mapping | list | tuple):
            if len(path) >= DEEPEST:
                raise ValueError(f"lists and mappings more than {DEEPEST} deep")
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [((*path, f"{key!s:.200}"), inner) for key, inner in items]
    raise ValueError(f"lists and mappings of more than {MOST_VALUES} values")

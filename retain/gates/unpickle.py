"""Rewrites a pickled release as safetensors, once.

Only torch's restricted unpickler reads the file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from retain.gates.artifact import write_beside

# A release nests a few lists and mappings; of what it shares between layers the target holds copies.
DEEPEST, MOST_TENSORS, MOST_COPIES = 64, 2**18, 128
# Of what the arrays beside released gates are made.
NUMBERS = (torch.float32, torch.float64, torch.int64)


def unpickle(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Rewrite a pickled release as safetensors: its tensors, under their names.

    torch's restricted unpickler reads it, which runs none of a file's own code (numpy arrays are let through
    beside tensors, and left out of what is written). Nested lists and mappings give dotted names.

    Args:
        source: a file that `torch.save` wrote.
        target: the safetensors file to write.

    Returns:
        the target.

    Raises:
        ValueError: it cannot be read that way, holds no tensor, tensors that are no plain numbers, two of one
            name, or more than the file has bytes for; the target is the source, or is not named
            `.safetensors`.
        OSError: the target could not be written.
    """
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise ValueError(f"there is no file {source} to convert: pass the pickled release itself.")
    if target.suffix != ".safetensors":
        raise ValueError(
            f"{target} is to be a safetensors file, and would not be found under that name: end it in "
            ".safetensors."
        )
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the pickled release itself, which is kept: name another target.")
    try:
        with torch.serialization.safe_globals(_numpy()):
            loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source} could not be read without running code of its own ({type(error).__name__}: {reason}): "
            "fetch it again, or save its tensors as safetensors where you trust it."
        ) from None
    try:
        tensors = _flat(loaded)
        _check_plain(tensors, MOST_COPIES * source.stat().st_size)
    except ValueError as error:
        raise ValueError(f"{source} {error}: pass the file with the gates' weights alone.") from None
    if not tensors:
        raise ValueError(f"{source} holds no tensor: pass the file with the gates' weights.")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Released gates may share tensors, which safetensors does not write.
    payload = save_tensors({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    os.replace(write_beside(target, payload), target)
    return target


def _numpy() -> list[Any]:
    """Types of a pickled numpy array (Fast KVzip keeps its loss curves beside the gates)."""
    try:
        arrays: list[Any] = [torch.zeros(1, dtype=each).numpy() for each in NUMBERS]
    except RuntimeError:  # torch without numpy: whatever holds an array is refused
        return []
    reconstruct = arrays[0].__reduce__()[0]
    older = (reconstruct, "numpy.core.multiarray._reconstruct")
    any_dtype = type(arrays[0].dtype).__mro__[-2]
    return [reconstruct, older, type(arrays[0]), any_dtype, *(type(array.dtype) for array in arrays)]


def _flat(loaded: Any) -> dict[str, Tensor]:
    """Tensors of nested lists and mappings, by dotted name.

    Raises:
        ValueError: they nest too deep (or hold themselves), are too many, or two have one name.
    """
    found: dict[str, Tensor] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), loaded)]
    looked_at = 0
    while waiting:
        path, value = waiting.pop()
        looked_at += 1
        if isinstance(value, Tensor):
            name = ".".join(path)
            if name in found:
                raise ValueError(f"holds two tensors of the name {name!r}")
            found[name] = value
        elif isinstance(value, Mapping | list | tuple):
            if len(path) >= DEEPEST:
                raise ValueError(f"nests lists and mappings more than {DEEPEST} deep")
            if looked_at + len(waiting) + len(value) > MOST_TENSORS:
                raise ValueError(f"holds more than {MOST_TENSORS} values")
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += reversed([((*path, f"{key!s:.200}"), inner) for key, inner in items])
    return found


def _check_plain(tensors: Mapping[str, Tensor], most_bytes: int) -> None:
    """Refuse tensors that cannot be written as plain numbers, or that would grow when written."""
    num_bytes = 0
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            kind = "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(f"holds {name!r}, a {kind} tensor, where plain numbers were wanted")
        if tensor.is_complex():
            raise ValueError(f"holds {name!r}, of {tensor.dtype}, where plain numbers were wanted")
        num_bytes += tensor.numel() * tensor.element_size()
    if num_bytes > most_bytes:
        raise ValueError(f"describes {num_bytes} bytes of tensors, far more than it holds")

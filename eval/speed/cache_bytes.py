"""Counts the bytes of any cache, ours or one of transformers: held, allocated, and of all that was seen."""

from typing import Any

from torch import Tensor

from retain.hf.cache.cache import Cache


def cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes of a cache: held, allocated behind that, and what all that was seen would take."""
    if isinstance(cache, Cache):
        report = cache.report()
        alone = sum(left.bytes_held for left in report.alone)
        room = sum(left.bytes_allocated for left in report.alone)
        total = report.total
        return {
            "held": total.bytes_held + alone,
            "allocated": total.bytes_allocated + room,
            "full": total.bytes_full + alone,
        }
    found = [leaf for layer in cache.layers for leaf in _tensors(vars(layer))]
    held = sum(tensor.nbytes for tensor in found)
    # Several tensors may be views of one storage, which is there once.
    storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in found)}
    return {"held": held, "allocated": sum(storages.values()), "full": held}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in _tensors(one)] if isinstance(value, list | tuple) else []

"""Handles the cache layers that are left to transformers: a sliding window or a recurrent state.

transformers decides what such a layer is and how it is updated; here are its tensors.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Attributes that hold tensors of the conversation: one (or none), or several by the number of the state.
TENSORS = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
# Tokens that a layer with a window has seen.
COUNT = "cumulative_length"


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors that a layer holds, by name: `keys`, `values`, `conv_states.0`, `recurrent_states.0`."""
    entries = {name: getattr(layer, name, None) for name in TENSORS}
    found = {name: held for name, held in entries.items() if isinstance(held, Tensor) and held.ndim > 1}
    for name in STATES:
        states = getattr(layer, name, {})
        found |= {f"{name}.{number}": held for number, held in states.items() if held is not None}
    return found


def _put(layer: Any, name: str, tensor: Tensor) -> None:
    attribute, _, number = name.partition(".")
    if number:
        getattr(layer, attribute)[int(number)] = tensor
    else:
        setattr(layer, attribute, tensor)


def trim_(layer: Any) -> None:
    """Free what a layer's storages hold beyond its entries: transformers keeps the last as a view of all."""
    for name, tensor in tensors_of(layer).items():
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            _put(layer, name, tensor.clone(memory_format=torch.contiguous_format))


def concat(layers: list[Any]) -> Any:
    """Makes one layer with the sequences of several, which have all seen equally many tokens."""
    whole = copy.deepcopy(layers[0])
    parts = [tensors_of(layer) for layer in layers]
    for name in parts[0]:
        _put(whole, name, torch.cat([part[name].to(parts[0][name].device) for part in parts]))
    return whole


def state(layer: Any) -> dict[str, Tensor]:
    """Returns a layer's tensors for saving, and `cumulative_length` where it counts tokens."""
    saved = tensors_of(layer)
    if saved and hasattr(layer, COUNT):
        saved[COUNT] = torch.tensor(int(getattr(layer, COUNT)))
    return saved


def load_state(layer: Any, saved: Mapping[str, Tensor]) -> None:
    """Fill an empty layer of the same kind with what `state` gave, on the device that the tensors are on."""
    if COUNT in saved:
        layer.lazy_initialization(saved["keys"], saved["values"])
        setattr(layer, COUNT, int(saved[COUNT]))
    for name, tensor in saved.items():
        attribute, _, number = name.partition(".")
        if number:
            # The layer's method to make room: it also stores device, precision and kernel width.
            layer.lazy_initialization(**{attribute: tensor, "state_idx": int(number)})
            layer.has_previous_state[int(number)] = True
    for name, tensor in saved.items():
        if name != COUNT:
            _put(layer, name, tensor.clone())

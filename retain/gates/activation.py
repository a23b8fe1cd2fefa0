"""Looks up the activation of a gate's hidden layer, and checks its width.

`gelu` is the exact one (erf), as in the released KVzap and WG-KV gates.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional

from retain.registry import lookup

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu}
)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Look an activation up by name.

    Raises:
        ValueError: there is none; says which there are.
    """
    return lookup(name, ACTIVATIONS, what="activation")


def width_of(F: int, what: str) -> int:
    """Check a hidden width.

    Raises:
        ValueError: it is below 1.
    """
    if F < 1:
        raise ValueError(f"{what} needs a hidden width of at least 1, got F={F}.")
    return F

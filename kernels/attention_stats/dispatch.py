"""Runs a call by its path, and registers the op for `torch.compile`.

Only a function that is being compiled meets the registered operator, `retain::attention_stats`; eager calls
go straight to the path, since the dispatcher's toll is that of a small launch.
"""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import reference
from retain.kernels.attention_stats.reference import Call, Pool, empty_outputs

# Bounds of a head width and of strides: offsets within a tile are 32 bits wide.
_WIDEST, _LARGEST_STRIDE = 256, 2**31 // 512


def run(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, by the path that this call takes; registered where it is being compiled."""
    if not torch.compiler.is_compiling():
        return _run(call)
    # No gradient flows through it, and none is defined: sinks, say, are a model's parameters.
    tensors = (None if tensor is None else tensor.detach() for tensor in call.tensors)
    numbers = (call.scaling, ",".join(call.wanted), call.first, *call.keys, call.distance)
    pool = astuple(call.pool or Pool("", 1, 0))
    found = _operator(*tensors, *numbers, call.window, call.soft_cap, *pool, call.group, call.chunk)
    return dict(zip(call.wanted, found, strict=True))


@backend.without_autocast
def _run(call: Call) -> dict[str, Tensor]:
    tensors, find = (call.queries_BQSD, call.keys_BHTD), reference.attention_stats
    if backend.path_for("attention_stats", *tensors, unsupported=_unsupported(call)) == "triton":
        from retain.kernels.attention_stats import launch

        find = launch.attention_stats
    return find(call)


def _unsupported(call: Call) -> str | None:
    """The property of a call that the kernels do not support."""
    D = call.keys_BHTD.shape[3]
    if D > _WIDEST:
        return f"a head width of {D} (at most {_WIDEST})"
    if not call.scaling > 0:
        return f"a scaling of {call.scaling} (more than 0)"
    if call.log_weight_BHT is not None:
        return "log weights of the entries"
    strides = [*call.queries_BQSD.stride()[2:], *call.keys_BHTD.stride()[2:]]
    if max(strides) >= _LARGEST_STRIDE:
        return f"rows {max(strides)} elements apart (less than {_LARGEST_STRIDE})"
    return None


@torch.library.custom_op("retain::attention_stats", mutates_args=())
def _operator(
    queries: Tensor,
    keys: Tensor,
    exists: Tensor | None,
    asks: Tensor | None,
    place: Tensor | None,
    sinks: Tensor | None,
    log_weight: Tensor | None,
    lse: Tensor | None,
    least: Tensor | None,
    scaling: float,
    wanted: str,
    first: int,
    first_key: int,
    last_key: int,
    distance: int,
    window: int | None,
    soft_cap: float | None,
    pool_kind: str,
    pool_size: int,
    pool_split: int,
    keep_mass: bool,
    group: bool,
    chunk: int | None,
) -> list[Tensor]:
    """A call in the types that operators take; statistics come in the call's order."""
    call = _call_of(*locals().values())
    found = _run(call)
    return [found[name] for name in call.wanted]


@_operator.register_fake
def _shapes(*arguments: Any) -> list[Tensor]:
    return list(empty_outputs(_call_of(*arguments), filled=False).values())


def _call_of(*arguments: Any) -> Call:
    """From the operator's arguments, in its order."""
    scaling, wanted, first, first_key, last_key, *limits = arguments[9:17]
    *pool, group, chunk = arguments[17:]
    asked = (scaling, tuple(wanted.split(",")), first, (first_key, last_key), *limits)
    fields: list[Any] = [*arguments[:9], *asked, Pool(*pool) if pool[0] else None, group, chunk]
    return Call(*fields)

"""Which path a call takes, and the op as `torch.compile` sees it.

In: a `Call`, whose arguments were checked. Out: what was wanted. The one decision taken here: only a function
that is being compiled meets the registered operator, `retain::attention_stats`; eager calls go straight to
the path, since the dispatcher's toll is that of a small launch.
"""

from typing import Any

import torch
from torch import Tensor

from retain.kernels import backend
from retain.kernels.attention_stats import reference
from retain.kernels.attention_stats.reference import Call, Pool, empty_outputs

# What is not a head width too large: offsets within a tile are 32 bits wide.
_WIDEST, _LARGEST_STRIDE = 256, 2**31 // 512


def run(call: Call) -> dict[str, Tensor]:
    """By the path that this call takes, registered where it is being compiled.

    Args:
        call: what is asked.

    Returns:
        each wanted statistic.
    """
    if not torch.compiler.is_compiling():
        return _run(call)
    pool = call.pool or Pool("", 1, 0)
    tensors = (call.queries_BQSD, call.keys_BHTD, call.exists_BHT, call.asks_BS, call.place_BT, call.sinks_Q,
               call.weight_BQK, call.lse_BQS, call.least_BQS)  # fmt: skip
    found = _operator(
        # No gradient flows through it, and none is defined: sinks, say, are a model's parameters.
        *(None if tensor is None else tensor.detach() for tensor in tensors),
        call.scaling,
        ",".join(call.wanted),
        call.first,
        *call.keys,
        call.causal,
        call.distance,
        call.window,
        call.soft_cap,
        pool.kind,
        pool.size,
        pool.split,
        pool.keep_mass,
        call.group,
        call.chunk,
    )
    return dict(zip(call.wanted, found, strict=True))


@backend.without_autocast
def _run(call: Call) -> dict[str, Tensor]:
    path = backend.path_for(
        "attention_stats", call.queries_BQSD, call.keys_BHTD, unsupported=_unsupported(call)
    )
    if path == "triton":
        from retain.kernels.attention_stats import launch

        return launch.attention_stats(call)
    return reference.attention_stats(call)


def _unsupported(call: Call) -> str | None:
    """What the kernels cannot do of it."""
    D = call.keys_BHTD.shape[3]
    if D > _WIDEST:
        return f"a head width of {D} (at most {_WIDEST})"
    if not call.scaling > 0:
        return f"a scaling of {call.scaling} (more than 0)"
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
    weight: Tensor | None,
    lse: Tensor | None,
    least: Tensor | None,
    scaling: float,
    wanted: str,
    first: int,
    first_key: int,
    last_key: int,
    causal: bool,
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
    """A call in the types that operators take; what is wanted comes in the call's order."""
    call = _call_of(*locals().values())
    found = _run(call)
    return [found[name] for name in call.wanted]


@_operator.register_fake
def _shapes(*arguments: Any) -> list[Tensor]:
    return list(empty_outputs(_call_of(*arguments), filled=False).values())


def _call_of(*arguments: Any) -> Call:
    """From the operator's arguments, in its order."""
    queries, keys, exists, asks, place, sinks, weight, lse, least = arguments[:9]
    scaling, wanted, first, first_key, last_key, causal, distance, window, soft_cap = arguments[9:18]
    pool_kind, pool_size, pool_split, keep_mass, group, chunk = arguments[18:]
    return Call(
        queries,
        keys,
        scaling,
        tuple(wanted.split(",")),
        first,
        (first_key, last_key),
        causal=causal,
        distance=distance,
        window=window,
        exists_BHT=exists,
        asks_BS=asks,
        place_BT=place,
        soft_cap=soft_cap,
        sinks_Q=sinks,
        weight_BQK=weight,
        lse_BQS=lse,
        least_BQS=least,
        pool=Pool(pool_kind, pool_size, pool_split, keep_mass) if pool_kind else None,
        group=group,
        chunk=chunk,
    )

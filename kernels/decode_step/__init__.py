"""A decoding step over static rows: one op a layer appends a token to every row, and attends.

Rows lie in a pool `[P, D]` that all layers of a device may share: row `r = b * H + h` of a layer owns the
room `offsets[r] .. offsets[r + 1]` and holds `base[r] + clock` entries, the new one included. So a step
changes one place a row, and one clock for all layers: no op writes lengths, and shapes and addresses stay
from step to step, as a compiled graph, or a CUDA graph, wants them.

Entries before those of the pool may be codes (`retain.kernels.codes`), in a pool of their own.

Plain PyTorch is the definition (`reference`: write the token, then `ragged_attention`). On a CPU the same in
C++ (`step.cpp`) takes its place once `build.load` has compiled it; on CUDA a Triton kernel runs (`kernel`),
which has met no GPU yet.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retain.kernels import backend
from retain.kernels.decode_step import reference

__all__ = ["decode_step", "path_of"]

# Width of a head up to which a tile of it fits on a multiprocessor.
WIDEST = 256


def path_of(keys_PD: Tensor, values_PV: Tensor) -> backend.Path:
    """The path of steps over such a pool on a GPU; elsewhere always the reference, or the same in C++."""
    wide = max(keys_PD.shape[1], values_PV.shape[1]) > WIDEST
    return backend.which(keys_PD, values_PV, unsupported=f"heads wider than {WIDEST}" if wide else None)


_LIBRARY = torch.library.Library("retain", "FRAGMENT")
_LIBRARY.define(
    "decode_step(Tensor queries, Tensor new_keys, Tensor new_values, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!) positions, Tensor offsets, Tensor base, Tensor clock, Tensor last, Tensor? log_weight, "
    "Tensor? sinks, float scaling, float soft_cap, int window, Tensor? items, Tensor? count, "
    "Tensor(d!)? parts, Tensor(e!)? arrived, Tensor[] packed, int bits, int span) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _by_kernel(*given: Any) -> Tensor:
    """The step on a GPU: the kernel, or plain PyTorch where it does not support the call."""
    from retain.kernels.decode_step import launch

    run = launch.decode_step if path_of(given[3], given[4]) == "triton" else reference.decode_step
    return run(*given)


_LIBRARY.impl("decode_step", reference.decode_step, "CompositeExplicitAutograd")
_LIBRARY.impl("decode_step", _by_kernel, "CUDA")


@torch.library.register_fake("retain::decode_step")
def _shape(queries: Tensor, new_keys: Tensor, new_values: Tensor, *rest: object) -> Tensor:
    return queries.new_empty(queries.shape[0], 1, queries.shape[1], new_values.shape[3])


def decode_step(
    queries_BQ1D: Float[Tensor, "B Q 1 D"],
    keys_BH1D: Float[Tensor, "B H 1 D"],
    values_BH1V: Float[Tensor, "B H 1 V"],
    keys_PD: Float[Tensor, "P D"],
    values_PV: Float[Tensor, "P V"],
    positions_P: Int[Tensor, " P"],
    offsets_R1: Int[Tensor, " R1"],
    base_R: Int[Tensor, " R"],
    clock_1: Int[Tensor, " 1"],
    last_B: Int[Tensor, " B"],
    log_weight_P: Float[Tensor, " P"] | None = None,
    sinks_Q: Float[Tensor, " Q"] | None = None,
    *,
    scaling: float,
    soft_cap: float | None = None,
    window: int | None = None,
    work: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    packed: Sequence[Tensor] = (),
    bits: int = 0,
    span: int = 1,
) -> Float[Tensor, "B 1 Q V"]:
    """Append one token to every row of a layer, and attend over the row.

    `a_i = exp(l_i) / (exp(sink) + sum_j exp(l_j))` and `out = sum_i a_i v_i` over the row, the new entry
    included, with `l_i = cap(scaling * q . k_i) + log_weight_i`, and no `exp(sink)` without sinks. The
    softmax is float32 at least.

    Args:
        queries_BQ1D: after norm and RoPE; the G = Q / H query heads of a KV head are adjacent.
        keys_BH1D, values_BH1V: of the new token; written into the pool.
        keys_PD, values_PV, positions_P: the pool, contiguous, and the RoPE position of each entry, int32;
            changed in place. Positions of a row ascend.
        offsets_R1: int64, where each row's room begins and ends.
        base_R: int32, entries of each row when the clock stood at 0.
        clock_1: int64, tokens since, this one included.
        last_B: int64, position of each sequence's last token when the clock stood at 0.
        log_weight_P: float32, added to the logits of each entry, 0 in free places; None: nothing is.
        sinks_Q: one more logit a query head, which takes its share and gives no value.
        scaling: factor on the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None: they stay.
        window: a query at position p sees positions above `p - window` only; None: all. Not with `packed`.
        work: on a GPU, the layer's part of `launch.tables`.

    Raises:
        ValueError, RuntimeError: a row without a free place.
    """
    given = (
        *(queries_BQ1D, keys_BH1D, values_BH1V, keys_PD, values_PV, positions_P, offsets_R1, base_R, clock_1),
        *(last_B, log_weight_P, sinks_Q, scaling, soft_cap or 0.0, window or 0),
        *(work or (None, None, None, None)),
        *(packed, bits, span),
    )
    if (path := backend.forced()) is None:
        return torch.ops.retain.decode_step(*given)
    return reference.decode_step(*given) if path == "reference" else _by_kernel(*given)

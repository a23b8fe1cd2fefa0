"""Launches gated attention; nothing waits for the device.

Nothing is tried out when a program runs, so that results do not depend on timings: tiles come from a table.
Its rows for half precision began as the defaults that PyTorch settled on for FlexAttention
(`torch/_inductor/template_heuristics/triton.py`), the closest kernel that was tuned on such GPUs, and were
changed where compiling showed spilled registers. None was timed by us: see the README.

Inputs are read where they lie, with any strides; the output is laid out as the queries, and gradients as the
tensors that they belong to.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from retain.kernels.backend import LOG2E, architecture, block_of, dot_precision, interpreting, upcast
from retain.kernels.build import Tile
from retain.kernels.gated_attention import kernel
from retain.kernels.gated_attention.reference import Bias, Gradients, Settings

Kernel = Literal["forward", "d_queries", "d_keys"]
# Every block of queries is a divisor of it: what is kept of each row is padded to a multiple.
ROWS = 128


# (kernel, capability) -> tiles for heads covered by up to 64, 128 and 256, in half precision.
_HALF = {
    ("forward", 90): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("forward", 80): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("d_queries", 90): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
    ("d_queries", 80): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 1)),
    ("d_keys", 90): (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("d_keys", 80): (Tile(32, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 1)),
}
# Where a decay or a soft cap needs registers too.
_FULLER = _HALF | {
    ("forward", 90): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("d_queries", 90): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
    ("d_queries", 80): (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
    ("d_keys", 90): (Tile(32, 128, 8, 3), Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("d_keys", 80): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
}
_SINGLE = {
    "forward": (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 16, 8, 1)),
    "d_queries": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    "d_keys": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}


def tile(kernel: Kernel, dtype: torch.dtype, block_d: int, capability: int, *, fuller: bool = False) -> Tile:
    """The tile that a kernel takes.

    Args:
        kernel: which.
        dtype: of queries, keys and values.
        block_d: power of two that covers the head width, 256 at most.
        capability: of the GPU, 90 for 9.0.
        fuller: whether there is a decay or a soft cap.
    """
    half = (_FULLER if fuller else _HALF)[kernel, 90 if capability == 90 else 80]
    row = _SINGLE[kernel] if dtype == torch.float32 else half
    return row[0 if block_d <= 64 else 1 if block_d <= 128 else 2]


def forward(
    queries_BQSD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, bias: Bias, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The output, in the queries' precision, and the natural log-sum-exp of every row, float32."""
    B, Q, S, _ = queries_BQSD.shape
    out_BQSD = torch.empty_like(queries_BQSD)
    lse_BQS = torch.empty(B, Q, S, dtype=torch.float32, device=queries_BQSD.device)
    cut = _tile("forward", queries_BQSD, bias, settings)
    blocks = -(-S // cut.m)
    with torch.cuda.device_of(queries_BQSD):
        kernel.forward_[(B * Q * blocks,)](
            *(queries_BQSD, keys_BHTD, values_BHTD, *bias),
            *(out_BQSD, lse_BQS),
            *queries_BQSD.stride(),
            *keys_BHTD.stride(),
            *values_BHTD.stride(),
            *_bias_strides(bias),
            0 if bias.sinks_Q is None else bias.sinks_Q.stride(0),
            *out_BQSD.stride(),
            *_sizes(queries_BQSD, keys_BHTD),
            blocks,
            *numbers(settings, keys_BHTD.shape[2]),
            **_constants(queries_BQSD, keys_BHTD.shape[2], bias, settings, cut),
        )
    return out_BQSD, lse_BQS


def backward(
    queries_BQSD: Tensor,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    out_BQSD: Tensor,
    lse_BQS: Tensor,
    d_out_BQSD: Tensor,
    bias: Bias,
    settings: Settings,
    *,
    inner: bool = True,
) -> Gradients:
    """The gradients; without `inner`, none of queries, keys and values."""
    B, Q, S, D = queries_BQSD.shape
    H, T = keys_BHTD.shape[1:3]
    device = queries_BQSD.device
    padded = -(-S // ROWS) * ROWS
    # Of each row `sum_d out dO`, a head at a time; and its log-sum-exp in units of log 2, +inf for one that
    # saw nothing, whose probabilities so become 0.
    delta_BQP = torch.zeros(B, Q, padded, dtype=torch.float32, device=device)
    for q in range(Q):
        torch.sum(out_BQSD[:, q].float() * d_out_BQSD[:, q].float(), -1, out=delta_BQP[:, q, :S])
    lse2_BQP = torch.full_like(delta_BQP, float("inf"))
    lse2_BQP[..., :S] = torch.where(lse_BQS == float("-inf"), float("inf"), lse_BQS * LOG2E)
    d_queries = torch.empty_like(queries_BQSD) if inner else None
    d_keys, d_values = torch.empty_like(keys_BHTD), torch.empty_like(values_BHTD)
    d_gate = None if bias.log_gate_BHT is None else delta_BQP.new_empty(B, H, T)
    d_decay = None if bias.log_decay_BHT is None else delta_BQP.new_empty(B, H, T)
    common: tuple[Any, ...] = (queries_BQSD, keys_BHTD, values_BHTD, *bias[:3], d_out_BQSD)
    strides = (
        *queries_BQSD.stride(),
        *keys_BHTD.stride(),
        *values_BHTD.stride(),
        *_bias_strides(bias),
        *d_out_BQSD.stride(),
    )
    with torch.cuda.device_of(queries_BQSD):
        cut = _tile("d_keys", queries_BQSD, bias, settings)
        blocks = -(-T // cut.n)
        kernel.d_keys_[(B * H * blocks,)](
            *(*common, lse2_BQP, delta_BQP, d_keys, d_values, d_gate, d_decay, *strides),
            *(*d_keys.stride(), *d_values.stride(), *_sizes(queries_BQSD, keys_BHTD), padded, blocks),
            *(settings.scaling, *numbers(settings, T)),
            **_constants(queries_BQSD, keys_BHTD.shape[2], bias, settings, cut),
        )
        if d_queries is not None:
            cut = _tile("d_queries", queries_BQSD, bias, settings)
            blocks = -(-S // cut.m)
            kernel.d_queries_[(B * Q * blocks,)](
                *(*common, lse2_BQP, delta_BQP, d_queries, *strides, *d_queries.stride()),
                *(*_sizes(queries_BQSD, keys_BHTD), padded, blocks),
                *(settings.scaling, *numbers(settings, T)),
                **_constants(queries_BQSD, keys_BHTD.shape[2], bias, settings, cut),
            )
    d_sinks = None
    if bias.sinks_Q is not None:
        # A sink pays for nothing, so that its share of the gradient is that of the row's sum alone.
        sinks_Q1 = bias.sinks_Q.float()[:, None]
        share = torch.exp2(sinks_Q1 * LOG2E - lse2_BQP)
        d_sinks = -(share * delta_BQP).sum((0, 2)).to(bias.sinks_Q.dtype)
    return Gradients(
        d_queries,
        d_keys if inner else None,
        d_values if inner else None,
        None if d_gate is None or bias.log_gate_BHT is None else d_gate.to(bias.log_gate_BHT.dtype),
        None if d_decay is None or bias.log_decay_BHT is None else d_decay.to(bias.log_decay_BHT.dtype),
        d_sinks,
    )


def numbers(settings: Settings, num_keys: int) -> tuple[float, float, int]:
    """Factor on a product, the soft cap (both make units of log 2) and the protected window: no longer than
    there are keys, so that an entry plus a window is a 32-bit number."""
    cap = settings.soft_cap
    scale = settings.scaling * LOG2E if cap is None else settings.scaling / cap
    return scale, (cap or 0.0) * LOG2E, min(settings.protected, num_keys)


def _sizes(queries: Tensor, keys: Tensor) -> tuple[int, int, int, int]:
    """H, G, S and T."""
    H = keys.shape[1]
    return H, queries.shape[1] // H, queries.shape[2], keys.shape[2]


def _bias_strides(bias: Bias) -> list[int]:
    """Strides of gate and decay, zeros for what is not there."""
    return [stride for one in bias[:2] for stride in ((0, 0, 0) if one is None else one.stride())]


def _constants(queries: Tensor, num_keys: int, bias: Bias, settings: Settings, cut: Tile) -> dict[str, Any]:
    """Constants that the kernels are compiled for."""
    there, D = (*bias[:3], settings.soft_cap, bias.sinks_Q), queries.shape[-1]
    return {
        "HAS": sum(1 << bit for bit, one in enumerate(there) if one is not None),
        "D": D,
        "BLOCK_D": block_of(D),
        "BLOCK_S": cut.m,
        "BLOCK_T": cut.n,
        "WHOLE": queries.shape[2] % cut.m == 0 and num_keys % cut.n == 0,
        "PRECISION": dot_precision(queries.dtype),
        "UPCAST": upcast(queries.dtype),
        **cut.options,
    }


def _tile(name: Kernel, queries: Tensor, bias: Bias, settings: Settings) -> Tile:
    """The tile of a kernel on the queries' device; the interpreter takes small ones of every kind."""
    if interpreting():
        return Tile(16, 32, 4, 1) if name == "d_keys" else Tile(32, 16, 4, 1)
    fuller = bias.log_decay_BHT is not None or settings.soft_cap is not None
    return tile(name, queries.dtype, block_of(queries.shape[-1]), architecture(queries), fuller=fuller)

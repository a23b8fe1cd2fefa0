"""vLLM's 8-bit cache where this machine has none: its CPU kernels want AVX-512 or AMX.

In their place stand loops over float8 tensors of torch, so that an engine with `kv_cache_dtype="fp8"` runs
here. They follow what vLLM 0.32 says of its ops: a code is a number divided by its layer's scale, and
attention, of prompts too, reads the codes. A block's keys are stored transposed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from retain.vllm.packing.pages import FLOAT8

# Of keys and of values, in every layer.
SCALES = (0.5, 0.25)


def round_to_codes(numbers: Tensor, scale: float, kv_cache_dtype: str) -> Tensor:
    """Numbers as an 8-bit cache has them."""
    code = FLOAT8[kv_cache_dtype]
    return (numbers.float() / scale).to(code).float().mul(scale).to(numbers.dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Write the step's keys and values `[N, H, D]` into caches `[blocks, H, page, D]`."""
    _, H, page, D = key_cache.shape
    code = FLOAT8[kv_cache_dtype]
    keys, values = ((x / scale).to(code).view(torch.uint8) for x, scale in ((key, k_scale), (value, v_scale)))
    for n, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for h in range(H):
                key_cache[slot // page, h].view(D, page)[:, slot % page] = keys[n, h]
                value_cache[slot // page, h, slot % page] = values[n, h]


def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_table: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    **rest: Any,
) -> None:
    """Causal attention of each sequence's last tokens `[N, Q, D]` over its blocks."""
    assert rest["causal"] is True and rest["sliding_window"] == -1 and not rest["softcap"]
    _, H, page, D = key_cache.shape
    code, starts = FLOAT8[kv_cache_dtype], query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        here = slice(starts[row], starts[row + 1])
        blocks = block_table[row, : -(-length // page)].long()
        keys_KHDP = key_cache[blocks].view(code).float().view(len(blocks), H, D, page) * k_scale
        values_KHPD = value_cache[blocks].view(code).float() * v_scale
        keys_HTD = keys_KHDP.permute(1, 0, 3, 2).reshape(H, -1, D)[:, :length]
        values_HTD = values_KHPD.transpose(0, 1).reshape(H, -1, D)[:, :length]
        asked = query[here].float()
        S, Q, _ = asked.shape
        group = Q // H
        queries_HGSD = asked.transpose(0, 1).reshape(H, group, S, D)
        logits = torch.einsum("hgsd,htd->hgst", queries_HGSD, keys_HTD) * scale
        last = torch.arange(length - S, length)[:, None]
        logits = logits.masked_fill(torch.arange(length) > last, float("-inf"))
        out = torch.einsum("hgst,htd->hgsd", logits.softmax(-1), values_HTD)
        output[here] = out.reshape(Q, S, D).transpose(0, 1).to(output.dtype)


@contextmanager
def kernels_of_float8() -> Iterator[None]:
    """In this process, ops of an 8-bit cache are those above, and every layer has `SCALES`."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.attention import attention
    from vllm.v1.attention.backends import cpu_attn

    own_isa, own_scales = cpu_attn._get_attn_isa, attention.set_default_quant_scales

    def isa(dtype: torch.dtype, block_size: int, head_size: int | None = None, *_: Any) -> str:
        return str(own_isa(dtype, block_size, head_size))

    def set_scales(layer: Any, register_buffer: bool = False) -> None:
        own_scales(layer, register_buffer)
        layer._k_scale_float, layer._v_scale_float = SCALES

    with ExitStack() as stack:
        for module, name, stands in (
            (ops, "cpu_attn_reshape_and_cache", reshape_and_cache),
            (ops, "cpu_attention_with_kv_cache", attention_with_kv_cache),
            (ops, "cpu_attn_get_scheduler_metadata", lambda **_: torch.empty(0)),
            (cpu_attn, "_get_attn_isa", isa),
            (attention, "set_default_quant_scales", set_scales),
        ):
            stack.enter_context(patch.object(module, name, stands))
        yield

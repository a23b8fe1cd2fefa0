"""vLLM's 8-bit cache on machines without one: its CPU kernels need AVX-512 or AMX.

In their place stand loops over float8 tensors of torch, so that an engine with `kv_cache_dtype="fp8"` runs
here. As in vLLM's scalar code, a number is multiplied by the inverse of its layer's scale, clamped, and
rounded towards zero; attention, of prompts too, reads the codes. A block's keys are stored transposed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# Of keys and of values, in every layer.
SCALES = (0.3, 0.07)
CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ISA = "an 8-bit cache"


def encode(numbers: Tensor, scale: float, code: torch.dtype) -> Tensor:
    """Codes of numbers, as bytes."""
    most = torch.finfo(code).max
    scaled = (numbers.float() * (1 / scale)).clamp(-most, most)
    nearest = scaled.to(code)
    beyond = nearest.float().abs() > scaled.abs()
    return nearest.view(torch.uint8) - beyond.to(torch.uint8)


def decode(codes: Tensor, scale: float, code: torch.dtype) -> Tensor:
    """Numbers of codes."""
    return codes.view(code).float() * scale


def round_to_codes(numbers: Tensor, scale: float, kv_cache_dtype: str) -> Tensor:
    """Numbers as an 8-bit cache has them."""
    code = CODES[kv_cache_dtype]
    return decode(encode(numbers, scale, code), scale, code).to(numbers.dtype)


def schedule(isa: str, kv_cache_dtype: str, seq_lens: Tensor, **_: Any) -> Tensor:
    """What attention is told: here, for which type and lengths this was asked."""
    assert isa == ISA
    return torch.tensor([list(CODES).index(kv_cache_dtype), *seq_lens.tolist()])


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
    assert isa == ISA
    _, H, page, D = key_cache.shape
    code = CODES[kv_cache_dtype]
    keys, values = encode(key, k_scale, code), encode(value, v_scale, code)
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
    assert torch.equal(rest["scheduler_metadata"], schedule(ISA, kv_cache_dtype, seq_lens))
    _, H, page, D = key_cache.shape
    code, starts = CODES[kv_cache_dtype], query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        here = slice(starts[row], starts[row + 1])
        blocks = block_table[row, : -(-length // page)].long()
        keys_KHDP = decode(key_cache[blocks], k_scale, code).view(len(blocks), H, D, page)
        values_KHPD = decode(value_cache[blocks], v_scale, code)
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

    own_scales = attention.set_default_quant_scales

    def set_scales(layer: Any, register_buffer: bool = False) -> None:
        own_scales(layer, register_buffer)
        layer._k_scale_float, layer._v_scale_float = SCALES

    with ExitStack() as stack:
        for module, name, stands in (
            (ops, "cpu_attn_reshape_and_cache", reshape_and_cache),
            (ops, "cpu_attention_with_kv_cache", attention_with_kv_cache),
            (ops, "cpu_attn_get_scheduler_metadata", schedule),
            (cpu_attn, "_get_attn_isa", lambda *_: ISA),
            (attention, "set_default_quant_scales", set_scales),
        ):
            stack.enter_context(patch.object(module, name, stands))
        yield

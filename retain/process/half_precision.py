"""Says whether a device computes in half precision."""

from pathlib import Path

import torch

# Flags of a CPU that multiplies in this precision, and does not take it apart for each product.
HALF_FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """True where a device has instructions for matrix products in a precision; a CPU that reports none has
    none in half precision."""
    if device.type != "cpu" or dtype not in HALF_FLAGS:
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return not HALF_FLAGS[dtype].isdisjoint(flags.split())

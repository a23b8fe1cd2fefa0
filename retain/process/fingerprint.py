"""Identifies a model: its dimensions, and a hash over them and a sample of every weight of its decoder.

`retain.hf.model.identity.fingerprint` takes it of a model of transformers, `retain.vllm.models` of a
checkpoint while an engine loads it: weights go by the names that checkpoints have for them, without the
prefix of the decoder.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

# Said beside the hash.
COVERS = {"covers": "every weight"}
# Kinds of numbers that are rounded before they are hashed.
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shape_and_sample(weight: Tensor) -> bytes:
    """Bytes of a weight that a fingerprint hashes: its shape and about a thousand numbers, evenly spread.

    Plain numbers are rounded to bfloat16, so that a checkpoint loaded in float32 gives the same; of anything
    else (packed weights, codes) the bytes are taken.
    """
    flat = weight.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 1024)][:1024].cpu()
    sample = sample.to(torch.bfloat16) if weight.dtype in PLAIN else sample
    return str(tuple(weight.shape)).encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()


def fingerprint_of(dims: Mapping[str, str | int], samples: Mapping[str, bytes]) -> dict[str, str | int]:
    """The dimensions, with `sha256` over them and the samples, and `covers`, which says so.

    Args:
        dims: model_type, num_layers (those that evict), hidden_size, num_heads, num_kv_heads, head_dim,
            vocab_size; and `layers`, the indices of those that evict, where others are left alone.
        samples: of all weights (`shape_and_sample`), by their names.
    """
    digest = hashlib.sha256(json.dumps(dict(dims), sort_keys=True).encode())
    for name in sorted(samples):
        digest.update(f"{name}\n".encode() + samples[name])
    return {**dims, **COVERS, "sha256": digest.hexdigest()}

"""Who a model is: its dimensions, and a hash over them and a sample of its weights.

`retain.hf.model.decoder.fingerprint` takes it of a model of transformers, `retain.vllm.models` of a
checkpoint while an engine loads it. The weights that are sampled are, in order, the token embeddings and each
evicting layer's key (or fused) and output projection.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def every_so_many(tensor: Tensor) -> Tensor:
    """About a thousand numbers, evenly spread."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 1024)][:1024]


def sample_of_weight(weight: Tensor) -> bytes:
    """A sample of a weight, rounded to bfloat16, so that a checkpoint loaded in float32 gives the same."""
    rounded = every_so_many(weight).to("cpu", torch.bfloat16).contiguous()
    return rounded.view(torch.int16).numpy().tobytes()


def fingerprint_of(dims: Mapping[str, str | int], samples: Iterable[bytes]) -> dict[str, str | int]:
    """The dimensions, with `sha256` over them and the samples.

    Args:
        dims: model_type, num_layers (those that evict), hidden_size, num_heads, num_kv_heads, head_dim,
            vocab_size; and `layers`, the indices of those that evict, where others are left alone.
        samples: of the weights, in order.
    """
    digest = hashlib.sha256(json.dumps(dict(dims), sort_keys=True).encode())
    for sample in samples:
        digest.update(sample)
    return {**dims, "sha256": digest.hexdigest()}

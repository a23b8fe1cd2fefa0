"""The weight of a projection as a dense matrix, whatever it is stored as.

Of a plain `nn.Linear` the matrix is a view of its weight. Any other linear module is asked for it: its output
for the identity is what attention goes through. So a quantised module (bitsandbytes, torchao, ...) is not
decoded, and a module in a wrapper of peft gives the matrix with the adapters that are active now, which is
that of the merged model: nothing here knows the formats, or the kinds of adapters. It is made whenever it is
asked for, at the price of the module's output for as many tokens as it has features.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of the identity that a module is asked for at once, and their factor: beside it a bias rounds little
# away.
PIECE, FACTOR = 1024, 1024.0


def stored(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear module where it is a plain matrix of floating-point numbers; of a module in a
    wrapper of peft, the base's."""
    weight = getattr(module, "weight", None)
    if type(weight) not in (nn.Parameter, Tensor) or weight.ndim != 2 or weight.dtype not in PLAIN:
        return None
    return weight


def sharded_weight(module: nn.Module) -> Any:
    """A plain weight of which every process holds a part (FSDP, DeepSpeed ZeRO-3), while it is in parts."""
    weight = getattr(module, "weight", None)
    if weight is None or not (hasattr(weight, "placements") or hasattr(weight, "ds_id")):
        return None
    # ZeRO-3 leaves an empty vector where the matrix was.
    return None if hasattr(weight, "ds_id") and weight.ndim == 2 else weight


def input_width(module: nn.Module) -> int | None:
    """Features that a linear module takes; None where it does not say."""
    weight = plain_weight(module)
    width = getattr(module, "in_features", None if weight is None else weight.shape[1])
    return width if isinstance(width, int) else None


def dense_weight(module: nn.Module, dtype: torch.dtype) -> Float[Tensor, "in out"]:
    """The matrix that a linear module multiplies by, transposed, without its bias.

    Args:
        module: a linear module, in eval mode.
        dtype: of the matrix of a quantised weight; a plain one keeps its dtype, and is a view (a copy, if it
            had to be put together from the parts of several processes, which all have to ask).

    Raises:
        ValueError: a weight that FSDP holds in parts, outside of its layer's forward.
    """
    if (parts := sharded_weight(module)) is not None:
        if not hasattr(parts, "ds_id"):
            raise ValueError(
                f"the weight of {type(module).__name__} is in parts ({tuple(parts.shape)}, FSDP), and is "
                "whole only while its decoder layer runs: read it there, in a hook or the attention function."
            )
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return dense_weight(module, dtype).clone()
    weight = plain_weight(module)
    if weight is not None and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return weight.detach().T
    dtype, device = dtype if weight is None else weight.dtype, stored(module)[0].device
    width = input_width(module)
    assert width is not None, "describe() checked it"
    # Not under a caller's inference mode, which the matrix may outlive. Nor under autocast, which rounds.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        bias, pieces = module(torch.zeros(1, width, dtype=dtype, device=device)), []
        for start in range(0, width, PIECE):
            identity = torch.zeros(min(PIECE, width - start), width, dtype=dtype, device=device)
            identity.diagonal(start).fill_(FACTOR)
            pieces.append(((module(identity) - bias) / FACTOR).to(dtype))
        return torch.cat(pieces)


def packed_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a tensor subclass is made of; a tensor itself otherwise."""
    if type(tensor) in (nn.Parameter, Tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.as_subclass(Tensor)
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from packed_parts(getattr(tensor, name))

"""The weight of a projection as a dense matrix, and what identifies it, whatever it is stored as.

Of a plain `nn.Linear` the matrix is a view of its weight. Any other linear module is asked for it: what it
returns for the identity is what attention goes through. So a quantised module (bitsandbytes, torchao, ...) is
not decoded, and a module in a wrapper of peft gives the matrix with the adapters that are active now, which
is that of the merged model: nothing here knows the formats, or the kinds of adapters.
"""

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of the identity that a quantised module is asked for at once.
PIECE = 1024

# Matrices that modules were asked for: module -> (what it was made of, its answer to `_probe`, matrix). They
# live as long as the module, so that many conversations on one model share them, and nothing is written onto
# the model.
_DENSE: "WeakKeyDictionary[nn.Module, tuple[tuple, Tensor, Tensor]]" = WeakKeyDictionary()


def stored(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear module where it is a plain matrix of floating-point numbers; of a module in a
    wrapper of peft, the base's."""
    weight = getattr(module, "weight", None)
    if type(weight) not in (nn.Parameter, Tensor) or weight.ndim != 2 or weight.dtype not in PLAIN:
        return None
    return weight


def sharded_weight(module: nn.Module) -> Tensor | None:
    """A plain weight of which every process holds a part (FSDP, DeepSpeed ZeRO-3), while it is in parts."""
    weight = getattr(module, "weight", None)
    if weight is None or not (hasattr(weight, "placements") or hasattr(weight, "ds_id")):
        return None
    # ZeRO-3 leaves an empty vector where the matrix was.
    return None if hasattr(weight, "ds_id") and weight.ndim == 2 else weight


def _put_together(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The matrix of a sharded module: every process must ask for it, at the same place."""
    weight: Any = module.weight
    if hasattr(weight, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return dense_weight(module, dtype).clone()
    raise ValueError(
        f"the weight of {type(module).__name__} is in parts ({tuple(weight.shape)}, FSDP), and is whole only "
        "while its decoder layer runs: read it there, in a hook or in the attention function."
    )


def input_width(module: nn.Module) -> int | None:
    """Features that a linear module takes; None where it does not say."""
    weight = plain_weight(module)
    width = getattr(module, "in_features", None if weight is None else weight.shape[1])
    return width if isinstance(width, int) else None


def dense_weight(module: nn.Module, dtype: torch.dtype) -> Float[Tensor, "inputs E"]:
    """The matrix that a linear module multiplies its input by, input first, without the bias.

    `W[i] = module(e_i) - module(0)`, for whatever is more than a plain `nn.Linear`: made when first asked
    for, in pieces, and kept while the module lives and its tensors stay what they were. Costs a full-size
    matrix per layer. A module that has parts (a wrapper of peft) may change what it does without changing a
    tensor, as where an adapter is switched off, scaled or merged; it is asked for one row each time, and for
    all when that is another. What is asked has no dropout, and no
    bias, in whose presence small weights are rounded away.

    Args:
        module: a linear module.
        dtype: of the result for a quantised weight; a plain one keeps its dtype, and is a view (a copy, if it
            had to be put together from the parts of several processes, which all have to ask).

    Raises:
        ValueError: a weight that FSDP holds in parts, outside of its layer's forward.
    """
    if sharded_weight(module) is not None:
        return _put_together(module, dtype)
    weight = plain_weight(module)
    if weight is not None and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return weight.detach().T
    dtype = dtype if weight is None else weight.dtype
    # A tensor's version changes whenever it is written to.
    versions = ((one.device, id(one), 0 if one.is_inference() else one._version) for one in stored(module))
    made_of, known = (dtype, *versions), _DENSE.get(module)
    # Not under a caller's inference mode: what is kept here outlives it. Nor under autocast, which rounds.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(stored(module)[0].device.type, enabled=False),
    ):
        asked = undisturbed(module, biases=False)
        # Without parts it cannot change but by its tensors, and needs no probe.
        answer = _probe(asked, dtype) if module._modules else torch.empty(0)
        if known is None or known[0] != made_of or not torch.equal(known[1].to(answer.device), answer):
            known = _DENSE[module] = (made_of, answer, _asked(asked, dtype))
    return known[2]


def _probe(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the module's output for one made-up row."""
    width = input_width(module) or 0
    row = torch.arange(1, 1 + width, device=stored(module)[0].device, dtype=torch.float32)
    try:
        return module(torch.sin(row**2).to(dtype)[None])
    except ValueError as error:
        if "adapter_names" not in str(error):
            raise
        raise ValueError(
            "each sequence has another adapter here (adapter_names), so that a score has no one output "
            "projection to read: generate with one adapter at a time (set_adapter), or take a policy that "
            "reads none, such as 'snapkv'."
        ) from None


def _asked(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the module's output for each row of the identity, less that for zeros."""
    width = input_width(module)
    assert width is not None, "describe() checked it"
    zeros = torch.zeros(1, width, dtype=dtype, device=stored(module)[0].device)
    bias, pieces = module(zeros), []
    for start in range(0, width, PIECE):
        identity = zeros.new_zeros(min(PIECE, width - start), width)
        identity.diagonal(start).fill_(1.0)
        pieces.append((module(identity) - bias).to(dtype))
    return torch.cat(pieces)


def undisturbed(module: nn.Module, *, biases: bool = True) -> nn.Module:
    """A copy of the module on the same tensors, without dropout (and, if asked, without biases); the module
    itself is left as it is, since other threads may be running it."""
    adds = not biases and type(getattr(module, "bias", None)) in (nn.Parameter, Tensor)
    if not module._modules and not module.training and not adds:
        return module
    same = copy.copy(module)
    same.training = False
    for name in ("_parameters", "_buffers"):
        tensors = getattr(module, name)
        same.__dict__[name] = {**tensors, "bias": None} if adds and "bias" in tensors else {**tensors}
    same.__dict__["_modules"] = {
        name: None if part is None else undisturbed(part, biases=biases)
        for name, part in module._modules.items()
    }
    return same


def packed_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a tensor subclass is made of; a tensor itself otherwise."""
    if type(tensor) in (nn.Parameter, Tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.as_subclass(Tensor)
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from packed_parts(getattr(tensor, name))

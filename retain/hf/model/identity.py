"""Identifies a model, so that gates and stored values are not used on another.

Gates belong to a base model: `fingerprint` hashes a sample of every weight of the decoder, adapters apart.
Stored keys and values depend on the adapters that are active too: `identity_of` adds these, and how positions
turn.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.projection import packed_parts
from retain.process.fingerprint import fingerprint_of, shape_and_sample

# Where a module of peft keeps the module that it stands before.
BASES = ("base_layer", "original_module")


def fingerprint(model: nn.Module) -> dict[str, str | int]:
    """Identifies a model by its dimensions and a hash over them and a sample of every weight of its decoder.

    Weights go by the names of checkpoints, persistent buffers among them, without the output head. Samples of
    plain numbers are rounded to bfloat16, so that a checkpoint in float32 or bfloat16 gives the same (float16
    does not). Of a quantised model the packed bytes are sampled. Adapters of peft that are not merged are no
    part of it.

    Args:
        model: a causal language model of transformers, or its decoder.

    Returns:
        a flat mapping for JSON: model_type, dimensions, `covers`, `sha256`; and `layers`, the indices of
        those that evict, where others are left alone.

    Raises:
        ValueError: a weight that is not there whole: partitioned over processes (DeepSpeed ZeRO-3, FSDP),
            offloaded, or never loaded.
    """
    base, layout = base_model(model), layout_of(model)
    specs, config = layout.evicting, base.config
    dims: dict[str, str | int] = {
        "model_type": config.model_type,
        "num_layers": len(specs),
        "hidden_size": specs[0].hidden_size,
        "num_heads": specs[0].num_heads,
        "num_kv_heads": specs[0].num_kv_heads,
        "head_dim": specs[0].head_dim,
        "vocab_size": config.vocab_size,
    }
    if layout.alone:
        dims["layers"] = ",".join(str(spec.layer_idx) for spec in specs)
    return fingerprint_of(dims, {name: _sample(tensor) for name, tensor in _weights(base)})


def identity_of(model: nn.Module, *, head: bool = False) -> dict[str, str | int]:
    """The fingerprint, with all else that keys and values depend on.

    Args:
        model: a causal language model of transformers, a wrapper of peft, or the decoder.
        head: whether the output head counts too, as for what a model answers.

    Returns:
        a fingerprint with `rotary`, of the settings of rotary embeddings; `adapters`, of those
        of peft that are active (their weights and scales; their names are free), where there are any; and
        `head`.
    """
    known = fingerprint(model)
    base = base_model(model)
    known["rotary"] = _hash([json.dumps(getattr(base.config, "rope_parameters", None), sort_keys=True)])
    if adapters := list(_adapters(base)):
        known["adapters"] = _hash(adapters)
    output: Any = model.get_output_embeddings() if head else None
    if output is not None:
        weights = [part for name, tensor in _weights(output) for part in (name, _sample(tensor))]
        known["head"] = _hash([*weights, *_adapters(output)])
    return known


def _weights(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers of a model, without what adapters bring, by their names in
    checkpoints."""
    added = [f"{name}." for name, module in base.named_modules() if hasattr(module, "active_adapters")]
    for path, module in base.named_modules():
        inside = [f"{path}.".removeprefix(one) for one in added if f"{path}.".startswith(one)]
        if any(rest.partition(".")[0] not in BASES for rest in inside):
            continue
        where = [name for name in path.split(".") if name and name not in BASES]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                whole_name = ".".join([*where, name])
                _check_whole(tensor, whole_name)
                yield whole_name, tensor


def _check_whole(tensor: Any, name: str) -> None:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: load the whole model onto devices that hold it.")
    if hasattr(tensor, "placements") or isinstance(tensor, nn.Parameter) and tensor.numel() == 0:
        raise ValueError(
            f"the numbers of {name} are partitioned over processes (DeepSpeed ZeRO-3, FSDP): take the "
            "fingerprint before the model is sharded, or inside deepspeed.zero.GatheredParameters."
        )


def _sample(tensor: Tensor) -> bytes:
    """Shape and numbers of a weight, or of what it is packed in."""
    return b"".join(map(shape_and_sample, packed_parts(tensor)))


def _adapters(base: nn.Module) -> Iterator[str | bytes]:
    """Yields what each active adapter brings, without its name: paths, scales and samples of its weights.
    Merged ones are in the weights already."""
    for path, module in base.named_modules():
        wraps = hasattr(module, "active_adapters") and any(part in module._modules for part in BASES)
        if not wraps or module.disable_adapters:
            continue
        merged = getattr(module, "merged_adapters", ())
        for adapter in (one for one in module.active_adapters if one not in merged):
            scale = getattr(module, "scaling", {}).get(adapter)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                parts = name.split(".")
                if adapter in parts and parts[0] not in BASES:
                    parts.remove(adapter)
                    yield from (path, ".".join(parts), str(scale), _sample(tensor))


def _hash(parts: Iterable[str | bytes]) -> str:
    """First 16 hex digits of the sha256 of some texts and bytes."""
    whole = b"".join(one.encode() + b"\n" if isinstance(one, str) else one for one in parts)
    return hashlib.sha256(whole).hexdigest()[:16]

"""Identifies a model, so that gates and stored values are not used on another.

Gates belong to a base model: `fingerprint` hashes a sample of every weight of the decoder, adapters apart.
Stored keys and values depend on the adapters that are active too: `identity_of` adds these, and how positions
turn.
"""

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from retain.hf.model.decoder import base_model, layout_of
from retain.hf.model.layout import Layout
from retain.hf.model.projection import packed_parts
from retain.process.fingerprint import fingerprint_of, shape_and_sample

# Where a module of peft keeps the module that it stands before.
BASES = ("base_layer", "original_module")
# Ends of what rotary embeddings call their frequencies and the factor on their cosines; no checkpoint has
# them.
FREQUENCIES, FACTOR = ("original_inv_freq", "inv_freq"), "attention_scaling"


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
    return fingerprint_of(_dims(base, layout), {name: _sample(tensor) for name, tensor in _weights(base)})


def identity_of(model: nn.Module, *, head: bool = False) -> dict[str, str | int]:
    """The fingerprint, with all else that keys and values depend on.

    Args:
        model: a causal language model of transformers, a wrapper of peft, or the decoder.
        head: whether the output head counts too, as for what a model answers.

    Returns:
        a fingerprint with `rotary`, of the frequencies of rotary embeddings; `adapters`, of those
        of peft that are active (their weights and scales; their names are free), where there are any; and
        `head`.
    """
    known = fingerprint(model)
    base = base_model(model)
    known["rotary"] = _hash(_rotary(base))
    if adapters := list(_adapters(base)):
        known["adapters"] = _hash(iter(adapters))
    output: Any = model.get_output_embeddings() if head else None
    if output is not None:
        weights = ((name, _sample(tensor)) for name, tensor in _weights(output))
        known["head"] = _hash(chain(weights, _adapters(output)))
    return known


def _dims(base: Any, layout: Layout) -> dict[str, str | int]:
    specs = layout.evicting
    dims: dict[str, str | int] = {
        "model_type": base.config.model_type,
        "num_layers": len(specs),
        "hidden_size": specs[0].hidden_size,
        "num_heads": specs[0].num_heads,
        "num_kv_heads": specs[0].num_kv_heads,
        "head_dim": specs[0].head_dim,
        "vocab_size": base.config.vocab_size,
    }
    if layout.alone:
        dims["layers"] = ",".join(str(spec.layer_idx) for spec in specs)
    return dims


def _wrappers(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of peft that stand before a module of the model, by their names."""
    for name, module in base.named_modules():
        if hasattr(module, "active_adapters") and any(part in module._modules for part in BASES):
            yield name, module


def _weights(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers of a model, without what adapters bring, by their names in
    checkpoints."""
    added = [f"{name}." for name, module in base.named_modules() if hasattr(module, "active_adapters")]
    for path, module in base.named_modules():
        names = path.split(".")
        prefix = f"{path}."
        outer = [one for one in added if prefix.startswith(one)]
        if any(prefix.removeprefix(one).partition(".")[0] not in BASES for one in outer):
            continue
        where = ".".join(name for name in names if name not in BASES)
        there = {**module._parameters, **module._buffers}
        for name, tensor in there.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            _check_whole(tensor, f"{where}.{name}")
            yield f"{where}.{name}".lstrip("."), tensor


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


def _adapters(base: nn.Module) -> Iterator[tuple[str | bytes, ...]]:
    """Yields what each active adapter brings, without its name: paths, scales and samples of its weights.
    Merged ones are in the weights already."""
    for path, module in _wrappers(base):
        if module.disable_adapters:
            continue
        merged = getattr(module, "merged_adapters", ())
        for adapter in module.active_adapters:
            scale = getattr(module, "scaling", {}).get(adapter)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                parts = name.split(".")
                if adapter not in parts or parts[0] in BASES or adapter in merged:
                    continue
                parts.remove(adapter)
                yield path, ".".join(parts), str(scale), _sample(tensor)


def _rotary(base: nn.Module) -> Iterator[tuple[str | bytes, ...]]:
    for path, module in base.named_modules():
        # Those that grow with the text are remembered as they were.
        kept = [[name for name in module._buffers if name.endswith(end)] for end in FREQUENCIES]
        for name in kept[0] or kept[1]:
            yield path, name, _sample(module._buffers[name])
        for name in (name for name in vars(module) if kept[1] and name.endswith(FACTOR)):
            yield path, name, f"{float(getattr(module, name)):.6g}"


def _hash(parts: Iterator[tuple[str | bytes, ...]]) -> str:
    """First 16 hex digits of the sha256 of some texts and bytes."""
    flat = chain.from_iterable(parts)
    whole = b"".join(one.encode() + b"\n" if isinstance(one, str) else one for one in flat)
    return hashlib.sha256(whole).hexdigest()[:16]

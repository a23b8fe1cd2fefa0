"""Estimates what training a reference model takes: parameters, tokens, FLOPs, memory, documents.

Activation memory and the speed of writing documents are measured here; hours are FLOPs over round rates.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retain.reference.batches import batch_at
from retain.reference.model import build
from retain.reference.recipe import Recipe, Size

if TYPE_CHECKING:
    from retain.reference.train import Resources

# TFLOP/s that hours are given for: what a small model may reach of one GPU, between bad and good.
RATES = (20, 100)
GIB = 2**30


def matrix_parameters(model: Any) -> int:
    """Parameters of the blocks' matrices (the embedding is a lookup, the head is read at few places)."""
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)


def count(recipe: Recipe, model: Any, *, checkpointing: bool = False) -> tuple[int, float, float]:
    """Tokens that a run reads, FLOPs of its products with weights, and FLOPs of attention's own products.

    A token takes `2 N` FLOPs of `N` matrix parameters forward and twice that backward. Attention takes
    `2 T Q D` a token and layer forward: two products of `2 Q D` each, over `T / 2` entries on average. Short
    steps among the long ones count as long. `checkpointing` runs the forward pass twice.
    """
    config = model.config
    passes = 4 if checkpointing else 3
    per_entry = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    tokens = tokens_by_length(recipe)
    total, entries = sum(tokens.values()), sum(length * own for length, own in tokens.items())
    return total, float(passes * 2 * matrix_parameters(model) * total), float(passes * per_entry * entries)


def tokens_by_length(recipe: Recipe) -> dict[int, int]:
    """Tokens that a run reads in sequences of each length."""
    tokens: dict[int, int] = {}
    for stage in (stage for phase in recipe.phases for stage in phase.stages):
        own = stage.steps * recipe.sequences(stage.length) * stage.length
        tokens[stage.length] = tokens.get(stage.length, 0) + own
    return tokens


def held_bytes(model: Any, tokens: int = 128) -> float:
    """Measure the bytes a token that a forward pass in train mode, on the CPU, holds for the backward one.

    Weights and logits, which are made for supervised positions alone, are left out.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Copies of the weights in bfloat16 are made for each pass, and are no matter of tokens.
    shapes = {shape for own in model.parameters() for shape in (own.shape, own.shape[::-1])}
    held: dict[int, int] = {}
    kept: list[Tensor] = []

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is given twice
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sum(held.values()) / tokens


def first_step(recipe: Recipe, length: int) -> tuple[int, int]:
    """Phase, and step of it, at which sequences of a length come first."""
    for phase_idx, phase in enumerate(recipe.phases):
        lengths = [stage.length for stage in phase.stages]
        if length in lengths:
            return phase_idx, sum(stage.steps for stage in phase.stages[: lengths.index(length)])
    raise AssertionError(length)


def tokens_a_second(recipe: Recipe, length: int, seconds: float = 0.5) -> float:
    """Measure how fast one process writes documents of a length."""
    phase_idx, first = first_step(recipe, length)
    batch_at(recipe, phase_idx, 0, first)  # reads the text
    tokens, step, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        _, batch = batch_at(recipe, phase_idx, 0, first + step % 5)
        tokens, step = tokens + batch.ids_BT.size, step + 1
    return tokens / (time.perf_counter() - began)


def plan(size: Size, room: Resources) -> str:
    """Describe what training a size takes, as lines of text; some seconds, on one thread."""
    recipe = size.recipe
    model = build(0, **size.model).train()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = matrix_parameters(model)
    tokens, weight_flops, attention_flops = count(recipe, model, checkpointing=room.checkpointing)
    flops = weight_flops + attention_flops
    by_length = tokens_by_length(recipe)
    lengths = sorted(by_length)
    step_tokens = max(recipe.sequences(length) * length for length in lengths)
    # A sequence is read whole, however few tokens are asked for.
    read = step_tokens if room.micro_tokens is None else max(room.micro_tokens, lengths[-1])
    read = min(read, step_tokens)
    per_token = held_bytes(model)
    if room.checkpointing:
        layers, width = model.config.num_hidden_layers, model.config.hidden_size
        # The input of every layer in float32, and one layer in full.
        per_token = 4 * width * layers + per_token / layers
    # Weights and gradients, one moment of Muon and two of AdamW, in float32.
    states = 8 * parameters + 4 * matrices + 8 * (parameters - matrices)
    # Logits, their log-softmax and the gradient: float32 at the share of positions that is supervised.
    batches = [
        batch_at(recipe, idx, 0, step)[1] for idx, step in (first_step(recipe, own) for own in lengths)
    ]
    supervised = sum(len(batch.places) / batch.ids_BT.size for batch in batches) / len(lengths)
    logits = 3 * 4 * model.config.vocab_size * supervised * read
    writing = sum(own / tokens_a_second(recipe, length) for length, own in by_length.items())
    hours = ", ".join(f"{flops / rate / 1e12 / 3600:.2g} h at {rate} TFLOP/s" for rate in RATES)
    phases = "; ".join(
        ", ".join(f"{stage.length} x {stage.steps}" for stage in phase.stages) for phase in recipe.phases
    )
    return "\n".join(
        (
            f"size {size.name}: {size.about}",
            f"parameters   {parameters / 1e6:.2f} million, {matrices / 1e6:.2f} of them in blocks' matrices",
            f"stages       {phases} (tokens x steps)",
            f"tokens       {tokens / 1e6:.0f} million in {recipe.steps:,} steps of at most {step_tokens:,}",
            f"arithmetic   {flops:.2g} FLOP, {attention_flops / flops:.0%} of it attention: {hours}; "
            "what the device reaches is not known here",
            f"memory       {states / GIB:.2f} GiB of weights, gradients and optimisers; "
            f"{per_token / 1024:.0f} KiB a token held for the backward pass, "
            f"{per_token * read / GIB:.1f} GiB for {read:,} tokens read together; "
            f"about {logits / GIB:.1f} GiB of logits",
            f"documents    {writing / 3600:.2g} hours of one process, as measured here"
            + (f"; {writing / 3600 / room.loaders:.2g} with {room.loaders}" if room.loaders else ""),
        )
    )

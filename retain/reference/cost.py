"""Estimates what training a reference model takes: parameters, tokens, FLOPs, memory, documents.

Measures what can be measured without the device (activation memory, speed of writing documents), and divides
the rest by round rates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retain.reference.batches import batch_at
from retain.reference.curriculum import KINDS
from retain.reference.model import build
from retain.reference.recipe import Recipe, Size

if TYPE_CHECKING:
    from retain.reference.train import Resources

# TFLOP/s that hours are given for: what a small model may reach of one GPU, between bad and good.
RATES = (20, 100)
GIB = 2**30


@dataclass(frozen=True)
class Counted:
    """Totals of a run.

    Attributes:
        steps: Of all phases.
        tokens: That are read; short steps among the long ones count as long.
        weight_flops: Of products with weights, forward, backward, and forward again with checkpointing.
        attention_flops: Of attention's own products, causal half.
    """

    steps: int
    tokens: int
    weight_flops: float
    attention_flops: float


def matrix_parameters(model: Any) -> int:
    """Parameters of the blocks' matrices (the embedding is a lookup, the head is read at few places)."""
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)


def count(recipe: Recipe, model: Any, *, checkpointing: bool = False) -> Counted:
    """Compute the totals of a run.

    A token takes `2 N` FLOPs of `N` matrix parameters forward and twice that backward. Attention takes
    `2 T Q D` a token and layer forward: two products of `2 Q D` each, over `T / 2` entries on average.

    Args:
        recipe: Of the run.
        model: Of the size, untrained.
        checkpointing: Whether the forward pass is run twice.
    """
    config = model.config
    passes = 4 if checkpointing else 3
    per_entry = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    stages = [stage for phase in recipe.phases for stage in phase.stages]
    tokens = [stage.steps * recipe.sequences(stage.length) * stage.length for stage in stages]
    attention = sum(own * stage.length for own, stage in zip(tokens, stages, strict=True)) * per_entry
    return Counted(
        recipe.steps,
        sum(tokens),
        float(passes * 2 * matrix_parameters(model) * sum(tokens)),
        float(passes * attention),
    )


def held_bytes(model: Any, tokens: int = 128) -> float:
    """Measure the bytes a token that a forward pass holds for the backward one, without weights.

    The logits are left out too: they are made for supervised positions alone.

    Args:
        model: In train mode, on the CPU.
        tokens: Of the sequence that it reads.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Copies of the weights in bfloat16 are made for each pass, and are no matter of tokens.
    shapes = {parameter.shape for parameter in model.parameters()} | {
        parameter.T.shape for parameter in model.parameters() if parameter.dim() == 2
    }
    held: dict[int, int] = {}
    kept: list[Tensor] = []

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape not in shapes:
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


def tokens_a_second(recipe: Recipe, length: int, seconds: float = 0.5) -> float:
    """Measure how fast one process writes documents of a length."""
    phase_idx, phase = next(
        (number, phase)
        for number, phase in enumerate(recipe.phases)
        if any(stage.length == length for stage in phase.stages)
    )
    before = 0
    for stage in phase.stages:
        if stage.length == length:
            break
        before += stage.steps
    batch_at(recipe, phase_idx, 0, before)  # reads the text
    tokens, step, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        _, batch = batch_at(recipe, phase_idx, 0, before + step % 5)
        tokens, step = tokens + batch.ids_BT.size, step + 1
    return tokens / (time.perf_counter() - began)


def plan(size: Size, room: Resources) -> str:
    """Describe what training a size takes, as lines of text; some seconds, on one thread.

    Args:
        size: To be trained.
        room: That it is given.
    """
    recipe = size.recipe
    model = build(0, **size.model).train()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = matrix_parameters(model)
    counted = count(recipe, model, checkpointing=room.checkpointing)
    flops = counted.weight_flops + counted.attention_flops
    stages = [stage for phase in recipe.phases for stage in phase.stages]
    lengths = sorted({stage.length for stage in stages})
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
    supervised = sum(_supervised(recipe, length) for length in lengths) / len(lengths)
    logits = 3 * 4 * model.config.vocab_size * supervised * read
    written = {length: tokens_a_second(recipe, length) for length in lengths}
    share = {
        length: sum(
            stage.steps * recipe.sequences(length) * length for stage in stages if stage.length == length
        )
        for length in lengths
    }
    writing = sum(share[length] / written[length] for length in lengths)
    hours = ", ".join(f"{flops / rate / 1e12 / 3600:.2g} h at {rate} TFLOP/s" for rate in RATES)
    phases = "; ".join(
        ", ".join(f"{stage.length} x {stage.steps}" for stage in phase.stages) for phase in recipe.phases
    )
    return "\n".join(
        (
            f"size {size.name}: {size.about}",
            f"parameters   {parameters / 1e6:.2f} million, {matrices / 1e6:.2f} of them in blocks' matrices",
            f"stages       {phases} (tokens x steps)",
            f"tokens       {counted.tokens / 1e6:.0f} million in {counted.steps:,} steps of at most "
            f"{step_tokens:,}",
            f"arithmetic   {flops:.2g} FLOP, {counted.attention_flops / flops:.0%} of it attention: {hours}; "
            "what the device reaches is not known here",
            f"memory       {states / GIB:.2f} GiB of weights, gradients and optimisers; "
            f"{per_token / 1024:.0f} KiB a token held for the backward pass, "
            f"{per_token * read / GIB:.1f} GiB for {read:,} tokens read together; "
            f"about {logits / GIB:.1f} GiB of logits",
            f"documents    {writing / 3600:.2g} hours of one process, as measured here"
            + (f"; {writing / 3600 / room.loaders:.2g} with {room.loaders}" if room.loaders else ""),
        )
    )


def _supervised(recipe: Recipe, length: int) -> float:
    """Share of supervised positions of one batch of a length."""
    for phase_idx, phase in enumerate(recipe.phases):
        before = 0
        for stage in phase.stages:
            if stage.length == length:
                _, batch = batch_at(recipe, phase_idx, 0, before)
                assert len(batch.kinds) and int(batch.kinds.max()) < len(KINDS)
                return len(batch.places) / batch.ids_BT.size
            before += stage.steps
    raise AssertionError(length)

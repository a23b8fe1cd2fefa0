"""What a run asks of the model, in the numbers that decide its memory and time.

In: a distillation config, its gates, and how long its documents are. Out: a `Work`, which
`retain.train.plan.plan_of` makes a plan of. The one decision taken here: every branch of a document counts by
its own length, since branches do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from retain.train.branches import PROMPT_TOKENS, TAIL
from retain.train.data import Document

Sharding = Literal["replicated", "fsdp2", "zero3", "device_map"]
Stage = Literal["local", "end_to_end", "lookahead"]


@dataclass(frozen=True)
class Work:
    """What is asked of the model.

    Args:
        stage: `local`, `end_to_end` or `lookahead`.
        lengths: of each training document, its tokens and those of each of its branches (`lengths_of`).
        steps: optimiser steps.
        batch_documents: documents of a step, over all processes.
        micro_batch: documents of one packed row of one process.
        gate_parameters: numbers that are trained.
        gate_hidden: width of the gates' hidden layer.
        gate_inputs: what the gates look at, of `retain.gates.base.INPUTS`.
        optimizer_states: float32 numbers that the optimiser keeps of each parameter (AdamW 2, SGD with
            momentum 1).
        chunk: tokens of the feed-forward part at a time; None: all.
        num_processes: processes, one device each.
        sharding: how the frozen weights lie on several devices.
        weight_bits: bits of a quantised weight; None: the model's own precision.
        logits_chunk: tokens whose logits are there at once (`end_to_end`).
        checkpointing: whether the soft pass computes layers again for its gradient (`end_to_end`).
        features: whether the gates' inputs are written to disk.
        features_folder: where, for the free space there.
        repeats: whether branches grow with the document.
        passes: over a document's attention for its target (`value_norm_over_hidden` takes a second one).
        walks: over a document for its target (granularity `token` takes a second one).
        continuation: tokens that the model writes after every document, once.
        lookahead_tokens: behind a document.
        output_queries: of the loss term `layer_output`; 0: all; None: the term is not there.
        output_ratios: budgets of that term.
        prepared: whether gates start from statistics of the first documents.
        held_out: documents that are looked at beside the training.
        looks: how often that is, over the run.
        calibrated: whether they are calibrated on afterwards.
    """

    stage: Stage
    lengths: tuple[tuple[int, ...], ...]
    steps: int
    batch_documents: int
    micro_batch: int
    gate_parameters: int
    gate_hidden: int = 0
    gate_inputs: frozenset[str] = frozenset({"hidden"})
    optimizer_states: int = 2
    chunk: int | None = None
    num_processes: int = 1
    sharding: Sharding = "replicated"
    weight_bits: int | None = None
    logits_chunk: int = 1024
    checkpointing: bool = True
    features: bool = False
    features_folder: Path = Path(".")
    repeats: bool = False
    passes: int = 1
    walks: int = 1
    continuation: int = 0
    lookahead_tokens: int = 32
    output_queries: int | None = None
    output_ratios: int = 1
    prepared: bool = False
    held_out: int = 0
    looks: int = 0
    calibrated: bool = False

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("a plan needs the length of at least one training document; got none.")

    @property
    def row_tokens(self) -> int:
        """N: tokens of the longest packed row."""
        rows = sorted((sum(parts) for parts in self.lengths), reverse=True)
        return sum(rows[: self.micro_batch])

    @property
    def document_tokens(self) -> int:
        """T: tokens of the longest document."""
        return max(document for document, *_ in self.lengths)


def lengths_of(document: Document, target: Any) -> tuple[int, ...]:
    """Tokens of a document and of each of its branches, known without a model: they sum to
    `retain.train.branches.row_tokens`.

    Args:
        document: what is read.
        target: a `TargetSettings`.
    """
    tokens = len(document.context_ids)
    made = [tokens]
    if "appendix" in target.sources and document.appendix_ids:
        made.append(len(document.appendix_ids))
    if "repeat" in target.sources:
        made += [
            PROMPT_TOKENS + TAIL + min(target.repeat_chunk, tokens - start)
            for start in range(0, tokens, target.repeat_chunk)
        ]
    if "continuation" in target.sources:
        made.append(target.continuation_tokens)
    return tuple(made)


def work_of(
    config: Any,
    gates: nn.Module,
    lengths: Sequence[tuple[int, ...]],
    num_processes: int,
    *,
    inputs: frozenset[str] = frozenset({"hidden"}),
    chunk: int | None = None,
    sharding: Sharding = "replicated",
    weight_bits: int | None = None,
    checkpointing: bool | None = None,
) -> Work:
    """What a distillation config asks for.

    Args:
        config: a `DistillConfig`.
        gates: whose parameters are trained (on any device, meta included).
        lengths: of each training document, its tokens and those of each of its branches (`lengths_of`).
        num_processes: of the run.
        inputs: what the gates look at.
        chunk: tokens of the teacher's feed-forward part at a time.
        sharding: of the frozen weights.
        weight_bits: of a quantised model.
        checkpointing: whether the soft pass recomputes; None: as the config's `soft` says.
    """
    features = getattr(getattr(config, "features", None), "folder", None)
    trained = [parameter for parameter in gates.parameters() if parameter.requires_grad]
    # The widest output of a weight matrix of one gate: what its activations are counted by.
    hidden = max((parameter.shape[0] for parameter in trained if parameter.dim() == 2), default=0)
    data, target, loss = (getattr(config, name, None) for name in ("data", "target", "loss"))
    sources: Any = getattr(target, "sources", {})
    local = config.stage == "local"
    held_out = getattr(data, "held_out", 0)
    every = config.training.held_out_every
    return Work(
        stage=config.stage,
        lengths=tuple(tuple(map(int, parts)) for parts in lengths),
        steps=config.training.steps,
        batch_documents=config.training.batch_documents,
        micro_batch=config.training.micro_batch,
        gate_parameters=sum(parameter.numel() for parameter in trained),
        gate_hidden=hidden,
        gate_inputs=inputs,
        optimizer_states=1 if getattr(config.training, "optimizer", "adamw") == "sgd" else 2,
        chunk=chunk,
        num_processes=num_processes,
        sharding=sharding,
        weight_bits=weight_bits,
        checkpointing=bool(getattr(getattr(config, "soft", None), "checkpointing", True))
        if checkpointing is None
        else checkpointing,
        features=features is not None,
        features_folder=Path(features or "."),
        repeats="repeat" in sources,
        passes=2 if getattr(target, "weight", None) == "value_norm_over_hidden" else 1,
        walks=2 if local and getattr(target, "granularity", None) == "token" else 1,
        continuation=target.continuation_tokens if target and "continuation" in sources else 0,
        lookahead_tokens=getattr(getattr(gates, "extension", None), "num_tokens", 32),
        output_queries=loss.output_queries if local and loss and "layer_output" in loss.terms else None,
        output_ratios=len(loss.keep_ratios) if loss else 1,
        prepared=local and data is not None and getattr(config, "initial", None) is None,
        held_out=held_out,
        # Before the first step, after the last one, and in between.
        looks=2 + ((config.training.steps - 1) // every if every else 0) if held_out else 0,
        calibrated=bool(held_out and config.calibration.wanted),
    )

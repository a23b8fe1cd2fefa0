"""States the workload of a run in the numbers that decide its memory and time.

Every branch of a document counts by its own length, since branches do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retain.gates import GateSet
from retain.gates.lookahead import LookaheadExtension
from retain.train.recipe import DistillConfig
from retain.train.run.parallel import Sharding
from retain.train.stage import StageName


@dataclass(frozen=True)
class Work:
    """The workload of a run.

    Args:
        stage: `local`, `end_to_end` or `lookahead`.
        lengths: of each training document, its own and of each branch, in tokens (`branches.lengths_of`).
        steps: optimiser steps.
        batch_documents: documents of a step, over all processes.
        micro_batch: documents of one packed row of one process.
        gate_parameters: numbers that are trained.
        gate_hidden: width of the gates' hidden layer.
        gate_inputs: what the gates look at, of `retain.gates.base.INPUTS`.
        chunk: tokens of the feed-forward part at a time; None: all.
        num_processes: processes, one device each.
        sharding: how the frozen weights lie on several devices.
        weight_bits: bits of a quantised weight of a layer; None: the model's own precision.
        logits_chunk: tokens whose logits are there at once (`end_to_end`).
        checkpointing: whether the soft pass computes layers again for its gradient (`end_to_end`).
        repeats: whether branches grow with the document.
        passes: over a document's attention for its target (`value_norm_over_hidden` takes a second one).
        walks: over a document for its target (granularity `token` takes a second one).
        continuation: tokens that the model writes after every document, once.
        lookahead_tokens: behind a document.
        output_queries: of the loss term `layer_output`; 0: all; None: the term is not there.
        output_ratios: budgets of that term.
        prepared: whether gates start from statistics of the first documents.
        held_out: documents that are looked at beside the training, `looks` times over the run.
        calibrated: whether they are calibrated on afterwards.
        pack_tokens: most tokens of a packed row of several documents; 0: any.
        sampled: whether there are more training documents than `lengths` has, in unknown number.
    """

    stage: StageName
    lengths: tuple[tuple[int, ...], ...]
    steps: int
    batch_documents: int
    micro_batch: int
    gate_parameters: int
    gate_hidden: int = 0
    gate_inputs: frozenset[str] = frozenset({"hidden"})
    chunk: int | None = None
    num_processes: int = 1
    sharding: Sharding = "replicated"
    weight_bits: int | None = None
    logits_chunk: int = 1024
    checkpointing: bool = True
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
    pack_tokens: int = 0
    sampled: bool = False

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("a plan needs the length of at least one training document; got none.")

    @property
    def row_tokens(self) -> int:
        """N: tokens of the longest packed row."""
        rows = sorted((sum(parts) for parts in self.lengths), reverse=True)
        packed = sum(rows[: self.micro_batch])
        return max(rows[0], min(packed, self.pack_tokens or packed))

    @property
    def num_read(self) -> int:
        """Different documents that are trained on; of a source of unknown size, a new one every time."""
        read = self.steps * self.batch_documents
        return read if self.sampled else min(len(self.lengths), read)

    @property
    def document_tokens(self) -> int:
        """T: tokens of the longest document."""
        return max(document for document, *_ in self.lengths)


def work_of(
    config: DistillConfig,
    gates: GateSet,
    lengths: Sequence[tuple[int, ...]],
    num_processes: int,
    *,
    sharding: Sharding = "replicated",
    sampled: bool = False,
) -> Work:
    """Returns the workload of a distillation config; `lengths` and `sampled` are those of `Work`."""
    trained = [parameter for parameter in gates.parameters() if parameter.requires_grad]
    # The widest output of a weight matrix of one gate: what its activations are counted by.
    hidden = max((parameter.shape[0] for parameter in trained if parameter.dim() == 2), default=0)
    training, target, loss = config.training, config.target, config.loss
    extension, stated = gates.extension, config.quantization or {}
    # What states no number here is planned as if it were not quantised.
    bits = 4 if stated.get("load_in_4bit") else 8 if stated.get("load_in_8bit") else stated.get("bits")
    local, held_out, every = config.stage == "local", config.data.held_out, training.held_out_every
    return Work(
        stage=config.stage,
        lengths=tuple(tuple(map(int, parts)) for parts in lengths),
        steps=training.steps,
        batch_documents=training.batch_documents,
        micro_batch=training.micro_batch,
        gate_parameters=sum(parameter.numel() for parameter in trained),
        gate_hidden=hidden,
        gate_inputs=gates.inputs,
        chunk=config.chunk,
        num_processes=num_processes,
        sharding=sharding,
        weight_bits=int(bits) if bits else None,
        logits_chunk=config.soft.chunk,
        checkpointing=config.soft.checkpointing,
        repeats="repeat" in target.sources,
        passes=2 if target.weight == "value_norm_over_hidden" else 1,
        walks=2 if local and target.granularity == "token" else 1,
        continuation=target.continuation_tokens if "continuation" in target.sources else 0,
        lookahead_tokens=extension.num_tokens if isinstance(extension, LookaheadExtension) else 0,
        output_queries=loss.output_queries if local and "layer_output" in loss.terms else None,
        output_ratios=len(loss.keep_ratios),
        prepared=local and config.initial is None,
        held_out=held_out,
        # Before the first step, after the last one, and in between.
        looks=2 + ((training.steps - 1) // every if every else 0) if held_out else 0,
        calibrated=bool(held_out and config.calibration.wanted),
        pack_tokens=config.data.pack_tokens,
        sampled=sampled,
    )

"""Estimates a run's peak memory and time before anything is loaded or trained.

Of the phases of a layer only the largest counts beside what is held all along, since one layer is held at a
time. The formulas are upper estimates of transformers' own decoder layers (`tests/train/test_plan.py`
compares them with a process that was watched); what is not modelled is in the row `process and slack`.

Memory of layer-local training of N tokens a row, E wide, Q query and H KV heads of width D, b bytes a number:

    residual stream   2 N E b                                   and the embeddings: held all along
    input norm        8 N E                                     in float32, then one of:
    attention         N b (E + 4 Q D + 4 H D)                   queries, keys, values, RoPE, output
    targets           N b (E + Q D + 2 H D) + 16 T Q + workspace
    gate              N b (E + Q D + 2 H D) + 4 T (4 E + 6 F)   float32, forward and backward of one document
    feed-forward      N b 2 E + 3 b min(N, chunk) I

and, where they are asked for: the lookahead tokens' attention, the loss term
`layer_output`, a document's KV cache while its continuation is written, the entries of the first statistics,
and (in the host's memory) those of calibration.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from retain.train.calibration.fit import MOST_ENTRIES
from retain.train.local_stage import PREPARED_ENTRIES
from retain.train.run.device import GIB, Device
from retain.train.run.model_shape import ModelShape
from retain.train.run.workload import Work

# Bytes of a process before it holds a tensor of ours: libraries and, on a GPU, the context of CUDA.
PROCESS_BYTES = {"cpu": 0.5 * GIB, "cuda": 0.8 * GIB}
# Share of the activations that an allocator loses to fragments; the lines of those that are held all along.
SLACK = 0.1
STREAM, KEPT = "residual stream", "kept for the backward pass"
# Operations of a gradient, beside those of the pass itself.
BACKWARD = 3.0
# Temporaries of the statistics of attention: blocks of the reference on a CPU (16 MiB until one row alone is
# longer), what the kernels put aside on a GPU.
WORKSPACE = {"cpu": 16.0 * 2**20, "cuda": 64.0 * 2**20}


@dataclass(frozen=True)
class Line:
    """One line of a plan: bytes, and whether they are held all along or only in one phase of a layer."""

    name: str
    num_bytes: float
    about: str
    always: bool = False


@dataclass(frozen=True)
class Plan:
    """Memory and time that a run needs.

    Args:
        shape, work, device: what was planned.
        lines: of memory.
        flops: of the whole run, over all processes.
        flops_per_token: of the steps, mean, by part.
        beside: operations of the run that are no steps', by part.
        host_bytes: what calibration holds, in the first process's own memory.
    """

    shape: ModelShape
    work: Work
    device: Device
    lines: tuple[Line, ...]
    flops: float
    flops_per_token: dict[str, float]
    beside: dict[str, float]
    host_bytes: float

    @property
    def held(self) -> list[Line]:
        """Returns what is held all along."""
        return [line for line in self.lines if line.always]

    @property
    def phase(self) -> Line:
        """Returns the phase in which the most is held."""
        return max((line for line in self.lines if not line.always), key=lambda line: line.num_bytes)

    @property
    def slack(self) -> float:
        """Returns the bytes that are lost to fragments of activations."""
        kept = sum(line.num_bytes for line in self.held if line.name in (STREAM, KEPT))
        return SLACK * (self.phase.num_bytes + kept)

    @property
    def peak_bytes(self) -> float:
        """Returns all that is held all along, the largest phase, and the slack."""
        return sum(line.num_bytes for line in self.held) + self.phase.num_bytes + self.slack

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """Returns what to change, if it does not fit."""
        return tuple(_advice(self))

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device.memory_bytes

    @property
    def seconds(self) -> float | None:
        """Returns the estimated duration; None where no rate is known."""
        if self.device.tflops is None:
            return None
        return self.flops / (self.device.tflops * 1e12 * self.device.efficiency * self.work.num_processes)

    def text(self) -> str:
        """Returns the table that is printed before a run."""
        work, device, largest = self.work, self.device, self.phase
        where = f"each of {work.num_processes} devices" if work.num_processes > 1 else device.name
        host = (
            f"of the host's memory, first process: {work.held_out} documents, up to {MOST_ENTRIES:,} entries "
            "of a head each"
        )
        peak = f"of {_size(device.memory_bytes)} on {device.name}: {_fits(self.fits)}"
        parts = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in self.flops_per_token.items())
        shares = ", ".join(
            f"{name} {value / self.flops:.1%}" for name, value in self.beside.items() if self.flops
        )
        time = "unknown (state plan.tflops, the device's dense rate, for an estimate)"
        if self.seconds is not None:
            time = (
                f"about {_duration(self.seconds)}, if {device.efficiency:.0%} of {device.tflops:.3g} "
                "TFLOP/s are "
                f"reached ({device.rate_from}); the progress bar's own estimate is measured"
            )
        rows = [
            f"plan: {self.shape.name} ({self.shape.parameters / 1e9:.3g} B parameters), stage {work.stage}, "
            f"{work.steps} steps of {work.batch_documents} documents, rows of up to {work.row_tokens:,} "
            f"tokens, on {where}",
            *(_row(line.name, line.num_bytes, line.about) for line in self.held),
            "  and, one at a time:",
            *(
                _row(line.name, line.num_bytes, line.about + " <- the largest" * (line is largest), indent=4)
                for line in self.lines
                if not line.always
            ),
            _row("slack of the allocator", self.slack, f"{SLACK:.0%} of activations"),
            _row("peak", self.peak_bytes, peak),
            _row("calibration, after training", self.host_bytes, host) if self.host_bytes else "",
            f"  GFLOP a token: {parts}; {self.flops / 1e15:,.3f} PFLOP in all",
            f"  of which beside the steps: {shares}" if shares else "",
            f"  time: {time}",
            *(f"  to change: {advice}" for advice in self.advice),
        ]
        return "\n".join(row for row in rows if row)


def _row(name: str, num_bytes: float, about: str, *, indent: int = 2) -> str:
    return f"{' ' * indent}{name:<{44 - indent}}{_size(num_bytes):>12}  {about}"


def _fits(enough: bool) -> str:
    return "fits" if enough else "DOES NOT FIT"


def input_bytes(shape: ModelShape, work: Work) -> int:
    """Bytes of what one layer's gate looks at, of one token."""
    b, E, Q, H, D = shape.dtype_bytes, shape.E, shape.Q, shape.H, shape.D
    of_input = {
        **{"hidden": E * b, "stream": E * b, "queries": Q * D * b, "queries_before": Q * D * b},
        **{"keys": H * D * b, "keys_before": H * D * b, "values": H * D * b, "token_ids": 8},
    }
    return sum(of_input.get(name, 0) for name in work.gate_inputs)


def memory_lines(shape: ModelShape, work: Work, kind: str) -> tuple[Line, ...]:
    """Returns the lines of a plan for a kind of device (`cpu`, `cuda`)."""
    b, E, F, V = shape.dtype_bytes, shape.E, shape.F, shape.V
    queries, entries = shape.Q * shape.D, shape.H * shape.D
    N, T = work.row_tokens, work.document_tokens
    chunk = N if work.chunk is None else min(N, work.chunk)
    seen = N * b * (E + queries + 2 * entries)
    gate = seen + 4.0 * T * (4 * E + 6 * work.gate_hidden)
    # A parameter, its gradient and AdamW's two moments; and the all-reduce's copy of the gradient.
    states = 4 + (1 if work.num_processes > 1 else 0)
    always = [
        *_weight_lines(shape, work),
        Line(
            "gates, gradients, optimiser",
            4.0 * states * work.gate_parameters,
            f"{work.gate_parameters:,} parameters, {states} float32 numbers each",
            always=True,
        ),
        Line("process", PROCESS_BYTES[kind], "libraries, device context", always=True),
    ]
    phases = [
        Line("input norm", 8.0 * N * E, "float32"),
        Line("attention", float(N * b * (E + 4 * queries + 4 * entries)), "q, k, v, RoPE, output"),
        Line("targets", seen + 16.0 * T * shape.Q + WORKSPACE[kind], "statistics of attention, no rows"),
        Line(
            "feed-forward",
            N * b * 2.0 * E + 3.0 * b * chunk * F,
            f"{chunk:,} tokens at a time" if chunk < N else "all tokens at once",
        ),
    ]
    attention, walking = phases[1].num_bytes, max(phase.num_bytes for phase in phases)
    if work.stage == "lookahead":
        rows = 3 * 4.0 * work.lookahead_tokens * T * shape.Q
        about = f"rows of {work.lookahead_tokens} tokens, forward and backward, one layer"
        phases.append(Line("what the lookahead tokens pay", seen + rows, about))
        # The lookahead tokens are few: what they attend to is what is held.
        kept, how = 2.0 * N * b * entries * shape.num_layers, "keys and values of every layer"
    else:
        phases.append(Line("gate, forward and backward", gate, "float32, one document"))
    if work.output_queries is not None:
        whole = max(document + max(branches, default=0) for document, *branches in work.lengths)
        S = min(work.output_queries or whole, whole)
        copied = 4.0 * (2 * whole * entries + queries * E + 4 * S * (queries + E)) + WORKSPACE[kind]
        about = f"keys and values in float32, {S:,} queries at a time"
        phases.append(Line("loss term layer_output", gate + copied, about))
    if work.continuation:
        # The lookahead stage holds such a cache all along.
        cache = 2.0 * (T + work.continuation) * b * entries * shape.num_layers * (work.stage != "lookahead")
        about = "KV cache of one document, all layers"
        phases.append(Line("writing the continuation", attention + cache, about))
    if work.prepared:
        first = sum(document for document, *_ in work.lengths[: work.batch_documents])
        first = min(first, PREPARED_ENTRIES)
        statistics = float(shape.gated * first * (input_bytes(shape, work) + 4 * shape.H))
        about = f"{first:,} entries of every layer, beside a walk; before the first step"
        phases.append(Line("first statistics of the gates", walking + statistics, about))
    if work.stage == "end_to_end":
        # Bytes that the backward pass of one layer needs, its own gradients included.
        one = N * b * (6.0 * E + 8 * queries + 6 * entries + 5 * F)
        kept, how = one * float(shape.num_layers), "every layer"
        if work.checkpointing:
            kept = N * E * b * float(shape.num_layers) + one
            how = "inputs of every layer, and one layer again"
        logits = 4.0 * 4 * min(N, work.logits_chunk) * V + 2.0 * N * E * b
        phases.append(Line("logits", logits, f"{work.logits_chunk:,} at once"))
    if work.stage != "local":
        always.append(Line(KEPT, kept, how, always=True))
    stream = Line(STREAM, 2.0 * N * E * b, f"{N:,} x {E}, and the embeddings", always=True)
    return (*always, stream, *phases)


def _weight_lines(shape: ModelShape, work: Work) -> list[Line]:
    """The frozen weights of one process, and the layers that it puts together where they are sharded."""
    b, shards = shape.dtype_bytes, 1 if work.sharding == "replicated" else work.num_processes
    weights, how = float(shape.parameters * b), f"{8 * b} bits a weight"
    if work.weight_bits is not None:
        # Embeddings and head are left as they are.
        whole = min(2 * shape.E * shape.V, shape.parameters)
        weights = whole * b + (shape.parameters - whole) * work.weight_bits / 8
        how = f"{work.weight_bits} bits a weight, embeddings and head {8 * b}"
    how += f", a share of {shards} ({work.sharding})" if shards > 1 else ""
    lines = [Line("frozen weights", weights / shards, how, always=True)]
    if shards > 1 and work.sharding != "device_map":
        gathered = 2.0 * shape.largest_layer * b
        lines.append(Line("gathered layers", gathered, "the one at work and the next", always=True))
    return lines


def flops_of(shape: ModelShape, work: Work) -> tuple[float, dict[str, float]]:
    """Returns the operations of a whole run, and those per token of a row by part.

    A product of `m x k` and `k x n` counts `2 m k n`. Attention and targets count pairs of a query and an
    entry that it sees, `4 Q D` each: two products (scores and output, or the two passes of the statistics). A
    branch sees its document and itself, no other branch.
    """
    tokens = sum(sum(parts) for parts in work.lengths)
    pairs = sum(t * t / 2 + sum(s * t + s * s / 2 for s in branches) for t, *branches in work.lengths)
    documents = sum(document for document, *_ in work.lengths)
    queries = shape.Q * shape.D
    forward = 2.0 * shape.active * tokens
    attention = 4.0 * queries * pairs * shape.num_layers
    targets = shape.gated * (4.0 * queries * pairs * work.passes + 2.0 * queries * shape.E * documents)
    totals = {
        "projections": forward,
        "attention": attention,
        "targets": targets,
        "second walk": (work.walks - 1) * (forward + attention + targets),
        "gates": 6.0 * work.gate_parameters * documents,
    }
    if work.output_queries is not None:
        seen = sum(
            (t + s) * min(work.output_queries or s or t, s or t)
            for t, *branches in work.lengths
            for s in (0, *branches)
        )
        # The layer as it is, once; of each budget, under its mask, and the way back.
        passes = 1 + work.output_ratios * (1 + BACKWARD)
        totals["layer_output"] = shape.gated * passes * 4.0 * queries * seen
    if work.stage == "end_to_end":
        # The soft pass: forward, again if recomputed, and the gradient of activations (weights are frozen).
        times = 2.0 + work.checkpointing
        totals |= {
            "targets": 0.0,
            "soft pass": times * forward + (times + 0.5) * attention,
            "logits": 2.0 * 4 * shape.E * shape.V * tokens,
        }
    elif work.stage == "lookahead":
        rows = BACKWARD * work.lookahead_tokens
        totals["gates"] = 0.0
        totals["lookahead pass"] = 4.0 * queries * documents * rows * shape.num_layers
        totals["lookahead pass"] += 2.0 * shape.active * rows * len(work.lengths)
    run = work.steps * work.batch_documents / len(work.lengths) * sum(totals.values())
    return run, {name: total / tokens for name, total in totals.items() if total}


def beside_of(shape: ModelShape, work: Work) -> dict[str, float]:
    """Returns the operations of a run that are no steps': part -> over all processes.

    A look at a held-out document is a step's walk without gates. Where the model is sharded, every process
    takes part in calibrating on every document.
    """
    _, per_token = flops_of(shape, work)
    tokens = sum(sum(parts) for parts in work.lengths) / len(work.lengths)
    one = tokens * sum(
        per_token.get(name, 0.0) for name in ("projections", "attention", "targets", "second walk")
    )
    again = work.num_processes if work.sharding in ("fsdp2", "zero3") else 1
    made = {
        "held-out looks": one * work.held_out * work.looks,
        "calibration": one * work.held_out * again * work.calibrated,
    }
    if work.continuation:
        # Remembered: each document's is written once.
        read = work.num_read + work.held_out
        c, t = work.continuation, sum(document for document, *_ in work.lengths) / len(work.lengths)
        pairs = t * t / 2 + c * t + c * c / 2
        attention = 4.0 * shape.Q * shape.D * shape.num_layers * pairs
        made["writing continuations"] = read * (2.0 * shape.active * (t + c) + attention)
    return {name: value for name, value in made.items() if value}


def plan_of(shape: ModelShape, work: Work, device: Device) -> Plan:
    """Plans a run (of `model_shape`, `work_of` and `device_here`)."""
    flops, per_token = flops_of(shape, work)
    beside = beside_of(shape, work)
    # Score, target and observed risk of held-out documents in float32, as they are and as they are fitted.
    held = 2.0 * 3 * 4 * min(work.document_tokens, MOST_ENTRIES) * shape.gated * shape.H * work.held_out
    return Plan(
        shape,
        work,
        device,
        memory_lines(shape, work, device.kind),
        flops + sum(beside.values()),
        per_token,
        beside,
        held if work.calibrated else 0.0,
    )


def _advice(plan: Plan) -> list[str]:
    """Changes that make it fit, cheapest first; each was planned, with its peak."""
    shape, work, device = plan.shape, plan.work, plan.device
    found = _shorter(shape, work)
    if device.float32_tflops and device.tflops and device.float32_tflops > 2 * device.tflops:
        found.append(
            "dtype=float32, or auto: this CPU multiplies "
            f"{device.float32_tflops / device.tflops:,.0f} times faster in it than in half precision"
        )
    if plan.fits:
        return found

    def add_(text: str, model: ModelShape = shape, **changes: Any) -> bool:
        other = plan_of(model, replace(work, **changes), device)
        found.extend([text.format(_size(other.peak_bytes))] * other.fits)
        return other.fits

    smallest: dict[str, Any] = {"micro_batch": 1, "chunk": min(4096, work.chunk or 4096)}
    on_gpu, quantised = device.kind == "cuda", work.weight_bits is not None
    if work.micro_batch > 1:
        add_("training.micro_batch=1: {}", micro_batch=1)
    if work.stage == "end_to_end" and not work.checkpointing:
        add_("soft.checkpointing=true: {}", checkpointing=True)
    if work.chunk is None:
        add_("teacher chunk of 4096 tokens: {}", micro_batch=1, chunk=4096)
    if longest := _longest(plan, smallest):
        found.append(f"data.max_tokens={longest} (with micro_batch=1 and a teacher chunk of 4096 tokens)")
    if shape.dtype_bytes == 4 and not quantised:
        add_("dtype=bfloat16: {}", replace(shape, dtype_bytes=2), **smallest)
    if on_gpu and not quantised:
        add_("weights of 4 bits (quantised): {}", **smallest, weight_bits=4)
    sharded = (
        "weights sharded over %d devices (fsdp2 or zero3, configs/accelerate and configs/deepspeed): {} "
        "each; or device_map=auto over them"
    )
    for devices in (2, 4, 8, 16, 32, 64) if on_gpu and work.sharding == "replicated" else ():
        if add_(sharded % devices, **smallest, sharding="fsdp2", num_processes=devices):
            break
    weights = next(line.num_bytes for line in plan.lines if line.name == "frozen weights")
    return found or [
        f"a smaller model: its weights alone take {_size(weights)}, and no change of lengths, chunks or "
        "sharding over up to 64 devices fits"
    ]


def _shorter(shape: ModelShape, work: Work) -> list[str]:
    """The key to lower where a document with its longest branch is longer than the model takes; a run would
    be refused at the first such document."""
    if shape.positions is None:
        return []
    needed, branch = max(
        (t + max(branches, default=0), max(branches, default=0)) for t, *branches in work.lengths
    )
    if needed <= shape.positions:
        return []
    room = shape.positions - branch
    key = f"lower data.max_tokens to {room}" if room > 0 else "shorten what is read after a document"
    behind = (
        f", {branch:,} of them read after it (data.max_appendix_tokens, target.repeat_chunk or "
        "target.continuation_tokens)"
        if branch
        else ""
    )
    return [f"{key}: a document takes up to {needed:,} tokens{behind}, and the model {shape.positions:,}"]


def _longest(plan: Plan, changes: dict[str, Any]) -> int:
    """The longest document, in whole 256 tokens, with which the plan fits; 0: none, or it is no shorter."""
    longest = plan.work.document_tokens
    low, high = 0, longest // 256
    while low < high:
        middle = (low + high + 1) // 2
        lengths = tuple(_cut(parts, 256 * middle, plan.work.repeats) for parts in plan.work.lengths)
        work = replace(plan.work, lengths=lengths, **changes)
        if plan_of(plan.shape, work, plan.device).fits:
            low = middle
        else:
            high = middle - 1
    return 256 * low if 256 * low < longest else 0


def _cut(parts: tuple[int, ...], longest: int, repeats: bool) -> tuple[int, ...]:
    """The lengths of a document that was cut to so many tokens: what repeats it is shorter by as much."""
    document, *branches = parts
    if document <= longest:
        return parts
    kept = longest / document if repeats else 1.0
    return (longest, *(math.ceil(kept * branch) for branch in branches))


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

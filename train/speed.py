"""Times a training step beside reading its documents, and watches its memory.

    python -m retain.train.speed [--what step|memory] [--tokens 4096] [--device cuda --shape 8b] ...

`step` times a layer-local step (walk, targets, gates forward and backward, clipping, AdamW) beside the frozen
decoder alone, on the same tokens and without its language-model head. It holds the rate, and on a GPU the
peak, against the plan of `retain.train.run.plan`. `memory` measures, in a process of its own for each length,
what a step holds beyond model and gates, and puts the plan beside it.
"""

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import torch

from retain.hf.model.decoder import base_model
from retain.hf.model.gates import new_gates
from retain.hf.model.random_llama import VOCABULARY, LlamaSettings, random_llama
from retain.process import benchmark
from retain.process.benchmark import DTYPES, Benchmark, Column, grid, heading, show
from retain.process.command import status_of
from retain.process.memory import Peak
from retain.process.timing import Case, interleave, quiet, spread, timed
from retain.train.data.document import Document
from retain.train.data.settings import DataSettings
from retain.train.local_stage import LayerLocal
from retain.train.objectives.case import LossSettings
from retain.train.objectives.targets import TargetSettings
from retain.train.recipe import DistillConfig
from retain.train.run.device import GIB, Device, PlanSettings, device_here
from retain.train.run.model_shape import model_shape
from retain.train.run.plan import PROCESS_BYTES, Plan, plan_of
from retain.train.run.schedule import TrainingSettings
from retain.train.run.workload import work_of
from retain.train.teacher import Frozen

# Tokens of the question and answer behind the document, part of the row.
APPENDIX = 64
TEN_MILLION = 10_000_000
LENGTHS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class TrainingSpeedSettings(LlamaSettings):
    """The model, the row, the gate and the clock."""

    tokens: Annotated[int, "of the row: a document and an appendix of 64"] = 4096
    family: Annotated[str, "of the gates"] = "mlp"
    pairs: Annotated[int, "ratios measured"] = 20
    warmup: Annotated[int, "pairs before them that are not counted"] = 2

    least = {**LlamaSettings.least, "tokens": APPENDIX + 64}


# Shapes by name, for whoever has the device: what they change of the defaults.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "8b": {
        **{"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336},
        **{"dtype": "bfloat16", "pairs": 3, "warmup": 1, "tokens": 32768},
    },
}


class Step:
    """One optimiser step, and the decoder alone on the same tokens.

    Args:
        settings: of the benchmark.
    """

    def __init__(self, settings: TrainingSpeedSettings) -> None:
        self.settings = settings
        self.model = random_llama(settings, settings.tokens)
        gates = new_gates(self.model, settings.family, seed=settings.seed).to(settings.device)
        draw = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(VOCABULARY, (settings.tokens,), generator=draw).tolist()
        self.document = Document(tuple(ids[:-APPENDIX]), tuple(ids[-APPENDIX:]))
        self.input_ids = torch.tensor([ids], device=settings.device)
        target, loss = TargetSettings(), LossSettings()
        self.objective = LayerLocal(gates, Frozen(self.model, None, 0), target, loss, seed=settings.seed)
        self.parameters = self.objective.parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.steps = 0

    def prepare(self) -> None:
        """Sets input statistics, floors and biases, as a run does once."""
        self.objective.prepare_([self.document])

    def train(self) -> None:
        """One whole step."""
        self.optimizer.zero_grad()
        self.objective.accumulate_([self.document], self.steps, 1.0)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def read(self) -> Any:
        """The decoder alone."""
        return base_model(self.model)(input_ids=self.input_ids, use_cache=False)

    def plan(self, device: Device) -> Plan:
        """The plan of this step on a device."""
        settings = self.settings
        config = DistillConfig(
            output="",
            data=DataSettings(held_out=0),
            training=TrainingSettings(steps=1, batch_documents=1, micro_batch=1),
        )
        lengths = [(settings.tokens - APPENDIX, APPENDIX)]
        work = work_of(config, self.objective.gates, lengths, 1)
        return plan_of(model_shape(self.model, "random"), work, device)

    def planned_bytes(self) -> float:
        """Returns the planned bytes of this step, without the process itself and the weights."""
        kind = self.settings.device.partition(":")[0]
        plan = self.plan(Device(kind, "", 1.0, None, 0.4, ""))
        weights = next(line.num_bytes for line in plan.lines if line.name == "frozen weights")
        return plan.peak_bytes - weights - PROCESS_BYTES[kind]


def measure_step(settings: TrainingSpeedSettings) -> dict[str, Any]:
    """Pairs of a training step and the decoder alone, alternating."""
    step = Step(settings)
    # Before the peak is watched: the rate of the device is measured on it.
    device = device_here(torch.device(settings.device), DTYPES[settings.dtype], PlanSettings())
    step.prepare()
    read = Case(call=lambda: {"ms": timed(step.read)[1]})
    train = Case(call=lambda: {"ms": timed(step.train)[1]}, beside=read)
    if settings.on_gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
    with quiet(settings.threads, settings.device):
        interleave([read, train], rounds=settings.pairs, warmup=settings.warmup)
    rate = 1e3 * settings.tokens / statistics.median(train.times("ms"))
    found: dict[str, Any] = {
        "ratio": spread(train.over(read, "ms")),
        "read_ms": spread(read.times("ms")),
        "train_ms": spread(train.times("ms")),
        "tokens_per_second": rate,
        "hours_per_10m_tokens": TEN_MILLION / rate / 3600,
    }
    if settings.on_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated(settings.device) / GIB
    plan = step.plan(device)
    assert plan.seconds is not None and device.tflops is not None
    found["plan"] = {
        # The memory of the process itself is no tensor.
        "peak_gib": (plan.peak_bytes - PROCESS_BYTES[device.kind]) / GIB,
        "tokens_per_second": settings.tokens / plan.seconds,
        "efficiency": device.efficiency,
        "tflops": device.tflops,
    }
    return found


def against_plan(record: dict[str, Any]) -> list[str]:
    """Whether a step was as fast, and held no more, than its plan says: a line each."""
    plan, rate = record["plan"], record["tokens_per_second"]
    reached = plan["efficiency"] * rate / plan["tokens_per_second"]
    said = {True: "held", False: "**NOT held**"}
    lines = [
        f"{said[rate >= plan['tokens_per_second']]}: a step as fast as planned: {rate:,.0f} tokens/s, "
        f"{plan['tokens_per_second']:,.0f} planned; {reached:.1%} of the {plan['tflops']:.3g} TFLOP/s of a "
        f"matrix product, {plan['efficiency']:.0%} planned"
    ]
    if "peak_gib" in record:
        lines.append(
            f"{said[record['peak_gib'] <= plan['peak_gib']]}: peak memory as planned: "
            f"{record['peak_gib']:.2f} GiB, {plan['peak_gib']:.2f} planned"
        )
    return lines


def measure_memory(settings: TrainingSpeedSettings) -> dict[str, Any]:
    """Measures the memory of a step beyond model and gates, in a process for each length."""
    rows = [row for tokens in LENGTHS for row in watched(settings, [tokens])]

    def slope(before: dict[str, Any], after: dict[str, Any]) -> float:
        return (after["bytes"] - before["bytes"]) / (after["tokens"] - before["tokens"])

    pieces = [slope(*neighbours) for neighbours in pairwise(rows)]
    return {"rows": rows, "bytes_per_token": slope(rows[0], rows[-1]), "of_each_piece": pieces}


def watched(settings: TrainingSpeedSettings, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of these lengths, one after the other in a process of its own: `{"tokens", "bytes", "planned"}`.

    Raises:
        RuntimeError: that process failed or took too long.
    """
    return MEMORY.watched([replace(settings, tokens=tokens) for tokens in lengths])


def watch(settings: TrainingSpeedSettings) -> dict[str, Any]:
    """In this process: the most that preparing and two steps hold, less what model, gates and libraries held
    before."""
    torch.set_num_threads(settings.threads)
    # Libraries are loaded, thread pools started and pools filled, by a short row.
    short = Step(replace(settings, tokens=min(1024, settings.tokens)))
    short.prepare()
    short.train()
    del short
    step = Step(settings)
    gc.collect()

    peak = Peak(settings.device)
    step.prepare()
    step.train()
    step.train()  # the optimiser's states are there now
    return {"tokens": settings.tokens, "bytes": peak.beyond(), "planned": step.planned_bytes()}


def about(record: dict[str, Any], settings: TrainingSpeedSettings) -> list[str]:
    """The lines above a record's table."""
    model = f"model: Llama, random weights, {settings.described()}; {settings.family} gates"
    return heading(record, f"layer-local training, {record['what']}", model)


def memory_table(record: dict[str, Any], settings: TrainingSpeedSettings) -> list[str]:
    """A record of `memory` as the lines that are printed and kept."""
    columns = (
        *(Column("tokens", "tokens", "d"), Column("step MiB", "bytes", ".1f", 2**20)),
        Column("planned MiB", "planned", ".1f", 2**20),
    )
    pieces = ", ".join(show(piece, ".1f", 1024) for piece in record["of_each_piece"])
    ends = show(record["bytes_per_token"], ".1f", 1024)
    return [
        *about(record, settings),
        *grid(columns, record["rows"]),
        f"KiB a token: {ends} from end to end; between lengths {pieces}",
    ]


def step_table(record: dict[str, Any], settings: TrainingSpeedSettings) -> list[str]:
    """A record of `step` as the lines that are printed and kept."""
    ratio = record["ratio"]
    return [
        *about(record, settings),
        f"row of {settings.tokens} tokens; medians of {settings.pairs} interleaved pairs",
        f"step / decoder alone: {ratio['median']:.3f} (20 % {ratio['p20']:.3f}, 80 % {ratio['p80']:.3f})",
        f"decoder alone {show(record['read_ms'], '.1f')} ms, step {show(record['train_ms'], '.1f')} ms",
        f"{record['tokens_per_second']:,.0f} tokens/s, {record['hours_per_10m_tokens']:.2f} hours for "
        "ten million tokens",
        *against_plan(record),
    ]


training = partial(Benchmark, "retain.train.speed", settings=TrainingSpeedSettings, shapes=SHAPES)
STEP = training("step", measure=measure_step, table=step_table, name="training-step")
MEMORY = training("memory", measure=measure_memory, table=memory_table, watch=watch, name="training-memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that `--what` names."""
    return benchmark.main([STEP, MEMORY], arguments, default="step")


if __name__ == "__main__":
    sys.exit(status_of(main))

"""The benchmark: what a training step costs beside reading the documents, in time and in memory.

    python -m retain.train.speed [--what step|memory] [--tokens 4096] [--device cuda --shape 8b] ...

In: the shape of a random Llama, one document, a gate. Out: a table, and every single time beside it as JSON.
`step` measures the wall time of a layer-local step (walk, targets, gates forward and backward, clipping,
AdamW) over that of the frozen decoder alone, on the same tokens, without its language-model head, and holds
its rate, and on a GPU its peak, against the plan of `retain.train.run.plan`. `memory` measures, in a process
of its own for each length, what a step holds beyond model and gates, and puts the plan beside it.

The one decision taken here: a cost is a ratio of neighbours, as in `retain.eval.speed.scoring`. The two sides
of a pair run one after the other, which of them comes first alternates, and the median is taken over the
pairs' ratios, so that a machine that drifts moves both sides alike.
"""

import argparse
import gc
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from retain.hf.model.decoder import base_model
from retain.hf.model.gates import new_gates
from retain.hf.model.random_llama import VOCABULARY, random_llama
from retain.process.command import status_of
from retain.process.memory import Peak, in_a_process
from retain.process.stopwatch import (
    DTYPES,
    Started,
    clock,
    flags_of,
    heading,
    publish,
    quiet,
    record_of,
    spread_of,
    unfit,
    whole_numbers,
)
from retain.registry import lookup
from retain.train.data.corpora import DataSettings, Document
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

# Of a setting, what the model is made of.
MODEL = ("tokens", "layers", "width", "heads", "kv_heads", "intermediate", "device", "seed")
# Tokens of the question and answer behind the document, part of the row.
APPENDIX = 64
TEN_MILLION = 10_000_000


@dataclass(frozen=True)
class Setting:
    """One benchmark: the model, the row, the gate and the clock.

    Args:
        tokens: of the row: a document and an appendix of 64.
        layers: L.
        width: E.
        heads: Q, query heads, of width `width / heads`.
        kv_heads: H.
        intermediate: width of the feed-forward part.
        family: of the gates.
        threads: CPU threads.
        pairs: ratios measured.
        warmup: pairs before them that are not counted.
        dtype: of weights and activations.
        device: where it runs.
        seed: of weights, gates and tokens.
    """

    tokens: int = 4096
    layers: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 1376
    family: str = "mlp"
    threads: int = 2
    pairs: int = 20
    warmup: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"tokens": APPENDIX + 64, "warmup": 0, "seed": 0, "pairs": 2}
        problems = whole_numbers(self, least)
        if not problems and (self.width % (2 * self.heads) or self.heads % self.kv_heads):
            problems.append(
                f"width {self.width}, {self.heads} heads and {self.kv_heads} KV heads do not divide one "
                "another (heads are of an even width)"
            )
        problems += unfit(self)
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")


# Shapes by name, for whoever has the device: what they change of the defaults.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "8b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "intermediate": 14336,
        "dtype": "bfloat16",
        "pairs": 3,
        "warmup": 1,
        "tokens": 32768,
    },
}


class Step:
    """One optimiser step, and the decoder alone on the same tokens.

    Args:
        setting: of the benchmark.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        own: dict[str, Any] = {name: getattr(setting, name) for name in MODEL}
        self.model = random_llama(dtype=DTYPES[setting.dtype], **own)
        gates = new_gates(self.model, setting.family, seed=setting.seed).to(setting.device)
        draw = torch.Generator().manual_seed(setting.seed)
        ids = torch.randint(VOCABULARY, (setting.tokens,), generator=draw).tolist()
        self.document = Document(tuple(ids[:-APPENDIX]), tuple(ids[-APPENDIX:]))
        self.input_ids = torch.tensor([ids], device=setting.device)
        frozen = Frozen(self.model, None, 0)
        self.chunk = frozen.chunk
        self.objective = LayerLocal(gates, frozen, TargetSettings(), LossSettings(), seed=setting.seed)
        self.parameters = self.objective.parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.steps = 0

    def prepare(self) -> None:
        """What a run does once: input statistics, floors, biases."""
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
        setting = self.setting
        config = DistillConfig(
            output="",
            data=DataSettings(held_out=0),
            training=TrainingSettings(steps=1, batch_documents=1, micro_batch=1),
        )
        lengths = [(setting.tokens - APPENDIX, APPENDIX)]
        gates = self.objective.gates
        work = work_of(config, gates, lengths, 1, inputs=gates.inputs, chunk=self.chunk)
        return plan_of(model_shape(self.model, "random"), work, device)

    def planned_bytes(self) -> float:
        """What the plan says of this step, the process itself and the weights left out."""
        kind = self.setting.device.partition(":")[0]
        plan = self.plan(Device(kind, "", 1.0, None, 0.4, ""))
        weights = next(line.num_bytes for line in plan.lines if line.name == "frozen weights")
        return plan.peak_bytes - weights - PROCESS_BYTES[kind]


def measure_step(setting: Setting) -> dict[str, Any]:
    """Pairs of a training step and the decoder alone, alternating."""
    step, seconds = Step(setting), clock(setting.device)
    # Before the peak is watched: the rate of the device is measured on it.
    device = device_here(torch.device(setting.device), DTYPES[setting.dtype], PlanSettings())
    step.prepare()
    sides: dict[str, Callable[[], Any]] = {"read": step.read, "train": step.train}
    pairs: list[tuple[float, float]] = []
    on_gpu = setting.device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    with quiet(setting.threads):
        for pair in range(-setting.warmup, setting.pairs):
            taken = {}
            for side in ("read", "train") if pair % 2 else ("train", "read"):
                gc.collect()  # what the one before has left is not paid for
                taken[side] = seconds(sides[side])
            if pair >= 0:
                pairs.append((taken["read"], taken["train"]))
    train_s = statistics.median(train for _, train in pairs)
    found: dict[str, Any] = {
        "ratio": spread_of([train / read for read, train in pairs]),
        "read_ms": [1e3 * read for read, _ in pairs],
        "train_ms": [1e3 * train for _, train in pairs],
        "tokens_per_second": setting.tokens / train_s,
        "hours_per_10m_tokens": TEN_MILLION / (setting.tokens / train_s) / 3600,
    }
    if on_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
    plan = step.plan(device)
    assert plan.seconds is not None and device.tflops is not None
    found["plan"] = {
        # What the process itself takes is no tensor.
        "peak_gib": (plan.peak_bytes - PROCESS_BYTES[device.kind]) / GIB,
        "tokens_per_second": setting.tokens / plan.seconds,
        "efficiency": device.efficiency,
        "tflops": device.tflops,
    }
    return found


def against_plan(record: dict[str, Any]) -> list[str]:
    """Whether a step was as fast, and held no more, than its plan says: a line each."""
    plan, rate = record["plan"], record["tokens_per_second"]
    reached = plan["efficiency"] * rate / plan["tokens_per_second"]
    lines = [
        f"{_held(rate >= plan['tokens_per_second'])}: a step as fast as planned: {rate:,.0f} tokens/s, "
        f"{plan['tokens_per_second']:,.0f} planned; {reached:.1%} of the {plan['tflops']:.3g} TFLOP/s of a "
        f"matrix product, {plan['efficiency']:.0%} planned"
    ]
    if "peak_gib" in record:
        lines.append(
            f"{_held(record['peak_gib'] <= plan['peak_gib'])}: peak memory as planned: "
            f"{record['peak_gib']:.2f} GiB, {plan['peak_gib']:.2f} planned"
        )
    return lines


def _held(good: bool) -> str:
    return "held" if good else "**NOT held**"


LENGTHS = (1024, 2048, 4096, 8192)


def measure_memory(setting: Setting) -> dict[str, Any]:
    """What a step holds beyond model and gates, a process for each length."""
    rows = [row for tokens in LENGTHS for row in watched(setting, [tokens])]
    ends = (rows[-1]["bytes"] - rows[0]["bytes"]) / (LENGTHS[-1] - LENGTHS[0])
    pieces = [
        (after["bytes"] - before["bytes"]) / (after["tokens"] - before["tokens"])
        for before, after in zip(rows, rows[1:], strict=False)
    ]
    return {"rows": rows, "bytes_per_token": ends, "of_each_piece": pieces}


def watched(setting: Setting, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of these lengths, one after the other in a process of its own: `{"tokens", "bytes", "planned"}`.

    Raises:
        RuntimeError: that process failed or took too long.
    """
    asked = ["--what", "watch", "--lengths", *map(str, lengths), *flags_of(setting)]
    said = in_a_process("retain.train.speed", asked)
    return [json.loads(line) for line in said[-len(lengths) :]]


def watch(setting: Setting) -> dict[str, Any]:
    """In this process: the most that preparing and two steps hold, less what model, gates and libraries held
    before."""
    torch.set_num_threads(setting.threads)
    # Libraries are loaded, thread pools started and pools filled, by a short row.
    short = Step(replace(setting, tokens=min(1024, setting.tokens)))
    short.prepare()
    short.train()
    del short
    step = Step(setting)
    gc.collect()

    peak = Peak(setting.device)
    step.prepare()
    step.train()
    step.train()  # the optimiser's states are there now
    return {"tokens": setting.tokens, "bytes": peak.beyond(), "planned": step.planned_bytes()}


MEASURES: dict[str, Callable[[Setting], dict[str, Any]]] = {"step": measure_step, "memory": measure_memory}


def benchmark(what: str, setting: Setting, *, command: str = "") -> dict[str, Any]:
    """Run one benchmark.

    Args:
        what: a name in `MEASURES`.
        setting: of the model, the row and the clock.
        command: that a reader would type.

    Returns:
        the record: setting, what was found, where it comes from.

    Raises:
        ValueError: an unknown name.
    """
    measure = lookup(what, MEASURES, what="benchmark")
    started = Started()
    return record_of(what, setting, command, started, measure(setting))


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting = Setting(**{**record["setting"], "device": "cpu"})
    lines = heading(
        record,
        f"layer-local training, {record['what']}",
        f"model: Llama, random weights, {setting.layers} layers, width {setting.width}, {setting.heads} "
        f"query and {setting.kv_heads} KV heads, feed-forward {setting.intermediate}, {setting.dtype}; "
        f"{setting.family} gates",
    )
    if record["what"] == "memory":
        lines.append(f"{'tokens':>8} {'step MiB':>10} {'planned MiB':>12}")
        lines += [
            f"{row['tokens']:>8} {row['bytes'] / 2**20:>10.1f} {row['planned'] / 2**20:>12.1f}"
            for row in record["rows"]
        ]
        pieces = ", ".join(f"{piece / 1024:.1f}" for piece in record["of_each_piece"])
        lines.append(
            f"KiB a token: {record['bytes_per_token'] / 1024:.1f} from end to end; between lengths {pieces}"
        )
    else:
        ratio = record["ratio"]
        lines += [
            f"row of {setting.tokens} tokens; medians of {setting.pairs} interleaved pairs",
            f"step / decoder alone: {ratio['median']:.3f} (20 % {ratio['p20']:.3f}, 80 % {ratio['p80']:.3f})",
            f"decoder alone {statistics.median(record['read_ms']):.1f} ms, step "
            f"{statistics.median(record['train_ms']):.1f} ms",
            f"{record['tokens_per_second']:,.0f} tokens/s, {record['hours_per_10m_tokens']:.2f} hours for "
            "ten million tokens",
        ]
        lines += against_plan(record)
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.train.speed", description="Time a training step, and watch its memory."
    )
    parser.add_argument("--what", default="step", help=f"{', '.join(MEASURES)}; default step")
    parser.add_argument("--shape", default="small", help=f"{', '.join(SHAPES)}; default small")
    for own in fields(Setting):
        flag = f"--{own.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(own.default), default=None, help=f"default {own.default}")
    parser.add_argument("--lengths", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, help="default results/speed/training-WHAT.json; the table lies beside it"
    )
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        changes = {own.name: getattr(given, own.name) for own in fields(Setting)}
        changes = {name: value for name, value in changes.items() if value is not None}
        setting = Setting(**{**lookup(given.shape, SHAPES, what="shape"), **changes})
        if given.what == "watch":  # a process of `memory`
            for tokens in given.lengths or [setting.tokens]:
                print(json.dumps(watch(replace(setting, tokens=tokens))), flush=True)
            return 0
        command = shlex.join(["python", "-m", "retain.train.speed", *typed])
        record = benchmark(given.what, setting, command=command)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output or Path("results/speed") / f"training-{given.what}.json")
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

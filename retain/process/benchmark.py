"""A benchmark as a command: settings are options, what was measured becomes a record and a printed table.

One function writes what tells a reader whether to believe a time: date, machine, load before and after,
versions, commit, command. No benchmark can leave it out.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from retain.process.memory import in_a_process
from retain.process.provenance import code_state, environment, now, write_json, write_text
from retain.registry import lookup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESULTS = Path("results/speed")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every benchmark has; a subclass adds its own. Each is an option of the command.

    Args:
        threads: CPU threads.
        dtype: of weights and cache, a name in `DTYPES`.
        device: where it runs.
        seed: of all random numbers.
    """

    threads: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    # The smallest value of a whole number where it is not 1.
    least: ClassVar[Mapping[str, int]] = {"seed": 0, "warmup": 0, "rounds": 2, "pairs": 2}

    def __post_init__(self) -> None:
        problems = [
            f"{name} is a whole number of at least {self.least.get(name, 1)}, got {value}"
            for name, value in vars(self).items()
            if type(value) is int and value < self.least.get(name, 1)
        ]
        ratio = getattr(self, "keep_ratio", 1)
        if not 0 < ratio <= 1:
            problems.append(f"keep_ratio is kept / seen, above 0 and at most 1, got {ratio}")
        problems += self.problems()
        if self.dtype not in DTYPES:
            problems.append(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            problems.append(f"device is cpu or cuda, got {self.device!r}")
        elif kind == "cuda" and not torch.cuda.is_available():
            problems.append(f"device {self.device!r} is not there: torch sees no CUDA device; take cpu")
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")

    def problems(self) -> list[str]:
        """The problems of a benchmark's own settings."""
        return []

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on CUDA."""
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Args:
        module: that runs it, as behind `python -m`.
        what: its name behind `--what`.
        about: its help.
        settings: class of its settings.
        measure: settings to results.
        table: a record to the lines that are printed and kept.
        watch: settings to what is measured in a process of its own (`watched`).
        shapes: named defaults, behind `--shape`.
        output: where its record lies by default; the table lies beside it.
    """

    module: str
    what: str
    about: str
    settings: type[Any]
    measure: Callable[[Any], Record]
    table: Callable[[Record], list[str]]
    watch: Callable[[Any], Any] | None = None
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    output: Path | None = None

    def record(self, settings: Any, command: str = "") -> Record:
        """Measure, and return the record: date, command, settings, results, machine, commit."""
        date, load = now(), os.getloadavg()[0]
        found = self.measure(settings)
        device = settings.device
        if settings.on_gpu:
            device = f"{device} ({torch.cuda.get_device_name(device)})"
        machine = environment(device, settings.threads)
        return {
            "what": self.what,
            "date": date,
            "command": command,
            "setting": asdict(settings),
            **found,
            "environment": {**machine, "load_before": load, "load_after": os.getloadavg()[0]},
            "code": code_state(Path(__file__).parent),
        }

    def text(self, record: Record) -> str:
        """The table of a record."""
        return "\n".join([*self.table(record), ""])

    def watched(self, settings: Sequence[Any]) -> list[Any]:
        """The answers of `watch`, from one process whose allocator gives back what is freed.

        Raises:
            RuntimeError: that process failed or took too long.
        """
        asked = json.dumps([asdict(one) for one in settings])
        said = in_a_process(self.module, ["--what", self.what, "--watch", asked])
        return [json.loads(line) for line in said[-len(settings) :]]

    def run(self, arguments: Sequence[str], command: str) -> None:
        """Parse the options, measure, print the table, and write both."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module} --what {self.what}")
        parser.description = self.about
        add_options(parser, self.settings)
        if self.shapes:
            parser.add_argument("--shape", default=next(iter(self.shapes)), help=", ".join(self.shapes))
        parser.add_argument("--watch", type=json.loads, default=None, help=argparse.SUPPRESS)
        output = self.output or RESULTS / f"{self.what}.json"
        parser.add_argument(
            "--output", type=Path, default=output, help=f"default {output}; the table lies beside it"
        )
        given = vars(parser.parse_args(arguments))
        output, asked = given.pop("output"), given.pop("watch")
        if self.watch is not None and asked is not None:
            for one in asked:
                print(json.dumps(self.watch(self.settings(**one))), flush=True)
            return
        shape = lookup(given.pop("shape"), self.shapes, what="shape") if self.shapes else {}
        record = self.record(self.settings(**{**shape, **given}), command)
        text = self.text(record)
        print(text, end="")
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, record)
        write_text(output.with_suffix(".txt"), text)
        print(f"written: {output}, {output.with_suffix('.txt')}")


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """An option for each setting; one that is not typed is absent from what is parsed."""
    for own in fields(settings):
        default: Any = own.default
        how: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            how = {"type": str, "nargs": "+"}
            default = " ".join(default)
        flag = f"--{own.name.replace('_', '-')}"
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"default {default}", **how)


def main(
    benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None = None, *, default: str | None = None
) -> int:
    """Run the benchmark that `--what` names.

    Args:
        benchmarks: of one module.
        arguments: of the command line.
        default: the benchmark without `--what`; None: there is none.

    Returns:
        the exit status.
    """
    typed = sys.argv[1:] if arguments is None else list(arguments)
    module = benchmarks[0].module
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", add_help=not {"--what"} & {word[:6] for word in typed}, allow_abbrev=False
    )
    parser.add_argument(
        "--what",
        default=default,
        required=default is None,
        help="; ".join(f"{one.what}: {one.about}" for one in benchmarks) + " Each has options of its own.",
    )
    what, rest = parser.parse_known_args(typed)
    try:
        benchmark = lookup(what.what, {one.what: one for one in benchmarks}, what="benchmark")
        benchmark.run(rest, shlex.join(["python", "-m", module, *typed]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def heading(record: Record, title: str, *about: str) -> list[str]:
    """The lines above a record's table, an empty one last.

    Args:
        record: of `Benchmark.record`.
        title: what was measured.
        about: lines about its setting.
    """
    machine, code = record["environment"], record["code"]
    named = {name: machine["versions"].get(name) for name in ("torch", "triton", "transformers")}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    commit = f"{code['commit'] or 'none'}, {'clean' if code['clean'] else 'NOT clean: scratch, no evidence'}"
    return [
        f"{title} ({record['date']})",
        *about,
        f"device: {machine['device']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['threads_per_worker']} threads; load {machine['load_before']:.2f} before, "
        f"{machine['load_after']:.2f} after",
        f"versions: python {machine['python']}, {versions}; commit {commit}",
        f"command: {record['command']}",
        "",
    ]


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their columns, the first to the left and the others to the right.

    A row with fewer cells is one that failed: its last cell is a text, which takes the room that it needs.
    """
    whole = [row for row in (columns, *rows) if len(row) == len(columns)]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    widths[0] = max(len(row[0]) for row in (columns, *rows))
    lines = []
    for row in (columns, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)]
        if len(row) < len(columns):
            cells[-1] = row[-1]
        cells[0] = f"{row[0]:<{widths[0]}}"
        lines.append(" ".join(cells).rstrip())
    return lines


def show(value: Mapping[str, Any] | float | None, form: str = ".3f", *, unit: float = 1.0) -> str:
    """A number, or the median of a spread; `-` for None.

    Example:
        >>> show({"median": 3 * 2**20}, ".1f", unit=2**20)
        '3.0'
    """
    number = value["median"] if isinstance(value, Mapping) else value
    return "-" if number is None else f"{number / unit:{form}}"


def show_spread(spread: Mapping[str, Any] | None, form: str = ".3f") -> str:
    """A median, with the 20th and 80th percentile; `-` for None."""
    if spread is None:
        return "-"
    low, middle, high = (f"{spread[key]:{form}}" for key in ("p20", "median", "p80"))
    return f"{middle} ({low}..{high})"

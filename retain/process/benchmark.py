"""A benchmark as a command: settings are options, what was measured becomes a record and a printed table.

Every record holds what a time is judged by: date, machine, load before and after, versions, commit, command.
"""

import argparse
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import torch

from retain.process.memory import in_a_process
from retain.process.provenance import code_state, environment, now, write_json, write_text
from retain.registry import lookup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESULTS = Path("results/speed")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every benchmark has; a subclass adds its own.

    Each is an option of the command, and the text of its annotation is the option's help.
    """

    threads: Annotated[int, "CPU threads"] = 2
    dtype: Annotated[str, "of weights and cache: float32, bfloat16 or float16"] = "float32"
    device: Annotated[str, "where it runs: cpu, cuda, cuda:1, ..."] = "cpu"
    seed: Annotated[int, "of all random numbers"] = 0

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

    def problems(self) -> Iterable[str]:
        """The problems of a benchmark's own settings."""
        return ()

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on CUDA."""
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Args:
        module: that runs it, as behind `python -m`.
        what: its name behind `--what`.
        settings: class of its settings.
        measure: settings to results.
        table: a record and its settings to the lines that are printed and kept.
        watch: settings to a result measured in a process of its own (`watched`).
        shapes: named defaults, behind `--shape`.
        name: of the record's file; empty: `what`.
    """

    module: str
    what: str
    settings: type[Any]
    measure: Callable[[Any], Record]
    table: Callable[[Record, Any], list[str]]
    watch: Callable[[Any], Any] | None = None
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""

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
        """The table of a record, which may be of a device that is not here."""
        settings = self.settings(**{**record["setting"], "device": "cpu"})
        return "\n".join([*self.table(record, settings), ""])

    def watched(self, settings: Sequence[Any]) -> list[Any]:
        """The answers of `watch`, from one process whose allocator gives back what is freed.

        Raises:
            RuntimeError: that process failed or took too long.
        """
        asked = json.dumps([asdict(one) for one in settings])
        lines = in_a_process(self.module, ["--what", self.what, "--watch", asked])
        return [json.loads(line) for line in lines[-len(settings) :]]

    def parser(self) -> argparse.ArgumentParser:
        """The options: one for each setting; those that are not typed are absent from what is parsed."""
        about = (inspect.getdoc(self.measure) or "").partition("\n")[0]
        parser = argparse.ArgumentParser(f"python -m {self.module} --what {self.what}", description=about)
        hints = get_type_hints(self.settings, include_extras=True)
        for own in fields(self.settings):
            default: Any = own.default
            how: dict[str, Any] = {"type": type(default)}
            if isinstance(default, bool):
                how = {"action": argparse.BooleanOptionalAction}
            elif isinstance(default, tuple):
                how, default = {"type": str, "nargs": "+"}, " ".join(default)
            help_text = f"{hints[own.name].__metadata__[0]}; default {default if default != '' else 'empty'}"
            flag = f"--{own.name.replace('_', '-')}"
            parser.add_argument(flag, default=argparse.SUPPRESS, help=help_text.replace("%", "%%"), **how)
        if self.shapes:
            parser.add_argument("--shape", default=next(iter(self.shapes)), help=", ".join(self.shapes))
        parser.add_argument("--watch", type=json.loads, help=argparse.SUPPRESS)
        output = RESULTS / f"{self.name or self.what}.json"
        about_output = f"default {output}; the table lies beside it"
        parser.add_argument("--output", type=Path, default=output, help=about_output)
        return parser

    def run(self, arguments: Sequence[str], command: str) -> None:
        """Parse the options, measure, print the table, and write both."""
        given = vars(self.parser().parse_args(arguments))
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


def main(
    benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None = None, *, default: str | None = None
) -> int:
    """Run the benchmark that `--what` names, by default `default`, and return the exit status."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    module = benchmarks[0].module
    # The help is that of the benchmark, if one is named.
    named = default is not None or any(word.startswith("--what") for word in typed)
    parser = argparse.ArgumentParser(f"python -m {module}", add_help=not named, allow_abbrev=False)
    known = {one.what: one for one in benchmarks}
    about = f"benchmark: {', '.join(known)}; each has options of its own"
    parser.add_argument("--what", default=default, required=default is None, help=about)
    what, rest = parser.parse_known_args(typed)
    try:
        benchmark = lookup(what.what, known, what="benchmark")
        benchmark.run(rest, shlex.join(["python", "-m", module, *typed]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def heading(record: Record, title: str, *about: str) -> list[str]:
    """The lines above a record's table, an empty one last; `about` are lines about its setting."""
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


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: above it.
        key: of the value in a row; `a.b` is `b` inside of `a`. Nothing there is shown as `-`.
        form: of a number, or of the median of a spread.
        unit: that numbers are divided by.
        wide: whether the 20th and 80th percentile of a spread stand beside its median.
    """

    title: str
    key: str
    form: str = ".3f"
    unit: int = 1
    wide: bool = False

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of a row's value."""
        value: Any = row
        for part in self.key.split("."):
            value = value.get(part) if value else None
        if value is None or isinstance(value, str):
            return "-" if value is None else value
        median = show(value, self.form, self.unit)
        return f"{median} ({value['p20']:{self.form}}..{value['p80']:{self.form}})" if self.wide else median


def grid(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows under the titles of their columns, the first column to the left and the others to the right.

    Of a row that `failed` there are the first cells, and why.
    """
    lines, reasons = [[column.title for column in columns]], [""]
    for row in rows:
        reasons.append(row.get("failed") or "")
        known = [*takewhile(row.__contains__, (column.key for column in columns))] if reasons[-1] else columns
        lines.append([column.cell(row) for column in columns[: len(known)]])
    first, *widths = (max(map(len, cells)) for cells in zip_longest(*lines, fillvalue=""))
    return [
        " ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths), reason]).rstrip()
        for line, reason in zip(lines, reasons, strict=True)
    ]


def show(value: Mapping[str, Any] | int | float, form: str = ".3f", unit: int = 1) -> str:
    """A number, or the median of a spread."""
    number = value["median"] if isinstance(value, Mapping) else value
    return f"{number if unit == 1 else number / unit:{form}}"

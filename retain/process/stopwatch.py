"""How the benchmarks of speed measure and report: a quiet process, a clock, a spread, a headed record.

In: a setting (a frozen dataclass with `threads`, `dtype` and `device`) and what was measured with it. Out:
the record as JSON, and beside it the text that was printed. The one decision taken here: whatever tells a
reader whether to believe a time (date, machine, load before and after, versions, commit, command) is written
by one function, so that no benchmark can leave it out.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from retain.process.provenance import code_state, environment, now, write_json, write_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def whole_numbers(setting: Any, least: Mapping[str, int]) -> list[str]:
    """What is wrong with the whole numbers of a setting: each is at least 1, or what `least` says."""
    return [
        f"{name} is a whole number of at least {least.get(name, 1)}, got {value}"
        for name, value in vars(setting).items()
        if isinstance(value, int) and value < least.get(name, 1)
    ]


def unfit(setting: Any) -> list[str]:
    """What is wrong with the dtype and the device of a setting."""
    problems = []
    if setting.dtype not in DTYPES:
        problems.append(f"dtype is one of {', '.join(DTYPES)}, got {setting.dtype!r}")
    kind = setting.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        problems.append(f"device is cpu or cuda, got {setting.device!r}")
    elif kind == "cuda" and not torch.cuda.is_available():
        problems.append(f"device {setting.device!r} is not there: torch sees no CUDA device; take cpu")
    return problems


def add_settings(parser: argparse.ArgumentParser, defaults: Any) -> None:
    """An option for each field of a setting, given as its class or an instance."""
    for own in fields(defaults):
        flag = f"--{own.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(own.default), default=own.default, help=f"default {own.default}")


def flags_of(setting: Any) -> list[str]:
    """A setting as the options of `add_settings`: what another process is started with."""
    return [f"--{own.name.replace('_', '-')}={getattr(setting, own.name)}" for own in fields(setting)]


def synchronise(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def clock(device: str) -> Callable[[Callable[[], Any]], float]:
    """A function that times a call, in seconds."""

    def seconds(run: Callable[[], Any]) -> float:
        synchronise(device)
        start = time.perf_counter()
        result = run()
        synchronise(device)
        end = time.perf_counter()
        del result  # freed after the clock has stopped
        return end - start

    return seconds


@contextmanager
def quiet(threads: int) -> Iterator[None]:
    """So many threads, no gradients and no garbage collection; what was before is put back."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, and 5th, 20th, 80th and 95th percentile, of at least two values."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"median": statistics.median(values), **{f"p{5 * (k + 1)}": cuts[k] for k in (0, 3, 15, 18)}}


@dataclass(frozen=True)
class Started:
    """When a benchmark began, and how busy the machine was then."""

    date: str = field(default_factory=now)
    load: float = field(default_factory=lambda: os.getloadavg()[0])


def record_of(
    what: str, setting: Any, command: str, started: Started, found: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a benchmark that is over: what was found, with all that tells whether to believe it."""
    device = setting.device
    if device.startswith("cuda"):
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    machine = environment(device, setting.threads)
    return {
        "what": what,
        "date": started.date,
        "command": command,
        "setting": asdict(setting),
        **found,
        "environment": {**machine, "load_before": started.load, "load_after": os.getloadavg()[0]},
        "code": code_state(Path(__file__).parent),
    }


def heading(record: Mapping[str, Any], title: str, *about: str) -> list[str]:
    """The lines that stand above a record's table, an empty one last.

    Args:
        record: of `record_of`.
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


def publish(record: Mapping[str, Any], text: str, output: Path) -> None:
    """Print a record's text, and write both: the record as JSON, the text beside it."""
    print(text, end="")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, record)
    write_text(output.with_suffix(".txt"), text)
    print(f"written: {output}, {output.with_suffix('.txt')}")

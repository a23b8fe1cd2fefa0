"""The benchmark beside the field's main library (kvpress) and plain transformers: same model, prompt, budget.

    python -m retain.eval.speed.peers --peer-python PEER/bin/python [--policies snapkv,adakv]
    [--keep-ratios 0.2] [--batches 1] [--tokens 2048] [--device cpu|cuda] [--output PATH]

In: what `retain.eval.speed.serving` takes, of policies those that the library has too, and the interpreter
of an environment where it is installed. Out: one table, and every single number beside it as JSON: time to
first token and of a decoded one, peak memory, and bytes of the cache, here and there. Whether memory is freed
or only simulated is measured, on both sides alike: by the bytes of storage behind the cache once the prompt
is read. Without the library one line says so, and what is here is measured alone.

The one decision taken here: each side is held against plain transformers *in its own process*, its neighbour
in time, since its environment has another transformers; rounds of the two processes alternate, and `ours /
theirs` is the median of ratios within a round. Each life stands alone: the one process waits while the
other runs.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from retain.eval.speed.long import PLAIN
from retain.eval.speed.peer import INSTALL, LIBRARY, PRESSES, Peer, write_exchange
from retain.eval.speed.serving import (
    DENSE,
    Bench,
    Setting,
    Side,
    over_dense,
    round_of,
    watched,
)
from retain.eval.speed.table import show_median, show_mib, show_spread, spread_and_all
from retain.hf.intercept.attach import attach
from retain.process import memory as resident
from retain.process.command import status_of
from retain.process.stopwatch import Started, add_settings, heading, publish, quiet, record_of

OURS, TRANSFORMERS = "retain", "transformers"
# What the sides that are transformers' own are called.
NAMED = {PLAIN: "DynamicCache, here", DENSE: "DynamicCache of as many"}
# Storage of so much of what all entries would take: nothing was freed to speak of.
SIMULATED = 0.95
# Storage of at most so much of what was asked for: freed, with room for what is decoded and for tables.
FREED = 1.25
ABSENT = f"{LIBRARY}: not compared, "


@dataclass
class Foreign:
    """One of theirs, and what was found of it.

    Args:
        policy: what we call it; `plain` for transformers without a press.
        keep_ratio: kept / seen that was asked for.
        name: what they call it.
        lives: answers of the other side, by round; of `plain` none, which lives beside each of the others.
        beside: by round, the life of their plain transformers next to it; only where there are both.
        peak: answer of the watched life; None where memory was not watched.
        failed: why it was given up; empty: it was not.
    """

    policy: str
    keep_ratio: float
    name: str
    lives: dict[int, dict[str, Any]] = field(default_factory=dict)
    beside: dict[int, dict[str, Any]] = field(default_factory=dict)
    peak: dict[str, Any] | None = None
    failed: str = ""


def known(setting: Setting) -> Setting:
    """The setting with policies that both have; by default all of those.

    Raises:
        ValueError: a policy that the library has not.
    """
    if not setting.policies:
        names = {own.name: getattr(setting, own.name) for own in fields(Setting)}
        return Setting(**{**names, "policies": ",".join(PRESSES)})
    for entry in setting.entries():
        if entry.policy != DENSE and (entry.policy not in PRESSES or entry.overrides):
            raise ValueError(
                f"benchmark: policy {entry.typed!r} has no counterpart in {LIBRARY} here: take, as it ships, "
                f"one of {', '.join(PRESSES)}."
            )
    return setting


def absent(python: str | None, folder: Path) -> str:
    """Why there is nothing to compare with, in one line; empty: there is."""
    if python is None:
        return f"{ABSENT}no --peer-python was given ({INSTALL})"
    with Peer(python, folder) as peer:
        if peer.versions().get(LIBRARY) is None:
            return f"{ABSENT}it is not installed in the environment of {python} ({INSTALL})"
    return ""


def ask_round(
    bench: Bench, peer: Peer, plain: Foreign, foreign: Sequence[Foreign], batch: int, turn: int
) -> None:
    """A life of each of theirs, each with one of their plain transformers next to it, while that can."""
    start = turn % max(1, len(foreign))
    for one in (*foreign[start:], *foreign[:start]):
        if one.failed:
            continue
        kept, found = int(one.keep_ratio * bench.setting.tokens), {}
        for who in (one, plain) if turn % 2 else (plain, one):
            if not who.failed:
                try:
                    found[who.policy] = peer.life(PRESSES.get(who.policy), kept, batch)
                except RuntimeError as error:
                    who.failed = str(error)
        if turn >= 0 and one.policy in found:
            one.lives[turn] = found[one.policy]
            if PLAIN in found:
                one.beside[turn] = found[PLAIN]


def watch_theirs(bench: Bench, python: str, folder: Path, foreign: Sequence[Foreign], batch: int) -> None:
    """On a CPU: the peak of each, in one more process whose allocator gives back what is freed."""
    with Peer(python, folder, environment=resident.GIVES_BACK) as peer:
        for one in foreign:
            if one.failed:
                continue
            kept, press = int(one.keep_ratio * bench.setting.tokens), PRESSES.get(one.policy)
            peer.life(press, kept, batch)
            one.peak = peer.life(press, kept, batch, watch=True)


def measure(bench: Bench, python: str | None, folder: Path, *, memory: bool) -> list[dict[str, Any]]:
    """Rows of both, at every batch size."""
    setting, rows = bench.setting, []
    on_gpu = setting.device.startswith("cuda")
    watches = memory and not on_gpu and resident.measurable()
    peaks = {(p["policy"], p["keep_ratio"], p["batch"]): p for p in watched(setting)} if watches else {}
    with ExitStack() as stack:
        peer = None if python is None else stack.enter_context(Peer(python, folder))
        stack.enter_context(attach(bench.model))
        stack.enter_context(quiet(setting.threads))
        for batch in setting.sizes:
            sides = bench.sides()
            bench.try_out(sides, batch)
            plain, *others = sides
            theirs = Foreign(PLAIN, 1.0, "DynamicCache, there")
            foreign = [
                Foreign(entry.policy, ratio, str(PRESSES[entry.policy]))
                for ratio in setting.ratios
                for entry in setting.entries()
                if peer is not None and entry.policy != DENSE
            ]
            for turn in range(-setting.warmup, setting.rounds):
                round_of(bench, sides, batch, turn, stages=False)
                if peer is not None:
                    ask_round(bench, peer, theirs, foreign, batch, turn)
            for side in sides:
                if watches:
                    peak = peaks[side.policy, side.keep_ratio, batch]
                    side.prefill_peak, side.decode_peak = peak["prefill"], peak["decode"]
            rows.append(_own_row(plain, batch))
            if foreign and python is not None and watches:
                watch_theirs(bench, python, folder, [theirs, *foreign], batch)
            # What all entries take, as whichever of ours could read the prompt says.
            full = max((side.bytes.get("full", 0) for side in sides), default=0)
            if foreign:
                lives = [life for one in foreign for life in one.beside.values()]
                rows.append(_row(theirs, lives, full, batch, None))
            rows += [_own_row(side, batch) | over_dense(side, sides) for side in others]
            ours = {(side.policy, side.keep_ratio): side for side in others}
            rows += [
                _row(one, list(one.lives.values()), full, batch, ours[one.policy, one.keep_ratio])
                for one in foreign
            ]
    return rows


def memory_of(allocated: int, full: int, keep_ratio: float) -> str:
    """What is true of a cache's memory behind the prompt: `full` (nothing was asked), `simulated` (as much
    storage as before), `freed` (about what was asked for), or `partly freed`.

    Args:
        allocated: bytes of the storage behind the cache, as it is, whatever the cache says that it holds.
        full: bytes of the keys and values of all that was seen.
        keep_ratio: that was asked for.
    """
    if keep_ratio >= 1:
        return "full"
    if allocated >= SIMULATED * full:
        return "simulated"
    return "freed" if allocated <= FREED * keep_ratio * full else "partly freed"


def _own_row(side: Side, batch: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "library": TRANSFORMERS if side.policy in NAMED else OURS,
        "policy": side.policy,
        "name": NAMED.get(side.policy, side.policy),
        "keep_ratio": side.keep_ratio,
        "batch": batch,
        "failed": side.failed,
    }
    if side.failed:
        return row
    held, allocated, full = (side.bytes[name] for name in ("held", "allocated", "full"))
    return row | {
        "ttft_ms": spread_and_all(side.ttft_ms),
        "token_ms": spread_and_all(side.token_ms),
        "ttft_over_plain": spread_and_all(side.ttft_over_plain),
        "token_over_plain": spread_and_all(side.token_over_plain),
        "peak_bytes": {"prefill": side.prefill_peak, "decode": side.decode_peak},
        "cache_bytes": {"held": held, "allocated": allocated, "full": full, "beside": 0},
        "memory": "full" if side.policy in NAMED else memory_of(allocated, full, side.keep_ratio),
    }


def _row(
    one: Foreign, lives: Sequence[dict[str, Any]], full: int, batch: int, ours: Side | None
) -> dict[str, Any]:
    """A row of theirs.

    Args:
        one: whose.
        lives: of it, over all rounds.
        full: bytes of all entries, as our side says: theirs may have no plain life that could.
        batch: prompts read at once.
        ours: the same policy here; None of `plain`.
    """
    row = {
        "library": TRANSFORMERS if one.policy == PLAIN else LIBRARY,
        "policy": one.policy,
        "name": one.name,
        "keep_ratio": one.keep_ratio,
        "batch": batch,
        "failed": one.failed,
    }
    last = lives[-1] if lives else one.peak
    for beside in one.beside.values():
        full = beside["bytes_held"]
    if one.failed:
        return row
    if last is None or not full:
        return {
            **row,
            "failed": "never measured" if last is None else "nothing that keeps all to compare with",
        }
    times: dict[str, Any] = {}
    peak = one.peak or last
    for what in ("ttft_ms", "token_ms"):
        ratios = [one.lives[turn][what] / plain[what] for turn, plain in one.beside.items()]
        times[what] = spread_and_all([life[what] for life in lives])
        times[what.replace("_ms", "_over_plain")] = spread_and_all(ratios)
        if ours is not None and not ours.failed:
            own = zip(ours.turns, getattr(ours, what), strict=True)
            ratios = [taken / one.lives[turn][what] for turn, taken in own if turn in one.lives]
            times[what.replace("_ms", "_ours_over_theirs")] = spread_and_all(ratios)
    return row | {
        **times,
        "peak_bytes": {"prefill": peak["prefill_peak"], "decode": peak["decode_peak"]},
        "cache_bytes": {
            "held": last["bytes_held"],
            "allocated": last["bytes_allocated"],
            "full": full,
            "beside": last["bytes_beside"],
        },
        "memory": memory_of(last["bytes_allocated"], full, one.keep_ratio),
    }


def benchmark(
    setting: Setting, python: str | None, command: str = "", *, memory: bool = True
) -> dict[str, Any]:
    """Measure both sides, and return the record.

    Args:
        setting: of the benchmark.
        python: interpreter of the library's environment; None: there is none.
        command: that a reader would type.
        memory: whether to watch memory on a CPU, in processes of their own.

    Raises:
        ValueError: a policy that only we have, no such interpreter, or what `speed_serving` refuses.
        RuntimeError: the other process failed.
    """
    setting, started = known(setting), Started()
    bench = Bench.of(setting)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        how: dict[str, Any] = {"threads": setting.threads, "dtype": setting.dtype, "device": setting.device}
        if python is not None:
            write_exchange(folder, bench.model, bench.ids_BT, tokens=setting.tokens, **how)
        missing = absent(python, folder)
        there: dict[str, Any] = {}
        if not missing and python is not None:
            with Peer(python, folder) as peer:
                there = peer.versions()
        rows = measure(bench, None if missing else python, folder, memory=memory)
    found = {"peer": {"python": python and os.path.basename(python), "versions": there, "absent": missing}}
    return record_of("peers", setting, command, started, {**found, "rows": rows})


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting, peer, rows = record["setting"], record["peer"], record["rows"]
    there = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
    lines = heading(
        record,
        f"serving, beside {LIBRARY} and plain transformers",
        f"model: {setting['model']}; prompts of {setting['tokens']:,} random tokens, {setting['steps']} "
        f"decoded behind them; {setting['rounds']} rounds; {setting['dtype']}",
        f"theirs: {there}" if there else peer["absent"],
    )
    width = max(len("method"), *(len(row["name"]) for row in rows))
    head = (
        f"{'library':<12} {'method':<{width}} {'keep':>5} {'first token ms':>25} {'/ plain':>8} "
        f"{'token ms':>22} {'/ plain':>8} {'/ dense':>7} {'peak MiB':>9} {'held MiB':>9} "
        f"{'allocated':>9} {'of full':>8} {'memory':>12} "
        f"{'ours/theirs: first':>18} {'token':>7}"
    )
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += [f"batch {batch}", head]
        lines += [_line(row, width) for row in rows if row["batch"] == batch] + [""]
    lines += [
        "median (20 % .. 80 %) over rounds; / plain: of ratios to transformers' own cache next to it, in the "
        "same process; / dense: within a round, to transformers' own cache of as many entries, here.",
        "held: MiB of keys and values behind the prompt, as the cache counts them; allocated: of the storage",
        "behind them, each counted once, and over what all keys and values take. simulated: evicted entries",
        f"stay, at least {SIMULATED:.0%} is allocated; freed: at most {FREED:g} times what was asked for",
        "(room for what is decoded, positions, tables); partly freed: something between.",
    ]
    return "\n".join([*lines, ""])


def _line(row: dict[str, Any], width: int) -> str:
    start = f"{row['library']:<12} {row['name']:<{width}} {row['keep_ratio']:>5g}"
    if row["failed"]:
        return f"{start} failed: {row['failed']}"
    held, allocated, full = (row["cache_bytes"][name] for name in ("held", "allocated", "full"))
    peak = row["peak_bytes"]["prefill"]
    return (
        f"{start} {show_spread(row['ttft_ms'], 1):>25} {show_median(row['ttft_over_plain']):>8} "
        f"{show_spread(row['token_ms'], 2):>22} {show_median(row['token_over_plain']):>8} "
        f"{show_median(row.get('token_over_dense')):>7} "
        f"{show_mib(peak):>9} {held / 2**20:>9.2f} {allocated / 2**20:>9.2f} {allocated / full:>8.1%} "
        f"{row['memory']:>12} {show_median(row.get('ttft_ours_over_theirs')):>18} "
        f"{show_median(row.get('token_ours_over_theirs')):>7}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.eval.speed.peers",
        description=f"Time and weigh policies beside {LIBRARY} and plain transformers.",
    )
    add_settings(parser, Setting)
    parser.add_argument("--peer-python", help=f"interpreter of an environment where {LIBRARY} is installed")
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that watch memory")
    parser.add_argument("--output", type=Path, default=Path("results/speed/peers.json"))
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{own.name: getattr(given, own.name) for own in fields(Setting)})
        command = shlex.join(["python", "-m", "retain.eval.speed.peers", *typed])
        record = benchmark(setting, given.peer_python, command, memory=not given.no_memory)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

"""Times the field's main library (kvpress) and plain transformers beside ours: same model, prompt, budget.

    python -m retain.eval.speed --what peers --peer-python PEER/bin/python [--policies snapkv,adakv]
    [--keep-ratios 0.2] [--batches 1] [--tokens 2048] [--device cpu|cuda] [--output PATH]

The settings are those of `serving`, of policies those that the library has too, and the interpreter of an
environment where it is installed. Measured: time to first token and of a decoded one, peak memory, and bytes
of the cache, here and there. Whether memory is freed or only simulated is measured on both sides alike: by
the bytes of storage behind the cache once the prompt is read. Without the library one line says so, and what
is here is measured alone.

Each side is held against plain transformers in its own process, its neighbour in time, since the library's
environment has another transformers; `ours / theirs` is the median of ratios within a round. One process
waits while the other runs. A folder of plain files and lines of JSON are all that is shared with the other
side (`peer_side`): so its pins (another transformers, another pandas) are no concern of ours, and its import,
which wraps every attention function of transformers, happens elsewhere.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from retain.eval.speed import serving
from retain.eval.speed.caches import DENSE, HELD, KEEP, PEAK, PLAIN, TimedCache, try_out
from retain.eval.speed.serving import ServingSettings
from retain.hf.intercept.attach import attach
from retain.process import memory as resident
from retain.process.benchmark import Benchmark, Column, heading
from retain.process.timing import Case, GivenUp, Times, interleave, quiet, spread

SIDE = Path(__file__).with_name("peer_side.py")
LIBRARY = "kvpress"
INSTALL = (
    f"python -m venv PEER && PEER/bin/pip install torch=={torch.__version__.partition('+')[0]} "
    f"{LIBRARY}==0.5.5, then --peer-python PEER/bin/python"
)
OURS, TRANSFORMERS = "retain", "transformers"
# What the sides that are transformers' own are called.
NAMED = {PLAIN: "DynamicCache, here", DENSE: "DynamicCache of as many"}
THERE = "DynamicCache, there"
# Storage of so much of what all entries would take: nothing was freed to speak of.
SIMULATED = 0.95
# Storage of at most so much of what was asked for: freed, with room for what is decoded and for tables.
FREED = 1.25


@dataclass(frozen=True)
class Press:
    """One of the library's methods.

    Args:
        name: of its class.
        settings: of it, its ratio apart.
        inner: the scorer that it wraps.
        attentions: whether it wants the attention matrix, and so eager attention.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inner: "Press | None" = None
    attentions: bool = False

    def __str__(self) -> str:
        return self.name if self.inner is None else f"{self.name}({self.inner})"


WINDOW = 32
_SNAPKV = Press("SnapKVPress", {"window_size": WINDOW})
# Presets that the library has too, and what it calls them; a window is as long there as here.
PRESSES: dict[str, Press] = {
    "snapkv": _SNAPKV,
    "tova": Press("TOVAPress"),
    "streaming_llm": Press("StreamingLLMPress", {"n_sink": 4}),
    "criticalkv": Press("CriticalKVPress", inner=_SNAPKV),
    "knorm": Press("KnormPress"),
    "keydiff": Press("KeyDiffPress"),
    "expected_attention": Press("ExpectedAttentionPress"),
    "adakv": Press("AdaKVPress", inner=_SNAPKV),
    "ada_criticalkv": Press("CriticalAdaKVPress", inner=_SNAPKV),
}


def write_exchange(
    folder: Path,
    model: nn.Module,
    ids_BT: Int[Tensor, "B T"],
    *,
    tokens: int,
    threads: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Writes what the other side reads: weights, token ids, how to run.

    Args:
        folder: made where it is not there.
        ids_BT: prompts without padding, and what is decoded behind them.
        tokens: of each row, how many are prompt.
        dtype: of weights and cache.

    Raises:
        ValueError: there are no such prompts.
    """
    if not 0 < tokens <= ids_BT.shape[1]:
        raise ValueError(
            f"exchange: {tokens} tokens of prompt in rows of {ids_BT.shape[1]}: pass fewer, at least 1."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # What `save_pretrained` writes and they read, without what it asks of accelerators on the way.
    (folder / "model").mkdir(exist_ok=True)
    config: Any = model.config
    config.save_pretrained(folder / "model")
    save_model(model, str(folder / "model" / "model.safetensors"), metadata={"format": "pt"})
    save_file({"ids": ids_BT.cpu().contiguous()}, folder / "ids.safetensors")
    how = {"tokens": tokens, "threads": threads, "dtype": dtype, "device": device}
    (folder / "request.json").write_text(json.dumps(how, indent=2) + "\n", encoding="utf-8")


class Peer:
    """A process of the other side; a context manager.

    Args:
        python: interpreter of the environment where the library is installed.
        folder: that `write_exchange` wrote.
        environment: variables to add to this process's own.
        timeout: seconds that an answer may take.

    Raises:
        ValueError: there is no such interpreter.
    """

    def __init__(
        self,
        python: str | Path,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        found = shutil.which(str(python))
        if found is None:
            raise ValueError(
                f"--peer-python {str(python)!r} is no interpreter: pass that of an environment where "
                f"{LIBRARY} is installed ({INSTALL})."
            )
        self.folder, self.timeout = folder, timeout
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "errors.txt"
        # Nothing of ours is on the path of their environment.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [found, str(SIDE), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**own, **(environment or {})},
                text=True,
            )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            GivenUp: the other side failed, ended, or takes too long; says what it said.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        start, limit = time.monotonic(), threading.Timer(self.timeout, self._process.kill)
        limit.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps({"do": what, **more}), file=stdin, flush=True)
            line = stdout.readline()
        finally:
            limit.cancel()
        if not line and time.monotonic() - start >= self.timeout:
            raise GivenUp(f"{LIBRARY}'s side gave no answer in {self.timeout:g} s: it was ended.")
        if not line:
            code = self._process.wait()
            last = (self._errors.read_text(errors="replace").strip() or "it said nothing").splitlines()[-1]
            raise GivenUp(f"{LIBRARY}'s side ended with status {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise GivenUp(f"{LIBRARY}'s side could not {what}: {answer['error']}")
        return answer

    def versions(self) -> dict[str, str | None]:
        """Versions of what runs there; the library's is None where it is not installed."""
        return self.ask("versions")

    def kept(self, press: Press, ratio: float, tokens: int) -> list[dict[str, Tensor]]:
        """Masks of what a press keeps, a layer a row: `kept`, bool `[B, H, T]`, and its scores where it has
        some.

        Args:
            press: theirs.
            ratio: theirs, of what goes.
            tokens: of each prompt, how many are read.
        """
        answer = self.ask("kept", press=asdict(press), ratio=ratio, tokens=tokens)
        layers: list[dict[str, Tensor]] = [{} for _ in range(answer["layers"])]
        for name, tensor in load_file(self.folder / answer["file"]).items():
            what, _, layer = name.rpartition(".")
            layers[int(layer)][what] = tensor
        return layers

    def life(self, press: Press | None, kept: int, batch: int, *, watch: bool = False) -> dict[str, Any]:
        """Milliseconds and bytes of one prompt and answer; without a press, of plain transformers there."""
        asked = None if press is None else asdict(press)
        return self.ask("life", press=asked, kept=kept, batch=batch, watch=watch)


@dataclass(frozen=True, kw_only=True)
class PeersSettings(ServingSettings):
    """The settings of `serving`, and where the library is."""

    peer_python: Annotated[str, "interpreter of an environment where the library is installed"] = ""

    def entries(self) -> list[str]:
        """The policies to time, by default all that both have."""
        return super().entries() if self.policies else [*PRESSES]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for typed in self.entries():
            if typed not in (DENSE, *PRESSES):
                missing = f"policy {typed!r} has no counterpart in {LIBRARY} here"
                yield f"{missing}: take, as it ships, one of {', '.join(PRESSES)}"


@dataclass(eq=False, kw_only=True)
class PeerCache(Case):
    """A method of the library, in a benchmark. A run is a life there.

    Args:
        policy: its name here; `plain` for transformers without a press.
        keep_ratio: kept / seen that is asked for.
        kept: the same in entries.
        answer: of the last life.
        ours: the same policy here.
    """

    peer: Peer
    policy: str
    keep_ratio: float
    kept: int
    batch: int
    answer: dict[str, Any] = field(default_factory=dict)
    ours: TimedCache | None = None

    def run(self) -> Times:
        """One life; the answer of the other process is kept."""
        self.answer = self.ask(self.peer)
        return {"prefill_ms": self.answer["ttft_ms"], "token_ms": self.answer["token_ms"]}

    def ask(self, peer: Peer, *, watch: bool = False) -> dict[str, Any]:
        """One life in a process."""
        return peer.life(PRESSES.get(self.policy), self.kept, self.batch, watch=watch)


def measure(settings: PeersSettings) -> dict[str, Any]:
    """Times both sides.

    Raises:
        ValueError: there is no such interpreter, or what `serving` refuses.
        RuntimeError: the other process failed.
    """
    bench, python, rows = serving.bench_of(settings), settings.peer_python, []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder, peer, versions, missing = Path(scratch), None, {}, "no --peer-python was given"
        if python:
            how: dict[str, Any] = {name: getattr(settings, name) for name in ("threads", "dtype", "device")}
            write_exchange(folder, bench.model, bench.ids_BT, tokens=settings.tokens, **how)
            peer = stack.enter_context(Peer(python, folder))
            versions = peer.versions()
        if peer is not None and versions.get(LIBRARY) is None:
            stack.close()
            peer, versions, missing = None, {}, f"it is not installed in the environment of {python}"
        stack.enter_context(attach(bench.model))
        stack.enter_context(quiet(settings.threads, settings.device))
        for batch in settings.sizes:
            caches = serving.caches_of(settings, bench, batch)
            try_out(caches)
            theirs = [] if peer is None else peers_of(settings, peer, caches, batch)
            interleave([*caches, *theirs], rounds=settings.rounds, warmup=settings.warmup)
            if settings.watches and theirs:
                watch_peers(python, folder, theirs)
            rows += rows_of(caches, theirs, batch)
        if settings.watches:
            ours = [row for row in rows if row["library"] != LIBRARY and row["name"] != THERE]
            serving.add_peaks(ours, *BENCHMARK.watched([settings]))
    absent = "" if peer else f"{LIBRARY}: not compared, {missing} ({INSTALL})"
    where = {"python": python and os.path.basename(python), "versions": versions, "absent": absent}
    return {"peer": where, "rows": rows}


def peers_of(
    settings: PeersSettings, peer: Peer, caches: Sequence[TimedCache], batch: int
) -> list[PeerCache]:
    """Their plain cache, and their counterpart of each policy beside it."""
    own: dict[str, Any] = {"peer": peer, "batch": batch}
    plain = PeerCache(policy=PLAIN, keep_ratio=1.0, kept=settings.tokens, **own)
    theirs = [
        PeerCache(
            policy=one.name,
            keep_ratio=one.keep_ratio,
            kept=int(one.keep_ratio * settings.tokens),
            beside=plain,
            ours=one,
            **own,
        )
        for one in caches
        if one.name in PRESSES
    ]
    return [plain, *theirs] if theirs else []


def watch_peers(python: str, folder: Path, theirs: Sequence[PeerCache]) -> None:
    """On a CPU: the peak of each, in one more process whose allocator gives back what is freed."""
    with Peer(python, folder, environment=resident.GIVES_BACK) as peer:
        for one in theirs:
            if not one.failed and one.answer:
                one.ask(peer)
                watched = one.ask(peer, watch=True)
                one.answer |= {name: watched[name] for name in ("prefill_peak", "decode_peak")}


def rows_of(caches: Sequence[TimedCache], theirs: Sequence[PeerCache], batch: int) -> list[dict[str, Any]]:
    """The rows of both sides at one batch size: transformers' own first, then ours, then theirs."""
    # All entries take what plain transformers hold there, or what our caches say if those could not read.
    full = max((one.bytes.get("full", 0) for one in caches), default=0)
    if theirs and theirs[0].answer:
        full = theirs[0].answer["bytes_held"]
    ours = [our_row(one, caches, batch) for one in caches]
    foreign = [their_row(one, full) for one in theirs]
    return [*ours[:1], *foreign[:1], *ours[1:], *foreign[1:]]


def memory_of(allocated: int, full: int, keep_ratio: float) -> dict[str, Any]:
    """States of a cache's memory behind the prompt, and the share of all entries that is allocated.

    `memory` is `full` (nothing was asked), `simulated` (as much storage as before), `freed` (about what was
    asked for), or `partly freed`.

    Args:
        allocated: bytes of the storage behind the cache, as it is, whatever the cache says that it holds.
        full: bytes of the keys and values of all that was seen.
        keep_ratio: that was asked for.
    """
    share = allocated / full
    state = "freed" if share <= FREED * keep_ratio else "partly freed"
    state = "simulated" if share >= SIMULATED else state
    return {"memory": "full" if keep_ratio >= 1 else state, "allocated_of_full": share}


def our_row(one: TimedCache, caches: Sequence[TimedCache], batch: int) -> dict[str, Any]:
    """A row of `serving`, with its library, its name, and whether its memory is freed."""
    row = {
        "library": TRANSFORMERS if one.name in NAMED else OURS,
        "name": NAMED.get(one.name, one.name),
        **serving.serving_row(one, caches, batch),
    }
    if not one.failed:
        held = {**row["cache_bytes"], "beside": 0}
        keep_ratio = 1.0 if one.name in NAMED else one.keep_ratio
        row |= {"cache_bytes": held, **memory_of(held["allocated"], held["full"], keep_ratio)}
    return row


def their_row(one: PeerCache, full: int) -> dict[str, Any]:
    """A row of theirs; `full` is bytes of all entries."""
    row: dict[str, Any] = {
        "library": TRANSFORMERS if one.policy == PLAIN else LIBRARY,
        "policy": one.policy,
        "name": THERE if one.policy == PLAIN else str(PRESSES[one.policy]),
        "keep_ratio": one.keep_ratio,
        "batch": one.batch,
        "failed": one.failed,
    }
    last = one.answer
    if one.failed or not last or not full:
        reason = "nothing that keeps all to compare with" if last else "never measured"
        return {**row, "failed": one.failed or reason}
    for what, quantity in (("ttft", "prefill_ms"), ("token", "token_ms")):
        row[f"{what}_ms"] = spread(one.times(quantity))
        row[f"{what}_over_plain"] = spread(one.over(one.beside, quantity) if one.beside else [])
        if one.ours is not None and not one.ours.failed:
            row[f"{what}_ours_over_theirs"] = spread(one.ours.over(one, quantity))
    sizes = {name: last[f"bytes_{name}"] for name in ("held", "allocated", "beside")}
    return row | {
        "peak_bytes": {stage: last[f"{stage}_peak"] for stage in ("prefill", "decode")},
        "cache_bytes": {"full": full, **sizes},
        **memory_of(last["bytes_allocated"], full, one.keep_ratio),
    }


COLUMNS = (
    *(Column("library", "library"), Column("method", "name"), KEEP),
    *(Column("first token ms", "ttft_ms", ".1f", wide=True), Column("/ plain", "ttft_over_plain")),
    *(Column("token ms", "token_ms", ".2f", wide=True), Column("/ plain", "token_over_plain")),
    *(Column("/ dense", "token_over_dense"), PEAK, HELD),
    Column("allocated", "cache_bytes.allocated", ".2f", 2**20),
    *(Column("of full", "allocated_of_full", ".1%"), Column("memory", "memory")),
    Column("ours/theirs: first", "ttft_ours_over_theirs"),
    Column("token", "token_ours_over_theirs"),
)


def table(record: dict[str, Any], settings: PeersSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    peer = record["peer"]
    there = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
    return [
        *heading(
            record,
            f"serving, beside {LIBRARY} and plain transformers",
            f"model: {settings.model}; prompts of {settings.tokens:,} random tokens, {settings.steps} "
            f"decoded behind them; {settings.rounds} rounds; {settings.dtype}",
            f"theirs: {there}" if there else peer["absent"],
        ),
        *serving.by_batch(COLUMNS, record["rows"]),
        "median (20 % .. 80 %) over rounds; / plain: of ratios to transformers' own cache next to it, in the "
        "same process; / dense: within a round, to transformers' own cache of as many entries, here.",
        "held: MiB of keys and values behind the prompt, as the cache counts them; allocated: of the storage",
        "behind them, each counted once, and over what all keys and values take. simulated: evicted entries",
        f"stay, at least {SIMULATED:.0%} is allocated; freed: at most {FREED:g} times what was asked for",
        "(room for what is decoded, positions, tables); partly freed: something between.",
    ]


BENCHMARK = Benchmark("retain.eval.speed", "peers", PeersSettings, measure, table, serving.watch)

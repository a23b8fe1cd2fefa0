"""Times inference under policies beside the full cache and a dense cache of as many entries.

    python -m retain.eval.speed --model smollm2-135m --policies snapkv,merge --keep-ratios 0.1,0.2
    python -m retain.eval.speed --model random --layers 8 --width 4096 --heads 32 --kv-heads 8
        --intermediate 14336 --tokens 32768 --device cuda --dtype bfloat16 --gates random

Measured are the time to the first token (the prompt read, evicted from, and the next token chosen), the time
of a decoded token, and the peak of memory beyond what was held before. Every cache reads the same random
tokens and decodes the same tokens behind them:

    plain   transformers' `DynamicCache`; it copies a layer's entries to append one
    full    our cache that keeps everything: a gain over it is gained by eviction alone
    dense   a `DynamicCache` cut to as many entries as a policy keeps, whichever they are

Caches take turns in an order that rotates, without garbage collection, and a ratio is the median over rounds
of ratios within a round. The plain caches have a copy of the model that is not attached and shares its
weights. Memory on a CPU is the resident set's peak in a process of its own, whose allocator gives back what
is freed; on CUDA it is what torch allocated.
"""

import argparse
import copy
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import retain
from retain.eval.text_table import Column, text_table
from retain.hf.model.gates import load_gates, new_gates
from retain.hf.version_names import CACHE
from retain.models.named import load_named_model
from retain.process.command import command
from retain.process.provenance import code_state, environment, now, write_json

PLAIN, FULL, DENSE = "plain", "full", "dense"
RANDOM = "random"
VOCABULARY = 1024
# glibc: larger blocks are mappings of their own, gone when they are freed. Set before the process starts.
GIVES_BACK = {f"MALLOC_{name}_": "65536" for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is timed; each field is an option of the command, and its annotation the option's help.

    Raises:
        ValueError: values out of range.
    """

    model: Annotated[str, "a name, folder or hub id; random: of the shape below"] = "smollm2-135m"
    policies: Annotated[tuple[str, ...], "presets, between commas"] = ("snapkv", "layer_defensivekv", "merge")
    keep_ratios: Annotated[tuple[float, ...], "kept / seen, between commas"] = (0.1, 0.2)
    batches: Annotated[tuple[int, ...], "prompts read at once, between commas"] = (1,)
    gates: Annotated[str, "folder or hub id; random: linear, right in time alone; empty: own"] = ""
    tokens: Annotated[int, "length of a prompt"] = 1024
    steps: Annotated[int, "tokens decoded behind it"] = 16
    rounds: Annotated[int, "lives measured of each cache, at least 2"] = 5
    warmup: Annotated[int, "lives before them that do not count"] = 1
    device: Annotated[str, "cpu, cuda, cuda:1"] = "cpu"
    dtype: Annotated[str, "of weights and cache; auto: as the checkpoint says"] = "auto"
    threads: Annotated[int, "of the CPU"] = 2
    seed: Annotated[int, "of tokens, random weights and random gates"] = 0
    layers: Annotated[int, "of a random model"] = 4
    width: Annotated[int, "of its hidden state"] = 512
    heads: Annotated[int, "its query heads"] = 8
    kv_heads: Annotated[int, "its KV heads"] = 2
    intermediate: Annotated[int, "width of its feed-forward part"] = 1376

    def __post_init__(self) -> None:
        ints = {name: value for name, value in vars(self).items() if type(value) is int}
        least = {"rounds": 2, "warmup": 0, "seed": 0}
        wrong = [
            f"{name} is at least {least.get(name, 1)}, got {value}"
            for name, value in ints.items()
            if value < least.get(name, 1)
        ]
        if not self.keep_ratios or not all(0 < ratio <= 1 for ratio in self.keep_ratios):
            wrong.append(f"keep_ratios are kept / seen, above 0 and at most 1, got {self.keep_ratios}")
        if not self.batches or min(self.batches) < 1:
            wrong.append(f"batches are at least 1, got {self.batches}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            wrong.append(
                f"width {self.width} is no multiple of 2 x {self.heads} heads, or heads of {self.kv_heads}"
            )
        if self.on_gpu and not torch.cuda.is_available():
            wrong.append(f"device {self.device!r} is not there: torch sees no CUDA device")
        if wrong:
            raise ValueError(f"speed: {'; '.join(wrong)}.")

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on CUDA."""
        return self.device.startswith("cuda")


def random_model(setting: Setting) -> PreTrainedModel:
    """A Llama with random weights and the stated shape, where it runs; the global generator is left alone."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.width,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        head_dim=setting.width // setting.heads,
        max_position_embeddings=max(2048, setting.tokens + setting.steps),
        attn_implementation="sdpa",
    )
    dtype = torch.float32 if setting.dtype == "auto" else getattr(torch, setting.dtype)
    with torch.random.fork_rng(), torch.device(setting.device):
        torch.manual_seed(setting.seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def load_model(setting: Setting) -> Any:
    """The model, on its device.

    Raises:
        ValueError: it cannot be loaded, or reads fewer tokens than are asked for.
    """
    if setting.model == RANDOM:
        return random_model(setting)
    model = load_named_model(setting.model, dtype=setting.dtype)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and setting.tokens + setting.steps > most:
        raise ValueError(
            f"speed: {setting.tokens} tokens and {setting.steps} steps are more than the {most} positions of "
            f"{setting.model!r}: take fewer tokens."
        )
    return model.to(setting.device).requires_grad_(False)


@dataclass(eq=False, kw_only=True)
class Life:
    """A cache that reads a prompt, is evicted from, and decodes; and what was measured of it.

    Args:
        policy: `plain`, `full`, `dense`, or a preset.
        keep_ratio: kept / seen; 1 for the full caches.
        model: that reads.
        empty: makes an empty cache.
        ids_BT: the prompt, and the tokens decoded behind it.
        tokens: of the prompt.
        cut_to: entries of each head that are left of a `dense` one.
        runs: `ttft_ms` and `token_ms` of each round that counts.
        bytes: `held`, `allocated` and `full` behind the prompt.
        peak: bytes beyond those before, at most, of `prefill` and `decode`.
        failed: why it was given up; empty: it was not.
    """

    policy: str
    keep_ratio: float
    model: PreTrainedModel
    empty: Callable[[], Any]
    ids_BT: Tensor
    tokens: int
    cut_to: int | None = None
    runs: list[dict[str, float]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    def live(self, peak_beyond: Callable[[], int] | None) -> dict[str, float]:
        """One life: milliseconds to the first token and a decoded token."""
        cache, start = self.empty(), clock()
        given: dict[str, Any] = {"input_ids": self.ids_BT[:, : self.tokens], CACHE: cache, "use_cache": True}
        self.model(**given, logits_to_keep=1).logits[:, -1].argmax(-1)
        if self.cut_to is not None:
            last = slice(-self.cut_to, None)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, last].clone(), layer.values[:, :, last].clone()
        first = clock()
        self.bytes = bytes_of(cache)
        if peak_beyond is not None:
            self.peak["prefill"] = peak_beyond()
        begin = clock()
        for at in range(self.tokens, self.ids_BT.shape[1]):
            position_B1 = torch.full_like(self.ids_BT[:, :1], at)
            given = {"input_ids": self.ids_BT[:, at : at + 1], "position_ids": position_B1, CACHE: cache}
            self.model(**given, use_cache=True).logits[:, -1].argmax(-1)
        took = clock() - begin
        if peak_beyond is not None:
            self.peak["decode"] = peak_beyond()
        steps = self.ids_BT.shape[1] - self.tokens
        return {"ttft_ms": 1e3 * (first - start), "token_ms": 1e3 * took / steps}

    @contextmanager
    def named(self) -> Iterator[None]:
        """Says in an error which cache it was."""
        try:
            yield
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"speed: policy {self.policy!r} at keep_ratio {self.keep_ratio}: {error}"
            ) from error

    def attempt(self, *, count: bool, watch: bool = False) -> None:
        """Lives once; out of memory is a failure of this cache alone."""
        gc.collect()
        if self.failed:
            return
        try:
            with self.named():
                found = self.live(watch_peak(str(self.ids_BT.device)) if watch else None)
        except torch.OutOfMemoryError:
            self.failed, self.runs = "out of memory", []
            return
        if count:
            self.runs.append(found)


def clock() -> float:
    """Seconds, once the device in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def watch_peak(device: str) -> Callable[[], int]:
    """Begins to watch; what it returns tells the most bytes since the last call, beyond those of now."""
    on_gpu = device.startswith("cuda")

    def forget() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            CLEAR.write_text("5")

    def beyond() -> int:
        most = torch.cuda.max_memory_allocated(device) if on_gpu else _resident("VmHWM")
        forget()
        return most - before

    forget()
    before = torch.cuda.memory_allocated(device) if on_gpu else _resident("VmRSS")
    return beyond


def _resident(name: str) -> int:
    """Bytes of a line of this process's status (Linux)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def bytes_of(cache: Any) -> dict[str, int]:
    """Bytes of a cache, ours or one of transformers: held, allocated, and of all that was seen."""
    if isinstance(cache, retain.Cache):
        report = cache.report()
        parts: list[Any] = [report.total, *report.alone]
        held, allocated = sum(one.bytes_held for one in parts), sum(one.bytes_allocated for one in parts)
        full = held - report.total.bytes_held + report.total.bytes_full
        return {"held": held, "allocated": allocated, "full": full}
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return {"held": held, "allocated": held, "full": held}


def lives_of(setting: Setting, model: Any, gates: Any, batch: int) -> list[Life]:
    """`plain`, `full`, then `dense` and every policy at every budget."""
    draw = torch.Generator().manual_seed(setting.seed)
    shape = (batch, setting.tokens + setting.steps)
    ids_BT = torch.randint(model.config.get_text_config().vocab_size, shape, generator=draw)
    ids_BT = ids_BT.to(setting.device)
    # A copy whose weights are the same tensors.
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    own: dict[str, Any] = {"ids_BT": ids_BT, "tokens": setting.tokens}
    foreign = partial(DynamicCache, config=twin.config)
    lives = [
        Life(policy=PLAIN, keep_ratio=1.0, model=twin, empty=foreign, **own),
        Life(policy=FULL, keep_ratio=1.0, model=model, empty=partial(retain.Cache, model, None), **own),
    ]
    takes_gates = {preset.name for preset in retain.policies() if "gates" in preset.needs}
    for ratio in setting.keep_ratios:
        cut_to = max(1, int(ratio * setting.tokens))
        lives.append(Life(policy=DENSE, keep_ratio=ratio, model=twin, empty=foreign, cut_to=cut_to, **own))
        for name in setting.policies:
            learned = gates if name in takes_gates else None
            empty = partial(retain.Cache, model, name, keep_ratio=ratio, gates=learned, short="raise")
            lives.append(Life(policy=name, keep_ratio=ratio, model=model, empty=empty, **own))
    for life in lives:
        with life.named():
            life.empty()
    return lives


@contextmanager
def quiet(setting: Setting) -> Iterator[None]:
    """So many threads, no gradients and no garbage collection; afterwards as before."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(setting.threads)
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


@contextmanager
def ready(setting: Setting) -> Iterator[list[tuple[int, list[Life]]]]:
    """Loads model and gates, and lets every cache live once: a budget that cannot be met is an error before
    anything is timed."""
    model = load_model(setting)
    gates: Any = None
    if setting.gates == RANDOM:
        gates = new_gates(model, "linear", seed=setting.seed).to(setting.device).eval().requires_grad_(False)
    elif setting.gates:
        gates = load_gates(setting.gates, model)
    with retain.attach(model), quiet(setting):
        tried = [(batch, lives_of(setting, model, gates, batch)) for batch in setting.batches]
        for _, lives in tried:
            for life in lives:
                life.attempt(count=False)
        yield tried


def measure(setting: Setting) -> dict[str, Any]:
    """Times all caches at every batch size, and watches their memory: a record with a row for each.

    Raises:
        ValueError: a model, a policy or a budget that cannot be; before anything is timed.
        RuntimeError: the process that watches memory failed.
    """
    rows: list[dict[str, Any]] = []
    with ready(setting) as tried:
        for batch, lives in tried:
            for turn in tqdm(range(-setting.warmup, setting.rounds), desc=f"batch {batch}", unit="round"):
                start = turn % len(lives)
                for life in (*lives[start:], *lives[:start]):
                    life.attempt(count=turn >= 0, watch=setting.on_gpu)
            rows += [row_of(life, lives, batch) for life in lives]
        model = tried[0][1][0].model
        about = {"name": setting.model, "kind": type(model).__name__, "parameters": model.num_parameters()}
    peak_of = "device: allocated at most, beyond what was held before (weights)"
    if not setting.on_gpu:
        peak_of = "process: resident at most, beyond what was held before (weights), in a process of its own"
        for row, peak in zip(rows, watched(setting), strict=True):
            row["peak_bytes"] = peak
    return {"model": about, "peak_of": peak_of, "rows": rows}


def row_of(life: Life, lives: Sequence[Life], batch: int) -> dict[str, Any]:
    """The row of one cache: times, their ratios to other caches' of the same round, bytes and peaks."""
    kind = "policy" if life.policy not in (PLAIN, FULL, DENSE) else "full"
    row: dict[str, Any] = {"policy": life.policy, "kind": kind, "keep_ratio": life.keep_ratio, "batch": batch}
    row["failed"] = life.failed
    if life.failed:
        return row
    for name in ("ttft", "token"):
        times = [run[f"{name}_ms"] for run in life.runs]
        row[f"{name}_ms"] = spread(times)
        for other in lives:
            beside = other.policy in (PLAIN, FULL) or (other.policy, other.keep_ratio) == (
                DENSE,
                life.keep_ratio,
            )
            if beside and other is not life and not other.failed:
                theirs = [run[f"{name}_ms"] for run in other.runs]
                ratios = [own / its for own, its in zip(times, theirs, strict=True)]
                row[f"{name}_over_{other.policy}"] = spread(ratios)
    row["tokens_per_s"] = spread([1e3 * batch / run["token_ms"] for run in life.runs])
    full = lives[0].bytes.get("full") or life.bytes["full"]
    row |= {"cache_bytes": life.bytes, "held_of_full": life.bytes["held"] / full}
    return row | {"peak_bytes": dict(life.peak)}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, and all values."""
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3], "all": list(values)}


def watched(setting: Setting) -> list[dict[str, int]]:
    """Peaks of every cache, in the order of the rows, from a process whose allocator gives back memory."""
    asked = [sys.executable, "-m", "retain.eval.speed", "--watch", json.dumps(asdict(setting))]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, **GIVES_BACK})
    if done.returncode:
        raise RuntimeError(f"the process that watches memory failed: {done.stderr.strip()[-2000:]}")
    found: list[dict[str, int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def watch(setting: Setting) -> list[dict[str, int]]:
    """In this process: the peaks of every cache."""
    with ready(setting) as tried:
        lives = [life for _, own in tried for life in own]
        for life in lives:
            life.attempt(count=False, watch=True)
    return [life.peak for life in lives]


COLUMNS = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", "g"), Column("batch", "batch", "d")),
    Column("first token ms", "ttft_ms", ".1f", wide=True),
    *(Column("/ plain", "ttft_over_plain"), Column("token ms", "token_ms", ".2f", wide=True)),
    *(Column(f"/ {other}", f"token_over_{other}") for other in (PLAIN, FULL, DENSE)),
    *(
        Column("peak MiB", "peak_bytes.prefill", ".1f", 2**20),
        Column("held MiB", "cache_bytes.held", ".2f", 2**20),
    ),
    Column("of full", "held_of_full", ".1%"),
)


def table(record: Mapping[str, Any]) -> str:
    """A record as the lines that are printed and kept."""
    machine, code, own = record["environment"], record["code"], record["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [
        f"speed ({record['date']})",
        f"model: {record['model']['name']} ({record['model']['kind']}, "
        f"{record['model']['parameters'] / 1e6:,.1f} million parameters), {own['dtype']}; prompts of "
        f"{own['tokens']:,} random tokens, {own['steps']} decoded; {own['rounds']} lives of each",
        f"device: {machine['device']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['threads_per_worker']} threads",
        f"versions: python {machine['python']}, {versions}; commit {code['commit'] or 'none'}"
        f"{'' if code['clean'] else ', NOT clean: scratch, no evidence'}",
        f"command: {record['command']}",
        "",
        *text_table(COLUMNS, record["rows"]),
        "median (20 % .. 80 %) over lives; ratios are medians of ratios within a round.",
        f"peak: up to the first token; {record['peak_of']}.",
    ]
    return "\n".join([*lines, ""])


def parser() -> argparse.ArgumentParser:
    """One option for each field of `Setting`."""
    made = argparse.ArgumentParser(
        prog="python -m retain.eval.speed", description="Time inference under policies beside the full cache."
    )
    hints = get_type_hints(Setting, include_extras=True)
    for own in fields(Setting):
        kind, about = get_args(hints[own.name])
        default: Any = own.default
        convert: Any = kind
        if get_origin(kind) is tuple:
            convert, shown = partial(_listed, get_args(kind)[0]), ",".join(map(str, default))
        else:
            shown = str(default)
        help_text = f"{about}; default {shown or 'empty'}"
        made.add_argument(f"--{own.name.replace('_', '-')}", type=convert, default=default, help=help_text)
    made.add_argument("--watch", type=json.loads, help=argparse.SUPPRESS)
    made.add_argument("--output", type=Path, default=Path("results/speed/speed.json"), help="of the record")
    return made


def _listed(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(kind(part) for part in text.split(","))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Times what the options say, prints the table, and writes it beside the record."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = vars(parser().parse_args(typed))
    output, asked = given.pop("output"), given.pop("watch")
    if asked is not None:
        own: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
        print(json.dumps(watch(Setting(**own))))
        return 0
    setting = Setting(**given)
    date = now()
    found = measure(setting)
    device = setting.device
    if setting.on_gpu:
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    record = {
        **{"what": "serving", "date": date, "setting": asdict(setting)},
        "command": shlex.join(["python", "-m", "retain.eval.speed", *typed]),
        **found,
        "environment": environment(device, setting.threads),
        "code": code_state(Path(__file__).parent),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, record)
    output.with_suffix(".txt").write_text(table(record))
    print(f"{table(record)}written: {output}, {output.with_suffix('.txt')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times inference under policies against the full cache and a dense cache of as many entries.

    retain speed --model smollm2-135m --policies snapkv,merge --keep-ratios 0.1,0.2
    retain speed --model random --layers 32 --width 4096 --heads 32 --kv-heads 8
        --intermediate 14336 --tokens 32768 --device cuda --dtype bfloat16 --gates random

Measured are the time to the first token (the prompt read, evicted from, and the next token chosen), the time
of a decoded token, the bytes of the cache, and on CUDA the peak of memory beyond what was held before. Every
cache reads the same random tokens and decodes the same tokens behind them:

    plain   transformers' `DynamicCache`; it copies a layer's entries to append one
    full    our cache that keeps everything: a gain over it is gained by eviction alone
    dense   a `DynamicCache` cut to as many entries as a policy keeps, whichever they are

Caches take turns in an order that rotates, without garbage collection, and a ratio is the median over rounds
of ratios within a round. The plain caches have a copy of the model that is not attached and shares its
weights.
"""

import argparse
import copy
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import retain
from retain.config import build
from retain.eval.config import resolve_device
from retain.eval.text_table import Column, text_table
from retain.hf.model.gates import load_gates, new_gates
from retain.hf.version_names import CACHE
from retain.models.named import dtype_of, load_named_model
from retain.process.command import command
from retain.process.provenance import code_state, environment, now, write_json

PLAIN, FULL, DENSE = "plain", "full", "dense"
RANDOM = "random"
VOCABULARY = 1024


def _at(least: int, about: str) -> Any:
    return Field(ge=least, description=about)


def _text(about: str) -> Any:
    return Field(description=about)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is timed; each field is an option of the command, which refuses values out of range."""

    model: Annotated[str, _text("a name, folder or hub id; random: of the shape below")] = "smollm2-135m"
    policies: Annotated[tuple[str, ...], _text("presets, between commas")] = (
        *("snapkv", "layer_defensivekv", "merge"),
    )
    keep_ratios: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, description="kept / seen")
    ] = (0.1, 0.2)
    batches: Annotated[tuple[Annotated[int, Field(ge=1)], ...], _text("prompts read at once")] = (1,)
    gates: Annotated[str, _text("folder or hub id; random: right in time alone; empty: those that ship")] = ""
    tokens: Annotated[int, _at(1, "length of a prompt")] = 1024
    steps: Annotated[int, _at(1, "tokens decoded behind it")] = 16
    rounds: Annotated[int, _at(2, "measured lives of each cache, at least 2")] = 5
    warmup: Annotated[int, _at(0, "lives before them that do not count")] = 1
    device: Annotated[str, _text("cpu, cuda, cuda:1, auto")] = "cpu"
    dtype: Annotated[str, _text("of weights and cache; auto: as the checkpoint says")] = "auto"
    threads: Annotated[int, _at(1, "of the CPU")] = 2
    seed: Annotated[int, _at(0, "of tokens, random weights and random gates")] = 0
    layers: Annotated[int, _at(1, "of a random model")] = 4
    width: Annotated[int, _at(1, "of its hidden state")] = 512
    heads: Annotated[int, _at(1, "its query heads")] = 8
    kv_heads: Annotated[int, _at(1, "its KV heads")] = 2
    intermediate: Annotated[int, _at(1, "width of its feed-forward part")] = 1376

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"width {self.width} is no multiple of 2 x {self.heads} heads, or these of {self.kv_heads}."
            )
        object.__setattr__(self, "device", str(resolve_device(self.device)))

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
    dtype = torch.float32 if setting.dtype == "auto" else dtype_of(setting.dtype)
    with torch.random.fork_rng(), torch.device(setting.device):
        torch.manual_seed(setting.seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def load_model(setting: Setting) -> Any:
    """The model, on its device.

    Raises:
        ValueError: It cannot be loaded, or reads fewer tokens than are asked for.
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
        keep_ratio: Kept / seen; 1 for the full caches.
        model: That reads.
        empty: Makes an empty cache.
        ids_BT: The prompt, and the tokens decoded behind it.
        tokens: Of the prompt.
        cut_to: Entries of each head that are left of a `dense` one.
        runs: `ttft_ms` and `token_ms` of each round that counts.
        bytes: `held`, `allocated` and `full` behind the prompt.
        peak: On CUDA, bytes allocated at most beyond those before, up to the first token and behind it.
        failed: Why there are no times; empty: there are.
    """

    policy: str
    keep_ratio: float
    model: Any
    empty: Callable[[], Any]
    ids_BT: Tensor
    tokens: int
    cut_to: int | None = None
    runs: list[dict[str, float]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    def live(self) -> dict[str, float]:
        """One life: milliseconds to the first token and of a decoded token."""
        before = self.watch(None, 0)
        cache, start = self.empty(), clock()
        given: dict[str, Any] = {"input_ids": self.ids_BT[:, : self.tokens], CACHE: cache, "use_cache": True}
        self.model(**given, logits_to_keep=1).logits[:, -1].argmax(-1)
        if self.cut_to is not None:
            last = slice(-self.cut_to, None)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, last].clone(), layer.values[:, :, last].clone()
        first = clock()
        self.bytes = bytes_of(cache)
        self.watch("prefill", before)
        begin = clock()
        for at in range(self.tokens, self.ids_BT.shape[1]):
            position_B1 = torch.full_like(self.ids_BT[:, :1], at)
            given = {"input_ids": self.ids_BT[:, at : at + 1], "position_ids": position_B1, CACHE: cache}
            self.model(**given, use_cache=True).logits[:, -1].argmax(-1)
        took = clock() - begin
        self.watch("decode", before)
        steps = self.ids_BT.shape[1] - self.tokens
        return {"ttft_ms": 1e3 * (first - start), "token_ms": 1e3 * took / steps}

    def watch(self, name: str | None, before: int) -> int:
        """On CUDA, notes the peak since the last call beyond the bytes `before`, under a name, and begins a
        new one; returns the bytes allocated now."""
        if not self.ids_BT.is_cuda:
            return 0
        if name is not None:
            self.peak[name] = torch.cuda.max_memory_allocated(self.ids_BT.device) - before
        torch.cuda.reset_peak_memory_stats(self.ids_BT.device)
        return torch.cuda.memory_allocated(self.ids_BT.device)

    def attempt(self, *, count: bool) -> None:
        """Lives once; out of memory is a failure of this cache alone.

        Raises:
            ValueError: The cache or model refuses; the policy is named.
        """
        gc.collect()
        if self.failed:
            return
        try:
            found = self.live()
        except torch.OutOfMemoryError:
            self.failed, self.runs = "out of memory", []
            return
        except (ValueError, TypeError) as error:
            raise ValueError(f"speed: policy {self.policy!r} at {self.keep_ratio}: {error}") from error
        if count:
            self.runs.append(found)


def clock() -> float:
    """Seconds, once the device in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


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
    # A copy whose weights are the same tensors.
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    same: dict[str, Any] = {"ids_BT": ids_BT.to(setting.device), "tokens": setting.tokens}
    plain = partial(DynamicCache, config=twin.config)
    lives = [
        Life(policy=PLAIN, keep_ratio=1.0, model=twin, empty=plain, **same),
        Life(policy=FULL, keep_ratio=1.0, model=model, empty=partial(retain.Cache, model, None), **same),
    ]
    takes_gates = {preset.name for preset in retain.policies() if "gates" in preset.needs}
    for ratio in setting.keep_ratios:
        cut_to = max(1, int(ratio * setting.tokens))
        lives.append(Life(policy=DENSE, keep_ratio=ratio, model=twin, empty=plain, cut_to=cut_to, **same))
        for name in setting.policies:
            learned = gates if name in takes_gates else None
            empty = partial(retain.Cache, model, name, keep_ratio=ratio, gates=learned, short="raise")
            lives.append(Life(policy=name, keep_ratio=ratio, model=model, empty=empty, **same))
    return lives


def measure(setting: Setting) -> dict[str, Any]:
    """Times all caches at every batch size: a record with a row for each. Every cache lives once before
    anything is timed, so that a budget that cannot be met is an error at once.

    Raises:
        ValueError: A model, a policy or a budget that cannot be.
    """
    model = load_model(setting)
    gates: Any = None
    if setting.gates == RANDOM:
        gates = new_gates(model, "linear", seed=setting.seed).to(setting.device).eval().requires_grad_(False)
    elif setting.gates:
        gates = load_gates(setting.gates, model)
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    gc.disable()
    try:
        with retain.attach(model), torch.no_grad():
            tried = [(batch, lives_of(setting, model, gates, batch)) for batch in setting.batches]
            for life in (life for _, lives in tried for life in lives):
                life.attempt(count=False)
            for batch, lives in tried:
                for turn in tqdm(range(-setting.warmup, setting.rounds), desc=f"batch {batch}", unit="round"):
                    start = turn % len(lives)
                    for life in (*lives[start:], *lives[:start]):
                        life.attempt(count=turn >= 0)
                rows += [row_of(life, lives, batch) for life in lives]
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    about = {"name": setting.model, "kind": type(model).__name__, "parameters": model.num_parameters()}
    return {"model": about, "rows": rows}


def row_of(life: Life, lives: Sequence[Life], batch: int) -> dict[str, Any]:
    """The row of one cache: times, their ratios to other caches' of the same round, bytes and peaks."""
    kind = "policy" if life.policy not in (PLAIN, FULL, DENSE) else "full"
    row: dict[str, Any] = {"policy": life.policy, "kind": kind, "keep_ratio": life.keep_ratio, "batch": batch}
    row["failed"] = life.failed
    if life.failed:
        return row
    compared = [one for one in lives if one.policy in (PLAIN, FULL)]
    compared += [one for one in lives if (one.policy, one.keep_ratio) == (DENSE, life.keep_ratio)]
    for name in ("ttft", "token"):
        times = [run[f"{name}_ms"] for run in life.runs]
        row[f"{name}_ms"] = spread(times)
        for other in compared:
            if other is not life and not other.failed:
                theirs = [run[f"{name}_ms"] for run in other.runs]
                ratios = [mine / its for mine, its in zip(times, theirs, strict=True)]
                row[f"{name}_over_{other.policy}"] = spread(ratios)
    row["tokens_per_s"] = spread([1e3 * batch / run["token_ms"] for run in life.runs])
    full = lives[0].bytes.get("full") or life.bytes["full"]
    row |= {"cache_bytes": life.bytes, "held_of_full": life.bytes["held"] / full}
    return row | {"peak_bytes": dict(life.peak)}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, and all values."""
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3], "all": list(values)}


COLUMNS = (
    *(Column("policy", "policy"), Column("keep", "keep_ratio", "g"), Column("batch", "batch", "d")),
    Column("first token ms", "ttft_ms", ".1f", wide=True),
    *(Column("/ plain", "ttft_over_plain"), Column("token ms", "token_ms", ".2f", wide=True)),
    *(Column(f"/ {other}", f"token_over_{other}") for other in (PLAIN, FULL, DENSE)),
    Column("peak MiB", "peak_bytes.prefill", ".1f", 2**20),
    *(Column("held MiB", "cache_bytes.held", ".2f", 2**20), Column("of full", "held_of_full", ".1%")),
)


def table(record: Mapping[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    machine, code, how = record["environment"], record["code"], record["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    model = record["model"]
    return "\n".join(
        [
            f"speed ({record['date']})",
            f"model: {model['name']} ({model['kind']}, {model['parameters'] / 1e6:,.1f} million parameters), "
            f"{how['dtype']}; prompts of {how['tokens']:,} random tokens, {how['steps']} decoded; "
            f"{how['rounds']} lives of each",
            f"device: {machine['device']}; {machine['processor']}, {machine['cores']} cores, "
            f"{machine['threads_per_worker']} threads",
            f"versions: python {machine['python']}, {versions}; commit {code['commit'] or 'none'}"
            f"{'' if code['clean'] else ', NOT clean: scratch, no evidence'}",
            f"command: {record['command']}",
            "",
            *text_table(COLUMNS, record["rows"]),
            "median (20 % .. 80 %) over lives; ratios are medians of ratios within a round.",
            "peak: on CUDA, up to the first token.",
            "",
        ]
    )


def parser() -> argparse.ArgumentParser:
    """One option for each field of `Setting`."""
    made = argparse.ArgumentParser(
        prog="retain speed", description="Time inference under policies against full caches."
    )
    hints = get_type_hints(Setting, include_extras=True)
    for one in fields(Setting):
        kind, about = get_args(hints[one.name])
        default: Any = one.default
        convert, shown = kind, str(default)
        if get_origin(kind) is tuple:
            item = get_args(kind)[0]
            convert = partial(_listed, get_args(item)[0] if get_args(item) else item)
            shown = ",".join(map(str, default))
        text = f"{about.description}; default {shown or 'empty'}"
        made.add_argument(f"--{one.name.replace('_', '-')}", type=convert, default=default, help=text)
    made.add_argument("--output", type=Path, default=Path("results/speed/speed.json"), help="of the record")
    return made


def _listed(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(kind(part) for part in text.split(","))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Times what the options say, prints the table, and writes it next to the record."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = vars(parser().parse_args(typed))
    output = given.pop("output")
    setting, date = build(given, Setting), now()
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

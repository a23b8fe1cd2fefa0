"""Times inference under policies against the full cache and a dense cache of as many entries.

    retain speed --model smollm2-135m --policies snapkv,merge --keep-ratio 0.1
    retain speed --shape 32,4096,32,8,14336 --tokens 32768 --device cuda --dtype bfloat16 [--compiled]

Measured are the time to the first token (the prompt read, evicted from, and the next token chosen), the time
of a decoded token, the bytes of the cache, and on CUDA the peak of memory beyond what was held before. Every
cache reads the same random tokens and decodes the same tokens behind them:

    plain   transformers' `DynamicCache`; it copies a layer's entries to append one
    full    our cache that keeps everything: a gain over it is gained by eviction alone
    dense   a `DynamicCache` cut to as many entries as a policy keeps, whichever they are

With `--compiled`, decoded tokens alone are timed, as written and compiled, next to transformers' caches, of
which a `StaticCache` has as many entries; on CUDA a compiled step is a CUDA graph, and on a CPU the
processor's time counts. Each line at the end says of one aim whether it holds.

Caches take turns in an order that rotates, without garbage collection, and a ratio is the median over rounds
of ratios within a round. transformers' caches have a copy of the model that is not attached and shares its
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
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import retain
from retain.config import build
from retain.eval.config import resolve_device
from retain.eval.text_table import text_table
from retain.hf.version_names import CACHE
from retain.kernels.measure import quiet
from retain.models.named import dtype_of, load_named_model
from retain.models.named_gates import load_gates, new_gates
from retain.presets import load_policy
from retain.process.command import command
from retain.process.provenance import code_state, environment, now, write_json

X = TypeVar("X")
PLAIN, FULL, DENSE = "plain", "full", "dense"
DYNAMIC, ATTACHED, STATIC = "DynamicCache", "DynamicCache, attached", "StaticCache"
# Aims of compiled steps: the ratio of two medians, the other, and its bound; on a narrow model, and on a GPU.
HOST = ((ATTACHED, DYNAMIC, 1.05), ("", DYNAMIC, 1.15), ("compiled", STATIC, 1.05))
DEVICE = (("compiled", STATIC, 1.05), ("compiled", f"{FULL}, compiled", 1 / 1.8))


def _option(about: str, **bounds: Any) -> Any:
    return Field(description=about, **bounds)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options of the command, one a field; values out of range are refused."""

    model: Annotated[str, _option("a name, folder or hub id")] = "smollm2-135m"
    policies: Annotated[str, _option("presets, between commas")] = "snapkv,layer_defensivekv,merge"
    keep_ratio: Annotated[float, _option("kept / seen", gt=0, le=1)] = 0.1
    batch: Annotated[int, _option("prompts read at once", ge=1)] = 1
    gates: Annotated[str, _option("folder or hub id; empty: those that ship")] = ""
    tokens: Annotated[int, _option("length of a prompt", ge=1)] = 1024
    steps: Annotated[int, _option("tokens decoded behind it", ge=1)] = 16
    rounds: Annotated[int, _option("measured lives of each cache, behind one that does not count", ge=2)] = 5
    device: Annotated[str, _option("cpu, cuda, cuda:1, auto")] = "cpu"
    dtype: Annotated[str, _option("of weights and cache; auto: as the checkpoint says")] = "auto"
    shape: Annotated[
        str, _option("layers,width,heads,KV heads,feed-forward of a random model with gates")
    ] = ""
    compiled: Annotated[bool, _option("time compiled steps")] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", str(resolve_device(self.device)))

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def load_model(setting: Setting) -> Any:
    """The model on its device; a random one is a Llama of the stated shape.

    Raises:
        ValueError: It cannot be loaded, or a shape that is none.
    """
    if not setting.shape:
        model = load_named_model(setting.model, dtype=setting.dtype)
        return model.to(setting.device).requires_grad_(False)
    sizes = [int(part) for part in setting.shape.split(",") if part.strip().isdigit()]
    if len(sizes) != 5 or sizes[1] % (2 * sizes[2]) or sizes[2] % sizes[3]:
        raise ValueError(
            f"shape {setting.shape!r}: wanted layers, width, heads, KV heads, feed-forward width; width a "
            "multiple of 2 x heads, and the heads of KV heads."
        )
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip((*names, "intermediate_size"), sizes, strict=True))
    config = LlamaConfig(vocab_size=1024, max_position_embeddings=2**20, attn_implementation="sdpa", **shape)
    dtype = torch.float32 if setting.dtype == "auto" else dtype_of(setting.dtype)
    with torch.random.fork_rng(), torch.device(setting.device):
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return made.eval().requires_grad_(False)


class Subjects:
    """The model, its copy that is not attached, the gates, and the tokens that every cache reads.

    Raises:
        ValueError: as `load_model`, or gates that are not the model's.
    """

    def __init__(self, setting: Setting) -> None:
        self.model = model = load_model(setting)
        # A copy whose weights are the same tensors.
        self.twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        self.gates: Any = load_gates(setting.gates, model) if setting.gates else None
        if setting.shape and not setting.gates:  # right in time alone
            self.gates = new_gates(model, "linear").to(setting.device).eval().requires_grad_(False)
        shape, draw = (setting.batch, setting.tokens + setting.steps), torch.Generator().manual_seed(0)
        ids_BT = torch.randint(model.config.get_text_config().vocab_size, shape, generator=draw)
        self.ids_BT = ids_BT.to(setting.device)

    def cache(self, policy: str | None, keep_ratio: float = 1.0) -> retain.Cache:
        """An empty cache; without a policy, it keeps everything."""
        if policy is None:
            return retain.Cache(self.model, None)
        gates = self.gates if load_policy(policy).learned else None
        return retain.Cache(self.model, policy, keep_ratio=keep_ratio, gates=gates, short="raise")


def collected(runs: Mapping[str, Callable[[], X]], rounds: int) -> dict[str, list[X]]:
    """Results of functions that are called in turn, round after round, from another one on; the first round
    does not count, and a function that runs out of memory has no results.

    Raises:
        ValueError: A cache or model refuses; the policy is named.
    """
    found: dict[str, list[X]] = {name: [] for name in runs}
    names, failed = [*runs], set[str]()
    for turn in tqdm(range(-1, rounds), unit="round"):
        start = (turn + 1) % len(names)
        for name in (*names[start:], *names[:start]):
            gc.collect()
            try:
                result = None if name in failed else runs[name]()
            except torch.OutOfMemoryError:
                failed.add(name)
                found[name].clear()
            except (ValueError, TypeError) as error:
                raise ValueError(f"speed: policy {name!r}: {error}") from error
            else:
                found[name] += [] if result is None or turn < 0 else [result]
    return found


def live(
    model: Any, empty: Callable[[], Any], ids_BT: Tensor, tokens: int, cut_to: int | None = None
) -> dict[str, float]:
    """Times a cache that reads a prompt of so many tokens, is evicted from, and decodes the others.

    Args:
        empty: Makes the cache.
        cut_to: Entries of each head that are left of transformers' cache.

    Returns:
        `ttft_ms` and `token_ms`; `bytes_held` behind the prompt; on CUDA `peak_bytes` up to the first token,
        beyond those before.
    """
    on_gpu = ids_BT.is_cuda
    before = torch.cuda.memory_allocated(ids_BT.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(ids_BT.device)
    cache, start = empty(), clock()
    given: dict[str, Any] = {"input_ids": ids_BT[:, :tokens], CACHE: cache, "use_cache": True}
    model(**given, logits_to_keep=1).logits[:, -1].argmax(-1)
    if cut_to is not None:
        for layer in cache.layers:
            layer.keys, layer.values = (kept[:, :, -cut_to:].clone() for kept in (layer.keys, layer.values))
    first = clock()
    found = {"ttft_ms": 1e3 * (first - start), "bytes_held": bytes_of(cache)}
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(ids_BT.device) - before
    begin = clock()
    for at in range(tokens, ids_BT.shape[1]):
        position_B1 = torch.full_like(ids_BT[:, :1], at)
        given = {"input_ids": ids_BT[:, at : at + 1], "position_ids": position_B1, CACHE: cache}
        model(**given, use_cache=True).logits[:, -1].argmax(-1)
    return found | {"token_ms": 1e3 * (clock() - begin) / (ids_BT.shape[1] - tokens)}


def clock() -> float:
    """Seconds, once the device in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def bytes_of(cache: Any) -> int:
    """Bytes that a cache holds, ours or one of transformers."""
    if isinstance(cache, retain.Cache):
        report = cache.report()
        return report.total.bytes_held + sum(one.bytes_held or 0 for one in report.alone)
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def measure(setting: Setting) -> list[dict[str, Any]]:
    """Times all caches: a row for each, with ratios to other caches' times of the same round."""
    subjects = Subjects(setting)
    model, twin, ratio = subjects.model, subjects.twin, setting.keep_ratio
    same: dict[str, Any] = {"ids_BT": subjects.ids_BT, "tokens": setting.tokens}
    plain = partial(DynamicCache, config=twin.config)
    runs = {
        PLAIN: partial(live, twin, plain, **same),
        FULL: partial(live, model, partial(subjects.cache, None), **same),
        DENSE: partial(live, twin, plain, cut_to=max(1, int(ratio * setting.tokens)), **same),
    }
    for name in setting.policies.split(","):
        runs[name] = partial(live, model, partial(subjects.cache, name, ratio), **same)
    with quiet(torch.get_num_threads()), retain.attach(model), torch.no_grad():
        found = collected(runs, setting.rounds)
    rows = []
    for policy, lives in found.items():
        row: dict[str, Any] = {"policy": policy} if lives else {"policy": f"{policy} (out of memory)"}
        for name in lives[0] if lives else ():
            mine = [one[name] for one in lives]
            row[name] = spread(mine) if name.endswith("_ms") else mine[-1]
            for other in (PLAIN, FULL, DENSE) if name.endswith("_ms") else ():
                if found[other] and other != policy:
                    pairs = zip(mine, (one[name] for one in found[other]), strict=True)
                    row[f"{name[:-3]}_over_{other}"] = spread([one / its for one, its in pairs])
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, and all values."""
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[3], "all": list(values)}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as lines of text: medians over lives, medians of ratios within a round."""
    columns = {"first token ms": "ttft_ms", "first / plain": "ttft_over_plain", "token ms": "token_ms"}
    columns |= {f"token / {other}": f"token_over_{other}" for other in (PLAIN, FULL, DENSE)}
    columns |= {"peak MiB": "peak_bytes", "held MiB": "bytes_held"}

    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        median = value["median"] if isinstance(value, Mapping) else value
        return "-" if median is None else f"{median / (2**20 if 'bytes' in name else 1):.2f}"

    cells = [[row["policy"], *(cell(row, name) for name in columns.values())] for row in rows]
    return text_table(["policy", *columns], cells)


def compiled_runs(
    setting: Setting, subjects: Subjects, compiled: Callable[..., Any]
) -> dict[str, Callable[[], float]]:
    """Functions that decode `steps` tokens more and give the milliseconds of one, by name; prompts are
    read."""
    model, twin, ids_BT = subjects.model, subjects.twin, subjects.ids_BT[:, : setting.tokens]
    most, kept = setting.steps * (setting.rounds + 1), int(setting.keep_ratio * setting.tokens)
    seconds = clock if setting.on_gpu else time.process_time

    def stepper(run: Any, cache: Any) -> Callable[[], float]:
        places = iter(range(setting.tokens, setting.tokens + most))

        def steps() -> float:
            start = seconds()
            for at in islice(places, setting.steps):
                if setting.on_gpu:
                    torch.compiler.cudagraph_mark_step_begin()
                positions = torch.full_like(ids_BT[:, :1], at)
                run(input_ids=ids_BT[:, :1], position_ids=positions, use_cache=True, **{CACHE: cache})
            return 1e3 * (seconds() - start) / setting.steps

        return steps

    def filled(reader: Any, cache: Any, tokens: int) -> Any:
        reader(input_ids=ids_BT[:, :tokens], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache

    runs = {}
    if not setting.on_gpu:  # where caches that hold everything would take more than there is
        runs[DYNAMIC] = stepper(twin, filled(twin, DynamicCache(config=twin.config), setting.tokens))
        runs[ATTACHED] = stepper(model, filled(model, DynamicCache(config=model.config), setting.tokens))
    static = StaticCache(config=twin.config, max_cache_len=kept + most)
    runs[STATIC] = stepper(compiled(twin.__call__), filled(twin, static, kept))
    ours = compiled(model.__call__)
    for name in (FULL, *setting.policies.split(",")):
        for way in ("compiled",) if setting.on_gpu else ("as written", "compiled"):
            cache = subjects.cache(None if name == FULL else name, setting.keep_ratio).prefill(ids_BT)
            if way == "compiled":
                cache.engine.generation.room = most
                cache.engine.generation.decode_static(cache.state)
                assert cache.engine.is_static
            runs[f"{name}, {way}"] = stepper(ours if way == "compiled" else model, cache)
    return runs


def compiled_lines(setting: Setting, compiled: Callable[..., Any]) -> list[str]:
    """Times decoded tokens as written and compiled: the lines of the report, aims behind them."""
    subjects = Subjects(setting)
    with quiet(torch.get_num_threads()), retain.attach(subjects.model), torch.no_grad():
        times = collected(compiled_runs(setting, subjects, compiled), setting.rounds)
    found = {name: spread(ms) for name, ms in times.items()}
    rivals = [name for name in (DYNAMIC, STATIC) if name in found]
    rows = [
        [name, f"{one['median']:.2f}", *(f"{one['median'] / found[rival]['median']:.3f}" for rival in rivals)]
        for name, one in found.items()
    ]
    lines = text_table(["", "ms", *(f"/ {rival}" for rival in rivals)], rows)
    for way, rival, bound in DEVICE if setting.on_gpu else HOST:
        for name in found:
            if name == way or (name.endswith(f", {way or 'as written'}") and not name.startswith(FULL)):
                ratio = found[name]["median"] / found[rival]["median"]
                held = "held" if ratio <= bound else "**NOT held**"
                lines.append(f"{held}: {name} takes {ratio:.3f} of {rival}, at most {bound:.3g}")
    return lines


def parser() -> argparse.ArgumentParser:
    """The command line: an option for each field of `Setting`."""
    made = argparse.ArgumentParser(
        prog="retain speed", description="Time inference under policies against full caches."
    )
    hints = get_type_hints(Setting, include_extras=True)
    for one in fields(Setting):
        kind, about = get_args(hints[one.name])
        text = f"{about.description}; default {'empty' if one.default == '' else one.default}"
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        made.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, help=text, **how)
    made.add_argument("--output", type=Path, default=Path("results/speed/speed.json"), help="of the record")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Times what the options say, prints the table, and writes a record; of compiled steps, lines alone."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = vars(parser().parse_args(typed))
    output = given.pop("output")
    setting, date = build(given, Setting), now()
    if setting.compiled:
        mode = "reduce-overhead" if setting.on_gpu else None
        print("\n".join(compiled_lines(setting, partial(torch.compile, fullgraph=True, mode=mode))))
        return 0
    rows = measure(setting)
    device = setting.device
    if setting.on_gpu:
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    record = {
        **{
            "command": shlex.join(["retain", "speed", *typed]),
            "date": date,
            "setting": asdict(setting),
            "rows": rows,
        },
        "environment": environment(device, torch.get_num_threads()),
        "code": code_state(Path(__file__).parent),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, record)
    print("\n".join([*table(rows), f"written: {output}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import retain
from retain.eval.config import resolve_device
from retain.eval.record import text_table, write_record
from retain.hf.version_names import CACHE
from retain.kernels.measure import quiet
from retain.models.named import dtype_of, load_named_model
from retain.models.named_gates import load_gates, new_gates
from retain.presets import load_policy
from retain.process.command import command

X = TypeVar("X")
PLAIN, FULL, DENSE = "plain", "full", "dense"
DYNAMIC, ATTACHED, STATIC = "DynamicCache", "DynamicCache, attached", "StaticCache"
# Aims of compiled steps: the ratio of two medians, the other, and its bound; on a narrow model, and on a GPU.
HOST = ((ATTACHED, DYNAMIC, 1.05), ("", DYNAMIC, 1.15), ("compiled", STATIC, 1.05))
DEVICE = (("compiled", STATIC, 1.05), ("compiled", f"{FULL}, compiled", 1 / 1.8))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Time inference under policies against full caches."
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter
    made = argparse.ArgumentParser(prog="retain speed", description=about, formatter_class=shows_defaults)
    made.add_argument("--model", default="smollm2-135m", help="a name, folder or hub id")
    made.add_argument("--policies", default="snapkv,layer_defensivekv,merge", help="presets, between commas")
    made.add_argument("--keep-ratio", type=float, default=0.1, help="kept / seen")
    made.add_argument("--batch", type=int, default=1, help="prompts read at once")
    made.add_argument("--gates", help="folder or hub id; left out: those that ship")
    made.add_argument("--tokens", type=int, default=1024, help="length of a prompt")
    made.add_argument("--steps", type=int, default=16, help="tokens decoded behind it")
    made.add_argument(
        "--rounds", type=int, default=5, help="measured lives of each cache, behind an unmeasured one"
    )
    made.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, auto")
    made.add_argument("--dtype", default="auto", help="of weights and cache; auto: as the checkpoint says")
    made.add_argument("--shape", help="layers,width,heads,KV heads,feed-forward of a random model with gates")
    made.add_argument("--compiled", action="store_true", help="time compiled steps")
    made.add_argument("--output", type=Path, default="results/speed/speed.json", help="of the record")
    return made


def load_model(given: argparse.Namespace) -> Any:
    """The model on its device; a random one is a Llama of the stated shape.

    Raises:
        ValueError: It cannot be loaded, or a shape that is none.
    """
    if not given.shape:
        return load_named_model(given.model, dtype=given.dtype).to(given.device).requires_grad_(False)
    sizes = [int(part) for part in given.shape.split(",") if part.strip().isdigit()]
    if len(sizes) != 5 or sizes[1] % (2 * sizes[2]) or sizes[2] % sizes[3]:
        raise ValueError(
            f"shape {given.shape!r}: wanted layers, width, heads, KV heads, feed-forward width; width a "
            "multiple of 2 x heads, and the heads of KV heads."
        )
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip((*names, "intermediate_size"), sizes, strict=True))
    config = LlamaConfig(vocab_size=1024, max_position_embeddings=2**20, attn_implementation="sdpa", **shape)
    dtype = torch.float32 if given.dtype == "auto" else dtype_of(given.dtype)
    with torch.random.fork_rng(), torch.device(given.device):
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return made.eval().requires_grad_(False)


class Subjects:
    """The model, its copy that is not attached, the gates, and the tokens that every cache reads.

    Raises:
        ValueError: as `load_model`, gates that are not the model's, or numbers or policies that cannot be.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        if min(given.batch, given.tokens, given.steps, given.rounds) < 1:
            raise ValueError("batch, tokens, steps and rounds are 1 or more.")
        self.given = given
        given.device = str(resolve_device(given.device))
        self.model = model = load_model(given)
        # A copy whose weights are the same tensors.
        self.twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        self.gates: Any = load_gates(given.gates, model) if given.gates else None
        if given.shape and not given.gates:  # right in time alone
            self.gates = new_gates(model, "linear").to(given.device).eval().requires_grad_(False)
        shape, draw = (given.batch, given.tokens + given.steps), torch.Generator().manual_seed(0)
        ids_BT = torch.randint(model.config.get_text_config().vocab_size, shape, generator=draw)
        self.ids_BT = ids_BT.to(given.device)
        self.policies = given.policies.split(",")
        retain.attach(model)
        for policy in self.policies:
            self.cache(policy)  # refused before anything is read

    def cache(self, policy: str) -> retain.Cache:
        """An empty cache; FULL keeps everything."""
        if policy == FULL:
            return retain.Cache(self.model, None)
        gates = self.gates if load_policy(policy).learned else None
        return retain.Cache(self.model, policy, keep_ratio=self.given.keep_ratio, gates=gates, short="raise")

    def collected(self, runs: Mapping[str, Callable[[], X]]) -> dict[str, list[X]]:
        """Results of functions that are called in turn, round after round, from another one on; the first
        round does not count."""
        found: dict[str, list[X]] = {name: [] for name in runs}
        names = [*runs]
        with quiet(torch.get_num_threads()), torch.no_grad():
            for turn in tqdm(range(self.given.rounds + 1), unit="round"):
                start = turn % len(names)
                for name in (*names[start:], *names[:start]):
                    gc.collect()
                    result = runs[name]()
                    found[name] += [result] if turn else []
        return found


def live(
    model: Any, empty: Callable[[], Any], ids_BT: Tensor, tokens: int, cut_to: int | None = None
) -> dict[str, float]:
    """Times a cache that reads a prompt of so many tokens, is evicted from, and decodes the others.

    Args:
        empty: Makes the cache.
        cut_to: Entries of each head that are left of transformers' cache.

    Returns:
        `ttft_ms` and `token_ms`; `mib_held` behind the prompt; on CUDA `mib_peak` up to the first token,
        beyond what was held before.
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
    found = {"ttft_ms": 1e3 * (first - start), "mib_held": bytes_of(cache) / 2**20}
    if on_gpu:
        found["mib_peak"] = (torch.cuda.max_memory_allocated(ids_BT.device) - before) / 2**20
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


def measure(subjects: Subjects) -> list[dict[str, Any]]:
    """Times all caches: a row for each with medians, of times and of ratios to other caches' times of the
    same round (None: to itself)."""
    twin, tokens = subjects.twin, subjects.given.tokens
    timed = partial(live, ids_BT=subjects.ids_BT, tokens=tokens)
    plain, kept = partial(DynamicCache, config=twin.config), int(subjects.given.keep_ratio * tokens)
    runs = {PLAIN: partial(timed, twin, plain), DENSE: partial(timed, twin, plain, cut_to=max(1, kept))}
    for name in (FULL, *subjects.policies):
        runs[name] = partial(timed, subjects.model, partial(subjects.cache, name))
    found = subjects.collected(runs)

    def over(policy: str, other: str, name: str) -> float | None:
        pairs = zip(found[policy], found[other], strict=True)
        return None if other == policy else statistics.median(one[name] / its[name] for one, its in pairs)

    return [
        {
            "policy": policy,
            **{name: statistics.median(one[name] for one in lives) for name in lives[0]},
            "ttft_over_plain": over(policy, PLAIN, "ttft_ms"),
            **{f"token_over_{other}": over(policy, other, "token_ms") for other in (PLAIN, FULL, DENSE)},
        }
        for policy, lives in found.items()
    ]


@torch.no_grad()
def compiled_runs(subjects: Subjects, compiled: Callable[..., Any]) -> dict[str, Callable[[], float]]:
    """Functions that decode `steps` tokens more and give the milliseconds of one, by name; prompts are
    read."""
    given, model, twin = subjects.given, subjects.model, subjects.twin
    ids_BT, on_gpu = subjects.ids_BT[:, : given.tokens], subjects.ids_BT.is_cuda
    most, kept = given.steps * (given.rounds + 1), int(given.keep_ratio * given.tokens)
    seconds = clock if on_gpu else time.process_time

    def stepper(run: Any, cache: Any) -> Callable[[], float]:
        places = iter(range(given.tokens, given.tokens + most))

        def steps() -> float:
            start = seconds()
            for at in islice(places, given.steps):
                if on_gpu:
                    torch.compiler.cudagraph_mark_step_begin()
                positions = torch.full_like(ids_BT[:, :1], at)
                run(input_ids=ids_BT[:, :1], position_ids=positions, use_cache=True, **{CACHE: cache})
            return 1e3 * (seconds() - start) / given.steps

        return steps

    def filled(reader: Any, cache: Any, tokens: int) -> Any:
        reader(input_ids=ids_BT[:, :tokens], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache

    runs = {}
    if not on_gpu:  # where caches that hold everything would take more than there is
        runs[DYNAMIC] = stepper(twin, filled(twin, DynamicCache(config=twin.config), given.tokens))
        runs[ATTACHED] = stepper(model, filled(model, DynamicCache(config=model.config), given.tokens))
    static = StaticCache(config=twin.config, max_cache_len=kept + most)
    runs[STATIC] = stepper(compiled(twin.__call__), filled(twin, static, kept))
    ours = compiled(model.__call__)
    for name in (FULL, *subjects.policies):
        for way in ("compiled",) if on_gpu else ("as written", "compiled"):
            cache = subjects.cache(name).prefill(ids_BT)
            if way == "compiled":
                cache.engine.generation.room = most
                cache.engine.generation.decode_static(cache.state)
                assert cache.engine.is_static
            runs[f"{name}, {way}"] = stepper(ours if way == "compiled" else model, cache)
    return runs


def compiled_lines(subjects: Subjects, compiled: Callable[..., Any]) -> list[str]:
    """Times decoded tokens as written and compiled: the lines of the report, aims behind them."""
    runs = compiled_runs(subjects, compiled)
    found = {name: statistics.median(ms) for name, ms in subjects.collected(runs).items()}
    rivals = [name for name in (DYNAMIC, STATIC) if name in found]
    rows = [
        {"": name, "ms": ms, **{f"/ {one}": ms / found[one] for one in rivals}} for name, ms in found.items()
    ]
    lines = text_table(rows).splitlines()
    for way, rival, bound in DEVICE if subjects.ids_BT.is_cuda else HOST:
        for name in found:
            if name == way or (name.endswith(f", {way or 'as written'}") and not name.startswith(FULL)):
                ratio = found[name] / found[rival]
                held = "held" if ratio <= bound else "**NOT held**"
                lines.append(f"{held}: {name} takes {ratio:.3f} of {rival}, at most {bound:.3g}")
    return lines


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Times what the options say, prints the table, and writes a record; of compiled steps, lines alone."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(typed)
    subjects = Subjects(given)
    if given.compiled:
        mode = "reduce-overhead" if subjects.ids_BT.is_cuda else None
        print("\n".join(compiled_lines(subjects, partial(torch.compile, fullgraph=True, mode=mode))))
        return 0
    rows, device = measure(subjects), given.device
    if subjects.ids_BT.is_cuda:
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    write_record(given.output, rows, ["retain", "speed", *typed], device)
    print(f"{text_table(rows)}\nwritten: {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

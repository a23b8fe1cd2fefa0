"""Times decoded tokens as written and compiled, beside transformers' caches of as many entries.

    python -m retain.eval.compiled_steps --model random --layers 32 --width 64 --heads 8 --kv-heads 4
        --intermediate 64 --tokens 600 --policies snapkv,learned,merge --keep-ratios 0.2 --gates random

Options are those of `retain.eval.speed`. Behind one prompt each cache decodes `rounds` times so many `steps`,
in turn, in one process. On a CPU the processor's time counts, so that other work on the machine does not; on
CUDA a compiled step is a CUDA graph, and the device is waited for. Each line at the end says of one aim
whether it holds.
"""

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

import retain
from retain.config import build
from retain.eval.speed import RANDOM, Setting, load_model, parser, spread
from retain.hf.model.gates import load_gates, new_gates
from retain.hf.version_names import CACHE
from retain.kernels.measure import quiet
from retain.process.command import command

DYNAMIC, ATTACHED, STATIC, FULL = "DynamicCache", "DynamicCache, attached", "StaticCache", "full"
# Ratio of medians of what, over what, and its bound; on a narrow model of 32 layers, and on a GPU.
HOST = ((ATTACHED, DYNAMIC, 1.05), ("", DYNAMIC, 1.15), ("compiled", STATIC, 1.05))
DEVICE = (("compiled", STATIC, 1.05), ("compiled", f"{FULL}, compiled", 1 / 1.8))

Compile = Callable[..., Any]


def stepper(setting: Setting, run: Any, cache: Any, ids_BT: torch.Tensor) -> Callable[[], float]:
    """A function that decodes `steps` tokens behind what a cache holds, and gives the seconds of one."""
    clock = time.perf_counter if setting.on_gpu else time.process_time
    at = ids_BT.shape[1]

    def steps() -> float:
        nonlocal at
        start = clock()
        for _ in range(setting.steps):
            if setting.on_gpu:
                torch.compiler.cudagraph_mark_step_begin()
            positions = torch.full_like(ids_BT[:, :1], at)
            run(input_ids=ids_BT[:, :1], position_ids=positions, use_cache=True, **{CACHE: cache})
            at += 1
        if setting.on_gpu:
            torch.cuda.synchronize()
        return (clock() - start) / setting.steps

    return steps


def runs_of(setting: Setting, model: Any, compiled: Compile) -> dict[str, Callable[[], float]]:
    """What is timed, by name, each with its prompt read.

    Raises:
        ValueError: several keep ratios or batch sizes.
    """
    if len(setting.keep_ratios) > 1 or len(setting.batches) > 1:
        raise ValueError(
            f"compiled steps: keep_ratios {setting.keep_ratios} and batches {setting.batches} are several: "
            "pass one of each."
        )
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    gates: Any = new_gates(model, "linear", seed=setting.seed).eval() if setting.gates == RANDOM else None
    if setting.gates and gates is None:
        gates = load_gates(setting.gates, model)
    takes_gates = {preset.name for preset in retain.policies() if "gates" in preset.needs}
    (batch,), (ratio,), device = setting.batches, setting.keep_ratios, setting.device
    most = setting.steps * (setting.rounds + setting.warmup)
    draw = torch.Generator().manual_seed(setting.seed)
    ids_BT = torch.randint(model.config.vocab_size, (batch, setting.tokens), generator=draw).to(device)
    kept = int(ratio * setting.tokens)
    retain.attach(model)
    read = partial(stepper, setting, ids_BT=ids_BT)

    def filled(own: Any, cache: Any, tokens: int) -> Any:
        own(input_ids=ids_BT[:, :tokens], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache

    runs = {}
    if not setting.on_gpu:  # where caches that hold everything would take more than there is
        runs[DYNAMIC] = read(twin, filled(twin, DynamicCache(config=twin.config), setting.tokens))
        runs[ATTACHED] = read(model, filled(model, DynamicCache(config=model.config), setting.tokens))
    static = StaticCache(config=twin.config, max_cache_len=kept + most)
    runs[STATIC] = read(compiled(twin.__call__), filled(twin, static, kept))
    ours = compiled(model.__call__)
    for name in (FULL, *setting.policies):
        policy, learned = None if name == FULL else name, gates if name in takes_gates else None
        for way in ("compiled",) if setting.on_gpu else ("as written", "compiled"):
            how: dict[str, Any] = {} if policy is None else {"keep_ratio": ratio}
            cache = retain.Cache(model, policy, gates=learned, **how).prefill(ids_BT)
            if way == "compiled":
                cache.engine.generation.room = most
                cache.engine.generation.decode_static(cache.state)
                assert cache.engine.is_static
            runs[f"{name}, {way}"] = read(ours if way == "compiled" else model, cache)
    return runs


def measure(setting: Setting, compiled: Compile) -> list[str]:
    """The lines of the report."""
    with quiet(setting.threads), torch.no_grad():
        runs = runs_of(setting, load_model(setting), compiled)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(-setting.warmup, setting.rounds):
            names = [*runs]
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                seconds = runs[name]()
                if turn >= 0:
                    times[name].append(seconds)
    median = {name: spread(seconds)["median"] for name, seconds in times.items()}
    rivals = [name for name in (DYNAMIC, STATIC) if name in median]
    lines = [f"{'':26} {'ms':>8}  20 % .. 80 %  of {' and of compiled '.join(rivals)}"]
    for name, own in times.items():
        found = spread([1e3 * second for second in own])
        ratios = " ".join(f"{median[name] / median[rival]:8.3f}" for rival in rivals)
        lines.append(f"{name:26} {found['median']:8.2f}  {found['p20']:.2f} .. {found['p80']:.2f} {ratios}")
    for what, rival, bound in DEVICE if setting.on_gpu else HOST:
        whose = [one for one in median if one.endswith(f", {what or 'as written'}") or one == what]
        for name in (one for one in whose if not one.startswith(FULL)):
            ratio = median[name] / median[rival]
            held = "held" if ratio <= bound else "**NOT held**"
            lines.append(f"{held}: {name} takes {ratio:.3f} of {rival}, at most {bound:.3g}")
    return lines


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Times what the options say and prints the lines."""
    given = vars(parser().parse_args(sys.argv[1:] if arguments is None else list(arguments)))
    del given["output"]
    setting = build(given, Setting)
    mode = "reduce-overhead" if setting.on_gpu else None
    print("\n".join(measure(setting, partial(torch.compile, fullgraph=True, mode=mode))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

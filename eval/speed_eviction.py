"""The benchmark of evicting while decoding: whole steps of a model, with and without evictions every m
tokens.

    python -m retain.eval.speed_eviction [--policies snapkv,defensive,h2o] [--threads 2] [--rounds 6]
    [--output PATH]

In: the shape of a model with random weights, what it has read and what it holds of that. Out: for each
policy, the time of decoding with an eviction every m tokens over that of decoding without, a ratio of whole
steps. The one decision taken here: both decode the same tokens from forks of one cache, in turn, for a whole
number of periods, so that an eviction is paid for by the tokens that it came after; growth of the uncut cache
is in the other's time.
"""

import argparse
import gc
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retain
from retain.eval.record import code_state, environment, now, write_json, write_text
from retain.eval.speed_decode import DTYPES, spread_of
from retain.hf.cache import Cache

MOST = 1.05


@dataclass(frozen=True)
class Setting:
    """One benchmark.

    Args:
        policies: presets, separated by commas; those that take gates are left out.
        batch: sequences.
        hidden: E.
        intermediate: width of the MLP.
        heads: Q, query heads.
        kv_heads: H.
        width: D.
        layers: L.
        context: tokens read.
        tokens_per_head: entries held of them.
        every: m, tokens between evictions.
        periods: of m tokens, decoded in each round.
        rounds: ratios measured; one more before them is not counted.
        threads: CPU threads.
        dtype: a name in `retain.eval.speed_decode.DTYPES`.
        device: where it runs.
        seed: of all numbers.
    """

    policies: str = "snapkv,adakv,defensive,h2o"
    batch: int = 4
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    layers: int = 2
    context: int = 1024
    tokens_per_head: int = 819
    every: int = 32
    periods: int = 2
    rounds: int = 6
    threads: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        known = {preset.name: preset for preset in retain.policies()}
        problems = [f"unknown policy {name!r}" for name in self.names if name not in known]
        problems += [
            f"{name!r} takes gates" for name in self.names if name in known and "gates" in known[name].needs
        ]
        problems += [
            f"{name} is at least 1, got {value}"
            for name, value in vars(self).items()
            if isinstance(value, int) and value < 1 and name != "seed"
        ]
        if self.tokens_per_head > self.context:
            problems.append(f"tokens_per_head {self.tokens_per_head} is more than the context {self.context}")
        if self.dtype not in DTYPES:
            problems.append(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")

    @property
    def names(self) -> list[str]:
        return [name for name in self.policies.split(",") if name]


def model_of(setting: Setting) -> LlamaForCausalLM:
    """A Llama with random weights, attached."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        head_dim=setting.width,
        tie_word_embeddings=False,
    )
    with torch.device(setting.device):
        model = LlamaForCausalLM(config).to(DTYPES[setting.dtype]).eval().requires_grad_(False)
    retain.attach(model)
    return model


@torch.no_grad()
def decode(model: LlamaForCausalLM, cache: Cache, setting: Setting, context: int) -> float:
    """Seconds of decoding some periods of given tokens."""
    steps = setting.every * setting.periods
    ids = torch.arange(steps, device=setting.device).expand(setting.batch, steps) % 128
    mask = torch.ones(setting.batch, context + steps, dtype=torch.long, device=setting.device)
    positions = mask.cumsum(-1) - 1
    start = time.perf_counter()
    for step in range(steps):
        seen = context + step
        model(
            input_ids=ids[:, step : step + 1],
            attention_mask=mask[:, : seen + 1],
            position_ids=positions[:, seen : seen + 1],
            past_key_values=cache,
        )
    if setting.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def benchmark(setting: Setting, command: str = "") -> dict[str, Any]:
    """Read a context with each policy, decode from forks of it, and return the record."""
    torch.manual_seed(setting.seed)
    torch.set_num_threads(setting.threads)
    date, load = now(), os.getloadavg()[0]
    model = model_of(setting)
    ids = torch.randint(128, (setting.batch, setting.context), device=setting.device)
    rows: dict[str, Any] = {}
    for name in setting.names:
        kept, every = setting.tokens_per_head, setting.every
        again = Cache(model, policy=name, tokens_per_head=kept, regime="prefill+decode", every=every)
        once = Cache(model, policy=name, tokens_per_head=kept)
        again.prefill(ids), once.prefill(ids)
        held = again.entries_held
        times: dict[str, list[float]] = {"evicting": [], "appending": []}
        for turn in range(-1, setting.rounds):
            for what in ("evicting", "appending") if turn % 2 else ("appending", "evicting"):
                cache = (again if what == "evicting" else once).fork()
                gc.collect()
                seconds = decode(model, cache, setting, setting.context)
                if what == "evicting":
                    assert cache.entries_held == held, "the budget was not kept"
                    assert cache.evictions == again.evictions + setting.periods, "an eviction did not happen"
                if turn >= 0:
                    times[what].append(1e3 * seconds / (setting.every * setting.periods))
        ratio = spread_of([up / down for up, down in zip(times["evicting"], times["appending"], strict=True)])
        rows[name] = {
            "ms_a_step": {what: {**spread_of(taken), "all": taken} for what, taken in times.items()},
            "evicting over appending": {**ratio, "bound": MOST, "kept": ratio["median"] <= MOST},
            "bytes_held": again.bytes_held(),
            "bytes_allocated": again.bytes_allocated(),
        }
    machine = environment(setting.device, setting.threads)
    return {
        "what": "eviction",
        "date": date,
        "command": command,
        "setting": asdict(setting),
        "policies": rows,
        "environment": {**machine, "load_before": load, "load_after": os.getloadavg()[0]},
        "code": code_state(Path(__file__).parent),
    }


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting, machine, code = Setting(**record["setting"]), record["environment"], record["code"]
    commit = f"{code['commit'] or 'none'}, {'clean' if code['clean'] else 'NOT clean: scratch, no evidence'}"
    lines = [
        f"decoding with an eviction every {setting.every} tokens ({record['date']})",
        f"model: {setting.layers} layers of width {setting.hidden}, MLP {setting.intermediate}, "
        f"{setting.heads} query "
        f"and {setting.kv_heads} KV heads of width {setting.width}, {setting.dtype}, random weights",
        f"{setting.batch} sequences of {setting.context:,} tokens, {setting.tokens_per_head:,} entries a "
        "head held; "
        f"{setting.rounds} rounds of {setting.periods * setting.every} tokens",
        f"device: {machine['device']}; {machine['processor']}, {machine['cores']} cores, "
        f"{setting.threads} threads; "
        f"load {machine['load_before']:.2f} before, {machine['load_after']:.2f} after; commit {commit}",
        f"command: {record['command']}",
        "",
        f"{'policy':<24} {'appending':>10} {'evicting':>10} {'ratio':>8} {'20 %':>8} {'80 %':>8}",
    ]
    for name, row in record["policies"].items():
        ms = {what: statistics.median(own["all"]) for what, own in row["ms_a_step"].items()}
        ratio = row["evicting over appending"]
        verdict = "kept" if ratio["kept"] else "NOT KEPT"
        lines.append(
            f"{name:<24} {ms['appending']:>10.2f} {ms['evicting']:>10.2f} {ratio['median']:>8.3f} "
            f"{ratio['p20']:>8.3f} {ratio['p80']:>8.3f}  at most {ratio['bound']:g}: {verdict}"
        )
    return "\n".join([*lines, "", "ms a step, medians; ratios of pairs in one round", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(description="Time decoding with evictions beside decoding without.")
    defaults = Setting()
    for name, value in asdict(defaults).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--output", type=Path, default=Path("results/speed/eviction.json"))
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{name: getattr(given, name) for name in asdict(defaults)})
        record = benchmark(setting, shlex.join(["python", "-m", "retain.eval.speed_eviction", *typed]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = table(record)
    print(text, end="")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.output, record)
    write_text(given.output.with_suffix(".txt"), text)
    print(f"written: {given.output}, {given.output.with_suffix('.txt')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

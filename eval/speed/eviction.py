"""The benchmark of evicting while decoding: whole steps of a model, with and without evictions every m
tokens.

    python -m retain.eval.speed.eviction [--policies adakv,defensive,h2o] [--threads 2] [--rounds 3]
    [--output PATH]

In: the shape of a model with random weights, how much it has seen and what it holds of that. Out: for each
policy, the time of decoding with an eviction every m tokens over that of decoding without, for both readings
of "a step": the whole model's, and its attention over the entries held alone. Beside it, what a moment looks
at: entries held, and columns, the tokens that any head of a layer still holds. The answer is checked first
against a dense cache under a mask, and nothing is timed if it is wrong.

The one decision taken here: the context is not read. The cache reads the context's last tokens; the entries
before them are random, and are put where a policy might have left them: each head's own random share of the
context, of unequal sizes where heads share a budget. So heads disagree as much as they can, which is the most
that a moment may have to look at. Both sides then decode the same tokens from forks of one state, in turn,
for a whole number of periods. A cut row has room for one period, so growth is paid for in neither side if
there is one, and by the uncut side if there are more.
"""

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import retain
from retain.cache.store import RaggedStore
from retain.eval.speed.decode import attend_store, unequal
from retain.hf.cache.cache import Cache
from retain.hf.cache.history import History
from retain.hf.cache.layer import Recent
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import base_model
from retain.presets import Policy, load_policy
from retain.process.command import status_of
from retain.process.stopwatch import (
    DTYPES,
    Started,
    add_settings,
    clock,
    heading,
    publish,
    quiet,
    record_of,
    spread_of,
    synchronise,
    unfit,
    whole_numbers,
)

MOST = 1.05
VOCABULARY = 128
# First tokens that every head holds, as policies protect them.
SINKS = 4
# Error of a logit that is allowed, relative to the largest: the model sums in another order.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


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
        context: tokens seen.
        read: the last of them, which are read; every head holds them.
        tokens_per_head: entries held of the context.
        spread: longest row / shortest row, where heads share a budget.
        every: m, tokens between evictions.
        periods: of m tokens, decoded in each round.
        rounds: ratios measured.
        threads: CPU threads.
        dtype: a name in `retain.process.stopwatch.DTYPES`.
        device: where it runs.
        seed: of all numbers.
    """

    policies: str = "adakv,defensive,h2o"
    batch: int = 4
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    layers: int = 2
    context: int = 4096
    read: int = 32
    tokens_per_head: int = 819
    spread: float = 4.0
    every: int = 32
    periods: int = 1
    rounds: int = 3
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
            f"{name!r} gives layers or heads budgets of their own, and rows are not made for that here"
            for name in self.names
            if name in known and not _shares_evenly(load_policy(name))
        ]
        problems += [] if self.names else ["there is no policy to time; name at least one"]
        problems += whole_numbers(self, {"seed": 0, "rounds": 2})
        if self.heads % max(1, self.kv_heads):
            problems.append(f"heads {self.heads} are not a multiple of kv_heads {self.kv_heads}")
        if self.spread < 1:
            problems.append(f"spread is longest / shortest, at least 1, got {self.spread}")
        shortest = 2 * self.tokens_per_head / (1 + max(1.0, self.spread))
        if self.spread * shortest > self.context:
            problems.append(
                f"the longest row, of {self.spread * shortest:.0f} entries, is more than the context "
                f"{self.context}"
            )
        if shortest < SINKS + self.read + 1:
            problems.append(
                f"the shortest row, of {shortest:.0f} entries, has no room for {SINKS} first and the "
                f"{self.read} tokens read"
            )
        problems += unfit(self)
        if problems:
            raise ValueError(f"benchmark: {'; '.join(problems)}.")

    @property
    def names(self) -> list[str]:
        return [name for name in self.policies.split(",") if name]

    @property
    def steps(self) -> int:
        """Tokens decoded in a round."""
        return self.every * self.periods


def _shares_evenly(policy: Policy) -> bool:
    own = policy.allocation
    return own.layers == "uniform" and own.head_classes is None and own.quotas is None


def model_of(setting: Setting) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        head_dim=setting.width,
        max_position_embeddings=2 * setting.context,
        initializer_range=setting.hidden**-0.5,  # attention is felt in the logits, whatever the width
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device(setting.device):
        return LlamaForCausalLM(config).to(DTYPES[setting.dtype]).eval().requires_grad_(False)


def rows_held(setting: Setting, scope: str) -> list[Tensor]:
    """What each head holds of the context, of each layer a mask `[B, H, T]`: the first and the last tokens,
    and a random choice of its own of the others. Rows are equal for the scope `head`; for all others the
    heads of one sequence and layer are unequal, and hold its budget together."""
    draw = torch.Generator().manual_seed(setting.seed)
    masks = []
    for _ in range(setting.layers):
        spread = 1.0 if scope == "head" else setting.spread
        lengths = [
            unequal(setting.kv_heads, setting.tokens_per_head, spread, draw) for _ in range(setting.batch)
        ]
        order_BHT = torch.rand(setting.batch, setting.kv_heads, setting.context, generator=draw)
        order_BHT[..., :SINKS] = order_BHT[..., -setting.read :] = 2.0
        rank_BHT = order_BHT.argsort(-1, descending=True).argsort(-1)
        masks.append((rank_BHT < torch.tensor(lengths)[..., None]).to(setting.device))
    return masks


def extend_(cache: Cache, context: int, masks: Sequence[Tensor], draw: torch.Generator) -> None:
    """Have a cache that has read some tokens hold a longer context, of which they are the end.

    An entry from before them is made of a random one of the same row: each number of it, and of what stands
    beside it, times one between 1/2 and 3/2.

    Args:
        cache: that has evicted nothing yet.
        context: T, tokens that it will have seen.
        masks: what it will hold of them, of each layer `[B, H, T]`.
        draw: where the numbers come from, on the CPU.
    """
    read, past = cache.num_seen, cache.state.history
    assert past is not None and past.token_ids_BT is not None
    device, batch = past.valid_BT.device, past.batch_size
    ids_BT = torch.randint(VOCABULARY, (batch, context), generator=draw).to(device)
    ids_BT[:, -read:] = past.token_ids_BT
    positions_BT = torch.arange(context, device=device).expand(batch, -1)
    valid_BT = torch.ones(batch, context, dtype=torch.bool, device=device)
    cache.state.history = History(valid_BT, [positions_BT], [ids_BT], positions_BT[:, -1])
    for layer, mask_BHT in zip(cache.state.ragged, masks, strict=True):
        assert layer.store is not None and bool((layer.store.lengths_R == read).all())
        row_N, token_N = mask_BHT.flatten(0, 1).nonzero(as_tuple=True)
        before_N = token_N < context - read
        drawn_N = torch.randint(read, before_N.shape, generator=draw).to(before_N.device)
        from_N = row_N * read + torch.where(before_N, drawn_N, token_N - (context - read))
        tensors = {"lengths": mask_BHT.sum(-1).flatten(), "positions": token_N}
        for name, column in layer.store.tensors().items():
            if name in tensors:
                continue
            taken = column[from_N]
            if taken.is_floating_point():
                factor = 0.5 + torch.rand(taken.shape, generator=draw)
                factor[~before_N.cpu()] = 1.0
                taken = taken * factor.to(taken)
            tensors[name] = taken
        layer.store = RaggedStore.from_tensors(tensors, layer.store.num_heads, cache.state.slack)
        layer.seen = context
        layer.recent = Recent(layer.recent.queries, layer.recent.hidden)
    cache.state.prompt_B, cache.state.moments, cache.state.noted = [context] * batch, [context], context
    cache.state.evicted_at = context


def ids_of(setting: Setting, steps: int) -> Tensor:
    """The tokens that are decoded, `[B, S]`."""
    return torch.arange(steps, device=setting.device).expand(setting.batch, steps) % VOCABULARY


def decode(
    model: LlamaForCausalLM, cache: Cache, setting: Setting, steps: int, look: Callable[[], Any] | None = None
) -> list[Tensor]:
    """Decode given tokens, one at a time.

    Args:
        model: attached.
        cache: what it has seen.
        setting: of the benchmark.
        steps: how many tokens.
        look: called between steps, before each one that has an eviction behind it.

    Returns:
        the logits `[B, 1, V]` of each step.
    """
    seen, ids, logits = cache.num_seen, ids_of(setting, steps), []
    mask = torch.ones(setting.batch, seen + steps, dtype=torch.long, device=setting.device)
    positions = mask.cumsum(-1) - 1
    for step in range(steps):
        if look is not None and (step + 1) % setting.every == 0:
            look()
        output = model(
            input_ids=ids[:, step : step + 1],
            attention_mask=mask[:, : seen + step + 1],
            position_ids=positions[:, seen + step : seen + step + 1],
            past_key_values=cache,
        )
        logits.append(output.logits)
    return logits


def holds(store: RaggedStore, num_seen: int) -> Tensor:
    """Which tokens each head holds, `[B, H, T]`."""
    _, _, positions_N, rows_N = store.flat()
    held_RT = torch.zeros(store.num_rows, num_seen, dtype=torch.bool, device=positions_N.device)
    held_RT[rows_N, positions_N] = True
    return held_RT.view(store.batch_size, store.num_heads, num_seen)


def columns_held(cache: Cache) -> int:
    """Tokens that any head of a layer holds, of the sequence and layer with the most."""
    stores = cache.state.stores
    return max(int(holds(store, cache.num_seen).any(1).sum(-1).max()) for store in stores)


@contextmanager
def masked(model: nn.Module, masks: Sequence[Tensor]) -> Iterator[None]:
    """Each layer's attention under a mask of its own, `[B, Q, S, T]`, True = seen."""
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, own=own: (args, {**kwargs, "attention_mask": own}), with_kwargs=True
        )
        for layer, own in zip(base_model(model).layers, masks, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check(model: LlamaForCausalLM, cache: Cache, setting: Setting) -> dict[str, float]:
    """Decode a period, its eviction and one step more, and once again over a dense cache under masks.

    Nothing is ever moved in the dense cache: it has every entry where its token stood, and the masks say
    what the heads held.

    Returns:
        the largest error of a logit, relative to the largest logit, and what is allowed; the columns that
        the moment looked at.

    Raises:
        RuntimeError: more than that, or another number of entries than the budget.
    """
    seen, every = cache.num_seen, setting.every
    group = setting.heads // setting.kv_heads
    dense, befores = DynamicCache(config=model.config), []
    for idx, layer in enumerate(cache.state.ragged):
        assert layer.store is not None
        keys_ND, values_ND, positions_N, rows_N = layer.store.flat()
        both = [
            side.new_zeros(layer.store.num_rows, seen, setting.width).index_put_((rows_N, positions_N), side)
            for side in (keys_ND, values_ND)
        ]
        dense.update(*(side.unflatten(0, (setting.batch, setting.kv_heads)) for side in both), idx)
        befores.append(holds(layer.store, seen))
    own, columns = cache.fork(), []
    actual = decode(model, own, setting, every, lambda: columns.append(1 + columns_held(own)))
    _check_budget(cache, own, evictions=1)
    afters = [holds(store, own.num_seen) for store in own.state.stores]
    actual += [_step(model, own, setting, every, every + 1)]

    def per_query(past_BHT: Tensor, new: int) -> Tensor:
        causal_SS = torch.ones(new, new, dtype=torch.bool, device=past_BHT.device).tril()
        past_BHST = past_BHT[:, :, None].expand(-1, -1, new, -1)
        mask_BHST = torch.cat([past_BHST, causal_SS.expand(*past_BHT.shape[:2], -1, -1)], dim=-1)
        return mask_BHST.repeat_interleave(group, dim=1)

    with masked(model, [per_query(mask_BHT, every) for mask_BHT in befores]):
        wanted = _step(model, dense, setting, 0, every)
    with masked(model, [per_query(mask_BHT, 1) for mask_BHT in afters]):
        wanted = torch.cat([wanted, _step(model, dense, setting, every, every + 1)], dim=1)
    error = float((torch.cat(actual, dim=1) - wanted).abs().max() / wanted.abs().max())
    allowed = ALLOWED[setting.dtype]
    if not error <= allowed:
        raise RuntimeError(
            f"decoding with {cache.state.bound_policy.name} is wrong: error {error:.2e} against a dense "
            f"cache under masks, {allowed:.2e} allowed. It was not timed: run tests/hf."
        )
    return {"error": error, "allowed": allowed, "columns": columns[0]}


def _step(model: LlamaForCausalLM, cache: Any, setting: Setting, start: int, stop: int) -> Tensor:
    """Logits of some of the tokens that are decoded, read at once."""
    at = torch.arange(setting.context + start, setting.context + stop, device=setting.device)
    ids = ids_of(setting, stop)[:, start:]
    return model(
        input_ids=ids, position_ids=at.expand(setting.batch, -1), past_key_values=cache, use_cache=True
    ).logits


def _check_budget(before: Cache, after: Cache, evictions: int) -> None:
    """Refuse a cache that holds more or less than before, or has evicted more or less often.

    Raises:
        RuntimeError: it is one.
    """
    happened = after.evictions - before.evictions
    if after.entries_held != before.entries_held or happened != evictions:
        raise RuntimeError(
            f"{before.state.bound_policy.name} holds {after.entries_held:,} entries after {happened} "
            f"evictions, wanted {before.entries_held:,} after {evictions}: its budget is not kept."
        )


@contextmanager
def finishing(model: nn.Module, device: str) -> Iterator[list[float]]:
    """Seconds that the cache takes behind each forward of the attached decoder: evictions are in there, and
    next to nothing else."""
    spent: list[float] = []

    def start(*_: Any) -> None:
        synchronise(device)
        spent.append(-time.perf_counter())

    def stop(*_: Any) -> None:
        synchronise(device)
        spent[-1] += time.perf_counter()

    base = base_model(model)
    hooks = [base.register_forward_hook(start, prepend=True), base.register_forward_hook(stop)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def attention_ms(setting: Setting, cache: Cache, seconds: Callable[[Callable[[], Any]], float]) -> float:
    """Milliseconds of the attention of one step over what is held, all layers together."""
    shape = (setting.batch, setting.heads, 1, setting.width)
    queries_BQSD = torch.randn(shape, device=setting.device).to(DTYPES[setting.dtype])
    stores = cache.state.stores

    def once(store: RaggedStore) -> Callable[[], Tensor]:
        return lambda: attend_store(queries_BQSD, store, store.lengths_R.to(torch.int64)[:, None])

    return 1e3 * statistics.median(sum(seconds(once(store)) for store in stores) for _ in range(5))


def measure(model: LlamaForCausalLM, name: str, setting: Setting) -> dict[str, Any]:
    """Check and time one policy, on an attached model."""
    draw = torch.Generator().manual_seed(setting.seed)
    kept, scope = setting.tokens_per_head, load_policy(name).scope
    caches = {
        "evicting": Cache(
            model,
            policy=name,
            tokens_per_head=kept,
            regime="prefill+decode",
            every=setting.every,
            short="raise",
        ),
        "appending": Cache(model, policy=name, tokens_per_head=kept, short="raise"),
    }
    ids = torch.randint(VOCABULARY, (setting.batch, setting.read), generator=draw).to(setting.device)
    masks = rows_held(setting, scope)
    for cache in caches.values():
        cache.prefill(ids)
        extend_(cache, setting.context, masks, torch.Generator().manual_seed(setting.seed))
    evicting = caches["evicting"]
    checked = check(model, evicting, setting)
    seconds = clock(setting.device)
    times: dict[str, list[float]] = {"appending": [], "evicting": [], "eviction": [], "attention": []}
    for turn in range(setting.rounds):
        for what in ("evicting", "appending") if turn % 2 else ("appending", "evicting"):
            own = caches[what].fork()
            gc.collect()
            with finishing(model, setting.device) as spent:
                taken = seconds(partial(decode, model, own, setting, setting.steps))
            times[what].append(1e3 * taken / setting.steps)
            if what == "evicting":
                _check_budget(evicting, own, evictions=setting.periods)
                times["eviction"].append(1e3 * sum(spent) / setting.steps)
        times["attention"].append(attention_ms(setting, evicting, seconds))
    whole = [up / down for up, down in zip(times["evicting"], times["appending"], strict=True)]
    alone = [1 + up / down for up, down in zip(times["eviction"], times["attention"], strict=True)]
    lengths = [length for store in evicting.state.stores for length in store.lengths_R.tolist()]
    return {
        "scope": scope,
        "check": {what: checked[what] for what in ("error", "allowed")},
        "held": {"mean": statistics.mean(lengths), "min": min(lengths), "max": max(lengths)},
        "columns": checked["columns"],
        "ms_a_step": {what: {**spread_of(taken), "all": taken} for what, taken in times.items()},
        "ratios": {
            reading: {**spread_of(ratios), "bound": MOST, "kept": statistics.median(ratios) <= MOST}
            for reading, ratios in (("whole step", whole), ("attention alone", alone))
        },
        "bytes_held": evicting.bytes_held(),
        "bytes_allocated": evicting.bytes_allocated(),
    }


def benchmark(setting: Setting, command: str = "") -> dict[str, Any]:
    """Check and time every policy, and return the record.

    Raises:
        RuntimeError: a policy's answer is wrong, or its budget not kept.
    """
    started = Started()
    with torch.random.fork_rng():
        torch.manual_seed(setting.seed)
        model = model_of(setting)
        with attach(model), quiet(setting.threads):
            policies = {name: measure(model, name, setting) for name in setting.names}
    return record_of("eviction", setting, command, started, {"policies": policies})


def table(record: dict[str, Any]) -> str:
    """A record as the text that is printed and kept."""
    setting = Setting(**record["setting"])
    errors = [row["check"]["error"] for row in record["policies"].values()]
    lines = [
        *heading(
            record,
            f"decoding with an eviction every {setting.every} tokens",
            f"model: {setting.layers} layers of width {setting.hidden}, MLP {setting.intermediate}, "
            f"{setting.heads} query and {setting.kv_heads} KV heads of width {setting.width}, "
            f"{setting.dtype}, random weights",
            f"{setting.batch} sequences of {setting.context:,} tokens seen, {setting.tokens_per_head:,} "
            f"entries a head held ({setting.tokens_per_head / setting.context:.0%}), the last {setting.read} "
            f"of them read, the others random; {setting.rounds} rounds of {setting.steps} tokens",
            f"checked against a dense cache under masks: error {max(errors):.1e}, "
            f"{ALLOWED[setting.dtype]:.1e} allowed",
        ),
        f"{'policy':<24} {'held a head':>16} {'columns':>8} {'appending':>10} {'evicting':>10} "
        f"{'attention':>10} {'eviction':>10}",
    ]
    for name, row in record["policies"].items():
        ms = {what: own["median"] for what, own in row["ms_a_step"].items()}
        held = row["held"]
        rows = f"{held['min']:,}" if held["min"] == held["max"] else f"{held['min']:,} .. {held['max']:,}"
        lines.append(
            f"{name:<24} {rows:>16} {row['columns']:>8,} {ms['appending']:>10.3f} {ms['evicting']:>10.3f} "
            f"{ms['attention']:>10.3f} {ms['eviction']:>10.3f}"
        )
    lines += [
        "ms a step, medians: of the model (appending, evicting), of its attention alone, and a token's share "
        "of an eviction.",
        "columns: tokens of a sequence that a moment looks at, in the layer with the most.",
        "",
        f"{'what evictions cost':<42} {'20 %':>8} {'median':>8} {'80 %':>8}",
    ]
    for name, row in record["policies"].items():
        for reading, ratio in row["ratios"].items():
            verdict = "kept" if ratio["kept"] else "NOT KEPT"
            lines.append(
                f"{name + ', of the ' + reading:<42} {ratio['p20']:>8.3f} {ratio['median']:>8.3f} "
                f"{ratio['p80']:>8.3f}  at most {ratio['bound']:g}: {verdict}"
            )
    lines += [
        "whole step: evicting / appending, within one round; attention alone: (attention + eviction) / "
        "attention."
    ]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table and write it."""
    parser = argparse.ArgumentParser(description="Time decoding with evictions beside decoding without.")
    defaults = Setting()
    add_settings(parser, defaults)
    parser.add_argument("--output", type=Path, default=Path("results/speed/eviction.json"))
    given = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        setting = Setting(**{name: getattr(given, name) for name in asdict(defaults)})
        record = benchmark(setting, shlex.join(["python", "-m", "retain.eval.speed.eviction", *typed]))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    publish(record, table(record), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))

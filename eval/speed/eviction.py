"""Times evicting while decoding: whole steps of a model, with and without an eviction every m tokens.

    python -m retain.eval.speed --what eviction [--policies adakv,defensive,h2o] [--threads 2] [--rounds 3]
    [--output PATH]

Measured for each policy: the time of decoding with evictions over that of decoding without, for both readings
of "a step": the whole model's, and its attention over the entries held alone. Beside it stand the entries
held, and the columns that an eviction looks at: the tokens that any head of a layer still holds. The answer
is checked first against a dense cache under a mask, and nothing is timed if it is wrong.

Only the last tokens of the context are read. The entries before them are random, and are put where a policy
might have left them: each head's own random share of the context, of unequal sizes where heads share a
budget. So heads disagree as much as they can, which is the most that an eviction may have to look at. Both
sides then decode the same tokens from forks of one state, for a whole number of periods. A cut row has room
for one period, so neither side pays for growth if there is one, and the uncut side does if there are more.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import retain
from retain.cache.file_format import store_of, tensors_of
from retain.cache.tiered_store import Store, plain_of
from retain.eval.speed.caches import ALLOWED, check_logits, typed_policies
from retain.eval.speed.decode import PERCENTS, RowSettings, attend_store, unequal
from retain.hf.cache.cache import Cache
from retain.hf.cache.layer import Recent
from retain.hf.cache.state import History
from retain.hf.intercept.attach import attach
from retain.hf.model.decoder import base_model
from retain.hf.model.random_llama import LlamaSettings, random_llama
from retain.hf.version_names import CACHE
from retain.presets import Policy, load_policy
from retain.process.benchmark import Benchmark, Column, grid, heading
from retain.process.timing import Case, Times, interleave, quiet, spread, timed, timer

MOST = 1.05
VOCABULARY = 128
# First tokens that every head holds, as policies protect them.
SINKS = 4


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(RowSettings):
    """The model, the entries that it holds, and the clock."""

    policies: Annotated[str, "presets that take no gates, separated by commas"] = "adakv,defensive,h2o"
    hidden: Annotated[int, "width of the hidden state"] = 4096
    intermediate: Annotated[int, "width of the MLP"] = 14336
    layers: Annotated[int, "layers"] = 2
    context: Annotated[int, "tokens seen"] = 4096
    read: Annotated[int, "the last of them, which are read; every head holds them"] = 32
    tokens_per_head: Annotated[int, "entries held of the context"] = 819
    every: Annotated[int, "tokens between evictions"] = 32
    periods: Annotated[int, "of so many tokens, decoded in each round"] = 1
    rounds: Annotated[int, "ratios measured"] = 3

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        known = {preset.name: preset for preset in retain.policies()}
        if not self.names:
            yield "there is no policy to time; name at least one"
        for name in self.names:
            if name not in known:
                yield f"unknown policy {name!r}"
            elif known[name].regime == "select":
                yield f"{name!r} evicts nothing"
            elif "gates" in known[name].needs:
                yield f"{name!r} takes gates"
            elif not shares_evenly(load_policy(name)):
                why = "gives layers or heads budgets of their own, and rows are not made for that here"
                yield f"{name!r} {why}"
        shortest = 2 * self.tokens_per_head / (1 + max(1.0, self.spread))
        longest = self.spread * shortest
        if longest > self.context:
            yield f"the longest row, of {longest:.0f} entries, is more than the context {self.context}"
        if shortest < SINKS + self.read + 1:
            room = f"{SINKS} first and the {self.read} tokens read"
            yield f"the shortest row, of {shortest:.0f} entries, has no room for {room}"

    @property
    def names(self) -> list[str]:
        """The policies."""
        return typed_policies(self.policies)

    @property
    def steps(self) -> int:
        """Tokens decoded in a round."""
        return self.every * self.periods


def shares_evenly(policy: Policy) -> bool:
    """Whether a policy gives every layer the same budget, and no head one of its own."""
    return policy.allocation.layers == "uniform" and not policy.allocation.states_heads


def model_of(settings: EvictionSettings) -> PreTrainedModel:
    """A Llama with random weights, whose attention is felt in its logits whatever its width."""
    names = ("layers", "heads", "kv_heads", "intermediate", "threads", "dtype", "device", "seed")
    shape: dict[str, Any] = {name: getattr(settings, name) for name in names}
    own = {"vocab_size": VOCABULARY, "head_dim": settings.width, "initializer_range": settings.hidden**-0.5}
    return random_llama(LlamaSettings(width=settings.hidden, **shape), 2 * settings.context, **own)


def rows_held(settings: EvictionSettings, scope: str) -> list[Tensor]:
    """Masks `[B, H, T]` of what each head holds of the context, a layer each: the first and the last tokens,
    and a random choice of its own of the others. Rows are equal for the scope `head`; for all others the
    heads of one sequence and layer are unequal, and hold its budget together."""
    draw = torch.Generator().manual_seed(settings.seed)
    masks = []
    for _ in range(settings.layers):
        spread = 1.0 if scope == "head" else settings.spread
        lengths = [
            unequal(settings.kv_heads, settings.tokens_per_head, spread, draw) for _ in range(settings.batch)
        ]
        order_BHT = torch.rand(settings.batch, settings.kv_heads, settings.context, generator=draw)
        order_BHT[..., :SINKS] = order_BHT[..., -settings.read :] = 2.0
        rank_BHT = order_BHT.argsort(-1, descending=True).argsort(-1)
        masks.append((rank_BHT < torch.tensor(lengths)[..., None]).to(settings.device))
    return masks


def extend_(cache: Cache, context: int, masks: Sequence[Tensor], draw: torch.Generator) -> None:
    """Makes a cache that has read some tokens, and evicted nothing, hold a longer context, of which they are
    the end.

    An entry from before them is made of a random one of the same row: each number of it, and of what stands
    beside it, times one between 1/2 and 3/2.

    Args:
        cache: that is changed.
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
        for name, column in tensors_of(plain_of(layer.store)).items():
            if name in tensors:
                continue
            taken = column[from_N]
            if taken.is_floating_point():
                factor = 0.5 + torch.rand(taken.shape, generator=draw)
                factor[~before_N.cpu()] = 1.0
                taken = taken * factor.to(taken)
            tensors[name] = taken
        layer.store = store_of(tensors, layer.store.num_heads, cache.state.slack)
        layer.seen = context
        layer.recent = Recent(layer.recent.queries, layer.recent.hidden)
    cache.state.prompt_B, cache.state.moments, cache.state.noted = [context] * batch, [context], context
    cache.state.evicted_at = context


def step(model: nn.Module, cache: Any, settings: EvictionSettings, tokens: range, **more: Any) -> Tensor:
    """Reads some of the tokens that are decoded, at once; their logits `[B, S, V]`."""
    at_S = torch.tensor(tokens, device=settings.device)
    ids_BS = (at_S % VOCABULARY).expand(settings.batch, -1)
    at_BS = (settings.context + at_S).expand(settings.batch, -1)
    given = {"input_ids": ids_BS, "position_ids": at_BS, CACHE: cache, "use_cache": True}
    return model(**given, **more).logits


def decode(model: nn.Module, cache: Cache, settings: EvictionSettings, tokens: range) -> list[Tensor]:
    """Decodes tokens one at a time; the logits of each."""
    shape = (settings.batch, settings.context + tokens.stop)
    mask_BT = torch.ones(shape, dtype=torch.long, device=settings.device)
    return [
        step(
            model, cache, settings, range(at, at + 1), attention_mask=mask_BT[:, : settings.context + at + 1]
        )
        for at in tokens
    ]


def where_tokens_stood(store: Store, column_N: Tensor, num_seen: int) -> Tensor:
    """A number of each entry at its token, `[B, H, T, ...]`; zero where a head holds none."""
    _, _, positions_N, rows_N = store.flat()
    column_RT = column_N.new_zeros(store.num_rows, num_seen, *column_N.shape[1:])
    column_RT[rows_N, positions_N] = column_N
    return column_RT.unflatten(0, store.lengths_BH.shape)


def holds(store: Store, num_seen: int) -> Tensor:
    """Which tokens each head holds, `[B, H, T]`."""
    return where_tokens_stood(store, torch.ones_like(store.rows_N(), dtype=torch.bool), num_seen)


def columns_held(cache: Cache) -> int:
    """Tokens that any head of a layer holds, of the sequence and layer with the most."""
    return max(int(holds(store, cache.num_seen).any(1).sum(-1).max()) for store in cache.state.stores)


@contextmanager
def masked(model: nn.Module, masks: Sequence[Tensor]) -> Iterator[None]:
    """Each layer's attention under a mask of its own, `[B, Q, S, T]`, True = seen."""

    def under(mask: Tensor, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": mask}

    with ExitStack() as stack:
        for layer, own in zip(base_model(model).layers, masks, strict=True):
            attention = layer.self_attn
            stack.enter_context(attention.register_forward_pre_hook(partial(under, own), with_kwargs=True))
        yield


def seen_by(before_BHT: Tensor, after_BHT: Tensor, group: int) -> Tensor:
    """Mask of what the tokens of a period, and one behind its eviction, see of the context and one another.

    Args:
        before_BHT: what heads hold before the period.
        after_BHT: what they hold of context and period behind the eviction.
        group: query heads of a KV head.

    Returns:
        `[B, Q, S, T + S]`, True = seen.
    """
    new = 1 + after_BHT.shape[-1] - before_BHT.shape[-1]
    causal_SS = torch.ones(new, new, dtype=torch.bool, device=before_BHT.device).tril()
    before_BHST = before_BHT[:, :, None].expand(-1, -1, new, -1)
    mask_BHST = torch.cat([before_BHST, causal_SS.expand(*before_BHT.shape[:2], -1, -1)], dim=-1)
    mask_BHST[:, :, -1, :-1] = after_BHT
    return mask_BHST.repeat_interleave(group, dim=1)


def check(model: nn.Module, cache: Cache, settings: EvictionSettings) -> dict[str, float]:
    """Decodes a period, its eviction and one step more, and once again over a dense cache under masks.

    Nothing is ever moved in the dense cache: it has every entry where its token stood, and the masks say
    what the heads held.

    Returns:
        the largest error of a logit, relative to the largest logit, and what is allowed; the columns that
        the eviction looked at.

    Raises:
        RuntimeError: more than that, or another number of entries than the budget.
    """
    own, last = cache.fork(), settings.every - 1
    actual = decode(model, own, settings, range(last))
    columns = 1 + columns_held(own)
    actual += decode(model, own, settings, range(last, last + 1))
    check_budget(cache, own, evictions=1)
    dense, masks = DynamicCache(), []
    for idx, (before, after) in enumerate(zip(cache.state.stores, own.state.stores, strict=True)):
        sides = before.flat()[:2]
        dense.update(*(where_tokens_stood(before, side, settings.context) for side in sides), idx)
        held = holds(before, settings.context), holds(after, own.num_seen)
        masks.append(seen_by(*held, settings.heads // settings.kv_heads))
    actual += decode(model, own, settings, range(last + 1, last + 2))
    with masked(model, masks):
        wanted_BSV = step(model, dense, settings, range(last + 2))
    name = cache.state.bound_policy.name
    refused = (
        f"decoding with {name} is wrong: error {{error}} against a dense cache under masks, {{allowed}} "
        "allowed. It was not timed: run tests/hf."
    )
    checked = check_logits(torch.cat(actual, dim=1), wanted_BSV, settings.dtype, refused)
    return checked | {"columns": columns}


def check_budget(before: Cache, after: Cache, evictions: int) -> None:
    """Refuses a cache that holds more or less than before, or has evicted more or less often.

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
def finishing(model: nn.Module) -> Iterator[list[float]]:
    """Milliseconds that the cache takes behind each forward of the attached decoder: evictions, and next to
    nothing else. Start and end of each are listed; their sum is the time."""
    spent: list[float] = []
    base = base_model(model)
    with ExitStack() as stack:
        for sign in (-1e3, 1e3):
            note = partial(lambda sign, *_: spent.append(sign * timer()), sign)
            stack.enter_context(base.register_forward_hook(note, prepend=sign < 0))
        yield spent


def attention(settings: EvictionSettings, cache: Cache) -> Times:
    """Milliseconds of the attention of one step over what is held, all layers together."""
    queries_BQSD = settings.random_queries()

    def once(store: Store) -> float:
        return timed(partial(attend_store, queries_BQSD, plain_of(store)))[1]

    return {"ms": statistics.median(sum(map(once, cache.state.stores)) for _ in range(5))}


def measure_policy(model: PreTrainedModel, name: str, settings: EvictionSettings) -> dict[str, Any]:
    """Checks and times one policy, on an attached model."""
    draw = torch.Generator().manual_seed(settings.seed)
    scope, ids_shape = load_policy(name).scope, (settings.batch, settings.read)
    own: dict[str, Any] = {"tokens_per_head": settings.tokens_per_head, "short": "raise"}
    evicting = Cache(model, name, regime="prefill+decode", every=settings.every, **own)
    appending = Cache(model, name, **own)
    ids = torch.randint(VOCABULARY, ids_shape, generator=draw).to(settings.device)
    masks = rows_held(settings, scope)
    for cache in (evicting, appending):
        cache.prefill(ids)
        extend_(cache, settings.context, masks, torch.Generator().manual_seed(settings.seed))
    checked = check(model, evicting, settings)

    def steps(start: Cache, evictions: int) -> Times:
        cache = start.fork()
        with finishing(model) as spent:
            _, ms = timed(partial(decode, model, cache, settings, range(settings.steps)))
        if evictions:
            check_budget(start, cache, evictions)
        return {"ms": ms / settings.steps, "eviction": sum(spent) / settings.steps}

    uncut = Case(call=partial(steps, appending, 0))
    cut = Case(call=partial(steps, evicting, settings.periods), beside=uncut)
    alone = Case(call=partial(attention, settings, evicting))
    interleave([uncut, cut, alone], rounds=settings.rounds, warmup=1)
    ms = {"appending": uncut.times("ms"), "evicting": cut.times("ms")}
    ms |= {"attention": alone.times("ms"), "eviction": cut.times("eviction")}
    ratios = {
        "whole step": cut.over(uncut, "ms"),
        "attention alone": [1 + up / down for up, down in zip(ms["eviction"], ms["attention"], strict=True)],
    }
    lengths = [length for store in evicting.state.stores for length in store.lengths_R.tolist()]
    return {
        "scope": scope,
        "check": {what: checked[what] for what in ("error", "allowed")},
        "held": {"mean": statistics.mean(lengths), "min": min(lengths), "max": max(lengths)},
        "columns": checked["columns"],
        "ms_a_step": {what: spread(taken) for what, taken in ms.items()},
        "ratios": {
            reading: {**(spread(found) or {}), "bound": MOST, "kept": statistics.median(found) <= MOST}
            for reading, found in ratios.items()
        },
        "bytes_held": evicting.bytes_held(),
        "bytes_allocated": evicting.bytes_allocated(),
    }


def measure(settings: EvictionSettings) -> dict[str, Any]:
    """Checks and times every policy.

    Raises:
        RuntimeError: a policy's answer is wrong, or its budget not kept.
    """
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = model_of(settings)
        with attach(model), quiet(settings.threads, settings.device):
            return {"policies": {name: measure_policy(model, name, settings) for name in settings.names}}


def table(record: dict[str, Any], settings: EvictionSettings) -> list[str]:
    """A record as the lines that are printed and kept."""
    rows = [{"policy": name, **row} for name, row in record["policies"].items()]
    ratios = [
        {"name": f"{row['policy']}, of the {reading}", **ratio}
        for row in rows
        for reading, ratio in row["ratios"].items()
    ]
    for row in ratios:
        row["verdict"] = f"at most {row['bound']:g}: {'kept' if row['kept'] else 'NOT KEPT'}"
    error = max(row["check"]["error"] for row in record["policies"].values())
    return [
        *heading(
            record,
            f"decoding with an eviction every {settings.every} tokens",
            f"model: {settings.layers} layers of width {settings.hidden}, MLP {settings.intermediate}, "
            f"{settings.heads} query and {settings.kv_heads} KV heads of width {settings.width}, "
            f"{settings.dtype}, random weights",
            f"{settings.batch} sequences of {settings.context:,} tokens seen, {settings.tokens_per_head:,} "
            f"entries a head held ({settings.tokens_per_head / settings.context:.0%}), the last "
            f"{settings.read} of them read, the others random; {settings.rounds} rounds of {settings.steps} "
            "tokens",
            f"checked against a dense cache under masks: error {error:.1e}, "
            f"{ALLOWED[settings.dtype]:.1e} allowed",
        ),
        *grid(COLUMNS, rows),
        "ms a step, medians: of the model (appending, evicting), of its attention alone, and a token's share "
        "of an eviction.",
        "columns: tokens of a sequence that an eviction looks at, in the layer with the most.",
        "",
        *grid(RATIOS, ratios),
        "whole step: evicting / appending, within one round; attention alone: (attention + eviction) / "
        "attention.",
    ]


COLUMNS = (
    *(Column("policy", "policy"), Column("held at least", "held.min", ",d")),
    *(Column("at most", "held.max", ",d"), Column("columns", "columns", ",d")),
    *(Column(what, f"ms_a_step.{what}") for what in ("appending", "evicting", "attention", "eviction")),
)
RATIOS = (
    *(Column("what evictions cost", "name"), *(Column(*percent) for percent in PERCENTS)),
    Column("", "verdict"),
)
BENCHMARK = Benchmark("retain.eval.speed", "eviction", EvictionSettings, measure, table)

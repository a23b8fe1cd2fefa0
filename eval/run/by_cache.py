"""One `retain.Cache` for every policy, protection and budget: regimes that evict again.

A cell is what stands in the README: make a cache with a policy, a budget and a regime, prefill the context
(in chunks where the regime says so), and generate, each question on a fork. Shared between cells is only what
no policy has a say in, the first forward (`retain.eval.run.first_read`): the whole context, or its first
chunk, is read once, and every cell's cache is told of it as if it had read for itself. So what is measured is
what a user gets; tests compare with caches that read, to the bit, and the regime that evicts once with the
shared prefill, which agrees to the token and the entry. Controls have no place here: they know more than a
cache can.

In these regimes a cache may cut at any forward, so entries and bytes are those at the end of the answer,
`peak_entries` the most that was held between two forwards, and `attended_ratio` says what the answer was
given from: an answer that is over before the first eviction came from the full cache, whatever is held then.

Read together are items whose answers do not depend on one another: where chunks are cut, only contexts of one
length, since chunk borders are places in the padded row.

The one decision taken here: the budget is checked behind every forward, not assumed. What is held must be
exactly what the budget states of what had been seen at the last eviction, plus what has come since; and
fewer than `every` tokens may have come since, where the regime evicts while decoding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.budget.statement import LayerShape, spread
from retain.eval.config import CACHE_REGIMES, FULL, CompareConfig, Line, budget_of, lines_of
from retain.eval.run.answers import Held, alike, make_row, needle_share, needle_tokens, padded, respond
from retain.eval.run.evaluated_model import Subject, Unit, item_seed, naming
from retain.eval.run.first_read import FirstRead, read_first
from retain.eval.run.results_store import Row
from retain.eval.run.shared_prefill import wanted_by
from retain.eval.tasks.suite import Item, Suite
from retain.hf.cache.cache import Cache

FULL_LINE = Line(FULL, FULL)


class Watch:
    """Behind every forward of `generate`: counts what is held, and checks it against the budget.

    Args:
        cache: That decodes.
        line, budget: Its cell.
        check: Whether there is a budget.
    """

    def __init__(self, cache: Cache, line: Line, budget: float, *, check: bool):
        self.cache, self.line, self.budget, self.check = cache, line, budget, check
        self.shapes = [LayerShape(spec.num_kv_heads, 1) for spec in cache.state.specs]
        self.heads = sum(shape.num_heads for shape in self.shapes)
        self.held_B, self.seen_B = held_now(cache)
        self.peak_B = self.held_B
        self.counts = [(self.held_B, self.seen_B)]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Bool[Tensor, " N"]:
        self.look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def before(self, place: int) -> tuple[tuple[int, int], ...]:
        """Of one sequence, (held, seen) before every forward, and behind the last."""
        return tuple((int(held_B[place]), int(seen_B[place]) * self.heads) for held_B, seen_B in self.counts)

    def look(self) -> None:
        """Count, and check.

        Raises:
            RuntimeError: What is held is not what the budget states.
        """
        self.held_B, self.seen_B = held_now(self.cache)
        self.peak_B = torch.maximum(self.peak_B, self.held_B)
        self.counts.append((self.held_B, self.seen_B))
        if not self.check:
            return
        cache, seen = self.cache, self.seen_B.tolist()
        since = cache.num_seen - cache.state.evicted_at if cache.evictions else 0
        wanted = [length * self.heads for length in seen]
        if cache.evictions:
            totals = spread(budget_of(self.budget), [length - since for length in seen], self.shapes)
            wanted = [total + since * self.heads for total in totals.total_B]
        if self.held_B.tolist() != wanted:
            raise RuntimeError(
                f"{self.line.name} at {self.budget:g} holds {self.held_B.tolist()} entries where the budget "
                f"and the {since} tokens since the last of {cache.evictions} evictions are {wanted}"
            )
        if "decode" in cache.state.regime.parts and cache.evictions and since >= cache.state.regime.every:
            raise RuntimeError(
                f"{self.line.name} at {self.budget:g}: {since} tokens have come since the last eviction, and "
                f"entries go every {cache.state.regime.every}"
            )


def held_now(cache: Cache) -> tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]:
    """Entries that each sequence holds, over all layers and heads, and tokens that it has seen."""
    table = cache.budgets()
    return table.held_BLH.sum((1, 2)), table.seen_B


def run_by_cache(
    config: CompareConfig, suite: Suite, subject: Subject, unit: Unit, items: Mapping[int, Item]
) -> list[Row]:
    """Measure one unit in its one regime, or in `context_only`, which the shared prefill measures faster.

    Returns:
        Its rows: item by item, question by question, the full cache first.
    """
    rows: list[Row] = []
    (regime,) = unit.regimes(config)
    lines = lines_of(config, regime)
    cells = [(FULL_LINE, 1.0), *((line, budget) for budget in config.budgets for line in lines)]
    for group in groups_of({**items}, regime):
        with naming(unit, "the first forward"):
            contexts = read_contexts(config, subject, group, regime, lines)
        for line, budget in cells:
            with naming(unit, f"{line.name} at {budget:g}"):
                rows += run_cell(config, suite, subject, unit, group, regime, line, budget, contexts)
    check_equal_memory(rows, unit)
    return sorted(rows, key=lambda row: (row.item, row.question))  # stable: cells stay in order


def groups_of(items: dict[int, Item], regime: str) -> list[dict[int, Item]]:
    """Items that are read together. Of those that end where they like each is read alone: what a finished
    sequence is filled up with would count as seen. Where chunks are cut there is no padding: it would move
    the borders of a shorter context's chunks."""
    groups: dict[tuple[int, ...], dict[int, Item]] = {}
    for number, group in enumerate(alike(items)):
        for index, item in group.items():
            width = len(item.context_ids) if "chunked" in regime else -1
            groups.setdefault((number, width, index if item.end_ids else -1), {})[index] = item
    return [*groups.values()]


def read_contexts(
    config: CompareConfig, subject: Subject, items: Mapping[int, Item], regime: str, lines: Sequence[Line]
) -> FirstRead:
    """Items' contexts, and what the forward came to that all cells have in common."""
    ids, mask = padded([item.context_ids for item in items.values()])
    return read_first(
        subject.model,
        ids.to(subject.device),
        mask.to(subject.device),
        chunk=config.chunk_tokens if "chunked" in regime else None,
        wanted=wanted_by(subject, lines),
    )


def open_cache(
    model: Any, config: CompareConfig, regime: str, policy: Any, budget: float, gates: Any, seeds: Any = None
) -> Cache:
    """The cache of one cell.

    Raises:
        ValueError: A policy, regime, budget and gates that do not go together.
    """
    if policy is None:
        return Cache(model, policy=None)
    stated = budget_of(budget)
    return Cache(
        model,
        policy,
        keep_ratio=stated.keep_ratio,
        tokens_per_head=stated.tokens_per_head,
        regime=CACHE_REGIMES.get(regime, regime),
        every=config.every,
        gates=gates if policy.learned else None,
        seeds=seeds,
        # Comparisons measure what is lost, at equal memory; they are not to be told.
        capacity=None,
        short="raise",
    )


def run_cell(
    config: CompareConfig,
    suite: Suite,
    subject: Subject,
    unit: Unit,
    items: Mapping[int, Item],
    regime: str,
    line: Line,
    budget: float,
    contexts: FirstRead,
) -> list[Row]:
    """One policy at one budget, on items that are read together."""
    device = subject.device
    seeds = [item_seed(unit.seed, unit.task, index) for index in items]
    policy = subject.policies.get(line.name)
    cache = open_cache(subject.model, config, regime, policy, budget, subject.gates_of(line), seeds)
    contexts.into(cache)
    rows = []
    first = next(iter(items.values()))
    for question, asked in enumerate(first.asked):
        fork = cache.fork() if len(first.asked) > 1 else cache
        watch = Watch(fork, line, budget, check=policy is not None)
        behind = measured(fork, watch, items) if regime == "context_only" else None
        own = [[*item.context_ids, *item.asked[question].question_ids] for item in items.values()]
        answers = respond(
            subject.model,
            fork,
            *(side.to(device) for side in padded(own)),
            new_tokens=asked.generate,
            end_ids=first.end_ids,
            watch=watch,
        )
        found = measured(fork, watch, items)
        for place, (index, item) in enumerate(items.items()):
            held = found[place] if behind is None else _behind(behind[place], found[place])
            rows.append(
                make_row(
                    config,
                    suite,
                    unit,
                    index=index,
                    item=item,
                    question=question,
                    regime=regime,
                    line=line,
                    budget=budget,
                    held=held,
                    answer=answers[place],
                    gate_bytes=subject.gate_bytes(line),
                    gates=subject.gates_sha(line),
                    trained=subject.trained(line),
                )
            )
    return rows


def _behind(then: Held, now: Held) -> Held:
    """What was held behind the one eviction, with the peak since."""
    return Held(
        then.kept_entries,
        then.seen_entries,
        now.peak_entries,
        then.bytes_held,
        then.bytes_full,
        then.needles_kept,
        now.before,
        then.bytes_beside,
    )


def measured(cache: Cache, watch: Watch, items: Mapping[int, Item]) -> list[Held]:
    """What each item holds now."""
    held, full, beside = cache.bytes_held(), cache.bytes_full(), bytes_beside(cache)
    entries, seen = int(watch.held_B.sum()), int(watch.seen_B.sum()) * watch.heads
    rows = zip(watch.held_B.tolist(), watch.seen_B.tolist(), watch.peak_B.tolist(), strict=True)
    return [
        Held(
            own,
            length * watch.heads,
            peak,
            held * own // entries,
            full * length * watch.heads // seen,
            needles_held(cache, place, item),
            watch.before(place),
            beside * own // entries,
        )
        for place, ((own, length, peak), item) in enumerate(zip(rows, items.values(), strict=True))
    ]


def bytes_beside(cache: Cache) -> int:
    """Bytes that a cache keeps beside entries in order to evict again: recent queries and attention inputs,
    and what is noted of every entry (running attention, norms, a gate's score). Of `bytes_allocated` it is
    what is neither room for entries (their positions and the free room included) nor a table of it."""
    columns = [column for store in cache.state.stores for column in store.beside.values()]
    noted = sum(column.untyped_storage().nbytes() for column in columns)
    return noted + sum(layer.recent.num_bytes for layer in cache.state.ragged)


def positions_held(cache: Cache, place: int) -> list[list[Tensor]]:
    """Places in its sequence of the entries that a sequence holds, by layer and head."""
    found = []
    for layer, spec in zip(cache.state.ragged, cache.state.specs, strict=True):
        if layer.store is None:
            own = cache.state.positions_BT[place][cache.state.valid_BT[place]]
            found.append([own] * spec.num_kv_heads)
            continue
        positions_N, rows_N = layer.store.positions_C[layer.store.index_N()], layer.store.rows_N()
        first = place * spec.num_kv_heads
        found.append([positions_N[rows_N == first + head] for head in range(spec.num_kv_heads)])
    return found


def needles_held(cache: Cache, place: int, item: Item) -> float | None:
    """Share of the entries of an item's needles that are held; None where it does not say which they are."""
    if not item.needles:
        return None
    tokens = torch.tensor(needle_tokens(item))
    layers = positions_held(cache, place)
    hits = [sum(int(torch.isin(tokens, own.cpu()).sum()) for own in heads) for heads in layers]
    return needle_share(hits, [len(heads) for heads in layers], len(tokens))


def check_equal_memory(rows: Sequence[Row], unit: Unit) -> None:
    """Check that policies of one budget which have seen equally much of an item hold equally much of it.

    Raises:
        RuntimeError: They do not.
    """
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.item, row.question, row.budget, row.seen_entries)
        other = first.setdefault(key, row)
        if (row.kept_entries, row.bytes_held) != (other.kept_entries, other.bytes_held):
            raise RuntimeError(
                f"unequal memory in {unit.key} at budget {row.budget:g}: {row.policy} holds "
                f"{row.kept_entries} entries of item {row.item}, {other.policy} {other.kept_entries}"
            )

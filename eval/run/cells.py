"""Measures a batch of items in every cell: what its cache holds, and what is answered from it.

Caches that evict no more decode as one batch, as many sequences as `max_sequences` allows, and no more forks
than that live at a time; a cache that evicts while it decodes decodes alone. In the regimes that evict once
entries and bytes are counted behind the eviction, in the others when the answer has been read.
`attended_ratio` says what the answer was given from: an answer that is over before the first eviction came
from the full cache, whatever is held then.

Equal memory is checked, not assumed. Behind every forward a cache holds exactly what the budget states of the
tokens seen at the last eviction, plus the tokens since; and policies of one budget that have seen equally
much of an item hold equally many entries and bytes of it. Otherwise the run stops.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from retain.budget.statement import Budget, LayerShape, spread
from retain.cache.store import LOG_WEIGHT
from retain.eval.config import FULL, SHARED, CompareConfig, Line, budget_of, lines_of
from retain.eval.run.answers import Answer, Noise, alike, respond
from retain.eval.run.caches import Batch, CellCaches, SingleEviction, caches_of
from retain.eval.run.evaluated_model import EvaluatedModel, Unit, naming
from retain.eval.run.results_store import Row, tokens_sha
from retain.eval.tasks.suite import Item, Suite
from retain.hf.cache.cache import Cache
from retain.presets import Policy

FULL_LINE = Line(FULL, FULL)
# Where entries are of different size, bytes are equal up to this share: 2 % are half an entry of each of 4
# layers at 25 entries a layer.
ROUNDED = 0.02
# Where entries are packed, a group of them may not be full in any head: bytes are less by up to this share.
PACKED = 0.1


def run_items(
    config: CompareConfig, suite: Suite, evaluated: EvaluatedModel, unit: Unit, items: dict[int, Item]
) -> Iterator[Row]:
    """Yields the rows of a unit's items in all of its regimes, of a question the full cache's first.

    Raises:
        RuntimeError: Unequal memory.
    """
    for group in alike(items, alone=not unit.shared, chunked="chunked" in unit.path):
        batch = Batch(config, suite, evaluated, unit, group)
        for regime, caches in caches_of(batch):
            width = max(1, config.max_sequences // len(group)) if isinstance(caches, SingleEviction) else 1
            for budget in (1.0, *config.budgets):
                lines = (FULL_LINE,) if budget == 1.0 else lines_of(config, regime)
                rows: list[Row] = []
                for start in range(0, len(lines), width):
                    rows += run_lines(batch, regime, caches, budget, lines[start : start + width])
                    check_equal_memory(rows, unit, evaluated)
                yield from rows


def run_lines(
    batch: Batch, regime: str, caches: CellCaches, budget: float, lines: Sequence[Line]
) -> Iterator[Row]:
    """Measures lines whose caches decode as one batch. Their caches are gone when this ends."""
    items, first, unit = [*batch.items.values()], batch.first, batch.unit
    made: list[Cache] = []
    behind: list[dict[str, Any]] = []
    for line in lines:
        with naming(unit, f"{regime}, {line.name} at {budget:g}"):
            made.append(caches.cache_of(line, budget))
            if regime in SHARED:
                behind += held_of(made[-1], items)
    for question in caches.questions:
        ids_BT, mask_BT = batch.ids(question)
        new_tokens = first.asked[question].generate
        with naming(unit, f"{regime}, {', '.join(line.name for line in lines)} at {budget:g}"):
            if isinstance(caches, SingleEviction):
                cache = Cache.concat(made, slack=ids_BT.shape[1] - made[0].num_seen + new_tokens)
            else:
                cache = caches.asked(made[0], question)
            own = [batch.evaluated.policies.get(line.name) for line in lines for _ in items]
            watch = Watch(cache, lines[0], budget, own)
            noise = None
            if batch.config.temperature:  # of an item's questions, each its own
                seeds = [seed + question for seed in batch.seeds] * len(lines)
                noise = Noise(batch.config.temperature, seeds, ids_BT.shape[1])
            answers = respond(
                batch.evaluated.model,
                cache,
                ids_BT.repeat(len(lines), 1),
                mask_BT.repeat(len(lines), 1),
                new_tokens=new_tokens,
                end_ids=first.end_ids,
                watch=watch,
                noise=noise,
            )
            held = behind or held_of(cache, items)
        cells = [(line, index) for line in lines for index in batch.items]
        for place, (line, index) in enumerate(cells):
            counts = watch.counts_of(place)[: len(answers[place].generated) + 1]
            yield make_row(batch, index, question, regime, line, budget, held[place], counts, answers[place])


class Watch:
    """Counts what a cache holds behind every forward of `generate`, and checks it against the budget of a
    line, the first of several; nothing is checked of the full cache.

    Args:
        policies_B: The policy of each sequence; None: one that keeps as many entries as the budget says.
    """

    def __init__(
        self,
        cache: Cache,
        line: Line,
        budget: float,
        policies_B: Sequence[Policy | None] | None = None,
    ):
        self.cache, self.line, self.budget = cache, line, budget
        size, self.policies_B = cache.state.element_size, policies_B
        self.shapes = [
            LayerShape(own.num_kv_heads, own.entry_width * size, element_size=size)
            for own in cache.state.specs
        ]
        self.heads = sum(shape.num_heads for shape in self.shapes)
        self.evictions, self.evicted_B = -1, torch.zeros(())  # tokens seen at the last of so many evictions
        self.counts: list[tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]] = []
        self.look()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Bool[Tensor, " N"]:
        self.look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def counts_of(self, place: int) -> list[tuple[int, int]]:
        """Returns entries (held, seen) of one sequence before every forward, and behind the last."""
        return [(int(held_B[place]), int(seen_B[place]) * self.heads) for held_B, seen_B in self.counts]

    def look(self) -> None:
        """Counts and checks.

        Raises:
            RuntimeError: What is held is not what the budget states.
        """
        cache = self.cache
        held_B, seen_B = held_now(cache)
        self.counts.append((held_B, seen_B))
        since = cache.num_seen - cache.state.evicted_at if cache.evictions else 0
        if cache.evictions != self.evictions:
            self.evictions, self.evicted_B = cache.evictions, seen_B - since
        if self.line.policy == FULL:
            return
        name, wanted_B = f"{self.line.name} at {self.budget:g}", seen_B * self.heads
        if cache.evictions:
            wanted_B = self._stated_B() + (seen_B - self.evicted_B) * self.heads
        if not torch.equal(held_B, wanted_B):
            raise RuntimeError(
                f"{name} holds {held_B.tolist()} entries where the budget and the {since} tokens since the "
                f"last of {cache.evictions} evictions are {wanted_B.tolist()}"
            )
        if "decode" in cache.state.regime.parts and cache.evictions and since >= cache.state.regime.every:
            raise RuntimeError(
                f"{name}: {since} tokens have come since the last eviction, and entries go every "
                f"{cache.state.regime.every}"
            )

    def _stated_B(self) -> Int64[Tensor, " B"]:
        """Entries that the budget states at the last eviction."""
        lengths_B = self.evicted_B.tolist()
        policies_B = self.policies_B or [None] * len(lengths_B)
        kinds = [(0, None) if own is None else (own.beside_bytes, own.precision) for own in policies_B]
        found = torch.zeros(len(lengths_B), dtype=torch.int64)
        for kind, policy in dict(zip(kinds, policies_B, strict=True)).items():
            own_B = torch.tensor([one == kind for one in kinds])
            shapes = self.shapes if policy is None else [policy.shape_held(own) for own in self.shapes]
            stated = budget_of(self.budget, policy)
            found[own_B] = torch.tensor(stated_entries(stated, lengths_B, shapes))[own_B]
        return found


def stated_entries(budget: Budget, lengths_B: Sequence[int], shapes: Sequence[LayerShape]) -> tuple[int, ...]:
    """Returns the entries that a budget states of each sequence, over all layers and heads."""
    return tuple(spread(budget, lengths_B, shapes).total_B)


def held_now(cache: Cache) -> tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]:
    """Returns the entries that each sequence holds, over all layers and heads, and the tokens it has seen."""
    table = cache.budgets()
    return table.held_BLH.sum((1, 2)), table.seen_B


def bytes_now(cache: Cache) -> Int64[Tensor, " B"] | None:
    """Returns the bytes that each sequence holds; None while a prefill is held densely."""
    stores = cache.state.stores
    if len(stores) < len(cache.state.specs):
        return None
    return torch.stack([(one.bytes_B - cache.state.unused_bytes_B(one)).cpu() for one in stores]).sum(0)


def held_of(cache: Cache, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns what a cache holds of each item, as fields of `Row`; bytes by its share of the entries."""
    total, beside = cache.report().total, bytes_beside(cache)
    held_B, seen_B = held_now(cache)
    bytes_B = bytes_now(cache)
    heads = sum(spec.num_kv_heads for spec in cache.state.specs)
    entries, seen = int(held_B.sum()), int(seen_B.sum()) * heads
    return [
        {
            "kept_entries": kept,
            "seen_entries": length * heads,
            "bytes_held": total.bytes_held * kept // entries if bytes_B is None else int(bytes_B[place]),
            "bytes_full": total.bytes_full * length * heads // seen,
            "bytes_beside": beside * kept // entries,
            "needles_kept": needles_held(cache, place, item),
        }
        for place, (kept, length, item) in enumerate(
            zip(held_B.tolist(), seen_B.tolist(), items, strict=True)
        )
    ]


def bytes_beside(cache: Cache) -> int:
    """Returns the bytes that a cache keeps beside entries in order to evict again: recent queries and
    attention inputs, and what is noted of every entry (running attention, norms, a gate's score)."""
    stores = [layer.store for layer in cache.state.ragged if layer.store is not None]
    columns = [column for store in stores for name, column in store.beside.items() if name != LOG_WEIGHT]
    noted = sum(column.untyped_storage().nbytes() for column in columns)
    return noted + sum(layer.recent.num_bytes for layer in cache.state.ragged)


def positions_held(cache: Cache, place: int) -> list[list[Tensor]]:
    """Returns the positions of the entries that a sequence holds, by layer and head."""
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
    """Returns the share of the entries of an item's needles that are held: mean over heads, then layers.
    None where the item does not say which they are."""
    if not item.needles:
        return None
    tokens = torch.tensor(sorted({token for start, stop in item.needles for token in range(start, stop)}))
    shares = [
        int(torch.isin(torch.cat(heads).cpu(), tokens).sum()) / (len(heads) * len(tokens))
        for heads in positions_held(cache, place)
    ]
    return sum(shares) / len(shares)


def check_equal_memory(rows: Sequence[Row], unit: Unit, evaluated: EvaluatedModel) -> None:
    """Checks that lines of one budget which have seen equally much of an item hold equally much of it: as
    many entries and bytes, or where something stands beside the entries of one, as many bytes but for what is
    rounded to entries. A line that holds entries in fewer bytes holds no more bytes than the budget states,
    and no less but for what is rounded, unless it holds all that there is.

    Raises:
        RuntimeError: They do not.
    """
    first: dict[tuple[Any, ...], Row] = {}
    exact: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = (row.item, row.question, row.budget, row.seen_entries)
        kind = evaluated.held_as(row.policy)
        if kind[1] is not None:
            _check_bytes(row, unit)
            continue
        alike = exact.setdefault((*place, kind), row)
        equal = (row.kept_entries, row.bytes_held) == (alike.kept_entries, alike.bytes_held)
        other = first.setdefault(place, row) if equal else alike
        if not equal or abs(row.bytes_held - other.bytes_held) > ROUNDED * other.bytes_held:
            raise RuntimeError(
                f"unequal memory in {unit.key} at budget {row.budget:g}: {row.policy} holds "
                f"{row.kept_entries} entries and {row.bytes_held} bytes of item {row.item}, {other.policy} "
                f"{other.kept_entries} and {other.bytes_held}"
            )


def _check_bytes(row: Row, unit: Unit) -> None:
    """Checks the bytes of a line that holds entries in fewer of them.

    Raises:
        RuntimeError: They are not those of the budget.
    """
    stated = row.budget * row.bytes_full
    least = 0.0 if row.kept_entries == row.seen_entries else (1 - PACKED) * stated
    if not least <= row.bytes_held <= stated:
        raise RuntimeError(
            f"unequal memory in {unit.key} at budget {row.budget:g}: {row.policy} holds {row.bytes_held} "
            f"bytes of item {row.item}, of {stated:.0f} that the budget states"
        )


def make_row(
    batch: Batch,
    index: int,
    question: int,
    regime: str,
    line: Line,
    budget: float,
    held: Mapping[str, Any],
    counts: Sequence[tuple[int, int]],
    answer: Answer,
) -> Row:
    """Scores one answer; `counts` are entries (held, seen) before each forward of it, and behind the last."""
    item, unit, evaluated = batch.items[index], batch.unit, batch.evaluated
    task, asked = batch.suite.tasks[unit.task], item.asked[question]
    text = "" if asked.text is None else asked.text(answer.tokens)
    null = not answer.tokens or (asked.text is not None and not text.strip())
    exact, partial = (0.0, 0.0) if null else map(float, asked.score(answer.tokens))
    counted = counts[: len(answer.generated)]
    shares = [kept / seen for kept, seen in counted]
    return Row(
        run=batch.config.run,
        unit=unit.key,
        unit_rows=0,  # not known before the unit is whole
        seed=unit.seed,
        task=unit.task,
        family=task.family,
        item=index,
        question=question,
        regime=regime,
        policy=line.name,
        base_policy=line.policy,
        protection=line.protection,
        budget=float(budget),
        keep_ratio=held["kept_entries"] / held["seen_entries"],
        score=exact if task.primary == "exact" else partial,
        exact=exact,
        partial=partial,
        null=null,
        ended=answer.ended,
        num_prompt=len(item.context_ids) + len(asked.question_ids),
        num_generated=len(answer.tokens),
        peak_entries=max(kept for kept, _ in counts),
        gate_bytes=evaluated.gate_bytes(line),
        tokens=answer.tokens,
        tokens_sha=tokens_sha(answer.tokens),
        text=text,
        about={**item.about, **asked.about},
        attended_ratio=sum(shares) / len(shares) if shares else None,
        read_entries=sum(kept for kept, _ in counted),
        seeded=task.seeded,
        gates=evaluated.gates_sha(line),
        trained=evaluated.trained(line),
        **held,
    )

"""Measures a batch of items through engines of vLLM: the rows that `retain.eval.run.cells` makes of caches.

The regime is `served`: a request is the prompt but its last token, its policy evicts, and the engine goes on
with that token. Of a line, all budgets and items are served together; the full cache is the first line's
engine, told to leave a request alone. What is held is counted from the sets that the plug-in decided on (in
whole blocks, which it checks as it packs them), and must be what the budget states.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retain.eval.config import FULL, SERVED, CompareConfig, Line, budget_of, lines_of
from retain.eval.run.answers import cut
from retain.eval.run.caches import Batch
from retain.eval.run.cells import FULL_LINE, check_equal_memory, make_row, stated_entries
from retain.eval.run.engine import About, Request, Served
from retain.eval.run.engines import stated
from retain.eval.run.evaluated_model import EvaluatedModel, Unit, item_seed, naming
from retain.eval.run.results_store import Row
from retain.eval.tasks.suite import Item, Suite
from retain.vllm.settings import PREFIX


def serve_items(
    config: CompareConfig, suite: Suite, evaluated: EvaluatedModel, unit: Unit, items: dict[int, Item]
) -> Iterator[Row]:
    """Yields the rows of a unit's items, the full cache's first.

    Raises:
        RuntimeError: An engine does not hold what a budget states.
    """
    batch = Batch(config, suite, evaluated, unit, items)
    lines = lines_of(config, SERVED)
    found: dict[tuple[str, float], list[Row]] = {}
    for place, line in enumerate(lines):
        with naming(unit, f"{SERVED}, the engine of {line.name}"):
            engine = evaluated.model.of(line)
            cells = [(FULL_LINE, 1.0)] * (place == 0) + [(line, budget) for budget in config.budgets]
            asked = [request_of(batch, index, own, budget) for own, budget in cells for index in items]
            answers = iter(engine.ask(asked))
        for own, budget in cells:
            with naming(unit, f"{SERVED}, {own.name} at {budget:g}"):
                found[own.name, budget] = [
                    row_of(batch, index, own, budget, next(answers), engine.about) for index in items
                ]
    for budget in (1.0, *config.budgets):
        rows = [row for own in ((FULL_LINE,) if budget == 1.0 else lines) for row in found[own.name, budget]]
        check_equal_memory(rows, unit, evaluated)
        yield from rows


def request_of(batch: Batch, index: int, line: Line, budget: float) -> Request:
    """What an engine is asked of an item: its draw is that of the item, as in a cache."""
    item = batch.items[index]
    own: dict[str, Any] = {"off": True}
    if line.policy != FULL:
        own = {**stated(budget), "seed": item_seed(batch.unit.seed, batch.unit.task, index)}
    extra = {f"{PREFIX}{name}": value for name, value in own.items()}
    *prompt, first = (*item.context_ids, *item.question_ids)
    return Request(tuple(prompt), first, item.generate, item.end_ids, extra)


def row_of(batch: Batch, index: int, line: Line, budget: float, served: Served, about: About) -> Row:
    """Scores an answer, and counts what it was given from.

    Raises:
        RuntimeError: The engine does not hold what the budget states.
    """
    item = batch.items[index]
    length = len(item.context_ids) + len(item.question_ids) - 1
    heads = sum(shape.num_heads for shape in about.shapes)
    kept = length * heads
    if served.places_LH is not None:
        kept = sum(len(places) for layer in served.places_LH for places in layer)
    wanted = length * heads
    if line.policy != FULL:
        (wanted,) = stated_entries(budget_of(budget, batch.config.page), [length], about.shapes)
    if kept != wanted:
        full = " (it served the request in full, and its log says why)" if served.places_LH is None else ""
        raise RuntimeError(
            f"item {index}: the engine holds {kept} entries of a prompt of {length} tokens{full}, and the "
            f"budget states {wanted}."
        )
    # The last token of the prompt is read in front of the answer's first.
    answer = cut(served.tokens, item.end_ids)
    counts = [(kept + n * heads, (length + n) * heads) for n in range(len(answer.generated) + 1)]
    return make_row(
        batch, index, 0, SERVED, line, budget, held_of(item, kept, length, served, about), counts, answer
    )


def held_of(item: Item, kept: int, length: int, served: Served, about: About) -> Mapping[str, Any]:
    """What an engine holds of an item, as fields of `Row`."""
    (entry_bytes,) = {shape.entry_bytes for shape in about.shapes}
    heads = sum(shape.num_heads for shape in about.shapes)
    return {
        "kept_entries": kept,
        "seen_entries": length * heads,
        "bytes_held": kept * entry_bytes,
        "bytes_full": length * heads * entry_bytes,
        "bytes_beside": 0,
        "needles_kept": _needles_kept(item, served.places_LH),
    }


def _needles_kept(item: Item, places_LH: Sequence[Sequence[Sequence[int]]] | None) -> float | None:
    """As `retain.eval.run.cells.needles_held`."""
    if not item.needles:
        return None
    if places_LH is None:
        return 1.0
    tokens = {token for start, stop in item.needles for token in range(start, stop)}
    shares = [
        sum(len(tokens.intersection(places)) for places in layer) / (len(layer) * len(tokens))
        for layer in places_LH
    ]
    return sum(shares) / len(shares)

"""Measures how well an eviction's own numbers tell that its answer will be wrong: areas under the ROC curve.

    python -m retain.eval.diagnose.capacity --gates runs/gates/reference-0 --seed 0 --output runs/capacity

Contexts with more and more facts (and tasks of a suite) are asked under keep_ratios and scopes.
`capacity.json` and `capacity.md` say for each signal the chance that a failure has the higher number than an
answer, over items that the full cache answers, and what limits on the price would have said. A signal is
judged twice: over all budgets together, where keep_ratio alone foretells most failures, and *within* a
keep_ratio and scope, where only the context can. keep_ratio and the number of facts are what it must beat.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from retain.budget.capacity import capacity_of, stored_limit
from retain.budget.statement import Budget
from retain.eval.diagnose.teacher_forced import ids_on, read_context
from retain.eval.run.answers import respond
from retain.eval.tasks.reference_basic import item_writer
from retain.eval.tasks.reference_shift import crowd_item
from retain.eval.tasks.suite import Item, Suite
from retain.eval.tasks.suites import load_suite
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.model.gates import load_gates
from retain.policy import candidates_of, keep_masks, load_policy, plan_of, score_entries, shape_of
from retain.process.command import command
from retain.process.provenance import write_json, write_text

# Signal -> its meaning.
ABOUT = {
    "price": "the largest predicted risk that went",
    "lost": "share of the predicted risk that went",
    "total": "sum of the predicted risk that went",
    "pressure": "entries above the limit (and protected ones) / entries kept",
    "keep_ratio": "minus the keep_ratio: no look at the context",
    "facts": "facts in the context, which nobody tells a cache",
}
SIGNALS = tuple(ABOUT)


@dataclass(frozen=True)
class Case:
    """One item under one budget.

    Args:
        task: its task, `crowd` for contexts written here.
        facts: stated in it; 0 where the task says nothing of it.
        index: of the item.
        scope: who shares the budget.
        keep_ratio: the budget.
        wrong: whether the answer was wrong, which the full cache gave.
        signals: by name; higher should be worse.
    """

    task: str
    facts: int
    index: int
    scope: str
    keep_ratio: float
    wrong: bool
    signals: Mapping[str, float]


def auroc(values: Sequence[float], wrong: Sequence[bool], cells: Sequence[Any] | None = None) -> float:
    """The chance that a failure has the higher value: `P(x_wrong > x_right) + P(=) / 2`; NaN where all went
    alike.

    Args:
        values: of a signal.
        wrong: whether each failed.
        cells: to which each belongs: only pairs of one cell count; None: all pairs.
    """
    x, failed = np.asarray(values, dtype=float), np.asarray(wrong, dtype=bool)
    cell = np.zeros(len(x)) if cells is None else np.asarray(cells)
    hits = pairs = 0.0
    for own in np.unique(cell):
        high, low = x[(cell == own) & failed], np.sort(x[(cell == own) & ~failed])
        hits += sum(np.searchsorted(low, high, side).sum() / 2 for side in ("left", "right"))
        pairs += len(high) * len(low)
    return float(hits / pairs) if pairs else float("nan")


@torch.inference_mode()
def look(
    model: Any,
    gates: Any,
    place: tuple[str, int, int, Item],
    *,
    policy: str,
    scopes: Sequence[str],
    keep_ratios: Sequence[float],
    limit: float,
) -> list[Case]:
    """One item under every budget: evicted from before its first question is known, then asked it.

    Args:
        gates: calibrated to risk.
        place: task, facts, index, item.
        policy: whose score it is.
        limit: by which `pressure` counts.

    Returns:
        none where the full cache does not answer.
    """
    task, facts, index, item = place
    asked, ids_BT = item.asked[0], ids_on(model, [*item.context_ids, *item.asked[0].question_ids])
    cache = read_context(model, item.context_ids, evidence=True, gates=gates)
    evidence = cache.evidence
    assert evidence is not None
    own = load_policy(policy)
    scores = [score_entries(own, layer, learned=gates.score(layer)) for layer in evidence]
    shapes = [shape_of(layer) for layer in evidence]
    total = sum(float(score.values_BHT.double().sum()) for score in scores)
    forks, cells = [cache.fork().evict_with([layer.exists_BHT for layer in evidence])], list[Case]()
    for scope in scopes:
        # Nothing can be drawn of budgets that heads do not share.
        shared = load_policy(policy, [f"scope={scope}", *(["draw=null"] if scope == "head" else [])])
        for keep_ratio in keep_ratios:
            plan = plan_of(shared, Budget(keep_ratio=keep_ratio), evidence[0].valid_BT, shapes)
            candidates = [candidates_of(plan, score) for score in scores]
            keeps = keep_masks(plan, candidates)
            capacity = capacity_of(plan.shares, candidates, keeps, limit)
            forks.append(cache.fork().evict_with(keeps))
            price, lost, pressure = capacity.price_B[0], capacity.lost_B[0], capacity.pressure_B[0]
            signals = {"price": price, "lost": lost, "total": lost * total, "pressure": pressure}
            signals |= {"keep_ratio": -keep_ratio, "facts": float(facts)}
            cells.append(Case(task, facts, index, scope, keep_ratio, False, signals))
    both = Cache.concat(forks, slack=len(asked.question_ids) + asked.generate)
    ids_NT = ids_BT.repeat(len(forks), 1)
    how: dict[str, Any] = {"new_tokens": asked.generate, "end_ids": item.end_ids}
    made = respond(model, both, ids_NT, torch.ones_like(ids_NT), **how)
    right, *others = [asked.score(answer.tokens)[0] == 1 for answer in made]
    return [replace(case, wrong=not well) for case, well in zip(cells, others, strict=True)] if right else []


def study(model: Any, gates: Any, items: Iterable[tuple[str, int, int, Item]], **how: Any) -> list[Case]:
    """Every item that the full cache answers, under every budget; the others are printed.

    Args:
        how: `policy`, `scopes`, `keep_ratios` and `limit` of `look`.
    """
    cases: list[Case] = []
    for place in tqdm(items, desc="items", unit="item"):
        found = look(model, gates, place, **how)
        if not found:
            tqdm.write("{} {} item {}: the full cache does not answer it".format(*place))
        cases += found
    return cases


def tables(cases: Sequence[Case], limits: Sequence[float]) -> dict[str, Any]:
    """Areas of each signal by part and scope, and what limits on the price would have said: those that are
    given, and the ones at which warnings and failures agree best."""
    parts: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.task != "crowd"):
        part = "crowd" if case.task == "crowd" else "tasks"
        parts.setdefault(f"{part}, scope {case.scope}", []).append(case)
    answer: dict[str, Any] = {"signals": {}, "limits": {}}
    for where, rows in parts.items():
        wrong, cells = [case.wrong for case in rows], [case.keep_ratio for case in rows]
        values = {name: [case.signals[name] for case in rows] for name in SIGNALS}
        answer["signals"][where] = {
            "cases": len(rows),
            "wrong": sum(wrong),
            **{n: {"all": auroc(x, wrong), "within": auroc(x, wrong, cells)} for n, x in values.items()},
        }
        prices, failed = np.asarray(values["price"]), np.asarray(wrong)
        tried = sorted({*limits, best_limit(prices, failed)})
        answer["limits"][where] = [said(prices, failed, limit) for limit in tried]
    return answer


def best_limit(prices: np.ndarray, wrong: np.ndarray) -> float:
    """The limit of the largest `P(price > limit | wrong) - P(price > limit | right)`, rounded to three
    digits; the lowest of equals."""
    if wrong.all() or not wrong.any():
        return float("inf")
    tried = np.unique(prices)
    gains = [(prices[wrong] > limit).mean() - (prices[~wrong] > limit).mean() for limit in tried]
    return float(f"{tried[int(np.argmax(gains))]:.3g}")


def said(prices: np.ndarray, wrong: np.ndarray, limit: float) -> dict[str, float | None]:
    """Rates of a limit on the price: the share warned of, of failures the share that was warned of, and the
    share that is wrong with and without a warning."""
    warned = prices > limit

    def mean(which: np.ndarray) -> float | None:
        return float(which.mean()) if len(which) else None

    return {
        "limit": limit,
        "warned": mean(warned),
        "found": mean(warned[wrong]),
        "wrong_if_warned": mean(wrong[warned]),
        "wrong_if_not": mean(wrong[~warned]),
    }


def written(made: Mapping[str, Any], command: str) -> str:
    """The tables as Markdown."""
    lines = ["# Which number tells that an eviction costs the answer?", "", f"`{command}`", ""]
    for where, areas in made["signals"].items():
        lines += [f"## {where}: {areas['wrong']} wrong of {areas['cases']}", ""]
        lines += ["| signal | all budgets | within a budget | |", "|---|---:|---:|---|"]
        for name in SIGNALS:
            own = areas[name]
            lines.append(f"| {name} | {own['all']:.3f} | {own['within']:.3f} | {ABOUT[name]} |")
        lines += ["", "| limit on price | warned | of failures | wrong, warned | wrong, not |"]
        lines.append("|---:|---:|---:|---:|---:|")
        for row in made["limits"][where]:
            shares = [row[name] for name in ("warned", "found", "wrong_if_warned", "wrong_if_not")]
            text = " | ".join("-" if share is None else f"{share:.1%}" for share in shares)
            lines.append(f"| {row['limit']:.3g} | {text} |")
        lines.append("")
    return "\n".join(lines)


def items_of(
    suite: Suite, seed: int, facts: Sequence[int], tasks: Sequence[str], count: int, context_tokens: int
) -> Iterator[tuple[str, int, int, Item]]:
    """Contexts with so many facts, and items of the suite's tasks."""
    for number in facts:
        for index in range(count):
            writer = item_writer(f"crowd{number}", seed, index)
            yield "crowd", number, index, crowd_item(writer, number, context_tokens)
    for task in tasks:
        for index in range(count):
            yield task, 0, index, suite.item(task, seed, index, context_tokens)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gates", required=True, help="folder of gates of the seed's reference model")
    parser.add_argument("--seed", type=int, default=0, help="of the reference model, and of its items")
    parser.add_argument("--policy", default="fused", help="whose score it is")
    parser.add_argument("--scopes", nargs="+", default=["model", "head"])
    ratios = [0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2]
    parser.add_argument("--keep-ratios", nargs="+", type=float, default=ratios)
    parser.add_argument("--facts", nargs="*", type=int, default=[8, 16, 32, 48, 64, 80, 100, 120])
    parser.add_argument("--tasks", nargs="*", default=[], help="of the reference suite, beside the crowds")
    parser.add_argument("--items", type=int, default=24, help="of each number of facts, and of each task")
    parser.add_argument("--context-tokens", type=int, default=1000)
    parser.add_argument("--limits", nargs="*", type=float, default=[], help="on the price, to be judged")
    parser.add_argument("--output", required=True, help="folder for capacity.json and capacity.md")
    typed = [*(sys.argv[1:] if argv is None else argv)]
    given = parser.parse_args(typed)
    suite = load_suite("reference")
    model = suite.load_model(given.seed)
    attach(model)
    gates = load_gates(given.gates, model)
    if gates.unit != "risk":
        parser.error(
            f"gates in {given.gates} are in {gates.unit!r}: calibrate them to risk (train/distill.py)"
        )
    stored = stored_limit(gates)
    limits = [*given.limits, *([] if stored is None else [stored])]
    items = [*items_of(suite, given.seed, given.facts, given.tasks, given.items, given.context_tokens)]
    how = {name: getattr(given, name) for name in ("policy", "scopes", "keep_ratios")}
    cases = study(model, gates, items, **how, limit=limits[0] if limits else gates.threshold_for(0.02))
    made, folder = tables(cases, limits), Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    page = written(made, shlex.join(["python", "-m", "retain.eval.diagnose.capacity", *typed]))
    record = {"settings": vars(given), "stored_limit": stored, **made, "cases": [*map(asdict, cases)]}
    write_json(folder / "capacity.json", record)
    write_text(folder / "capacity.md", page)
    print(page)


if __name__ == "__main__":
    sys.exit(main())

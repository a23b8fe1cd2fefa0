"""Published orderings of policies against what a run measured: a table for each topic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from retain.budget.statement import LayerShape, spread
from retain.eval.claims.orderings import ENDS, PROTECTION, Checked, Ordering, in_words, load_orderings
from retain.eval.config import budget_of
from retain.eval.report.blocks import Block, Bullets, Prose, Section, Table, words
from retain.eval.report.tables import spelled
from retain.protection import Protection, protected_mask


def orderings_section(checked: Sequence[Checked], manifest: Mapping[str, Any]) -> Section:
    """Topic by topic: claims, then differences and what they say."""
    margin = manifest["config"]["margin_points"]
    distinct = {
        (frozenset((one.made.policy, one.made.baseline)), one.made.regime, one.made.budget) for one in checked
    }
    by_place = {
        place: Counter(one.finding for one in checked if one.published == published)
        for place, published in (("where published", True), ("beyond", False))
    }
    counts = "; ".join(
        f"{place}: {', '.join(f'{count} {finding}' for finding, count in own.most_common())}"
        for place, own in by_place.items()
        if own
    )
    blocks: list[Block] = [
        Prose(
            "Policy minus baseline over all tasks, each counting alike, at the same regime, budget and "
            f"bytes, with paired 95 % intervals. {len(distinct)} comparisons, each counted once. Each "
            "interval is for one comparison; verdicts and findings are adjusted (Holm) over all of a regime."
        ),
        Prose(
            "`a > b` holds where a is better, and does not hold where it is worse, equivalent or identical; "
            f"`a = b` holds where the difference is shown to lie within ±{margin:g} points, also if it is "
            "certain, and does not hold where it is shown and lies outside. Against the margin: "
            f"the whole interval is above +{margin:g}, within ±{margin:g}, below -{margin:g}, or open (over "
            "an end of it). † marks what is beyond what was published: another regime or share, or an "
            f"ordering that was not measured by its paper. In all, {counts}."
        ),
    ]
    for place, topic in enumerate(dict.fromkeys(one.ordering.topic for one in checked)):
        own = [one for one in checked if one.ordering.topic == topic]
        blocks += [Prose(topic, "heading"), _claims(own, checked, topic)]
        blocks.append(_table(f"tab-orderings-{place}", own, topic, checked, manifest))
    return Section("orderings", "Published orderings", tuple(blocks))


def _claims(own: Sequence[Checked], checked: Sequence[Checked], topic: str) -> Bullets:
    """Claims of papers, notes, and references to other topics."""
    same = len({one.ordering.claim for one in own}) == 1
    lines = [
        f"{'' if same else _named(one) + ': '}{one.ordering.claim}"
        f"{f' (arXiv {one.ordering.paper})' if one.ordering.paper else ''}"
        for one in own
    ]
    lines += load_orderings().notes.get(topic, ())
    lines += [
        f"See also {_named(one)} under *{one.ordering.topic}*"
        for one in checked
        if topic in one.ordering.also
    ]
    return Bullets(tuple((line, ()) for line in dict.fromkeys(lines)))


def _table(
    ident: str, own: Sequence[Checked], topic: str, checked: Sequence[Checked], manifest: Mapping[str, Any]
) -> Table:
    ratios = sorted({one.made.budget for one in checked})
    margin = manifest["config"]["margin_points"]
    columns = ["published", "regime", *(f"{ratio:g}" for ratio in ratios), "finding", f"against ±{margin:g}"]
    protects = topic in (PROTECTION, ENDS) and "identity" in manifest
    columns += ["protected: first + last"] if protects else []
    rows: dict[tuple[str, str], dict[float, Checked]] = {}
    for one in own:
        rows.setdefault((_named(one), one.made.regime), {})[one.made.budget] = one
    body = []
    for names, at in rows.items():
        row = [*map(words, names)]
        for ratio in ratios:
            row.append(words(_cell(at[ratio]), at[ratio].made.interval.estimate) if ratio in at else words())
        row += [words(_found(at)), words(in_words({ratio: one.size for ratio, one in at.items()}))]
        if protects:
            row.append(words(_protected(next(iter(at.values())).ordering, ratios, manifest)))
        body.append(tuple(row))
    return Table(ident, topic, tuple(columns), tuple(body), 2)


def _cell(one: Checked) -> str:
    """Difference, verdict, recovery, and a mark where it is extrapolated."""
    parts = " ".join(spelled(one.made, named=False)) + ("" if one.published else "†")
    return parts if one.recovery is None else f"{parts}; recovers {100 * one.recovery:.0f} %"


def _found(at: Mapping[float, Checked]) -> str:
    """Findings of a row, those beyond what was published apart."""
    here = {ratio: one.finding for ratio, one in at.items() if one.published}
    beyond = {ratio: one.finding for ratio, one in at.items() if not one.published}
    parts = [in_words(here)] if here else []
    return "; ".join([*parts, *([f"beyond†: {in_words(beyond)}"] if beyond else [])])


def _protected(ordering: Ordering, ratios: Sequence[float], manifest: Mapping[str, Any]) -> str:
    """Entries that both policies of a row protect on a context, by ratio: `10+32, 20+32 / 0+32, 0+32`."""
    resolved, tokens = manifest["identity"]["policies"], manifest["config"]["context_tokens"]
    valid = torch.ones(1, tokens, dtype=torch.bool)
    sides = []
    for name in (ordering.policy, ordering.baseline):
        ends = []
        for ratio in ratios:
            budget = spread(budget_of(ratio), [tokens], [LayerShape(1, 1)]).per_head_B
            mask = protected_mask(Protection(**resolved[name]["protection"]), valid, budget)[0].tolist()
            ends.append(f"{(mask + [False]).index(False)}+{(mask[::-1] + [False]).index(False)}")
        sides.append(", ".join(ends))
    return " / ".join(sides)


def _named(one: Checked) -> str:
    sign = ">" if one.ordering.says == "better" else "="
    return f"{one.ordering.policy} {sign} {one.ordering.baseline}"

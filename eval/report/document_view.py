"""The document view of a page: what each policy kept of a document, token by token.

It is made from `kept.json` (`python -m retain.eval.report.kept`), or else from the one document of
`diagnostics.json`. Without a script the page still shows one policy, and the shares of all of them by place:
both are written out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.eval.report.blocks import Table, number, words
from retain.eval.report.plots import Areas
from retain.eval.report.tables import without_scheme
from retain.eval.stats.comparisons import budget_name

# Steps of shading, evicted everywhere to kept everywhere, and bins of places.
STEPS, BINS = 5, 160
# A page with more numbers than this carries them summed over layers only.
MOST_NUMBERS = 1_500_000


@dataclass(frozen=True)
class Token:
    """One token: its text, its step of shading, and whether it is part of what is asked for."""

    text: str
    step: int
    needle: bool


@dataclass(frozen=True)
class Viewed:
    """One document.

    Attributes:
        name: In the list of documents.
        notes: Question and right answer, where there are any.
        tokens: Under the policy shown first.
        shares_by_place: All policies at the budget shown first.
        shares: What each policy kept of the whole and of the needles.
    """

    name: str
    notes: tuple[str, ...]
    tokens: tuple[Token, ...]
    shares_by_place: Areas
    shares: Table


@dataclass(frozen=True)
class View:
    """The whole part.

    Attributes:
        documents: Each shown alone.
        policies, budgets, layers: To choose from; budgets as (value, text).
        policy, budget: Shown first.
        command: That made it.
        data: For the script: per document `of` and `heads`, per policy and budget `rows` and `layers`.
    """

    documents: tuple[Viewed, ...]
    policies: tuple[str, ...]
    budgets: tuple[tuple[str, str], ...]
    layers: tuple[int, ...]
    policy: str
    budget: str
    command: str
    data: list[dict[str, Any]]


def from_diagnostics(made: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a `diagnostics.json` in the form of `kept.json`."""
    own = made["documents_view"]
    names = {one["document"]: one.get("name", "") for one in made.get("documents", ())}
    budget = float(made["made"]["keep_ratio"])
    return {
        "command": made["command"],
        "documents": [
            {
                "name": names.get(own["document"]) or f"document {own['document']}",
                "tokens": own["tokens"],
                "of": own["of"],
                "heads": list(made["made"].get("kv_heads") or ()),
                "kept": [
                    {"policy": policy, "budget": budget, "rows": rows}
                    for policy, rows in own["kept"].items()
                    if policy != "full"
                ],
            }
        ],
    }


def view(kept: Mapping[str, Any]) -> View:
    """Everything that the page needs.

    Raises:
        ValueError: If it holds no document, or a policy's numbers are not one a token.
    """
    documents = kept["documents"]
    if not documents or not all(one["kept"] for one in documents):
        raise ValueError(
            "kept.json holds no document, or one that no policy read. Make it again: "
            "python -m retain.eval.report.kept --config FILE."
        )
    for one in documents:
        for own in one["kept"]:
            if len(own["rows"]) != len(one["tokens"]):
                raise ValueError(
                    f"kept.json: {own['policy']} has {len(own['rows'])} numbers for the "
                    f"{len(one['tokens'])} tokens of {one['name']!r}. Make it again: "
                    "python -m retain.eval.report.kept --config FILE."
                )
    policies = tuple(dict.fromkeys(own["policy"] for one in documents for own in one["kept"]))
    budgets = sorted({float(own["budget"]) for one in documents for own in one["kept"]})
    budget = budgets[len(budgets) // 2]
    policy = _first(policies)
    count = sum(
        len(one["tokens"]) * (1 + len(own.get("layers") or ())) for one in documents for own in one["kept"]
    )
    by_layer = count <= MOST_NUMBERS and all(own.get("layers") for one in documents for own in one["kept"])
    layers = kept.get("made", {}).get("layers") or range(len(documents[0].get("heads") or ()))
    return View(
        documents=tuple(_viewed(place, one, policy, budget) for place, one in enumerate(documents)),
        policies=policies,
        budgets=tuple((f"{own:g}", budget_name(own)) for own in budgets),
        layers=tuple(layers) if by_layer else (),
        policy=policy,
        budget=f"{budget:g}",
        command=kept["command"],
        data=[_data(one, by_layer) for one in documents],
    )


def step_of(kept: int, of: int) -> int:
    """Shading of a token: 0 where no pair kept it, the last where all did, and
    between them quarters, each with its upper end."""
    if kept <= 0:
        return 0
    return STEPS if kept >= of else -(-(STEPS - 1) * kept // of)


def _first(policies: Sequence[str]) -> str:
    """The policy shown first: a learned one if there is one."""
    return next((name for name in ("fused", "gate", "snapkv") if name in policies), policies[0])


def _viewed(place: int, one: Mapping[str, Any], policy: str, budget: float) -> Viewed:
    at = {own["policy"]: own for own in one["kept"] if float(own["budget"]) == budget}
    shown = at.get(policy) or one["kept"][0]
    inside = {token for first, stop in one.get("needles") or () for token in range(first, stop)}
    areas = tuple((name, tuple(_binned(own["rows"], one["of"]))) for name, own in at.items())
    notes = []
    if one.get("question"):
        notes.append(f"Asked afterwards: {without_scheme(one['question'])}")
    if one.get("references"):
        notes.append(f"Right answer: {' | '.join(one['references'])}")
    return Viewed(
        name=one["name"],
        notes=tuple(notes),
        tokens=tuple(
            Token(text, step_of(kept, one["of"]), index in inside)
            for index, (text, kept) in enumerate(zip(one["tokens"], shown["rows"], strict=True))
        ),
        shares_by_place=Areas(f"{one['name']}, {budget_name(budget)}: share kept by place", areas),
        shares=_shares(place, one, inside),
    )


def _shares(place: int, one: Mapping[str, Any], inside: set[int]) -> Table:
    lines = []
    for own in one["kept"]:
        whole = sum(own["rows"]) / (len(own["rows"]) * one["of"])
        needles = [own["rows"][token] for token in sorted(inside)]
        part = sum(needles) / (len(needles) * one["of"]) if needles else None
        gone = sum(kept == 0 for kept in own["rows"])
        lines.append(
            (
                *(words(own["policy"]), number(float(own["budget"]), 2)),
                *(number(whole, 3), number(part, 3), number(gone, 0)),
            )
        )
    columns = ("policy", "budget", "kept / seen", "of the needles", "tokens that no pair kept")
    return Table(f"tab-kept-{place}", f"What was kept of {one['name']}", columns, tuple(lines))


def _binned(rows: Sequence[int], of: int) -> list[float]:
    """Mean share kept, over bins of neighbouring tokens."""
    bins = min(BINS, len(rows))
    edges = [round(len(rows) * place / bins) for place in range(bins + 1)]
    return [
        sum(rows[first:stop]) / (of * (stop - first)) for first, stop in zip(edges, edges[1:], strict=False)
    ]


def _data(one: Mapping[str, Any], by_layer: bool) -> dict[str, Any]:
    return {
        "of": one["of"],
        "heads": list(one.get("heads") or ()),
        "kept": [
            {
                "policy": own["policy"],
                "budget": f"{float(own['budget']):g}",
                "rows": own["rows"],
                **({"layers": own["layers"]} if by_layer else {}),
            }
            for own in one["kept"]
        ],
    }

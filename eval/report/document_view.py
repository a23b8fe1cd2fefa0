"""Prepares the document view of a page: the tokens that each policy kept of a document.

It is made from `kept.json` (`python -m retain.eval.report.kept`), or else from the one document of
`diagnostics.json`. Without a script the page still shows one policy, and the shares of all of them by place:
both are written out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.eval.report.blocks import Table, number, of_budget, words
from retain.eval.report.plots import Areas
from retain.eval.report.tables import without_scheme
from retain.eval.stats.comparisons import budget_name

# Steps of shading, evicted everywhere to kept everywhere, and bins of places.
STEPS, BINS = 5, 160
# A page with more numbers than this carries them summed over layers only.
MOST_NUMBERS = 1_500_000


@dataclass(frozen=True)
class DocumentView:
    """One document: its name, question and right answer, each token's text, step of shading under the policy
    shown first and whether it is asked for, shares kept by place, and shares of the whole and of the needles.
    """

    name: str
    notes: tuple[str, ...]
    tokens: tuple[tuple[str, int, bool], ...]
    shares_by_place: Areas
    shares: Table


@dataclass(frozen=True)
class View:
    """The whole part.

    Attributes:
        policies, budgets, layers: To choose from; budgets as (value, text).
        policy, budget: Shown first.
        data: For the script: per document `of` and `heads`, per policy and budget `rows` and `layers`.
    """

    documents: tuple[DocumentView, ...]
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
    document = {
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
    return {"command": made["command"], "documents": [document]}


def view(kept: Mapping[str, Any]) -> View:
    """Everything that the page needs of a `kept.json`.

    Raises:
        ValueError: If it holds no document, or a policy's numbers are not one a token.
    """
    again = "Make it again: python -m retain.eval.report.kept --config FILE."
    documents = kept["documents"]
    if not documents or not all(one["kept"] for one in documents):
        raise ValueError(f"kept.json holds no document, or one that no policy read. {again}")
    every = [(one, own) for one in documents for own in one["kept"]]
    for one, own in every:
        if len(own["rows"]) != len(one["tokens"]):
            raise ValueError(
                f"kept.json: {own['policy']} has {len(own['rows'])} numbers for the "
                f"{len(one['tokens'])} tokens of {one['name']!r}. {again}"
            )
    policies = tuple(dict.fromkeys(own["policy"] for _, own in every))
    budgets = sorted({float(own["budget"]) for _, own in every})
    budget = budgets[len(budgets) // 2]
    # A learned policy is shown first, if there is one.
    policy = next((name for name in ("fused", "gate", "snapkv") if name in policies), policies[0])
    count = sum(len(one["tokens"]) * (1 + len(own.get("layers") or ())) for one, own in every)
    by_layer = count <= MOST_NUMBERS and all(own.get("layers") for _, own in every)
    layers = kept.get("made", {}).get("layers") or range(len(documents[0].get("heads") or ()))
    names = ("policy", "rows", "layers") if by_layer else ("policy", "rows")
    data = [
        {
            "of": one["of"],
            "heads": list(one.get("heads") or ()),
            "kept": [
                {name: own[name] for name in names} | {"budget": f"{float(own['budget']):g}"}
                for own in one["kept"]
            ],
        }
        for one in documents
    ]
    return View(
        documents=tuple(_viewed(place, one, policy, budget) for place, one in enumerate(documents)),
        policies=policies,
        budgets=tuple((f"{own:g}", budget_name(own)) for own in budgets),
        layers=tuple(layers) if by_layer else (),
        policy=policy,
        budget=f"{budget:g}",
        command=kept["command"],
        data=data,
    )


def step_of(kept: int, of: int) -> int:
    """Shading of a token: 0 where no pair kept it, the last where all did; between them quarters."""
    if kept <= 0:
        return 0
    return STEPS if kept >= of else -(-(STEPS - 1) * kept // of)


def _viewed(place: int, one: Mapping[str, Any], policy: str, budget: float) -> DocumentView:
    at = {own["policy"]: own for own in one["kept"] if float(own["budget"]) == budget}
    shown, of = at.get(policy) or one["kept"][0], one["of"]
    inside = {token for first, stop in one.get("needles") or () for token in range(first, stop)}
    notes = [f"Asked afterwards: {without_scheme(one['question'])}"] if one.get("question") else []
    notes += [f"Right answer: {' | '.join(one['references'])}"] if one.get("references") else []
    lines = []
    for own in one["kept"]:
        rows = own["rows"]
        part = sum(rows[token] for token in inside) / (len(inside) * of) if inside else None
        shares = (number(sum(rows) / (len(rows) * of), 3), number(part, 3), number(rows.count(0), 0))
        lines.append((words(own["policy"]), of_budget(own["budget"]), *shares))
    columns = ("policy", "budget", "kept / seen", "of the needles", "tokens that no pair kept")
    areas = tuple((name, _binned(own["rows"], of)) for name, own in at.items())
    return DocumentView(
        name=one["name"],
        notes=tuple(notes),
        tokens=tuple(
            (text, step_of(kept, of), index in inside)
            for index, (text, kept) in enumerate(zip(one["tokens"], shown["rows"], strict=True))
        ),
        shares_by_place=Areas(f"{one['name']}, {budget_name(budget)}: share kept by place", areas),
        shares=Table(f"tab-kept-{place}", f"What was kept of {one['name']}", columns, tuple(lines)),
    )


def _binned(rows: Sequence[int], of: int) -> tuple[float, ...]:
    """Mean share kept, over bins of neighbouring tokens."""
    bins = min(BINS, len(rows))
    edges = [round(len(rows) * place / bins) for place in range(bins + 1)]
    return tuple(
        sum(rows[first:stop]) / (of * (stop - first)) for first, stop in zip(edges, edges[1:], strict=False)
    )

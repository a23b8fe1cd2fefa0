"""The record of a diagnosis: readings of documents in, one JSON mapping and one table out.

`diagnostics.json` holds:

    summary    policy -> number, over everything
    curves     policy -> name -> one value a step (documents that are shorter have no part in later steps)
    maps       policy -> name -> layer x KV head
    jaccard    policy x policy: mean likeness of kept sets, and share of heads where they are the same

Means are over steps of all documents together, so that a document counts by its steps; likeness, overlap and
entries, which have no steps, are means over documents. Numbers that are not finite are null.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.eval.config import FULL
from retain.eval.diagnose.measures import coverage_numbers, jaccard, perplexity_ratio
from retain.eval.diagnose.teacher_forced import TokensRead
from retain.eval.report.grid import Column, grid

FILE = "diagnostics.json"
SCHEMA = 1
COLUMNS = (
    Column("policy", "policy"),
    Column("coverage", "coverage_mean"),
    Column("worst step", "coverage_worst_step"),
    Column("worst", "coverage_worst"),
    Column("outliers", "coverage_outliers"),
    Column("oracle", "oracle_overlap"),
    Column("KL", "kl", ".4f"),
    Column("top-1", "agreement"),
    Column("ppl ratio", "perplexity_ratio"),
    Column("kept", "kept_share"),
)
# Numbers of the record -> fields of `TokensRead`, whose last axis is steps.
TOKENS = {"kl": "kl_S", "agreement": "agree_S"}
MAPS = {"coverage": "coverage_HS", "kept": "kept", "oracle_overlap": "overlap"}
# Field -> one tensor a layer (of `TokensRead` one in all), over the steps of all documents, or over these.
Cells = dict[str, list[Tensor]]


@dataclass(frozen=True)
class LayerRead:
    """One policy in one layer of one document, `S` the steps.

    Args:
        coverage_HS: share of the attention to what was evicted from that goes to what is kept.
        overlap_H: share of what is kept among the oracle's best.
        keep_HT: what is kept.
    """

    coverage_HS: Float[Tensor, "H S"]
    overlap_H: Float[Tensor, " H"]
    keep_HT: Bool[Tensor, "H T"]


@dataclass(frozen=True)
class PolicyRead(TokensRead):
    """One policy on one document.

    Args:
        layers: one reading per layer that evicts.
    """

    layers: Sequence[LayerRead]


@dataclass(frozen=True)
class DocumentRead:
    """One document.

    Args:
        name: of the document.
        number: its place.
        seen_ids: tokens whose entries were evicted from.
        steps: tokens of the full cache's answers that were measured.
        policies: the full cache first.
        texts: of `seen_ids`, for the first document.
    """

    name: str
    number: int
    seen_ids: tuple[int, ...]
    steps: int
    policies: Mapping[str, PolicyRead]
    texts: tuple[str, ...] = ()


def record_of(documents: Iterable[DocumentRead], made: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Everything that was found, ready for JSON.

    Args:
        documents: read one at a time; their keep masks are let go.
        made: what it was made from and how.
        command: that makes it again.

    Raises:
        ValueError: there is no document.
    """
    parts: dict[str, list[Cells]] = {}
    likeness: dict[tuple[str, str], list[Tensor]] = {}
    listed: list[dict[str, Any]] = []
    view = None
    for read in documents:
        numbers = {"document": read.number, "name": read.name, "entries": len(read.seen_ids)}
        listed.append({**numbers, "steps": read.steps})
        view = _view(read) if view is None else view
        for name, own in read.policies.items():
            parts.setdefault(name, []).append(_cells_of(own))
        asked = [name for name in read.policies if name != FULL]
        for one, other in product(asked, asked):
            pairs = zip(read.policies[one].layers, read.policies[other].layers, strict=True)
            found = [jaccard(a.keep_HT[None], b.keep_HT[None])[0] for a, b in pairs]
            likeness.setdefault((one, other), []).extend(found)
    if not listed:
        raise ValueError("there is nothing to diagnose: pass at least one document.")
    cells = {name: _joined(own) for name, own in parts.items()}
    steps = [own["steps"] for own in listed]
    step_S = torch.cat([torch.arange(count) for count in steps])
    entries = torch.tensor([own["entries"] for own in listed], dtype=torch.float64)
    summary = {name: _summary(own, cells[FULL], entries) for name, own in cells.items()}
    curves = {name: _curves(own, step_S) for name, own in cells.items()}
    maps = {name: _maps(own, entries) for name, own in cells.items()}
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "made": {**made},
        "documents": listed,
        "summary": summary,
        "curves": curves,
        "curves_documents": [sum(count > step for count in steps) for step in range(max(steps))],
        "maps": maps,
        "jaccard": _matrix(asked, likeness),
        "documents_view": view,
    }
    # JSON can say no infinity and no NaN.
    plain: dict[str, Any] = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return plain


def _view(read: DocumentRead) -> dict[str, Any]:
    """Counts of the (layer, head) pairs that keep each token of a document."""
    held = {name: torch.cat([layer.keep_HT for layer in own.layers]) for name, own in read.policies.items()}
    kept = {name: own.sum(0).tolist() for name, own in held.items() if name != FULL}
    return {"document": read.number, "tokens": list(read.texts), "of": len(held[FULL]), "kept": kept}


def _cells_of(own: PolicyRead) -> Cells:
    """One document's."""
    return {
        "coverage_HS": [layer.coverage_HS.double() for layer in own.layers],
        **{field: [getattr(own, field).double()] for field in (*TOKENS.values(), "loss_S")},
        "overlap": [layer.overlap_H[:, None].double() for layer in own.layers],
        "kept": [layer.keep_HT.sum(-1, keepdim=True).double() for layer in own.layers],
    }


def _joined(documents: Sequence[Cells]) -> Cells:
    return {
        field: [torch.cat(layer, -1) for layer in zip(*(one[field] for one in documents), strict=True)]
        for field in documents[0]
    }


def _mean(layers: Iterable[Tensor]) -> float:
    return float(torch.cat([layer.flatten() for layer in layers]).mean())


def _summary(own: Cells, full: Cells, entries: Tensor) -> dict[str, float]:
    kept = sum(float(layer.sum()) for layer in own["kept"])
    return {
        **{f"coverage_{key}": value for key, value in coverage_numbers([own["coverage_HS"]]).items()},
        **{key: _mean(own[field]) for key, field in TOKENS.items()},
        "oracle_overlap": _mean(own["overlap"]),
        "perplexity": float(own["loss_S"][0].mean().exp()),
        "perplexity_ratio": perplexity_ratio(full["loss_S"][0], own["loss_S"][0]),
        "kept_entries": kept / len(entries),
        "kept_share": kept / (sum(map(len, own["kept"])) * float(entries.sum())),
    }


def _curves(own: Cells, step_S: Tensor) -> dict[str, list[float]]:
    """One value a step, over the documents that reach it."""
    steps = [step_S == step for step in range(int(step_S.max()) + 1)]
    coverage = own["coverage_HS"]
    return {
        "coverage_min": [min(float(layer[:, at].min()) for layer in coverage) for at in steps],
        "coverage_mean": [_mean(layer[:, at] for layer in coverage) for at in steps],
        **{
            key: [_mean(layer[..., at] for layer in own[field]) for at in steps]
            for key, field in TOKENS.items()
        },
    }


def _maps(own: Cells, entries: Tensor) -> dict[str, list[Any]]:
    """Layer x head."""
    return {
        **{key: [layer.mean(-1).tolist() for layer in own[field]] for key, field in MAPS.items()},
        "coverage_min": [layer.amin(-1).tolist() for layer in own["coverage_HS"]],
        "kept_share": [(layer / entries).mean(-1).tolist() for layer in own["kept"]],
    }


def _matrix(names: Sequence[str], likeness: Mapping[tuple[str, str], Sequence[Tensor]]) -> dict[str, Any]:
    cells = {pair: torch.cat([*found]) for pair, found in likeness.items()}
    return {
        "policies": list(names),
        "mean": [[_mean([cells[one, other]]) for other in names] for one in names],
        "identical": [[_mean([(cells[one, other] == 1).double()]) for other in names] for one in names],
    }


def table(record: Mapping[str, Any]) -> str:
    """The summary, one line a policy."""
    return "\n".join(grid(COLUMNS, [{"policy": name, **own} for name, own in record["summary"].items()]))

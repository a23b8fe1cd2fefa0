"""The record of a diagnosis: readings of documents in, one JSON mapping and one table out.

`diagnostics.json` holds:

    summary    policy -> number, over everything
    curves     policy -> name -> one value a step (documents that are shorter have no part in later steps)
    maps       policy -> name -> layer x head (KV heads; query heads for `perturbation*`), or one a layer
    jaccard    policy x policy: mean likeness of kept sets, and share of heads where they are the same
    head_wise  policy x policy: share of query heads whose mean perturbation is lower in the row's policy
    boundaries end of the prompt -> share of the entries, and of the attention to the prompt that later
               queries pay there (`mass`; `map`: layer x query head): no policy's, the full cache's
    records    summary, curves and maps once more, one row a number

Means are over steps of all documents together, so that a document counts by its steps; likeness, overlap and
entries, which have no steps, are means over documents. Numbers that are not finite are null.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.eval.config import FULL
from retain.eval.diagnose.measures import (
    TIGHT,
    coverage_numbers,
    jaccard,
    perplexity_ratio,
    repetition_rate,
    share_below,
    share_tight,
)
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
    Column("output loss", "output_loss_l1"),
    Column("head loss", "perturbation"),
    Column("tight", "perturbation_bound_tight"),
    Column("relaxed tight", "perturbation_relaxed_bound_tight"),
    Column("oracle", "oracle_overlap"),
    Column("KL", "kl", ".4f"),
    Column("top-1", "agreement"),
    Column("ppl ratio", "perplexity_ratio"),
    Column("repeats", "repetition"),
    Column("no end", "hit_cap"),
    Column("kept", "kept_share"),
)
# Numbers of the record -> fields of `LayerRead` and `TokensRead`, whose last axis is steps.
COVERAGES = {"coverage": "coverage_HS", "value_coverage": "value_coverage_HS"}
LAYER_LOSSES = {
    "output_loss_l1": "loss_l1_S",
    "output_loss_l2": "loss_l2_S",
    "output_loss_bound": "loss_bound_S",
}
HEAD_BOUNDS = {"perturbation_bound": "bound_QS", "perturbation_relaxed_bound": "relaxed_bound_QS"}
HEAD_LOSSES = {"perturbation": "perturbation_QS", **HEAD_BOUNDS}
STEPPED = COVERAGES | LAYER_LOSSES | HEAD_LOSSES
TOKENS = {"kl": "kl_S", "kl_reverse": "kl_reverse_S", "agreement": "agree_S"}
CURVES = {"output_loss_l1": "loss_l1_S", "kl": "kl_S", "agreement": "agree_S"}
MAPS = {**STEPPED, "kept": "kept", "oracle_overlap": "overlap"}
BOUNDARIES = (
    Column("end of the prompt", "name"),
    Column("entries", "entries", ".4f"),
    Column("attention", "mass", ".4f"),
    Column("attention / entries", "ratio", ".1f"),
    Column("heads above", "heads_above"),
)
# Field -> one tensor a layer (of `TokensRead` one in all), over the steps of all documents, or over these.
Cells = dict[str, list[Tensor]]


@dataclass(frozen=True)
class LayerRead:
    """One policy in one layer of one document, `S` the steps.

    Args:
        coverage_HS: share of the attention to what was evicted from that goes to what is kept.
        value_coverage_HS: the same, weighted by what values write.
        perturbation_QS: CriticalKV's L.
        bound_QS: its bound theta.
        relaxed_bound_QS: the relaxed bound, of the second stage.
        loss_l1_S: layer attention output loss, p = 1.
        loss_l2_S: the same, p = 2.
        loss_bound_S: LAVa's bound on `loss_l1_S`.
        overlap_H: share of what is kept among the oracle's best.
        keep_HT: what is kept.
    """

    coverage_HS: Float[Tensor, "H S"]
    value_coverage_HS: Float[Tensor, "H S"]
    perturbation_QS: Float[Tensor, "Q S"]
    bound_QS: Float[Tensor, "Q S"]
    relaxed_bound_QS: Float[Tensor, "Q S"]
    loss_l1_S: Float[Tensor, " S"]
    loss_l2_S: Float[Tensor, " S"]
    loss_bound_S: Float[Tensor, " S"]
    overlap_H: Float[Tensor, " H"]
    keep_HT: Bool[Tensor, "H T"]


@dataclass(frozen=True)
class PolicyRead(TokensRead):
    """One policy on one document.

    Args:
        layers: one reading per layer that evicts.
        outputs: what the policy's cache answered by itself, without end tokens.
        ended: how many of these answers ended by themselves.
    """

    layers: Sequence[LayerRead]
    outputs: tuple[tuple[int, ...], ...]
    ended: int


@dataclass(frozen=True)
class BoundaryRead:
    """What queries after a prompt pay one end of it.

    Args:
        entries: share of the prompt's entries that lie there.
        mass_QS: one a layer, share of the attention to the prompt.
    """

    entries: float
    mass_QS: Sequence[Float[Tensor, "Q S"]]


@dataclass(frozen=True)
class DocumentRead:
    """One document.

    Args:
        name: of the document.
        number: its place.
        seen_ids: tokens whose entries were evicted from.
        steps: tokens of the full cache's answers that were measured.
        policies: the full cache first.
        boundaries: ends of the prompt, by name.
        texts: of `seen_ids`, for the first document.
    """

    name: str
    number: int
    seen_ids: tuple[int, ...]
    steps: int
    policies: Mapping[str, PolicyRead]
    boundaries: Mapping[str, BoundaryRead]
    texts: tuple[str, ...] = ()


def record_of(
    documents: Iterable[DocumentRead], made: Mapping[str, Any], command: str, *, tight: float = TIGHT
) -> dict[str, Any]:
    """Everything that was found, ready for JSON.

    Args:
        documents: read one at a time; their keep masks are let go.
        made: what it was made from and how.
        command: that makes it again.
        tight: part of a bound that is lost where it is tight.

    Raises:
        ValueError: there is no document.
    """
    parts: dict[str, list[Cells]] = {}
    spoken: dict[str, list[tuple[int, ...]]] = {}
    ended: dict[str, int] = {}
    likeness: dict[tuple[str, str], list[Tensor]] = {}
    ends: dict[str, list[BoundaryRead]] = {}
    listed: list[dict[str, Any]] = []
    view = None
    for read in documents:
        full = read.policies[FULL]
        numbers = {"document": read.number, "name": read.name, "entries": len(read.seen_ids)}
        listed.append({**numbers, "steps": read.steps, "answers": len(full.outputs), "ended": full.ended})
        view = _view(read) if view is None else view
        for name, own in read.policies.items():
            parts.setdefault(name, []).append(_cells_of(own))
            spoken.setdefault(name, []).extend(own.outputs)
            ended[name] = ended.get(name, 0) + own.ended
        for name, end in read.boundaries.items():
            ends.setdefault(name, []).append(end)
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
    answers = {
        name: {"repetition": repetition_rate(own), "hit_cap": 1.0 - ended[name] / len(own)}
        for name, own in spoken.items()
    }
    summary = {
        name: _summary(own, cells[FULL], step_S, entries) | _tight(own, tight) | answers[name]
        for name, own in cells.items()
    }
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
        "head_wise": _head_wise({name: cells[name]["perturbation_QS"] for name in asked}, step_S),
        "boundaries": {name: _boundary(own) for name, own in ends.items()},
        "documents_view": view,
        "records": [*_tidy(summary), *_tidy(curves, "step"), *_tidy(maps, "layer", "head")],
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
        **{field: [getattr(layer, field).double() for layer in own.layers] for field in STEPPED.values()},
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


def _finite(mean: float) -> float | None:
    """None in place of infinity, of a bound that bounds nothing."""
    return None if math.isinf(mean) else mean


def _summary(own: Cells, full: Cells, step_S: Tensor, entries: Tensor) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for prefix, field in COVERAGES.items():
        found |= {f"{prefix}_{key}": value for key, value in coverage_numbers([own[field]]).items()}
    for key, field in (LAYER_LOSSES | HEAD_LOSSES | TOKENS).items():
        found[key] = _finite(_mean(own[field]))
        if key in HEAD_LOSSES:
            found[f"{key}_first"] = _finite(_mean(layer[:, step_S == 0] for layer in own[field]))
    kept = sum(float(layer.sum()) for layer in own["kept"])
    return found | {
        "oracle_overlap": _mean(own["overlap"]),
        "perplexity": float(own["loss_S"][0].mean().exp()),
        "perplexity_ratio": perplexity_ratio(full["loss_S"][0], own["loss_S"][0]),
        "kept_entries": kept / len(entries),
        "kept_share": kept / (sum(map(len, own["kept"])) * float(entries.sum())),
    }


def _tight(own: Cells, tight: float) -> dict[str, float | None]:
    """Shares of query heads in which each bound of the perturbation is tight."""
    means = {key: torch.cat([layer.mean(-1) for layer in own[field]]) for key, field in HEAD_LOSSES.items()}
    # The relaxed bound is above 0 even where nothing is lost.
    can_lose = means["perturbation_bound"] > 0
    loss = means["perturbation"][can_lose]
    return {f"{key}_tight": share_tight(loss, means[key][can_lose], tight) for key in HEAD_BOUNDS}


def _boundary(read: Sequence[BoundaryRead]) -> dict[str, Any]:
    layers = [torch.cat(layer, -1).double() for layer in zip(*(own.mass_QS for own in read), strict=True)]
    entries = sum(own.entries for own in read) / len(read)
    heads_LQ, mass = [layer.mean(-1) for layer in layers], _mean(layers)
    return {
        "entries": entries,
        "mass": mass,
        "ratio": mass / entries if entries else None,
        "heads_above": _mean((head_Q > entries).double() for head_Q in heads_LQ),
        "map": [head_Q.tolist() for head_Q in heads_LQ],
    }


def _curves(own: Cells, step_S: Tensor) -> dict[str, list[float]]:
    """One value a step, over the documents that reach it."""
    steps = [step_S == step for step in range(int(step_S.max()) + 1)]
    means = {**{f"{prefix}_mean": field for prefix, field in COVERAGES.items()}, **CURVES}
    least = {
        f"{prefix}_min": [min(float(layer[:, at].min()) for layer in own[field]) for at in steps]
        for prefix, field in COVERAGES.items()
    }
    return least | {
        key: [_mean(layer[..., at] for layer in own[field]) for at in steps] for key, field in means.items()
    }


def _maps(own: Cells, entries: Tensor) -> dict[str, list[Any]]:
    """Layer x head, or one value a layer."""
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


def _head_wise(moved: Mapping[str, Sequence[Tensor]], step_S: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"policies": [*moved]}
    for key, steps in (("first_step", step_S == 0), ("all_steps", step_S >= 0)):
        heads = [torch.cat([layer[:, steps].mean(-1) for layer in own]) for own in moved.values()]
        found[key] = [[share_below(one, other) for other in heads] for one in heads]
    return found


def _tidy(numbers: Mapping[str, Mapping[str, Any]], *axes: str) -> Iterator[dict[str, Any]]:
    """One row a number; null stands for all of an axis."""

    def rows(value: Any, *left: str, **row: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(value, list):
            yield {**row, "value": value}
            return
        for place, own in enumerate(value):
            yield from rows(own, *left[1:], **{**row, left[0]: place})

    anywhere = dict.fromkeys(("layer", "head", "step"))
    for policy, own in numbers.items():
        for metric, value in own.items():
            yield from rows(value, *axes, policy=policy, metric=metric, **anywhere)


def table(record: Mapping[str, Any]) -> str:
    """The summary, one line a policy."""
    return "\n".join(grid(COLUMNS, [{"policy": name, **own} for name, own in record["summary"].items()]))


def boundary_table(record: Mapping[str, Any]) -> str:
    """Attention to the prompt's ends, one line an end."""
    return "\n".join(grid(BOUNDARIES, [{"name": name, **own} for name, own in record["boundaries"].items()]))

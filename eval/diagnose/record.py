"""The record of a diagnosis: readings of documents in, one JSON mapping and one table out.

`diagnostics.json` holds:

    summary    policy -> number, over everything
    curves     policy -> name -> one value a step (documents that are shorter have no part in later steps)
    maps       policy -> name -> layer x head (KV heads; query heads for `perturbation*`), or one a layer
    jaccard    policy x policy: mean likeness of kept sets, and share of heads where they are the same
    head_wise  policy x policy: share of query heads whose mean perturbation is lower in the row's policy
    records    summary, curves and maps once more, one row a number

Means are over steps of all documents together, so that a document counts by its steps; likeness, overlap and
entries, which have no steps, are means over documents. Numbers that are not finite are null.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retain.eval.config import FULL
from retain.eval.diagnose.measures import (
    coverage_numbers,
    jaccard,
    perplexity_ratio,
    repetition_rate,
    share_below,
)
from retain.eval.diagnose.teacher_forced import TokensRead

FILE = "diagnostics.json"
SCHEMA = 1
# Columns of the table: metric, heading, digits.
COLUMNS = (
    ("coverage_mean", "coverage", 3),
    ("coverage_worst_step", "worst step", 3),
    ("coverage_worst", "worst", 3),
    ("coverage_outliers", "outliers", 3),
    ("output_loss_l1", "output loss", 3),
    ("perturbation", "head loss", 3),
    ("oracle_overlap", "oracle", 3),
    ("kl", "KL", 4),
    ("agreement", "top-1", 3),
    ("perplexity_ratio", "ppl ratio", 3),
    ("repetition", "repeats", 3),
    ("hit_cap", "no end", 3),
    ("kept_share", "kept", 3),
)
# Numbers of the record -> fields of `LayerRead`.
COVERAGES = {"coverage": "coverage_HS", "value_coverage": "value_coverage_HS"}
LAYER_LOSSES = {
    "output_loss_l1": "loss_l1_S",
    "output_loss_l2": "loss_l2_S",
    "output_loss_bound": "loss_bound_S",
}
HEAD_LOSSES = {"perturbation": "perturbation_QS", "perturbation_bound": "bound_QS"}


@dataclass(frozen=True)
class LayerRead:
    """One policy in one layer of one document, `S` the steps.

    Args:
        coverage_HS: share of the attention to what was evicted from that goes to what is kept.
        value_coverage_HS: the same, weighted by what values write.
        perturbation_QS: CriticalKV's L.
        bound_QS: its bound theta.
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
    reads: list[DocumentRead] = []
    likeness: dict[tuple[str, str], list[Tensor]] = {}
    kept: dict[str, list[list[Tensor]]] = {}
    listed, view = [], None
    for read in documents:
        full = read.policies[FULL]
        listed.append(
            {
                "document": read.number,
                "name": read.name,
                "entries": len(read.seen_ids),
                "steps": read.steps,
                "answers": len(full.outputs),
                "ended": full.ended,
            }
        )
        view = _view(read) if view is None else view
        for pair, cells in _likeness(read):
            likeness.setdefault(pair, []).append(cells)
        light = {}
        for name, own in read.policies.items():
            kept.setdefault(name, []).append([layer.keep_HT.sum(-1).double() for layer in own.layers])
            layers = [replace(layer, keep_HT=layer.keep_HT[:, :0]) for layer in own.layers]
            light[name] = replace(own, layers=layers)
        reads.append(replace(read, policies=light))
    if not reads:
        raise ValueError("there is nothing to diagnose: pass at least one document.")
    names = list(reads[0].policies)
    asked = [name for name in names if name != FULL]
    entries = [len(read.seen_ids) for read in reads]
    summary = {name: _summary(name, reads, kept[name], entries) for name in names}
    curves = {name: _curves(name, reads) for name in names}
    maps = {name: _maps(name, reads, kept[name], entries) for name in names}
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "made": {**made},
        "documents": listed,
        "summary": summary,
        "curves": curves,
        "curves_documents": [
            sum(read.steps > step for read in reads) for step in range(max(read.steps for read in reads))
        ],
        "maps": maps,
        "jaccard": _matrix(asked, likeness),
        "head_wise": _head_wise(asked, reads),
        "documents_view": view,
    }
    record["records"] = list(_tidy(summary, curves, maps))
    return _plain(record)


def _view(read: DocumentRead) -> dict[str, Any]:
    """Counts of the (layer, head) pairs that keep each token of a document."""
    held = {name: torch.cat([layer.keep_HT for layer in own.layers]) for name, own in read.policies.items()}
    kept = {name: own.sum(0).tolist() for name, own in held.items() if name != FULL}
    return {"document": read.number, "tokens": list(read.texts), "of": len(held[FULL]), "kept": kept}


def _likeness(read: DocumentRead) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Jaccard of all (layer, head) for each ordered pair of policies."""
    names = [name for name in read.policies if name != FULL]
    for one, other in product(names, names):
        pairs = zip(read.policies[one].layers, read.policies[other].layers, strict=True)
        yield (one, other), torch.cat([jaccard(a.keep_HT[None], b.keep_HT[None])[0] for a, b in pairs])


def _over(reads: Sequence[DocumentRead], name: str, field: str, steps: int | None = None) -> list[Tensor]:
    """Per layer, the (first) steps of all documents behind one another."""
    layers = zip(*(read.policies[name].layers for read in reads), strict=True)
    return [torch.cat([getattr(own, field)[..., :steps].double() for own in layer], -1) for layer in layers]


def _summary(
    name: str, reads: Sequence[DocumentRead], kept: Sequence[Sequence[Tensor]], entries: Sequence[int]
) -> dict[str, float | None]:
    own = [read.policies[name] for read in reads]
    found: dict[str, float | None] = {}
    for prefix, field in COVERAGES.items():
        numbers = coverage_numbers([[getattr(layer, field) for layer in one.layers] for one in own])
        found |= {f"{prefix}_{key}": value for key, value in numbers.items()}
    for key, field in (LAYER_LOSSES | HEAD_LOSSES).items():
        found[key] = float(torch.cat([layer.flatten() for layer in _over(reads, name, field)]).mean())
        if key in HEAD_LOSSES:
            first = torch.cat([getattr(layer, field)[:, 0].double() for one in own for layer in one.layers])
            found[f"{key}_first"] = float(first.mean())

    def of_steps(field: str, policy: str = name) -> Tensor:
        return torch.cat([getattr(read.policies[policy], field) for read in reads])

    counts = [sum(float(layer.sum()) for layer in one) for one in kept]
    heads = sum(len(layer) for layer in kept[0])
    return found | {
        "oracle_overlap": float(torch.cat([layer.overlap_H for one in own for layer in one.layers]).mean()),
        "kl": float(of_steps("kl_S").mean()),
        "kl_reverse": float(of_steps("kl_reverse_S").mean()),
        "agreement": float(of_steps("agree_S").double().mean()),
        "perplexity": float(of_steps("loss_S").mean().exp()),
        "perplexity_ratio": perplexity_ratio(of_steps("loss_S", FULL), of_steps("loss_S")),
        "repetition": repetition_rate([output for one in own for output in one.outputs]),
        "hit_cap": 1.0 - sum(one.ended for one in own) / sum(len(one.outputs) for one in own),
        "kept_entries": sum(counts) / len(counts),
        "kept_share": sum(counts) / (heads * sum(entries)),
    }


def _curves(name: str, reads: Sequence[DocumentRead]) -> dict[str, list[float]]:
    """One value a step, over the documents that reach it."""
    found: dict[str, list[float]] = {}
    for step in range(max(read.steps for read in reads)):
        own = [read.policies[name] for read in reads if read.steps > step]
        layers = [layer for one in own for layer in one.layers]
        values: dict[str, float] = {}
        for prefix, field in COVERAGES.items():
            heads = torch.cat([getattr(layer, field)[:, step].double() for layer in layers])
            values |= {f"{prefix}_mean": float(heads.mean()), f"{prefix}_min": float(heads.min())}
        values |= {
            "output_loss_l1": sum(float(layer.loss_l1_S[step]) for layer in layers) / len(layers),
            "kl": sum(float(one.kl_S[step]) for one in own) / len(own),
            "agreement": sum(float(one.agree_S[step]) for one in own) / len(own),
        }
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return found


def _maps(
    name: str, reads: Sequence[DocumentRead], kept: Sequence[Sequence[Tensor]], entries: Sequence[int]
) -> dict[str, list[Any]]:
    """Layer x head, or one value a layer."""
    over = partial(_over, reads, name)
    held = [torch.stack(layer) for layer in zip(*kept, strict=True)]
    overlaps = zip(
        *([layer.overlap_H for layer in read.policies[name].layers] for read in reads), strict=True
    )
    seen = torch.tensor(entries, dtype=torch.float64)[:, None]
    return {
        "coverage": [own.mean(-1).tolist() for own in over("coverage_HS")],
        "coverage_min": [own.amin(-1).tolist() for own in over("coverage_HS")],
        "value_coverage": [own.mean(-1).tolist() for own in over("value_coverage_HS")],
        "kept": [own.mean(0).tolist() for own in held],
        "kept_share": [(own / seen).mean(0).tolist() for own in held],
        "oracle_overlap": [torch.stack(own).mean(0).tolist() for own in overlaps],
        **{key: [float(own.mean()) for own in over(field)] for key, field in LAYER_LOSSES.items()},
        **{key: [own.mean(-1).tolist() for own in over(field)] for key, field in HEAD_LOSSES.items()},
    }


def _matrix(names: Sequence[str], likeness: Mapping[tuple[str, str], Sequence[Tensor]]) -> dict[str, Any]:
    cells = {pair: torch.cat(list(found)) for pair, found in likeness.items()}
    alike = {pair: (own == 1).double() for pair, own in cells.items()}
    return {
        "policies": list(names),
        "mean": [[float(cells[one, other].mean()) for other in names] for one in names],
        "identical": [[float(alike[one, other].mean()) for other in names] for one in names],
    }


def _head_wise(names: Sequence[str], reads: Sequence[DocumentRead]) -> dict[str, Any]:
    found: dict[str, Any] = {"policies": list(names)}
    for key, steps in (("first_step", 1), ("all_steps", None)):
        over = {name: _over(reads, name, "perturbation_QS", steps) for name in names}
        heads = {name: torch.cat([layer.mean(-1) for layer in own]) for name, own in over.items()}
        found[key] = [[share_below(heads[one], heads[other]) for other in names] for one in names]
    return found


def _tidy(summary: Any, curves: Any, maps: Any) -> Iterator[dict[str, Any]]:
    """One row a number; null stands for all of an axis."""

    def row(policy: str, metric: str, value: Any, **where: int) -> dict[str, Any]:
        anywhere = dict.fromkeys(("layer", "head", "step"))
        return {"policy": policy, "metric": metric, **anywhere, **where, "value": value}

    for policy, numbers in summary.items():
        yield from (row(policy, metric, value) for metric, value in numbers.items())
    for policy, numbers in curves.items():
        for metric, values in numbers.items():
            yield from (row(policy, metric, value, step=step) for step, value in enumerate(values))
    for policy, numbers in maps.items():
        for metric, layers in numbers.items():
            for layer, cells in enumerate(layers):
                if isinstance(cells, float):
                    yield row(policy, metric, cells, layer=layer)
                    continue
                yield from (
                    row(policy, metric, own, layer=layer, head=head) for head, own in enumerate(cells)
                )


def _plain(value: Any) -> Any:
    """As JSON can say it: no infinity, no NaN."""
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_plain(own) for own in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(record: Mapping[str, Any]) -> str:
    """The summary, one line a policy."""
    width = max(6, *(len(name) for name in record["summary"]))
    lines = ["policy".ljust(width) + "".join(heading.rjust(12) for _, heading, _ in COLUMNS)]
    for name, numbers in record["summary"].items():
        cells = ("-" if numbers[key] is None else f"{numbers[key]:.{digits}f}" for key, _, digits in COLUMNS)
        lines.append(name.ljust(width) + "".join(cell.rjust(12) for cell in cells))
    return "\n".join(lines)

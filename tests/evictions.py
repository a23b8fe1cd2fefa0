"""Evidence, scores and policies of every kind, and what every eviction owes.

Shared by the tests of presets and of invariants.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retain.attention.rotary import Rotary
from retain.budget.cascade import keep_sets
from retain.budget.largest_remainder import exact
from retain.budget.statement import Budget, spread
from retain.config import build
from retain.evidence import Evidence, Stock
from retain.policy import (
    Plan,
    candidates_of,
    decide_layers,
    load_policy,
    plan_of,
    score_entries,
    shape_of,
)
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from tests.naive import random_evidence

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "policy"
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
EVICTING = tuple(name for name in PRESETS if name not in ("full", "kivi"))
# Those whose published method (or our own) lets layers or heads compete, and how.
SHARED = {
    "ada_criticalkv": ("layer", "uniform"),
    "adakv": ("layer", "uniform"),
    "cake": ("head", "cake"),
    "defensivekv": ("layer", "uniform"),
    "learned": ("model", "uniform"),
    "lava": ("layer", "entropy"),
    "layer_defensivekv": ("model", "uniform"),
    "merge": ("model", "uniform"),
    "pyramidkv": ("head", "pyramid"),
}
SMALL = ("protection.sinks=2", "protection.minimum=2", "protection.recent=4")
FIXED = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


def policy_of(name: str, observed: str | None = None, settings: Any = None, **stated: Any) -> Policy:
    """A policy by its settings, as a YAML file states them."""
    return build({"name": name, "observed": observed, "observed_settings": settings or {}, **stated}, Policy)


def made(name: str = "own", protection: Protection = FIXED, **stated: Any) -> Policy:
    """A policy whose score is of two stages."""
    return policy_of(**{"name": name, "observed": "critical", "protection": protection, **stated})


def variants() -> Iterator[Policy]:
    """Every scope, allocation, first stage and draw that may stand together."""
    stages = (None, *({"by": by, "share": 0.5} for by in ("budget", "mass")))
    guards = ({}, {"safeguard": "guaranteed"}, {"compete_by": "first"})
    guards = (*guards, {"safeguard": "guaranteed", "compete_by": "first"})
    layers = ({}, {"layers": "pyramid", "beta": 4.0}, {"layers": "cake"}, {"layers": "entropy"})
    for spread_as, guard, scope, stage, draw in itertools.product(
        layers, guards, ("head", "layer", "model"), stages, ({}, {"draw": {"share": 0.4}})
    ):
        staged = "none" if stage is None else stage["by"]
        words = spread_as.get("layers", "uniform"), guard.get("safeguard"), staged
        name = (
            f"{scope} {' '.join(map(str, words))} {guard.get('compete_by', 'score')}{' drawn' * bool(draw)}"
        )
        with contextlib.suppress(ValueError):
            stated = {"scope": scope, "allocation": spread_as | guard, **draw}
            yield made(name, **stated, **({} if stage is None else {"first_stage": stage}))


VARIANTS = {policy.name: policy for policy in variants()}
MASS, GUARANTEED = {"first_stage": {"by": "mass", "share": 0.5}}, {"safeguard": "guaranteed"}
ENTROPY, CAKE = {"layers": "entropy"}, {"layers": "cake"}
# One of every way to share; `weights` wants a file.
KINDS: dict[str, dict[str, Any]] = {
    "head": {},
    "head, two stages": {"first_stage": {"by": "budget", "share": 0.5}},
    "head, by mass": MASS,
    "pyramid": {"allocation": {"layers": "pyramid", "beta": 4.0}},
    "weights": {"allocation": {"weights": "heads.json"}},
    "layer": {"scope": "layer"},
    "layer, guaranteed": {"scope": "layer", "allocation": GUARANTEED},
    "layer, drawn": {"scope": "layer", "draw": {"share": 0.3}},
    "model": {"scope": "model"},
    "model, guaranteed": {"scope": "model", "allocation": GUARANTEED},
    "model, by mass": {"scope": "model", **MASS},
    "model, drawn": {"scope": "model", "draw": {"share": 0.3}},
    "model, all drawn": {"scope": "model", "draw": {"share": 1.0}},
    "model, by attention": {
        "scope": "model",
        "first_stage": {"share": 0.5},
        "allocation": {"compete_by": "first"},
    },
    "entropy": {"scope": "layer", "allocation": ENTROPY},
    "entropy, guaranteed": {"scope": "layer", "allocation": ENTROPY | GUARANTEED},
    "entropy, equal heads": {"allocation": ENTROPY},
    "entropy, equal heads, by mass": {"allocation": ENTROPY, **MASS},
    "entropy, by mass": {"scope": "layer", "allocation": ENTROPY, **MASS},
    "entropy, drawn": {"scope": "layer", "allocation": ENTROPY, "draw": {"share": 0.3}},
    "cake": {"observed": "cake", "allocation": CAKE},
    "cake, heads compete": {"observed": "cake", "scope": "layer", "allocation": CAKE},
    "cake, drawn": {"observed": "cake", "scope": "layer", "allocation": CAKE, "draw": {"share": 0.2}},
}


def kind(name: str, heads_file: str, protection: Protection = FIXED) -> Policy:
    """A policy that shares in this way."""
    stated = {"allocation": {"weights": heads_file}} if name == "weights" else KINDS[name]
    return made(name, protection, **stated)


def small(name: str, heads_file: str) -> Policy:
    """The preset, with a window that fits short sequences."""
    policy = load_policy(name, SMALL)
    changes = {"window": 4, "page_size": 3, "lag": 3, "sinks": 2}
    each = {key: changes.get(key, value) for key, value in policy.observed_settings.items()}
    policy = replace(policy, observed_settings=each)
    if policy.weights is not None:
        policy = replace(policy, allocation=replace(policy.allocation, weights=heads_file))
    return policy


def make_evidence(seed: int, group: int, num_tokens: int, pads: tuple[int, ...], num_layers: int = 3) -> list:
    """Layers in float64, so that what padding does to a sum is lost where scores become float32."""
    rotary = Rotary(torch.tensor([0.3]))
    return [
        replace(
            random_evidence(
                pads, num_tokens=num_tokens, group=group, seed=seed + idx, dtype=torch.float64, rotary=rotary
            ),
            layer_idx=idx,
        )
        for idx in range(num_layers)
    ]


def sequence_part(evidence, b: int):
    """Sequence `b` alone, without its padding."""
    pad = int((~evidence.valid_BT[b]).sum())
    one = evidence.select_batch(slice(b, b + 1))
    return replace(
        one,
        queries_BQSD=one.queries_BQSD[:, :, pad:],
        keys_BHTD=one.keys_BHTD[:, :, pad:],
        values_BHTD=one.values_BHTD[:, :, pad:],
        positions_BT=one.positions_BT[:, pad:],
        valid_BT=one.valid_BT[:, pad:],
    )


def learned_scores(layers, seed: int) -> list[Score]:
    """A gate's scores."""
    draw = torch.Generator().manual_seed(seed)
    return [
        masked_score(
            torch.rand(layer.keys_BHTD.shape[:3], generator=draw),
            layer.exists_BHT,
            "risk",
        )
        for layer in layers
    ]


def scored(policy: Policy, layers, seeds, learned) -> list[Score]:
    return [
        score_entries(policy, layer, learned=each, seeds_B=seeds)
        for layer, each in zip(layers, learned, strict=True)
    ]


def made_scores(layers, seed: int, *, ties: bool) -> list[Score]:
    """Scores of every kind that a policy may want of them; with ties, of four values only."""
    scores, draw = [], torch.Generator().manual_seed(seed)
    lots = torch.Generator().manual_seed(seed + 1)
    for idx, layer in enumerate(layers):
        shape = layer.keys_BHTD.shape[:3]
        keys = 1 / (1 - torch.rand(shape, generator=lots))
        keys = keys.floor() if ties else keys
        values, first = (torch.rand(shape, generator=draw) ** 2 for _ in range(2))
        values = values * (1 + idx) * torch.rand(1, shape[1], 1, generator=draw)
        if ties:
            values, first = (values * 4).floor(), (first * 4).floor()
        weight = torch.rand(shape[0], generator=draw, dtype=torch.float64)
        score = masked_score(values, layer.valid_BT, "risk", first_BHT=first, window=2, layer_weight_B=weight)
        scores.append(replace(score, draw_BHT=keys.masked_fill(~layer.valid_BT[:, None], float("-inf"))))
    return scores


def check_order(policy: Policy, candidates, keep_BHT: torch.Tensor) -> None:
    """In every head, what the stages before left is kept from the highest score, of equal ones the later.
    What is drawn is looked at where heads compete."""
    stage = policy.first_stage
    if policy.draw is not None:
        return
    B, H, _ = keep_BHT.shape
    for b in range(B):
        for h in range(H):
            kept = {i for i, each in enumerate(candidates.kept_BHT[b, h].tolist()) if each}
            budget = int(keep_BHT[b, h].sum())
            rows = candidates.score_BHT[b, h].tolist()
            exists = [i for i, value in enumerate(rows) if value > float("-inf")]
            if stage is not None and stage.by == "budget":
                first = candidates.first_BHT[b, h].tolist()
                order = sorted(exists, key=lambda i: (i in kept, first[i], i), reverse=True)
                kept |= set(order[: int(exact(stage.share) * budget)])
            order = sorted(exists, key=lambda i: (i in kept, rows[i], i), reverse=True)
            assert keep_BHT[b, h].nonzero().flatten().tolist() == sorted(order[:budget])


def check_competition(policy: Policy, layers, scores, budget: Budget, keeps, stock: Stock | None) -> None:
    """Between heads that share, no bid lost to a lower one, of equal ones to an earlier, of those to one of a
    higher layer or head. Where a share is drawn, what each head keeps is named, entry by entry."""
    plan = plan_for(policy, layers, budget, stock)
    if policy.draw is not None:
        candidates = [candidates_of(plan, score) for score in scores]
        pools_of_layers = (
            [range(len(layers))] if policy.scope == "model" else [[i] for i in range(len(layers))]
        )
        for each in pools_of_layers:
            check_draw(policy, *([one[idx] for idx in each] for one in (layers, candidates, keeps)))
        return
    pools: dict[tuple[int, int], list[tuple[tuple, bool]]] = {}
    for idx, (score, keep_BHT) in enumerate(zip(scores, keeps, strict=True)):
        bids = candidates_of(plan, score).bids
        assert bids is not None
        for b, h in itertools.product(range(keep_BHT.shape[0]), range(keep_BHT.shape[1])):
            free = int(keep_BHT[b, h].sum()) - int(bids.guaranteed_BH[b, h])
            pool = pools.setdefault((b, 0 if policy.scope == "model" else idx), [])
            mine = bids.select(bids.row_N == b * keep_BHT.shape[1] + h)
            each = sorted(zip(mine.value_N.tolist(), mine.place_N.tolist(), strict=True), reverse=True)
            pool += [((value, place, -idx, -h), rank < free) for rank, (value, place) in enumerate(each)]
    for pool in pools.values():
        won, lost = ([key for key, each in pool if each is side] for side in (True, False))
        assert not won or not lost or min(won) > max(lost)


def drawn_by_hand(bids: Sequence[tuple], free: int, share: float) -> set[tuple]:
    """Winners of bids `(value, place, -layer, -head, key)`: most by value, and of the others, the rest by
    key; of equal ones the later place, then the lower layer, then the lower head."""
    drawn = math.floor(exact(share).limit_denominator(10**6) * free)
    bids = sorted(bids, key=lambda bid: bid[:4], reverse=True)
    rest = sorted(bids[free - drawn :], key=lambda bid: (bid[4], *bid[1:4]), reverse=True)
    return {*bids[: free - drawn], *rest[:drawn]}


def check_draw(policy: Policy, layers: Sequence[Evidence], candidates, keeps) -> None:
    """Layers whose heads share one budget keep what they are guaranteed, and who wins by hand."""
    assert policy.draw is not None
    H = layers[0].num_heads
    for b in range(len(layers[0].valid_BT)):
        bids, sure, kept = [], set(), set()
        for idx, (layer, one, keep_BHT) in enumerate(zip(layers, candidates, keeps, strict=True)):
            mine = one.bids.select(one.bids.row_N // H == b)
            columns_N = (mine.value_N, mine.place_N, mine.row_N % H, mine.draw_N)
            for value, place, h, key in zip(*(each.tolist() for each in columns_N), strict=True):
                bids.append((value, place, -idx, -h, key))
            there = {(t, -idx, -h) for h, t in layer.exists_BHT[b].nonzero().tolist()}
            sure |= there - {bid[1:4] for bid in bids}
            kept |= {(t, -idx, -h) for h, t in keep_BHT[b].nonzero().tolist()}
        chosen = drawn_by_hand(bids, len(kept) - len(sure), policy.draw.share)
        assert kept == sure | {bid[1:4] for bid in chosen}


# Later evictions: heads hold different numbers of entries already.


def ragged(layers: Sequence[Evidence], seed: int, *, fresh: int = 4) -> list[Evidence]:
    """The same layers after earlier evictions: each head holds some of the tokens, few or many, and every
    head the last ones; of some sequences also the first three."""
    draw, answer = torch.Generator().manual_seed(seed), []
    first_B11 = torch.rand(layers[0].valid_BT.shape[0], 1, 1, generator=draw) < 0.5
    for layer in layers:
        B, H, T = layer.keys_BHTD.shape[:3]
        share = torch.rand(B, H, 1, generator=draw) ** 2
        held = torch.rand(B, H, T, generator=draw) < share
        held |= (torch.arange(T) >= T - fresh) | (first_B11 & (layer.places_BT[:, None] < 3))
        answer.append(replace(layer, held_BHT=held & layer.valid_BT[:, None]))
    return answer


def stock_of(layers: Sequence[Evidence], lengths: Sequence[int] | None = None) -> Stock:
    """Entries to choose from; `lengths` are declared."""
    held_LB = [layer.exists_BHT.sum((1, 2)).tolist() for layer in layers]
    seen = layers[0].valid_BT.sum(-1).tolist()
    return Stock(
        tuple(zip(*held_LB, strict=True)),
        tuple(seen if lengths is None else lengths),
        torch.stack([layer.exists_BHT.all(1) for layer in layers]).all(0),
    )


def held_scores(layers: Sequence[Evidence], scores: Sequence[Score]) -> list[Score]:
    """The scores of what is still held, in steps of 1/256, so that sums are exact in whatever order."""
    answer = []
    for layer, score in zip(layers, scores, strict=True):
        missing_BHT = ~layer.exists_BHT
        values, first, keys = (
            ((each * 256).round() / 256).masked_fill(missing_BHT, float("-inf"))
            for each in (score.values_BHT, score.first_BHT, score.draw_BHT)
        )
        answer.append(replace(score, values_BHT=values, first_BHT=first, draw_BHT=keys))
    return answer


def plan_for(policy: Policy, layers: Sequence[Evidence], budget: Budget, stock: Stock | None) -> Plan:
    shapes = [shape_of(layer) for layer in layers]
    return plan_of(policy, budget, layers[0].valid_BT, shapes, stock=stock)


def check(
    policy: Policy, layers: Sequence[Evidence], scores: Sequence[Score], budget: Budget, stock: Stock | None
) -> list[torch.Tensor]:
    """Checks every eviction, the first one (without a stock) and those after it; returns the keep sets."""
    decisions = decide_layers(policy, layers, budget, scores=scores, stock=stock)
    plan, stock = plan_for(policy, layers, budget, stock), stock or stock_of(layers)
    keeps = [one.keep_BHT for one in decisions]
    counts_BL = torch.stack([keep_BHT.sum((1, 2)) for keep_BHT in keeps], 1).tolist()
    shapes = [replace(shape_of(layer), metadata_bytes=policy.metadata_bytes) for layer in layers]
    stated = spread(budget, stock.lengths_B, shapes)
    for b, (counts, held) in enumerate(zip(counts_BL, stock.held_BL, strict=True)):
        each = stated.equal_BL[b]
        crosses = policy.scope == "model" or policy.layers in ("cake", "entropy")
        if crosses or policy.weights is not None:
            assert sum(counts) == min(sum(each), sum(held))
        else:
            if policy.layers == "pyramid":
                each = [line[b] for line in replace(plan, totals=stated).fixed_LB]
                assert sum(each) == sum(stated.equal_BL[b])
            assert counts == [min(share, there) for share, there in zip(each, held, strict=True)]
        assert not plan.covers_B[b] or counts == list(held)
    for one, score, layer in zip(decisions, scores, layers, strict=True):
        keep_BHT, exists_BHT = one.keep_BHT, layer.exists_BHT
        assert not (keep_BHT & ~exists_BHT).any()
        assert not (one.protected_BT[:, None] & ~keep_BHT).any()
        assert torch.equal(keep_BHT.any(-1), exists_BHT.any(-1))
        check_order(policy, candidates_of(plan, score), keep_BHT)
        if policy.scope == "head" and policy.weights is None:
            # A head that gets fewer than another, by more than one, has no more.
            kept_BH, held_BH = keep_BHT.sum(-1), exists_BHT.sum(-1)
            assert ((kept_BH >= kept_BH.amax(-1, keepdim=True) - 1) | (kept_BH == held_BH)).all()
    goes = any((layer.exists_BHT & ~keep).any() for layer, keep in zip(layers, keeps, strict=True))
    assert goes or all(plan.covers_B)
    if policy.scope != "head":
        check_competition(policy, layers, scores, budget, keeps, stock)
    return keeps


def columns(layer: Evidence, rows: Sequence[int], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that any head of a layer holds, of some sequences, in order and right-aligned: their indices
    (0 on padding), and which are no padding. By a loop."""
    tokens = [layer.exists_BHT[b].any(0).nonzero().flatten().tolist() for b in rows]
    width = max(map(len, tokens)) + pad
    token = [[0] * (width - len(each)) + each for each in tokens]
    valid = [[t >= width - len(each) for t in range(width)] for each in tokens]
    return torch.tensor(token, dtype=torch.int64), torch.tensor(valid, dtype=torch.bool)


def keeps_of_columns(
    plan: Plan, layers: Sequence[Evidence], scores: Sequence[Score], rows: Sequence[int], pad: int = 0
) -> list[torch.Tensor]:
    """The keep sets of some sequences `[rows, H, T]`, decided on columns only, as a cache does."""
    part, candidates, shown = plan.select_batch(rows), [], []
    idx = torch.tensor(list(rows))
    for layer, score in zip(layers, scores, strict=True):
        token_BT, valid_BT = columns(layer, rows, pad)
        index_BHT = token_BT[:, None].expand(-1, layer.num_heads, -1)
        values, first, keys = (
            None
            if each is None
            else each[idx].gather(-1, index_BHT).masked_fill(~valid_BT[:, None], -torch.inf)
            for each in (score.values_BHT, score.first_BHT, score.draw_BHT)
        )
        weight_B = score.layer_weight_B[idx]
        each = replace(score, values_BHT=values, first_BHT=first, draw_BHT=keys, layer_weight_B=weight_B)
        protected_BT = part.protected_BT.gather(-1, token_BT) & valid_BT
        place_BT = layer.places_BT[idx].gather(-1, token_BT)
        candidates.append(candidates_of(part, each, protected_BT, place_BT=place_BT))
        shown.append((index_BHT, valid_BT))
    answer = []
    for layer, keep_BHT, (index_BHT, valid_BT) in zip(
        layers, keep_sets(part, candidates), shown, strict=True
    ):
        assert not (keep_BHT & ~valid_BT[:, None]).any()
        full_BHT = torch.zeros(len(idx), layer.num_heads, layer.num_seen, dtype=torch.int64)
        answer.append(full_BHT.scatter_add_(-1, index_BHT, keep_BHT.long()).bool())
    return answer

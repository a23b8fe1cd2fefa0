"""One token set for all heads of a layer, or of all layers, against loops; and what excludes it."""

import itertools
from dataclasses import replace

import pytest
import torch

from retain.budget.capacity import capacity_of
from retain.budget.one_set import Selection
from retain.budget.statement import Budget
from retain.policy import candidates_of, decide_layers, keep_masks, load_policy, plan_of, shape_of
from retain.presets import Policy
from retain.scores import masked_score
from tests.evictions import make_evidence, own_part
from tests.refused import refused
from tests.test_cascade import SMALL, _case, _plan, run_cascade

OVER = [Selection(shared, by) for shared in ("layer", "model") for by in ("mean", "max")]


def made(selection: Selection, observed: str = "observed_risk", **settings) -> Policy:
    return Policy("own", observed=observed, protection=SMALL, selection=selection, **settings)


def worth(scores, layers, b, i, by):
    """What a token is worth: over the heads of each layer first, then over layers."""
    over = {"mean": lambda own: sum(own) / len(own), "max": max}[by]
    per_layer = []
    for idx in layers:
        score = scores[idx]
        column = [float(x) for x in score.values_BHT[b, :, i]]
        if score.unit == "rank":
            column = []
            for row in score.values_BHT[b].tolist():
                better = sum((x, k) > (row[i], i) for k, x in enumerate(row) if x > float("-inf"))
                column.append(1 - better / sum(x > float("-inf") for x in row))
        per_layer.append(over(column))
    return round(over(per_layer), 9)  # places that add up alike tie


def naive_sets(scores, evidence, selection, ratio):
    """Tokens of each layer, sequence and head, by loops."""
    L, valid, H = len(scores), evidence[0].valid_BT, evidence[0].num_heads
    sets = {}
    for b in range(len(valid)):
        own = valid[b].nonzero().flatten().tolist()
        entries = int(ratio * len(own) * H + 0.5)
        sure = {*own[:2], *own[-3:]}
        for idx, h in itertools.product(range(L), range(H)):
            layers = [idx] if selection.shared == "layer" else range(L)
            whole, rest = divmod(entries, H) if selection.shared == "layer" else divmod(L * entries, L * H)
            place = h if selection.shared == "layer" else idx * H + h
            order = sorted(own, key=lambda i: (i in sure, worth(scores, layers, b, i, selection.by), i))
            sets[idx, b, h] = sorted(order[-whole - (place < rest) :])
    return sets


@pytest.mark.parametrize("selection", OVER, ids=str)
@pytest.mark.parametrize("unit", ["risk", "rank"])
@pytest.mark.parametrize("ratio", [0.3, 0.55])
def test_all_heads_keep_the_tokens_that_are_worth_most_to_all_of_them(selection, unit, ratio):
    evidence, scores = _case(3)
    scores = [replace(score, unit=unit, first_BHT=None) for score in scores]
    got = decide_layers(made(selection), evidence, Budget(keep_ratio=ratio), scores=scores)
    naive = naive_sets(scores, evidence, selection, ratio)
    for (idx, b, h), tokens in naive.items():
        assert got[idx].keep_BHT[b, h].nonzero().flatten().tolist() == tokens
    plan = _plan(made(selection), evidence, Budget(keep_ratio=ratio))
    assert sum(one.keep_BHT.sum((1, 2)) for one in got).tolist() == plan.shares.totals.total_B


SPREADS = {
    "uniform": {},
    "pyramid": {"allocation": {"layers": "pyramid", "beta": 4.0}},
    "entropy": {"allocation": {"layers": "entropy"}},
    "two stages": {"observed": "critical", "first_stage": {"by": "budget", "share": 0.5}},
    "by mass": {"observed": "critical", "first_stage": {"by": "mass", "share": 0.5}},
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_heads_of_a_layer_keep_the_same_however_layers_share(spread, seed):
    changes = [f"{name}={value}" for name, value in SPREADS[spread].items() if name == "observed"]
    sections = {k: v for k, v in SPREADS[spread].items() if k != "observed"}
    flat = [f"{name}.{key}={value}" for name, own in sections.items() for key, value in own.items()]
    policy = replace(
        load_policy("snapkv", ["selection.shared=layer", "observed_settings={}", *changes, *flat]),
        protection=SMALL,
    )
    layers, scores = _case(seed)
    plan = _plan(policy, layers, Budget(keep_ratio=0.4))
    keeps, _ = run_cascade(plan, scores)
    once = decide_layers(policy, layers, Budget(keep_ratio=0.4), scores=scores)
    held = 0
    for keep_BHT, one in zip(keeps, once, strict=True):
        assert torch.equal(keep_BHT, one.keep_BHT)
        # The remainder is one token of the first heads.
        assert (keep_BHT[:, :-1] | ~keep_BHT[:, 1:]).all()
        assert (keep_BHT[:, 0] & ~keep_BHT[:, -1]).sum(-1).le(1).all()
        held = held + keep_BHT.sum((1, 2))
    assert held.tolist() == plan.shares.totals.total_B


@pytest.mark.parametrize("selection", OVER, ids=str)
def test_a_cascade_ends_with_the_same_and_a_sequence_alone_too(selection):
    policy = made(selection, "critical")
    layers, scores = _case(5)
    budget = Budget(keep_ratio=0.35)
    once = [one.keep_BHT for one in decide_layers(policy, layers, budget, scores=scores)]
    keeps, held = run_cascade(_plan(policy, layers, budget), scores)
    assert all(map(torch.equal, keeps, once))
    if selection.shared == "model":  # nothing can go before the last layer has come
        assert held[-2][0] == 3 * 3 * 40
    evidence = make_evidence(1, 2, 31, (0, 5, 2))
    policy = made(selection, "snapkv", observed_settings={"window": 4})
    together = decide_layers(policy, evidence, budget)
    for b, pad in enumerate((0, 5, 2)):
        alone = decide_layers(policy, [own_part(layer, b) for layer in evidence], budget)
        for whole, one in zip(together, alone, strict=True):
            assert torch.equal(whole.keep_BHT[b : b + 1, :, pad:], one.keep_BHT)


def test_what_a_head_does_not_hold_counts_in_no_mean():
    """After an earlier eviction heads hold other tokens."""
    (layer,) = make_evidence(0, 1, 12, (0,), num_layers=1)
    held = torch.ones(1, 2, 12, dtype=torch.bool)
    held[0, 1, 4] = held[0, 0, 6] = False
    values = torch.zeros(1, 2, 12)
    values[0, 0, 4], values[0, 1, 6], values[0, :, 5] = 3.0, 2.0, torch.tensor([4.0, 1.0])
    score = masked_score(values, held, "mass")
    plan = plan_of(made(OVER[0]), Budget(keep_ratio=1.0), layer.valid_BT, [shape_of(layer)])
    shown = candidates_of(plan, score).score_BHT[0]
    lowest, none = torch.finfo(torch.float32).min, float("-inf")
    assert shown[:, 5].tolist() == [2.5, 2.5]
    # It comes behind what both hold.
    assert shown[:, 4].tolist() == [lowest, none] and shown[:, 6].tolist() == [none, lowest]


def test_the_price_of_a_shared_set_is_what_heads_lose():
    """A guard of capacity looks at each head's own risk, not at the mean by which tokens are ranked."""
    layers, scores = _case(2)
    plan = _plan(made(OVER[0]), layers, Budget(keep_ratio=0.4))
    candidates = [candidates_of(plan, score) for score in scores]
    keeps = keep_masks(plan, candidates)
    lost = capacity_of(plan.shares, candidates, keeps, 0.5)
    gone = [score.values_BHT.masked_fill(keep, 0.0) for score, keep in zip(scores, keeps, strict=True)]
    largest_B = torch.stack([own.clamp_min(0).amax((1, 2)) for own in gone]).amax(0)
    torch.testing.assert_close(torch.tensor(lost.price_B).float(), largest_B)


EXCLUDED = [
    ({"scope": "layer"}, "one token set, and so equal budgets: take scope 'head'"),
    ({"scope": "model"}, "one token set, and so equal budgets: take scope 'head'"),
    ({"allocation": {"head_classes": "heads.tsv"}}, "and no head_classes, head_importance or quotas"),
    (
        {"allocation": {"layers": "pyramid"}},
        "allocation.layers 'pyramid' unlike shares",
    ),
    (
        {"observed": "critical", "first_stage": {"by": "budget"}},
        "'model' selects in one stage",
    ),
]


@pytest.mark.parametrize(("changes", "message"), EXCLUDED)
def test_what_excludes_a_shared_set_is_said(changes, message):
    flat = [
        f"{name}.{key}={own}"
        for name, value in changes.items()
        if isinstance(value, dict)
        for key, own in value.items()
    ]
    flat += [f"{name}={value}" for name, value in changes.items() if not isinstance(value, dict)]
    settings = ["observed_settings={}"] if "observed" in changes else []
    refused(message, load_policy, "snapkv", ["selection.shared=model", *settings, *flat])


def test_thresholds_and_pages_go_with_no_set_of_all_layers():
    layers, scores = _case(1)
    layer, model = made(Selection("layer")), made(Selection("model"))
    refused("selection would not be read", decide_layers, model, layers, Budget(threshold=0.5), scores=scores)
    refused(
        "page=4 rounds what each", decide_layers, layer, layers, Budget(keep_ratio=0.5, page=4), scores=scores
    )
    for one in decide_layers(layer, layers, Budget(threshold=0.5), scores=scores):
        assert torch.equal(one.keep_BHT, one.keep_BHT[:, :1].expand_as(one.keep_BHT))

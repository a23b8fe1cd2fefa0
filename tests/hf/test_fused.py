"""The fused policy with one budget for the heads of all layers, in every regime of `retain.Cache`: at every
moment the ragged cache holds what a plain dense one keeps, and its logits are those of that one."""

from dataclasses import replace

import pytest
import torch

import retain
from retain.budget.allocation import Allocation
from retain.budget.priority_sampling import Draw
from retain.fusion import FUSIONS, IN_RISK
from retain.hf.cache.cache import Cache
from retain.hf.cache.regime import NAMES
from retain.presets import Policy
from tests.evictions import small
from tests.hf.regime_runs import agree, exact_model, gates_of, held_by, life, life_of
from tests.tiny import tiny_batch, tiny_model

BOTH_SIDES = tuple(sorted(set(FUSIONS) - {"observed", "learned"}))


def fused(how: str = "max", **settings) -> Policy:
    """The preset with a short window and little protection, its heads sharing over layers."""
    policy = small("fused", "")
    protection = replace(policy.protection, prefix_fraction=0.0, suffix_fraction=0.0)
    lift = None if how == "prior" or settings.get("draw") else "mean"
    changes = {"fusion": how, "floor": lift, "draw": None, "scope": "model", "protection": protection}
    changes.update(settings)
    return replace(policy, **changes)


@pytest.mark.parametrize("how", BOTH_SIDES)
@pytest.mark.parametrize("regime", NAMES)
def test_every_fusion_in_every_regime(how, regime):
    """Three left-padded sequences; each is decided with its own padding cut off."""
    naive = agree(exact_model(), fused(how), life(3), regime=regime, keep_ratio=0.4)
    counts = {int(held[0, h].sum()) for held in naive.history[-1] for h in range(held.shape[1])}
    assert len(counts) > 1  # heads got what they bid for


# What there is to a draw: a budget that all heads share, and one that layers ask for parts of.
DRAWS = {
    "model": {"how": "sum"},
    "model, guarded, over the head's mean": {
        "allocation": Allocation(normalise="head", safeguard="guaranteed")
    },
    "layer, shares by entropy": {"scope": "layer", "allocation": Allocation("entropy")},
    "by the gate alone": {"how": "learned", "observed": None, "observed_settings": {}},
}


def drawn(name: str = "model", share: float = 0.4) -> Policy:
    """The policy with a share drawn."""
    return fused(**DRAWS[name], draw=Draw(share))


@pytest.mark.parametrize(
    ("name", "regime"),
    [("model", regime) for regime in NAMES] + [(name, "chunked+decode") for name in DRAWS if name != "model"],
)
def test_a_share_is_drawn_in_every_regime(name, regime):
    naive = agree(exact_model(), drawn(name), life(3), regime=regime, keep_ratio=0.4)
    plain = agree(exact_model(), replace(drawn(name), draw=None), life(3), regime=regime, keep_ratio=0.4)
    for own, other in zip(naive.history[-1], plain.history[-1], strict=True):
        assert not torch.equal(own, other)
    counts = [sum(held.sum() for held in run.history[-1]) for run in (naive, plain)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("family", ["gemma3", "mistral_window", "qwen3_next"])
def test_a_share_is_drawn_beside_windows_and_layers_left_alone(family):
    model = exact_model(family)
    agree(model, drawn(), life_of(model, 3), tokens_per_head=11)


@pytest.mark.parametrize("how", ["max", "prior", "veto"])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_a_threshold_admits_by_the_fused_risk(how, scope):
    """Under a threshold nothing is shared: every scope admits the same."""
    naive = agree(exact_model(), fused(how, scope=scope), life(3), threshold=2.0)
    assert len({int(held.sum()) for held in naive.history[-1]}) > 1


@pytest.mark.parametrize("how", [*IN_RISK, "sum"])
def test_gates_in_another_unit_are_refused_when_the_cache_is_made(how):
    model = tiny_model("llama")
    mass = retain.new_gates(model, "lowrank")
    with pytest.raises(ValueError, match=f"fusion '{how}' wants a gate in 'risk', and these .*in 'mass'"):
        Cache(model, fused(how), gates=mass, keep_ratio=0.5)


@pytest.mark.parametrize("how", ["sum", "prior", "veto", "log_linear", "rank_blend"])
def test_a_fusion_is_no_other_one(how):
    """On the same context each keeps something that `max` does not."""
    model, (ids, mask) = exact_model(), tiny_batch((0, 5), 60)
    held = []
    with retain.attach(model):
        for one in ("max", how):
            cache = Cache(model, fused(one), gates=gates_of(model), keep_ratio=0.3).prefill(ids, mask)
            held.append(held_by(cache, mask))
    assert any(not torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_seeds_say_who_is_drawn():
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 7), 50)
    settings, held = {"gates": gates_of(model), "keep_ratio": 0.3}, []
    with retain.attach(model):
        for seeds in (None, [0, 0], [0, 1]):
            cache = Cache(model, drawn(), seeds=seeds, **settings).prefill(ids, mask)
            held.append(torch.stack(held_by(cache, mask)))
    assert torch.equal(held[0], held[1]) and torch.equal(held[1][:, 0], held[2][:, 0])
    assert not torch.equal(held[1][:, 1], held[2][:, 1])


def test_a_share_to_be_drawn_is_stated_for_a_cache():
    model = tiny_model("llama")
    given = {"gates": gates_of(model), "keep_ratio": 0.5}
    made_by_name = Cache(model, "fused", draw={"share": 0.3}, **given)
    assert made_by_name.state.bound_policy.request.policy.draw == Draw(0.3)
    with pytest.raises(ValueError, match="draw shares out a budget that heads share, and scope 'head'"):
        Cache(model, "fused", draw={"share": 0.3}, scope="head", **given)
    with pytest.raises(ValueError, match="share: .* at most 1, got 3.0"):
        Cache(model, "fused", draw={"share": 3.0}, **given)
    with pytest.raises(ValueError, match="draw would not be read"):
        Cache(model, "fused", draw={"share": 0.3}, gates=given["gates"], threshold=1.0)

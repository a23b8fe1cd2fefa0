"""Named policies, fusions and draws in every regime: at every moment the ragged cache holds what a plain
dense one keeps."""

from dataclasses import replace

import pytest
import torch

from retain.config import build, stated_of
from retain.eviction import WHEN
from retain.fusion import FUSIONS
from retain.presets import Policy
from retain.protection import Protection
from tests.evictions import EVICTING, policy_of, small
from tests.hf.regime_runs import FEW, agree, exact_model, life


@pytest.mark.parametrize("name", EVICTING)
def test_every_preset_with_chunks_and_decoding(name, heads_file):
    model = exact_model()
    agree(model, small(name, heads_file), life(3), tokens_per_head=12)


# What each regime has to carry on: queries of a window, running statistics, a gate's scores, all queries.
CARRIED = ("layer_defensivekv", "h2o", "learned", "expected_attention")


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("when", ["prefill", "chunk", "decode", "prefill+decode"])
def test_what_later_moments_read_is_carried_on_whenever_it_evicts(when, name, heads_file):
    model = exact_model()
    batch = 1 if when == "chunk" else 3
    agree(model, small(name, heads_file), life(batch), when=when, keep_ratio=0.4)


def policy(name: str, observed: str | None = None, **settings) -> Policy:
    return policy_of(name, observed, **{"protection": FEW, **settings})


# Entries of 2 * 16 float64 numbers, over 3 layers of 2 heads.
BUDGETS = {"ratio": {"keep_ratio": 0.3}, "tokens": {"tokens_per_head": 9}, "bytes": {"bytes": 60 * 256}}
SCOPES = {
    "model": policy("a", "observed_risk", observed_settings={"window": 4}, scope="model"),
    # Places of last accesses, which are equal in many heads.
    "model, ties": policy("h", "lru", scope="model"),
    "layer, by a gate": policy("b", learned=True, scope="layer"),
    "layer, guaranteed": policy("c", "tova", scope="layer", allocation={"safeguard": "guaranteed"}),
    "head, ties": policy("d", "quest", observed_settings={"page_size": 3}),
    "shares by entropy": policy("e", "h2o", scope="layer", allocation={"layers": "entropy"}),
    "running values": policy("f", "vatp", observed_settings={"attention": "running"}, scope="model"),
    "expected, projected": policy(
        "g", "expected_attention", observed_settings={"value_norm": "output", "sinks": 1}
    ),
}


@pytest.mark.parametrize(
    ("name", "budget"), [(name, list(BUDGETS)[number % 3]) for number, name in enumerate(SCOPES)]
)
def test_every_scope_and_budget(name, budget):
    model = exact_model()
    agree(model, SCOPES[name], life(3, seed=2), **BUDGETS[budget])


@pytest.mark.parametrize(
    ("case", "threshold"),
    [
        (policy("risk", "observed_risk", observed_settings={"window": 4}), 2.0),
        (policy("gate", learned=True), 0.6),
        (policy("mass", "h2o"), 0.9),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_admission_keeps_what_scores_enough_once_it_is_protected_no_longer(case, threshold):
    model = exact_model()
    naive = agree(model, case, life(3), threshold=threshold)
    counts = {int(held.sum()) for held in naive.history[-1]}
    assert len(counts) > 1  # no budget says how many


FAMILY = {
    **{"llama": "cake", "olmo2": "h2o", "gemma3": "keydiff"},
    **{"gpt_oss": "lru", "qwen3_next": "snapkv", "phi3": "defensive"},
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("family", FAMILY)
def test_windows_sinks_and_layers_left_alone(family, when, heads_file):
    agree(exact_model(family), small(FAMILY[family], heads_file), life(3), when=when, tokens_per_head=11)


def test_observed_queries_whose_entries_were_evicted():
    """A window of 6 queries, of which 2 are protected: others ask, and are not held."""
    model = exact_model()
    case = policy("wide", "snapkv", observed_settings={"window": 6, "pool_size": 3}, scope="layer")
    agree(model, case, life(3), every=2, tokens_per_head=8)


def test_metadata_is_stored_once_between_evictions(monkeypatch, heads_file):
    monkeypatch.setattr("retain.hf.cache.engine.MOST_RECENT", 3)
    model = exact_model()
    for name in ("h2o", "lru", "learned"):
        scenario = life(3, chunk=None, steps=(7, 8), turn=0)
        agree(model, small(name, heads_file), scenario, when="decode", every=7, tokens_per_head=12)


def test_pins_stay(heads_file):
    spans = [[(20, 23)], [(5, 6), (30, 32)], [(0, 2)]]
    little = replace(small("adakv", heads_file), protection=Protection(1, 0.0, 0.0, 0, 2))
    naive = agree(exact_model(), little, life(3), pinned=spans, tokens_per_head=14)
    for held in naive.history[-1]:
        for b, pad in enumerate((0, 3, 11)):
            pinned = [pad + place for start, stop in spans[b] for place in range(start, stop)]
            assert held[b][:, [*pinned, pad]].all()


BOTH_SIDES = tuple(sorted(set(FUSIONS) - {"observed", "learned"}))


def fused(how: str = "max", **settings) -> Policy:
    """The preset with a short window and little protection, its heads sharing over layers."""
    policy = small("learned", "")
    protection = replace(policy.protection, prefix_fraction=0.0, suffix_fraction=0.0)
    changes = {"fusion": how, "draw": None, "scope": "model", "protection": protection}
    return build(stated_of(policy) | changes | settings, Policy)


@pytest.mark.parametrize("how", BOTH_SIDES)
@pytest.mark.parametrize("when", WHEN)
def test_every_fusion_whenever_it_evicts(how, when):
    """Three left-padded sequences; each is decided with its own padding cut off."""
    naive = agree(exact_model(), fused(how), life(3), when=when, keep_ratio=0.4)
    counts = {int(held[0, h].sum()) for held in naive.history[-1] for h in range(held.shape[1])}
    assert len(counts) > 1  # heads got what they bid for


# What there is to a draw: a budget that all heads share, and one that layers ask for parts of.
DRAWS = {
    "model": {"how": "sum"},
    "model, guarded, over the head's mean": {"allocation": {"safeguard": "guaranteed"}},
    "layer, shares by entropy": {"scope": "layer", "allocation": {"layers": "entropy"}},
    "by the gate alone": {"how": "learned", "observed": None, "observed_settings": {}},
}


def drawn(name: str = "model", share: float = 0.4) -> Policy:
    return fused(**DRAWS[name], draw={"share": share})


@pytest.mark.parametrize(
    ("name", "when"),
    [("model", when) for when in WHEN] + [(name, "chunk+decode") for name in DRAWS if name != "model"],
)
def test_a_share_is_drawn_whenever_it_evicts(name, when):
    naive = agree(exact_model(), drawn(name), life(3), when=when, keep_ratio=0.4)
    plain = agree(exact_model(), replace(drawn(name), draw=None), life(3), when=when, keep_ratio=0.4)
    for one, other in zip(naive.history[-1], plain.history[-1], strict=True):
        assert not torch.equal(one, other)
    counts = [sum(held.sum() for held in run.history[-1]) for run in (naive, plain)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("how", ["max", "sum"])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_a_threshold_admits_by_the_fused_risk(how, scope):
    """Under a threshold nothing is shared: every scope admits the same."""
    naive = agree(exact_model(), fused(how, scope=scope), life(3), threshold=2.0)
    assert len({int(held.sum()) for held in naive.history[-1]}) > 1

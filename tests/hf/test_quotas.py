"""Quotas in a cache: every regime against a masked full cache, exact totals, what is refused beforehand."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import retain
from retain.budget.allocation import Allocation
from retain.budget.quotas import quotas_of
from retain.budget.statement import Budget, LayerShape, spread
from retain.gates import GateSet
from retain.gates.artifact import load_gates, save_gates
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe, fingerprint
from retain.policy import Policy
from retain.protection import Protection
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import (
    assert_same_held,
    assert_same_logits,
    differs,
    eviction_free,
    exact_model,
    gates_of,
    life,
    lived,
)
from tests.tiny import tiny_batch, tiny_model

FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)
QUOTA = Allocation(quotas="calibrated")
RISK = {"observed": "observed_risk", "observed_settings": {"window": 4}}


def policy(**settings) -> Policy:
    return Policy("own", **{"learned": True, "protection": FEW, "allocation": QUOTA, **settings})


def stored(gates: GateSet) -> GateSet:
    """The same gates with quotas of heads that are worth from a twentieth to a third."""
    worth = {0.1: (7, 1, 4, 3, 2, 3), 0.4: (5, 2, 4, 3, 2, 4), 0.8: (3, 3, 4, 3, 3, 4)}
    parts: dict[str, list[list[int]]] = {str(layer): [] for layer in gates.layers}
    for row in worth.values():
        for idx, layer in enumerate(gates.layers):
            parts[str(layer)].append([own * 50_000 for own in row[2 * idx : 2 * idx + 2]])
    gates.metadata["calibration"] = {"quotas": {"keep_ratio": list(worth), "parts": parts}}
    return gates


class NaiveQuotas(Naive):
    """What a score brings of quotas beside it."""

    def _score(self, layer, seeds):
        return replace(super()._score(layer, seeds), quotas=self.gates.quotas)


@pytest.mark.parametrize(
    ("regime", "fused"),
    [
        ("prefill", True),
        ("chunked", False),
        ("decode", True),
        ("prefill+decode", False),
        ("chunked+decode", True),
    ],
)
def test_every_regime_equals_a_full_cache_masked_at_the_same_moments(regime, fused):
    model, own_policy = exact_model(), policy(**(RISK if fused else {}))
    gates = stored(gates_of(model))
    own, budget = life(3, chunk=16 if "chunked" in regime else None), {"keep_ratio": 0.3}
    naive = NaiveQuotas(model, own_policy, budget, regime=regime, every=3, gates=gates)
    want = naive.run(own.chunks, own.mask, own.prompt)
    with retain.attach(model):
        cache = Cache(model, own_policy, regime=regime, every=3, gates=gates, **budget)
        got, held = lived(model, cache, own)
    assert_same_held(held, naive.history)
    assert_same_logits(got, want, own.mask)
    assert differs(got, eviction_free(model, own), own.mask)
    # Heads hold unlike numbers.
    counts = torch.stack([layer.sum(-1) for layer in held[-1]])
    assert int(counts.amax()) > 1.5 * int(counts.amin())


@pytest.mark.parametrize(
    "budget", [{"keep_ratio": 0.3}, {"tokens_per_head": 30}, {"bytes": 128 * 200}, {"bytes_total": 128 * 500}]
)
def test_a_prefill_holds_exactly_what_was_stated_and_each_head_its_quota(budget):
    model = tiny_model("qwen3")
    gates, (ids, mask) = stored(gates_of(model)), tiny_batch((0, 5, 30), 120)
    with retain.attach(model):
        cache = Cache(model, policy(), gates=gates, **budget).prefill(ids, mask)
        batch = [layer.store.lengths_R.view(3, 2).tolist() for layer in cache.layers]
        for b in range(3 if "bytes_total" not in budget else 0):
            alone = Cache(model, policy(), gates=gates, **budget)
            alone.prefill(ids[b : b + 1, mask[b].bool()], mask[b : b + 1, mask[b].bool()])
            assert [layer.store.lengths_R.tolist() for layer in alone.layers] == [own[b] for own in batch]
    totals = spread(Budget(**budget), mask.sum(-1).tolist(), [LayerShape(2, 128)] * 3)
    known = quotas_of(gates.quotas, {spec.layer_idx: 2 for spec in describe(model)})
    for b, (total, length) in enumerate(zip(totals.total_B, totals.lengths_B, strict=True)):
        held = [own for layer in batch for own in layer[b]]
        assert sum(held) == total
        free = total - 3 * 6
        shares = known.shares(Fraction(free, 6 * (length - 3)))
        wanted = [3 + float(free * share) for share in shares]
        # No head is full, and none has less than is protected: nothing but rounding is between.
        assert max(wanted) <= length and min(wanted) >= 3
        assert all(abs(own - want) < 1 for own, want in zip(held, wanted, strict=True))
    assert cache.bytes_held() == sum(totals.total_B) * 128


def test_saved_quotas_are_loaded_and_a_fork_that_evicts_later_keeps_the_same(tmp_path):
    model = tiny_model("qwen3")
    gates, (ids, mask) = stored(gates_of(model)).float(), tiny_batch((0, 4), 80)  # as they are read back
    back = load_gates(save_gates(gates, tmp_path, fingerprint=fingerprint(model)))
    assert back.quotas == gates.quotas
    with retain.attach(model):
        one = Cache(model, policy(**RISK), gates=gates, keep_ratio=0.3).prefill(ids, mask)
        base = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
        two = base.fork().evict(policy(**RISK), gates=back, keep_ratio=0.3)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(a.store.flat(), b.store.flat(), strict=True))


def test_quotas_that_gates_were_not_given_are_missed_when_the_cache_is_made():
    model = tiny_model("qwen3")
    plain = gates_of(model)
    with pytest.raises(
        ValueError, match="policy 'own': allocation.quotas 'calibrated' wants quotas that are"
    ):
        Cache(model, policy(), gates=plain, keep_ratio=0.3)
    other = stored(gates_of(model))
    del other.quotas["parts"]["1"]
    with pytest.raises(ValueError, match="these gates have none for layer 1: calibrate them again"):
        Cache(model, policy(), gates=other, keep_ratio=0.3)
    with pytest.raises(ValueError, match="allocation.quotas would not be read"):
        Cache(model, policy(), gates=stored(gates_of(model)), threshold=0.1)
    with pytest.raises(ValueError, match="head_classes and quotas both"):
        Cache(model, "fused", gates=plain, keep_ratio=0.3, scope="head",
              allocation={"quotas": "calibrated", "head_classes": "heads.tsv"})  # fmt: skip

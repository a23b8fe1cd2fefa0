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
from tests.hf.naive_regimes import Naive
from tests.hf.regime_runs import FEW, agree, assert_same_stores, exact_model, gates_of, life
from tests.tiny import tiny_batch, tiny_model

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


REGIMES = {"prefill": RISK, "chunked": {}, "decode": RISK, "prefill+decode": {}, "chunked+decode": RISK}


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_equals_a_full_cache_masked_at_the_same_moments(regime):
    model, own = exact_model(), life(3, chunk=16 if "chunked" in regime else None)
    gates = stored(gates_of(model))
    given = {"regime": regime, "naive": NaiveQuotas, "gates": gates, "keep_ratio": 0.3}
    held = agree(model, policy(**REGIMES[regime]), own, **given).history
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
    assert_same_stores(one, two)


def test_quotas_that_gates_were_not_given_are_missed_when_the_cache_is_made():
    model = tiny_model("qwen3")
    plain = gates_of(model)
    other = stored(gates_of(model))
    del other.quotas["parts"]["1"]
    both, ratio = {"quotas": "calibrated", "head_classes": "heads.tsv"}, {"keep_ratio": 0.3}
    for name, gates, settings, said in (
        (policy(), plain, ratio, "policy 'own': allocation.quotas 'calibrated' wants quotas that are"),
        (policy(), other, ratio, "these gates have none for layer 1: calibrate them again"),
        (policy(), stored(gates_of(model)), {"threshold": 0.1}, "allocation.quotas would not be read"),
        ("fused", plain, {**ratio, "scope": "head", "allocation": both}, "head_classes and quotas both"),
    ):
        with pytest.raises(ValueError, match=said):
            Cache(model, name, gates=gates, **settings)

"""Refits: against solvers in numpy, and what a cache does with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from retain.correction.refit import Refit, _logits, refit
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.close import assert_close
from tests.correction.test_lives import SETTINGS, run
from tests.hf.masked import full_cache, masked, positions_of
from tests.hf.regime_runs import gates_of
from tests.naive import random_evidence
from tests.tiny import attached, tiny_batch, tiny_model


def solved(evidence, keep, how):
    """Values and weights of each row, by numpy and SciPy's bounded least squares, in float64."""
    B, H, T, _ = evidence.keys_BHTD.shape
    values, weights = [], []
    for b in range(B):
        for h in range(H):
            exists = evidence.exists_BHT[b, h]
            own, kept = exists.nonzero()[:, 0], (keep[b, h] & exists)[exists].numpy()
            heads = range(h * evidence.group, (h + 1) * evidence.group)
            there = [s for s in range(evidence.num_queries) if evidence.asks_BS[b, s]]
            number = min(len(there), max(1, how.queries // evidence.group))
            tokens = np.rint(np.linspace(0, len(there) - 1, number)).astype(int)
            asked = [(there[token], q) for token in tokens for q in heads]
            keys, old = (
                evidence.keys_BHTD[b, h, own].double().numpy(),
                evidence.values_BHTD[b, h, own].double(),
            )
            logits, sinks = [], []
            for s, q in asked:
                logit = keys @ evidence.queries_BQSD[b, q, s].double().numpy() * evidence.scaling
                if evidence.soft_cap is not None:
                    logit = evidence.soft_cap * np.tanh(logit / evidence.soft_cap)
                logits.append(logit)
                sinks.append(np.exp(float(evidence.sinks_Q[q])) if evidence.sinks_Q is not None else 0.0)
            power, sink = np.exp(np.array(logits)), np.array(sinks)[:, None]
            want = power / (power.sum(1, keepdims=True) + sink) @ old.numpy()
            weight = np.ones(kept.sum())
            if how.weights:
                mass = power[:, kept] / power.sum(1, keepdims=True)
                weight = lsq_linear(mass, np.ones(len(mass)), (0, np.inf), method="bvls", tol=1e-14).x
                weight = weight.clip(1e-6)
            held = power[:, kept] * weight
            paid, before = held / (held.sum(1, keepdims=True) + sink), old.numpy()[kept]
            ridge = how.ridge * np.square(paid).sum(0).mean()
            system = np.vstack([paid, np.sqrt(ridge) * np.eye(kept.sum())])
            aims = np.vstack([want, np.sqrt(ridge) * before])
            values.append(torch.tensor(np.linalg.lstsq(system, aims, rcond=None)[0]))
            weights.append(torch.tensor(weight))
    return torch.cat(values), torch.cat(weights)


@pytest.mark.parametrize(
    "options",
    [{}, {"soft_cap": 2.0}, {"sinks_Q": torch.tensor([0.3, -1.0, 2.0, 0.0])}],
    ids=["plain", "soft cap", "sinks"],
)
@pytest.mark.parametrize("how", [Refit(), Refit(1.0, weights=False), Refit(queries=11)], ids=str)
def test_it_is_what_solvers_find(how, options):
    evidence = random_evidence(seed=3, **options)
    keep = torch.rand(evidence.exists_BHT.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    sides = (
        side.flatten(0, 1) for side in (evidence.keys_BHTD, evidence.values_BHTD, evidence.exists_BHT, keep)
    )
    got = refit(*sides, evidence, how)
    values, weights = solved(evidence, keep, how)
    assert_close(got.values_NV, values.float(), ops=1000)
    assert (got.log_weight_N is None) == (not how.weights)
    if how.weights:
        assert_close(got.log_weight_N.exp(), weights.float(), ops=1000)
        assert float(weights.max()) > 1.5


@pytest.mark.parametrize("policy", ["snapkv", "fused"])
def test_a_cache_answers_as_a_masked_one_with_its_values_and_weights(policy):
    """Layer by layer or with one budget for all; and the same where all layers are evicted from at once."""
    model, plain = attached("qwen3"), tiny_model("qwen3")
    ids, mask = tiny_batch((0, 7), 60)
    cache = run(model, policy, correction={"ridge": 0.1})
    assert 0 < cache.bytes_held() <= run(model, policy).bytes_held()
    gates = gates_of(model) if policy == "fused" else None
    later = Cache(model, "recency", keep_ratio=0.5).prefill(ids, mask, evict=False, hold_evidence=True)
    later.evict(policy, correction={"ridge": 0.1}, gates=gates, **SETTINGS)
    for own, other in zip(cache.state.stores, later.state.stores, strict=True):
        assert torch.equal(own.positions_C, other.positions_C)
        assert_close(other.values_CD, own.values_CD, ops=100)
        assert_close(other.log_weight_C, own.log_weight_C, ops=100)
    new = torch.randint(5, 90, (2, 4), generator=torch.Generator().manual_seed(0))
    both = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
    where = {"attention_mask": both, "position_ids": positions_of(both)[:, 60:]}
    keeps, weights = [], []
    dense = full_cache(plain)
    with torch.no_grad():
        plain(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), **{CACHE: dense})
        for layer, store in zip(dense.layers, cache.state.stores, strict=True):
            positions_N, rows_N = store.positions_C[store.index_N()].long(), store.rows_N()
            b, h = rows_N // store.num_heads, rows_N % store.num_heads
            column = positions_N + (mask.shape[1] - mask.sum(1))[b]
            keep = torch.zeros(layer.values.shape[:3], dtype=torch.bool)
            weight = torch.ones(keep.shape)
            keep[b, h, column], weight[b, h, column] = True, store.log_weight_C[store.index_N()].exp()
            layer.values[b, h, column] = store.values_CD[store.index_N()]
            keeps.append(keep)
            weights.append(weight)
        with masked(plain, keeps, both, weights):
            wanted = plain(input_ids=new, **{CACHE: dense}, **where).logits
        got = model(input_ids=new, **{CACHE: cache}, **where).logits
    assert_close(got, wanted, ops=50)


@pytest.mark.parametrize("how", ["chunks", "again", "given"])
def test_a_refit_wants_the_queries_of_the_whole_prompt(how):
    model = attached("qwen3")
    ids, mask = tiny_batch((0, 7), 60)
    with pytest.raises(ValueError, match="a refit asks by the queries of the whole prompt"):
        if how == "again":
            run(model, "snapkv", correction={"ridge": 0.1}, regime="decode", every=3)
        elif how == "chunks":
            Cache(model, "snapkv", correction={"ridge": 0.1}, **SETTINGS).prefill(ids, mask, chunk_size=16)
        else:
            cache = Cache(model, None).prefill(ids, mask, evict=False)
            keep = mask.bool()[:, None].repeat(1, 2, 1)
            keep[:, :, 30] = False
            cache.evict_with([keep] * len(cache.state.specs), correction=Refit())
    if how == "given":
        assert cache.num_seen == 60 and cache.state.ragged[0].store is None


def test_a_ridge_is_a_positive_number():
    with pytest.raises(ValueError, match="ridge"):
        Refit(0.0)


def test_all_heads_of_a_group_ask_all_over_the_prompt():
    """Whatever the number of queries: a few tokens, spread evenly, of every head."""
    for most, tokens in ((7, 3), (16, 8), (1000, 14)):
        evidence = random_evidence(pads=(0,), seed=1, num_heads=1)
        asked = evidence.queries_BQSD.new_zeros(1, 2, 14, 3)
        asked[0, :, :, 0] = torch.arange(14.0)
        asked[0, 1, :, 1] = 1
        marked = replace(evidence, queries_BQSD=asked, scaling=1.0, soft_cap=None)
        logits_NT, _ = _logits(torch.eye(3), marked, 0, 0, most)
        assert logits_NT.shape == (2 * tokens, 3)
        for head in (0, 1):
            own = logits_NT[logits_NT[:, 1] == head][:, 0]
            assert torch.equal(own, torch.linspace(0, 13, tokens).round().double())


@pytest.mark.parametrize("wrong", ["few layers", "few queries"])
def test_evidence_that_does_not_fit_changes_nothing(wrong):
    model = attached("qwen3")
    ids, mask = tiny_batch((0, 7), 60)
    cache = Cache(model, None).prefill(ids, mask, evict=False, hold_evidence=True)
    evidence = list(cache.evidence)
    if wrong == "few layers":
        evidence = evidence[:1]
    else:
        evidence[2] = replace(evidence[2], queries_BQSD=evidence[2].queries_BQSD[:, :, -8:])
    keep = mask.bool()[:, None].repeat(1, 2, 1)
    keep[:, :, 30] = False
    with pytest.raises(ValueError, match="a refit asks by the queries of the whole prompt"):
        cache.evict_with([keep] * 3, correction=Refit(), evidence=evidence)
    assert cache.num_seen == 60 and all(layer.store is None for layer in cache.state.ragged)
    cache.evict_with([keep] * 3, correction=Refit())

"""Each score of an observation window against its formula, by loops in float64; then pools and norms."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from retain.scores import (
    cake,
    critical,
    defensive,
    lava,
    observed_risk,
    snapkv,
    tova,
    vatp,
)
from retain.scores.window import pool_entries
from tests.close import assert_close
from tests.naive import (
    SHAPED,
    assert_heads_close,
    existing,
    mean,
    naive_attention,
    naive_norm,
    naive_pool,
    naive_pooled,
    naive_scores,
    naive_value,
    query_heads,
    random_evidence,
    shaped_evidence,
)

shaped = pytest.mark.parametrize(("shape", "layer"), SHAPED)
pooled = pytest.mark.parametrize(("pool", "pool_size"), [("avg", 5), ("max", 7), (None, 5)])


def variance(numbers):
    return sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)


@shaped
@pooled
def test_snapkv(pool, pool_size, shape, layer):
    evidence, window = shaped_evidence(shape, layer)
    score = snapkv(evidence, window=window, pool=pool, pool_size=pool_size)
    assert (score.window, score.first_BHT) == (window, None)
    assert_heads_close(score.values_BHT, naive_pooled(evidence, window, pool, pool_size))


@shaped
@pooled
@pytest.mark.parametrize("gamma", [{"gamma": 0.0}, {}])
def test_cake(shape, layer, pool, pool_size, gamma):
    evidence, window = shaped_evidence(shape, layer)
    score = cake(evidence, window=window, pool=pool, pool_size=pool_size, **gamma)
    assert score.window == window
    weight = gamma.get("gamma", 200.0)
    naive = naive_pooled(
        *(evidence, window, pool, pool_size),
        of=lambda paid: mean(paid) + weight * variance(paid),
    )
    # The variance is a difference of numbers of the size of the mean: it rounds a few times over.
    assert_heads_close(score.values_BHT, naive, ops=4)


def naive_layer_weight(evidence, window, *, tau1=1.6, tau2=0.6):
    attention = naive_attention(evidence)[:, :, -window:].tolist()
    weight = torch.zeros(len(attention), dtype=torch.float64)
    for b, heads in enumerate(attention):
        dispersion = shift = 0.0
        for i in existing(evidence, b):
            if i < evidence.num_seen - window:
                rows = [[paid[i] for paid in head] for head in heads]
                dispersion -= sum(a * math.log(a + 1e-10) for row in rows for a in row)
                shift += sum(map(variance, rows))
        weight[b] = dispersion ** (1 / tau1) * shift ** (1 / tau2)
    return weight


@shaped
@pytest.mark.parametrize("taus", [{}, {"tau1": 1.0, "tau2": 2.0}])
def test_the_layer_weight_of_cake(shape, layer, taus):
    evidence, window = shaped_evidence(shape, layer)
    weight = cake(evidence, window=window, **taus).layer_weight_B
    assert weight.dtype == torch.float64
    # One at a time, since their sizes differ; a sequence that is all window prefers nothing.
    for one, naive in zip(weight, naive_layer_weight(evidence, window, **taus), strict=True):
        assert_close(one, naive, dtype=torch.float32, ops=4)
    if shape == "wide":
        assert (weight > 0).tolist() == [True, True, False] and float(weight[2]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_on_one_entry_is_not_spread_and_does_not_shift(dtype):
    """In float64 the logarithm of 1 + 1e-10 is above zero, and the dispersion would be below."""
    evidence = random_evidence(pads=(0,), dtype=dtype)
    keys = torch.zeros_like(evidence.keys_BHTD)
    keys[:, :, 2] = 1e4
    evidence = replace(evidence, keys_BHTD=keys, queries_BQSD=torch.ones_like(evidence.queries_BQSD))
    assert cake(evidence, window=6).layer_weight_B.tolist() == [0.0]


@shaped
@pooled
@pytest.mark.parametrize("eps", [{}, {"eps": 0.01}])
def test_critical(shape, layer, pool, pool_size, eps):
    evidence, window = shaped_evidence(shape, layer)
    score = critical(evidence, window=window, pool=pool, pool_size=pool_size, **eps)
    assert score.window == window
    mass, granted = naive_pooled(evidence, window, pool, pool_size), eps.get("eps", 1e-4)

    def number(b, h, i):
        norms = [naive_norm(evidence, b, q, i) for q in query_heads(evidence, h)]
        return (float(mass[b, h, i]) + granted) * mean(norms)

    assert_heads_close(score.values_BHT, naive_scores(evidence, number))
    assert_heads_close(score.first_BHT, mass)


def naive_defensive(evidence, window, *, pool="avg", pool_size=5, norm="raw"):
    attention = naive_attention(evidence)[:, :, -window:]
    split = evidence.num_seen - window

    @cache
    def size(b, h, i):
        return mean([naive_norm(evidence, b, q, i) for q in query_heads(evidence, h)])

    def divisor(b, h, i, before):
        return {
            "raw": lambda: 1.0,
            "head_share": lambda: sum(size(b, k, i) for k in range(evidence.num_heads)),
            "token_sum": lambda: sum(size(b, h, k) for k in before) or 1.0,
        }[norm]()

    @cache
    def worst(b, h):
        """Risk of each entry before the floor."""
        entries = existing(evidence, b)
        before, paid = [i for i in entries if i < split], {i: [] for i in entries}
        for q, j in itertools.product(query_heads(evidence, h), range(window)):
            row = attention[b, q, j]
            spread = naive_pool(row, pool, pool_size, split)
            for part in (before, [i for i in entries if i >= split]):
                mass, left = sum(float(row[i]) for i in part), sum(float(spread[i]) for i in part)
                for i in part:
                    paid[i].append(float(spread[i]) * (mass / left if left else 0.0))
        return {i: max(numbers) for i, numbers in paid.items()}, before

    def value(b, h, i):
        risk, before = worst(b, h)
        lifted = max(risk[i], sum(risk[k] for k in before) / max(1, len(before)))
        return lifted * size(b, h, i) / divisor(b, h, i, before)

    def first(b, h, i):
        return attention[b, query_heads(evidence, h), :, i].mean().item()

    return naive_scores(evidence, value), naive_scores(evidence, first)


@pytest.mark.parametrize("norm", ["raw", "head_share", "token_sum"])
@pytest.mark.parametrize(("pool", "pool_size"), [(None, 3), ("avg", 5), ("max", 3)])
@shaped
def test_defensive(shape, layer, norm, pool, pool_size):
    evidence, window = shaped_evidence(shape, layer)
    chosen = {"norm": norm, "pool": pool, "pool_size": pool_size}
    score = defensive(evidence, window=window, **chosen)
    values, first = naive_defensive(evidence, window, **chosen)
    assert score.window == window
    assert_heads_close(score.values_BHT, values)
    assert_heads_close(score.first_BHT, first)


@shaped
@pytest.mark.parametrize("over", ["prefix", "all"])
@pooled
def test_lava(shape, layer, over, pool, pool_size):
    evidence, window = shaped_evidence(shape, layer)
    score = lava(evidence, window=window, pool=pool, pool_size=pool_size, value_max_over=over)
    assert (score.window, score.layer_weight_B) == (window, None)
    mass = naive_pooled(evidence, window, pool, pool_size, group=max)

    def number(b, h, i):
        entries = existing(evidence, b)
        before = [k for k in entries if k < evidence.num_seen - window]
        counted = entries if over == "all" or not before else before
        return float(mass[b, h, i]) * max(naive_value(evidence, b, h, k) for k in counted)

    assert_heads_close(score.values_BHT, naive_scores(evidence, number))


def naive_observed_risk(evidence, window):
    paid = naive_attention(evidence)[:, :, -window:].tolist()

    def number(b, h, i):
        heads = query_heads(evidence, h)
        return max(naive_norm(evidence, b, q, i) * max(row[i] for row in paid[b][q]) for q in heads)

    return naive_scores(evidence, number)


@shaped
def test_observed_risk(shape, layer):
    evidence, window = shaped_evidence(shape, layer)
    score = observed_risk(evidence, window=window)
    assert score.window == window
    assert_heads_close(score.values_BHT, naive_observed_risk(evidence, window))


@shaped
def test_vatp_of_a_window(shape, layer):
    evidence, window = shaped_evidence(shape, layer)
    score = vatp(evidence, window=window)
    assert score.window == window
    mass = naive_pooled(evidence, window, None, 1)
    naive = naive_scores(evidence, lambda b, h, i: float(mass[b, h, i]) * naive_value(evidence, b, h, i))
    assert_heads_close(score.values_BHT, naive)


@shaped
def test_tova(shape, layer):
    evidence, _ = shaped_evidence(shape, layer, num_queries=3)
    last = naive_attention(evidence)[:, :, -1]
    score = tova(evidence)
    assert score.window == 1
    assert_heads_close(score.values_BHT, naive_scores(evidence, lambda b, h, i: mean(last[b, :, i].tolist())))


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(
    ("size", "window"), [(1, 4), (3, 4), (5, 4), (7, 4), (7, 2), (5, 1), (5, 14), (5, 0)]
)
def test_pooling_with_the_window_apart(kind, size, window):
    values = torch.rand(2, 3, 14)
    rows = [naive_pool(row.double(), kind, size, 14 - window) for row in values.flatten(0, 1)]
    assert_heads_close(pool_entries(values, kind, size, window=window), torch.stack(rows).view(2, 3, 14))
    assert pool_entries(values, None, size, window=window) is values

"""Scores of an observation window against their formulas in float64, of attention made entry by entry; then
pools."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain.evidence import Evidence
from retain.scores import SCORES, cake
from retain.scores.window import pool_entries
from tests.close import assert_close
from tests.naive import (
    SHAPED,
    assert_heads_close,
    masked,
    naive_attention,
    naive_pool,
    random_evidence,
    shaped_evidence,
)

shaped = pytest.mark.parametrize(("shape", "layer"), SHAPED)


class Plain:
    """Parts of formulas, `[B, H, G, ...]`: attention of the window's queries, norms, lengths of values."""

    def __init__(self, evidence: Evidence, window: int):
        self.split, self.exists = evidence.num_seen - window, evidence.exists_BHT
        self.heads = evidence.num_heads
        self.paid = naive_attention(evidence)[:, :, -window:].unflatten(1, (self.heads, -1))
        values, weight = evidence.values_BHTD.double(), evidence.output_weight_QDE.double()
        written = torch.einsum("bhtd,hgde->bhgte", values, weight.unflatten(0, (self.heads, -1)))
        self.norm, self.size = written.abs().sum(-1), values.abs().sum(-1)

    def pool(self, rows: Tensor, pool: str | None, size: int) -> Tensor:
        flat = [naive_pool(row, pool, size, self.split) for row in rows.flatten(0, -2)]
        return torch.stack(flat).view(rows.shape)

    def mass(self, pool: str | None = "avg", pool_size: int = 5) -> Tensor:
        return self.pool(self.paid.mean(3), pool, pool_size)


def naive_cake(plain: Plain, gamma=200.0, pool="avg", pool_size=5):
    return plain.pool(plain.paid.mean(3) + gamma * plain.paid.var(3), pool, pool_size).mean(2), None


def naive_critical(plain: Plain, eps=1e-4, **pool):
    mass = plain.mass(**pool).mean(2)
    return (mass + eps) * plain.norm.mean(2), mass


def naive_defensive(plain: Plain, pool="avg", pool_size=5, norm="raw"):
    spread = plain.pool(plain.paid, pool, pool_size)
    exists = plain.exists[:, :, None, None]
    before = exists & (torch.arange(exists.shape[-1]) < plain.split)
    for part in (before, exists & ~before):  # each keeps its mass
        mass, left = ((rows * part).sum(-1, keepdim=True) for rows in (plain.paid, spread))
        spread = torch.where(part, spread * torch.where(left > 0, mass / left, 0.0), spread)
    worst, before = spread.amax((2, 3)), before[:, :, 0, 0]
    floor = (worst * before).sum(-1, keepdim=True) / before.sum(-1, keepdim=True).clamp_min(1)
    size = plain.norm.mean(2)
    total = {
        "raw": torch.ones(1, 1, 1),
        "head_share": (size * plain.exists).sum(1, keepdim=True),
        "token_sum": (size * before).sum(-1, keepdim=True),
    }[norm]
    return torch.maximum(worst, floor) * size / torch.where(total > 0, total, 1.0), plain.paid.mean((2, 3))


def naive_lava(plain: Plain, value_max_over="prefix", **pool):
    counted = plain.exists & (torch.arange(plain.exists.shape[-1]) < plain.split)
    if value_max_over == "all":
        counted = plain.exists
    counted = torch.where(counted.any(-1, keepdim=True), counted, plain.exists)
    largest = (plain.size * counted).amax(-1, keepdim=True)
    return plain.mass(**{"pool": "max", "pool_size": 7, **pool}).amax(2) * largest, None


POOLS = [{}, {"pool": "max", "pool_size": 7}, {"pool": None}]
FORMULAS = {
    "snapkv": (lambda plain, **pool: (plain.mass(**pool).mean(2), None), POOLS),
    "cake": (naive_cake, [*POOLS, {"gamma": 0.0}]),
    "critical": (naive_critical, [*POOLS, {"eps": 0.01}]),
    "defensive": (
        naive_defensive,
        [{"norm": norm, **pool} for norm in ("raw", "head_share", "token_sum") for pool in POOLS],
    ),
    "lava": (naive_lava, [{"value_max_over": over, **pool} for over in ("prefix", "all") for pool in POOLS]),
    "observed_risk": (lambda plain: ((plain.paid.amax(3) * plain.norm).amax(2), None), [{}]),
    "vatp": (lambda plain: (plain.mass(None).mean(2) * plain.size, None), [{}]),
    "tova": (lambda plain: (plain.paid[:, :, :, -1].mean((1, 2))[:, None].expand_as(plain.size), None), [{}]),
}


@shaped
def test_scores_of_a_window_are_their_formulas(shape, layer):
    """All in one test: of a grid the default tier would run a dozen."""
    evidence, window = shaped_evidence(shape, layer)
    plain = Plain(evidence, window)
    for name, settings in [(name, each) for name, (_, variants) in FORMULAS.items() for each in variants]:
        given = {} if name == "tova" else {"window": window}
        score = SCORES[name].function(evidence, **given, **settings)
        assert score.window == given.get("window", 1)
        values, first = FORMULAS[name][0](plain, **settings)
        # A variance is a difference of numbers of the size of the mean: it rounds a few times over.
        assert_heads_close(score.values_BHT, masked(values, evidence), ops=4 if name == "cake" else 1)
        assert (score.first_BHT is None) == (first is None)
        if first is not None:
            assert_heads_close(score.first_BHT, masked(first, evidence))


@shaped
@pytest.mark.parametrize("taus", [{}, {"tau1": 1.0, "tau2": 2.0}])
def test_the_layer_weight_of_cake(shape, layer, taus):
    evidence, window = shaped_evidence(shape, layer)
    weight = cake(evidence, window=window, **taus).layer_weight_B
    assert weight.dtype == torch.float64
    paid, valid = naive_attention(evidence)[:, :, -window:], evidence.valid_BT
    before = valid & (torch.arange(valid.shape[1]) < evidence.num_seen - window)
    dispersion = -((paid * (paid + 1e-10).log()).sum((1, 2)) * before).sum(-1).clamp_max(0.0)
    shift = (paid.var(2).sum(1) * before).sum(-1)
    naive = dispersion ** (1 / taus.get("tau1", 1.6)) * shift ** (1 / taus.get("tau2", 0.6))
    # One at a time, since their sizes differ; a sequence that is all window prefers nothing.
    for one, wanted in zip(weight, naive, strict=True):
        assert_close(one, wanted, dtype=torch.float32, ops=4)
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


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(
    ("size", "window"), [(1, 4), (3, 4), (5, 4), (7, 4), (7, 2), (5, 1), (5, 14), (5, 0), (31, 4)]
)
def test_pooling_with_the_window_apart(kind, size, window):
    values = torch.rand(2, 3, 14)
    rows = [naive_pool(row.double(), kind, size, 14 - window) for row in values.flatten(0, 1)]
    assert_heads_close(pool_entries(values, kind, size, window=window), torch.stack(rows).view(2, 3, 14))
    assert pool_entries(values, None, size, window=window) is values

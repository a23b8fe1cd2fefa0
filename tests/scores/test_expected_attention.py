import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from retain.attention.rotary import Rotary
from retain.scores import expected_attention
from retain.scores.expected_attention import quadratic
from tests.close import MODEL
from tests.naive import assert_heads_close, existing, random_evidence, special_layer

# The name of the module is that of its score.
expected_attention_module = sys.modules[quadratic.__module__]
FREQUENCIES = torch.tensor([0.9, 0.05])
SCALING = 1.1


def _evidence(**settings):
    """Head width 5 of which 4 turn; positions that do not begin at 0."""
    settings = {"pads": (0, 4), "head_width": 5, "sharp": 0.8, **settings}
    evidence = random_evidence(**settings)
    return replace(evidence, rotary=Rotary(FREQUENCIES, SCALING), positions_BT=evidence.positions_BT + 3)


def _rotation(position, width):
    """The rotation at a position as a matrix, float64 (angles in float32, as tables are defined)."""
    F = len(FREQUENCIES)
    matrix = torch.eye(width, dtype=torch.float64)
    for f in range(F):
        angle = float(torch.tensor(float(position)) * FREQUENCIES[f])
        matrix[f, f] = matrix[f + F, f + F] = SCALING * math.cos(angle)
        matrix[f, f + F], matrix[f + F, f] = -SCALING * math.sin(angle), SCALING * math.sin(angle)
    return matrix


def _naive(evidence, *, future, sinks, value_norm):
    (B, H, T, D), S, G = evidence.keys_BHTD.shape, evidence.num_queries, evidence.group
    naive = torch.full((B, H, T), float("-inf"), dtype=torch.float64)
    for b, h in itertools.product(range(B), range(H)):
        keys, values = evidence.keys_BHTD[b, h].double(), evidence.values_BHTD[b, h].double()
        places, entries = evidence.positions_BT[b].tolist(), existing(evidence, b)
        after, total = entries[sinks:], torch.zeros(T, dtype=torch.float64)
        held = [i for i in after if i >= T - S]
        back = [torch.linalg.inv(_rotation(places[i], D)) for i in held]
        R = sum(_rotation(places[entries[-1]] + ahead, D) for ahead in range(1, future + 1)) / future
        for q in range(h * G, (h + 1) * G):
            asked = evidence.queries_BQSD[b, q, [i - (T - S) for i in held]].double()
            queries = torch.stack([x @ query for x, query in zip(back, asked, strict=True)])
            centred = queries - queries.mean(0)
            mean, cov = R @ queries.mean(0), R @ (centred.T @ centred / len(held)) @ R.T
            z = evidence.scaling * keys @ mean + evidence.scaling**2 / 2 * ((keys @ cov) * keys).sum(-1)
            if evidence.log_weight_BHT is not None:
                z += evidence.log_weight_BHT[b, h]
            sink = 0.0 if evidence.sinks_Q is None else evidence.sinks_Q[q].double().exp()
            written = values if value_norm == "plain" else values @ evidence.output_weight_QDE[q].double()
            a = z[after].exp() / (z[after].exp().sum() + sink)
            total[after] += a * written[after].norm(dim=-1) / G
        naive[b, h, after], naive[b, h, entries[:sinks]] = total[after], total.max()
    return naive


SETTINGS = {"future": 7, "sinks": 3, "value_norm": "plain"}


def assert_formula(evidence, **changes):
    settings = {**SETTINGS, **changes}
    score = expected_attention(evidence, **settings).values_BHT
    assert score.dtype == torch.float32
    assert_heads_close(score, _naive(evidence, **settings), ops=MODEL)
    return score


@pytest.mark.parametrize("value_norm", ["plain", "output"])
@pytest.mark.parametrize("layer", [None, "sinks"])
def test_expected_attention_is_its_formula(value_norm, layer):
    evidence = special_layer(_evidence(), layer)
    score = assert_formula(evidence, value_norm=value_norm)
    weights = torch.rand(evidence.exists_BHT.shape, generator=torch.Generator().manual_seed(1)) * 3
    added = assert_formula(replace(evidence, log_weight_BHT=weights), value_norm=value_norm)
    assert not torch.equal(added, score)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        *(
            ({"pads": (0, 4, 9), "num_tokens": 17, "group": group}, {"future": future, "sinks": sinks})
            for group in (1, 4, 8)
            for future, sinks in ((1, 0), (40, 4))
        ),
        *(({"num_queries": count}, {}) for count in (1, 6, 13)),
        *(({"dtype": dtype}, {}) for dtype in (torch.bfloat16, torch.float64)),
    ],
    ids=str,
)
def test_expected_attention_over_shapes(shape, changes):
    assert_formula(_evidence(**shape), **changes)


def test_quadratic_however_it_is_chunked(monkeypatch):
    rows, forms = torch.randn(2, 2, 7, 3).double(), torch.randn(2, 2, 4, 3, 3).double()
    want = torch.einsum("bhtd,bhgde,bhte->bhgt", rows, forms, rows)
    for floats in (1, 100, 2**20):
        monkeypatch.setattr(expected_attention_module, "FLOATS_AT_ONCE", floats)
        assert_heads_close(quadratic(rows, forms), want)


def test_what_it_cannot_do_is_refused():
    evidence = _evidence()
    with pytest.raises(ValueError, match=r"layer 3 caps them at 30.0 \(soft_cap\): use .* such as snapkv"):
        expected_attention(replace(evidence, soft_cap=30.0))
    with pytest.raises(
        ValueError,
        match=r"sequence 1 of 2 has 10 tokens, .* last 14 .* first 10 are left out as sinks.*fewer sinks",
    ):
        expected_attention(evidence, sinks=10)
